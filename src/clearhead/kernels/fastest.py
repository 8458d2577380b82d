"""The fastest way to compute a call on a GPU, of those that kernels offer: by what was measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

from clearhead.core.errors import KernelRefused
from clearhead.core.problem import Problem, pose
from clearhead.kernels.contract import Kernel, Passes, Several
from clearhead.kernels.speeds import LONG, LONGEST, Found, Sizes, measure, speeds_of

SHORT = 2e10  # FLOPs up to which launching takes longer than computing, and a kernel's first start is not worth it


class Choice(NamedTuple):
    """A kernel, which way of it, and the rates by which it was chosen; None where nothing was measured."""

    kernel: Kernel
    way: str
    found: Found | None


def fastest(problem: Problem, passes: Passes, kernels: tuple[Kernel, ...]) -> Choice:
    """The fastest of these kernels, all of which take the problem; the first where nothing can be measured now."""
    offered = {way: kernel for kernel in kernels for way in ways(kernel, problem, passes)}
    first = next(iter(offered))
    if len(offered) == 1:
        return Choice(offered[first], first, None)
    known, sizes = speeds_of(problem.q.device), sizes_of(problem, passes)
    found = known.known(sizes, tuple(offered))
    if found is None and not sys.modules["torch"].cuda.is_current_stream_capturing():
        known.learn(sizes, measured(problem, passes, sizes, kernels))
        found = known.known(sizes, tuple(offered))
    if found is None:
        return Choice(offered[first], first, None)
    way = max(found.rates, key=lambda name: found.rates[name])
    if not found.rates[way]:
        raise KernelRefused(offered[first].name, f"none of {', '.join(offered)} has gradients for these sizes")
    return Choice(offered[way], way, found)


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


def measured(problem: Problem, passes: Passes, sizes: Sizes, kernels: tuple[Kernel, ...]) -> dict[str, float]:
    """The rates of all ways, measured on the problem or a part of it that takes a few milliseconds.

    Of a short problem only the first kernel is asked: the others would have to be compiled for it.
    """
    torch = sys.modules["torch"]
    kernels = kernels[:1] if sizes.work < SHORT else kernels
    device = problem.q.device
    with torch.cuda.device(device), torch.no_grad():
        part = shortened(problem, sizes)
        whole = part is problem
        part = part.to_be_differentiated() if passes == "training" else part
        calls: dict[str, Callable[[], Any]] = {}
        for kernel in kernels:
            if whole or kernel.rejects(part) is None:
                several = isinstance(kernel, Several)
                calls |= cast(Several, kernel).calls(part, passes) if several else {kernel.name: timed(kernel, part)}
        return measure(sizes_of(part, passes), calls, partial(torch.cuda.synchronize, device))


def timed(kernel: Kernel, problem: Problem) -> Callable[[], Any]:
    """A kernel's output for a problem; with gradients where they will be asked for."""

    def call() -> None:
        ran = kernel.run(problem)
        if problem.differentiated:
            kernel.gradients(problem, ran.observed.output, ran.precise, ran.peak, ran.total)

    return call


def shortened(problem: Problem, sizes: Sizes) -> Problem:
    """A problem of fewer positions, batch rows and heads, whose rates are the same; itself where it is short."""
    most = LONG
    if sizes.work <= most and max(sizes.queries, sizes.keys) <= LONGEST:
        return problem
    q, k, v = (a.detach() for a in (problem.q, problem.k, problem.v))
    queries, keys = min(sizes.queries, LONGEST), min(sizes.keys, LONGEST)
    one = sizes._replace(rows=1, queries=queries, keys=keys).work
    rows = max(1, int(most / one))
    key_heads = max(1, min(problem.key_heads, rows // sizes.group))
    heads = key_heads * sizes.group
    batch = max(1, rows // heads)
    q, k, v = (a.reshape(-1, *a.shape[-3:])[:batch] for a in (q, k, v))
    q, k, v = q[:, :heads, :queries], k[:, :key_heads, :keys], v[:, :key_heads, :keys]
    return pose(q, k, v, mask=problem.mask, scale=problem.scale)
