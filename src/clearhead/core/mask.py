"""What a mask is: a value that answers for a tile, composes with & | ~, draws itself and explains one pair."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from clearhead.core.admit import admit
from clearhead.core.arrays import Array, alike, dtype_name, is_array, settled, to_numpy
from clearhead.core.equality import digest, same
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Grid, bins, bins_of, cut, fitting, hold, part
from clearhead.core.intervals import told
from clearhead.core.lowered import ArrayNode, Node
from clearhead.core.picture import Picture
from clearhead.core.trees import introduce, tree

# True: every pair in the tile; False: none; an array: these, broadcasting to (*batch, heads, rows, columns)
Tile: TypeAlias = "bool | Array"


class Mask:
    """Which queries may attend to which keys. Ask it for a tile, a picture, or the reason for one pair.

    A mask is a dataclass, frozen and with `eq=False`: its class and its fields say it all. Fields are whole numbers,
    words, None, arrays, alignments and masks, and by them a mask is sent to PyTorch's compiler, and known again in the
    next call.

    Masks are values: two that are made alike are equal and have the same hash, so that one may be a key of a dictionary
    or a static argument of `jax.jit`. Arrays in them are compared by their numbers, and a mask that was hashed keeps
    those that it had then (`core/equality.py`).

    >>> from clearhead.core.masks import causal, lengths
    >>> causal() & lengths([3, 1]) == causal() & lengths([3, 1])
    True
    """

    # Its name in wire form; a class without one goes by its full name
    wire: str = ""
    # The classes that can be read back from there
    by_wire: ClassVar[dict[str, type[Mask]]] = {}
    # whether a place there is one of numbers or of arrays by the type of its field, or says so itself
    positional: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.positional = cls.__module__.startswith("clearhead.core.")
        if "wire" not in vars(cls):
            cls.wire = f"{cls.__module__}.{cls.__qualname__}"
            if cls.wire in Mask.by_wire:  # as a class that a function makes anew
                cls.wire += f"#{sum(name.startswith(cls.wire) for name in Mask.by_wire)}"
        Mask.by_wire[cls.wire] = cls
        tree(cls)

    # `array & mask` must come to __rand__ and not be tried element by element
    __array_ufunc__ = None

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        """The answer for some queries and keys: True for all, False for none, or a boolean array."""
        raise NotImplementedError

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        """`tile`, where it is all or nothing and can be told without building it; None where it cannot."""
        return None

    def lower(self, grid: Grid) -> Node:
        """The mask in the terms of kernels; what does not say how is asked for all pairs at once, a byte for each."""

        def pairs() -> Array:
            tile = self.tile(range(grid.queries), range(grid.keys), grid)
            return np.full((1, 1), tile) if isinstance(tile, bool) else tile

        return ArrayNode(pairs, grid.batch, lambda cut: told(self, grid, cut.rows, cut.columns)[None, None])

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        """What this mask says of one pair in one batch row and head, as the second half of a sentence."""
        raise NotImplementedError

    def check(self, grid: Grid) -> None:
        """Refuse sizes that this mask does not fit."""
        self.tile(range(min(1, grid.queries)), range(min(1, grid.keys)), grid)

    def extent(self) -> tuple[int, int]:
        """How many queries and keys there are at least; 0 where this mask leaves it open."""
        return 0, 0

    def allows(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> bool:
        """May this query attend to this key, in one batch row and head?"""
        tile = self.tile(range(query, query + 1), range(key, key + 1), grid)
        return tile if isinstance(tile, bool) else bool(part(to_numpy(tile), at)[0, 0])

    def dense(self, queries: int, keys: int | None = None, *, batch: tuple[int, ...] = (), heads: int = 1) -> Array:
        """The whole mask as a boolean array (*batch, heads, queries, keys), for looking at small ones.

        >>> from clearhead.core.masks import causal
        >>> causal().dense(3)[0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        """
        grid = Grid(batch, heads, queries, queries if keys is None else keys)
        hold(self, grid)
        tile = self.tile(range(grid.queries), range(grid.keys), grid)
        return np.broadcast_to(tile if isinstance(tile, bool) else to_numpy(tile), grid.shape)

    def explain(
        self,
        query: int,
        key: int,
        *,
        queries: int | None = None,
        keys: int | None = None,
        batch: tuple[int, ...] = (),
        heads: int = 1,
        at: tuple[int, ...] | None = None,
    ) -> str:
        """One sentence: may this query attend to this key, and why. `at` picks a batch row and head.

        >>> from clearhead.core.masks import window
        >>> window(2).explain(7, 9)
        'query 7 may not attend to key 9: window(2) lets position 7 see keys 5 to 7'
        """
        least = self.extent()
        if queries is None and keys is None and (0 not in least or isinstance(self, Where)):  # an array says how many
            queries, keys = (max(n + 1, size) if size else None for n, size in zip((query, key), least, strict=True))
        side = max(query + 1, key + 1, *least)
        grid = Grid(batch, heads, side if queries is None else queries, side if keys is None else keys)
        if not (0 <= query < grid.queries and 0 <= key < grid.keys):
            raise ArgumentError(
                "query, key", f"({query}, {key}) lies outside {grid.queries} queries × {grid.keys} keys"
            )
        _some(grid)
        hold(self, grid)
        at = (0,) * (len(batch) + 1) if at is None else at
        verdict = "may" if self.allows(query, key, grid, at) else "may not"
        return f"query {query} {verdict} attend to key {key}: {self.reason(query, key, grid, at)}"

    def picture(
        self, queries: int, keys: int | None = None, *, batch: tuple[int, ...] = (), heads: int = 1, side: int = 32
    ) -> Picture:
        """A small picture: `■` may attend, `·` may not, `▒` some of a block where there are more than `side`.

        With batch rows or heads it shows the first. It is a string, which a notebook draws as squares.

        >>> from clearhead.core.masks import causal, prefix
        >>> print((causal() | prefix(2)).picture(4, 6))
        ■ ■ ■ · · ·
        ■ ■ ■ ■ · ·
        ■ ■ ■ ■ ■ ·
        ■ ■ ■ ■ ■ ■
        """
        sizes = Grid(batch, heads, queries, queries if keys is None else keys)
        _some(sizes)
        hold(self, sizes)
        sign = {True: "■", False: "·", None: "▒"}
        rows, columns = bins(sizes.queries, side), bins(sizes.keys, side)
        return Picture("\n".join(" ".join(sign[self._verdict(r, c, sizes)] for c in columns) for r in rows))

    def _verdict(self, rows: range, columns: range, grid: Grid) -> bool | None:
        """All (True), none (False) or some (None) of a block of the first batch row and head, however large it is."""
        known = self.decide(rows, columns, grid)
        if known is not None:
            return known
        if len(rows) * len(columns) <= 256 * 256:
            tile = self.tile(rows, columns, grid)
            if isinstance(tile, bool):
                return tile
            seen = part(to_numpy(tile), (0,) * (len(grid.batch) + 1))
            return True if seen.all() else None if seen.any() else False
        verdicts = set()
        for quarter in [(r, c) for r in bins_of(rows, 2) for c in bins_of(columns, 2)]:
            verdicts.add(self._verdict(*quarter, grid))
            if verdicts in ({None}, {True, False}):
                return None
        return verdicts.pop() if len(verdicts) == 1 else None

    def __and__(self, other: Mask | Array) -> Mask:
        return Both(self, as_mask("mask", other))

    def __rand__(self, other: Array) -> Mask:
        return Both(as_mask("mask", other), self)

    def __or__(self, other: Mask | Array) -> Mask:
        return Either(self, as_mask("mask", other))

    def __ror__(self, other: Array) -> Mask:
        return Either(as_mask("mask", other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other) or not is_dataclass(self):
            return self is other
        return same(self, other)

    def __hash__(self) -> int:
        return digest(self) if is_dataclass(self) else object.__hash__(self)

    def __bool__(self) -> bool:
        raise ArgumentError(
            "mask",
            f"{self!r} is neither true nor false, as an array is not: masks are joined by & | ~, not by and, or, not",
        )

    # How tightly the printed form binds: a name or call 3, ~ 3, & 2, | 1
    binding = 3

    def inside(self, binding: int) -> str:
        """The printed form, in brackets where the operator around it binds tighter."""
        return f"({self!r})" if self.binding < binding else repr(self)


def _some(grid: Grid) -> None:
    """Refuse to show a pair of a batch row or head where there is none."""
    if 0 in (*grid.batch, grid.heads):
        raise ArgumentError("batch, heads", f"are {grid.batch} and {grid.heads}: there is none to show")


def as_mask(argument: str, value: Mask | Array) -> Mask:
    """A mask value as it is; a boolean array as `where(array)`; anything else refused in words."""
    if isinstance(value, Mask):
        return value
    introduce()
    if not is_array(value):
        raise ArgumentError(argument, f"is a {type(value).__name__}, expected a boolean array or a mask value")
    value = admit(argument, value)
    name = dtype_name(value)
    if name != "bool":
        hint = ", bias= for what is added to scores" if name.startswith(("float", "bfloat")) else ""
        raise ArgumentError(
            argument,
            f"has dtype {name}, expected bool: lets(array) for 1 where a query may attend, hides(array) for 1 where it"
            f" may not{hint}",
        )
    return Where(settled(value if value.ndim >= 2 else value[(None,) * (2 - value.ndim) + (...,)]))


def larger_extent(left: Mask, right: Mask) -> tuple[int, int]:
    """How many queries and keys there are at least, as far as either says."""
    (queries, keys), (also, more) = left.extent(), right.extent()
    return max(queries, also), max(keys, more)


def decided(tile: Array) -> Tile:
    """A tile that is all True or all False said in one word, where its values can be read."""
    if not isinstance(tile, np.ndarray):
        return tile
    return True if tile.all() else tile if tile.any() else False


@dataclass(frozen=True, eq=False, repr=False)
class Both(Mask):
    """`left & right`: what both allow."""

    left: Mask
    right: Mask
    binding = 2
    wire = "and"

    def lower(self, grid: Grid) -> Node:
        return self.left.lower(grid) & self.right.lower(grid)

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        left, right = self.left.decide(rows, columns, grid), self.right.decide(rows, columns, grid)
        return False if False in (left, right) else None if None in (left, right) else True

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        left = self.left.tile(rows, columns, grid)
        if left is False:
            return False
        right = self.right.tile(rows, columns, grid)
        if left is True or right is False:
            return right
        if right is True:
            return left
        left, right = alike(left, right)
        return decided(left & right)

    def check(self, grid: Grid) -> None:
        self.left.check(grid)
        self.right.check(grid)

    def extent(self) -> tuple[int, int]:
        return larger_extent(self.left, self.right)

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        parts = (self.left, self.right)
        refusing = [mask for mask in parts if not mask.allows(query, key, grid, at)]
        return " and ".join(mask.reason(query, key, grid, at) for mask in refusing or parts)

    def __repr__(self) -> str:
        return f"{self.left.inside(2)} & {self.right.inside(2)}"


@dataclass(frozen=True, eq=False, repr=False)
class Either(Mask):
    """`left | right`: what at least one allows."""

    left: Mask
    right: Mask
    binding = 1
    wire = "or"

    def lower(self, grid: Grid) -> Node:
        return self.left.lower(grid) | self.right.lower(grid)

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        left, right = self.left.decide(rows, columns, grid), self.right.decide(rows, columns, grid)
        return True if True in (left, right) else None if None in (left, right) else False

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        left = self.left.tile(rows, columns, grid)
        if left is True:
            return True
        right = self.right.tile(rows, columns, grid)
        if left is False or right is True:
            return right
        if right is False:
            return left
        left, right = alike(left, right)
        return decided(left | right)

    def check(self, grid: Grid) -> None:
        self.left.check(grid)
        self.right.check(grid)

    def extent(self) -> tuple[int, int]:
        return larger_extent(self.left, self.right)

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        parts = (self.left, self.right)
        allowing = [mask for mask in parts if mask.allows(query, key, grid, at)]
        return " and ".join(mask.reason(query, key, grid, at) for mask in allowing or parts)

    def __repr__(self) -> str:
        return f"{self.left.inside(1)} | {self.right.inside(1)}"


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """`~mask`: what the other does not allow."""

    mask: Mask
    wire = "not"

    def lower(self, grid: Grid) -> Node:
        return ~self.mask.lower(grid)

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        known = self.mask.decide(rows, columns, grid)
        return None if known is None else not known

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        tile = self.mask.tile(rows, columns, grid)
        return not tile if isinstance(tile, bool) else ~tile

    def check(self, grid: Grid) -> None:
        self.mask.check(grid)

    def extent(self) -> tuple[int, int]:
        return self.mask.extent()

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        return f"the opposite holds of {self.mask.reason(query, key, grid, at)}"

    def __repr__(self) -> str:
        return f"~{self.mask.inside(3)}"


@dataclass(frozen=True, eq=False, repr=False)
class Where(Mask):
    """A boolean array that broadcasts to (*batch, heads, queries, keys)."""

    array: Array
    wire = "where"

    def lower(self, grid: Grid) -> Node:
        return ArrayNode(lambda: self.array, grid.batch)

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        return decided(cut(self.array, rows, columns))

    def decide(self, rows: range, columns: range, grid: Grid) -> bool | None:
        tile = self.tile(rows, columns, grid)  # a view: nothing is built
        return tile if isinstance(tile, bool) else None

    def check(self, grid: Grid) -> None:
        fitting("mask", tuple(self.array.shape), grid)

    def extent(self) -> tuple[int, int]:
        queries, keys = (0 if size == 1 else int(size) for size in self.array.shape[-2:])
        return queries, keys

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        return f"{self!r} holds {self.allows(query, key, grid, at)} there"

    def __repr__(self) -> str:
        return f"where(array{tuple(self.array.shape)})"
