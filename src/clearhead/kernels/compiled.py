"""The compiled CPU kernel: the tiled kernel in C++ (`native/`), on NumPy, PyTorch and JAX arrays as they lie."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from clearhead.core.arrays import (
    Array,
    dtype_name,
    is_torch,
    is_traced,
    jax_platform,
    made,
    settled,
    summed_like,
    to_numpy,
)
from clearhead.core.asking import QueryWeights
from clearhead.core.errors import ArgumentError
from clearhead.core.formula import Gradients
from clearhead.core.observations import OBSERVATIONS, Map, Observed, Part, Want, changed
from clearhead.core.positions import Added, Alibi, Bias, Relative, distances
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Place, Ran
from clearhead.kernels.extension import NOT_BUILT, OBSERVES, TYPES, at, native
from clearhead.kernels.mask_nodes import nodes_of
from clearhead.kernels.observed_again import observed_again_of
from clearhead.kernels.prepared import Effort, remember

WIDEST = 512

ONE_ROW = np.zeros(1, np.int64)


class Compiled:
    """Attention in C++, for the instruction set of this machine; `isa` names another that it also has."""

    name = "compiled"

    def __init__(self, isa: str = "") -> None:
        self.isa = isa
        self.used = 0  # bytes that the last call had of its own, which no Python tool sees

    def rejects(self, problem: Problem) -> str | None:
        """Why it cannot take a problem."""
        if native is None:
            return NOT_BUILT
        if problem.library.name not in ("numpy", "torch", "jax"):
            return f"it takes NumPy, PyTorch and JAX arrays on the CPU, not {problem.library.name}"
        if problem.library.name == "torch" and problem.q.device.type != "cpu":
            return f"it takes tensors on the CPU, not on {problem.q.device}"
        if problem.library.name == "jax" and (elsewhere := not_on_cpu(problem)):
            return elsewhere
        for name, size in (("features of a query", problem.q.shape[-1]), ("features of a value", problem.width)):
            if not 1 <= size <= WIDEST:
                return f"{size} {name} are outside 1 to {WIDEST}"
        if problem.dropout is not None:
            return "it has no dropout; `tiled` has"
        if "bias" in problem.differentiable:
            return "it gives no gradient for a bias; `dense` does"
        return None if problem.want is None else problem.want.unknown_to(OBSERVES)

    def run(self, problem: Problem, *, again: bool = False, removes: bool = False) -> Ran:
        """Output and log-sum-exp, and what is wanted, in one call.

        `again` where `look_again` is to follow, which `removes` says that it asks what outputs would be without a key.
        """
        if problem.library.name == "jax":
            from clearhead.kernels.xla import running as xla  # needs JAX, which is here now

            return xla.run(problem)
        running = Running(problem)
        ran = self.forward(running, again, removes)
        if not self.isa and not again:
            if problem.want is None:
                remember(problem, running.call, running.effort, running.lent)
            elif not running.lent:
                problem.found["again"] = observed_again_of(problem, running.call, running.effort, ran.observed)
        return ran

    def forward(self, running: Running, again: bool, removes: bool, room: Array | None = None) -> Ran:
        """Run a call, and keep how many bytes it used; its output goes to `room`, if that is given."""
        running.call.panels |= again
        running.call.reads_values = removes
        ran = running.forward(self.isa, room)
        self.used = running.call.bytes
        return ran

    def run_part(self, part: Problem, room: Array | None, *, again: bool = False) -> Ran:
        """The same of a part of a problem, which is no call that others are like; its output goes to `room`.

        With `again` sums of weights wait for `look_again`, and the largest alone are looked for.
        """
        if part.library.name == "jax":
            return self.run(part)
        want = part.want
        if again and want is not None:
            part = made(Problem, **{**vars(part), "want": Want(top=want.top)})
        return self.forward(Running(part), again, again and want is not None and want.removal is not None, room)

    def part_gradients(
        self, part: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
    ) -> Gradients:
        """Gradients of a part of a problem, in the precision of sums: others are added before they are rounded."""
        return Running(part).backward(self.isa, dout, output, peak, total, dlse, unrounded=True)

    def unit(self, call: Any) -> float:
        """What a peak is multiplied with to be a score, by a call's scale, softcap and bias (`native/score.h`)."""
        return call.scale if call.softcap is None and call.bias is None and call.scale > 0 else 1.0

    def how(self, problem: Problem) -> str | None:
        """How programs of JAX call it."""
        if problem.library.name != "jax":
            return None
        from clearhead.kernels.xla.interface import missing  # as above

        reason = missing()
        way = "through XLA's foreign function interface" if reason is None else f"through Python, since {reason}"
        return f"where arrays lie; under jit {way}"

    def gradients(
        self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
    ) -> Gradients:
        """dq, dk and dv, the weights recomputed by tile."""
        if problem.library.name == "jax":
            from clearhead.kernels.xla import running as xla  # as above

            return xla.gradients(problem, dout, output, peak, total, dlse)
        return Running(problem).backward(self.isa, dout, output, peak, total, dlse)

    def look_again(self, problem: Problem, peak: Array, total: Array, output: Array, place: Place) -> dict[str, Any]:
        """What `problem.want` asks for of weights, by each row's denominator and output over more keys than are here.

        The scores were seen before, by `run(problem, again=True)`; a map comes as (sums, largest) over the whole call.
        The output is in the precision of sums.
        """
        return Running(problem).look_again(self.isa, peak, total, output, place)


