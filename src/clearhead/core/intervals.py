"""What the leaves of masks say of tiles, told from intervals of keys: ranges, ids, marks, tables of blocks, arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clearhead.core import steps
from clearhead.core.arrays import Array, to_numpy
from clearhead.core.block_sums import block_sums
from clearhead.core.grid import Grid, bins_of
from clearhead.core.ranges import stretches_of_both
from clearhead.core.steps import ALL, NONE, SOME, Cut, Places, Steps


def of_ranges(cut: Cut, start: np.ndarray, stop: np.ndarray, inner: np.ndarray, end: np.ndarray) -> Steps:
    """Blocks of which some query sees keys start … stop − 1, and every query inner … end − 1: (1 or batch, blocks)."""
    start, stop, inner, end = np.broadcast_arrays(start, stop, inner, end)
    row, batch = np.arange(start.size), len(start)
    some, every = cut.touched(start.reshape(-1), stop.reshape(-1)), cut.filled(inner.reshape(-1), end.reshape(-1))
    return steps.layered(cut, batch, 1, (row, *some), (row, *every))


def of_flags(cut: Cut, queries: np.ndarray, keys: np.ndarray) -> Steps:
    """Pairs of which one is marked: (1 or batch, n) each."""
    return steps.by_block(cut, states(queries, cut.rows)) | steps.by_tile(cut, states(keys, cut.columns))


def of_ids(cut: Cut, queries: np.ndarray, keys: np.ndarray) -> Steps:
    """Pairs of one id, in whatever order ids come: (1 or batch, n) each."""
    batch = max(len(queries), len(keys))
    if not queries.size or not keys.size:
        return steps.constant(cut, NONE)
    asking, asked = stretches_of_both(queries, keys)
    known, number = np.unique(np.concatenate([asking.ids, asked.ids]), return_inverse=True)
    mine, theirs = np.split(number.reshape(-1), [asking.ids.size])
    mine, theirs = mine + asking.row * known.size, theirs + asked.row * known.size  # an id for each batch row
    order = np.argsort(theirs, kind="stable")
    theirs, start, stop = theirs[order], asked.start[order], asked.stop[order]
    # each block that holds a query of an id sees some of the tiles that hold a key of it
    which, block = steps.ranges(asking.start // cut.rows, -(-asking.stop // cut.rows))
    rows = batch * known.size
    pairs = np.sort((asking.row[which] * cut.blocks + block) * rows + mine[which], kind="stable")
    block, ids = np.divmod(pairs[np.append(True, pairs[1:] != pairs[:-1])], rows)
    some = _joined(block, ids, *_together(theirs, *cut.touched(start, stop)))
    # blocks and tiles of one id each
    first = -(-asking.start // cut.rows)
    after = np.where(asking.stop == cut.queries, cut.blocks, asking.stop // cut.rows)
    which, block = steps.ranges(first, after)
    every = _joined(asking.row[which] * cut.blocks + block, mine[which], theirs, *cut.filled(start, stop))
    return steps.layered(cut, batch, 1, some, every)


def of_cells(cut: Cut, table: np.ndarray, size: int) -> Steps:
    """Pairs of blocks of `size` that a table lets through: (1 or batch, 1 or heads, blocks, blocks)."""
    batch, heads, down, across = table.shape
    if not table.size:
        return steps.constant(cut, NONE)
    cells = np.zeros((batch * heads * down, across + 1), bool)  # no run goes on into the next line
    cells[:, :-1] = table.reshape(-1, across)
    cells = cells.reshape(-1)
    edges = np.flatnonzero(np.append(cells[0], cells[1:] != cells[:-1]))
    row, start = np.divmod(edges[::2], across + 1)
    stop = edges[1::2] - row * (across + 1)
    return _of_lines(cut, batch, heads, down, size, row, start, stop)


def _of_lines(
    cut: Cut, batch: int, heads: int, down: int, size: int, row: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> Steps:
    """Of runs of blocks of keys, start … stop − 1, in lines of a table that ascend: `down` for each head."""
    size = min(size, max(cut.queries, cut.keys))  # one block holds them all, and products of it fit 64 bits
    # of each block of queries the lines of the table that it meets, and of those the runs
    first = np.arange(cut.blocks) * cut.rows
    lines = (first // size, -(-np.minimum(first + cut.rows, cut.queries) // size))
    plane = np.repeat(np.arange(batch * heads), cut.blocks)
    place, line = steps.ranges(*(np.tile(ends, batch * heads) + plane * down for ends in lines))
    starts = np.searchsorted(row, np.arange(batch * heads * down + 1))
    which, run = steps.ranges(starts[line], starts[line + 1])
    place, keys = place[which], (start[run] * size, stop[run] * size)
    every, many = (place, *cut.filled(*keys)), lines[1] - lines[0]
    if (many == 1).all():
        some = steps.NOWHERE if size % cut.columns == 0 else (place, *cut.touched(*keys))  # or all tiles are full
        return steps.layered(cut, batch, heads, some, every)
    return steps.layered(cut, batch, heads, (place, *cut.touched(*keys)), every, np.tile(many, batch * heads))


def of_chosen(cut: Cut, chosen: np.ndarray, size: int) -> Steps:
    """The same of a table in which each line lets through as many: the numbers of those, ascending, (blocks, n)."""
    if not chosen.size:
        return steps.constant(cut, NONE)
    new, last = np.ones(chosen.shape, bool), np.ones(chosen.shape, bool)
    np.not_equal(chosen[:, 1:], chosen[:, :-1] + 1, out=new[:, 1:])
    last[:, :-1] = new[:, 1:]
    row = np.flatnonzero(new) // chosen.shape[1]
    return _of_lines(cut, 1, 1, len(chosen), size, row, chosen[new], chosen[last] + 1)


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
    rows, length = flags.shape
    stretches = -(-length // size)
    row, place = divmod(np.flatnonzero(flags), length) if rows > 1 else (0, np.flatnonzero(flags))
    sums = np.bincount(row * stretches + place // size, minlength=rows * stretches).reshape(rows, stretches)
    return np.where(sums == 0, NONE, np.where(sums == _sizes(length, size), ALL, SOME)).astype(np.uint8)


def _sizes(length: int, size: int) -> np.ndarray:
    """How long the stretches of `size` are that cover a length; the last one may be shorter."""
    return np.diff(np.append(np.arange(0, length, size), length))


def _together(ids: np.ndarray, start: np.ndarray, stop: np.ndarray) -> Places:
    """Runs of tiles of each id, ascending, those that touch one another as one."""
    new = np.append(True, (ids[1:] != ids[:-1]) | (start[1:] > stop[:-1]))
    last = np.append(new[1:], True)
    return ids[new], start[new], stop[last]


def _joined(block: np.ndarray, ids: np.ndarray, by: np.ndarray, start: np.ndarray, stop: np.ndarray) -> Places:
    """Where a block of queries has an id, the runs of tiles of that id; `by`, their ids, ascend."""
    which, place = steps.ranges(np.searchsorted(by, ids), np.searchsorted(by, ids, side="right"))
    return block[which], start[place], stop[place]
