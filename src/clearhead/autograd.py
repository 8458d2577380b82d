"""How gradients flow through a kernel that computes its own: PyTorch's autograd, taught to call it."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache
from typing import Any

from clearhead.arrays import Array
from clearhead.kernels.contract import Kernel
from clearhead.observe import Observed
from clearhead.problem import Problem


def wanted(problem: Problem) -> bool:
    """True where PyTorch will ask for gradients of this call."""
    return bool(problem.differentiable) and sys.modules["torch"].is_grad_enabled()


def run(kernel: Kernel, problem: Problem) -> Observed:
    """`kernel.run`, with gradients through the output; what is observed carries none."""
    function = _torch_function()
    kept: list[Observed] = []
    output = function.apply(kernel, problem, kept, problem.q, problem.k, problem.v, problem.sinks)
    return replace(kept[0], output=output)


@lru_cache(maxsize=1)
def _torch_function() -> Any:
    torch = sys.modules["torch"]

    class Attention(torch.autograd.Function):  # type: ignore[misc,name-defined]  # torch is only here at run time
        """A kernel's own forward and backward."""

        @staticmethod
        def forward(
            ctx: Any, kernel: Kernel, problem: Problem, kept: list[Observed], q: Array, k: Array, v: Array, sinks: Array
        ) -> Array:
            observed, peak, total = kernel.run(problem)
            kept.append(observed)
            ctx.kernel, ctx.problem = kernel, problem
            ctx.save_for_backward(q, k, v, observed.output, peak, total)
            return observed.output

        @staticmethod
        @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]  # PyTorch has no types for it
        def backward(ctx: Any, dout: Array) -> tuple[Any, ...]:
            *_, output, peak, total = ctx.saved_tensors  # also checks that q, k and v were not written to since
            found = ctx.kernel.gradients(ctx.problem, dout, output, peak, total)
            dsinks = found.dsinks
            if dsinks is not None:
                dsinks = dsinks.to(ctx.problem.sinks.dtype)
            return None, None, None, found.dq, found.dk, found.dv, dsinks

    return Attention
