"""Gradients of one call for many gradients of its output, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from clearhead.torch_bridge.refused import no_second

# dq, dk, dv, and dsinks or None, of a gradient of the output and one of the log-sum-exp
Gradients = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor, Tensor | None]]


def one_by_one(operator: Any, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
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


# calls whose gradients are being computed for many gradients of their outputs: the kernel, and what computes them
_many: dict[int, tuple[str, Gradients]] = {}
_numbers = count()


@torch.library.custom_op(
    "clearhead::gradients_of_many",
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, int call) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _of_each(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, call: int) -> tuple[Tensor, ...]:
    """dq, dk, dv, and dsinks or nothing, for one gradient of the output of a call that was made.

    q, k and v are those of the call: who differentiates once more hears of it by way of them.
    """
    *found, dsinks = _many[call][1](dout, dlse)
    return *found, dout.new_empty(0) if dsinks is None else dsinks


def _name_kernel(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.kernel = _many[inputs[-1]][0]


_of_each.register_vmap(partial(one_by_one, _of_each))
_of_each.register_autograd(no_second, setup_context=_name_kernel)


def for_many(
    gradients: Gradients, kernel: str, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`gradients` of a call by that kernel, where dout or dlse stand for many.

    By way of an operator: PyTorch's older way of mapping, behind `is_grads_batched` and `jacobian(vectorize=True)`,
    tells what it maps to operators alone, and only to those that take no lists of tensors.
    """
    call = next(_numbers)
    _many[call] = (kernel, gradients)
    try:
        dq, dk, dv, dsinks = _of_each(dout, dlse, q, k, v, call)
    finally:
        del _many[call]
    return dq, dk, dv, dsinks
