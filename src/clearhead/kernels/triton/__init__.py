"""The portable GPU kernels' door: what they take, and how a call is run. Triton is imported by the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clearhead.core.arrays import Array, dtype_name
from clearhead.core.formula import Gradients
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Ran
from clearhead.kernels.gpu import borrowed
from clearhead.kernels.gpu.available import beyond, unable
from clearhead.kernels.gpu.borrowed import lent, not_lent

WIDEST = 256
TYPES = ("float16", "bfloat16", "float32")


class Triton:
    """Attention on the GPU, in Triton: every mask and bias by tile, O(n) memory, and what was attended to."""

    name = "triton"

    def rejects(self, problem: Problem) -> str | None:
        """Why it cannot take a problem."""
        if problem.library.name == "jax":
            return not_lent(problem) or self.rejects(lent(problem))
        if problem.library.name != "torch":
            return f"it takes PyTorch tensors on a GPU, not {problem.library.name} arrays"
        missing = unable(problem.q.device)
        if missing is not None:
            return missing
        name = dtype_name(problem.q)
        if name not in TYPES:
            return f"it takes {', '.join(TYPES)}, not {name}"
        for name, size in (("features of a query", problem.q.shape[-1]), ("features of a value", problem.width)):
            if not 1 <= size <= WIDEST:
                return f"{size} {name} are outside 1 to {WIDEST}"
        far = beyond(problem)
        if far is not None:
            return far
        if problem.bias is not None and "bias" in problem.differentiable:
            return "it gives no gradient for a bias; `dense` does"
        return None

    def run(self, problem: Problem) -> Ran:
        """Output and log-sum-exp, and what is wanted in a second look at the scores."""
        if problem.library.name == "jax":
            return borrowed.run(problem, self.run)
        return _launch().run(problem)

    def gradients(
        self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
    ) -> Gradients:
        """dq, dk and dv, the weights recomputed by tile."""
        if problem.library.name == "jax":
            return borrowed.gradients(problem, self.gradients, dout, output, peak, total, dlse)
        return _launch().gradients(problem, dout, output, peak, total, dlse)


def _launch() -> Any:
    from clearhead.kernels.triton import launch

    return launch


if TYPE_CHECKING:
    from clearhead.kernels.contract import Kernel

    _: Kernel = Triton()

triton = Triton()
