"""Masks, biases and dropout at positions that lie in arrays, which JAX may trace: position by position, not by ranges.

A mask is asked for its nodes (`core/lowered.py`), and each kind of node is answered from the positions of queries and
keys. So a rank need not know which one it is while its program is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core import lowered
from clearhead.core.arrays import Array, Library
from clearhead.core.dropout import Dropout, mix
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Grid
from clearhead.core.lowered import Node
from clearhead.core.mask import Mask, Tile
from clearhead.core.positions import Added, Alibi, Bias, Relative


@dataclass(frozen=True, eq=False)
class Places:
    """The positions of some queries and keys in a whole call."""

    queries: Array
    keys: Array
    whole: Grid

    def some(self, rows: range, columns: range) -> tuple[Array, Array]:
        """Those of a tile: (rows, 1) and (columns,)."""
        return self.queries[rows.start : rows.stop][:, None], self.keys[columns.start : columns.stop]


@dataclass(frozen=True, eq=False, repr=False)
class MaskAt(Mask):
    """A mask at such positions."""

    node: Any
    places: Any

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        i, j = self.places.some(rows, columns)
        return allowed(self.node, i, j, self.places.whole)

    def check(self, grid: Grid) -> None:
        """The whole call was checked."""

    def __repr__(self) -> str:
        return "a mask at positions of many ranks"


def allowed(node: Node, i: Array, j: Array, grid: Grid) -> Array:
    """What a node says of queries i (T, 1) and keys j (S,), broadcasting to (*batch, heads, T, S)."""
    xp = Library.of(i).xp
    if isinstance(node, lowered.BandNode):
        low, high = (_by_row(number, grid) for number in (node.low, node.high))
        apart = j - i
        found = xp.ones_like(apart, dtype=bool)
        # what is no limit does not fit the numbers that positions have
        if low is not None:
            found = found & (apart >= low)
        return found if high is None else found & (apart <= high)
    if isinstance(node, lowered.BeforeNode):
        count = _by_row(node.count, grid)
        return (j < (0 if count is None else count)) & (i >= 0)
    if isinstance(node, lowered.DocumentsNode):
        queries, keys = (xp.asarray(ids) for ids in node.rows())
        return _rows(queries[:, i[:, 0]], grid)[..., :, None] == _rows(keys[:, j], grid)[..., None, :]
    if isinstance(node, lowered.FlagsNode):
        queries, keys = (xp.asarray(ids) for ids in node.rows())
        return _rows(queries[:, i[:, 0]], grid)[..., :, None] | _rows(keys[:, j], grid)[..., None, :]
    if isinstance(node, lowered.BlocksNode):
        cells = xp.asarray(node.cells)[..., i // node.block, j // node.block]  # (1 or batch, 1 or heads, …)
        return cells.reshape(*(grid.batch if cells.shape[0] > 1 else ()), *cells.shape[1:])
    if isinstance(node, lowered.NotNode):
        return ~allowed(node.inner, i, j, grid)
    if isinstance(node, lowered.AndNode | lowered.OrNode):
        left, right = (allowed(part, i, j, grid) for part in node.parts)
        return left & right if isinstance(node, lowered.AndNode) else left | right
    pairs = node.array()
    assert pairs is not None
    return taken(xp.asarray(pairs), i, j)


def taken(array: Array, i: Array, j: Array) -> Array:
    """Entries of an array that broadcasts to (…, queries, keys)."""
    if array.ndim > 1 and array.shape[-2] != 1:
        array = array[..., i[:, 0], :]
    return array[..., j] if array.ndim and array.shape[-1] != 1 else array


def _by_row(number: Any, grid: Grid) -> Any:
    """One number, or (*batch, 1, 1, 1); None for no limit."""
    if isinstance(number, int):
        return None if abs(number) >= lowered.FAR else number
    return np.asarray(number).reshape(*grid.batch, 1, 1, 1)


def _rows(values: Array, grid: Grid) -> Array:
    """(1, n) or (batch, n) as (n,) or (*batch, 1, n), for an axis of heads."""
    return values[0] if values.shape[0] == 1 else values.reshape(*grid.batch, 1, values.shape[-1])


@dataclass(frozen=True, eq=False, repr=False)
class BiasAt(Bias):
    """A bias at such positions."""

    bias: Bias
    places: Places

    def tile(self, rows: range, columns: range, grid: Grid) -> Array:
        bias, whole = self.bias, self.places.whole
        i, j = self.places.some(rows, columns)
        xp = Library.of(i).xp
        if isinstance(bias, Added):
            return taken(xp.asarray(bias.array), i, j)
        assert isinstance(bias, Alibi | Relative)
        distance = j - (i + bias.alignment.offset(whole))
        if isinstance(bias, Alibi):
            return -xp.asarray(bias.slopes)[:, None, None] * abs(distance)
        chosen = xp.asarray(bias.table)[bias.chosen(distance)]  # (…, T, S, heads)
        chosen = xp.moveaxis(chosen, -1, -3)
        return chosen if distance.ndim == 2 else chosen[..., 0, :, :, :] if chosen.ndim > 4 else chosen

    def check(self, grid: Grid) -> None:
        """The whole call was checked."""


def bias_at(bias: Bias | None, places: Places) -> Bias | None:
    """The bias at positions; one that a program defines for itself is asked by ranges alone, and refused."""
    if bias is not None and not isinstance(bias, Added | Alibi | Relative):
        raise ArgumentError("bias", f"is a {type(bias).__name__}, expected an array, alibi(…) or relative_bias(…)")
    return None if bias is None else BiasAt(bias, places)


class DropoutAt(Dropout):
    """Dropout by the positions that weights have in the whole call."""

    places: Places

    @classmethod
    def of(cls, dropout: Dropout | None, places: Places) -> DropoutAt | None:
        """The same probability and seed, at positions."""
        if dropout is None:
            return None
        placed = cls(dropout.probability, dropout.seed)
        placed.places = places
        return placed

    def keep(self, heads: np.ndarray, rows: range, columns: range) -> Any:
        """True where a weight is kept, as the whole call keeps it."""
        low, high = self.halves()
        i, j = self.places.some(rows, columns)
        head = mix(mix(mix(low) ^ high) ^ heads.astype(np.uint32).reshape(-1)).reshape(heads.shape)
        row = mix(head[..., None] ^ i[:, 0].astype(np.uint32))
        return mix(row[..., None] ^ mix(j.astype(np.uint32))) >= np.uint32(min(self.threshold, 0xFFFFFFFF))
