"""The GPU kernels in programs that JAX compiles: XLA calls back with addresses, which PyTorch's tensors are made of.

A program holds q, k and v, and what gradients are made of, as its own arrays; the mask and all other options are known
when it is compiled. Kernels are launched on XLA's own stream. The first calls of a kind have their results copied to
where XLA wants them; later ones are played there from what was recorded (`placed.py`).
"""

from __future__ import annotations

import operator
import pickle
import secrets
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

from clearhead.core.arrays import Array, Library, dtype_name, is_traced, jax_platform, made
from clearhead.core.asking import QueryWeights
from clearhead.core.formula import Gradients
from clearhead.core.observations import OBSERVATIONS
from clearhead.core.positions import Alibi
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Kernel, Ran, rejects_gradients
from clearhead.kernels.xla import lending, running
from clearhead.kernels.xla.lending import Handed, Place
from clearhead.kernels.xla.spec import Spec

if TYPE_CHECKING:
    from clearhead.kernels.gpu.placed import Placed
    from clearhead.kernels.gpu.replay import Replay

PLATFORMS = {"gpu": "cuda", "cpu": "cpu"}
STOOD_IN = "stood in"
jax_config: Any = jax.config  # which has no types


def refused(problem: Problem, rejects: Callable[[Problem], str | None]) -> str | None:
    """Why a problem that JAX traces is not for a kernel; `rejects` says so of tensors."""
    return unfit(problem) or rejects(stood_in(problem))


def unfit(problem: Problem) -> str | None:
    """What of a problem cannot be known when a program is compiled, or is not told to kernels."""
    platform = jax_platform(problem.q)
    if platform not in PLATFORMS:
        return f"under jit it takes JAX arrays on a GPU, not on {platform}"
    reason = lending.missing(PLATFORMS[platform])
    if reason is not None:
        return f"under jit XLA cannot call it: {reason}"
    for option in ("sinks", "dropout"):
        if getattr(problem, option) is not None:
            return f"under jit it is for problems without {option}"
    if problem.bias is not None and not isinstance(problem.bias, Alibi):
        return "under jit it has no bias but ALiBi"
    for name in ("scale", "softcap"):
        if is_traced(getattr(problem, name)):
            return f"under jit it takes no traced {name}"
    for name in ("mask", "bias"):
        if any(map(is_traced, jax.tree.leaves(getattr(problem, name)))):
            return f"under jit it takes no traced {name}"
    want = problem.want
    if want is not None and any(isinstance(getattr(want, name), QueryWeights) for name in want.names):
        return "under jit it takes no weights of queries"
    if 0 in problem.grid.shape:
        return "there is nothing to attend to"
    return None


def stood_in(problem: Problem) -> Problem:
    """The problem on tensors of the same sizes that hold anything; made once for all who ask."""
    found = problem.found.get(STOOD_IN)
    if found is None:
        torch = sys.modules["torch"]
        place = jax_config.jax_default_device or jax.devices(jax_platform(problem.q))[0]
        index = getattr(place, "local_hardware_id", 0) or 0
        device = torch.device("cuda", index) if jax_platform(problem.q) == "gpu" else torch.device("cpu")
        q, k, v = (
            torch.empty(tuple(a.shape), dtype=getattr(torch, dtype_name(a)), device=device)
            for a in (problem.q, problem.k, problem.v)
        )
        found = problem.found[STOOD_IN] = on_tensors(options_of(problem), q, k, v)
    return found


def options_of(problem: Problem) -> dict[str, Any]:
    """All of a problem but its arrays and whose they are."""
    known = set(Problem.__dataclass_fields__) - {"q", "k", "v", "library"}
    return {name: value for name, value in vars(problem).items() if name in known}


def on_tensors(options: dict[str, Any], q: Array, k: Array, v: Array, **changes: Any) -> Problem:
    """A problem of tensors."""
    return made(Problem, **{**options, "q": q, "k": k, "v": v, "library": Library.of(q), **changes})


# what `Placed` is made of, but for where results are wanted; None where nothing was recorded
Recorded: TypeAlias = "tuple[Replay, Any, list[int | None], list[Any]] | None"


# kinds of calls outside of programs that have been met, the last to come last
_met: OrderedDict[Any, None] = OrderedDict()
MOST = 512


def met(problem: Problem) -> bool:
    """Whether a call of this kind has come before; from now on it has."""
    sizes = tuple((tuple(array.shape), dtype_name(array)) for array in (problem.q, problem.k, problem.v))
    kind = (sizes, *said_by(problem))
    known = kind in _met
    _met[kind] = None
    _met.move_to_end(kind)
    if len(_met) > MOST:
        _met.popitem(last=False)
    return known


def said_by(problem: Problem) -> tuple[Any, ...]:
    """The options of a problem that is not `unfit`, to be compared."""
    bias: Any = problem.bias  # ALiBi, or none
    slopes = None if bias is None else (bias.slopes.tobytes(), repr(bias.alignment))
    return problem.scale, problem.softcap, problem.want, same(problem.mask), slopes


