"""The sizes that a mask or bias is asked about, and where queries stand among the keys."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from clearhead.core.arrays import Array, Library, dtype_name, is_torch, is_traced, refuse_masked, settled, to_numpy
from clearhead.core.equality import digest, same
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.trees import introduce, tree

Align = Literal["end", "start"]
# one for all batch rows, or one for each: (batch,)
Numbers: TypeAlias = "int | np.ndarray"
# Positions are below this, so that sums of a few of them stay within 64 bits
LARGEST = 2**60


@dataclass(frozen=True)
class Grid:
    """All query–key pairs of one call: batch axes, query heads, queries and keys."""

    batch: tuple[int, ...]
    heads: int
    queries: int
    keys: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full matrix, which only the `dense` kernel builds."""
        return (*self.batch, self.heads, self.queries, self.keys)

    def __str__(self) -> str:
        return f"(batch {self.batch}, heads {self.heads}, queries {self.queries}, keys {self.keys})"


class Lengths:
    """What has queries (…, T, D) and keys (…, S, D), and says how many of them there are."""

    q: Array
    k: Array

    @property
    def queries(self) -> int:
        """How many queries there are."""
        return int(self.q.shape[-2])

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return int(self.k.shape[-2])


def blocks(length: int, size: int) -> Iterator[range]:
    """The ranges of at most `size` that cover `range(length)`.

    >>> list(blocks(5, 2))
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    for start in range(0, length, size):
        yield range(start, min(start + size, length))


def bins(length: int, most: int) -> list[range]:
    """At most `most` ranges that cover `range(length)`, equal to within one: item i is in bin i·count // length.

    >>> bins(5, 2), bins(2, 9)
    ([range(0, 3), range(3, 5)], [range(0, 1), range(1, 2)])
    """
    count = min(most, length)
    edges = [-(-i * length // count) for i in range(count + 1)] if count else [0]
    return [range(low, high) for low, high in itertools.pairwise(edges)]


def bins_of(whole: range, most: int) -> list[range]:
    """The bins of a range that does not start at 0."""
    return [range(whole.start + part.start, whole.start + part.stop) for part in bins(len(whole), most)]


def whole_numbers(argument: str, value: object, least: int | None = None) -> Array:
    """A number or an array of whole numbers, checked; read into NumPy unless it is traced, which nobody can check."""
    numbers = _whole_numbers(argument, value)
    if least is not None and isinstance(numbers, np.ndarray) and numbers.size and numbers.min() < least:
        raise ArgumentError(argument, f"has {numbers.min()}, expected whole numbers of at least {least}")
    return numbers


def _whole_numbers(argument: str, value: object) -> Array:
    introduce()
    refuse_masked(argument, value)
    torch: Any = sys.modules.get("torch")
    tensor: Any = value if is_torch(value) else None
    if tensor is not None and not torch.compiler.is_compiling() and tensor.layout is not torch.strided:
        raise ArgumentError(argument, "is a sparse tensor, expected whole numbers as they are: .to_dense() gives them")
    if torch is not None and (torch.compiler.is_compiling() or is_torch(value)):
        # what PyTorch compiles stays its own: there, NumPy arrays are tensors in disguise
        numbers = torch.tensor(value) if isinstance(value, int | list | tuple) else torch.as_tensor(value)
        if is_traced(numbers):
            if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
                raise ArgumentError(argument, f"has dtype {dtype_name(numbers)}, expected whole numbers")
            return numbers
    try:
        numbers = settled(value)
    except ValueError:  # lists of lists that have not the same length
        raise ArgumentError(argument, f"is {shown(value)}, expected a whole number or an array of them") from None
    if is_torch(numbers):  # on an accelerator: they are few, and every mask needs to read them
        numbers = to_numpy(numbers)
    if is_traced(numbers):
        if np.dtype(numbers.dtype).kind not in "iu":
            raise ArgumentError(argument, f"has dtype {dtype_name(numbers)}, expected whole numbers")
        return numbers.astype(int)  # with a sign, so that differences have one
    if numbers.dtype.kind == "O" and all(type(number) is int for number in numbers.reshape(-1)):
        raise ArgumentError(argument, "has a number beyond 64 bits, expected whole numbers below 2**63")
    if numbers.dtype.kind not in "iu" and numbers.size:
        raise ArgumentError(argument, f"is {shown(value)}, expected a whole number or an array of them")
    if numbers.dtype == np.uint64 and numbers.size and numbers.max() > np.iinfo(np.int64).max:
        raise ArgumentError(argument, f"has {numbers.max()}, expected whole numbers below 2**63")
    return np.asarray(numbers, dtype=np.int64)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that all broadcast to; a ValueError where they do not. Sizes may be PyTorch's symbols.

    >>> broadcast((2, 1), (5,))
    (2, 5)
    """
    rank = max(map(len, shapes))
    sizes = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if not certainly(size == 1):
                if not certainly(sizes[axis] == 1) and sizes[axis] != size:
                    raise ValueError(f"shapes {shapes} do not broadcast")
                sizes[axis] = size
    return tuple(sizes)


