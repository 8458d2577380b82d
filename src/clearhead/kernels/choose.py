"""The kernel that runs, on a GPU the fastest by measurement, else the first in order of preference; why no other."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from clearhead.core.arrays import HALF, dtype_name, is_traced, jax_platform
from clearhead.core.errors import ArgumentError, KernelRefused
from clearhead.core.problem import Problem
from clearhead.kernels.apart import Apart, parts_of
from clearhead.kernels.compiled import compiled
from clearhead.kernels.contract import AtOnce, Kernel, Passes, rejects_gradients
from clearhead.kernels.dense import SMALL_NUMPY, dense
from clearhead.kernels.hopper import hopper
from clearhead.kernels.prepared import attended_again, on_arrays, on_jax, on_tensors
from clearhead.kernels.tiled import tiled
from clearhead.kernels.triton import triton
from clearhead.kernels.vendor import vendor

if TYPE_CHECKING:
    from clearhead.kernels.fastest import Choice

# kernels for GPUs, in the order that they are taken where nothing is measured
ON_GPU: tuple[Kernel, ...] = (vendor, hopper, triton)

KERNELS: tuple[Kernel, ...] = (compiled, *ON_GPU, tiled, dense)

# asked for by name, they are what others are held to
FORMULA = (dense.name, tiled.name)

# for arrays of a library, what sees at a glance that a call without options is one that it can compute
AT_ONCE: dict[str, tuple[AtOnce, ...]] = {
    "numpy": (dense.at_once, on_arrays),
    "torch": (on_tensors,),
    "cuda": (vendor.at_once, attended_again),
    "jax": (on_jax,),
}

# Below this many scores the matrix fits into a cache, and building it costs less than looping over tiles
# (`make bench-tiled`).
SMALL = 256 * 1024

# what was found the fastest, of so many kinds of problems at most
MOST = 1024
_quickest: dict[Any, Choice] = {}


def at_once(place: str, q: Any, k: Any, v: Any, mask: Any, scale: Any) -> Any:
    """The output, where a kernel sees at a glance that it is the one that would be chosen."""
    for attend in AT_ONCE[place]:
        output = attend(q, k, v, mask, scale)
        if output is not None:
            return output
    return None


def preference(problem: Problem) -> tuple[Kernel, ...]:
    """Every kernel, best first."""
    if on_gpu(problem) or (problem.library.name == "jax" and jax_platform(problem.q) == "gpu"):
        return (*ON_GPU, compiled, *by_size(problem))
    if problem.library.name == "numpy" and problem.plain and scores(problem) <= SMALL_NUMPY:
        return dense, compiled, *ON_GPU, tiled
    return (compiled, *by_size(problem), *ON_GPU)


def by_size(problem: Problem) -> tuple[Kernel, Kernel]:
    """The two that take everything, the faster one first."""
    return (dense, tiled) if scores(problem) <= SMALL else (tiled, dense)


def scores(problem: Problem) -> int:
    """How many scores there are."""
    return math.prod(problem.grid.shape)


def on_gpu(problem: Problem) -> bool:
    """True for PyTorch tensors on a CUDA device."""
    return problem.library.name == "torch" and problem.q.device.type == "cuda"


def choose(problem: Problem, name: str | None = None) -> Kernel:
    """The kernel that runs, perhaps on the parts that a problem falls into.

    A kernel asked for by name is taken or refuses; it is never replaced.
    """
    apart = on_parts(problem, name)
    if apart is not None:
        return apart
    if name is not None:
        kernel = named(name)
        reason = kernel.rejects(problem)
        if reason is not None:
            raise KernelRefused(name, reason)
        return kernel
    return best(problem) or compare(problem)[0]  # which says why there is none


def on_parts(problem: Problem, name: str | None) -> Apart | None:
    """The kernel that takes the parts of a problem; None where there are none, or the formula is asked for.

    One kernel has all of them, so that peaks are in one unit.
    """
    if problem.mask is None or name in FORMULA:
        return None
    place = "cpu"
    if on_gpu(problem):
        place = "gpu"
    elif problem.library.name == "jax":
        place = "gpu" if jax_platform(problem.q) == "gpu" else "cpu" if is_traced(problem.q) else "eager"
    parts = parts_of(problem, place)
    if parts is None:
        return None
    several = parts[0].comb != parts[-1].comb
    if name is not None:
        kernels: tuple[Kernel | None, ...] = (named(name),)
    else:
        kernels = preference(parts[0].problem) if several else (best(parts[0].problem),)
    # the vendor's outputs are rounded, and outputs of several combs are merged; their weights are looked at again
    looks = several and problem.want is not None and bool(problem.want.names)
    halves = several and dtype_name(problem.q) in HALF  # gradients of which are added up before they are rounded
    unfit = (None, dense, vendor) if several else (None, dense)
    fit = (one for one in kernels if one not in unfit and (one is compiled or not (looks or halves)))
    able = (apart for one in fit if one is not None and (apart := Apart(one, place)).rejects(problem) is None)
    return next(able, None)


def best(problem: Problem) -> Kernel | None:
    """The fastest on a GPU, where it was measured; else the first that does not refuse, if there is one."""
    if on_gpu(problem) and vendor.rejects(problem) is None:
        return quickest(problem)
    for kernel in preference(problem):
        if kernel.rejects(problem) is None:
            return kernel
    return None


def choose_gradients(problem: Problem, ran: Kernel, name: str | None = None) -> Kernel:
    """The kernel that gives the gradients of what another one ran: that one, unless it has none of this problem."""
    reason = rejects_gradients(ran, problem)
    if reason is None:
        return ran
    if isinstance(ran, Apart):
        others = (Apart(kernel, ran.place) for kernel in preference(problem) if kernel not in (compiled, dense))
        able = None if name is not None else next((one for one in others if not one.rejects_gradients(problem)), None)
        if able is None:
            raise KernelRefused(ran.name, reason)
        return able
    if name is not None:
        raise KernelRefused(name, reason)
    for kernel in preference(problem):
        if kernel is not compiled and rejects_gradients(kernel, problem) is None:  # it knows its own peaks alone
            return kernel
    raise KernelRefused(ran.name, reason)


def quickest(problem: Problem) -> Kernel:
    """The fastest of the kernels that take a problem which the vendor's take too; remembered for all of its kind."""
    passes = passes_of(problem)
    key = (vendor.way(problem).kind, passes)
    choice = _quickest.get(key)
    if choice is None:
        from clearhead.kernels.fastest import fastest  # reads files: for who has a GPU

        choice = fastest(problem, passes, tuple(kernel for kernel in ON_GPU if takes(kernel, problem, passes)))
        if not choice.sure:
            return choice.kernel
        if len(_quickest) >= MOST:
            _quickest.clear()
        _quickest[key] = choice
    if choice.kernel is vendor:
        vendor.settle(problem, passes, choice.way)
    return choice.kernel


