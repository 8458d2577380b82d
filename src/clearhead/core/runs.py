"""From a mask to runs of tiles: for each block of queries, the tiles of keys that are left, full ones and mixed ones.

What is empty is not listed, and costs nothing. Runs are found from intervals of keys (`core/intervals.py`), never from
pairs, in time and memory that grow with what is left; `&`, `|` and `~` are done on steps (`core/steps.py`). A run that
is full is all True. What is left out is all False. A mixed run may hold anything: of a single leaf it is truly
mixed in every tile, of several together it is what they could not settle between them.

>>> from clearhead.core.masks import global_tokens, window
>>> found = runs(window(2) | global_tokens([0]), Grid((), 1, 8, 8), 2, 2)
>>> for block in range(found.blocks):
...     print([(int(first), int(count), bool(full)) for first, count, full in found.of(block)])
[(0, 4, False)]
[(0, 2, False)]
[(0, 3, False)]
[(0, 1, False), (2, 2, False)]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clearhead.core.grid import Grid
from clearhead.core.lowered import Node
from clearhead.core.mask import Mask
from clearhead.core.steps import ALL, NONE, SOME, Cut, Steps, by_tile, constant, in_order, merged, ranges


@dataclass(frozen=True, eq=False)
class TileLists:
    """The same tile by tile: those of row r are `tiles[starts[r]:starts[r + 1]]`, the `mixed[r]` mixed ones first."""

    starts: np.ndarray  # int32, (batch · heads · blocks + 1,)
    mixed: np.ndarray  # int32, (batch · heads · blocks,)
    tiles: np.ndarray  # int32


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of tiles that are not empty, ascending, for each block of queries of each head and batch row.

    Row r = (b · heads + h) · blocks + block has the runs starts[r] … starts[r + 1] − 1. Run n is `count[n]` tiles from
    tile `first[n]` on; where `full[n]`, all of their pairs are let through. `batch` and `heads` are 1 where all batch
    rows or heads are alike. Of `turned` runs, blocks are of keys and tiles of queries.
    """

    steps: Steps
    starts: np.ndarray  # int32, (batch · heads · blocks + 1,)
    first: np.ndarray  # int32
    count: np.ndarray  # int32
    full: np.ndarray  # bool

    @property
    def batch(self) -> int:
        """1, or as many as there are batch rows."""
        return self.steps.batch

    @property
    def heads(self) -> int:
        """1, or as many as there are query heads."""
        return self.steps.heads

    @property
    def blocks(self) -> int:
        """How many blocks each head has."""
        return self.steps.cut.blocks

    @property
    def tiles(self) -> int:
        """How many tiles there are across, empty ones included."""
        return self.steps.cut.tiles

    def of(self, block: int, head: int = 0, batch: int = 0) -> Iterator[tuple[int, int, bool]]:
        """(first tile, how many, full) of each run of a block."""
        row = ((batch if self.batch > 1 else 0) * self.heads + (head if self.heads > 1 else 0)) * self.blocks + block
        for n in range(self.starts[row], self.starts[row + 1]):
            yield int(self.first[n]), int(self.count[n]), bool(self.full[n])

    def turned(self) -> Runs:
        """For each tile of keys the blocks of queries that are left: what gradients by keys walk over."""
        return _of_steps(self.steps.turned())

    def lists(self, *, turned: bool = False) -> TileLists:
        """Tile by tile, for kernels that take first the mixed ones of a block and then the full ones.

        `turned`: for each tile of keys the blocks of queries, as `turned().lists()` gives them, in what tiles take.
        """
        rows = self.starts.size - 1
        row = np.arange(rows).repeat(np.diff(self.starts))
        if not turned:
            order = in_order(row * 2 + self.full, 2 * rows)
            _, tiles = ranges(self.first[order], self.first[order] + self.count[order])
            starts = sums(self.count)[self.starts]
            mixed = np.diff(sums(np.where(self.full, 0, self.count))[self.starts])
            return TileLists(starts.astype(np.int32), mixed.astype(np.int32), tiles.astype(np.int32))
        plane, block = np.divmod(row, max(self.blocks, 1))
        run, tile = ranges(self.first, self.first + self.count)
        lines = self.batch * self.heads * self.tiles
        line = (plane * self.tiles * 2 + self.full)[run] + tile * 2  # blocks ascend as it is
        each = np.bincount(line, minlength=2 * lines).reshape(-1, 2)
        blocks = block.astype(np.int32)[run[in_order(line, 2 * lines)]]
        return TileLists(sums(each.sum(-1)).astype(np.int32), each[:, 0].astype(np.int32), blocks)

    def states(self) -> np.ndarray:
        """0 for an empty tile, 1 for a mixed one, 2 for a full one: (batch, heads, blocks, tiles), a byte each."""
        found = self.steps
        shape = (found.batch, found.heads, self.blocks, self.tiles)
        if not math.prod(shape):
            return np.zeros(shape, np.uint8)
        return np.repeat(found.state, np.diff(np.append(found.at, math.prod(shape)))).reshape(shape)

    @property
    def pairs(self) -> int:
        """Query–key pairs in the tiles that are left, over the batch rows and heads that are told apart here."""
        return self._pairs(self.full | True)

    @property
    def full_pairs(self) -> int:
        """Those of them in full tiles; where it is all of them, `pairs` is how many the mask lets through."""
        return self._pairs(self.full)

    def _pairs(self, these: np.ndarray) -> int:
        cut = self.steps.cut
        row = np.repeat(np.arange(self.starts.size - 1), np.diff(self.starts)) % max(cut.blocks, 1)
        queries = np.minimum((row + 1) * cut.rows, cut.queries) - row * cut.rows
        first = self.first.astype(np.int64)
        keys = np.minimum((first + self.count) * cut.columns, cut.keys) - first * cut.columns
        return int((queries * keys)[these].sum())


