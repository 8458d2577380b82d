"""Masks as kernels take them: trees of a few kinds of nodes, made of whole numbers and arrays for one grid.

A mask says what it is once, in `lower(grid)`; the compiled kernel's tree, the GPU's program and runs of keys are made
from that. Here i is a query's number and j a key's, both from 0:

    BandNode       low ≤ j − i ≤ high                     BlocksNode   table[i // block, j // block]
    BeforeNode     j < count                              ArrayNode    array[…, i, j]
    DocumentsNode  queries[i] == keys[j]                  AndNode, OrNode, NotNode
    FlagsNode      queries[i] or keys[j]

>>> from clearhead.core.grid import Grid
>>> from clearhead.core.masks import causal, lengths
>>> (causal() & lengths(3)).lower(Grid((), 1, 2, 5)).span(5)
(-2305843009213693952, 3, 3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, TypeAlias

import numpy as np

from clearhead.core import intervals, ranges
from clearhead.core.arrays import Array
from clearhead.core.grid import Grid, Numbers, larger, smaller
from clearhead.core.once import once
from clearhead.core.ranges import KeyRanges
from clearhead.core.steps import Cut, Steps, by_both

# low, high and count: query i sees keys i + low … i + high below count
Span: TypeAlias = tuple[Numbers, Numbers, Numbers]

FAR = 2**61  # no limit: more than any position, and a few of them still fit 64 bits


class NodeKind(IntEnum):
    """What a node is, as numbers that `native/mask.h` and `kernels/gpu/device.py` share."""

    BAND = 0
    BEFORE = 1
    DOCUMENTS = 2
    FLAGS = 3
    BLOCKS = 4
    ARRAY = 5
    AND = 6
    OR = 7
    NOT = 8


class Node:
    """A node and what it looks at, said the same way to every kernel. Arrays are made when a kernel asks for them."""

    kind: ClassVar[NodeKind]

    @property
    def parts(self) -> tuple[Node, ...]:
        """The nodes that it is made of."""
        return ()

    @property
    def numbers(self) -> tuple[Numbers, ...]:
        """Whole numbers, each one for all batch rows or one for each."""
        return ()

    @property
    def constant(self) -> int:
        """A number that a kernel may be compiled for."""
        return 0

    @property
    def heads(self) -> int:
        """How many heads its rows tell apart; 0 where all heads are alike."""
        return 0

    def rows(self) -> tuple[np.ndarray, ...]:
        """Ids or truth values of queries, of keys, or of a table, (1 or batch, n) each."""
        return ()

    def places(self) -> tuple[np.ndarray, int] | None:
        """Its one row of truth values as the places of the True ones, and how long it is, where those are few."""
        return None

    def array(self) -> Array | None:
        """Truth values that broadcast to (*batch, heads, queries, keys)."""
        return None

    def span(self, keys: int) -> Span | None:
        """The keys that a query sees as one span that moves with it; None where that does not say it all."""
        return None

    def ranges(self, queries: np.ndarray, keys: int) -> KeyRanges | None:
        """The one range of keys that each of these queries sees; None where there is more than one, or nobody knows."""
        return None

    def tiles(self, cut: Cut) -> Steps:
        """Which tiles are empty, mixed or full, told from intervals and not from pairs (`core/runs.py`)."""
        raise NotImplementedError

    def __and__(self, other: Node) -> Node:
        return AndNode(self, other)

    def __or__(self, other: Node) -> Node:
        return OrNode(self, other)

    def __invert__(self) -> Node:
        return NotNode(self)

    def narrow(self) -> tuple[np.ndarray, ...]:
        """Its rows for a kernel that reads 32 bits: truth values as bytes, and whole numbers that fit."""
        return tuple(row.astype(np.uint8 if row.dtype == bool else np.int32) for row in self.rows())


@dataclass(eq=False)
class BandNode(Node):
    """Keys from `low` to `high` after the query's number."""

    low: Numbers
    high: Numbers
    kind = NodeKind.BAND

    @property
    def numbers(self) -> tuple[Numbers, ...]:
        return self.low, self.high

    def span(self, keys: int) -> Span:
        return self.low, self.high, keys

    def ranges(self, queries: np.ndarray, keys: int) -> KeyRanges:
        return ranges.of_band(self.low, self.high, queries, keys)

    def tiles(self, cut: Cut) -> Steps:
        first, last = cut.block_ends()
        low, high = np.reshape(self.low, (-1, 1)), np.reshape(self.high, (-1, 1))
        high = np.where(low <= high, high, low - 1 - cut.queries)  # turned about, no query sees anything
        return intervals.of_ranges(cut, first + low, last + high + 1, last + low, first + high + 1)


