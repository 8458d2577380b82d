"""JAX arrays lent to the GPU kernels as PyTorch's tensors: those that are there; programs do it in `in_programs.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from clearhead.core.arrays import Array, Library, is_array, is_traced, jax_platform, made
from clearhead.core.formula import Gradients
from clearhead.core.observations import Observed, changed
from clearhead.core.positions import Added, Relative
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Kernel, Ran

# the kernels that arrays are lent to, which each joins when it is imported
LENT_TO: list[Kernel] = []


def refused(problem: Problem, rejects: Callable[[Problem], str | None]) -> str | None:
    """Why a problem of JAX arrays, there or traced, is not lent to a kernel that `rejects` some of tensors."""
    if "torch" not in sys.modules:
        return "it takes JAX arrays by way of PyTorch, which is not imported: `import torch` first"
    if traced(problem):
        reason: str | None = _programs().refused(problem, rejects)
        return reason
    return not_lent(problem) or rejects(lent(problem))


def traced(problem: Problem) -> bool:
    """True in a program that JAX is compiling, or where it differentiates."""
    arrays = (problem.q, problem.k, problem.v, problem.scale, problem.sinks)
    if any(map(is_traced, arrays)):
        return True
    options = [option for option in (problem.mask, problem.bias, problem.softcap) if option is not None]
    return bool(options) and any(map(is_traced, sys.modules["jax"].tree.leaves(options)))


def _programs() -> Any:
    from clearhead.kernels.gpu import in_programs  # needs JAX, which is here now

    return in_programs


def not_lent(problem: Problem) -> str | None:
    """Why arrays of JAX that are there cannot be lent; None where they can."""
    if any(len(array.devices()) != 1 for array in (problem.q, problem.k, problem.v)):
        return "it takes JAX arrays that lie on one device"
    if isinstance(problem.bias, Relative) and is_traced(problem.bias.table):
        return "it takes no traced bias"
    return None


def tensor(array: Array) -> Array:
    """An array of JAX as a tensor in the same memory; NumPy's as they are."""
    torch = sys.modules["torch"]
    return torch.from_dlpack(array) if hasattr(array, "devices") else array


def lent(problem: Problem) -> Problem:
    """The same problem, on tensors; made once for all who ask."""
    found = problem.found.get("lent")
    if found is None:
        found = problem.found["lent"] = _lent(problem)
    return found


def _lent(problem: Problem) -> Problem:
    q, k, v = (tensor(array) for array in (problem.q, problem.k, problem.v))
    bias = problem.bias
    if isinstance(bias, Added):
        bias = Added(tensor(bias.array))
    elif isinstance(bias, Relative):
        bias = Relative(tensor(bias.table), bias.bidirectional, bias.max_distance, bias.alignment)
    own = {name: value for name, value in vars(problem).items() if name in Problem.__dataclass_fields__}
    sinks = None if problem.sinks is None else tensor(problem.sinks)
    return made(Problem, **{**own, "q": q, "k": k, "v": v, "bias": bias, "sinks": sinks, "library": Library.of(q)})


def back(array: Any) -> Any:
    """A tensor as an array of JAX, in the same memory."""
    jax = sys.modules["jax"]
    if array is None:
        return None
    if 0 in array.shape or any(stride == 0 for stride in array.stride()):  # one number for many, which JAX has not
        array = array.contiguous()
    return jax.dlpack.from_dlpack(array.detach().contiguous())


def run(problem: Problem, kernel: Kernel) -> Ran:
    """A kernel's run, on lent arrays."""
    if traced(problem) or at_once(problem):
        ran: Ran = _programs().run(problem, kernel, LENT_TO)
        return ran
    observed, peak, total, unrounded = kernel.run(lent(problem))
    own = dict(vars(observed))
    for name, value in own.items():
        if value is not None and name != "kernel":
            own[name] = changed(name, value, back)
    return Ran(made(Observed, **own), back(peak), back(total), back(unrounded))


def at_once(problem: Problem) -> bool:
    """True for arrays that are there and that a program of XLA's is given: it takes them, and makes others, faster.

    Not the first of a kind: a mask that never comes again is not worth a program.
    """
    return jax_platform(problem.q) == "gpu" and _programs().unfit(problem) is None and _programs().met(problem)


def gradients(problem: Problem, kernel: Kernel, *given: Any) -> Gradients:
    """A kernel's gradients, on lent arrays."""
    if traced(problem) or any(map(is_traced, given)) or at_once(problem):
        learnt: Gradients = _programs().gradients(problem, kernel, LENT_TO, *given)
        return learnt
    found = kernel.gradients(lent(problem), *(tensor(array) if is_array(array) else array for array in given))
    return Gradients(back(found.dq), back(found.dk), back(found.dv), None, back(found.dsinks))
