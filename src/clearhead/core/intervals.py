"""What the leaves of masks say of tiles, told from intervals of keys: ranges, ids, marks, tables of blocks, arrays."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from clearhead.core import steps
from clearhead.core.arrays import Array, to_numpy
from clearhead.core.block_sums import block_sums
from clearhead.core.grid import Grid, bins_of
from clearhead.core.steps import ALL, NONE, SOME, Cut, Steps


def of_ranges(cut: Cut, start: np.ndarray, stop: np.ndarray, inner: np.ndarray, end: np.ndarray) -> Steps:
    """Blocks of which some query sees keys start … stop − 1, and every query inner … end − 1: (1 or batch, blocks)."""
    start, stop, inner, end = np.broadcast_arrays(start, stop, inner, end)
    row, batch = np.arange(start.size).reshape(start.shape), len(start)
    some = steps.covered(cut, batch, 1, row, *cut.touched(start, stop), SOME)
    return some | steps.covered(cut, batch, 1, row, *cut.filled(inner, end), ALL)


def of_flags(cut: Cut, queries: np.ndarray, keys: np.ndarray) -> Steps:
    """Pairs of which one is marked: (1 or batch, n) each."""
    return steps.by_block(cut, states(queries, cut.rows)) | steps.by_tile(cut, states(keys, cut.columns))


def of_ids(cut: Cut, queries: np.ndarray, keys: np.ndarray) -> Steps:
    """Pairs of one id, in whatever order ids come: (1 or batch, n) each."""
    batch = max(len(queries), len(keys))
    if not queries.size or not keys.size:
        return steps.constant(cut, NONE)
    asking, asked = (_stretches(np.broadcast_to(ids, (batch, ids.shape[1]))) for ids in (queries, keys))
    known, number = np.unique(np.concatenate([asking.ids, asked.ids]), return_inverse=True)
    mine, theirs = np.split(number.reshape(-1), [asking.ids.size])
    mine, theirs = mine + asking.row * known.size, theirs + asked.row * known.size  # an id for each batch row
    # tiles that hold a key of an id, for each id, and then for each block that holds a query of it
    rows = batch * known.size
    by_id = steps.covered(_tall(cut, rows), 1, 1, theirs, *cut.touched(asked.start, asked.stop), SOME)
    which, block = steps.ranges(asking.start // cut.rows, -(-asking.stop // cut.rows))
    pairs = np.unique((asking.row[which] * cut.blocks + block) * rows + mine[which])
    some = _joined(cut, batch, *np.divmod(pairs, rows), *_runs_by_row(by_id, cut.tiles, rows), SOME)
    # blocks and tiles of one id each
    first = -(-asking.start // cut.rows)
    after = np.where(asking.stop == cut.queries, cut.blocks, asking.stop // cut.rows)
    which, block = steps.ranges(first, after)
    order = np.argsort(theirs, kind="stable")
    start, stop = (side[order] for side in cut.filled(asked.start, asked.stop))
    every = _joined(cut, batch, asking.row[which] * cut.blocks + block, mine[which], theirs[order], start, stop, ALL)
    return some | every


def of_cells(cut: Cut, table: np.ndarray, size: int) -> Steps:
    """Pairs of blocks of `size` that a table lets through: (1 or batch, 1 or heads, blocks, blocks)."""
    batch, heads, down, across = table.shape
    if not table.size:
        return steps.constant(cut, NONE)
    edges = np.zeros((batch * heads * down, across + 2), np.int8)
    edges[:, 1:-1] = table.reshape(-1, across)
    change = np.diff(edges, axis=1)
    row, start = np.nonzero(change == 1)
    stop = np.nonzero(change == -1)[1]  # as many, in the same order
    size = min(size, max(cut.queries, cut.keys))  # one block holds them all, and products of it fit 64 bits
    plane, line = np.divmod(row, down)
    which, block = steps.ranges(*_blocks_of(cut, line, size))
    place = plane[which] * cut.blocks + block
    keys = (start * size)[which], (stop * size)[which]
    lines = np.zeros(cut.blocks, np.int64)  # of the table, that each block of queries meets
    np.add.at(lines, steps.ranges(*_blocks_of(cut, np.arange(down), size))[1], 1)
    some = steps.covered(cut, batch, heads, place, *cut.touched(*keys), SOME)
    return some | steps.covered(cut, batch, heads, place, *cut.filled(*keys), ALL, np.tile(lines, batch * heads))


def of_array(cut: Cut, array: Array, batch: tuple[int, ...]) -> np.ndarray:
    """The state of each tile of an array that broadcasts to (*batch, heads, queries, keys), from its sum."""
    sums = block_sums(array, cut.rows, cut.columns)
    down, across = (1, 1, *array.shape)[-2:]
    area = np.multiply.outer(_sizes(down, cut.rows), _sizes(across, cut.columns))
    found = np.where(sums == 0, NONE, np.where(sums == area, ALL, SOME)).astype(np.uint8)
    found = found[(None,) * max(3 - found.ndim, 0) + (...,)]
    lead = found.shape[:-3]
    if math.prod(lead) != 1:
        found = np.broadcast_to(found, (*batch, *found.shape[-3:]))
    found = found.reshape(-1, *found.shape[-3:]) if found.size else np.zeros((1, 1, *found.shape[-2:]), np.uint8)
    return np.broadcast_to(found, (*found.shape[:2], cut.blocks, cut.tiles))


def told(mask: Any, grid: Grid, rows: int, columns: int) -> np.ndarray:
    """The state of each tile of a mask that can only be asked, by `decide` and `tile`: (blocks, tiles).

    Halves are halved until they are decided or as small as a tile, so a long sequence costs what its edges cost.
    """
    found = np.full((-(-grid.queries // rows), -(-grid.keys // columns)), SOME, np.uint8)

    def tell(down: range, across: range) -> None:
        queries = range(down.start * rows, min(down.stop * rows, grid.queries))
        keys = range(across.start * columns, min(across.stop * columns, grid.keys))
        known = mask.decide(queries, keys, grid)
        if known is None and len(down) <= 1 and len(across) <= 1:
            tile = mask.tile(queries, keys, grid)
            array = np.asarray(tile) if isinstance(tile, bool) else to_numpy(tile)
            known = True if array.all() else None if array.any() else False
        elif known is None:
            for quarter in [(r, c) for r in bins_of(down, 2) for c in bins_of(across, 2)]:
                tell(*quarter)
            return
        if known is not None:
            found[down.start : down.stop, across.start : across.stop] = ALL if known else NONE

    if found.size:
        tell(range(found.shape[0]), range(found.shape[1]))
    return found


def states(flags: np.ndarray, size: int) -> np.ndarray:
    """Whether all, some or none of each stretch of `size` flags are set: (rows, n) to (rows, stretches)."""
    if not flags.shape[-1]:
        return np.zeros((len(flags), 0), np.uint8)
    sums = np.add.reduceat(flags, np.arange(0, flags.shape[-1], size), axis=-1, dtype=np.int64)
    return np.where(sums == 0, NONE, np.where(sums == _sizes(flags.shape[-1], size), ALL, SOME)).astype(np.uint8)


def _sizes(length: int, size: int) -> np.ndarray:
    """How long the stretches of `size` are that cover a length; the last one may be shorter."""
    return np.diff(np.append(np.arange(0, length, size), length))


def _blocks_of(cut: Cut, line: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of queries that lines of a table meet: the first, and the one after the last."""
    first, last = line * size, np.minimum((line + 1) * size, cut.queries)
    return first // cut.rows, np.where(first < last, -(-last // cut.rows), first // cut.rows)


