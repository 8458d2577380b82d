"""Positions: rotary embeddings, ALiBi and relative (T5) biases, sinusoidal encodings.

A bias is a value that is evaluated tile by tile, like a mask; rotary turns queries and keys before the call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from clearhead.core.admit import admit
from clearhead.core.arrays import (
    Array,
    ArrayOf,
    ArrayT,
    Library,
    is_array,
    is_traced,
    require_array,
    require_floating,
    to_numpy,
)
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import LARGEST, Align, Alignment, Grid, cut, fitting
from clearhead.core.trees import tree


class Bias:
    """What is added to the scaled scores, answered tile by tile."""

    def tile(self, rows: range, columns: range, grid: Grid) -> Array:
        """An array that broadcasts to (*batch, heads, rows, columns)."""
        raise NotImplementedError

    def check(self, grid: Grid) -> None:
        """Refuse sizes that this bias does not fit."""
        raise NotImplementedError

    @property
    def parameter(self) -> Array | None:
        """The array that gradients may be asked for; None where there is none."""
        return None


@tree
@dataclass(frozen=True, eq=False, repr=False)
class Added(Bias):
    """A bias array that broadcasts to (*batch, heads, queries, keys)."""

    array: Array

    def tile(self, rows: range, columns: range, grid: Grid) -> Array:
        return cut(self.array, rows, columns)

    def check(self, grid: Grid) -> None:
        fitting("bias", tuple(self.array.shape), grid)

    @property
    def parameter(self) -> Array:
        return self.array

    def __repr__(self) -> str:
        return f"array{tuple(self.array.shape)}"


@tree
@dataclass(frozen=True, eq=False, repr=False)
class Alibi(Bias):
    """−slope · |key position − query position|, one slope a head."""

    slopes: np.ndarray
    alignment: Alignment

    def tile(self, rows: range, columns: range, grid: Grid) -> Array:
        places = np.asarray(rows)[:, None] + self.alignment.offset(grid)
        return -self.slopes[:, None, None] * abs(np.asarray(columns) - places)  # abs: offsets may be traced by JAX

    def by_distance(self, distance: np.ndarray) -> np.ndarray:
        """(heads, …) for distances key − query: the bias depends on nothing else."""
        return -self.slopes[:, None] * np.abs(distance)

    def check(self, grid: Grid) -> None:
        _heads("alibi", self.slopes.size, grid)
        self.alignment.check(grid)

    def __repr__(self) -> str:
        return f"alibi({', '.join([str(self.slopes.size), *self.alignment.arguments()])})"


@tree
@dataclass(frozen=True, eq=False, repr=False)
class Relative(Bias):
    """A learned bias for each head and each bucket of key-minus-query distances, as in T5."""

    table: Array
    bidirectional: bool
    max_distance: int
    alignment: Alignment

    def tile(self, rows: range, columns: range, grid: Grid) -> Array:
        # int also where there are none: NumPy takes an empty range for floating-point numbers
        queries, keys = np.asarray(rows, dtype=np.int64), np.asarray(columns, dtype=np.int64)
        chosen = self.chosen(keys - (queries[:, None] + self.alignment.offset(grid)))
        library = Library.of(self.table)
        table, flat = self.table, chosen.reshape(-1)
        if is_traced(flat):  # by JAX, which the table then becomes one of
            library = Library.of(flat)
            table = library.asarray(table)
        values = library.xp.take(table, library.asarray(flat), axis=0)  # (…·rows·columns, heads)
        values = library.xp.reshape(values, (*chosen.shape, self.table.shape[1]))
        if chosen.ndim == 2:
            return library.xp.permute_dims(values, (2, 0, 1))
        # offsets of each batch row: (*batch, 1, rows, columns, heads) → (*batch, heads, rows, columns)
        return library.xp.moveaxis(values, -1, -4)[..., 0, :, :]

    def check(self, grid: Grid) -> None:
        _heads("relative_bias", self.table.shape[1], grid)
        self.alignment.check(grid)

    def by_distance(self, distance: np.ndarray) -> np.ndarray:
        """(heads, …) for distances key − query: the bias depends on nothing else."""
        return to_numpy(self.table)[self.chosen(distance)].T

    def chosen(self, distance: np.ndarray) -> np.ndarray:
        """The row of the table for each distance key − query."""
        return buckets(distance, self.table.shape[0], bidirectional=self.bidirectional, most=self.max_distance)

    @property
    def parameter(self) -> Array:
        return self.table

    def __repr__(self) -> str:
        return f"relative_bias(table{tuple(self.table.shape)}, bidirectional={self.bidirectional})"


def distances(offset: np.ndarray, grid: Grid) -> tuple[np.ndarray, int, np.ndarray]:
    """The distances key − query that occur with these offsets, one for each batch row: (distance, centre, place).

    Row b finds query i and key j at entry i + place[b] − j + centre. Where offsets are far apart, what lies between is
    left out, so that there are no more entries than rows have queries and keys.

    >>> distance, centre, place = distances(np.array([10**8, 3]), Grid((2,), 1, 2, 4))
    >>> distance.size, int(distance[1 + place[0] - 2 + centre])
    (14, -99999999)
    """
    distinct, rank = np.unique(offset if offset.size else np.zeros(1, np.int64), return_inverse=True)
    most = grid.queries + grid.keys + 1
    place = np.append(0, np.cumsum(np.minimum(np.diff(distinct), most)))
    entry = np.arange(-grid.keys, int(place[-1]) + grid.queries + 1)
    owner = np.searchsorted(place, entry + grid.keys, side="right") - 1  # the last offset that begins before it
    return -(entry - place[owner] + distinct[owner]), grid.keys, np.ascontiguousarray(place[rank][: offset.size])


def _heads(argument: str, count: int, grid: Grid) -> None:
    if count != grid.heads:
        raise ArgumentError(argument, f"is for {count} heads, but the queries have {grid.heads}")


def as_bias(value: Bias | Array) -> Bias:
    """A bias value as it is, a floating-point array as an added bias; anything else refused in words."""
    if isinstance(value, Bias):
        return value
    if not is_array(value):
        raise ArgumentError("bias", f"is a {type(value).__name__}, expected a floating-point array or a bias value")
    value = admit("bias", value)
    require_floating("bias", value)
    return Added(value)


def alibi(heads: int, *, align: Align = "end", offset: object = None) -> Bias:
    """ALiBi: a penalty that grows with distance, steeper for some heads (Press et al. 2021).

    Slopes are 2^(−8/n), 2^(−16/n), … for n heads; where n is no power of two, those of the power below it and then
    every other one of the power above it.

    >>> alibi(8).slopes[:3].tolist()
    [0.5, 0.25, 0.125]
    """
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ArgumentError("heads", f"is {heads!r}, expected a whole number of at least 1")

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    power = 2 ** math.floor(math.log2(heads))
    slopes = geometric(power) + geometric(2 * power)[0::2][: heads - power]
    return Alibi(np.array(slopes), Alignment.of(align, offset))


def relative_bias(
    table: Array, *, bidirectional: bool = True, max_distance: int = 128, align: Align = "end", offset: object = None
) -> Bias:
    """T5's relative bias: `table` (buckets, heads) holds one number for each bucket of distances and each head.

    Short distances have a bucket each, half of those on a side; longer ones share the others, of growing width up to
    `max_distance`, which is therefore above that half. An encoder is bidirectional: half the buckets are for keys after
    the query. A decoder is not: keys after it are all bucket 0.

    >>> relative_bias(np.zeros((32, 8)), max_distance=128)
    relative_bias(table(32, 8), bidirectional=True)
    """
    require_array("table", table)
    table = admit("table", table)
    require_floating("table", table)
    least = 4 if bidirectional else 2
    if table.ndim != 2 or table.shape[0] < least:
        raise ArgumentError(
            "table", f"has shape {tuple(table.shape)}, expected (buckets, heads), buckets at least {least}"
        )
    exact, side = table.shape[0] // least, "on each side " if bidirectional else ""
    whole = isinstance(max_distance, int | np.integer) and not isinstance(max_distance, bool)
    if not whole or not exact < max_distance < LARGEST:
        raise ArgumentError(
            "max_distance",
            f"is {shown(max_distance)}, expected a whole number above {exact} and below 2**60:"
            f" of {table.shape[0]} buckets the first {exact} {side}hold one distance each",
        )
    return Relative(table, bidirectional, int(max_distance), Alignment.of(align, offset))


def buckets(distance: Array, count: int, *, bidirectional: bool, most: int) -> Array:
    """The T5 bucket of each key-minus-query distance.

    >>> buckets(np.array([-200, -9, -1, 0, 1, 9, 200]), 32, bidirectional=True, most=128).tolist()
    [15, 8, 1, 0, 17, 24, 31]
    """
    xp = Library.of(distance).xp
    base = xp.zeros_like(distance)
    if bidirectional:
        count //= 2
        base = xp.where(distance > 0, count, 0)
        far = xp.abs(distance)
    else:
        far = xp.maximum(-distance, 0)
    exact = count // 2
    # float32, because that is where T5's checkpoints rounded: a boundary distance must fall into the same bucket
    near = xp.astype(xp.maximum(far, 1), xp.float32) / np.float32(exact)
    ratio = xp.log(near) / np.float32(math.log(most / exact))
    shared = exact + xp.astype(ratio * (count - exact), base.dtype)
    return base + xp.where(far < exact, far, xp.minimum(shared, count - 1))


@dataclass(frozen=True)
class Yarn:
    """YaRN: slow rotations are interpolated, fast ones kept (Peng et al. 2023).

    >>> rotary(scaling=Yarn(4.0, original_length=2048)).frequencies(4).round(4).tolist()
    [1.0, 0.0062]
    """

    factor: float
    original_length: int
    fast: float = 32.0
    slow: float = 1.0

    def stretch(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """The frequencies after scaling: interpolated, kept, and a linear ramp between."""
        count = frequencies.size

        def pair_that_turns(times: float) -> float:
            return count * math.log(self.original_length / (times * 2 * math.pi)) / math.log(base)

        low = max(math.floor(pair_that_turns(self.fast)), 0)
        high = min(math.ceil(pair_that_turns(self.slow)), 2 * count - 1)
        ramp = np.clip((np.arange(count) - low) / max(high - low, 0.001), 0, 1)
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied with, so that the softmax keeps its sharpness at the new length."""
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Linear:
    """Linear position interpolation: every frequency divided by `factor` (Chen et al. 2023).

    >>> rotary(scaling=Linear(4.0)).frequencies(4).tolist()
    [0.25, 0.0025]
    """

    factor: float
    magnitude: float = 1.0

    def stretch(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """The frequencies after scaling."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: pairs of features turn by an angle that grows with position. Call it on queries and keys."""

    base: float
    dimension: int | None
    layout: Literal["half", "interleaved"]
    scaling: Yarn | Linear | None

    def frequencies(self, dimension: int) -> np.ndarray:
        """Radians a position, for each pair of features."""
        frequencies = self.base ** (-np.arange(0, dimension, 2) / dimension)
        return frequencies if self.scaling is None else self.scaling.stretch(frequencies, self.base)

    def __call__(self, x: ArrayOf[ArrayT], *, offset: object = 0) -> ArrayT:
        """x (…, T, D) turned; `offset` is the position of the first row, one number or one for each batch row.

        >>> x = np.ones((1, 3, 4))
        >>> rotary()(x, offset=0)[0, 0].tolist()
        [1.0, 1.0, 1.0, 1.0]
        """
        require_array("x", x)
        require_floating("x", x)
        width, length = x.shape[-1], x.shape[-2]
        turning = width if self.dimension is None else self.dimension
        if turning > width or turning % 2:
            raise ArgumentError("x", f"has {width} features, of which {turning} cannot be turned in pairs")
        start = Alignment.of("start", offset).given
        assert start is not None
        if start.ndim:
            start = start.reshape((*start.shape, *(1,) * (x.ndim - start.ndim)))  # one for each batch row
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        library = Library.of(x)
        xp, precise = library.xp, library.computing(x)
        turns = traced_turns if is_traced(start) else turns_of
        cos, sin = (
            library.asarray(turn, precise.dtype) for turn in turns(start, length, self.frequencies(turning), magnitude)
        )
        rotated, rest = precise[..., :turning], precise[..., turning:]
        if self.layout == "half":
            one, two = rotated[..., : turning // 2], rotated[..., turning // 2 :]
            turned = xp.concat([one * cos - two * sin, two * cos + one * sin], axis=-1)
        else:
            one, two = rotated[..., 0::2], rotated[..., 1::2]
            turned = xp.stack([one * cos - two * sin, two * cos + one * sin], axis=-1)
            turned = xp.reshape(turned, rotated.shape)
        return xp.astype(xp.concat([turned, rest], axis=-1), x.dtype)


def turns_of(start: np.ndarray, length: int, frequencies: np.ndarray, magnitude: float) -> tuple[Array, Array]:
    """Cosine and sine of every angle (…, T, pairs), the first row at `start`."""
    angles = (np.arange(length)[:, None] + start) * frequencies
    return magnitude * np.cos(angles), magnitude * np.sin(angles)


def traced_turns(start: Array, length: int, frequencies: np.ndarray, magnitude: float) -> tuple[Array, Array]:
    """The same where JAX traces `start`: turned by each of its bytes, from tables.

    JAX mostly has float32, in which the angle of a position far out has no digits left; a turn of one byte has all.
    """
    cos, sin = turns_of(np.zeros((), np.int64), length, frequencies, magnitude)
    xp = Library.of(start).xp
    sign = xp.where(start < 0, -1, 1)
    for place in range(start.dtype.itemsize):
        byte = (abs(start) >> (8 * place)) & 255
        byte = byte[..., 0] if byte.ndim else byte
        steps = np.arange(256)[:, None] * (256.0**place * frequencies)
        across, up = xp.asarray(np.cos(steps))[byte], xp.asarray(np.sin(steps))[byte] * sign
        cos, sin = cos * across - sin * up, sin * across + cos * up
    return cos, sin


def rotary(
    *,
    base: float = 10000.0,
    dimension: int | None = None,
    layout: Literal["half", "interleaved"] = "half",
    scaling: Yarn | Linear | None = None,
) -> Rotary:
    """Rotary position embedding (Su et al. 2021), to be called on queries and keys.

    `layout` says which features are a pair: "half" pairs i with i + d/2, as Llama and GPT-NeoX; "interleaved" pairs
    2i with 2i + 1, as the paper and GPT-J. `dimension` turns only the first features. `scaling` is `Linear(factor)` or
    `Yarn(factor, original_length)`.

    >>> rotary(layout="interleaved")(np.ones((2, 5, 8)), offset=3).shape
    (2, 5, 8)
    """
    if layout not in ("half", "interleaved"):
        raise ArgumentError("layout", f"is {layout!r}, expected 'half' or 'interleaved'")
    if dimension is not None and (dimension < 2 or dimension % 2):
        raise ArgumentError("dimension", f"is {dimension!r}, expected an even number of at least 2")
    if base <= 1:
        raise ArgumentError("base", f"is {base!r}, expected a number above 1")
    return Rotary(float(base), dimension, layout, scaling)


def sinusoidal(n: int, d: int, *, base: float = 10000.0) -> np.ndarray:
    """The sine and cosine position encodings of the Transformer paper, (n, d): even features sine, odd cosine.

    >>> sinusoidal(2, 4).round(4).tolist()
    [[0.0, 1.0, 0.0, 1.0], [0.8415, 0.5403, 0.01, 1.0]]
    """
    if d % 2:
        raise ArgumentError("d", f"is {d}, expected an even number")
    angles = np.arange(n)[:, None] * base ** (-np.arange(0, d, 2) / d)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(n, d)