@dataclass(eq=False)
class BeforeNode(Node):
    """The first `count` keys."""

    count: Numbers
    kind = NodeKind.BEFORE

    @property
    def numbers(self) -> tuple[Numbers, ...]:
        return (self.count,)

    def span(self, keys: int) -> Span:
        return -FAR, FAR, smaller(larger(self.count, 0), keys)

    def ranges(self, queries: np.ndarray, keys: int) -> KeyRanges:
        return ranges.of_count(self.count, queries, keys)

    def tiles(self, cut: Cut) -> Steps:
        count = np.reshape(self.count, (-1, 1)) + np.zeros(cut.blocks, np.int64)
        return intervals.of_ranges(cut, np.zeros_like(count), count, np.zeros_like(count), count)


@dataclass(eq=False)
class DocumentsNode(Node):
    """Pairs that carry the same id, (1 or batch, queries) and (1 or batch, keys)."""

    queries: np.ndarray
    keys: np.ndarray
    kind = NodeKind.DOCUMENTS

    def rows(self) -> tuple[np.ndarray, ...]:
        return self.queries, self.keys

    @once
    def by_stretch(self) -> ranges.ByStretch | None:
        """The range of keys of each stretch of queries of one id, found once."""
        return ranges.of_ids(self.queries, self.keys)

    def ranges(self, queries: np.ndarray, keys: int) -> KeyRanges | None:
        return None if self.by_stretch is None else self.by_stretch.of(queries, self.queries.shape[1])

    def tiles(self, cut: Cut) -> Steps:
        return intervals.of_ids(cut, self.queries, self.keys)

    def narrow(self) -> tuple[np.ndarray, ...]:
        of = 1 if ranges.one_array(self.queries, self.keys) else 2
        rows = [np.asarray(ids) for ids in self.rows()[:of]]  # under jit JAX would trace what is least
        limits = np.iinfo(np.int32)
        if all(not ids.size or limits.min <= ids.min() <= ids.max() <= limits.max for ids in rows):
            found = rows
        else:
            _, numbered = np.unique(np.concatenate([ids.reshape(-1) for ids in rows]), return_inverse=True)
            parts = np.split(numbered, [rows[0].size])
            found = [part.reshape(ids.shape) for part, ids in zip(parts, rows, strict=False)]
        narrow = [ids.astype(np.int32) for ids in found]
        return narrow[0], narrow[-1]


@dataclass(eq=False)
class FlagsNode(Node):
    """Pairs of which one is marked: truth values of queries and of keys, (1 or batch, n) each."""

    marked: Callable[[], tuple[np.ndarray, np.ndarray]]
    kind = NodeKind.FLAGS

    @once
    def marks(self) -> tuple[np.ndarray, np.ndarray]:
        """The truth values, made when they are first asked for."""
        return self.marked()

    def rows(self) -> tuple[np.ndarray, ...]:
        return self.marks

    def tiles(self, cut: Cut) -> Steps:
        return intervals.of_flags(cut, *self.marks)


@dataclass(eq=False)
class BlocksNode(Node):
    """A truth value for each block of queries and block of keys: (1 or batch, 1 or heads, blocks, blocks)."""

    block: int
    table: Callable[[], np.ndarray]
    # where few are True, alike for all batch rows and heads: for each block of queries the blocks of keys that it sees,
    # ascending, and how many blocks of keys there are
    chosen: Callable[[], tuple[np.ndarray, int]] | None = None
    kind = NodeKind.BLOCKS

    @property
    def constant(self) -> int:
        return self.block

    @once
    def cells(self) -> np.ndarray:
        """The table, made when it is first asked for."""
        return self.table()

    @property
    def heads(self) -> int:
        return 0 if self.chosen is not None or self.cells.shape[1] == 1 else self.cells.shape[1]

    def rows(self) -> tuple[np.ndarray, ...]:
        return (self.cells.reshape(len(self.cells), -1),)

    def places(self) -> tuple[np.ndarray, int] | None:
        if self.chosen is None:
            return None
        blocks, across = self.chosen()
        return (blocks + np.arange(len(blocks))[:, None] * across).reshape(-1), len(blocks) * across

    def tiles(self, cut: Cut) -> Steps:
        if self.chosen is not None:
            return intervals.of_chosen(cut, self.chosen()[0], self.block)
        return intervals.of_cells(cut, self.cells, self.block)