class _Stretches(NamedTuple):
    """Stretches of one id: of which row, from where to where in it, and the id."""

    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    ids: np.ndarray


def _stretches(ids: np.ndarray) -> _Stretches:
    """The longest stretches of equal ids in each row."""
    new = np.ones(ids.shape, bool)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=new[:, 1:])
    row, start = np.nonzero(new)
    stop = np.append(start[1:], 0)
    return _Stretches(row, start, np.where(stop == 0, ids.shape[1], stop), ids[row, start])


def _tall(cut: Cut, rows: int) -> Cut:
    """The same tiles of keys for as many rows."""
    return Cut(1, 1, rows, cut.keys, 1, cut.columns)


def _runs_by_row(found: Steps, tiles: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The row, first tile and end of each run of tiles that are not empty."""
    at = np.union1d(found.at, np.arange(rows) * tiles)
    stop, some = np.append(at[1:], rows * tiles), found.of(at) != NONE
    row = at // tiles
    return row[some], (at - row * tiles)[some], (stop - row * tiles)[some]


def _joined(
    cut: Cut,
    batch: int,
    block: np.ndarray,
    ids: np.ndarray,
    by: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    state: int,
) -> Steps:
    """`state` where a block of queries has an id, in the tiles start … stop − 1 of that id; `by` is ascending."""
    which, place = steps.ranges(np.searchsorted(by, ids), np.searchsorted(by, ids, side="right"))
    return steps.covered(cut, batch, 1, block[which], start[place], stop[place], state)
