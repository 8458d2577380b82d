"""A problem of JAX arrays run by the compiled kernel or another: described, given to JAX's operation, and read back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from clearhead.core.arrays import Array, is_traced
from clearhead.core.formula import Gradients
from clearhead.core.observations import OBSERVATIONS, Observed
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Ran
from clearhead.kernels.xla import direct
from clearhead.kernels.xla.describing import described
from clearhead.kernels.xla.lending import Lender
from clearhead.kernels.xla.primitives import bind, forward_p
from clearhead.kernels.xla.primitives import gradients as gradients_of
from clearhead.kernels.xla.spec import Spec


def run(problem: Problem, *, kernel: str = "compiled", lent: Lender | None = None) -> Ran:
    """Output and log-sum-exp, and what is wanted; by another kernel where its arrays are lent to it."""
    spec, operands = posed(problem, lent)
    ran = read(spec, kernel, problem.q.dtype, bind(forward_p, operands, spec=spec))
    if len(spec.roles) == 3 and not is_traced(problem.q) and (lent is not None or not direct.tries_patience(spec)):
        # for whoever keeps it; what takes long is kept by nobody, as it has to hear interrupts
        problem.found["program"] = partial(again, spec, kernel)
    return ran


def posed(problem: Problem, lent: Lender | None, *more: Array) -> tuple[Spec, list[Array]]:
    """A call and its operands. Who has the arrays lent knows the mask, and needs no operand for it where nothing is
    differentiated, as nothing is of arrays that are there.
    """
    if lent is None:
        return described(problem)
    if not any(map(is_traced, (problem.q, problem.k, problem.v, *more))):
        problem = replace(problem, mask=None, bias=None)
    spec, operands = described(problem)
    return replace(spec, lent=lent), operands


def again(spec: Spec, kernel: str, q: Array, k: Array, v: Array) -> Any:
    """The call on other arrays: its output, or all that was observed."""
    ran = read(spec, kernel, q.dtype, bind(forward_p, (q, k, v), spec=spec))
    return ran.observed.output if spec.want is None else ran.observed


def read(spec: Spec, kernel: str, dtype: Any, results: list[Array]) -> Ran:
    """The results of the operation, by their names."""
    output, lse, peak, total, *rest = results
    found = {"max_score": None, "entropy": None}
    if spec.want is not None:
        found["max_score"], found["entropy"], *rest = rest
        found |= asked(spec, rest)
    unrounded = output if spec.unrounded else None
    return Ran(Observed(output=output.astype(dtype), lse=lse, kernel=kernel, **found), peak, total, unrounded)


def asked(spec: Spec, results: list[Array]) -> dict[str, Array]:
    """What was wanted, by its name."""
    assert spec.want is not None
    left, found = iter(results), {}
    for name in spec.want.names:
        one, wanted = OBSERVATIONS[name], getattr(spec.want, name)
        arrays = [next(left) if part.led else jax.numpy.asarray(wanted, dtype=int) for part in one.parts]
        found[name] = one.of(arrays)
    return found


def gradients(
    problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None,
    *, lent: Lender | None = None,
) -> Gradients:  # fmt: skip
    """dq, dk and dv shaped as q, k and v, and those of sinks."""
    more = [] if dlse is None else [dlse]
    spec, operands = posed(problem, lent, dout, output, peak, total, *more)
    learn = [0, 1, 2] if spec.place_of_sinks is None else [0, 1, 2, spec.place_of_sinks]
    shapes = {n: tuple(operands[n].shape) for n in learn}
    found = gradients_of(operands, [dout, output, peak, total, *more], spec, shapes)
    dq, dk, dv = (found[n].reshape(array.shape) for n, array in enumerate((problem.q, problem.k, problem.v)))
    dsinks = None if spec.place_of_sinks is None else found[spec.place_of_sinks]
    return Gradients(dq, dk, dv, None, dsinks)
