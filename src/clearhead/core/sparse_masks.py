"""Sparse patterns that have names: blocks, random blocks, dilated windows, strides, the first tokens.

    block_top_k = blocks(chosen, 64)                     # chosen: a truth value for each pair of blocks
    longformer  = dilated(2, 128, 128) | global_tokens([0])
    streaming   = window(1020) | first_tokens(4)         # attention sinks: the first tokens stay in sight

>>> print(dilated(2, 2).picture(6))
■ · · · · ·
· ■ · · · ·
■ · ■ · · ·
· ■ · ■ · ·
■ · ■ · ■ ·
· ■ · ■ · ■
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clearhead.core import lowered
from clearhead.core.array_masks import truths
from clearhead.core.arrays import Array, Library, is_traced, settled, to_numpy
from clearhead.core.draws import drawn
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import LARGEST, Align, Alignment, Grid, fits, part
from clearhead.core.lowered import Node
from clearhead.core.mask import Both, Either, Mask, Tile, decided
from clearhead.core.masks import Before, Documents, at_least, keys_around
from clearhead.core.trees import introduce


@dataclass(frozen=True, eq=False, repr=False)
class BlockTable(Mask):
    """A truth value for each block of queries and block of keys, (…, blocks, blocks); batch axes and heads before."""

    array: Array
    size: int
    wire = "blocks"

    def lower(self, grid: Grid) -> Node:
        def table() -> np.ndarray:
            cells = self.array if is_traced(self.array) else to_numpy(self.array)
            cells = cells[(None,) * max(3 - cells.ndim, 0) + (...,)]
            lead = cells.shape[:-3]
            batch = grid.batch if any(n != 1 for n in lead) else (1,) * len(lead)
            cells = Library.of(cells).xp.broadcast_to(cells, (*batch, cells.shape[-3], *self.counts(grid)))
            return cells.reshape(-1 if cells.size else 1, *cells.shape[-3:])

        return lowered.BlocksNode(self.size, table)

    def counts(self, grid: Grid) -> tuple[int, int]:
        """How many blocks of queries and of keys there are."""
        return -(-grid.queries // self.size), -(-grid.keys // self.size)

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        if not isinstance(self.array, np.ndarray) or not rows or not columns:
            return None
        cells = self.array
        if cells.shape[-2] != 1:
            cells = cells[..., rows[0] // self.size : rows[-1] // self.size + 1, :]
        if cells.shape[-1] != 1:
            cells = cells[..., columns[0] // self.size : columns[-1] // self.size + 1]
        return _verdict(cells)

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        known = self.decide(rows, columns, grid)
        if known is not None:
            return known
        cells = self.array
        for axis, places in ((-2, rows), (-1, columns)):
            if cells.shape[axis] != 1:
                library = Library.of(cells)
                chosen = library.asarray(np.asarray(places, dtype=np.int64) // self.size)
                cells = library.xp.take(cells, chosen, axis=axis)
        return decided(cells)

    def check(self, grid: Grid) -> None:
        shape, expected = tuple(self.array.shape), (*grid.batch, grid.heads, *self.counts(grid))
        if not fits(shape, expected):
            raise ArgumentError(
                "blocks",
                f"has shape {shape}, which does not broadcast to {expected}: blocks of {self.size} of {grid}",
                rows=shape[:-3],
            )

    def extent(self) -> tuple[int, int]:
        down, across = (0 if n <= 1 else (int(n) - 1) * self.size + 1 for n in self.array.shape[-2:])
        return down, across

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        held, mine, theirs = self.allows(query, key, grid, at), query // self.size, key // self.size
        return f"{self!r} holds {held} for block {mine} of queries and block {theirs} of keys"

    def __repr__(self) -> str:
        return f"blocks(array{tuple(self.array.shape)}, {self.size})"


@dataclass(frozen=True, eq=False, repr=False)
class RandomBlocks(Mask):
    """For each block of queries, `count` blocks of keys drawn by a seed."""

    block: int
    count: int
    seed: int
    wire = "random"

    def lower(self, grid: Grid) -> Node:
        rows = range(grid.queries)
        return lowered.BlocksNode(
            self.block,
            lambda: self.table(rows, grid)[None, None],
            lambda: (self.drawn(rows, grid), self.across(grid)),
        )

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        if not rows or not columns:
            return None
        first, last = columns[0] // self.block, columns[-1] // self.block
        drawn = self.drawn(rows, grid)
        found = int(np.count_nonzero((first <= drawn) & (drawn <= last)))
        return None if 0 < found < len(drawn) * (last + 1 - first) else found > 0

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        if not rows or not columns:
            return True
        first = rows[0] // self.block
        query_block, key_block = np.asarray(rows) // self.block - first, np.asarray(columns) // self.block
        return decided(self.table(rows, grid)[query_block[:, None], key_block])

    def across(self, grid: Grid) -> int:
        """How many blocks of keys there are."""
        return -(-grid.keys // self.block)

    def drawn(self, rows: range, grid: Grid) -> np.ndarray:
        """The blocks of keys that each block of these queries sees, ascending."""
        query_blocks = range(rows.start // self.block, -(-rows.stop // self.block))
        return drawn(self.seed, query_blocks, self.across(grid), self.count)

    def table(self, rows: range, grid: Grid) -> np.ndarray:
        """The same as truth values: (query blocks, key blocks)."""
        blocks = self.drawn(rows, grid)
        table = np.zeros((len(blocks), self.across(grid)), dtype=bool)
        table[np.arange(len(blocks))[:, None], blocks] = True
        return table

    def check(self, grid: Grid) -> None:
        """It fits every size."""

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        drawn = self.drawn(range(query, query + 1), grid)[0].tolist()
        return f"{self!r} drew key blocks {drawn} for it, and the key is in block {key // self.block}"

    def __repr__(self) -> str:
        return f"random_blocks({self.block}, count={self.count}, seed={self.seed})"


@dataclass(frozen=True, eq=False, repr=False)
class Dilated(Mask):
    """The query's own position, `back` keys before it and `ahead` after it, each `step` apart; None is no limit."""

    step: int
    back: int | None
    ahead: int
    alignment: Alignment
    wire = "dilated"

    def teeth(self, grid: Grid) -> tuple[int, int | None, int | None, int] | None:
        """Step, steps back and ahead, and the position of query 0, for `core/combs.py`."""
        place = self.alignment.number(grid)
        return None if place is None else (self.step, self.back, self.ahead, place)

    @property
    def band(self) -> Mask:
        """All keys in between."""
        back = None if self.back is None else min(self.back * self.step, 2 * LARGEST)
        return keys_around(back, min(self.ahead * self.step, 2 * LARGEST), self.alignment)

    def lower(self, grid: Grid) -> Node:
        if self.step == 1:
            return self.band.lower(grid)
        offset = self.alignment.offset(grid)
        places = np.arange(grid.queries) + (offset[..., 0, 0] if offset.ndim else offset)
        return Both(self.band, Documents(np.arange(grid.keys) % self.step, places % self.step)).lower(grid)

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        known = self.band.decide(rows, columns, grid)
        return known if known is False or self.step == 1 else None

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        near = self.band.tile(rows, columns, grid)
        if near is False or self.step == 1:
            return near
        apart = np.asarray(columns) - (np.asarray(rows)[:, None] + self.alignment.offset(grid))
        return decided((apart % self.step == 0) & near)

    def check(self, grid: Grid) -> None:
        self.alignment.check(grid)

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        offset = self.alignment.offset(grid)
        place = query + int(offset if offset.ndim == 0 else part(offset, at)[0, 0])
        apart = abs(key - place)
        if not self.band.allows(query, key, grid, at):
            return f"{self.band!r}, which {self!r} keeps within, does not reach from position {place}"
        verb = "a multiple" if apart % self.step == 0 else "no multiple"
        return f"{self!r} lets position {place} see keys {self.step} apart, and {apart} is {verb} of {self.step}"

    def __repr__(self) -> str:
        numbers = [str(self.step)] + ([] if self.back is None else [str(self.back)])
        if self.ahead:
            numbers.append(str(self.ahead) if self.back is not None else f"ahead={self.ahead}")
        return f"dilated({', '.join(numbers + self.alignment.arguments())})"


