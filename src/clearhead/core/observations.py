"""What can be observed of attention, and the value that holds it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple

import numpy as np

from clearhead.core.arrays import Array, ArrayT, Library, is_array, is_traced, to_numpy
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import Grid
from clearhead.core.partial import Partial

# More than there are keys or queries anywhere
MOST = 2**31


class Top(NamedTuple, Generic[ArrayT]):
    """The largest weights of each query, (…, T, k) in descending order; index −1 where there is no weight left."""

    indices: Array
    weights: ArrayT


class Map(NamedTuple, Generic[ArrayT]):
    """The weights pooled into blocks of queries × keys: the mean and the largest of each block, (…, rows, columns)."""

    mean: ArrayT
    max: ArrayT


class Rows(NamedTuple, Generic[ArrayT]):
    """The exact weights of some queries: their indices, and (…, len(indices), S)."""

    indices: Array
    weights: ArrayT


@dataclass(frozen=True)
class Want:
    """What a caller asked to observe, checked; `queries` and `received` in absolute positions."""

    top: int | None = None
    received: int | None = None
    map: tuple[int, int] | None = None
    queries: tuple[int, ...] | None = None
    weights: bool = False

    @property
    def by_tile(self) -> bool:
        """True where something is wanted that needs the weights themselves, and so a second look at the scores."""
        return self != Want()


def want(grid: Grid, top: Any, received: Any, map: Any, queries: Any, weights: Any) -> Want:
    """The keywords of `observe`, checked against the sizes of the call."""
    whole = isinstance(top, int | np.integer) and not isinstance(top, bool)
    if top is not None and not (whole and 1 <= top < MOST):
        least = "a whole number of at least 1" + (f" and below {MOST:,}" if whole and top >= MOST else "")
        raise ArgumentError("top", f"is {shown(top)}, expected {least}")
    if received is True:
        received = grid.queries
    elif received is False:
        received = None
    elif received is not None and (not isinstance(received, int | np.integer) or received < 1):
        raise ArgumentError("received", f"is {shown(received)}, expected True or a number of last queries, at least 1")
    if map is not None:
        sizes = tuple(map) if isinstance(map, tuple | list) else ()
        if len(sizes) != 2 or not all(isinstance(n, int | np.integer) and n >= 1 for n in sizes):
            raise ArgumentError("map", f"is {shown(map)}, expected (rows, columns), each at least 1")
        map = (min(int(sizes[0]), MOST), min(int(sizes[1]), MOST))
    if queries is not None:
        queries = _positions(queries, grid.queries)
    if not isinstance(weights, bool):
        raise ArgumentError("weights", f"is {weights!r}, expected True or False")
    return Want(
        None if top is None else int(top),
        None if received is None else min(int(received), grid.queries),
        map,
        queries,
        weights,
    )


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


@dataclass(frozen=True, eq=False, repr=False)
class Observed(Generic[ArrayT]):
    """What one call gave and what it attended to. What was not asked for is None.

    Shapes follow the output (…, H, T, Dv). All but the output are in at least float32, and speak of the weights before
    dropout. Indexing picks batch rows and heads: `observed[0, 2]`.
    """

    output: ArrayT
    lse: ArrayT
    max_score: ArrayT
    entropy: ArrayT
    kernel: str
    top: Top[ArrayT] | None = None
    received: ArrayT | None = None
    map: Map[ArrayT] | None = None
    queries: Rows[ArrayT] | None = None
    weights: ArrayT | None = None
    share: ArrayT | None = None  # of the keys in all weights, where a sink has the rest; for `partial`

    @property
    def partial(self) -> Partial[ArrayT]:
        """This call as a part that merges with others over other keys; see `merge`."""
        return Partial(self.output, self.lse, self.max_score, self.entropy, self.share)

    def numpy(self) -> Observed[np.ndarray]:
        """The same with every array in NumPy."""
        return self.each(to_numpy)

    def each(self, function: Any) -> Observed[Any]:
        """The same with `function` applied to every array that has the call's leading axes."""

        def apply(value: Any) -> Any:
            if value is None or isinstance(value, str):
                return value
            if isinstance(value, Rows):  # positions are the same for every head
                return Rows(value.indices, function(value.weights))
            if isinstance(value, Top | Map):
                return type(value)(*map(function, value))
            return function(value)

        return replace(self, **{field.name: apply(getattr(self, field.name)) for field in fields(self)})

    def __getitem__(self, index: Any) -> Observed[ArrayT]:
        chosen = _indices(index if isinstance(index, tuple) else (index,), self.lse)
        return self.each(lambda array: array[(*chosen, ...)])

    def __repr__(self) -> str:
        *lead, length, width = self.output.shape
        keys = next(
            (
                a.shape[-1]
                for a in (self.received, self.weights, self.queries and self.queries.weights)
                if a is not None
            ),
            None,
        )
        over = "" if keys is None else f" over {keys} keys"
        lines = [f"Observed {tuple(lead)} heads × {length} queries{over}, {width} features, by {self.kernel!r}"]
        lines += [_line(name, to_numpy(getattr(self, name))) for name in ("lse", "max_score", "entropy")]
        if self.received is not None:
            lines.append(_line("received", to_numpy(self.received)) + _favourite(to_numpy(self.received)))
        if self.top is not None:
            first = to_numpy(self.top.weights)[..., 0]
            lines.append(_line("top", first) + f"   largest of {self.top.weights.shape[-1]} for each query")
        if self.map is not None:
            lines.append(_line("map", to_numpy(self.map.mean)) + f"   {' × '.join(map(str, self.map.mean.shape[-2:]))}")
        if self.queries is not None:
            lines.append(f"  queries    rows {np.asarray(self.queries.indices).tolist()[:6]}")
        if self.weights is not None:
            lines.append(f"  weights    {' × '.join(map(str, self.weights.shape))}")
        return "\n".join(lines)


