"""profile(): time and peak memory, measured, of the formula with its matrix and of the best kernel, as lengths grow."""

from __future__ import annotations

import json
import math
import textwrap
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from clearhead.calls import attention
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.mask import Mask
from clearhead.kernels.compiled import compiled
from clearhead.measure.memory import SHARE, free_memory, require_room
from clearhead.measure.plans import plan, quantity
from clearhead.measure.tables import WIDTH, growth, laid_out

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
# A call is timed again until this much time has gone by, and the quickest counts: what disturbs only ever slows
ENOUGH = 0.2
# More than this many heads, positions or features no machine has; products of them still are floats
MOST = 2**40


@dataclass(frozen=True)
class Measured:
    """The quickest of some calls in seconds, and the most memory that one held beyond its inputs, in bytes."""

    seconds: float
    peak: int


@dataclass(frozen=True)
class Point:
    """One length: the formula's time and memory, None where it was not run, and the kernel's; the matrix's size.

    `method` is what was measured beside them, if anything was.
    """

    length: int
    matrix: int
    formula: Measured | None
    kernel: Measured
    name: str
    method: Measured | None = None


@dataclass(frozen=True)
class Fit:
    """time ∝ length^exponent, and the standard error of that exponent."""

    exponent: float
    error: float

    def __str__(self) -> str:
        return f"time grows as n^{self.exponent:.2f} ± {self.error:.2f}"


@dataclass(frozen=True)
class Profile:
    """What was measured, length by length. `print` it, or ask for `json()`; `plot_profile` draws it.

    `stopped` says from which length on the formula was not run, and why; `ended` from which on nothing was. `method` is
    what was measured beside the kernel, if anything was, and `crossover` the length from which on it is the quicker.

    >>> import clearhead as ch
    >>> found = ch.profile([64, 128], heads=1, features=16)
    >>> [point.length for point in found.points]
    [64, 128]
    """

    heads: int
    features: int
    dtype: str
    mask: str | None
    points: tuple[Point, ...]
    stopped: str | None
    ended: str | None = None
    method: str | None = None

    @property
    def method_fit(self) -> Fit | None:
        """How the method's time grows; None with fewer than three lengths."""
        return fit([(p.length, p.method.seconds) for p in self.points if p.method is not None])

    @property
    def crossover(self) -> float | None:
        """The length from which on the method is quicker than the kernel, between two that were measured on a line.

        None where it is not at the longest; the shortest where it always is.
        """
        gains = [(p.length, p.kernel.seconds / p.method.seconds) for p in self.points if p.method is not None]
        slower = [place for place, (_, gain) in enumerate(gains) if gain < 1]
        if not gains or len(gains) - 1 in slower:
            return None
        if not slower:
            return float(gains[0][0])
        (below, low), (above, high) = gains[slower[-1]], gains[slower[-1] + 1]
        share = -math.log(low) / (math.log(high) - math.log(low))
        return float(below * (above / below) ** share)

    @property
    def formula_fit(self) -> Fit | None:
        """How the formula's time grows; None with fewer than three lengths."""
        return fit([(p.length, p.formula.seconds) for p in self.points if p.formula is not None])

    @property
    def kernel_fit(self) -> Fit | None:
        """How the kernel's time grows; None with fewer than three lengths."""
        return fit([(p.length, p.kernel.seconds) for p in self.points])

    def blocks(self, width: int = WIDTH) -> list[str]:
        """The tables, one for the formula and one for the kernel; growth is by the length before."""
        heading = f"{self.heads:,} heads, {self.features:,} features, {self.dtype}"
        first = [*textwrap.wrap(heading + (f", {self.mask}" if self.mask else ""), width), ""]
        second = [""] * len(first)  # so that lengths stand in line where the two are side by side
        kernels = f"the kernel{'s' if len(self.names) > 1 else ''} {', '.join(map(repr, self.names))}"
        for rows, title, way, found in (
            (first, "the formula, with its matrix", "formula", self.formula_fit),
            (second, kernels, "kernel", self.kernel_fit),
        ):
            rows += [*textwrap.wrap(title, width), *self._table(way, width)]
            if found is not None:
                rows += ["", *textwrap.wrap(str(found), width)]
        for words in (self.stopped, self.ended):
            if words is not None:
                first += ["", *textwrap.wrap(words, width)]
        tables = ["\n".join(first), "\n".join(second)]
        if self.method is not None:
            third = [""] * (len(textwrap.wrap(heading, width)) + 1)
            third += [*textwrap.wrap(self.method, width), *self._table("method", width), ""]
            third += [] if self.method_fit is None else textwrap.wrap(str(self.method_fit), width)
            quicker = "at none of these lengths" if self.crossover is None else f"from about {self.crossover:,.0f} on"
            tables.append("\n".join([*third, *textwrap.wrap(f"quicker than the kernel {quicker}", width)]))
        return tables

    def _table(self, way: str, width: int) -> list[str]:
        titles = ["length", "time", "growth", "peak", "growth", "matrix", "growth"]
        rows = []
        before: Point | None = None
        for point in self.points:
            now: Measured | None = getattr(point, way)
            last: Measured | None = None if before is None else getattr(before, way)
            row = [f"{point.length:,}", "not run", "", "", ""]
            if now is not None:
                row[1], row[3] = _seconds(now.seconds), quantity(now.peak, 1024, "B")
                if last is not None:
                    row[2], row[4] = growth(now.seconds, last.seconds), growth(now.peak, last.peak)
            row += [quantity(point.matrix, 1024, "B"), "" if before is None else growth(point.matrix, before.matrix)]
            rows.append(row if way == "formula" else row[:5])
            before = point
        return laid_out(titles if way == "formula" else titles[:5], rows, width)

    @property
    def names(self) -> list[str]:
        """The kernels that ran."""
        return list(dict.fromkeys(point.name for point in self.points))

    def __str__(self) -> str:
        return "\n".join(block.strip("\n") + "\n" for block in self.blocks()).rstrip()

    def json(self) -> str:
        """Every number that was measured."""
        fits = {"formula_fit": self.formula_fit, "kernel_fit": self.kernel_fit}
        found = {name: None if one is None else asdict(one) for name, one in fits.items()}
        told = asdict(self) | found
        if self.method is None:
            del told["method"]
            for point in told["points"]:
                del point["method"]
        else:
            told |= {"method_fit": None if self.method_fit is None else asdict(self.method_fit)}
            told["crossover"] = self.crossover
        return json.dumps(told)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """The exponent of a power law through (length, seconds), by least squares of logarithms, and its standard error.

    >>> fit([(1, 3.0), (2, 12.0), (4, 48.0)])
    Fit(exponent=2.0, error=0.0)
    """
    if len(points) < 3:
        return None
    x, y = np.log(np.array(points)).T
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    error = math.sqrt(float(rest @ rest) / (len(points) - 2) / float(x @ x))
    return Fit(round(slope, 12), round(error, 12))