class Pattern(Mask):
    """A mask that is put together of others and has a name of its own."""

    def meaning(self) -> Mask:
        """The masks that it is made of."""
        raise NotImplementedError

    def lower(self, grid: Grid) -> Node:
        return self.meaning().lower(grid)

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        return self.meaning().decide(rows, columns, grid)

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        return self.meaning().tile(rows, columns, grid)

    def check(self, grid: Grid) -> None:
        self.meaning().check(grid)

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        return f"{self!r} is {self.meaning()!r}, and {self.meaning().reason(query, key, grid, at)}"


@dataclass(frozen=True, eq=False, repr=False)
class Strided(Pattern):
    """The last `stride` positions, and each `stride`-th before them."""

    stride: int
    alignment: Alignment
    wire = "strided"

    def meaning(self) -> Mask:
        return Either(keys_around(self.stride, 0, self.alignment), Dilated(self.stride, None, 0, self.alignment))

    def __repr__(self) -> str:
        return f"strided({', '.join([str(self.stride), *self.alignment.arguments()])})"


@dataclass(frozen=True, eq=False, repr=False)
class FirstTokens(Pattern):
    """The first `count` keys, as far as they are not after the query."""

    count: int
    alignment: Alignment
    wire = "first"

    def meaning(self) -> Mask:
        return Both(Before("prefix", np.asarray(self.count)), keys_around(None, 0, self.alignment))

    def __repr__(self) -> str:
        return f"first_tokens({', '.join([str(self.count), *self.alignment.arguments()])})"


