"""What a kernel is: a name, a reason to refuse or None, and two ways to run."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from clearhead.core.arrays import Array
from clearhead.core.formula import Gradients
from clearhead.core.observations import Observed
from clearhead.core.problem import Problem


class Ran(NamedTuple):
    """What a kernel gives: the observations, and each row's denominator, from which weights can be recomputed.

    A weight is exp(score − peak) / total. The log-sum-exp says the same in one number, but of a row with scores of 10⁴
    it has no room for the last digits.

    `unrounded` is the output in the precision of its sums, where that is not the output's own and the problem is
    differentiated. A score's gradient is a difference, dweight − Σ dout · output: where one weight is nearly all, what
    is left of it is less than the rounding of a half-precision output.
    """

    observed: Observed
    peak: Array
    total: Array
    unrounded: Array | None = None

    @property
    def precise(self) -> Array:
        """The output as `gradients` wants it."""
        return self.observed.output if self.unrounded is None else self.unrounded


class Kernel(Protocol):
    """One way to compute attention. It takes what it does not refuse, exactly as `formula.py` defines it."""

    @property
    def name(self) -> str:
        """What users call it by."""

    def rejects(self, problem: Problem) -> str | None:
        """Why this problem is not taken, in words; None where it is."""

    def run(self, problem: Problem) -> Ran:
        """Output and log-sum-exp always; what `problem.want` asks for; all with leading axes (*batch, heads).

        Where nothing is wanted (`problem.want` is None) the other fields may be None.
        """

    def gradients(
        self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
    ) -> Gradients:
        """dq, dk, dv shaped as q, k, v of the problem, and dsinks (heads,), from what `run` gave.

        `output` is unrounded; `dout` is the gradient of the output and `dlse` (…, T), if given, that of the
        log-sum-exp, by which the gradient of each score grows by weight · dlse.
        """
