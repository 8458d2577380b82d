"""Calls of a kind that was seen before: everything was checked then, and only the addresses are new."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core.admit import lies_plainly
from clearhead.core.arrays import Array, is_traced
from clearhead.core.mask import Mask
from clearhead.core.problem import Problem, default_scale
from clearhead.kernels.extension import native
from clearhead.kernels.keys import as_copy, as_lying, as_none, as_numbers, numbers_in, part_of, places_in, to_keep
from clearhead.kernels.threads import allow, crew

# multiply-adds that are worth a thread more, and bytes of keys and values: to have its attention takes some µs. More
# for wider vectors was tried on 16 cores with AVX-512, where (1, 8, 32, 64) then took 70 µs and not 44
THREAD_WORK, THREAD_BYTES = 125_000, 200_000
# multiply-adds from which on a call may take so long that somebody wants to interrupt it
LONG_WORK = 1_000_000
# kinds that are remembered
MOST = 512
# the same of masks with arrays
FEW = 64
# the same on a GPU, where what was prepared of a mask lies in its memory, and others may come with every batch
FEWEST = 8


def main_thread() -> bool:
    """True in the thread in which Python runs the handlers of signals, and PyTorch its operations, most likely."""
    return threading.get_ident() == threading.main_thread().ident


def worth(work: int, read: int) -> int:
    """How many threads so many multiply-adds, or bytes of keys and values, are worth."""
    return max(work // THREAD_WORK, read // THREAD_BYTES)


@dataclass(frozen=True)
class Effort:
    """How much a call has to do, by which it is spread over threads."""

    wanted: int  # threads
    long: bool  # somebody may want to interrupt it

    @classmethod
    def of(cls, problem: Problem) -> Effort:
        """Of one call."""
        grid, columns = problem.grid, problem.q.shape[-1] + problem.width
        batch = math.prod(grid.batch)
        work = batch * grid.heads * grid.queries * grid.keys * columns
        read = batch * problem.key_heads * grid.keys * columns * problem.k.dtype.itemsize
        return cls(worth(work, read), work > LONG_WORK)

    def settled(self, library: str) -> tuple[int, int, bool]:
        """How many threads a call takes now, of how many in PyTorch's team (0: our own), and whether it listens."""
        main = main_thread()
        if self.wanted <= 1:
            return 1, 0, main and self.long
        threads, team = crew(library, alone=not main)
        return min(threads, self.wanted), team, main and self.long


@dataclass(frozen=True)
class Prepared:
    """One kind: its native call, and the shape of what it gives."""

    call: Any
    effort: Effort
    shape: tuple[int, ...]

    def tensors(self, q: Array, k: Array, v: Array) -> Array | None:
        """The output for PyTorch tensors; None while another thread has the call."""
        # as q where it can be: to read a shape takes PyTorch longer than to copy one
        like = self.shape == q.shape and q.is_contiguous()
        output = sys.modules["torch"].empty_like(q) if like else q.new_empty(self.shape)
        places = q.data_ptr(), k.data_ptr(), v.data_ptr(), output.data_ptr()
        return output if self.call.again(*places, *self.effort.settled("torch")) else None

    def arrays(self, q: Array, k: Array, v: Array) -> Array | None:
        """The same for NumPy arrays."""
        output = np.empty(self.shape, q.dtype)
        return output if self.call.again_on(q, k, v, output, *self.effort.settled("numpy")) else None


_prepared: dict[Any, Prepared] = {}
_by_numbers: dict[Any, Prepared] = {}  # of masks that have arrays


def tensor_kind(q: Array, k: Array, v: Array, mask: Any, scale: float | None) -> Any:
    """What a call on PyTorch tensors in memory depends on, but for its numbers; `mask` as a part of the key."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, scale, mask,
    )  # fmt: skip


def array_kind(q: Array, k: Array, v: Array, mask: Any, scale: float | None) -> Any:
    """The same for NumPy arrays."""
    return q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, q.dtype, k.dtype, v.dtype, scale, mask


def learns(q: Array, k: Array, v: Array) -> bool:
    """Are gradients of some tensor wanted?"""
    return bool(q.requires_grad or k.requires_grad or v.requires_grad) and sys.modules["torch"].is_grad_enabled()


def on_tensors(q: Array, k: Array, v: Array, mask: Any, scale: Any) -> Array | None:
    """The output, for a kind of call on PyTorch tensors that was remembered; None for what is unusual."""
    if not (q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    if learns(q, k, v):
        return None
    one = known(tensor_kind, q, k, v, mask, scale)
    return None if one is None else one.tensors(q, k, v)


def on_arrays(q: Array, k: Array, v: Array, mask: Any, scale: Any) -> Array | None:
    """The same for NumPy arrays."""
    one = known(array_kind, q, k, v, mask, scale)
    return None if one is None else one.arrays(q, k, v)


def known(kind: Callable[..., Any], q: Array, k: Array, v: Array, mask: Any, scale: Any) -> Prepared | None:
    """What was remembered of a kind: by what its mask says, or by that and the numbers in the mask's arrays."""
    part = part_of(mask, scale)
    if part is not None:
        return _prepared.get(kind(q, k, v, part, scale))
    part = part_of(mask, scale, as_lying)
    return None if part is None else _by_numbers.get(kind(q, k, v, part, scale))


