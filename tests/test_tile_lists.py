"""Lists of tiles, as GPU kernels take them: by the compiled extension and by NumPy, against brute force."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import MARKS
from test_mask_runs import BATCH, GRID, HEADS, LEAVES, PATTERNS, SIZES, right_states, trees

import clearhead as ch
from clearhead.core.grid import Grid
from clearhead.core.steps import ALL, NONE, SOME
from clearhead.kernels.extension import native

pytestmark = MARKS
BY = ["extension", "NumPy"] if native is not None else ["NumPy"]
# of which the extension, too, knows every tile; of others it takes what is short between two runs with them
EXACT = [
    name for name in LEAVES if not name.startswith(("array", "tensor", "padding", "of one", "documents", "global"))
]
TOLD = {name: mask for name, mask in LEAVES.items() if not name.startswith(("array", "tensor", "padding", "of one"))}


def listed(mask: ch.Mask, grid: Grid, size: tuple[int, int], by: str, turned: bool = False) -> Any:
    masks = importlib.import_module("clearhead.kernels.gpu.masks")
    with pytest.MonkeyPatch.context() as patch:
        if by == "NumPy":
            patch.setattr(masks, "native", None)
        prepared = masks._from_tree(mask.lower(grid), grid, torch.device("cpu"))
        found = masks.listed(prepared, mask, grid, *size, turned)
        assert ("tree" in prepared.lists) == (by == "extension" and not prepared.reads and 0 not in grid.batch)
        return found


def states_of(lists: Any) -> np.ndarray:
    """The state of each tile: (batch, heads, blocks, tiles)."""
    batch = BATCH if lists.by_batch else 1
    states = np.full((batch * lists.mask_heads * lists.down, lists.across), NONE)
    assert len(lists.counts) == len(states)
    for row, (start, mixed, full) in zip(states, lists.counts.tolist(), strict=True):
        tiles = lists.tiles[start : start + mixed + full].tolist()
        assert tiles[:mixed] == sorted(set(tiles[:mixed]))
        assert tiles[mixed:] == sorted(set(tiles[mixed:]))
        assert not set(tiles[:mixed]) & set(tiles[mixed:])
        row[tiles[:mixed]], row[tiles[mixed:]] = SOME, ALL
    states = states.reshape(batch, lists.mask_heads, lists.down, lists.across)
    return np.broadcast_to(states, (BATCH, HEADS, lists.down, lists.across))


def as_kernels_take_them(mask: ch.Mask, size: tuple[int, int]) -> np.ndarray:
    """Brute force, but that a tile which is shorter than the others is not full."""
    right = right_states(mask, *size, GRID)
    if GRID.keys % size[1]:
        right[..., -1] = np.minimum(right[..., -1], SOME)
    return right


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXACT)
def test_leaves_are_exact(name: str, size: tuple[int, int], by: str) -> None:
    right = as_kernels_take_them(LEAVES[name], size)
    np.testing.assert_array_equal(states_of(listed(LEAVES[name], GRID, size, by)), right)


@pytest.mark.parametrize("by", BY)
@settings(max_examples=60, deadline=None)
@given(mask=trees(st.sampled_from([*TOLD.values(), *PATTERNS.values()])), size=st.sampled_from(SIZES))
def test_trees_never_leave_out_or_take_for_full(by: str, mask: ch.Mask, size: tuple[int, int]) -> None:
    right, states = as_kernels_take_them(mask, size), states_of(listed(mask, GRID, size, by))
    assert not ((states != right) & (states != SOME)).any()
    turned = states_of(listed(mask, GRID, size, by, turned=True))
    np.testing.assert_array_equal(turned, states.swapaxes(-1, -2))


@pytest.mark.parametrize("name", ["array", "padding", "of one's own"])
def test_arrays_are_read_elsewhere(name: str) -> None:
    assert listed(LEAVES[name], GRID, (4, 4), "NumPy") is None


@pytest.mark.parametrize("name", ["Longformer", "BigBird", "blocks", "prefix and window", "documents"])
def test_long_ones_are_the_same_by_both(name: str) -> None:
    """But that the extension knows by keys, and NumPy by tiles, what two parts of a mask let through together."""
    if native is None:
        pytest.skip("the extension is not built")
    n = 20_000
    grid, rng = Grid((1,), 2, n, n), np.random.default_rng(0)
    mask = {
        "Longformer": ch.window(256, 256) | ch.global_tokens(range(64)),
        "BigBird": ch.window(192, 192) | ch.global_tokens(range(64)) | ch.random_blocks(64, count=3, seed=1),
        "blocks": ch.blocks(rng.random((2, 79, 79)) < 0.1, 256),
        "prefix and window": ch.prefix(512) | ch.window(512),
        "documents": ch.documents(np.arange(n) // 512 * 7 % 39),
    }[name]
    for size in ((128, 128), (64, 64), (64, 128), (48, 80)):
        for turned in (False, True):
            one, other = (listed(mask, grid, size, by, turned) for by in ("extension", "NumPy"))
            assert one[2:] == other[2:]
            mine, right = (pairs_of(lists) for lists in (one, other))
            assert {pair[:2] for pair in mine} == {pair[:2] for pair in right}
            assert {pair for pair in right if pair[2]} <= {pair for pair in mine if pair[2]}
            assert len(mine - right) <= len(right) / 100


def pairs_of(lists: Any) -> set[tuple[int, int, bool]]:
    """(block, tile, whether it is full) of all."""
    return {
        (row, tile, n >= mixed)
        for row, (start, mixed, full) in enumerate(lists.counts.tolist())
        for n, tile in enumerate(lists.tiles[start : start + mixed + full].tolist())
    }


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_nothing_is_left_of_nothing(queries: int, keys: int, turned: bool, by: str) -> None:
    for batch in ((), (0,), (2, 1)):
        grid = Grid(batch, 2, queries, keys)
        rows = np.zeros((*batch, keys), int)
        for mask in (
            ch.documents(rows, np.zeros((*batch, queries), int)) | ch.causal(),
            ch.global_tokens([0]) | ~ch.random_blocks(2, count=1),
            ch.blocks(np.ones((2, 1, 1), bool), 8) & ch.lengths(3),
        ):
            lists = listed(mask, grid, (4, 4), by, turned)
            assert lists.counts[..., 1:].sum() <= 2 * queries * keys
            assert len(lists.tiles) >= 1


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("turned", [False, True])
def test_no_batch_row_has_lists_of_nothing_else(turned: bool, by: str) -> None:
    grid = Grid((0,), 2, 9, 9)
    for mask in (ch.documents(np.zeros(9, int)) & ch.causal(), ch.global_tokens([3]) | ch.causal()):
        assert len(listed(mask, grid, (4, 4), by, turned).counts) == 3


@pytest.mark.skipif(native is None, reason="the extension is not built")
def test_what_was_begun_and_not_finished_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = importlib.import_module("clearhead.kernels.gpu.masks")
    mask, grid = ch.global_tokens([0]) | ch.window(2, 2), Grid((1,), 1, 64, 64)
    prepared = masks._from_tree(mask.lower(grid), grid, torch.device("cpu"))

    def interrupted(root: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(masks, "nodes_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            masks.listed(prepared, mask, grid, 16, 16)
    assert masks.listed(prepared, mask, grid, 16, 16).counts[:, 1:].tolist() == [[4, 0], [3, 0], [4, 0], [3, 0]]


@pytest.mark.skipif(native is None, reason="the extension is not built")
@settings(max_examples=100, deadline=None)
@given(mask=trees(st.sampled_from([*TOLD.values(), *PATTERNS.values()])), size=st.sampled_from(SIZES))
def test_queries_that_are_certain_to_see_something_do(mask: ch.Mask, size: tuple[int, int]) -> None:
    masks = importlib.import_module("clearhead.kernels.gpu.masks")
    prepared = masks._from_tree(mask.lower(GRID), GRID, torch.device("cpu"))
    masks.listed(prepared, mask, GRID, *size)
    if prepared.lists["certain", *size]:
        dense = mask.dense(GRID.queries, GRID.keys, batch=GRID.batch, heads=GRID.heads)
        assert dense.any(-1).all()


@pytest.mark.skipif(native is None, reason="the extension is not built")
def test_what_is_certain_of_masks_that_people_use() -> None:
    masks = importlib.import_module("clearhead.kernels.gpu.masks")
    grid = Grid((1,), 2, 300, 300)
    for mask, certain in (
        (ch.window(80, 80) | ch.global_tokens(range(16)), True),
        (ch.window(80) | ch.prefix(64), True),
        (ch.documents(np.arange(300) // 64 * 3 % 7), True),
        (ch.window(80, 80) & ch.documents(np.arange(300) // 50), False),  # blocks of 64 have two documents
        (ch.global_tokens([0]) & ch.lengths(0), False),
    ):
        prepared = masks._from_tree(mask.lower(grid), grid, torch.device("cpu"))
        masks.listed(prepared, mask, grid, 64, 64)
        assert prepared.lists["certain", 64, 64] == certain, mask


@pytest.mark.skipif(native is None, reason="the extension is not built")
@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_any_number_of_threads_makes_the_same_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = importlib.import_module("clearhead.kernels.gpu.masks")
    grid = Grid((2,), 2, 5000, 5000)
    mask = PATTERNS[name] | ch.window(30, 20) | ch.random_blocks(50, count=2, seed=2)
    for turned in (False, True):
        alone = listed(mask, grid, (16, 32), "extension", turned)
        with monkeypatch.context() as patch:
            patch.setattr(masks, "BLOCKS_OF_THREAD", 1)
            ch.set_threads(4)
            try:
                shared = listed(mask, grid, (16, 32), "extension", turned)
            finally:
                ch.set_threads(None)
        assert alone[2:] == shared[2:]
        np.testing.assert_array_equal(alone.counts, shared.counts)
        np.testing.assert_array_equal(alone.tiles, shared.tiles)


@pytest.mark.skipif(native is None, reason="the extension is not built")
def test_few_trees_are_kept() -> None:
    masks = importlib.import_module("clearhead.kernels.gpu.masks")
    grid, held = Grid((1,), 1, 64, 64), []
    for size in range(1, 8):
        mask = ch.documents(np.arange(64) // size * 5 % 13)
        prepared = masks._from_tree(mask.lower(grid), grid, torch.device("cpu"))
        masks.listed(prepared, mask, grid, 16, 16)
        held.append((mask, prepared))
    assert ["tree" in prepared.lists for _, prepared in held] == [False] * 3 + [True] * masks.TREES
    mask, prepared = held[0]
    again = masks.listed(prepared, mask, grid, 8, 8)
    np.testing.assert_array_equal(again.counts, listed(mask, grid, (8, 8), "NumPy").counts)


def test_bytes_other_than_one_are_true() -> None:
    table = np.array([[0, 2], [255, 0]], np.uint8).view(bool)
    q, k, v = (np.random.default_rng(0).standard_normal((1, 2, 100, 8)).astype(np.float32) for _ in range(3))
    right = ch.attention(q, k, v, mask=ch.blocks([[0, 1], [1, 0]], 64), kernel="dense")
    for kernel in ("dense", "tiled", *(["compiled"] if native is not None else [])):
        np.testing.assert_allclose(ch.attention(q, k, v, mask=ch.blocks(table, 64), kernel=kernel), right, atol=1e-5)
    assert table.view(np.uint8).max() == 255, "what was given stays as it is"
    for by in BY:
        lists = listed(ch.blocks(table, 64), Grid((1,), 2, 100, 100), (64, 32), by)
        assert lists.counts[:, 1:].tolist() == [[1, 1], [0, 2]]


@pytest.mark.parametrize("by", BY)
def test_ids_at_random_see_each_other(by: str) -> None:
    ids = np.random.default_rng(1).integers(0, 40, 700)
    mask, grid = ch.documents(ids, np.sort(ids)), Grid((1,), 1, 700, 700)
    seen = ids == np.sort(ids)[:, None]
    for row, (start, mixed, full) in enumerate(listed(mask, grid, (32, 16), by).counts.tolist()):
        tiles = listed(mask, grid, (32, 16), by).tiles[start : start + mixed + full].tolist()
        assert {j // 16 for j in np.flatnonzero(seen[row * 32 : row * 32 + 32].any(0))} <= set(tiles)
        assert not full