def fits(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """True where `shape` broadcasts to `into`."""
    if len(shape) > len(into):
        return False
    pairs = zip(shape, into[len(into) - len(shape) :], strict=True)
    return all(certainly(size == 1) or bool(size == want) for size, want in pairs)


def certainly(truth: Any) -> bool:
    """What is said of a size, as PyTorch's own functions ask it: a size that is known only at run time is not 1."""
    torch = sys.modules.get("torch")
    if torch is None or (type(truth) is bool and not torch.compiler.is_compiling()):
        return bool(truth)
    return bool(torch.fx.experimental.symbolic_shapes.guard_or_false(truth))


def by_batch(argument: str, values: Array, grid: Grid) -> Array:
    """One number, or one for each batch row, shaped to broadcast against (…, heads, queries, keys)."""
    if values.ndim == 0:
        return values
    if not fits(values.shape, grid.batch):
        raise ArgumentError(
            argument,
            f"has shape {tuple(values.shape)}, expected one number or the batch shape {grid.batch}"
            " (axes before heads, positions and features are batch)",
            rows=tuple(values.shape),
        )
    return values.reshape((*values.shape, 1, 1, 1))


@tree
@dataclass(frozen=True, eq=False)
class Alignment:
    """Where the first query stands among the keys: aligned to an end, or at a given position."""

    align: Align = "end"
    given: Array | None = None

    def __eq__(self, other: object) -> bool:
        return type(other) is Alignment and same(self, other)

    def __hash__(self) -> int:
        return digest(self)

    @classmethod
    def of(cls, align: str, offset: object) -> Alignment:
        """Checked from the `align` and `offset` arguments that causal, window and others share."""
        introduce()
        if align not in ("end", "start"):
            raise ArgumentError("align", f"is {align!r}, expected 'end' or 'start'")
        if offset is not None:
            given = whole_numbers("offset", offset)
            if isinstance(given, np.ndarray) and given.size and not -LARGEST < given.min() <= given.max() < LARGEST:
                raise ArgumentError("offset", f"is {spelled(given)}, expected positions between -2**60 and 2**60")
            return cls("start", given)
        return cls("end" if align == "end" else "start")

    def offset(self, grid: Grid) -> Array:
        """The key position of query 0: one number, or (*batch, 1, 1, 1)."""
        if self.given is not None:
            return by_batch("offset", self.given, grid)
        return np.asarray(self.aligned(grid))

    def aligned(self, grid: Grid) -> int:
        """The same where no position is given."""
        return grid.keys - grid.queries if self.align == "end" else 0

    def number(self, grid: Grid) -> int | None:
        """The same as one number; None where it is not known, or is one for each batch row."""
        if self.given is None:
            return self.aligned(grid)
        return int(self.given) if isinstance(self.given, np.ndarray) and not self.given.ndim else None

    def check(self, grid: Grid) -> None:
        """Refuse an offset for other batch rows than there are."""
        if self.given is not None:
            by_batch("offset", self.given, grid)

    def arguments(self) -> list[str]:
        """How the alignment is spelled in a call, for printing."""
        if self.given is not None:
            return [f"offset={spelled(self.given)}"]
        return [] if self.align == "end" else ["align='start'"]


def spelled(values: Array) -> str:
    """Numbers as they would be typed, cut short when there are many.

    >>> spelled(np.arange(3)), spelled(np.arange(20))
    ('[0, 1, 2]', '[0, 1, 2, …, 19]')
    """
    if is_traced(values):
        return "traced"
    if values.ndim == 1 and values.size > 8:
        return f"[{', '.join(map(str, values[:3].tolist()))}, …, {values[-1]}]"
    return str(values.tolist()) if values.size <= 8 else f"array{tuple(values.shape)}"


def fitting(argument: str, shape: tuple[int, ...], grid: Grid) -> None:
    """Refuse a shape that does not broadcast to (*batch, heads, queries, keys)."""
    if not fits(shape, grid.shape):
        words = f"has shape {shape}, which does not broadcast to {grid.shape}: {grid}"
        # whether it would, were there as many batch rows as it has
        rows = shape[:-3] if fits(shape, (*shape[:-3], *grid.shape[-3:])) else ()
        raise ArgumentError(argument, words, rows=rows)


def hold(mask: Any, grid: Grid) -> None:
    """Check a mask for sizes that were said by hand: of batch rows it is easily forgotten how many there are."""
    try:
        mask.check(grid)
    except ArgumentError as error:
        if grid.batch or not error.rows:
            raise
        raise ArgumentError("batch", f"is not given, and {mask!r} has batch rows: give batch={error.rows}") from None


def cut(array: Array, rows: range, columns: range) -> Array:
    """The tile of an array that broadcasts to (…, queries, keys); axes of size one stay."""
    if array.ndim and array.shape[-1] != 1:
        array = array[..., columns.start : columns.stop]
    if array.ndim > 1 and array.shape[-2] != 1:
        array = array[..., rows.start : rows.stop, :]
    return array


def part(array: Array, at: tuple[int, ...]) -> Array:
    """One entry of the leading axes of an array that broadcasts there; the last two axes stay.

    >>> part(np.zeros((2, 1, 5, 7)), (1, 3)).shape
    (5, 7)
    """
    while array.ndim < 2:
        array = array[None, ...]
    lead = array.shape[:-2]
    index = at[len(at) - len(lead) :] if lead else ()
    return array[(*(0 if size == 1 else i for size, i in zip(lead, index, strict=True)), ...)]


def by_row(values: np.ndarray, grid: Grid) -> Numbers:
    """One number, or one for each batch row in one axis, of what `by_batch` gives.

    >>> by_row(np.array([3, 5]).reshape(2, 1, 1, 1, 1), Grid((2, 2), 1, 4, 4))
    array([3, 3, 5, 5])
    """
    if not isinstance(values, np.ndarray):  # JAX traces them
        values = values[..., 0, 0, 0] if values.ndim else values
        return Library.of(values).xp.broadcast_to(values, grid.batch).reshape(-1)
    if values.size == 1:
        return int(values.item())
    return np.broadcast_to(values[..., 0, 0, 0], grid.batch).reshape(-1)


def offset_by_row(alignment: Alignment, grid: Grid) -> Numbers:
    """The key position of query 0, in the same form."""
    return alignment.aligned(grid) if alignment.given is None else by_row(alignment.offset(grid), grid)


def in_rows(values: np.ndarray, grid: Grid) -> np.ndarray:
    """Ids or flags (…, n) as (1, n), or as (batch, n) where batch rows differ."""
    length = values.shape[-1]
    if math.prod(values.shape[:-1]) == 1:
        return values.reshape(1, length)
    xp = np if isinstance(values, np.ndarray) else Library.of(values).xp
    return xp.broadcast_to(values, (*grid.batch, length)).reshape(math.prod(grid.batch), length)


def larger(a: Numbers, b: Numbers) -> Numbers:
    """The larger ones; a number of two numbers, in a tenth of the time that NumPy takes."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else _by("maximum", a, b)


def smaller(a: Numbers, b: Numbers) -> Numbers:
    """The smaller ones, in the same way."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else _by("minimum", a, b)


def _by(function: str, *values: Numbers) -> Numbers:
    """NumPy's function, unless JAX traces one of the numbers: it may know 32 bits alone, and FAR is as far in them."""
    traced: Any = next((value for value in values if not isinstance(value, int | np.ndarray)), None)
    if traced is None:
        return getattr(np, function)(*values)
    most = 2 ** (8 * traced.dtype.itemsize - 1) - 1
    known = (int, np.ndarray)
    fitting = [np.clip(a, -most, most).astype(traced.dtype) if isinstance(a, known) else a for a in values]
    return getattr(Library.of(traced).xp, function)(*fitting)