# programs of JAX by kind of call, each a function of q, k and v
PROGRAMS: dict[Any, Any] = {}


def jax_kind(q: Array, k: Array, v: Array, mask: Any, scale: float | None) -> Any:
    """The same for JAX arrays, which have no strides."""
    one, two, three = q.aval, k.aval, v.aval  # asked once: after a long call nothing of it is in a cache
    return one.shape, two.shape, three.shape, one.dtype, two.dtype, three.dtype, q.sharding, scale, mask


def on_jax(q: Array, k: Array, v: Array, mask: Any, scale: Any) -> Array | None:
    """The same for JAX arrays, and for masks of few numbers: a program has them, and is called in any case."""
    part = part_of(mask, scale, as_numbers)
    program = None if part is None else PROGRAMS.get(jax_kind(q, k, v, part, scale))
    if program is None:
        return None
    allow()
    return program(q, k, v)


def remember_program(problem: Problem, program: Any) -> None:
    """Keep a function of JAX arrays for the next call of its kind, where arrays, mask and scale say all of it."""
    if is_traced(problem.q) or is_traced(problem.k) or is_traced(problem.v):
        return
    keep(PROGRAMS, problem, jax_kind, program, as_copy)


# observed calls by kind, each a function of q, k and v: it launches or calls what ran before, or is a program of JAX
OBSERVED: dict[Any, Any] = {}
ASKED = frozenset((bool, int, tuple, type(None)))  # of what is asked for, what is compared as it is


def kind_on_gpu(q: Array, k: Array, v: Array, mask: Any, scale: Any) -> Any:
    """What a call on a GPU depends on, but for its numbers; None where that is more than a key can say."""
    cuda = sys.modules["torch"].cuda
    device = cuda.current_device()
    if not device == q.get_device() == k.get_device() == v.get_device() or cuda.is_current_stream_capturing():
        return None
    part = part_of(mask, scale, as_numbers)
    if part is None:
        return None
    return tensor_kind(q, k, v, part, scale), q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16, device


# attention on a GPU by kind, each a function of q, k and v that launches what was launched before
ATTENDED: dict[Any, Any] = {}


def attended_kind(q: Array, k: Array, v: Array, mask: Any, scale: Any) -> Any:
    """The kind of a call on a GPU, and who wants gradients of it."""
    learns: tuple[bool, ...] = ()
    torch = sys.modules["torch"]
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        # where the order of additions is to be fixed, another kernel gives them
        learns = q.requires_grad, k.requires_grad, v.requires_grad, torch.are_deterministic_algorithms_enabled()
    kind = kind_on_gpu(q, k, v, mask, scale)
    return None if kind is None else (kind, learns)


def attended_again(q: Array, k: Array, v: Array, mask: Any, scale: Any) -> Array | None:
    """The output of a call on a GPU of a kind that was remembered; None for others."""
    kind = attended_kind(q, k, v, mask, scale)
    again = None if kind is None else ATTENDED.get(kind)
    return None if again is None else again(q, k, v)


def remember_attended(kind: Any, again: Any) -> None:
    """Keep how a call on a GPU ran for the next one of its kind; the oldest makes way."""
    make_way(ATTENDED, kind)
    while len(ATTENDED) >= FEW:
        ATTENDED.pop(next(iter(ATTENDED)), None)
    ATTENDED[to_keep(kind)] = again


def make_way(by_kind: dict[Any, Any], kind: Any) -> None:
    """Of kinds that have arrays of masks, where the next one does, the oldest go."""
    if numbers_in(kind):
        old = [one for one in by_kind if numbers_in(one)]
        for one in old[: max(0, len(old) + 1 - FEWEST)]:
            by_kind.pop(one, None)


def observed_kind(q: Array, k: Array, v: Array, mask: Any, scale: Any, asked: tuple[Any, ...]) -> Any:
    """What an observed call on a GPU depends on, but for its numbers; None where that is more than a key can say.

    `asked` is how many of the largest, what each key received and its like, of all queries or of the last ones, and the
    sides of a map.
    """
    kinds = None if learns(q, k, v) else kinds_of(asked)
    kind = None if kinds is None else kind_on_gpu(q, k, v, mask, scale)
    return None if kind is None else (kind, asked, kinds)


def kinds_of(asked: tuple[Any, ...]) -> Any:
    """The types of what is asked for, since True is 1 and means something else; None where some cannot be compared."""
    kinds = tuple(map(type, asked))
    sides = (side for one in asked if type(one) is tuple for side in one)
    return kinds if ASKED.issuperset(kinds) and all(type(side) is int for side in sides) else None


