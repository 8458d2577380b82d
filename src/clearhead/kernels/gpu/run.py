"""A problem from the contract to a kernel's own function and back, for every GPU kernel: prepared, replayed, named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch.cuda import current_device

from clearhead.core.arrays import Array, made, summed_like
from clearhead.core.formula import Gradients
from clearhead.core.observations import OBSERVATIONS, Observed
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Ran
from clearhead.kernels.gpu.call import Call, Forward
from clearhead.kernels.gpu.compiling import compiled_ahead, wanted
from clearhead.kernels.gpu.launcher import alike, hooked
from clearhead.kernels.gpu.masks import capturing
from clearhead.kernels.gpu.packed import Packed
from clearhead.kernels.gpu.replay import Replay
from clearhead.kernels.gpu.second_look import launched


class Looked(NamedTuple):
    """What a kernel gives: of its forward, and of the second look by the names of `Observed`."""

    forward: Forward
    more: dict[str, Any]


def run(kernel: str, problem: Problem, compute: Callable[[Call], Looked]) -> Ran:
    """Output and log-sum-exp, and what is wanted, by the function that launches a kernel."""
    call, want = Call.of(problem), problem.want
    with call.current():
        sort = (kernel, wanted(want), problem.keeps_unrounded)
        if not launched(want):
            compiled_ahead(call, sort, partial(compute, call))
            found = compute(call)
        else:
            name = (kernel, want, problem.keeps_unrounded)
            found = call.replayed(name, (call.q, call.k, call.v, call.sinks), partial(compute, call), sort)
            if keep(problem, "recorded", call, name) is not None and want is not None:
                problem.found["again"] = Again(kernel, *problem.found["recorded"])
    return ran_of(kernel, found)


def observed_of(kernel: str, found: Looked) -> Observed:
    """What was found, as it is given."""
    output, lse, _, _, largest, entropy, *_ = found.forward
    return made(Observed, output=output, lse=lse, max_score=largest, entropy=entropy, kernel=kernel, **found.more)


def ran_of(kernel: str, found: Looked) -> Ran:
    """The same with what gradients need."""
    forward = found.forward
    return Ran(observed_of(kernel, found), forward.peak, forward.total, forward.unrounded)


class Again:
    """A call that was recorded, for others of its kind, with no sinks; what lasts is held on to, for it is read."""

    def __init__(self, kernel: str, replay: Replay, lasting: Any) -> None:
        self.kernel, self.replay, self.lasting = kernel, replay, lasting
        fields = vars(observed_of(kernel, replay.results))
        places = {name: place for name, place in fields.items() if place is not None and name != "kernel"}
        self.rest = {name: value for name, value in fields.items() if name not in places}
        self.seen = replay.giving(places)

    def __call__(self, q: Array, k: Array, v: Array) -> Observed | None:
        """The same on other tensors; None where somebody wants to hear of every launch."""
        if hooked():
            return None
        self.replay.played = True
        return made(Observed, **self.rest, **self.seen.play((q, k, v, None)))

    def packed(self, q: Array, k: Array, v: Array, *, all_seen: bool = False) -> Packed | None:
        """The same into one piece of memory, for tensors like these; None where that cannot be.

        `all_seen`: each query sees some key, and each key is seen by some query.
        """
        told = self.replay.results.forward.told if all_seen else None
        try:
            return Packed(self.replay, flat(self.seen.results), self.lasting, q, k, v, told)
        except ValueError:
            return None


class Attended:
    """A recorded call of which nothing is wanted but the output, for others of its kind."""

    def __init__(self, replay: Replay, lasting: Any) -> None:
        self.replay, self.lasting = replay, lasting
        self.output = replay.giving(replay.results.forward.output)

    def __call__(self, q: Array, k: Array, v: Array) -> Array | None:
        """The output for other tensors; None where somebody wants to hear of every launch."""
        if hooked():
            return None
        self.replay.played = True
        return self.output.play((q, k, v, None))


class Learnt:
    """A recorded call with gradients, for others of its kind: its forward, and backwards as they are recorded."""

    def __init__(self, replay: Replay, lasting: Any) -> None:
        self.replay, self.lasting = replay, lasting
        found = replay.results.forward
        self.found = replay.giving((found.output, found.unrounded, found.peak, found.total))
        self.backward: dict[Any, tuple[Replay, Any]] = {}  # by how the tensors lie that it is given

    @staticmethod
    def able() -> bool:
        """False where somebody wants to hear of every launch."""
        return not hooked()

    def forward(self, q: Array, k: Array, v: Array) -> list[Any]:
        """Output, the same in the precision of its sums or None, peaks and totals."""
        self.replay.played = True
        found: list[Any] = self.found.play((q, k, v, None))
        return found

    def gradients(self, *given: Array) -> tuple[Any, ...] | None:
        """dq, dk and dv, for q, k, v, dout, output, peaks and totals; None where no such call was recorded."""
        q, k, v, *rest = given
        if hooked() or (q.is_cuda and q.get_device() != current_device()) or capturing(q.device):
            return None
        known = self.backward.get(alike(*given))
        return None if known is None else tuple(known[0].play((q, k, v, None, *rest, None))[:3])

    def learn(self, problem: Problem, *given: Array) -> None:
        """Keep what was recorded of a problem's gradients, for tensors that lie like these."""
        if "recorded gradients" in problem.found:
            self.backward[alike(*given)] = problem.found["recorded gradients"]