def runs(mask: Mask | Node | None, grid: Grid, rows: int, columns: int, *, whole: bool = False) -> Runs:
    """The runs of a mask for blocks of `rows` queries and tiles of `columns` keys.

    With rows = columns = 1 nothing is mixed: each query's own runs of keys, and `pairs` is exact for any mask. The last
    tile may be shorter, and is full where all keys that it has are seen; with `whole` it is then mixed, for kernels
    that take full tiles for as wide as the others.
    """
    cut = Cut(math.prod(grid.batch), grid.heads, grid.queries, grid.keys, rows, columns)
    if mask is None:
        found = constant(cut, ALL)
    else:
        found = (mask if isinstance(mask, Node) else mask.lower(grid)).tiles(cut)
    if whole and grid.keys % columns:
        tiles = np.full((1, cut.tiles), ALL, np.uint8)
        tiles[:, -1] = SOME
        found &= by_tile(cut, tiles)
    return _of_steps(found)


def _of_steps(steps: Steps) -> Runs:
    cut = steps.cut
    rows, tiles = steps.batch * steps.heads * cut.blocks, cut.tiles
    if not rows * tiles:
        nothing = np.zeros(0, np.int32)
        return Runs(steps, np.zeros(rows + 1, np.int32), nothing, nothing, nothing.astype(bool))
    # no run goes on into the next row
    at, place, row = merged(steps.at, np.arange(rows, dtype=np.int64) * tiles)
    state = steps.state[place]
    some = (state != NONE).nonzero()[0]
    count = np.concatenate([at[1:], [rows * tiles]])[some] - at[some]
    full, first, row = state[some] == ALL, at[some], row[some]
    first -= row * tiles
    starts = sums(np.bincount(row, minlength=rows))
    return Runs(steps, starts.astype(np.int32), first.astype(np.int32), count.astype(np.int32), full)


def sums(numbers: np.ndarray) -> np.ndarray:
    """The sums of the numbers before each, and of all."""
    found = np.zeros(numbers.size + 1, np.int64)
    numbers.cumsum(out=found[1:])
    return found
