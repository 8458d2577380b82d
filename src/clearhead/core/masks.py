"""Masks as values: which query may attend to which key, answered tile by tile.

True means *may attend*, always. Masks compose with `&`, `|` and `~`, so published sparse patterns are one line each:

    longformer = window(256, 256) | global_tokens([0])
    bigbird    = window(192, 192) | global_tokens(range(64)) | random_blocks(64, count=3, seed=0)
    prefix_lm  = prefix(100) | causal()

>>> mask = causal() & window(2)
>>> mask
causal() & window(2)
>>> print(mask.picture(5))
■ · · · ·
■ ■ · · ·
■ ■ ■ · ·
· ■ ■ ■ ·
· · ■ ■ ■
>>> mask.explain(4, 1)
'query 4 may not attend to key 1: window(2) lets position 4 see keys 2 to 4'
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from clearhead.core import lowered
from clearhead.core.arrays import Array, Library
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import (
    LARGEST,
    Align,
    Alignment,
    Grid,
    by_batch,
    by_row,
    in_rows,
    offset_by_row,
    part,
    spelled,
    whole_numbers,
)  # fmt: skip
from clearhead.core.lowered import FAR, Node
from clearhead.core.mask import Mask, Tile, decided
from clearhead.core.trees import introduce


@dataclass(frozen=True, eq=False, repr=False)
class Band(Mask):
    """Keys from `back` before the query's position to `ahead` after it; None is no limit on that side."""

    back: int | None
    ahead: int | None
    alignment: Alignment
    wire = "band"

    def teeth(self, grid: Grid) -> tuple[int, int | None, int | None, int] | None:
        """Step, steps back and ahead, and the position of query 0, for `core/combs.py`."""
        place = self.alignment.number(grid)
        return None if place is None else (1, self.back, self.ahead, place)

    def lower(self, grid: Grid) -> Node:
        offset = offset_by_row(self.alignment, grid)
        return lowered.BandNode(
            -FAR if self.back is None else offset - self.back, FAR if self.ahead is None else offset + self.ahead
        )

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        offset = self.alignment.offset(grid)
        if isinstance(offset, np.ndarray) and offset.size and len(rows) and len(columns):
            # the smallest and largest key-minus-position in the tile decide most tiles without looking inside
            low = columns[0] - rows[-1] - int(offset.max())
            high = columns[-1] - rows[0] - int(offset.min())
            if (self.back is None or low >= -self.back) and (self.ahead is None or high <= self.ahead):
                return True
            if (self.ahead is not None and low > self.ahead) or (self.back is not None and high < -self.back):
                return False
        return None

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        known = self.decide(rows, columns, grid)
        if known is not None:
            return known
        offset = self.alignment.offset(grid)
        distance = np.asarray(columns) - (np.asarray(rows)[:, None] + offset)
        allowed = True
        if self.ahead is not None:
            allowed = distance <= self.ahead
        if self.back is not None:
            allowed = (distance >= -self.back) & allowed
        return decided(allowed)

    def check(self, grid: Grid) -> None:
        self.alignment.check(grid)

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        offset = self.alignment.offset(grid)
        place = query + int(offset if offset.ndim == 0 else part(offset, at)[0, 0])
        last = "" if self.ahead is None else str(place + self.ahead)
        seen = f"keys up to {last}" if self.back is None else f"keys {max(place - self.back, 0)} to {last}"
        return f"{self!r} lets position {place} see {seen}"

    def __repr__(self) -> str:
        name, numbers = "causal", []
        if self.back is not None:
            name, numbers = "window", [str(self.back)] + ([str(self.ahead)] if self.ahead else [])
        return f"{name}({', '.join(numbers + self.alignment.arguments())})"


