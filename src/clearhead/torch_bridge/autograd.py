"""Where a call meets PyTorch's own machinery: autograd, taught to call a kernel's backward; autocast; tracing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.admit import admit
from clearhead.core.arrays import Array, is_torch, made, stands_in, to_numpy, without_gradient
from clearhead.core.errors import KernelRefused
from clearhead.core.observations import Observed
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Kernel
from clearhead.torch_bridge.refused import NO_SECOND


def wanted(problem: Problem) -> bool:
    """True where PyTorch will ask for gradients of this call."""
    if problem.library.name != "torch" or not sys.modules["torch"].is_grad_enabled():
        return False
    if problem.q.requires_grad or problem.k.requires_grad or problem.v.requires_grad:
        return True
    return (problem.bias is not None or problem.sinks is not None) and bool(problem.differentiable)


def run(kernel: Kernel, backward: Kernel, problem: Problem) -> Observed:
    """`kernel.run`, with gradients by `backward` through output and log-sum-exp; what else is observed carries none."""
    kept: list[Observed] = []
    arrays = (problem.q, problem.k, problem.v, problem.sinks)
    output, lse = _torch_function().apply(kernel, backward, problem, kept, *arrays)
    return made(Observed, **{**vars(kept[0]), "output": output, "lse": lse})


def as_observed(observed: Observed) -> Observed:
    """What a kernel made of differentiable steps gave, with gradients where every other kernel has them."""
    quiet = observed.each(without_gradient)
    return made(Observed, **{**vars(quiet), "output": observed.output, "lse": observed.lse})


class Place(NamedTuple):
    """Where a tensor stood that is kept elsewhere: its number there, and whether it was seen as a NumPy array."""

    number: int
    numpy: bool


def emptied(problem: Problem, tensors: list[Array]) -> Problem:
    """A problem with a place instead of each tensor whose memory it reads; those join the list.

    What autograd keeps it keeps itself, so that it notices what is written to, frees what is no longer needed, and lets
    hooks on saved tensors decide where they lie in the meantime.
    """
    own = vars(problem)
    held = {name: _emptied(own[name], tensors) for name in READS if own.get(name) is not None}
    return made(Problem, **{name: own[name] for name in KEEPS if name in own}, **held)


def filled(problem: Problem, tensors: Sequence[Array]) -> Problem:
    """What `emptied` made empty, with tensors in their places."""
    own = vars(problem)
    held = {name: _filled(own[name], tensors) for name in READS if name in own}
    return made(Problem, **{**own, **held})


READS = ("q", "k", "v", "sinks", "mask", "bias")
KEEPS = tuple(field.name for field in fields(Problem) if field.name not in READS)


def _emptied(value: Any, tensors: list[Array]) -> Any:
    if is_torch(value):
        tensors.append(value)
        return Place(len(tensors) - 1, False)
    if not isinstance(value, np.ndarray):
        return changed(value, lambda part: _emptied(part, tensors))
    base: Any = value
    while isinstance(base, np.ndarray):
        base = base.base
    if not is_torch(base):
        return value
    tensors.append(base)
    # another view of the tensor's memory stays as it is; that nothing is written to it is noticed all the same
    return Place(len(tensors) - 1, True) if _is_all_of(value, base) else value


def _is_all_of(view: np.ndarray, tensor: Array) -> bool:
    """True for the view that `to_numpy` gives of a tensor, and for no other of its memory."""
    whole = to_numpy(tensor)
    return view.__array_interface__ == whole.__array_interface__


def _filled(value: Any, tensors: Sequence[Array]) -> Any:
    if isinstance(value, Place):
        tensor = tensors[value.number]
        return to_numpy(tensor) if value.numpy else tensor
    return changed(value, lambda part: _filled(part, tensors))


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A mask or bias with its parts changed; itself where none is."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    own = {field.name: getattr(value, field.name) for field in fields(value)}
    parts = {name: change(part) for name, part in own.items()}
    return value if all(parts[name] is own[name] for name in own) else made(type(value), **parts)


def autocast(*arrays: Array) -> tuple[Array, ...]:
    """Tensors in the precision that an open `torch.autocast` asks for, as PyTorch does for its own attention.

    float64 stays, as it does there.
    """
    torch = sys.modules.get("torch")
    if torch is None or not is_torch(arrays[0]) or not torch._C._is_any_autocast_enabled():
        return arrays
    device = arrays[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return arrays
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        array.to(dtype) if is_torch(array) and array.is_floating_point() and array.dtype != torch.float64 else array
        for array in arrays
    )


def traced(kernel: str | None, *tensors: Array) -> bool:
    """True where a call has to be an operator: it is compiled, exported, transformed, or has no numbers yet."""
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    forward = torch.autograd.forward_ad._current_level >= 0  # derivatives forward, which only an operator hears of
    if forward or torch._C._functorch.peek_interpreter_stack() is not None:
        return kernel != "dense"  # its steps are PyTorch's own, which every transform knows, also twice
    for tensor in tensors:
        if tensor is None or (type(tensor) is torch.Tensor and not tensor.is_meta):  # as nearly all: asked first
            continue
        if is_torch(tensor) and stands_in(tensor):
            return True
    return False


def overridden(*tensors: Any) -> bool:
    """True where something sees this call before it is made: a `TorchFunctionMode`, or a tensor class of its own."""
    return bool(sys.modules["torch"].overrides.has_torch_function_variadic(*tensors))


def hand_over(function: Any, tensors: tuple[Array, ...], others: tuple[Any, ...], **options: Any) -> Any:
    """The call as PyTorch's own functions make it known; who sees it makes the call."""
    seen = (*tensors, *filter(is_torch, others))
    return sys.modules["torch"].overrides.handle_torch_function(function, seen, *tensors, **options)


