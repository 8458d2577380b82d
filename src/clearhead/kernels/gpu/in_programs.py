"""The GPU kernels in programs that JAX compiles: XLA calls back with addresses, which PyTorch's tensors are made of.

A program holds q, k and v, and what gradients are made of, as its own arrays; the mask and all other options are known
when it is compiled. Kernels are launched on XLA's own stream, and their results are copied to where XLA wants them.
"""

from __future__ import annotations

import ctypes
import math
import pickle
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax

from clearhead.core.arrays import Array, Library, dtype_name, is_traced, jax_platform, made
from clearhead.core.asking import QueryWeights
from clearhead.core.formula import Gradients
from clearhead.core.observations import OBSERVATIONS
from clearhead.core.positions import Alibi
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Kernel, Ran, rejects_gradients
from clearhead.kernels.extension import TYPES
from clearhead.kernels.xla import lending, running
from clearhead.kernels.xla.lending import Handed, Place
from clearhead.kernels.xla.spec import Spec

NAMES = {number: name for name, number in TYPES.items()}
# what NumPy's names say of types for an array interface; bfloat16 has none there and is read as whole numbers
INTERFACE = {
    "float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<i2", "bool": "|b1", "int32": "<i4",
    "int64": "<i8",
}  # fmt: skip
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


class Lent:
    """Who runs the calls of a program: a kernel, others for gradients that it does not give, and all options."""

    def __init__(self, problem: Problem, kernel: Kernel, others: Sequence[Kernel]) -> None:
        self.kernel, self.others = kernel, others
        self.options = options_of(problem)
        self.settled: set[Handed] = set()
        bias: Any = problem.bias  # ALiBi, or none
        slopes = None if bias is None else (bias.slopes.tobytes(), repr(bias.alignment))
        self.key = (kernel.name, problem.scale, problem.softcap, problem.want, same(problem.mask), slopes)

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
        torch = sys.modules["torch"]
        tensors, rooms = ([tensor_at(place, stream) for place in places] for places in (given, results))
        where = torch.cuda.stream(torch.cuda.ExternalStream(stream)) if stream else nullcontext()
        # what is made for all calls of a kind is made by the first, and others may use it on other streams
        new = bool(stream) and handed not in self.settled
        if new:
            torch.cuda.synchronize()
        with where:
            found = self.backward(handed.spec, tensors) if handed.back else self.forward(handed.spec, tensors)
            for room, one in zip(rooms, found, strict=True):
                room.copy_(one)
        if new:
            torch.cuda.synchronize()
            self.settled.add(handed)

    def forward(self, spec: Spec, tensors: list[Array]) -> list[Array]:
        """The results of the forward pass, in the order of `Spec.rooms`."""
        problem = on_tensors(self.options, *tensors, grid=spec.grid, differentiated=spec.unrounded)
        ran = self.kernel.run(problem)
        seen = ran.observed
        found = [ran.precise if spec.unrounded else seen.output, seen.lse, ran.peak, ran.total]
        if spec.want is not None:
            found += [seen.max_score, seen.entropy]
            for name in spec.want.names:
                one = OBSERVATIONS[name]
                arrays = one.arrays(getattr(seen, name))
                found += [array for array, part in zip(arrays, one.parts, strict=True) if part.led]
        return found

    def backward(self, spec: Spec, tensors: list[Array]) -> list[Array]:
        """dq, dk and dv over all batch rows."""
        whole = [whole_batch(tensor, spec) for tensor in tensors[:3]]
        problem = on_tensors(self.options, *whole, grid=spec.grid, want=None, differentiated=True)
        dout, output, peak, total, *dlse = tensors[3:]
        reasons = {}
        for kernel in (self.kernel, *self.others):
            reasons[kernel.name] = rejects_gradients(kernel, problem)
            if reasons[kernel.name] is None:
                found = kernel.gradients(problem, dout, output, peak, total, dlse[0] if dlse else None)
                return [found.dq, found.dk, found.dv]
        raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


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


class OnDevice:
    """Memory of a GPU, as PyTorch reads it."""

    def __init__(self, address: int, kind: str, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": INTERFACE[kind], "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def tensor_at(place: Place, stream: int) -> Array:
    """A tensor in memory that is there: of the GPU that this thread has made its own; without a stream, of the CPU."""
    torch = sys.modules["torch"]
    address, number, sizes = place
    kind, shape = NAMES[number], tuple(sizes)
    if not math.prod(shape):
        return torch.empty(shape, dtype=getattr(torch, kind), device="cuda" if stream else "cpu")
    if not stream:
        size = math.prod(shape) * getattr(torch, kind).itemsize
        memory = (ctypes.c_byte * size).from_address(address)
        return torch.frombuffer(memory, dtype=getattr(torch, kind)).reshape(shape)
    found = torch.as_tensor(OnDevice(address, kind, shape), device=torch.device("cuda", torch.cuda.current_device()))
    if found.data_ptr() != address:
        raise RuntimeError("XLA's arrays lie on another GPU than the one that its thread has made its own")
    return found.view(torch.bfloat16) if kind == "bfloat16" else found


def run(problem: Problem, kernel: Kernel, others: Sequence[Kernel]) -> Ran:
    """A kernel's run, as an operation of JAX; others give the gradients that it does not give."""
    return running.run(problem, kernel=kernel.name, lent=Lent(problem, kernel, others))


def gradients(problem: Problem, kernel: Kernel, others: Sequence[Kernel], *given: Any) -> Gradients:
    """A kernel's gradients, in the same way, from what `run` gave."""
    return running.gradients(problem, *given, lent=Lent(problem, kernel, others))