def _verdict(cells: np.ndarray) -> bool | None:
    """All, none or some of the cells of a table."""
    return True if cells.all() else None if cells.any() else False


def blocks(array: object, size: int) -> Mask:
    """A block-sparse layout: for each block of `size` queries the blocks of `size` keys that it sees, True or 1.

    `array` broadcasts to (*batch, heads, blocks of queries, blocks of keys), so that each head may have its own. What
    is not chosen is neither computed nor read.

    >>> print(blocks([[1, 0], [1, 1]], 2).picture(4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ■
    ■ ■ ■ ■
    >>> blocks([[1, 0], [1, 1]], 2).explain(1, 2)
    'query 1 may not attend to key 2: blocks(array(2, 2), 2) holds False for block 0 of queries and block 1 of keys'
    """
    introduce()
    if isinstance(array, list | tuple):
        try:
            array = np.asarray(array)
        except ValueError:  # rows that have not the same length
            raise ArgumentError("blocks", "has rows of different lengths, expected (blocks, blocks)") from None
    table = settled(truths("blocks", array))
    if table.ndim < 2:
        raise ArgumentError(
            "blocks", f"has shape {tuple(table.shape)}, expected (…, blocks of queries, blocks of keys)"
        )
    # on an accelerator: it is small, and every kernel needs to know what is left
    if not is_traced(table):
        table = to_numpy(table)
        if table.view(np.uint8).max(initial=0) > 1:  # which are truth values for NumPy alone
            table = table.view(np.uint8) != 0
    return BlockTable(table, at_least("size", size, 1))


def random_blocks(block: int, *, count: int, seed: int = 0) -> Mask:
    """Each block of queries sees `count` random blocks of keys; the same seed gives the same blocks everywhere.

    They are drawn by a hash of 64 bits (`core/draws.py`): all sets of `count` blocks are as likely. Version 0.1 drew
    others of a seed.

    >>> print(random_blocks(2, count=1, seed=3).picture(8))
    · · · · · · ■ ■
    · · · · · · ■ ■
    ■ ■ · · · · · ·
    ■ ■ · · · · · ·
    · · · · ■ ■ · ·
    · · · · ■ ■ · ·
    ■ ■ · · · · · ·
    ■ ■ · · · · · ·
    """
    introduce()
    if at_least("seed", seed) != seed:
        raise ArgumentError("seed", f"is {shown(seed)}, expected a whole number of at most 2**61")
    return RandomBlocks(at_least("block", block, 1), at_least("count", count), int(seed))


def dilated(step: int, back: int | None = None, ahead: int = 0, *, align: Align = "end", offset: object = None) -> Mask:
    """Each query sees its own position, `back` keys before it and `ahead` after it, each `step` apart.

    Without `back` it sees all that are a multiple of `step` before it.

    >>> dilated(4, 2).explain(9, 4)
    'query 9 may not attend to key 4: dilated(4, 2) lets position 9 see keys 4 apart, and 5 is no multiple of 4'
    """
    reach = None if back is None else at_least("back", back)
    return Dilated(at_least("step", step, 1), reach, at_least("ahead", ahead), Alignment.of(align, offset))


def strided(stride: int, *, align: Align = "end", offset: object = None) -> Mask:
    """The Sparse Transformer's strided pattern (Child et al. 2019): `window(stride) | dilated(stride)`.

    >>> print(strided(2).picture(6))
    ■ · · · · ·
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    · ■ ■ ■ · ·
    ■ · ■ ■ ■ ·
    · ■ · ■ ■ ■
    """
    return Strided(at_least("stride", stride, 1), Alignment.of(align, offset))


def first_tokens(n: int, *, align: Align = "end", offset: object = None) -> Mask:
    """The first `n` keys are seen by every query that does not stand before them: what StreamingLLM keeps in sight.

    Many models leave their weight on the first tokens, as on a sink (Xiao et al. 2023): `window(1020) |
    first_tokens(4)` keeps them where a window moves on. `prefix(n)` shows the first keys to earlier queries too, and
    `attention(sinks=…)` adds a logit that belongs to no key.

    >>> from clearhead.core.masks import window
    >>> print((window(1) | first_tokens(1)).picture(4))
    ■ · · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ · ■ ■
    """
    return FirstTokens(at_least("n", n), Alignment.of(align, offset))