@lru_cache(maxsize=1)
def _torch_function() -> Any:
    torch = sys.modules["torch"]

    class Attention(torch.autograd.Function):  # type: ignore[misc,name-defined]  # torch is only here at run time
        """A kernel's own forward and backward."""

        @staticmethod
        def forward(
            ctx: Any, kernel: Kernel, backward: Kernel, problem: Problem, kept: list[Observed], *_: Array
        ) -> tuple[Array, Array]:
            ran = kernel.run(problem)
            kept.append(ran.observed)
            read: list[Array] = []
            ctx.kernel, ctx.problem = backward, emptied(problem, read)
            ctx.save_for_backward(ran.precise, ran.peak, ran.total, *read)
            ctx.set_materialize_grads(False)
            if not any(ctx.needs_input_grad[place] for place in (4, 5, 7)):  # q, k and sinks: values are no part of it
                ctx.mark_non_differentiable(ran.observed.lse)
            return ran.observed.output, ran.observed.lse

        @staticmethod
        def backward(ctx: Any, dout: Array | None, dlse: Array | None) -> tuple[Any, ...]:
            # also checks that inputs, sinks, mask and bias were not written to since
            output, peak, total, *read = ctx.saved_tensors
            problem = filled(ctx.problem, read)
            if dout is None:  # only the log-sum-exp was used
                dout = output.new_zeros(output.shape, dtype=problem.q.dtype)
            return None, None, None, None, *differentiated(ctx.kernel, problem, dout, output, peak, total, dlse)

    return Attention


def differentiated(
    kernel: Kernel, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None
) -> tuple[Any, ...]:
    """dq, dk, dv and dsinks, of one gradient of the output or of many, for who may differentiate once more or not."""
    given = (kernel, problem, dout, output.detach(), peak.detach(), total.detach(), dlse)
    if is_mapped(dout) or is_mapped(dlse):
        from clearhead.torch_bridge.many import for_many  # needs PyTorch, which is here now

        def of_one(dout: Array, dlse: Array | None) -> tuple[Any, ...]:
            return gradients_of(kernel, problem, dout, *given[3:6], dlse)

        dq, dk, dv, dsinks = for_many(of_one, kernel.name, dout, dlse, problem.q, problem.k, problem.v)
        return dq, dk, dv, None if problem.sinks is None else dsinks
    if sys.modules["torch"].is_grad_enabled():  # who may differentiate once more has to be told that it cannot be done
        found: tuple[Any, ...] = _backward_function().apply(*given, problem.q, problem.k, problem.v)
        return found
    return gradients_of(*given)


@lru_cache(maxsize=1)
def _backward_function() -> Any:
    torch = sys.modules["torch"]

    class Backward(torch.autograd.Function):  # type: ignore[misc,name-defined]  # as above
        """A kernel's own backward, which is differentiated no further."""

        @staticmethod
        def forward(ctx: Any, kernel: Kernel, problem: Problem, *tensors: Array) -> tuple[Any, ...]:
            ctx.kernel = kernel.name
            return gradients_of(kernel, problem, *tensors[:5])

        @staticmethod
        def backward(ctx: Any, *_: Array) -> tuple[Any, ...]:
            raise KernelRefused(ctx.kernel, NO_SECOND)

    return Backward


def is_mapped(tensor: Array | None) -> bool:
    """True for a tensor that stands for many, as gradients do in `is_grads_batched` and under `torch.func.vmap`."""
    functorch = sys.modules["torch"]._C._functorch
    if tensor is None or functorch.is_legacy_batchedtensor(tensor):
        return tensor is not None
    return functorch.is_batchedtensor(tensor) and functorch.peek_interpreter_stack() is not None


def gradients_of(
    kernel: Kernel, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """dq, dk, dv and dsinks as PyTorch wants them."""
    # PyTorch may hand on a gradient with its sign bit set, or zeros without memory
    dlse = None if dlse is None else admit("dlse", dlse)
    found = kernel.gradients(problem, admit("dout", dout), output, peak, total, dlse)
    dsinks = found.dsinks if is_torch(problem.sinks) else None  # NumPy's want none
    if dsinks is not None and problem.sinks is not None:
        dsinks = dsinks.to(problem.sinks.dtype)
    return found.dq, found.dk, found.dv, dsinks
