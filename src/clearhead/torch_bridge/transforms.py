"""torch.func: vmap as one more batch axis, and gradients that its transforms can follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.core.errors import KernelRefused
from clearhead.core.grid import Grid, broadcast
from clearhead.torch_bridge.many import one_by_one
from clearhead.torch_bridge.ops import attention, attention_backward, saved
from clearhead.torch_bridge.refused import NO_FORWARD, no_second
from clearhead.torch_bridge.wire import unpack_bias, unpack_mask

OPTIONS = 13  # how many arguments the operators have after their tensors


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
    *_, dropout, _, _, _ = options
    sinks, learned, seed, arrays = in_dims[-OPTIONS : 4 - OPTIONS]
    return not dropout and all(dim is None for dim in (sinks, learned, seed, *arrays))


def inside(tensor: Tensor, dim: int | None) -> Any:
    """The shape that one entry of a mapped tensor has, with a head axis."""
    shape = [size for axis, size in enumerate(tensor.shape) if dim is None or axis != dim % tensor.ndim]
    return shape if len(shape) > 2 else [1, *shape]


def check_inside(shapes: Any, options: Any) -> None:
    """Refuse masks and biases that fit all entries together and not each one: the mapped axis is not theirs."""
    _, learned, _, arrays, numbers, mask, bias, *_ = options
    q, k, v = shapes
    grid = Grid(broadcast(q[:-3], k[:-3], v[:-3]), q[-3], q[-2], k[-2])
    if mask is not None:
        unpack_mask(mask, arrays, numbers).check(grid)
    if bias is not None:
        unpack_bias(bias, arrays, numbers, learned).check(grid)


def mapped(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
    """vmap of the operator."""
    tensors, options = inputs[:3], inputs[3:]
    if not in_one_call(in_dims, options):
        return one_by_one(transformed, info, in_dims, *inputs)
    axes = axes_of(tensors, in_dims[:3])
    rank = max(3, *axes)
    check_inside([inside(t, d) for t, d in zip(tensors, in_dims[:3], strict=True)], options)
    moved = [ahead(tensor, dim, info.batch_size, rank) for tensor, dim in zip(tensors, in_dims[:3], strict=True)]
    output, *rest = transformed(*moved, *options)
    return (output.squeeze(1) if axes[0] == 2 else output, *rest), (0, 0 if rest[0].numel() else None, 0, 0)


def mapped_backward(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
    """vmap of its backward."""
    tensors, options, dims = inputs[:8], inputs[8:], in_dims[:8]
    sinks, learns = options[0], options[-1]
    if learns or sinks is not None or not in_one_call(in_dims, options):
        return one_by_one(transformed_backward, info, in_dims, *inputs)
    rank = max(3, *axes_of(tensors[5:], dims[5:]))
    ranks = (rank, rank, rank - 1, rank - 1, rank - 1, rank, rank, rank)  # peak, total and dlse have no features
    moved = [
        None if t is None else ahead(t, dim, info.batch_size, r) for t, dim, r in zip(tensors, dims, ranks, strict=True)
    ]
    *found, none, nothing = transformed_backward(*moved, *options)
    shapes = [t.shape if d is None else t.movedim(d, 0).shape[1:] for t, d in zip(tensors[5:], dims[5:], strict=True)]
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
        ctx.save_for_backward(*saved(*output), q, k, v, sinks, learned, seed, *arrays)
        ctx.mark_non_differentiable(*output[1:])
        ctx.rest = rest

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        *rows, q, k, v, sinks, learned, seed = ctx.saved_tensors[:9]
        arrays = list(ctx.saved_tensors[9:])
        dq, dk, dv, dsinks, dlearned = transformed_backward(
            dout, *rows, None, q, k, v, sinks, learned, seed, arrays, *ctx.rest
        )
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