def profile(
    lengths: Sequence[int] | None = None,
    *,
    heads: int = 8,
    features: int = 64,
    dtype: str = "float32",
    mask: Mask | None = None,
    memory: int | None = None,
    seconds: float = 60.0,
    method: Callable[..., Any] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Profile:
    """Measure the formula with its matrix against the best kernel, for growing lengths.

    >>> import clearhead as ch
    >>> found = ch.profile([64, 128, 256], heads=1, features=16)
    >>> [point.matrix for point in found.points]
    [16384, 65536, 262144]

    Memory is what NumPy allocated at its peak beyond the inputs. The formula is not run where it would take more than
    `memory` bytes, half of what is free unless given, or where the `seconds` for all lengths would be spent. Nothing is
    run where q, k, v and the kernel alone would take more than half of what is free: at the first length that is an
    error, and a later one ends the report. It says where that is. `progress(done, of, words)` is called before each
    measurement.

    method: what to measure beside them, such as `performer(256)`, or anything that is called as `attention` is;
    `crossover` is then the length from which on it is quicker than the kernel.
    """
    if method is not None and not callable(method):
        raise ArgumentError("method", f"is {shown(method)[:60]}, expected a method or a function of q, k, v")
    if lengths is not None and not hasattr(lengths, "__iter__"):
        raise ArgumentError(
            "lengths", f"is {shown(lengths)}, expected a list of whole numbers, such as [{shown(lengths)}]"
        )
    if memory is not None and (
        isinstance(memory, bool) or not isinstance(memory, int | float | np.integer | np.floating) or not memory >= 0
    ):
        raise ArgumentError("memory", f"is {shown(memory)}, expected how many bytes, at least 0")
    chosen = _checked(lengths, heads, features, dtype, seconds)
    taken = partial(_taken, int(heads), features=int(features), dtype=dtype)
    sizes = f"{heads:,} heads of {chosen[0]:,} positions and {features:,} features"
    require_room("heads, lengths and features", taken(chosen[0]), f"{sizes}, in q, k, v and the output,")
    limit = free_memory() * SHARE if memory is None else memory
    points: list[Point] = []
    stopped = ended = None
    ends = time.perf_counter() + seconds
    for done, length in enumerate(chosen):
        ended = _end(points, length, taken(length), ends)
        if ended is not None:
            break
        q, k, v = _inputs(heads, length, features, dtype)
        found = plan(q, k, v, mask=mask)
        if progress is not None:
            progress(2 * done, 2 * len(chosen), f"{found.kernel}, {length:,}")
        kernel = measure(partial(attention, q, k, v, mask=mask))
        formula = None
        if stopped is None:
            stopped = _stop(points, length, found.matrix_bytes, limit, ends)
        if stopped is None:
            if progress is not None:
                progress(2 * done + 1, 2 * len(chosen), f"the formula, {length:,}")
            formula = measure(partial(attention, q, k, v, mask=mask, kernel="dense"))
        beside = (
            None if method is None else measure(partial(method, q, k, v, **({} if mask is None else {"mask": mask})))
        )
        points.append(Point(length, found.matrix_bytes, formula, kernel, found.kernel, beside))
    described = None if mask is None else repr(mask)
    name = None if method is None else getattr(method, "__name__", repr(method))
    return Profile(int(heads), int(features), dtype, described, tuple(points), stopped, ended, name)


def _taken(heads: int, length: int, features: int, dtype: str) -> float:
    """About how many bytes q, k, v and a call of the kernel take: its output, what it packs, a few numbers a query."""
    item = np.dtype(dtype).itemsize
    return heads * length * (features * (3 * item + 3 * max(item, 4)) + 64.0)


def _end(points: list[Point], length: int, taken: float, ends: float) -> str | None:
    """Why nothing is to be run at this length any more."""
    if not points:
        return None
    if time.perf_counter() > ends:
        return f"everything stops before {length:,}: the time that it may take is over"
    most = free_memory() * SHARE
    if taken > most:
        needed, free = quantity(taken, 1024, "B"), quantity(most, 1024, "B")
        return f"everything stops before {length:,}: it would hold about {needed}, and may hold {free}"
    return None


def _checked(lengths: Any, heads: Any, features: Any, dtype: str, seconds: float) -> list[int]:
    chosen = list(LENGTHS if lengths is None else lengths)
    for name, values in (("lengths", chosen), ("heads", [heads]), ("features", [features])):
        if not values or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in values):
            raise ArgumentError(name, f"is {shown(values)}, expected whole numbers of at least 1")
        if max(values) > MOST:
            raise ArgumentError(name, f"has {shown(max(values))}, expected at most {MOST:,}")
    if dtype not in ("float16", "float32", "float64"):
        raise ArgumentError("dtype", f"is {dtype!r}, expected one of float16, float32, float64")
    if not seconds > 0:
        raise ArgumentError("seconds", f"is {seconds!r}, expected a number above 0")
    return sorted(map(int, chosen))


