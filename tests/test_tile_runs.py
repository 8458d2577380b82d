"""Any mask as Hopper's kernels read it: the table, the lists of tiles and the bits, put together again."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import MARKS

import clearhead as ch
from clearhead.core.grid import Grid

pytestmark = MARKS
BATCH, HEADS, QUERIES, KEYS = 2, 3, 300, 270
RNG = np.random.default_rng(0)
MASKS: dict[str, ch.Mask] = {
    "Longformer": ch.window(40, 9) | ch.global_tokens([0, 130]),
    "BigBird": ch.window(20, 20) | ch.global_tokens([5]) | ch.random_blocks(32, count=1, seed=0),
    "lengths by row": (ch.lengths([100, 0]) & ch.causal()) | ch.global_tokens([3]),
    "array": ch.where(torch.from_numpy(RNG.random((QUERIES, KEYS)) < 0.2)),
    "array by head": ch.where(torch.from_numpy(RNG.random((HEADS, QUERIES, KEYS)) < 0.01)),
    "array by row": ch.where(torch.from_numpy(RNG.random((BATCH, 1, QUERIES, KEYS)) < 0.5)),
    "negated": ~(ch.window(30, 30) | ch.global_tokens([2])),
    "nothing": ch.where(torch.zeros(QUERIES, KEYS, dtype=torch.bool)),
    "everything": ch.where(torch.ones(QUERIES, KEYS, dtype=torch.bool)),
}


def put_together(runs: Any, down: int, across: int, shape: tuple[int, ...]) -> np.ndarray:
    """(batch, heads, down, across) of pairs that are allowed, from what a kernel would read."""
    found = np.zeros((*shape[:2], shape[2] + down, shape[3] + across), bool)
    words = runs.bits.numpy().view(np.uint32)
    column = np.arange(across)
    word, bit = column % 8 // 2, (column // 8 * 2 + column % 2).astype(np.uint32)
    before = None
    for first, batch, head, start, mixed, count, place, _ in runs.table.numpy():
        assert before is None or count <= before, "the longest come first"
        before = count
        for n in range(count):
            tile = int(runs.tiles[start + n])
            here = np.ones((down, across), bool)
            if n < mixed:
                here = (words[place + n][:, word] >> bit & 1).astype(bool)
            rows = slice(None) if batch < 0 else batch
            heads = slice(None) if head < 0 else head
            found[rows, heads, first : first + down, tile * across : (tile + 1) * across] |= here
    return found[..., : shape[2], : shape[3]]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_what_kernels_read_is_the_mask(name: str, turned: bool) -> None:
    masks = importlib.import_module("clearhead.kernels.gpu.masks")
    tile_runs = importlib.import_module("clearhead.kernels.hopper.tile_runs")
    mask, grid = MASKS[name], Grid((BATCH,), HEADS, QUERIES, KEYS)
    want = np.broadcast_to(mask.dense(QUERIES, KEYS, batch=(BATCH,), heads=HEADS), (BATCH, HEADS, QUERIES, KEYS))
    prepared = masks.prepare(mask, grid, torch.device("cpu"))
    if turned:
        runs = tile_runs.backward_runs(prepared, mask, grid, 128, 64, BATCH * HEADS)
        want, down, across = want.swapaxes(-1, -2), 128, 64
    else:
        runs = tile_runs.forward_runs(prepared, mask, grid, 64, BATCH * HEADS)
        down, across = runs.config.rows * runs.config.consumers, runs.config.columns
    assert len(runs.table) * runs.each == BATCH * HEADS * -(-want.shape[2] // down)
    found = put_together(runs, down, across, want.shape)
    np.testing.assert_array_equal(found, want)
    unseen = ~want.any(-1)
    if runs.unseen is None:
        assert not unseen.any()
    else:
        np.testing.assert_array_equal(np.broadcast_to(runs.unseen.numpy()[..., 0], unseen.shape), unseen)


@pytest.mark.parametrize("name", MASKS)
def test_coarse_lists_hold_each_pair_once(name: str) -> None:
    masks = importlib.import_module("clearhead.kernels.gpu.masks")
    tile_runs = importlib.import_module("clearhead.kernels.hopper.tile_runs")
    mask, grid = MASKS[name], Grid((BATCH,), HEADS, QUERIES, KEYS)
    want = np.broadcast_to(mask.dense(QUERIES, KEYS, batch=(BATCH,), heads=HEADS), (BATCH, HEADS, QUERIES, KEYS))
    prepared = masks.prepare(mask, grid, torch.device("cpu"))
    tile_runs.on_host(prepared, mask, grid, 128, 64)
    lists = masks.tiles(prepared, mask, grid, 32, 32, coarse=True)
    assert lists.down == (-(-QUERIES // 32) if prepared.reads else -(-QUERIES // 128) * 4), "of what is known, if it is"
    counts, blocks = lists.counts.reshape(-1, 3), -(-QUERIES // 32)
    for batch in range(BATCH):
        for head in range(HEADS):
            seen = np.zeros((blocks * 32, KEYS + 128), int)
            for block in range(blocks):
                row = (batch * lists.by_batch * lists.mask_heads + head * lists.by_head) * lists.down + block
                start, mixed, full = counts[row].tolist()
                for n in range(mixed + full):
                    first = int(lists.tiles.reshape(-1)[start + n]) * 32
                    here = np.zeros((32, KEYS + 128), bool)
                    here[: QUERIES - block * 32, :KEYS] = want[batch, head, block * 32 : block * 32 + 32]
                    part = here[:, first : first + 32]
                    assert n < mixed or part[: QUERIES - block * 32].all(), "a full tile is seen by all"
                    seen[block * 32 : block * 32 + 32, first : first + 32] += 1
            assert seen.max() <= 1
            assert (seen[:QUERIES, :KEYS] >= want[batch, head]).all()