class Lent:
    """Who runs the calls of a program: a kernel, others for gradients that it does not give, and all options."""

    def __init__(self, problem: Problem, kernel: Kernel, others: Sequence[Kernel]) -> None:
        self.kernel, self.others = kernel, others
        self.options = options_of(problem)
        self.settled: set[Handed] = set()
        self.placed: dict[tuple[Handed, int], Placed] = {}
        self.key = (kernel.name, *said_by(problem))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lent) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def content(self) -> bytes:
        """The kernel and all options, in bytes; of what has none, bytes that nobody else has."""
        try:
            return pickle.dumps((self.kernel.name, sorted(self.options.items())))
        except Exception:  # a mask of somebody's own, say, that holds a function
            return secrets.token_bytes(16)

    def __call__(self, handed: Handed, stream: int, given: list[Place], results: list[Place]) -> None:
        """Run it, in its turn on a stream of XLA's."""
        from clearhead.kernels.gpu.at_address import tensor_at  # needs PyTorch, which is here now

        torch = sys.modules["torch"]
        where = torch.cuda.stream(torch.cuda.ExternalStream(stream)) if stream else nullcontext()
        kind = (handed, torch.cuda.current_device() if stream else -1)
        placed = self.placed.get(kind)
        if placed is not None:
            with where:
                if placed.play(stream, given, results):
                    return
        tensors, rooms = ([tensor_at(place, stream) for place in places] for places in (given, results))
        # what is made for all calls of a kind is made by the first, and others may use it on other streams
        new = bool(stream) and handed not in self.settled
        if new:
            torch.cuda.synchronize()
        with where:
            found, again = self.backward(handed.spec, tensors) if handed.back else self.forward(handed.spec, tensors)
            for room, one in zip(rooms, found, strict=True):
                room.copy_(one)
        if new:
            torch.cuda.synchronize()
            self.settled.add(handed)
        if again is not None:
            from clearhead.kernels.gpu.placed import Placed  # needs Triton, which has launched something

            self.placed[kind] = Placed(*again, results)

    def forward(self, spec: Spec, tensors: list[Array]) -> tuple[list[Array], Recorded]:
        """The results of the forward pass, in the order of `Spec.rooms`, and how the like is played."""
        problem = on_tensors(self.options, *tensors, grid=spec.grid, differentiated=spec.unrounded)
        found = in_order(spec, self.kernel.run(problem))
        recorded = problem.found.get("recorded")
        if recorded is None:
            return found, None
        from clearhead.kernels.gpu.run import ran_of  # needs Triton, which has launched something

        replay, lasting = recorded
        return found, (replay, lasting, [0, 1, 2, None], in_order(spec, ran_of(self.kernel.name, replay.results)))

    def backward(self, spec: Spec, tensors: list[Array]) -> tuple[list[Array], Recorded]:
        """dq, dk and dv over all batch rows, and how the like is played."""
        whole = [whole_batch(tensor, spec) for tensor in tensors[:3]]
        problem = on_tensors(self.options, *whole, grid=spec.grid, want=None, differentiated=True)
        dout, output, peak, total, *dlse = tensors[3:]
        reasons = {}
        for kernel in (self.kernel, *self.others):
            reasons[kernel.name] = rejects_gradients(kernel, problem)
            if reasons[kernel.name] is None:
                found = kernel.gradients(problem, dout, output, peak, total, dlse[0] if dlse else None)
                recorded = problem.found.get("recorded gradients")
                slopes = [found.dq, found.dk, found.dv]
                if recorded is None or any(map(operator.is_not, whole, tensors)):
                    return slopes, None
                replay, lasting = recorded
                inputs = [0, 1, 2, None, 3, 4, 5, 6, 7 if dlse else None]
                return slopes, (replay, lasting, inputs, list(replay.results[:3]))
        raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


def in_order(spec: Spec, ran: Ran) -> list[Any]:
    """What a forward pass gives in the order of `Spec.rooms`: arrays, or their places."""
    seen = ran.observed
    found = [ran.precise if spec.unrounded else seen.output, seen.lse, ran.peak, ran.total]
    if spec.want is not None:
        found += [seen.max_score, seen.entropy]
        for name in spec.want.names:
            one = OBSERVATIONS[name]
            arrays = one.arrays(getattr(seen, name))
            found += [array for array, part in zip(arrays, one.parts, strict=True) if part.led]
    return found


def same(mask: Any) -> Any:
    """A mask to be compared by what it says; one that cannot be, by who it is."""
    try:
        hash(mask)
    except TypeError:
        return Itself(mask)
    return mask


class Itself:
    """Equal to itself alone; it keeps what it stands for, so that nothing else has its identity."""

    def __init__(self, one: Any) -> None:
        self.one = one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.one is other.one

    def __hash__(self) -> int:
        return id(self.one)


def whole_batch(tensor: Array, spec: Spec) -> Array:
    """A tensor with a row of its own for each batch row."""
    shape = (*spec.batch, *tensor.shape[-3:])
    return tensor if tuple(tensor.shape) == shape else tensor.expand(shape).contiguous()


def run(problem: Problem, kernel: Kernel, others: Sequence[Kernel]) -> Ran:
    """A kernel's run, as an operation of JAX; others give the gradients that it does not give."""
    return running.run(problem, kernel=kernel.name, lent=Lent(problem, kernel, others))


def gradients(problem: Problem, kernel: Kernel, others: Sequence[Kernel], *given: Any) -> Gradients:
    """A kernel's gradients, in the same way, from what `run` gave."""
    return running.gradients(problem, *given, lent=Lent(problem, kernel, others))
