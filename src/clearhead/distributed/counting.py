"""How many pairs a mask allows in a block of queries × keys, and which keys of it anybody sees: never by all pairs.

`decide` answers for whole blocks; what it leaves open is cut in half until a tile is small enough to be built.
"""

from __future__ import annotations

import math

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


def seen(mask: Mask | None, rows: range, columns: range, grid: Grid) -> bool:
    """True where some pair of these may attend in some batch row and head."""
    if not rows or not columns or 0 in (*grid.batch, grid.heads):
        return False
    known = True if mask is None else mask.decide(rows, columns, grid)
    if mask is None or known is not None:
        return bool(known)
    if len(rows) * len(columns) <= SMALL:
        tile = mask.tile(rows, columns, grid)
        return tile if isinstance(tile, bool) else bool(to_numpy(tile).any())
    return any(seen(mask, *half, grid) for half in _halves(rows, columns))


def keys_seen(mask: Mask | None, runs: tuple[range, ...], columns: range, grid: Grid) -> tuple[range, ...]:
    """The keys of a run that any query of some runs may see, in stretches of `GRAIN`, neighbours joined.

    >>> from clearhead.core.masks import window
    >>> keys_seen(window(100), (range(1024, 2048),), range(0, 1024), Grid((), 1, 2048, 2048))
    (range(896, 1024),)
    """
    if not any(seen(mask, rows, columns, grid) for rows in runs):
        return ()
    found: list[range] = []
    for part in blocks(len(columns), GRAIN):
        some = range(columns.start + part.start, columns.start + part.stop)
        if any(seen(mask, rows, some, grid) for rows in runs):
            joined = found and found[-1].stop == some.start
            found.append(range(found.pop().start if joined else some.start, some.stop))
    return tuple(found)


def _halves(rows: range, columns: range) -> tuple[tuple[range, range], tuple[range, range]]:
    """A block cut across its longer side."""
    if len(rows) >= len(columns):
        middle = rows.start + len(rows) // 2
        return (range(rows.start, middle), columns), (range(middle, rows.stop), columns)
    middle = columns.start + len(columns) // 2
    return (rows, range(columns.start, middle)), (rows, range(middle, columns.stop))
