"""torch.func: vmap as one more batch axis, and gradients that its transforms can follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.autograd import NO_FORWARD
from clearhead.errors import KernelRefused
from clearhead.ops import attention, attention_backward, no_second

OPTIONS = 12  # how many arguments the operators have after their tensors


def active() -> bool:
    """True inside a transform of torch.func or forward derivatives, where an operator's own gradients are not known."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def transformed(*inputs: Any) -> Any:
    """The operator, by way of a function that transforms can follow."""
    apply: Any = Attention.apply
    return apply(*inputs) if active() else attention(*inputs)


def transformed_backward(*inputs: Any) -> Any:
    """Its backward, in the same way."""
    apply: Any = Backward.apply
    return apply(*inputs) if active() else attention_backward(*inputs)


def ahead(tensor: Tensor, axis: int | None, size: int, rank: int) -> Tensor:
    """A tensor with the mapped axis first and `rank` axes after it; one that is not mapped is repeated."""
    tensor = tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return tensor.reshape(size, *(1,) * (rank - tensor.ndim + 1), *tensor.shape[1:])


def axes_of(tensors: Any, dims: Any) -> list[int]:
    """How many axes each tensor has for one entry."""
    return [tensor.ndim - (dim is not None) for tensor, dim in zip(tensors, dims, strict=True)]


def in_one_call(in_dims: tuple[Any, ...], options: Any) -> bool:
    """True where only q, k, v and what belongs to them are mapped, and no weights are dropped by their place."""
    *_, dropout, _, _ = options
    sinks, learned, seed, arrays = in_dims[-OPTIONS : 4 - OPTIONS]
    return not dropout and all(dim is None for dim in (sinks, learned, seed, *arrays))


def one_by_one(operator: Any, info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """A call for each entry, stacked."""

    def entry(value: Any, dim: Any, i: int) -> Any:
        if isinstance(value, list | tuple) and isinstance(dim, list | tuple):
            return [entry(one, d, i) for one, d in zip(value, dim, strict=True)]
        return value if dim is None else value.select(dim, i)

    calls = [
        operator(*(entry(value, dim, i) for value, dim in zip(inputs, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    results = tuple(torch.stack(found) for found in zip(*calls, strict=True))
    return results, (0,) * len(results)


def mapped(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
    """vmap of the operator."""
    tensors, options = inputs[:3], inputs[3:]
    if not in_one_call(in_dims, options):
        return one_by_one(transformed, info, in_dims, inputs)
    axes = axes_of(tensors, in_dims[:3])
    rank = max(3, *axes)
    moved = [ahead(tensor, dim, info.batch_size, rank) for tensor, dim in zip(tensors, in_dims[:3], strict=True)]
    output, peak, total = transformed(*moved, *options)
    return (output.squeeze(1) if axes[0] == 2 else output, peak, total), (0, 0, 0)


def mapped_backward(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
    """vmap of its backward."""
    tensors, options, dims = inputs[:7], inputs[7:], in_dims[:7]
    sinks, learns = options[0], options[-1]
    if learns or sinks is not None or not in_one_call(in_dims, options):
        return one_by_one(transformed_backward, info, in_dims, inputs)
    rank = max(3, *axes_of(tensors[4:], dims[4:]))
    ranks = (rank, rank, rank - 1, rank - 1, rank, rank, rank)  # peak and total have no features
    moved = [ahead(t, dim, info.batch_size, r) for t, dim, r in zip(tensors, dims, ranks, strict=True)]
    *found, none, nothing = transformed_backward(*moved, *options)
    shapes = [t.shape if d is None else t.movedim(d, 0).shape[1:] for t, d in zip(tensors[4:], dims[4:], strict=True)]
    dq, dk, dv = (g.reshape(info.batch_size, *shape) for g, shape in zip(found, shapes, strict=True))
    return (dq, dk, dv, none, nothing), (0, 0, 0, None, None)


class Attention(torch.autograd.Function):
    """The operator and its gradients."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return attention(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, sinks, learned, seed, arrays, *rest = inputs
        ctx.save_for_backward(*output, q, k, v, sinks, learned, seed, *arrays)
        ctx.mark_non_differentiable(*output[1:])
        ctx.rest = rest

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        tensors, (sinks, learned, seed, *arrays) = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        dq, dk, dv, dsinks, dlearned = transformed_backward(dout, *tensors, sinks, learned, seed, arrays, *ctx.rest)
        learns = ctx.rest[-1]
        gradients = (dq, dk, dv, None if sinks is None else dsinks, dlearned if learns else None)
        return *gradients, None, None, *(None for _ in ctx.rest)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise KernelRefused(ctx.rest[-2] or "clearhead::attention", NO_FORWARD)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return mapped(info, in_dims, *inputs)


class Backward(torch.autograd.Function):
    """The operator's backward, which is differentiated no further."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return attention_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.kernel = inputs[-2]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return no_second(ctx)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return mapped_backward(info, in_dims, *inputs)


attention.register_vmap(mapped)
attention_backward.register_vmap(mapped_backward)
