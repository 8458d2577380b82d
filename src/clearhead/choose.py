"""Kernels in order of preference, and why each was refused."""

from __future__ import annotations

from clearhead.errors import ArgumentError, KernelRefused
from clearhead.kernels.compiled import compiled
from clearhead.kernels.contract import Kernel
from clearhead.kernels.dense import SMALL_NUMPY, dense
from clearhead.kernels.tiled import tiled
from clearhead.kernels.triton import triton
from clearhead.kernels.vendor import vendor
from clearhead.problem import Problem

KERNELS: tuple[Kernel, ...] = (compiled, vendor, triton, tiled, dense)

# Below this many scores the matrix fits into a cache, and building it costs less than looping over tiles
# (`make bench`).
SMALL = 256 * 1024


def preference(problem: Problem) -> list[tuple[Kernel, str]]:
    """Every kernel, best first, each with the reason for its place."""
    scores = 1
    for size in problem.grid.shape:
        scores *= size
    small = scores <= SMALL
    side = "at most" if small else "more than"
    by_size = f"{scores:,} scores are {side} {SMALL:,}"
    slower = [(kernel, by_size) for kernel in ((dense, tiled) if small else (tiled, dense))]
    cpu: list[tuple[Kernel, str]] = [(compiled, "it is the fastest on this CPU")]
    gpu: list[tuple[Kernel, str]] = [
        (vendor, "the vendor's own kernels are the fastest for plain problems"),
        (triton, "it is the fastest on this GPU for what the vendor has not"),
    ]
    if on_gpu(problem):
        return [*gpu, *cpu, *slower]
    if scores <= SMALL_NUMPY and problem.plain and problem.library.name == "numpy":
        return [(dense, f"{scores:,} scores cost NumPy less than preparing a kernel"), *cpu, *gpu, (tiled, by_size)]
    return [*cpu, *slower, *gpu]


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
    for kernel, _ in preference(problem):
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
    because = ""
    for kernel, why in preference(problem):
        reason = kernel.rejects(problem)
        if reason is not None:
            others[kernel.name] = f"refused: {reason}"
        elif chosen is None:
            chosen, because = kernel, why
        else:
            others[kernel.name] = f"able, but {chosen.name!r} is preferred: {because}"
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
