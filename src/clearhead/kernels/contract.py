"""What a kernel is: a name, a reason to refuse or None, and two ways to run."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from clearhead.arrays import Array
from clearhead.formula import Gradients
from clearhead.observe import Observed
from clearhead.problem import Problem


class Ran(NamedTuple):
    """What a kernel gives: the observations, and each row's denominator, from which weights can be recomputed.

    A weight is exp(score − peak) / total. The log-sum-exp says the same in one number, but of a row with scores of 10⁴
    it has no room for the last digits.
    """

    observed: Observed
    peak: Array
    total: Array


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

    def gradients(self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array) -> Gradients:
        """dq, dk, dv shaped as q, k, v of the problem, and dsinks (heads,), from what `run` gave."""
