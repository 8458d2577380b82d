"""The fastest way to compute a call on a GPU, of those that kernels offer: by what was measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from clearhead.core.errors import KernelRefused
from clearhead.core.problem import Problem, pose
from clearhead.kernels.contract import Kernel, Passes, Several
from clearhead.kernels.speeds import LONG, LONGEST, Found, Sizes, measure, speeds_of

SHORT = 2e10  # FLOPs up to which launching takes longer than computing, and a kernel's first start is not worth it


class Choice(NamedTuple):
    """A kernel, which way of it, and the rates by which it was chosen; None where there are none."""

    kernel: Kernel
    way: str
    found: Found | None
    sure: bool = True  # False where it could not be measured now, and may be another time


def fastest(problem: Problem, passes: Passes, kernels: tuple[Kernel, ...]) -> Choice:
    """The fastest of these kernels, all of which take the problem; the first where nothing can be measured now."""
    known, sizes = speeds_of(problem.q.device), sizes_of(problem, passes)
    others: tuple[Kernel, ...] = ()
    if sizes.work < SHORT and not known.shipped:  # the others would have to be compiled for a call that is short
        kernels, others = kernels[:1], kernels[1:]
    offered = {way: kernel for kernel in kernels for way in ways(kernel, problem, passes)}
    capturing = is_capturing(problem)
    found = known.known(sizes, tuple(offered)) if len(offered) > 1 else None
    if found is None and len(offered) > 1 and not capturing:
        known.learn(sizes, measured(problem, passes, kernels))
        found = known.known(sizes, tuple(offered))
    rates = {} if found is None else found.rates
    # fastest first; then those of which nothing is known, in order; what refused to run is left out
    order = sorted((way for way in offered if rates.get(way, 1.0)), key=lambda way: -rates.get(way, 0.0))
    for way in order:
        if capturing or passes == "forward" or runs(offered[way], way, problem):
            return Choice(offered[way], way, found, found is not None or len(offered) == 1)
    for kernel in others:
        return Choice(kernel, ways(kernel, problem, passes)[0], found)
    raise KernelRefused(kernels[0].name, f"none of {', '.join(offered)} gives gradients for these sizes")


def is_capturing(problem: Problem) -> bool:
    """True while a CUDA graph is captured on the problem's device."""
    torch = sys.modules["torch"]
    with torch.cuda.device(problem.q.device):
        return bool(torch.cuda.is_current_stream_capturing())


def runs(kernel: Kernel, way: str, problem: Problem) -> bool:
    """True unless a back end refuses gradients, which it is not asked when it says what it takes."""
    if not isinstance(kernel, Several):
        return True
    torch = sys.modules["torch"]
    try:
        with torch.cuda.device(problem.q.device), torch.no_grad():
            kernel.calls(problem, "training")[way]()
    except torch.OutOfMemoryError:  # there is no room to try it now
        return True
    except getattr(torch, "AcceleratorError", ()):
        raise
    except RuntimeError:
        return False
    return True


def ways(kernel: Kernel, problem: Problem, passes: Passes) -> tuple[str, ...]:
    """The ways of a kernel, by name: most have one."""
    return kernel.ways(problem, passes) if isinstance(kernel, Several) else (kernel.name,)


def figures(problem: Problem, passes: Passes, kernel: Kernel, other: Kernel) -> str | None:
    """How fast two kernels are for a problem, in words; None where that was not measured."""
    both = {one.name: ways(one, problem, passes) for one in (kernel, other)}
    found = speeds_of(problem.q.device).known(sizes_of(problem, passes), sum(both.values(), ()))
    if found is None or not all(any(found.rates.get(way) for way in some) for some in both.values()):
        return None
    best = [max((found.rates.get(way, 0.0), way) for way in some) for some in both.values()]
    first, second = (f"{rate:.0f}" if way in both else f"{rate:.0f} ({way})" for rate, way in best)
    return f"{first} against {second} TFLOP/s, {found.source}"


def sizes_of(problem: Problem, passes: Passes) -> Sizes:
    """What the speed of a problem depends on; a mask counts as causal or as none."""
    grid = problem.grid
    rows = math.prod(grid.batch) * grid.heads
    features = problem.q.shape[-1]
    return Sizes(
        passes, problem.mask is not None, features, problem.width, problem.group, rows, grid.queries, grid.keys
    )


def measured(problem: Problem, passes: Passes, kernels: tuple[Kernel, ...]) -> dict[str, float]:
    """The rates of all ways, measured on the problem or a part of it that takes a few milliseconds."""
    torch = sys.modules["torch"]
    with torch.cuda.device(problem.q.device), torch.no_grad():
        part = shortened(problem, sizes_of(problem, passes))
        whole = part is problem
        part = part.to_be_differentiated() if passes == "training" else part
        calls: dict[str, Callable[[], Any]] = {}
        for kernel in kernels:
            if whole or kernel.rejects(part) is None:
                calls |= (
                    kernel.calls(part, passes) if isinstance(kernel, Several) else {kernel.name: timed(kernel, part)}
                )
        return measure(sizes_of(part, passes), calls, torch.cuda.current_stream().synchronize)


def timed(kernel: Kernel, problem: Problem) -> Callable[[], Any]:
    """A kernel's output for a problem; with gradients where they will be asked for."""

    def call() -> None:
        ran = kernel.run(problem)
        if problem.differentiated:
            kernel.gradients(problem, ran.observed.output, ran.precise, ran.peak, ran.total)

    return call


def shortened(problem: Problem, sizes: Sizes) -> Problem:
    """A problem of fewer positions, batch rows and heads, whose rates are the same; itself where it is short."""
    if sizes.work <= LONG and max(sizes.queries, sizes.keys) <= LONGEST:
        return problem
    q, k, v = (a.detach() for a in (problem.q, problem.k, problem.v))
    queries, keys = min(sizes.queries, LONGEST), min(sizes.keys, LONGEST)
    one = sizes._replace(rows=1, queries=queries, keys=keys).work
    rows = max(1, int(LONG / one))
    key_heads = max(1, min(problem.key_heads, rows // sizes.group))
    heads = key_heads * sizes.group
    batch = max(1, rows // heads)
    full = problem.grid.batch
    q, k, v = (a.expand(*full, *a.shape[-3:]).reshape(-1, *a.shape[-3:])[:batch] for a in (q, k, v))
    q, k, v = q[:, :heads, :queries], k[:, :key_heads, :keys], v[:, :key_heads, :keys]
    return pose(q, k, v, mask=problem.mask, scale=problem.scale)
