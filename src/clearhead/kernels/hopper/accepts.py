"""What Hopper's own kernels take, and in words why not: by the machine, and by the problem whatever the machine."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from clearhead.core.arrays import dtype_name
from clearhead.core.grid import Grid
from clearhead.core.lowered import Node
from clearhead.core.mask import Mask
from clearhead.core.masks import Band
from clearhead.core.positions import Alibi
from clearhead.core.problem import Problem
from clearhead.kernels.gpu import tuning
from clearhead.kernels.gpu.available import beyond, installed, no_gpu
from clearhead.kernels.gpu.cache_key import Cache, cache_key_of

TYPES = ("float16", "bfloat16")
HEAD_DIMS = (64, 128, 256)  # of tiles; what is a little narrower is padded
GRADIENT_HEAD_DIMS = (64, 128)  # for which registers hold two gradients and their tiles
MOST_HEADS = 65_535  # of all batch rows: as far as CUDA counts programs along an axis other than the first
SMALLEST = 2.0**-60  # scale that slopes are divided by without leaving float32


@cache
def unable(device: Any) -> str | None:
    """Why these kernels cannot run on a device; None where they can. The first call for a Hopper GPU imports Triton."""
    missing = "Triton is not installed" if not installed() else no_gpu(device)
    if missing is not None:
        return missing
    torch = sys.modules["torch"]
    other = another_machine(torch.cuda.get_device_capability(device), torch.version.hip)
    if other is not None:
        return other
    try:
        import_module("clearhead.kernels.hopper.launch")
    except ImportError as error:
        return f"this Triton has no Gluon for Hopper: {error}"
    return None


def another_machine(capability: tuple[int, int], hip: str | None) -> str | None:
    """Why a GPU is no Hopper, by its compute capability, and by ROCm's version where PyTorch is built for AMD.

    >>> another_machine((9, 0), "6.2")
    'it is written for NVIDIA Hopper GPUs, and this one is run by ROCm 6.2'
    """
    if hip is not None:  # which gives MI200 and MI300 a capability of 9, too
        return f"it is written for NVIDIA Hopper GPUs, and this one is run by ROCm {hip}"
    if capability[0] != 9:
        return (
            f"it is written for Hopper GPUs (compute capability 9.0), and this one has {capability[0]}.{capability[1]}"
        )
    return None


def refusal(problem: Problem) -> str | None:
    """Why a problem is not run, on any machine."""
    grid = problem.grid
    if 0 in grid.shape:
        return "there is nothing to attend to"
    if grid.queries * problem.group <= tuning.FEW:
        return f"few queries: up to {tuning.FEW} that share keys; `triton` splits the keys"
    return (
        sizes(problem, HEAD_DIMS) or options(problem) or biased(problem) or beyond(problem) or several_ranges(problem)
    )


def refusal_of_gradients(problem: Problem) -> str | None:
    """Why the gradients of a problem are not given, on any machine."""
    if sys.modules["torch"].are_deterministic_algorithms_enabled():
        return "it adds up gradients in no fixed order, and PyTorch is told to be deterministic; `triton` has an order"
    grid = problem.grid
    if 0 in grid.shape:
        return "there is nothing to attend to"
    heads = grid.heads
    for size in grid.batch:
        heads *= size
    if heads > MOST_HEADS:
        return f"{heads:,} heads of all batch rows are above {MOST_HEADS:,}"
    if any(tuple(a.shape[:-3]) != tuple(grid.batch) for a in (problem.q, problem.k, problem.v)):
        return "an array serves several batch rows, of which gradients are added up before they are rounded"
    if problem.bias is not None:
        return "it has no bias backwards; `triton` has"
    return sizes(problem, GRADIENT_HEAD_DIMS) or options(problem, any_scale=True) or beyond(problem) or no_span(problem)


def sizes(problem: Problem, head_dims: tuple[int, ...]) -> str | None:
    """Why arrays of this precision, or of so many features, are not taken."""
    name = dtype_name(problem.q)
    if name not in TYPES:
        return f"it takes {' and '.join(TYPES)}, not {name}"
    head_dim, value_dim = problem.q.shape[-1], problem.width
    if head_dim == value_dim and head_dim in head_dims:
        return None
    padded = {-(-size // 16) * 16 for size in (head_dim, value_dim)}
    if len(padded) == 1 and padded <= set(head_dims):
        return None
    known = ", ".join(map(str, head_dims))
    return f"{head_dim} features of a query and {value_dim} of a value are not, padded to 16, both one of {known}"


def options(problem: Problem, *, any_scale: bool = False) -> str | None:
    """Why this is not in the formula that these kernels compute."""
    if problem.dropout is not None:
        return "it has no dropout; `triton` has"
    if problem.sinks is not None:
        return "it has no sinks; `triton` has"
    return None if any_scale or problem.scale > 0 else f"scale {problem.scale} is not above 0"


def biased(problem: Problem) -> str | None:
    """Why a bias is not added."""
    if problem.bias is None:
        return None
    if not isinstance(problem.bias, Alibi):
        return "it has no bias but ALiBi; `triton` has"
    if problem.softcap is None and problem.scale <= SMALLEST:
        return f"scale {problem.scale} is too small to divide ALiBi's slopes by"
    return None


# of the last kinds of problems whose mask has to be looked at: whether each query's keys are in one range
_known = Cache()


def several_ranges(problem: Problem) -> str | None:
    """Why a mask is not taken with a bias: a query's keys are not in one range. Remembered for problems of one kind."""
    if problem.mask is None or type(problem.mask) is Band:
        return None
    if problem.bias is None:
        return too_many(problem)
    kind = cache_key_of(problem)
    single = None if kind is None else _known.get(kind)
    if single is None:
        from clearhead.kernels.gpu.masks import as_span

        assert problem.lowered is not None
        single = as_span(problem.lowered, problem.grid) is not None or ranges_of(problem) is not None
        if kind is not None:
            _known.keep(kind, single)
    return None if single else "it has a bias only where the keys that a query sees are in one range; `triton` has any"


