"""The second look under masks of any kind: long lists are shared out, ties overflow their lists, heads are wide."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from clearhead.kernels.hopper.schedule import KeyRanges

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


def searched(
    q: torch.Tensor, k: torch.Tensor, mask: ch.Mask, counts: torch.Tensor, top: int, ranges: KeyRanges | None = None
) -> tuple[ch.Observed[torch.Tensor], torch.Tensor, torch.Tensor]:
    """What is right, and the largest weights and their keys where a list was too short; else −3."""
    from clearhead.kernels.hopper.second_look import edges_of
    from clearhead.kernels.hopper.top_kernel import HELD, search

    queries, keys, head_dim = q.shape[2], k.shape[2], q.shape[3]
    scale, factor = head_dim**-0.5, head_dim**-0.5 * math.log2(math.e)
    right = ch.observe(q.double(), k.double(), k.double(), mask=mask, kernel="dense", top=top, weights=True)
    prepared = prepare(mask, Grid((len(q),), 2, queries, keys), q.device)
    total = torch.exp(right.lse - right.max_score).float()
    weights, indices = (torch.full((*q.shape[:3], top), -3, dtype=kind) for kind in (torch.float32, torch.int64))
    count = 2 * len(q) * -(-queries // 64)
    span = None if prepared.program else prepared.span
    upper, lower = (0, 0) if span is None else (span.high, span.low)
    search[(3,)](
        q, k, counts, right.max_score.float(), total, weights, indices, *q.stride()[:3], *k.stride()[:3],
        queries, keys, -(-count // 3), count, 2, 1, upper, lower, prepared.arrays, edges_of(ranges, queries),
        scale, 1.0, factor,
        TOP=top, K=8, HEAD_DIM=head_dim, UPPER=span is not None, LOWER=span is not None, PROGRAM=prepared.program,
        SOFTCAP=False, HELD=HELD, BM=64, BN=64, N=1024, AFTER=False, RUNS=ranges is not None,
    )  # fmt: skip
    return right, weights, indices


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_ties_that_overflow_the_list(name: str, head_dim: int, interpreting: None) -> None:
    from clearhead.kernels.hopper.top_kernel import HELD

    torch.manual_seed(3)
    top = 5
    q, k = (torch.randn(1, 2, n, head_dim).half() for n in (T, S))
    k[:, :, 1:] = k[:, :, 5:6]  # all keys but the first are alike
    counts = torch.full((1, 2, T), HELD + 1, dtype=torch.int32)
    counts[..., 7] = HELD  # whose list did not overflow, and is left as it is
    right, weights, indices = searched(q, k, MASKS[name], counts, top)
    assert (weights[:, :, 7] == -3).all()
    assert (indices[:, :, 7] == -3).all()
    others = torch.arange(T) != 7
    torch.testing.assert_close(weights[:, :, others].double(), right.top.weights[:, :, others], rtol=2e-3, atol=1e-6)
    assert torch.equal(indices[:, :, others], first_of_the_largest(right.weights, top)[:, :, others])


@pytest.mark.parametrize("mask", [ch.causal(), ch.window(70, 20)], ids=str)
def test_a_list_that_is_too_short_is_searched_between_the_ends_of_a_window(mask: ch.Mask, interpreting: None) -> None:
    from clearhead.kernels.hopper.top_kernel import HELD

    torch.manual_seed(6)
    q, k = (torch.randn(1, 2, n, 64).half() for n in (300, 420))
    counts = torch.full((1, 2, 300), HELD + 1, dtype=torch.int32)
    right, weights, indices = searched(q, k, mask, counts, 5)
    torch.testing.assert_close(weights.double(), right.top.weights, rtol=2e-3, atol=1e-6)
    assert torch.equal(indices, right.top.indices)


@pytest.mark.parametrize("rows", [1, 2], ids="{} batch rows".format)
def test_a_list_that_is_too_short_is_searched_in_the_run_of_keys_that_is_seen(rows: int, interpreting: None) -> None:
    from clearhead.kernels.hopper.schedule import key_ranges_of
    from clearhead.kernels.hopper.top_kernel import HELD

    torch.manual_seed(5)
    queries, keys, top = 150, 400, 5
    starts = np.stack([10 + np.arange(queries) * (1 + row) for row in range(rows)])
    stops = np.minimum(starts + 100, 390)
    starts[-1, 130:], stops[-1, 130:] = 0, 0  # which see nothing
    place = np.arange(keys)
    seen = (place >= starts[..., None]) & (place < stops[..., None])
    q, k = (torch.randn(rows, 2, n, 64).half() for n in (queries, keys))
    counts = torch.where(torch.arange(queries) % 3 == 1, HELD, HELD + 1).int().expand(rows, 2, queries).contiguous()
    mask = ch.where(seen[:, None])
    ranges = key_ranges_of(starts, stops, keys, 64, q.device)
    assert ranges.start > 0
    right, weights, indices = searched(q, k, mask, counts, top, ranges)
    many = counts[0, 0] > HELD
    torch.testing.assert_close(weights[:, :, many].double(), right.top.weights[:, :, many], rtol=2e-3, atol=1e-6)
    assert torch.equal(indices[:, :, many], right.top.indices[:, :, many])
    assert (weights[:, :, ~many] == -3).all()
    # and nowhere else: where runs are said to end before, nothing behind is found
    short = key_ranges_of(starts, np.minimum(stops, 128), keys, 64, q.device)
    _, _, nearer = searched(q, k, mask, counts, top, short)
    assert nearer[:, :, many].max() < 128 < indices[:, :, many].max()


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
