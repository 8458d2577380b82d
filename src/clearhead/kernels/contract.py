"""What a kernel is: a name, a reason to refuse or None, and two ways to run; and what it may offer besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from clearhead.core.arrays import Array
from clearhead.core.formula import Gradients
from clearhead.core.observations import Observed
from clearhead.core.problem import Problem

Passes = Literal["forward", "training"]  # the output alone, or with its gradients


class Ran(NamedTuple):
    """What a kernel gives: the observations, and each row's denominator, from which weights can be recomputed.

    A weight is exp(score − peak) / total. The log-sum-exp says the same in one number, but of a row with scores of 10⁴
    it has no room for the last digits. To `compiled` alone a peak is one of products that are not scaled yet, which is
    exact where its product with the scale would be rounded: it gives gradients of what it ran, and of nothing else.

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


class Place(NamedTuple):
    """Where the queries and keys of a problem lie in a larger call: its sizes, and the first of each."""

    queries: int
    keys: int
    first_query: int
    first_key: int


class Kernel(Protocol):
    """One way to compute attention. It takes what it does not refuse, exactly as `core/formula.py` defines it."""

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


class RefusesGradients(Kernel, Protocol):
    """A kernel that does not give gradients of all that it runs."""

    def rejects_gradients(self, problem: Problem) -> str | None:
        """Why `gradients` does not take this problem, in words, whichever kernel ran it; None where it does."""


class AtOnce(Protocol):
    """A short way for calls without options, taken before anything is checked."""

    def __call__(self, q: Array, k: Array, v: Array, mask: Any, scale: Any) -> Array | None:
        """The output, where it is seen at a glance who would be chosen to compute it; None for whatever is unusual."""


@runtime_checkable
class Several(Protocol):
    """A kernel with several back ends, of which the fastest is taken."""

    def ways(self, problem: Problem, passes: Passes) -> tuple[str, ...]:
        """The names of those that take a problem."""

    def calls(self, problem: Problem, passes: Passes) -> dict[str, Callable[[], Any]]:
        """Each as it would be called, to be timed."""


def how(kernel: Kernel, problem: Problem) -> str | None:
    """The way that a kernel is reached, in words, where it says so."""
    words: Callable[[Problem], str | None] = getattr(kernel, "how", lambda problem: None)
    return words(problem)


def unit_of(kernel: Kernel, call: Any) -> float:
    """What a peak that a kernel gives is multiplied with to be a score, in a call of that scale, softcap and bias."""
    unit: Callable[[Any], float] = getattr(kernel, "unit", lambda call: 1.0)
    return unit(call)


def rejects_gradients(kernel: Kernel, problem: Problem) -> str | None:
    """Why a kernel does not give gradients of this problem."""
    # by its name: asking whether it is a `RefusesGradients` takes longer than the rest
    refuse: Callable[[Problem], str | None] = getattr(kernel, "rejects_gradients", kernel.rejects)
    return refuse(problem)