def observed_here_kind(q: Array, k: Array, v: Array, mask: Any, scale: Any, asked: tuple[Any, ...]) -> Any:
    """The same for NumPy arrays and for tensors in memory."""
    arrays = type(q) is np.ndarray
    if not arrays and not (q.is_cpu and k.is_cpu and v.is_cpu and not learns(q, k, v)):
        return None
    part, kinds = part_of(mask, scale, as_numbers), kinds_of(asked)
    if part is None or kinds is None or not q.ndim == k.ndim == v.ndim > 2:
        return None
    return (array_kind if arrays else tensor_kind)(q, k, v, part, scale), asked, kinds


def observed_jax_kind(q: Array, k: Array, v: Array, mask: Any, scale: Any, asked: tuple[Any, ...]) -> Any:
    """The same for JAX arrays."""
    part, kinds = part_of(mask, scale, as_numbers), kinds_of(asked)
    if part is None or kinds is None or not q.ndim == k.ndim == v.ndim > 2:
        return None
    return jax_kind(q, k, v, part, scale), asked, kinds


def observed_again(q: Array, k: Array, v: Array, mask: Any, scale: Any, asked: tuple[Any, ...]) -> Any:
    """What launches an observed call again, for one of a kind that was remembered; None for others."""
    kind = observed_kind(q, k, v, mask, scale, asked) if q.is_cuda and lies_plainly(q, k, v) else None
    return None if kind is None else OBSERVED.get(kind)


def remember_observed(kind: Any, again: Any) -> None:
    """Keep how an observed call ran for the next one of its kind."""
    if len(OBSERVED) >= MOST:
        OBSERVED.clear()
    OBSERVED[to_keep(kind)] = again


def remember_what_ran(problem: Problem, kind: Any) -> None:
    """Keep for the next call of its kind how this one ran: on tensors or arrays, or as a program of JAX."""
    found = problem.found
    if kind is not None and found.get("again") is not None:
        make_way(OBSERVED, kind)
        remember_observed(kind, found["again"])
    elif kind is not None and "program" in found:
        remember_observed(kind, allowed(sys.modules["jax"].jit(found["program"])))


def allowed(program: Callable[..., Any]) -> Callable[..., Any]:
    """A program of JAX that is told each time how many threads it may have."""

    def run(q: Array, k: Array, v: Array) -> Any:
        allow()
        return program(q, k, v)

    return run


def remember(problem: Problem, call: Any, effort: Effort, lent: set[int]) -> None:
    """Keep a native call that has run for the next one of its kind, where arrays, mask and scale say all of it.

    `lent`: where arrays of pairs lie, which it reads each time. Those have to be the mask's own.
    """
    part = part_of(problem.mask, problem.scale, as_lying)
    if problem.keeps_unrounded or places_in(part) != lent:
        return
    torch, grid = problem.library.name == "torch", problem.grid
    if not torch and not problem.q.dtype.kind == problem.k.dtype.kind == problem.v.dtype.kind == "f":
        return  # others do not lend their memory by the buffer protocol
    shape = (*grid.batch, grid.heads, grid.queries, problem.width)
    call.lse = call.peak = call.total = 0  # whose room goes with this call
    kind, one = tensor_kind if torch else array_kind, Prepared(call, effort, shape)
    if part_of(problem.mask, problem.scale) is not None:
        scales = keep(_prepared, problem, kind, one)
    else:
        for old in list(_by_numbers)[: max(0, len(_by_numbers) + 1 - FEW)]:  # numbers may be others in every call
            _by_numbers.pop(old, None)
        scales = keep(_by_numbers, problem, kind, one, lambda array, owner: to_keep(as_lying(array, owner)))
    arrays = [number.array for number in numbers_in(part)]
    if torch and not lent and all(array.flags.c_contiguous for array in arrays):
        for scale in scales:
            like = shape == problem.q.shape and problem.q.is_contiguous()
            native.remember(
                problem.q,
                problem.k,
                problem.v,
                problem.mask,
                scale,
                call,
                effort.wanted,
                effort.long,
                shape,
                like,
                arrays,
            )


def keep(
    by_kind: dict[Any, Any],
    problem: Problem,
    kind: Callable[..., Any],
    found: Any,
    of_array: Callable[[Array, Mask], Any] = as_none,
) -> set[float | None]:
    """Keep what was found of a call for the next one of its kind, where arrays, mask and scale say all of it.

    Gives the scale as it may be given then: the usual one as itself or as None; nothing where it is not kept.
    """
    given = problem.bias, problem.softcap, problem.sinks, problem.dropout, problem.want
    part, q, k, v = part_of(problem.mask, problem.scale, of_array), problem.q, problem.k, problem.v
    if part is None or any(option is not None for option in given) or problem.differentiated:
        return set()
    if problem.headless or not q.ndim == k.ndim == v.ndim:
        return set()
    if len(by_kind) >= MOST:
        by_kind.clear()
    scales: set[float | None] = {problem.scale, None} if problem.scale == default_scale(q) else {problem.scale}
    for scale in scales:
        by_kind[kind(q, k, v, part, scale)] = found
    return scales