@dataclass(frozen=True, eq=False, repr=False)
class Before(Mask):
    """The first `count` keys; one number, or one for each batch row."""

    name: str
    count: Array
    wire = "before"

    def lower(self, grid: Grid) -> Node:
        return lowered.BeforeNode(by_row(by_batch(self.name, self.count, grid), grid))

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        count = by_batch(self.name, self.count, grid)
        if isinstance(count, np.ndarray) and count.size and len(columns):
            if columns[-1] < count.min():
                return True
            if columns[0] >= count.max():
                return False
        return None

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        known = self.decide(rows, columns, grid)
        if known is not None:
            return known
        count = by_batch(self.name, self.count, grid)
        return decided(np.asarray(columns)[None, :] < count)

    def check(self, grid: Grid) -> None:
        by_batch(self.name, self.count, grid)

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        count = by_batch(self.name, self.count, grid)
        number = int(count if count.ndim == 0 else part(count, at)[0, 0])
        return f"{self!r} lets every query see the first {number} keys"

    def __repr__(self) -> str:
        return f"{self.name}({spelled(self.count)})"


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Pairs whose query and key carry the same id; ids are (S,) or (*batch, S), for queries (T,) or (*batch, T)."""

    keys: Array
    queries: Array | None
    wire = "documents"

    def lower(self, grid: Grid) -> Node:
        queries, keys = self.ids(grid)
        return lowered.DocumentsNode(in_rows(queries, grid), in_rows(keys, grid))

    def ids(self, grid: Grid) -> tuple[Array, Array]:
        """The ids of queries and of keys. Queries without ids of their own are the last keys."""
        queries = self.keys[..., grid.keys - grid.queries :] if self.queries is None else self.queries
        return queries, self.keys

    def some(self, rows: range, columns: range, grid: Grid) -> tuple[Array, Array]:
        """The ids of some queries and of some keys."""
        queries, keys = self.ids(grid)
        return queries[..., rows.start : rows.stop], keys[..., columns.start : columns.stop]

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        queries, keys = self.some(rows, columns, grid)
        if isinstance(queries, np.ndarray) and isinstance(keys, np.ndarray) and queries.size and keys.size:
            # ids mostly grow along the sequence: ranges that do not meet decide most tiles at once
            if queries.max() < keys.min() or keys.max() < queries.min():
                return False
            if queries.min() == queries.max() == keys.min() == keys.max():
                return True
        return None

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        known = self.decide(rows, columns, grid)
        if known is not None:
            return known
        queries, keys = self.some(rows, columns, grid)
        return decided(queries[..., None, :, None] == keys[..., None, None, :])

    def check(self, grid: Grid) -> None:
        if self.queries is None and grid.queries > grid.keys:
            raise ArgumentError("documents", f"needs ids for the queries: {grid.queries} queries, {grid.keys} keys")
        for name, ids, length in (("keys", self.keys, grid.keys), ("queries", self.queries, grid.queries)):
            if ids is None:
                continue
            shape = tuple(ids.shape)
            if shape[-1:] != (length,):
                raise ArgumentError(
                    "documents", f"has {name} ids of shape {shape}, expected {length} along the last axis"
                )
            by_batch("documents", ids[..., 0] if length else np.zeros(shape[:-1], int), grid)

    def extent(self) -> tuple[int, int]:
        return 0 if self.queries is None else int(self.queries.shape[-1]), int(self.keys.shape[-1])

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        queries, keys = self.ids(grid)
        mine = part(queries[..., None, :, None], at)[query, 0]
        theirs = part(keys[..., None, None, :], at)[0, key]
        return f"{self!r} puts the query in document {mine} and the key in document {theirs}"

    def __repr__(self) -> str:
        return f"documents({spelled(self.keys)})"


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Mask):
    """Some positions that see every key and are seen by every query."""

    indices: Array
    alignment: Alignment
    wire = "global"

    def lower(self, grid: Grid) -> Node:
        def marked() -> tuple[np.ndarray, np.ndarray]:
            offset = offset_by_row(self.alignment, grid)
            if isinstance(offset, int | np.ndarray) and isinstance(self.indices, np.ndarray):
                return marked_at(self.indices - np.reshape(offset, (-1, 1)), grid.queries), marked_at(
                    self.indices[None, :], grid.keys
                )
            offset = np.reshape(offset, (-1, 1)) if isinstance(offset, int | np.ndarray) else offset.reshape(-1, 1)
            queries = np.arange(grid.queries) + offset
            return among(queries, self.indices), among(np.arange(grid.keys)[None, :], self.indices)

        return lowered.FlagsNode(marked)

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        offset = self.alignment.offset(grid)
        readable = isinstance(offset, np.ndarray) and isinstance(self.indices, np.ndarray)
        if readable and offset.size and len(rows) and len(columns):
            low, high = rows[0] + int(offset.min()), rows[-1] + int(offset.max())
            met = ((self.indices >= low) & (self.indices <= high)) | (
                (self.indices >= columns[0]) & (self.indices <= columns[-1])
            )
            if not met.any():
                return False
            asked = np.unique(self.indices[(self.indices >= columns[0]) & (self.indices <= columns[-1])])
            return True if asked.size == len(columns) else None
        return None

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        places = np.asarray(rows)[:, None] + self.alignment.offset(grid)
        return decided(among(places, self.indices) | among(np.asarray(columns), self.indices))

    def check(self, grid: Grid) -> None:
        self.alignment.check(grid)
        offset, last = self.alignment.offset(grid), self.extent()[1] - 1
        end = (
            max(grid.keys, grid.queries + int(offset.max())) if isinstance(offset, np.ndarray) and offset.size else FAR
        )
        if last >= end and grid.keys:  # where there are no keys there is nothing to be beyond
            raise ArgumentError(
                "global_tokens", f"has position {last}, expected positions below {end}: of keys there are {grid.keys}"
            )

    def extent(self) -> tuple[int, int]:
        known = isinstance(self.indices, np.ndarray) and self.indices.size
        return 0, int(self.indices.max()) + 1 if known else 0

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        verb = "makes one of them global" if self.allows(query, key, grid, at) else "makes neither global"
        return f"{self!r} {verb}"

    def __repr__(self) -> str:
        return f"global_tokens({', '.join([spelled(self.indices), *self.alignment.arguments()])})"


def marked_at(places: np.ndarray, length: int) -> np.ndarray:
    """True at the places of each row, as far as they are between 0 and `length`: (rows, n) to (rows, length)."""
    flags = np.zeros((len(places), length), bool)
    row, number = np.nonzero((places >= 0) & (places < length))
    flags[row, places[row, number]] = True
    return flags


def among(places: Array, indices: Array) -> Array:
    """True for each place that is one of the indices; either may be traced by JAX."""
    traced = next((array for array in (places, indices) if not isinstance(array, np.ndarray)), None)
    return np.isin(places, indices) if traced is None else Library.of(traced).xp.isin(places, indices)


def at_least(argument: str, value: object, least: int = 0) -> int:
    """A whole number that is not less than another, checked."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ArgumentError(argument, f"is {shown(value)}, expected a whole number of at least {least}")
    # what is longer than any sequence is as good as twice that: positions are below LARGEST on both sides of 0
    return int(value) if value <= 2 * LARGEST else 2 * LARGEST