MOST_BITS = 2**35  # pairs of mixed tiles, of which there is a bit for each
COARSE = 1024  # tiles of which there are few, and which hold no fewer such pairs
FINE = 128

# of the last kinds of problems with as many pairs: whether there are too many bits
_too_many = Cache()


def too_many(problem: Problem) -> str | None:
    """Why a mask is not taken: the bits of its mixed tiles would not fit. Remembered for problems of one kind."""
    grid, mask = problem.grid, problem.lowered
    if mask is None or math.prod(grid.shape) <= MOST_BITS:
        return None
    kind = cache_key_of(problem)
    known = None if kind is None else _too_many.get(kind)
    if known is None:
        planes = math.prod(grid.batch) if by_row(problem) else 1
        planes *= grid.heads if by_head(problem) else 1
        known = planes * grid.queries * grid.keys > MOST_BITS and all(
            mixed_pairs(mask, grid, size) > MOST_BITS for size in (COARSE, FINE)
        )
        if kind is not None:
            _too_many.keep(kind, known)
    return "the mask is mixed in too many tiles; `triton` takes any mask" if known else None


def mixed_pairs(mask: Mask | Node, grid: Grid, size: int) -> int:
    """How many pairs tiles of this size have in which some are seen and some are not."""
    from clearhead.core.runs import runs

    found = runs(mask, grid, size, size)
    return found.pairs - found.full_pairs


def ranges_of(problem: Problem) -> Any:
    """The first key of each query and the one after the last, or None; found once for a problem."""
    if "key ranges" not in problem.found:
        from clearhead.kernels.gpu.key_ranges import key_ranges

        problem.found["key ranges"] = key_ranges(problem.lowered, problem.grid)
    return problem.found["key ranges"]


def no_span(problem: Problem) -> str | None:
    """Why a mask's gradients are not given: a band that differs by batch row, or by head where heads share keys."""
    if problem.lowered is None:
        return None
    from clearhead.kernels.gpu.masks import as_span

    span = as_span(problem.lowered, problem.grid)
    if span is not None and not all(isinstance(limit, int) for limit in span):
        return "the mask is a band that is not the same for all batch rows; `triton` takes any mask"
    if span is None and problem.group > 1 and by_head(problem):
        return "the mask differs by head, and heads share keys; `triton` takes any mask"
    return None if span is not None else too_many(problem)


def by_head(problem: Problem) -> bool:
    """True where a mask may differ by head."""

    def differs(node: Node) -> bool:
        array = node.array()
        return node.heads > 0 or (array is not None and array.ndim >= 3 and array.shape[-3] > 1)

    return any(map(differs, nodes_of(problem)))


def by_row(problem: Problem) -> bool:
    """True where a mask may differ by batch row."""

    def differs(node: Node) -> bool:
        array = node.array()
        if array is not None and math.prod(array.shape[:-3]) > 1:
            return True
        rows = node.rows() if node.places() is None else ()
        return any(isinstance(number, np.ndarray) and number.size > 1 for number in node.numbers) or any(
            len(row) > 1 for row in rows
        )

    return any(map(differs, nodes_of(problem)))


def nodes_of(problem: Problem) -> Iterator[Node]:
    """All nodes of a problem's mask."""
    assert problem.lowered is not None
    waiting = [problem.lowered]
    while waiting:
        node = waiting.pop()
        waiting += node.parts
        yield node