def keep(problem: Problem, name: str, call: Call, recorded: Any) -> Replay | None:
    """Keep what was recorded with the problem, and what it reads, where tensors are taken as they are given."""
    replay = call.replays.get(recorded)
    if not isinstance(replay, Replay) or not call.as_given or problem.headless:
        return None
    problem.found[name] = (replay, (call.mask, call.scoring, call.kept))
    return replay


def flat(results: dict[str, Any]) -> dict[str, Any]:
    """Results by name, those of several arrays each under its own: "top.indices"."""
    found: dict[str, Any] = {}
    for name, value in results.items():
        kind = OBSERVATIONS[name].kind if name in OBSERVATIONS else None
        if kind is None or value is None:
            found[name] = value
        else:
            found.update(zip(OBSERVATIONS[name].names(name), value, strict=True))
    return found


def gradients(
    kernel: str,
    problem: Problem,
    compute: Callable[..., tuple[Any, Any, Any, Any]],
    dout: Array,
    output: Array,
    peak: Array,
    total: Array,
    dlse: Array | None,
) -> Gradients:
    """dq, dk and dv shaped as q, k and v, sums over broadcast batch axes included; and dsinks."""
    call = Call.of(problem)
    given = (dout, output, peak, total, dlse)
    name, sort = (kernel, "gradients", alike(*given)), (kernel, "gradients", output.dtype, dlse is None)
    with call.current():
        dq, dk, dv, dsinks = call.replayed(
            name, (call.q, call.k, call.v, call.sinks, *given), partial(shaped_gradients, call, compute, *given), sort
        )
    keep(problem, "recorded gradients", call, name)
    return Gradients(dq, dk, dv, None, dsinks)


def shaped_gradients(
    call: Call, compute: Callable[..., Any], dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None
) -> tuple[Any, Any, Any, Any]:
    """What a kernel's own function gives of tensors as kernels take them, shaped as the problem's."""
    problem = call.problem
    dout = call.aligned(call.one_batch_axis(dout))
    output, peak, total = output.contiguous(), peak.contiguous(), total.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv, dsinks = compute(call, dout, output, peak, total, dlse)
    shaped = [
        summed_like(gradient[..., : like.shape[-1]].reshape(*call.grid.batch, *like.shape[-3:]), like).to(like.dtype)
        for gradient, like in zip((dq, dk, dv), (problem.q, problem.k, problem.v), strict=True)
    ]
    return shaped[0], shaped[1], shaped[2], dsinks


def narrowed(call: Call, forward: Forward) -> Forward:
    """Outputs without the features that values were padded with."""
    output, unrounded, value_dim = forward.output, forward.unrounded, call.problem.width
    if output.shape[-1] == value_dim:
        return forward
    return forward._replace(
        output=output[..., :value_dim].contiguous(),
        unrounded=None if unrounded is None else unrounded[..., :value_dim].contiguous(),
    )
