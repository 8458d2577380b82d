"""How many pairs a mask allows, of some queries or of some keys, and which keys anybody sees: never by all pairs.

A mask whose nodes say it is told once, as runs of keys for each query (`core/runs.py`). One that knows pairs alone is
asked: `decide` answers for whole blocks, and what it leaves open is cut in half until a tile is small enough to build.
"""

from __future__ import annotations

import math

import numpy as np

from clearhead.core.arrays import to_numpy
from clearhead.core.grid import Grid, blocks
from clearhead.core.lowered import Node, NodeKind
from clearhead.core.mask import Mask
from clearhead.core.once import once
from clearhead.core.runs import Runs, runs

# pairs of a tile that is built and looked at, all batch rows and heads of it together
SMALL = 2**17
# keys that are asked for, sent or left out together
GRAIN = 64


class Counter:
    """What a mask allows in a whole call, asked for again and again.

    >>> from clearhead.core.masks import causal, window
    >>> Counter(causal(), Grid((), 2, 4096, 4096)).of_queries(range(4096))
    16781312
    >>> np.flatnonzero(Counter(window(2), Grid((), 1, 9, 9)).seen((range(5, 7),))).tolist()
    [3, 4, 5, 6]
    """

    def __init__(self, mask: Mask | None, grid: Grid) -> None:
        self.mask, self.grid = mask, grid

    @once
    def told(self) -> Runs | None:
        """The runs of keys of each query; None where pairs have to be built for them."""
        if self.mask is None or 0 in self.grid.shape:
            return None
        root = self.mask.lower(self.grid)
        return None if _of_pairs(root) else runs(root, self.grid, 1, 1)

    def of_queries(self, rows: range) -> int:
        """The pairs of these queries with all keys, in all batch rows and heads."""
        if self.told is None:
            return pairs(self.mask, rows, range(self.grid.keys), self.grid)
        return int(self._by_query[rows.stop] - self._by_query[rows.start]) if rows else 0

    def of_keys(self, columns: range) -> int:
        """The pairs of these keys with all queries."""
        if self.told is None:
            return pairs(self.mask, range(self.grid.queries), columns, self.grid)
        return int(self._by_key[columns.stop] - self._by_key[columns.start]) if columns else 0

    def seen(self, rows: tuple[range, ...]) -> np.ndarray:
        """True for each key that any of these queries may see, in some batch row and head."""
        if self.told is None:
            return seen_keys(self.mask, rows, self.grid)
        asked = np.zeros(self.grid.queries, bool)
        for run in rows:
            asked[run.start : run.stop] = True
        return self._by_place(asked[self._queries]) > 0

    @once
    def _queries(self) -> np.ndarray:
        """The query of each run of keys."""
        assert self.told is not None
        starts = self.told.starts
        return np.repeat(np.arange(starts.size - 1), np.diff(starts)) % self.grid.queries

    @once
    def _by_query(self) -> np.ndarray:
        """How many pairs the queries before each have."""
        assert self.told is not None
        return self._summed(np.bincount(self._queries, self.told.count, self.grid.queries))

    @once
    def _by_key(self) -> np.ndarray:
        """How many pairs the keys before each have."""
        return self._summed(self._by_place(np.ones(self._queries.size, bool)))

    def _by_place(self, these: np.ndarray) -> np.ndarray:
        """In how many of these runs each key is."""
        assert self.told is not None
        first, count = (a[these].astype(np.int64) for a in (self.told.first, self.told.count))
        ends = np.bincount(first, minlength=self.grid.keys + 1) - np.bincount(
            first + count, minlength=self.grid.keys + 1
        )
        return np.cumsum(ends)[: self.grid.keys]

    def _summed(self, counts: np.ndarray) -> np.ndarray:
        """Sums up to each place, over all batch rows and heads, of which alike ones were told once."""
        assert self.told is not None
        alike = math.prod((*self.grid.batch, self.grid.heads)) // (self.told.batch * self.told.heads)
        return np.append(0, np.cumsum(counts.astype(np.int64) * alike))


def _of_pairs(node: Node) -> bool:
    """True where part of a mask is an array of pairs, or would have to be made one."""
    return node.kind == NodeKind.ARRAY or any(map(_of_pairs, node.parts))


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


def seen_keys(mask: Mask | None, queries: tuple[range, ...], grid: Grid) -> np.ndarray:
    """True for each key that any of these queries may see, in some batch row and head.

    >>> from clearhead.core.masks import window
    >>> np.flatnonzero(seen_keys(window(2), (range(5, 7),), Grid((), 1, 9, 9))).tolist()
    [3, 4, 5, 6]
    """
    found = np.zeros(grid.keys, dtype=bool)
    if 0 not in (*grid.batch, grid.heads):
        for rows in queries:
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
