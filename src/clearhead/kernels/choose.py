"""Kernels in order of preference, and why each was refused."""

from __future__ import annotations

import math

from clearhead.core.errors import ArgumentError, KernelRefused
from clearhead.core.problem import Problem
from clearhead.kernels.compiled import compiled
from clearhead.kernels.contract import Kernel
from clearhead.kernels.dense import SMALL_NUMPY, dense
from clearhead.kernels.tiled import tiled
from clearhead.kernels.triton import triton
from clearhead.kernels.vendor import vendor

KERNELS: tuple[Kernel, ...] = (compiled, vendor, triton, tiled, dense)

# Below this many scores the matrix fits into a cache, and building it costs less than looping over tiles
# (`make bench`).
SMALL = 256 * 1024


def preference(problem: Problem) -> tuple[Kernel, ...]:
    """Every kernel, best first."""
    if on_gpu(problem):
        return (vendor, triton, compiled, *by_size(problem))
    if problem.library.name == "numpy" and problem.plain and scores(problem) <= SMALL_NUMPY:
        return dense, compiled, vendor, triton, tiled
    return (compiled, *by_size(problem), vendor, triton)


def by_size(problem: Problem) -> tuple[Kernel, Kernel]:
    """The two that take everything, the faster one first."""
    return (dense, tiled) if scores(problem) <= SMALL else (tiled, dense)


def scores(problem: Problem) -> int:
    """How many scores there are."""
    return math.prod(problem.grid.shape)


def because(kernel: Kernel, problem: Problem) -> str:
    """Why a kernel is preferred to those after it."""
    if kernel is compiled:
        return "it is the fastest on this CPU"
    if kernel is vendor:
        return "the vendor's own kernels are the fastest for plain problems"
    if kernel is triton:
        return "it is the fastest on this GPU for what the vendor has not"
    count = scores(problem)
    if kernel is preference(problem)[0]:
        return f"{count:,} scores cost NumPy less than preparing a kernel"
    return f"{count:,} scores are {'at most' if count <= SMALL else 'more than'} {SMALL:,}"


def on_gpu(problem: Problem) -> bool:
    """True for PyTorch tensors on a CUDA device."""
    return problem.library.name == "torch" and problem.q.device.type == "cuda"


def choose(problem: Problem, name: str | None = None) -> Kernel:
    """The kernel that runs: the first that does not refuse.

    A kernel asked for by name is taken or refuses; it is never replaced.
    """
    if name is not None:
        kernel = named(name)
        reason = kernel.rejects(problem)
        if reason is not None:
            raise KernelRefused(name, reason)
        return kernel
    for kernel in preference(problem):
        if kernel.rejects(problem) is None:
            return kernel
    return compare(problem)[0]  # which says why there is none


def compare(problem: Problem, name: str | None = None) -> tuple[Kernel, dict[str, str]]:
    """The kernel that runs, and why each other one does not."""
    if name is not None:
        kernel = choose(problem, name)
        return kernel, {other.name: f"{name!r} was asked for" for other in KERNELS if other is not kernel}
    chosen: Kernel | None = None
    others: dict[str, str] = {}
    for kernel in preference(problem):
        reason = kernel.rejects(problem)
        if reason is not None:
            others[kernel.name] = f"refused: {reason}"
        elif chosen is None:
            chosen = kernel
        else:
            others[kernel.name] = f"able, but {chosen.name!r} is preferred: {because(chosen, problem)}"
    if chosen is None:
        raise KernelRefused("any", "; ".join(f"{name}: {reason}" for name, reason in others.items()))
    return chosen, others


def named(name: str) -> Kernel:
    """The kernel of that name."""
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    known = ", ".join(repr(kernel.name) for kernel in KERNELS)
    raise ArgumentError("kernel", f"is {name!r}, expected one of {known}, or None to have one chosen")
