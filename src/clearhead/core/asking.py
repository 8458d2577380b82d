"""What may be asked of `observe`, checked against the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, Library, dtype_name, is_array, is_traced, to_numpy, without_gradient
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import Grid

# More than there are keys or queries anywhere
MOST = 2**31


@dataclass(frozen=True, eq=False)
class QueryWeights:
    """How much each query counts: an array that broadcasts to (…, heads, T). Two are the same if they are one."""

    array: Array

    def over(self, library: Library, dtype: Any, shape: tuple[int, ...]) -> Array:
        """One number for each of `shape` = (*batch, heads, T)."""
        array = library.asarray(without_gradient(self.array))
        return library.xp.broadcast_to(library.xp.astype(array, dtype), shape)


def checked_top(top: Any, grid: Grid) -> int:
    """How many of the largest."""
    whole = isinstance(top, int | np.integer) and not isinstance(top, bool)
    if not (whole and 1 <= top < MOST):
        least = "a whole number of at least 1" + (f" and below {MOST:,}" if whole and top >= MOST else "")
        raise ArgumentError("top", f"is {shown(top)}, expected {least}")
    return int(top)


def last_queries(argument: str, *, weighted: bool = False) -> Callable[[Any, Grid], int | QueryWeights | None]:
    """What checks how many last queries count or, `weighted`, how much each does."""

    def checked(asked: Any, grid: Grid) -> int | QueryWeights | None:
        asked = np.asarray(asked) if weighted and isinstance(asked, list | tuple) else asked
        if weighted and is_array(asked) and not isinstance(asked, np.generic):
            return query_weights(argument, asked, grid)
        if isinstance(asked, bool):
            return grid.queries if asked else None
        if not isinstance(asked, int | np.integer) or asked < 1:
            raise ArgumentError(argument, f"is {shown(asked)}, expected True or a number of last queries, at least 1")
        return min(int(asked), grid.queries)

    return checked


def query_weights(argument: str, asked: Array, grid: Grid) -> QueryWeights:
    """How much each query counts."""
    kind, shape, whole = dtype_name(asked), tuple(asked.shape), (*grid.batch, grid.heads, grid.queries)
    if not (kind == "bool" or kind.startswith(("int", "uint", "float", "bfloat"))):
        raise ArgumentError(argument, f"has dtype {kind}, expected numbers: one weight for each query")
    try:
        fits = bool(shape) and shape[-1] == grid.queries and np.broadcast_shapes(shape, whole) == whole
    except ValueError:
        fits = False
    if not fits:
        raise ArgumentError(
            argument, f"has shape {shape}, expected a weight for each query, which broadcasts to {whole}"
        )
    return QueryWeights(asked)


def checked_map(map: Any, grid: Grid) -> tuple[int, int]:
    """Rows and columns of a map, at most."""
    sizes = tuple(map) if isinstance(map, tuple | list) else ()
    if len(sizes) != 2 or not all(isinstance(n, int | np.integer) and n >= 1 for n in sizes):
        raise ArgumentError("map", f"is {shown(map)}, expected (rows, columns), each at least 1")
    return min(int(sizes[0]), MOST), min(int(sizes[1]), MOST)


def checked_queries(queries: Any, grid: Grid) -> tuple[int, ...]:
    """Positions of queries, from the front."""
    return _positions(queries, grid.queries)


def checked_weights(weights: Any, grid: Grid) -> bool:
    """Whether all of them."""
    if not isinstance(weights, bool):
        raise ArgumentError("weights", f"is {weights!r}, expected True or False")
    return weights


def those_there(queries: Any, count: int) -> list[int]:
    """Of some positions those that a call with so many queries has."""
    return [int(i) for i in np.atleast_1d(np.asarray(queries)) if -count <= i < count]


def _positions(queries: Any, count: int) -> tuple[int, ...]:
    """Positions of queries, counted from the front."""
    if is_traced(queries):
        raise ArgumentError("queries", "is traced, expected numbers")
    try:
        chosen = np.atleast_1d(to_numpy(queries) if is_array(queries) else np.asarray(queries))
    except ValueError:  # lists of lists that have not the same length
        chosen = np.array([None])
    if chosen.ndim > 1:
        raise ArgumentError("queries", f"has shape {chosen.shape}, expected positions of queries in one axis")
    positions = chosen.tolist()
    if not all(type(i) is int for i in positions):
        raise ArgumentError("queries", f"is {shown(queries)}, expected the positions of queries as whole numbers")
    outside = [i for i in positions if not -count <= i < count]
    if outside:
        raise ArgumentError("queries", f"has position {shown(outside[0])}, expected {-count} to {count - 1}")
    return tuple(i % count for i in positions)
