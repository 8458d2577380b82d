"""The portable GPU kernels' door: what they take, and how a call is run. Triton is imported by the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clearhead.core.arrays import Array, dtype_name, jax_platform
from clearhead.core.formula import Gradients
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Ran
from clearhead.kernels.gpu import borrowed
from clearhead.kernels.gpu.available import beyond, unable

WIDEST = 256
TYPES = ("float16", "bfloat16", "float32")


class Triton:
    """Attention on the GPU, in Triton: every mask and bias by tile, O(n) memory, and what was attended to."""

    name = "triton"

    def rejects(self, problem: Problem) -> str | None:
        """Why it cannot take a problem."""
        if problem.library.name == "jax":
            reason = self.rejects_lent(problem)
            return None if reason is None else not_compiled(problem, reason)
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

    def rejects_lent(self, problem: Problem) -> str | None:
        """Why arrays of JAX are not lent to it."""
        return borrowed.refused(problem, self.rejects)

    def how(self, problem: Problem) -> str | None:
        """How it is reached from JAX."""
        if problem.library.name != "jax":
            return None
        if self.rejects_lent(problem) is not None:
            return "through Pallas, which XLA compiles"
        return "through PyTorch, which XLA's programs call" if borrowed.traced(problem) else "through PyTorch"

    def run(self, problem: Problem) -> Ran:
        """Output and log-sum-exp, and what is wanted in a second look at the scores."""
        if problem.library.name == "jax":
            return borrowed.run(problem, self) if self.rejects_lent(problem) is None else _in_xla().run(problem)
        return _launch().run(problem)

    def gradients(
        self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
    ) -> Gradients:
        """dq, dk and dv, the weights recomputed by tile."""
        if problem.library.name == "jax":
            return borrowed.gradients(problem, self, dout, output, peak, total, dlse)
        return _launch().gradients(problem, dout, output, peak, total, dlse)


def not_compiled(problem: Problem, reason: str) -> str | None:
    """Why arrays of JAX that are not lent, for this reason, are not for its kernels in Pallas either."""
    if jax_platform(problem.q) != "gpu":
        return reason
    other: str | None = _in_xla().rejects(problem)
    return None if other is None else f"{reason}; {other}"


def _in_xla() -> Any:
    from clearhead.kernels.triton import in_xla  # needs JAX, which is here now

    return in_xla


def _launch() -> Any:
    from clearhead.kernels.triton import launch

    return launch


if TYPE_CHECKING:
    from clearhead.kernels.contract import Kernel

    _: Kernel = Triton()

triton = Triton()
borrowed.LENT_TO.append(triton)
