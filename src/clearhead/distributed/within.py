"""A call's mask, bias and dropout for a piece of it: some queries and some keys that follow one another, some heads.

All three are asked about positions in the whole call, so a piece means what it means there. A mask is lowered to the
same few nodes as any other, moved to where the piece starts; every kernel takes it at its own speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from clearhead.core import lowered
from clearhead.core.arrays import Array, without_gradient
from clearhead.core.dropout import Dropout
from clearhead.core.grid import Alignment, Grid, cut, larger
from clearhead.core.lowered import FAR, Node
from clearhead.core.mask import Both, Either, Mask, Not, Tile
from clearhead.core.positions import Added, Alibi, Bias, Relative


class Piece(NamedTuple):
    """Where a piece lies in a whole call: its queries, its keys, its query heads, and the call's sizes."""

    rows: range
    columns: range
    heads: range
    whole: Grid

    @property
    def grid(self) -> Grid:
        """The sizes of the piece itself."""
        return Grid(self.whole.batch, len(self.heads), len(self.rows), len(self.columns))

    @property
    def all_heads(self) -> bool:
        """True where no head is left out."""
        return len(self.heads) == self.whole.heads

    def rows_of(self, rows: range) -> range:
        """Queries of the piece, as the whole call numbers them."""
        return range(self.rows.start + rows.start, self.rows.start + rows.stop)

    def columns_of(self, columns: range) -> range:
        """Keys of the piece, as the whole call numbers them."""
        return range(self.columns.start + columns.start, self.columns.start + columns.stop)

    def of_heads(self, array: Array) -> Array:
        """The heads of the piece, of an array that broadcasts to (*batch, heads, queries, keys)."""
        if self.all_heads or array.ndim < 3 or array.shape[-3] == 1:
            return array
        return array[..., self.heads.start : self.heads.stop, :, :]


@dataclass(frozen=True, eq=False, repr=False)
class Within(Mask):
    """A mask, of which a piece is asked for."""

    mask: Mask
    piece: Piece

    def lower(self, grid: Grid) -> Node:
        return _lowered(self.mask, self.piece)

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        piece = self.piece
        return self.mask.decide(piece.rows_of(rows), piece.columns_of(columns), piece.whole)

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        piece = self.piece
        tile = self.mask.tile(piece.rows_of(rows), piece.columns_of(columns), piece.whole)
        return tile if isinstance(tile, bool) else piece.of_heads(tile)

    def check(self, grid: Grid) -> None:
        """The whole call was checked."""

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        piece = self.piece
        at = (*at[:-1], at[-1] + piece.heads.start)
        return self.mask.reason(query + piece.rows.start, key + piece.columns.start, piece.whole, at)

    def __repr__(self) -> str:
        return f"{self.mask!r} within {self.piece.rows} × {self.piece.columns}"


def _lowered(mask: Mask, piece: Piece) -> Node:
    """The nodes of a mask for a piece; of a mask that says nothing of nodes only the pairs of the piece are asked."""
    if isinstance(mask, Both):
        return lowered.AndNode(_lowered(mask.left, piece), _lowered(mask.right, piece))
    if isinstance(mask, Either):
        return lowered.OrNode(_lowered(mask.left, piece), _lowered(mask.right, piece))
    if isinstance(mask, Not):
        return lowered.NotNode(_lowered(mask.mask, piece))
    node = None if type(mask).lower is Mask.lower else _moved(mask.lower(piece.whole), piece)
    if node is not None:
        return node

    def pairs() -> Array:
        tile = mask.tile(piece.rows, piece.columns, piece.whole)
        return np.full((1, 1), tile) if isinstance(tile, bool) else piece.of_heads(tile)

    return lowered.ArrayNode(pairs)