def causal(*, align: Align = "end", offset: object = None) -> Mask:
    r"""Each query sees the keys up to its own position.

    The last query is aligned with the last key, so decoding with a cache is right; `align="start"` aligns the first
    ones, as PyTorch's `is_causal` does. `offset` is the key position of the first query, one number or one for each
    batch row, and replaces `align`.

    >>> print(causal().picture(2, 4), causal(align="start").picture(2, 4), sep="\n\n")
    ■ ■ ■ ·
    ■ ■ ■ ■
    <BLANKLINE>
    ■ · · ·
    ■ ■ · ·
    """
    if offset is None and align in ALIGNED:
        introduce()
        return CAUSAL[align]
    return Band(None, 0, Alignment.of(align, offset))


# the same each time: whoever is given it again may know it by that
ALIGNED: tuple[Align, ...] = ("end", "start")
CAUSAL = {align: Band(None, 0, Alignment(align)) for align in ALIGNED}


def keys_around(back: int | None, ahead: int | None, alignment: Alignment) -> Band:
    """`window` and `causal` for those who have an alignment; no limit is None."""
    return Band(back, ahead, alignment)


def causal_alignment(mask: Mask) -> Alignment | None:
    """How a mask that is causality alone is aligned; None for any other."""
    return mask.alignment if isinstance(mask, Band) and mask.back is None and mask.ahead == 0 else None


def window(back: int, ahead: int = 0, *, align: Align = "end", offset: object = None) -> Mask:
    """Each query sees its own position, `back` keys before it and `ahead` keys after it.

    A sliding window of W tokens that counts the token itself, as in Mistral's configuration, is `window(W - 1)`.

    >>> print(window(1, 1).picture(4))
    ■ ■ · ·
    ■ ■ ■ ·
    · ■ ■ ■
    · · ■ ■
    """
    return Band(at_least("back", back), at_least("ahead", ahead), Alignment.of(align, offset))


def lengths(n: object) -> Mask:
    """Only the first `n` keys hold anything: padding. One number, or one for each batch row.

    >>> lengths([3, 1]).dense(1, 4, batch=(2,))[:, 0, 0].astype(int).tolist()
    [[1, 1, 1, 0], [1, 0, 0, 0]]
    """
    return Before("lengths", whole_numbers("lengths", n, least=0))


def documents(ids: object, queries: object = None) -> Mask:
    """Several documents in one sequence: a query sees the keys that carry its own id.

    `ids` is one id for each key, (S,) or (batch, S). Queries take the ids of the last keys unless given their own.

    >>> print(documents([0, 0, 1, 1, 1]).picture(5))
    ■ ■ · · ·
    ■ ■ · · ·
    · · ■ ■ ■
    · · ■ ■ ■
    · · ■ ■ ■
    """
    keys = whole_numbers("documents", ids)
    if keys.ndim == 0:
        raise ArgumentError("documents", f"is {ids!r}, expected one id for each key")
    return Documents(keys, None if queries is None else whole_numbers("queries", queries))


def prefix(n: object) -> Mask:
    """The first `n` keys are seen by every query; a prefix language model is `prefix(n) | causal()`.

    >>> print((prefix(2) | causal()).picture(4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """
    return Before("prefix", whole_numbers("prefix", n, least=0))


def global_tokens(indices: Iterable[int], *, align: Align = "end", offset: object = None) -> Mask:
    """The tokens at these positions see every key and are seen by every query.

    >>> print(global_tokens([1]).picture(3))
    · ■ ·
    ■ ■ ■
    · ■ ·
    """
    places = whole_numbers("indices", list(indices) if isinstance(indices, range) else indices, least=0)
    return GlobalTokens(places.reshape(-1), Alignment.of(align, offset))
