"""How many pairs a mask allows in a block of queries × keys, and which keys of it anybody sees: never by all pairs.

`decide` answers for whole blocks; what it leaves open is cut in half until a tile is small enough to be built.
"""

from __future__ import annotations

import math

import numpy as np

from clearhead.core.arrays import to_numpy
from clearhead.core.grid import Grid, blocks
from clearhead.core.mask import Mask

# pairs of a tile that is built and looked at, all batch rows and heads of it together
SMALL = 2**17
# keys that are asked for, sent or left out together
GRAIN = 64


def pairs(mask: Mask | None, rows: range, columns: range, grid: Grid) -> int:
    """How many pairs of these queries and keys are allowed, in all batch rows and heads.

    >>> from clearhead.core.masks import causal
    >>> pairs(causal(), range(4096), range(4096), Grid((), 1, 4096, 4096))
    8390656
    """
    lead = math.prod((*grid.batch, grid.heads))
    area = len(rows) * len(columns)
    if not area or not lead:
        return 0
    known = True if mask is None else mask.decide(rows, columns, grid)
    if mask is None or known is not None:
        return lead * area if known else 0
    if area <= SMALL:
        tile = mask.tile(rows, columns, grid)
        if isinstance(tile, bool):
            return lead * area if tile else 0
        seen = to_numpy(tile)
        return int(seen.sum()) * (lead * area // seen.size if seen.size else 0)
    return sum(pairs(mask, *half, grid) for half in _halves(rows, columns))


def seen_keys(mask: Mask | None, runs: tuple[range, ...], grid: Grid) -> np.ndarray:
    """True for each key that any query of some runs may see, in some batch row and head.

    >>> from clearhead.core.masks import window
    >>> np.flatnonzero(seen_keys(window(2), (range(5, 7),), Grid((), 1, 9, 9))).tolist()
    [3, 4, 5, 6]
    """
    found = np.zeros(grid.keys, dtype=bool)
    if 0 not in (*grid.batch, grid.heads):
        for rows in runs:
            _mark(found, mask, rows, range(grid.keys), grid)
    return found


def _mark(found: np.ndarray, mask: Mask | None, rows: range, columns: range, grid: Grid) -> None:
    """Mark the keys of a block that are seen; those that are marked already need no answer."""
    if not rows or not columns or found[columns.start : columns.stop].all():
        return
    known = True if mask is None else mask.decide(rows, columns, grid)
    if mask is None or known is not None:
        found[columns.start : columns.stop] |= bool(known)
    elif len(rows) * len(columns) <= SMALL:
        tile = mask.tile(rows, columns, grid)
        any_row = tile if isinstance(tile, bool) else to_numpy(tile).any(axis=tuple(range(to_numpy(tile).ndim - 1)))
        found[columns.start : columns.stop] |= any_row
    else:
        for half in _halves(rows, columns):
            _mark(found, mask, *half, grid)


def stretches(found: np.ndarray, columns: range) -> tuple[range, ...]:
    """The keys of a run that are seen, in stretches of `GRAIN` from its start, neighbours joined.

    >>> stretches(np.arange(1024) >= 900, range(0, 1024))
    (range(896, 1024),)
    """
    parts: list[range] = []
    for part in blocks(len(columns), GRAIN):
        some = range(columns.start + part.start, columns.start + part.stop)
        if found[some.start : some.stop].any():
            joined = parts and parts[-1].stop == some.start
            parts.append(range(parts.pop().start if joined else some.start, some.stop))
    return tuple(parts)


def _halves(rows: range, columns: range) -> tuple[tuple[range, range], tuple[range, range]]:
    """A block cut across its longer side."""
    if len(rows) >= len(columns):
        middle = rows.start + len(rows) // 2
        return (range(rows.start, middle), columns), (range(middle, rows.stop), columns)
    middle = columns.start + len(columns) // 2
    return (rows, range(columns.start, middle)), (rows, range(middle, columns.stop))
