"""The door of Hopper's own kernels, in Gluon: what they take, and how a call is run. The first call imports Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clearhead.core.arrays import Array
from clearhead.core.formula import Gradients
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Ran
from clearhead.kernels.gpu import borrowed
from clearhead.kernels.hopper.accepts import refusal, refusal_of_gradients, unable


class Hopper:
    """Attention on Hopper's own units: half precisions, one range of keys for each query, and what was attended to."""

    name = "hopper"

    def rejects(self, problem: Problem) -> str | None:
        """Why it cannot take a problem."""
        if problem.library.name == "jax":
            return borrowed.refused(problem, self.rejects)
        return self.elsewhere(problem) or refusal(problem)

    def rejects_gradients(self, problem: Problem) -> str | None:
        """Why it cannot give the gradients of a problem."""
        if problem.library.name == "jax":
            return borrowed.refused(problem, self.rejects_gradients)
        return self.elsewhere(problem) or refusal_of_gradients(problem)

    @staticmethod
    def elsewhere(problem: Problem) -> str | None:
        """Why the arrays are not where the kernels run."""
        if problem.library.name != "torch":
            return f"it takes PyTorch tensors on a GPU, not {problem.library.name} arrays"
        return unable(problem.q.device)

    def run(self, problem: Problem) -> Ran:
        """Output and log-sum-exp, and what is wanted in a second look at the scores."""
        if problem.library.name == "jax":
            return borrowed.run(problem, self)
        return _launch().run(problem)

    def gradients(
        self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
    ) -> Gradients:
        """dq, dk and dv in one pass over all pairs; the order in which dq is added up is not fixed."""
        if problem.library.name == "jax":
            return borrowed.gradients(problem, self, dout, output, peak, total, dlse)
        return _launch().gradients(problem, dout, output, peak, total, dlse)


def _launch() -> Any:
    from clearhead.kernels.hopper import launch

    return launch


if TYPE_CHECKING:
    from clearhead.kernels.contract import Kernel

    _: Kernel = Hopper()

hopper = Hopper()
borrowed.LENT_TO.append(hopper)
