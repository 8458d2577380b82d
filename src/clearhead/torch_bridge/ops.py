"""Attention as PyTorch operators, for everything that is traced: compile, export, torch.func, fake and meta tensors.

`clearhead::attention` and `clearhead::attention_backward` take tensors, and masks and biases in wire form (`wire.py`).
They run what an eager call runs; `traced.py` calls them. A saved program that contains them needs `import clearhead.nn`
before it is loaded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.dropout import Dropout
from clearhead.core.grid import Grid
from clearhead.core.positions import Added, Bias, Relative, buckets
from clearhead.core.problem import Problem, pose
from clearhead.kernels.choose import choose, choose_gradients
from clearhead.torch_bridge.flops import register
from clearhead.torch_bridge.refused import no_second
from clearhead.torch_bridge.wire import unpack_bias, unpack_mask

# tensors first; then mask, bias and the other options; `differentiated` says that gradients will be asked for, `learns`
# that the bias wants one
OPTIONS = (
    "Tensor? sinks, Tensor? learned, Tensor? seed, Tensor[] arrays, SymInt[] numbers, str? mask, str? bias,"
    " float? scale, float? softcap, float dropout, bool differentiated, str? kernel, bool learns"
)


def posed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    learned: Tensor | None,
    seed: Tensor | None,
    arrays: list[Tensor],
    numbers: list[int],
    mask: str | None,
    bias: str | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    differentiated: bool,
    kernel: str | None,
    learns: bool,
) -> Problem:
    """The operator's arguments as the problem they stand for, checked in full."""
    if learns and learned is not None:
        learned = learned.detach().requires_grad_()  # kernels that give no gradient of a bias then say so
    problem = pose(
        q,
        k,
        v,
        mask=None if mask is None else unpack_mask(mask, arrays, numbers),
        bias=None if bias is None else unpack_bias(bias, arrays, numbers, learned),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout=None if seed is None else Dropout(dropout, seed),  # type: ignore[arg-type]  # read by as_dropout
    )
    return problem.to_be_differentiated() if differentiated else problem


@torch.library.custom_op(
    "clearhead::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output; the output unrounded, empty where it is not another; and each row's peak and total.

    From these `attention_backward` recomputes the weights.
    """
    problem = posed(q, k, v, *options)
    observed, peak, total, unrounded = choose(problem, options[-2]).run(problem)
    if unrounded is None:  # a graph was promised one, whichever kernel runs
        unrounded = observed.output.float() if problem.keeps_unrounded else q.new_empty(0)
    unrounded = unrounded.contiguous()
    return problem.restore(observed.output).contiguous(), unrounded, peak.contiguous(), total.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem = shaped(q, k, v, *options)
    grid = problem.grid
    rows = (*grid.batch, grid.heads, grid.queries)
    precise = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape = (*rows, problem.width)
    output = q.new_empty(shape[1:] if problem.headless else shape)
    unrounded = q.new_empty(shape, dtype=precise) if problem.keeps_unrounded else q.new_empty(0)
    return output, unrounded, q.new_empty(rows, dtype=precise), q.new_empty(rows, dtype=precise)


def shaped(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Problem:
    """The problem where only shapes are known; a scale that is not given is not derived from a size that may vary."""
    given = list(options)
    given[7] = 1.0 if given[7] is None else given[7]
    return posed(q, k, v, *given)


@torch.library.custom_op(
    "clearhead::attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor output, Tensor peak, Tensor total, Tensor? dlse, Tensor q, Tensor k, Tensor v,"
    f" {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(
    dout: Tensor,
    output: Tensor,
    peak: Tensor,
    total: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    """dq, dk, dv, and the gradients of sinks and bias; what is absent is empty."""
    problem = posed(q, k, v, *options)
    grid = problem.grid
    shape = (*grid.batch, grid.heads, grid.queries, problem.width)
    kernel = choose_gradients(problem, choose(problem, options[-2]), options[-2])
    found = kernel.gradients(problem, dout.reshape(shape), output.reshape(shape), peak, total, dlse)
    sinks, learned, learns = options[0], options[1], options[-1]
    dsinks = q.new_empty(0) if found.dsinks is None else found.dsinks.to(sinks.dtype)
    dlearned = q.new_empty(0)
    if learns:
        dlearned = of_parameter(problem.bias, found.dbias, grid).to(learned.dtype)
    dq, dk, dv = (g.reshape(a.shape) for g, a in zip((found.dq, found.dk, found.dv), (q, k, v), strict=True))
    return tuple(g.contiguous() for g in (dq, dk, dv, dsinks, dlearned))


@attention_backward.register_fake
def _(
    dout: Tensor,
    output: Tensor,
    peak: Tensor,
    total: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    sinks, learned, learns = options[0], options[1], options[-1]
    given = (q, k, v, sinks, learned if learns else None)
    return tuple(q.new_empty(0) if a is None else a.new_empty(a.shape) for a in given)


def of_parameter(bias: Bias | None, dbias: Any, grid: Grid) -> Tensor:
    """The gradient of what a bias learns, from that of each score (*batch, heads, T, S)."""
    if isinstance(bias, Added):
        lead = dbias.ndim - bias.array.ndim
        sizes = (*(1,) * lead, *bias.array.shape)
        axes = [axis for axis, (have, want) in enumerate(zip(dbias.shape, sizes, strict=True)) if have != want]
        return (dbias.sum(axes, keepdim=True) if axes else dbias).reshape(bias.array.shape)
    assert isinstance(bias, Relative)
    distance = np.arange(grid.keys) - (np.arange(grid.queries)[:, None] + bias.alignment.offset(grid))
    chosen = buckets(distance, bias.table.shape[0], bidirectional=bias.bidirectional, most=bias.max_distance)
    places = torch.from_numpy(np.array(np.broadcast_to(chosen, (*grid.batch, 1, *grid.shape[-2:]))))
    by_head = (
        dbias.reshape(math.prod(grid.batch), *grid.shape[-3:]).transpose(0, 1).reshape(grid.heads, -1)
    )  # (heads, batch·T·S)
    table = by_head.new_zeros(bias.table.shape)
    return table.index_add_(0, places.reshape(-1).to(table.device), by_head.T.contiguous())


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, learned, seed, arrays, *rest = inputs
    ctx.save_for_backward(*saved(*output), q, k, v, sinks, learned, seed, *arrays)
    ctx.rest = rest
    ctx.set_materialize_grads(False)


def saved(output: Tensor, unrounded: Tensor, peak: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of what the operator gave, what its backward takes."""
    return (unrounded if unrounded.dtype != output.dtype else output), peak, total


def _backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
    output, peak, total, q, k, v, sinks, learned, seed, *arrays = ctx.saved_tensors
    none = (None, [None] * len(arrays), *(None,) * len(ctx.rest))
    if dout is None:
        return (None, None, None, None, None, *none)
    dq, dk, dv, dsinks, dlearned = attention_backward(
        dout, output, peak, total, None, q, k, v, sinks, learned, seed, arrays, *ctx.rest
    )
    learns = ctx.rest[-1]
    return (dq, dk, dv, None if sinks is None else dsinks, dlearned if learns else None, *none)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.kernel = inputs[-2]


attention.register_autograd(_backward, setup_context=_setup)
attention_backward.register_autograd(no_second, setup_context=_setup_backward)
register()
