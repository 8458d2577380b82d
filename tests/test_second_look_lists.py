"""The second look under masks of any kind: long lists are shared out, ties overflow their lists, heads are wide."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import MARKS
from on_gpu import first_of_the_largest

import clearhead as ch
from clearhead.core.grid import Grid
from clearhead.kernels.gpu.masks import prepare

pytestmark = MARKS

T, S = 40, 72
MASKS = {
    "Longformer": ch.window(9, 3, align="start") | ch.global_tokens([0, 50]),
    "blocks": ch.blocks(np.arange(3 * 5).reshape(3, 5) % 3 == 0, 16),
    "documents": ch.documents(np.arange(S) // 9 % 3, np.arange(T) // 7 % 3),
}


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=12), most=st.integers(1, 5)
)
def test_tiles_that_are_shared_out_are_the_same_tiles(counts: list[tuple[int, int]], most: int) -> None:
    from clearhead.kernels.hopper import tile_runs

    mixed, full = np.array(counts).T
    count = mixed + full
    start, bits = np.cumsum(count) - count, 2 + np.cumsum(mixed) - mixed
    row = np.arange(len(count))
    table = np.stack([row * 128, row % 3, row % 2 - 1, start, mixed, count, bits, 0 * row], -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_runs, "LONG", most / 2)
        cut, added = tile_runs.shared_out(table)
    limit = max(1, math.ceil(most / 2 * count.mean()))
    assert cut[:, 5].max() <= limit
    places = {}
    for block in table:
        mine = cut[cut[:, 0] == block[0]]
        assert (mine[:, 1:3] == block[1:3]).all()
        assert mine[0, 7] == 0  # the first writes, and what the others put aside is added in order
        tiles = [(n, n - a[3] < a[4]) for a in mine for n in range(a[3], a[3] + a[5])]
        assert tiles == [(n, n - block[3] < block[4]) for n in range(block[3], block[3] + block[5])]
        for a in mine[mine[:, 4] > 0]:
            assert a[6] - block[6] == a[3] - block[3]  # the bits of its first mixed tile
        places[int(block[0])] = (mine[1:, 7] - 1).tolist()
    for a in added:
        assert places.pop(int(a[0])) == list(range(a[3], a[3] + a[4]))
    assert not any(places.values())
    assert int(added[:, 4].sum()) == (cut[:, 7] > 0).sum() == cut[:, 7].max()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_ties_that_overflow_the_list(name: str, head_dim: int, interpreting: None) -> None:
    from clearhead.kernels.hopper.top_kernel import HELD, search

    torch.manual_seed(3)
    top, scale, factor = 5, head_dim**-0.5, head_dim**-0.5 * math.log2(math.e)
    q, k, v = (torch.randn(1, 2, n, head_dim).half() for n in (T, S, S))
    k[:, :, 1:] = k[:, :, 5:6]  # all keys but the first are alike
    mask = MASKS[name]
    right = ch.observe(q.double(), k.double(), v.double(), mask=mask, kernel="dense", top=top, weights=True)
    prepared = prepare(mask, Grid((1,), 2, T, S), q.device)
    total = torch.exp(right.lse - right.max_score).float()
    peak = right.max_score.float()
    counts = torch.full((1, 2, T), HELD + 1, dtype=torch.int32)
    counts[..., 7] = HELD  # whose list did not overflow, and is left as it is
    weights, indices = torch.full((1, 2, T, top), -3.0), torch.full((1, 2, T, top), -3)
    count = 2 * -(-T // 64)
    search[(3,)](
        q, k, counts, peak, total, weights, indices, *q.stride()[:3], *k.stride()[:3], T, S, -(-count // 3), count, 2,
        1, 0, 0, prepared.arrays, scale, 1.0, factor,
        TOP=top, K=8, HEAD_DIM=head_dim, UPPER=False, LOWER=False, PROGRAM=prepared.program, SOFTCAP=False, HELD=HELD,
        BM=64, BN=64, N=1024, AFTER=False,
    )  # fmt: skip
    assert (weights[:, :, 7] == -3).all()
    assert (indices[:, :, 7] == -3).all()
    others = torch.arange(T) != 7
    torch.testing.assert_close(weights[:, :, others].double(), right.top.weights[:, :, others], rtol=2e-3, atol=1e-6)
    assert torch.equal(indices[:, :, others], first_of_the_largest(right.weights, top)[:, :, others])


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("name", ["Longformer", "blocks"])
def test_wide_heads_under_masks(name: str, head_dim: int, interpreting: None) -> None:
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 2, n, head_dim) for n in (T, S, S))
    found, right = (
        ch.observe(q, k, v, mask=MASKS[name], kernel=kernel, top=4, received=True) for kernel in ("triton", "dense")
    )
    torch.testing.assert_close(found.received, right.received)
    torch.testing.assert_close(found.top.weights, right.top.weights)
    assert torch.equal(found.top.indices, right.top.indices)