def _moved(node: Node, piece: Piece) -> Node | None:
    """A node of the whole call as the piece sees it, both numbered from 0; None where no node says that."""
    rows, columns = piece.rows, piece.columns
    if isinstance(node, lowered.BandNode):
        by = columns.start - rows.start
        return lowered.BandNode(_unless_far(node.low, by), _unless_far(node.high, by))
    if isinstance(node, lowered.BeforeNode):
        return lowered.BeforeNode(larger(node.count - columns.start, 0))
    if isinstance(node, lowered.DocumentsNode):
        return lowered.DocumentsNode(
            node.queries[:, rows.start : rows.stop], node.keys[:, columns.start : columns.stop]
        )
    if isinstance(node, lowered.FlagsNode):
        marked = node.marked

        def flags() -> tuple[np.ndarray, np.ndarray]:
            queries, keys = marked()
            return queries[:, rows.start : rows.stop], keys[:, columns.start : columns.stop]

        return lowered.FlagsNode(flags)
    if isinstance(node, lowered.BlocksNode) and not (rows.start % node.block or columns.start % node.block):
        block, table = node.block, node.table
        return lowered.BlocksNode(
            block,
            lambda: piece.of_heads(table())[
                ..., rows.start // block : -(-rows.stop // block), columns.start // block : -(-columns.stop // block)
            ],
        )
    if isinstance(node, lowered.ArrayNode):
        pairs = node.pairs
        return lowered.ArrayNode(lambda: piece.of_heads(cut(pairs(), rows, columns)))
    return None


def _unless_far(limit: Any, by: int) -> Any:
    """A limit moved; none stays none."""
    if isinstance(limit, int):
        return limit if abs(limit) >= FAR else limit - by
    return limit - by


def mask_of(mask: Mask | None, piece: Piece) -> Mask | None:
    """The mask of a piece; None where it allows every pair of it."""
    if mask is None or mask.decide(piece.rows, piece.columns, piece.whole) is True:
        return None
    return Within(mask, piece)


@dataclass(frozen=True, eq=False, repr=False)
class PartOfBias(Bias):
    """A bias that a program defines for itself, of which a piece is asked for."""

    bias: Bias
    piece: Piece

    def tile(self, rows: range, columns: range, grid: Grid) -> Array:
        piece = self.piece
        return piece.of_heads(self.bias.tile(piece.rows_of(rows), piece.columns_of(columns), piece.whole))

    def check(self, grid: Grid) -> None:
        """The whole call was checked."""


def bias_of(bias: Bias | None, piece: Piece) -> Bias | None:
    """The bias of a piece: what depends on distance alone is of the same class, moved."""
    if bias is None:
        return None
    heads = slice(piece.heads.start, piece.heads.stop)
    if isinstance(bias, Added):
        return Added(piece.of_heads(cut(without_gradient(bias.array), piece.rows, piece.columns)))
    if isinstance(bias, Alibi):
        return replace(bias, slopes=bias.slopes[heads], alignment=_aligned(bias.alignment, piece))
    if isinstance(bias, Relative):
        table = without_gradient(bias.table)[:, heads]
        return replace(bias, table=table, alignment=_aligned(bias.alignment, piece))
    return PartOfBias(bias, piece)


def _aligned(alignment: Alignment, piece: Piece) -> Alignment:
    """Where the first query of a piece stands among its keys."""
    start = np.asarray(alignment.aligned(piece.whole)) if alignment.given is None else alignment.given
    return Alignment("start", start + (piece.rows.start - piece.columns.start))


class PlacedDropout(Dropout):
    """Dropout by the places that weights have in the whole call."""

    piece: Piece

    @classmethod
    def of(cls, dropout: Dropout | None, piece: Piece) -> PlacedDropout | None:
        """The same probability and seed, for a piece."""
        if dropout is None:
            return None
        placed = cls(dropout.probability, dropout.seed)
        placed.piece = piece
        return placed

    def keep(self, heads: np.ndarray, rows: range, columns: range) -> np.ndarray:
        """True where a weight is kept, as the whole call keeps it."""
        piece = self.piece
        row, head = np.divmod(heads, len(piece.heads))
        numbers = row * piece.whole.heads + piece.heads.start + head
        return super().keep(numbers, piece.rows_of(rows), piece.columns_of(columns))