def _inputs(heads: int, length: int, features: int, dtype: str) -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(0).standard_normal
    return tuple(draw((heads, length, features), dtype=np.float32).astype(dtype) for _ in range(3))


def _stop(points: list[Point], length: int, matrix: int, limit: float, ends: float) -> str | None:
    """Why the formula is not to be run at this length, by what it took at the one before."""
    ran = [(point, point.formula) for point in points if point.formula is not None]
    ratio, took = 4.0, 0.0
    if ran:
        last, formula = ran[-1]
        ratio = max(formula.peak / last.matrix, 1.0)
        took = formula.seconds * (length / last.length) ** 2
    if matrix * ratio > limit:
        needed, free = quantity(matrix * ratio, 1024, "B"), quantity(limit, 1024, "B")
        return f"the formula stops before {length:,}: it would hold about {needed}, and may hold {free}"
    # twice for memory and for time, and again until there was enough of it
    if time.perf_counter() + 3 * took > ends:
        return f"the formula stops before {length:,}: it would take about {_seconds(took)} a call"
    return None


def measure(call: Callable[[], Any]) -> Measured:
    """Time and peak memory of a call, in runs of their own: watching memory takes time."""
    running = tracemalloc.is_tracing()
    if not running:
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    compiled.used = 0
    call()
    # what the compiled kernel packs is not Python's to count; the kernel counts it itself
    peak = tracemalloc.get_traced_memory()[1] - before + compiled.used
    if not running:
        tracemalloc.stop()
    best, spent = math.inf, 0.0
    while spent < ENOUGH:
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
    return Measured(best, max(peak, 0))
