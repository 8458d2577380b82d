"""Where a call meets PyTorch's own machinery: autograd, taught to call a kernel's backward; autocast; tracing."""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from clearhead.arrays import Array, is_torch, made, stands_in
from clearhead.errors import KernelRefused
from clearhead.kernels.contract import Kernel
from clearhead.observe import Observed
from clearhead.problem import Problem


def wanted(problem: Problem) -> bool:
    """True where PyTorch will ask for gradients of this call."""
    if problem.library.name != "torch" or not sys.modules["torch"].is_grad_enabled():
        return False
    if problem.q.requires_grad or problem.k.requires_grad or problem.v.requires_grad:
        return True
    return (problem.bias is not None or problem.sinks is not None) and bool(problem.differentiable)


def run(kernel: Kernel, problem: Problem) -> Observed:
    """`kernel.run`, with gradients through the output; what is observed carries none."""
    function = _torch_function()
    kept: list[Observed] = []
    held = [*tensors_in(problem.mask), *tensors_in(problem.bias)]
    output = function.apply(kernel, problem, kept, held, problem.q, problem.k, problem.v, problem.sinks)
    return made(Observed, **{**vars(kept[0]), "output": output})


def tensors_in(value: Any) -> list[Array]:
    """The tensors whose memory a mask or bias reads, also where it sees them as NumPy arrays."""
    if value is None:
        return []
    if is_dataclass(value):
        return [tensor for part in vars(value).values() for tensor in tensors_in(part)]
    while isinstance(value, np.ndarray):
        value = value.base
    return [value] if is_torch(value) else []


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
        if type(tensor) is torch.Tensor and not tensor.is_meta:  # as nearly all are: asked first, for it is quick
            continue
        if is_torch(tensor) and stands_in(tensor):
            return True
    return False


def overridden(*tensors: Array) -> bool:
    """True where something sees this call before it is made: a `TorchFunctionMode`, or a tensor class of its own."""
    return bool(sys.modules["torch"].overrides.has_torch_function_variadic(*tensors))


def hand_over(function: Any, tensors: tuple[Array, ...], **options: Any) -> Any:
    """The call as PyTorch's own functions make it known; who sees it makes the call."""
    return sys.modules["torch"].overrides.handle_torch_function(function, tensors, *tensors, **options)


@lru_cache(maxsize=1)
def _torch_function() -> Any:
    torch = sys.modules["torch"]

    class Attention(torch.autograd.Function):  # type: ignore[misc,name-defined]  # torch is only here at run time
        """A kernel's own forward and backward."""

        @staticmethod
        def forward(
            ctx: Any, kernel: Kernel, problem: Problem, kept: list[Observed], held: list[Array], *tensors: Array
        ) -> Array:
            observed, peak, total = kernel.run(problem)
            kept.append(observed)
            ctx.kernel, ctx.problem = kernel, problem
            ctx.save_for_backward(*tensors[:3], observed.output, peak, total, *held)
            return observed.output

        @staticmethod
        def backward(ctx: Any, dout: Array) -> tuple[Any, ...]:
            # also checks that inputs, mask and bias were not written to since
            q, k, v, output, peak, total, *_ = ctx.saved_tensors
            given = (ctx.kernel, ctx.problem, dout, output.detach(), peak, total)
            # only who may differentiate once more has to be told that it cannot be done
            found = Backward.apply(*given, q, k, v) if torch.is_grad_enabled() else gradients_of(*given)
            return None, None, None, None, *found

    class Backward(torch.autograd.Function):  # type: ignore[misc,name-defined]  # as above
        """A kernel's own backward, which is differentiated no further."""

        @staticmethod
        def forward(ctx: Any, kernel: Kernel, problem: Problem, *tensors: Array) -> tuple[Any, ...]:
            ctx.kernel = kernel.name
            return gradients_of(kernel, problem, *tensors[:4])

        @staticmethod
        def backward(ctx: Any, *_: Array) -> tuple[Any, ...]:
            raise KernelRefused(ctx.kernel, NO_SECOND)

    return Attention


def gradients_of(kernel: Kernel, problem: Problem, *given: Array) -> tuple[Array, Array, Array, Array | None]:
    """dq, dk, dv and dsinks as PyTorch wants them."""
    found = kernel.gradients(problem, *given)
    dsinks = found.dsinks
    if dsinks is not None and problem.sinks is not None:
        dsinks = dsinks.to(problem.sinks.dtype)
    return found.dq, found.dk, found.dv, dsinks


NO_SECOND = "it gives no second derivatives; attention(…, kernel='dense') does"
NO_FORWARD = "it gives no forward-mode derivatives; attention(…, kernel='dense') does"