@dataclass(eq=False)
class ArrayNode(Node):
    """A truth value for each pair, in an array of any library that broadcasts to them."""

    pairs: Callable[[], Array]
    batch: tuple[int, ...] = ()
    decided: Callable[[Cut], np.ndarray] | None = None  # the state of each tile, where there is no array to be read yet
    kind = NodeKind.ARRAY

    def array(self) -> Array:
        return self.pairs()

    def tiles(self, cut: Cut) -> Steps:
        states = intervals.of_array(cut, self.pairs(), self.batch) if self.decided is None else self.decided(cut)
        return by_both(cut, states)


@dataclass(eq=False)
class PairNode(Node):
    """Two nodes."""

    left: Node
    right: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        return self.left, self.right

    def ranges(self, queries: np.ndarray, keys: int) -> KeyRanges | None:
        never = Node.ranges in (type(self.left).ranges, type(self.right).ranges)
        left = None if never else self.left.ranges(queries, keys)
        right = None if left is None else self.right.ranges(queries, keys)
        return None if left is None or right is None else self.joined(left, right)

    def joined(self, left: KeyRanges, right: KeyRanges) -> KeyRanges | None:
        """The ranges of this node from those of both."""
        raise NotImplementedError


class AndNode(PairNode):
    """What both allow."""

    kind = NodeKind.AND

    def joined(self, left: KeyRanges, right: KeyRanges) -> KeyRanges | None:
        return ranges.both(left, right)

    def tiles(self, cut: Cut) -> Steps:
        return self.left.tiles(cut) & self.right.tiles(cut)

    def span(self, keys: int) -> Span | None:
        left, right = self.left.span(keys), self.right.span(keys)
        if left is None or right is None:
            return None
        return larger(left[0], right[0]), smaller(left[1], right[1]), smaller(left[2], right[2])


class OrNode(PairNode):
    """What at least one allows."""

    kind = NodeKind.OR

    def joined(self, left: KeyRanges, right: KeyRanges) -> KeyRanges | None:
        return ranges.either(left, right)

    def tiles(self, cut: Cut) -> Steps:
        return self.left.tiles(cut) | self.right.tiles(cut)


@dataclass(eq=False)
class NotNode(Node):
    """What the other does not allow."""

    inner: Node
    kind = NodeKind.NOT

    @property
    def parts(self) -> tuple[Node, ...]:
        return (self.inner,)

    def ranges(self, queries: np.ndarray, keys: int) -> KeyRanges | None:
        inner = self.inner.ranges(queries, keys)
        return None if inner is None else ranges.outside(*inner, keys)

    def tiles(self, cut: Cut) -> Steps:
        return ~self.inner.tiles(cut)


def evaluated(
    kind: int, constant: int, fields: Sequence[Any], array: Array, parts: Sequence[Array], grid: Grid, xp: Any
) -> Array:
    """Which pairs a node allows, (…, queries, keys) by the steps of a library, for whoever has no kernel for it.

    `fields` are its numbers and rows in order, with all batch axes in front or whole numbers, and `parts` the answers
    of the nodes that it is made of.
    """
    i, j = np.arange(grid.queries)[:, None], np.arange(grid.keys)

    def number(value: Any) -> Any:
        # what is beyond any distance is no number of 32 bits
        return min(max(value, -(2**31) + 1), 2**31 - 1) if isinstance(value, int) else value[..., None, None, None]

    match NodeKind(kind):
        case NodeKind.BAND:
            return xp.asarray((j - i >= number(fields[0])) & (j - i <= number(fields[1])))
        case NodeKind.BEFORE:
            return xp.asarray(j[None, :] < number(fields[0]))
        case NodeKind.DOCUMENTS:
            return fields[0][..., None, :, None] == fields[1][..., None, None, :]
        case NodeKind.FLAGS:
            return fields[0][..., None, :, None] | fields[1][..., None, None, :]
        case NodeKind.BLOCKS:
            down, across = (-(-n // constant) for n in (grid.queries, grid.keys))
            table = xp.asarray(fields[0])
            table = table.reshape(*table.shape[:-1], -1, down * across)  # one for all heads, or one for each
            return table[..., i // constant * across + j // constant]
        case NodeKind.ARRAY:
            return xp.asarray(array)
        case NodeKind.AND:
            return parts[0] & parts[1]
        case NodeKind.OR:
            return parts[0] | parts[1]
        case NodeKind.NOT:
            return ~parts[0]