def not_on_cpu(problem: Problem) -> str | None:
    """Why arrays of JAX are not for it: they are elsewhere, or will be."""
    platform = jax_platform(problem.q)
    if platform != "cpu":
        return f"it takes arrays on the CPU, not on {platform}"
    if is_traced(problem.softcap):
        return "it takes no traced softcap; `tiled` does"
    return None


class Running:
    """One call of the native kernel: keeps alive what its pointers point to."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.grid, self.effort = problem, problem.grid, Effort.of(problem)
        self.kept: list[Any] = []
        self.lent: set[int] = set()  # where arrays lie that the mask reads each time
        grid = self.grid
        self.batch = math.prod(grid.batch)
        self.dtype = np.float64 if dtype_name(problem.q) == "float64" else np.float32
        call = self.call = native.Call()
        call.set_sizes(
            self.batch, grid.heads, problem.key_heads, grid.queries, grid.keys, problem.q.shape[-1], problem.width
        )
        call.scale, call.softcap = problem.scale, problem.softcap or 0.0
        call.wide, call.panels = self.dtype is np.float64, problem.differentiated
        call.q, call.k, call.v = map(self.view, (problem.q, problem.k, problem.v))
        if problem.mask is not None:
            call.set_mask(nodes_of(problem.mask.lower(grid), self.lend))
        if problem.bias is not None:
            self.set_bias(problem.bias)
        if problem.sinks is not None:
            call.set_sinks(np.ascontiguousarray(to_numpy(problem.sinks), dtype=np.float64))

    def view(self, array: Array) -> Any:
        """An array's address and strides, broadcast to (batch, heads, rows, columns)."""
        if isinstance(array, np.ndarray):
            address, strides, item = at(array), list(array.strides), 1
        else:
            address, strides, item = array.data_ptr(), list(array.stride()), array.element_size()
            if not address and array.numel():
                raise ArgumentError("array", f"is a {type(array).__name__} without memory, expected numbers")
        self.kept.append(array)
        shape = list(array.shape)
        if self.batch == 1 and len(shape) >= 3:
            head, row, column = strides[-3:]
            heads, rows, columns = shape[-3:]
            return native.View(
                address, TYPES[dtype_name(array)], ONE_ROW,
                head * item if heads != 1 else 0, row * item if rows != 1 else 0, column * item if columns != 1 else 0,
            )  # fmt: skip
        strides = [stride * item for stride in strides]
        rank = len(self.grid.batch) + 3
        shape, strides = [1] * (rank - len(shape)) + shape, [0] * (rank - len(strides)) + strides
        strides = [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
        offsets = np.zeros(self.grid.batch, np.int64)
        for axis, size in enumerate(self.grid.batch):
            along = np.arange(size, dtype=np.int64) * strides[axis]
            offsets += along.reshape((-1,) + (1,) * (len(self.grid.batch) - axis - 1))
        return native.View(address, TYPES[dtype_name(array)], offsets.reshape(-1), *strides[-3:])

    def by_batch(self, values: np.ndarray) -> np.ndarray:
        """One number for each batch row, from one or (*batch, 1, 1, 1)."""
        values = values[..., 0, 0, 0] if values.ndim else values
        return np.ascontiguousarray(np.broadcast_to(values, self.grid.batch).reshape(-1), dtype=np.int64)

    def lend(self, pairs: Array) -> Any:
        """An array that the mask reads each time, where it lies."""
        array = to_numpy(pairs)
        self.lent.add(at(array))
        return self.view(array)

    def set_bias(self, bias: Bias) -> None:
        """An array as it lies; what depends on distance only, as a number for each head and distance."""
        if isinstance(bias, Added):
            self.call.set_bias_array(self.view(settled(bias.array.detach() if is_torch(bias.array) else bias.array)))
            return
        named = cast(Alibi | Relative, bias)
        # the kernel reads entry query + place − key + centre, query and key from 0
        distance, centre, place = distances(self.by_batch(named.alignment.offset(self.grid)), self.grid)
        table = np.ascontiguousarray(named.by_distance(distance), dtype=np.float64)
        self.call.set_bias_by_distance(table, distance.size, centre, place)

    def empty(self, *shape: int, dtype: Any = None, zero: bool = False) -> np.ndarray:
        """Room for a result, (*batch, heads, …)."""
        make = np.zeros if zero else np.empty
        array = make((*self.grid.batch, self.grid.heads, *shape), dtype or self.dtype)
        self.kept.append(array)
        return array

    def output_like(self, like: Array, shape: tuple[int, ...]) -> Array:
        """Room for an array of the caller's library and dtype."""
        if is_torch(like):
            return like.new_empty(shape)
        return np.empty(shape, like.dtype)

    def given(self, found: Any) -> Any:
        """A result in the caller's library, without a copy."""
        return found if self.problem.library.name == "numpy" else sys.modules["torch"].from_numpy(found)

    def forward(self, isa: str, room: Array | None = None) -> Ran:
        """Run it, and gather what it gave; the output goes to `room`, if that is given."""
        problem, call, grid = self.problem, self.call, self.grid
        like = problem.library.computing(problem.q[..., :0]) if problem.keeps_unrounded else problem.q
        shape = (*grid.batch, grid.heads, grid.queries, problem.width)
        output = self.output_like(like, shape) if room is None else room
        call.out = self.view(output)
        rows = np.empty((3, *grid.batch, grid.heads, grid.queries), self.dtype)
        start, each = at(rows), rows.nbytes // 3
        call.lse, call.peak, call.total = start, start + each, start + 2 * each
        lse, peak, total = map(self.given, rows)
        found: dict[str, Any] = {"max_score": None, "entropy": None}
        if problem.want is not None:
            found = self.want(problem.want)
        self.go(call.forward, isa)
        if problem.want is not None and problem.library.name != "numpy":
            found = {name: changed(name, value, self.given) for name, value in found.items()}
        unrounded = output if problem.keeps_unrounded else None
        output = problem.library.xp.astype(output, problem.q.dtype) if problem.keeps_unrounded else output
        return Ran(Observed(output=output, lse=lse, kernel="compiled", **found), peak, total, unrounded)

    def want(self, want: Want) -> dict[str, Any]:
        """Room for what is wanted, told to the kernel."""
        call, grid = self.call, self.grid
        largest, entropy = self.empty(grid.queries), self.empty(grid.queries)
        call.want_rows(at(largest), at(entropy))
        found: dict[str, Any] = {"max_score": largest, "entropy": entropy}
        for name in want.names:
            found[name] = self.want_one(name, getattr(want, name))
        return found

    def want_one(self, name: str, wanted: Any) -> Any:
        """Room for one observation; `native/observe.h` is told where it lies and which numbers were asked for."""
        one, grid = OBSERVATIONS[name], self.grid
        sizes = {"queries": grid.queries, "keys": grid.keys}
        if one.sizes is not None:
            sizes.update(one.sizes(wanted, grid))
        arrays, places, empty = [], [], False
        for part in one.parts:
            array = self.room(part, sizes) if part.led else np.asarray(wanted, np.int64)
            arrays.append(array)
            if part.led:
                places.append(at(array))
                empty = empty or not array.size
        if isinstance(wanted, QueryWeights):
            rows = (*grid.batch, grid.heads, grid.queries)
            numbers = wanted.over(self.problem.library, self.problem.library.computing(self.problem.q).dtype, rows)
            counts = np.ascontiguousarray(to_numpy(numbers), dtype=self.dtype)
            self.kept.append(counts)
            places.append(at(counts))
            wanted = grid.queries
        if not empty:
            self.call.want(name, wanted if isinstance(wanted, tuple) else (int(wanted),), places)
        return one.of(arrays)

    def room(self, part: Part, sizes: dict[str, int]) -> np.ndarray:
        """Room for an array as it is where nobody attends to anything."""
        shape = [sizes[axis] for axis in part.axes]
        if part.positions is None:
            return self.empty(*shape, zero=True)
        places = self.empty(*shape, dtype=np.int64)
        places.fill(part.least)
        return places

    def know(self, **rows: Array | None) -> None:
        """Numbers of each row that were found before."""
        for name, array in rows.items():
            if array is not None:
                array = np.ascontiguousarray(to_numpy(array), dtype=self.dtype)
                self.kept.append(array)
                setattr(self.call, name, at(array))

    def look_again(self, isa: str, peak: Array, total: Array, output: Array, place: Place) -> dict[str, Any]:
        """The second look alone."""
        call, want = self.call, self.problem.want
        assert want is not None
        self.know(peak=peak, total=total)
        call.out = self.view(output)
        call.known = True
        found = {name: self.want_one(name, getattr(want, name)) for name in want.names if name != "map"}
        if want.map is not None:
            shape = min(want.map[0], place.queries), min(want.map[1], place.keys)
            sums = found["map"] = Map(self.empty(*shape, zero=True), self.empty(*shape, zero=True))
            call.want("map", (*shape, *place), list(map(at, sums)))
        self.go(call.forward, isa)
        return {name: changed(name, value, self.given) for name, value in found.items()}

    def go(self, run: Callable[[str, int], None], isa: str) -> None:
        """A tiny call takes one thread, a larger one more; a long one can be interrupted."""
        count, self.call.team, self.call.interruptible = self.effort.settled(self.problem.library.name)
        run(isa, count)

    def backward(
        self, isa: str, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None,
        *, unrounded: bool = False,
    ) -> Gradients:  # fmt: skip
        """Run the backward kernel; gradients are shaped as q, k and v, sums over broadcast batch axes included."""
        problem, call, grid = self.problem, self.call, self.grid
        call.dout, call.out = self.view(dout), self.view(output)
        self.know(peak=peak, total=total, dlse=dlse)
        found = []
        for name, like in (("dq", problem.q), ("dk", problem.k), ("dv", problem.v)):
            shape = (*grid.batch, *like.shape[-3:])
            # batch rows that share an array add up in the precision of sums, and are rounded once
            shared = shape != tuple(like.shape)
            wide = shared or unrounded
            gradient = self.given(np.empty(shape, self.dtype)) if wide else self.output_like(like, shape)
            setattr(call, name, self.view(gradient))
            found.append(gradient)
        dsinks = self.empty(zero=True)
        call.dsinks = at(dsinks)
        self.go(call.backward, isa)
        dq, dk, dv = (
            problem.library.xp.astype(
                summed_like(gradient, like), gradient.dtype if unrounded else like.dtype, copy=False
            )
            for gradient, like in zip(found, (problem.q, problem.k, problem.v), strict=True)
        )
        by_head = None if problem.sinks is None else self.given(dsinks.reshape(self.batch, grid.heads).sum(0))
        return Gradients(dq, dk, dv, None, by_head)


compiled = Compiled()
