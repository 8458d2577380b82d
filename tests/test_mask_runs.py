"""Runs of tiles against brute force: what is left out holds no True, what is full no False, and leaves are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.core.block_sums import block_sums
from clearhead.core.grid import Grid
from clearhead.core.runs import Runs, runs
from clearhead.core.steps import ALL, NONE, SOME

BATCH, HEADS, QUERIES, KEYS = 2, 3, 19, 23
GRID = Grid((BATCH,), HEADS, QUERIES, KEYS)
SIZES = [(1, 1), (2, 3), (4, 4), (5, 2), (8, 16), (19, 23), (64, 64), (1, 7), (6, 1)]
RNG = np.random.default_rng(0)


class Odd(ch.Mask):
    """A mask of which nothing is known but its tiles."""

    def tile(self, rows: range, columns: range, grid: Grid) -> Any:
        return (np.asarray(rows)[:, None] * 7 + np.asarray(columns) * 3) % 11 < 5

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        return "it is odd"


LEAVES: dict[str, ch.Mask] = {
    "causal": ch.causal(),
    "causal from the start": ch.causal(align="start"),
    "causal by row": ch.causal(offset=[-7, 9]),
    "window": ch.window(5, 2),
    "window of one": ch.window(0),
    "window by row": ch.window(3, 1, offset=[1, 30]),
    "window that sees nothing": ch.window(1, offset=100),
    "window of everything": ch.window(10**9, 10**9),
    "lengths": ch.lengths([17, 0]),
    "length": ch.lengths(9),
    "more than there are": ch.lengths(99),
    "prefix": ch.prefix([2, 23]),
    "documents": ch.documents([0] * 4 + [1] * 9 + [2] * 10),
    "documents by row": ch.documents(RNG.integers(0, 3, (BATCH, KEYS))),
    "documents in pieces": ch.documents([5] * 6 + [-2] * 8 + [5] * 9),
    "documents at random": ch.documents(RNG.integers(0, 9, KEYS), RNG.integers(0, 9, QUERIES)),
    "documents by row, queries alike": ch.documents(RNG.integers(0, 4, (BATCH, KEYS)), np.arange(QUERIES) // 6),
    "documents of large ids": ch.documents(np.arange(KEYS) // 5 * 2**61 - 2**62, np.zeros(QUERIES, int)),
    "one document": ch.documents(np.zeros(KEYS, int)),
    "global tokens": ch.global_tokens([0, 4, 5, 6, 7, 20]),
    "global tokens by row": ch.global_tokens([3, 8], offset=[0, 5]),
    "no global tokens": ch.global_tokens([]),
    "all global": ch.global_tokens(range(KEYS)),
    "random blocks": ch.random_blocks(4, count=2, seed=3),
    "random blocks of one": ch.random_blocks(1, count=5, seed=1),
    "random blocks, large": ch.random_blocks(100, count=1),
    "random blocks, none": ch.random_blocks(4, count=0),
    "random blocks, all": ch.random_blocks(3, count=99),
    "blocks": ch.blocks(RNG.random((5, 6)) < 0.5, 4),
    "blocks by head": ch.blocks(RNG.random((HEADS, 3, 4)) < 0.5, 7),
    "blocks by row": ch.blocks(RNG.random((BATCH, 1, 19, 23)) < 0.7, 1),
    "blocks by row and head": ch.blocks(RNG.random((BATCH, HEADS, 2, 2)) < 0.5, 16),
    "blocks of keys": ch.blocks(RNG.random((1, 6)) < 0.5, 4),
    "array": ch.where(RNG.random((QUERIES, KEYS)) < 0.4),
    "array of everything": ch.where(RNG.random((BATCH, HEADS, QUERIES, KEYS)) < 0.9),
    "array by head": ch.where(RNG.random((HEADS, QUERIES, KEYS)) < 0.1),
    "array by row": ch.where(RNG.random((BATCH, 1, 1, KEYS)) < 0.5),
    "array of queries": ch.where(RNG.random((QUERIES, 1)) < 0.5),
    "array of one": ch.where(np.ones((1, 1), bool)),
    "array, turned": ch.where((RNG.random((KEYS, QUERIES)) < 0.4).T),
    "tensor": ch.where(torch.from_numpy(RNG.random((HEADS, QUERIES, KEYS)) < 0.3)),
    "padding": ch.padding(RNG.random((BATCH, KEYS)) < 0.7),
    "of one's own": Odd(),
}
# made of several nodes, and not settled in every tile
PATTERNS: dict[str, ch.Mask] = {
    "dilated": ch.dilated(3, 2),
    "dilated by row": ch.dilated(2, None, 1, offset=[3, -2]),
    "strided": ch.strided(4),
    "first tokens": ch.first_tokens(5, offset=[2, 4]),
}


def states_of(found: Runs, grid: Grid) -> np.ndarray:
    """The state of each tile as runs say it: (batch, heads, blocks, tiles)."""
    states = np.full((BATCH, grid.heads, found.blocks, found.tiles), NONE)
    for b, h, block in np.ndindex(BATCH, grid.heads, found.blocks):
        end = 0
        for first, count, full in found.of(block, h, b):
            assert first >= end, "runs ascend and do not meet"
            assert count > 0
            end = first + count
            states[b, h, block, first:end] = ALL if full else SOME
        assert end <= found.tiles
    return states


def right_states(mask: ch.Mask, rows: int, columns: int, grid: Grid) -> np.ndarray:
    """The same by looking at every pair."""
    dense = mask.dense(grid.queries, grid.keys, batch=grid.batch, heads=grid.heads)
    blocks, tiles = range(0, grid.queries, rows), range(0, grid.keys, columns)
    states = np.zeros((BATCH, grid.heads, len(blocks), len(tiles)), int)
    for (x, i), (y, j) in ((x, y) for x in enumerate(blocks) for y in enumerate(tiles)):
        tile = dense[..., i : i + rows, j : j + columns]
        states[..., x, y] = np.where(tile.all((-1, -2)), ALL, np.where(tile.any((-1, -2)), SOME, NONE))
    return states


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("name", LEAVES)
def test_leaves_are_exact(name: str, rows: int, columns: int) -> None:
    found = runs(LEAVES[name], GRID, rows, columns)
    right = right_states(LEAVES[name], rows, columns, GRID)
    if name == "of one's own":  # is asked for all batch rows at once
        assert found.batch == found.heads == 1
    np.testing.assert_array_equal(states_of(found, GRID), right)
    np.testing.assert_array_equal(states_of(found.turned(), GRID), right.swapaxes(-1, -2))


def trees(leaves: Any) -> Any:
    """Masks of masks, at most four deep."""
    for _ in range(4):
        leaves = st.one_of(
            leaves,
            st.tuples(leaves, leaves).map(lambda two: two[0] & two[1]),
            st.tuples(leaves, leaves).map(lambda two: two[0] | two[1]),
            leaves.map(lambda one: ~one),
        )
    return leaves


@settings(max_examples=60, deadline=None)
@given(mask=trees(st.sampled_from([*LEAVES.values(), *PATTERNS.values()])), size=st.sampled_from(SIZES))
def test_trees_never_leave_out_or_take_for_full(mask: ch.Mask, size: tuple[int, int]) -> None:
    found, right = runs(mask, GRID, *size), right_states(mask, *size, GRID)
    states = states_of(found, GRID)
    assert not ((states != right) & (states != SOME)).any()
    np.testing.assert_array_equal(states_of(found.turned(), GRID), states.swapaxes(-1, -2))
    lists, other = found.lists(turned=True), found.turned().lists()
    for field in ("starts", "mixed", "tiles"):
        assert getattr(lists, field).dtype == np.int32
        np.testing.assert_array_equal(getattr(lists, field), getattr(other, field))
    exact = runs(mask, GRID, 1, 1)
    copies = BATCH * HEADS // (exact.batch * exact.heads)
    assert (
        exact.pairs * copies
        == exact.full_pairs * copies
        == int(mask.dense(*GRID.shape[-2:], batch=GRID.batch, heads=HEADS).sum())
    )


@pytest.mark.parametrize("name", ["causal by row", "array by head", "random blocks", "documents in pieces"])
def test_lists_have_the_mixed_tiles_first(name: str) -> None:
    found = runs(LEAVES[name], GRID, 4, 5)
    lists = found.lists()
    assert lists.starts.dtype == lists.mixed.dtype == lists.tiles.dtype == np.int32
    for row in range(found.batch * found.heads * found.blocks):
        b, rest = divmod(row, found.heads * found.blocks)
        h, block = divmod(rest, found.blocks)
        expected: list[list[int]] = [[], []]
        for first, count, full in found.of(block, h, b):
            expected[full].extend(range(first, first + count))
        mine = lists.tiles[lists.starts[row] : lists.starts[row + 1]].tolist()
        assert mine == expected[0] + expected[1]
        assert lists.mixed[row] == len(expected[0])


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("batch", [(), (0,), (2, 1)])
def test_nothing_is_left_of_nothing(queries: int, keys: int, batch: tuple[int, ...]) -> None:
    grid = Grid(batch, 2, queries, keys)
    rows = np.zeros((*batch, keys), int)
    masks = [
        ch.causal(),
        ch.lengths(3),
        ch.documents(rows, np.zeros((*batch, queries), int)),
        ch.global_tokens([0]),
        ch.random_blocks(2, count=1),
        ch.where(np.ones((queries, keys), bool)),
        ch.where(np.ones((*batch, 1, queries, keys), bool)),
    ]
    for mask in [None, *masks, masks[0] & ~masks[1] | masks[2]]:
        for turned in (False, True):
            found = runs(mask, grid, 4, 4)
            found.lists(turned=True)
            found = found.turned() if turned else found
            assert found.pairs == found.batch * found.heads * queries * keys or queries == keys == 1
            assert found.starts.size == found.batch * found.heads * found.blocks + 1
            found.lists()


def test_long_sequences_cost_what_is_left() -> None:
    n, blocks = 131_072, 1024
    grid = Grid((4,), 16, n, n)
    ids = np.arange(n) // 8192 * 7 % 16
    mask = ch.window(256, 256) | ch.global_tokens(range(64)) | ch.documents(ids) & ch.causal()
    found = runs(mask, grid, 128, 128)
    assert found.batch == found.heads == 1
    assert found.first.size < 6 * blocks
    # window: 5 tiles; global: 1 column and 1 row; documents: half of 64 × 64 tiles, 16 times
    assert found.pairs < 128 * 128 * (7 * blocks + blocks + 16 * 64 * 65 // 2)
    assert found.turned().pairs == found.pairs


def test_sums_are_found_once_and_anew_when_somebody_writes() -> None:
    array = torch.zeros(8, 8, dtype=torch.bool)
    first = block_sums(array, 4, 4)
    assert block_sums(array, 4, 4) is first
    array[1, 1] = True
    again = block_sums(array, 4, 4)
    assert first.sum() == 0
    assert again.tolist() == [[1, 0], [0, 0]]
    plain = np.zeros((8, 8), bool)
    assert block_sums(plain, 4, 4).sum() == 0
    plain[:] = True
    assert block_sums(plain, 4, 4).tolist() == [[16, 16], [16, 16]]


@pytest.mark.parametrize("shape", [(600, 40), (3, 300, 7), (1, 9), (9, 1), (2, 1, 16)])
@pytest.mark.parametrize("size", [(256, 8), (300, 3), (1, 1), (1000, 1000)])
def test_sums_are_right(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    array = np.random.default_rng(1).random(shape) < 0.7
    found = block_sums(array, *size)
    for index in np.ndindex(found.shape):
        *lead, i, j = index
        part = array[tuple(lead)][i * size[0] : (i + 1) * size[0], j * size[1] : (j + 1) * size[1]]
        assert found[index] == part.sum()


def test_sums_in_another_library_are_the_same() -> None:
    from clearhead.core.block_sums import _elsewhere, _in_memory

    array = np.random.default_rng(2).random((2, 21, 37)) < 0.5
    np.testing.assert_array_equal(_elsewhere(torch.from_numpy(array), 4, 8), _in_memory(array, 4, 8))