def _indices(index: tuple[Any, ...], rows: Array) -> list[Any]:
    """An index of the leading axes of `rows` (…, T), meaning the same in every library; one for each axis it names."""
    library, lead = Library.of(rows), tuple(rows.shape[:-1])
    given = [i if i is None or i is Ellipsis or isinstance(i, slice) else _places(i) for i in index]
    # by identity: == would ask an array for each of its numbers
    used = sum(0 if i is None or i is Ellipsis else _axes(i) for i in given)
    if used > len(lead):
        raise IndexError(
            f"{used} indices for {len(lead)} leading axes (batch and heads); positions are not indexed here"
        )
    if sum(1 for i in given if i is Ellipsis) > 1:
        raise IndexError("two … in one index, expected at most one")
    chosen: list[Any] = []
    axis = 0
    for i in given:
        if i is Ellipsis:
            chosen += [slice(None)] * (len(lead) - used)
            axis += len(lead) - used
        elif i is None:
            chosen.append(None)
        elif isinstance(i, slice):
            chosen.append(i)
            axis += 1
        else:
            sizes = lead[axis : axis + _axes(i)]
            if i.dtype == bool and i.shape != sizes:
                raise IndexError(f"a boolean index of shape {i.shape} for leading axes of shape {sizes}")
            outside = [] if i.dtype == bool else i[(i < -sizes[0]) | (i >= sizes[0])]
            if len(outside):  # JAX would take the nearest there is
                raise IndexError(
                    f"index {outside[0]} for an axis of {sizes[0]}: expected {-sizes[0]} to {sizes[0] - 1}"
                )
            places = np.nonzero(i) if i.dtype == bool else (i,)
            chosen += [int(one) if one.ndim == 0 else library.asarray(one) for one in places]
            axis += len(sizes)
    return chosen


def _places(index: Any) -> np.ndarray:
    """Positions along an axis, or a choice of them, as NumPy's whole numbers or booleans."""
    if is_traced(index):
        raise IndexError("a traced index, expected numbers")
    try:
        places = to_numpy(index) if is_array(index) else np.asarray(index)
    except ValueError:
        places = np.asarray("ragged")
    if places.size == 0 and not is_array(index):
        return places.astype(np.int64)
    if places.dtype.kind not in "iub" or (places.dtype.kind == "b" and not places.ndim):
        raise IndexError(
            f"{shown(index)} as an index, expected whole numbers, slices, booleans for each row or head, …"
        )
    return places if places.dtype.kind == "b" else places.astype(np.int64)


def _axes(index: Any) -> int:
    """How many axes an index names: booleans as many as they have."""
    return index.ndim if isinstance(index, np.ndarray) and index.dtype == bool else 1


def _line(name: str, values: np.ndarray) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return f"  {name:<10} none finite of {values.size}"
    line = f"  {name:<10} {finite.min():.4g} … {finite.mean():.4g} … {finite.max():.4g}"
    gone = values.size - finite.size
    return line + (f"   ({gone} not finite)" if gone else "")


def _favourite(received: np.ndarray) -> str:
    by_key = received.sum(axis=tuple(range(received.ndim - 1)))
    return f"   most by key {int(by_key.argmax())}" if by_key.size else ""