def settled(problem: Problem) -> bool:
    """True where the same kernel will be chosen for all problems of this kind: nothing is left to be measured."""
    return vendor.rejects(problem) is not None or (vendor.way(problem).kind, passes_of(problem)) in _quickest


def takes(kernel: Kernel, problem: Problem, passes: Passes) -> bool:
    """True for a kernel that takes a problem, with gradients where they will be asked for."""
    return kernel.rejects(problem) is None and (passes == "forward" or rejects_gradients(kernel, problem) is None)


def passes_of(problem: Problem) -> Passes:
    """Whether gradients will be asked for."""
    learns = problem.differentiated or (problem.differentiable and sys.modules["torch"].is_grad_enabled())
    return "training" if learns else "forward"


def compare(problem: Problem, name: str | None = None) -> tuple[Kernel, dict[str, str]]:
    """The kernel that runs, and why each other one does not."""
    if name is not None:
        kernel = choose(problem, name)
        return kernel, {other.name: f"{name!r} was asked for" for other in KERNELS if other.name != name}
    apart = on_parts(problem, name)
    if apart is not None:
        _, reasons = compare(apart.parts(problem)[0].problem)
        return apart, {kernel: reason for kernel, reason in reasons.items() if kernel != apart.name}
    chosen = best(problem)
    others: dict[str, str] = {}
    for kernel in preference(problem):
        reason = kernel.rejects(problem)
        if reason is not None:
            others[kernel.name] = f"refused: {reason}"
        elif kernel is not chosen:
            assert chosen is not None
            others[kernel.name] = f"able, but {chosen.name!r} is preferred: {because(chosen, kernel, problem)}"
    if chosen is None:
        raise KernelRefused("any", "; ".join(f"{name}: {reason}" for name, reason in others.items()))
    return chosen, others


def because(kernel: Kernel, other: Kernel, problem: Problem) -> str:
    """Why a kernel is preferred to another."""
    if kernel in ON_GPU:
        from clearhead.kernels.fastest import figures  # as above

        measured = figures(problem, passes_of(problem), kernel, other) if other in ON_GPU and on_gpu(problem) else None
        return measured or "it is the fastest on this GPU for what it takes"
    if kernel is compiled:
        return "it is the fastest on this CPU"
    count = scores(problem)
    if kernel is preference(problem)[0]:
        return f"{count:,} scores cost NumPy less than preparing a kernel"
    return f"{count:,} scores are {'at most' if count <= SMALL else 'more than'} {SMALL:,}"


def named(name: str) -> Kernel:
    """The kernel of that name."""
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    known = ", ".join(repr(kernel.name) for kernel in KERNELS)
    raise ArgumentError("kernel", f"is {name!r}, expected one of {known}, or None to have one chosen")
