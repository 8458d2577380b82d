"""Running the GPU kernels: forward, then what is wanted; and gradients."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from clearhead.core.arrays import Array, made, summed_like
from clearhead.core.formula import Gradients
from clearhead.core.observations import Observed
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Ran
from clearhead.kernels.gpu import tuning
from clearhead.kernels.gpu.call import Call, processors
from clearhead.kernels.gpu.launcher import alike
from clearhead.kernels.gpu.second_look import look_again
from clearhead.kernels.gpu.tuning import Blocks, cdiv, power_of_2
from clearhead.kernels.hopper import accepts as hopper
from clearhead.kernels.triton.backward_kernel import gradients_of_keys, gradients_of_queries, spread
from clearhead.kernels.triton.decode_kernel import merge_parts, split_keys
from clearhead.kernels.triton.forward_kernel import forward as forward_kernel
from clearhead.kernels.triton.forward_kernel import repair

# tensors: output, lse, peak, total; and each where it is wanted or None: largest score, entropy, unrounded output
Found = tuple[Any, ...]

FEW = 64  # queries that share keys, below which they are one block and the keys are split
PARTS = 128  # parts of the keys, at most
TILES = 2  # of keys, at least, in a part

# Sums are moved from one peak to the next by differences of rounded products. Fused into a multiply-add a product is
# not rounded, and of two equal peaks of 10⁴ the difference would not be 0.
EXACT = {"enable_fp_fusion": False}


def run(problem: Problem) -> Ran:
    """Output and log-sum-exp, and what is wanted."""
    call, want = Call.of(problem), problem.want
    with call.current():
        if want is not None and (want.queries is not None or want.weights):  # rows for which PyTorch is needed
            found = forward_and_look(call)
        else:
            inputs = (call.q, call.k, call.v, call.sinks)
            name = ("run", want, tuning.GLUON, problem.keeps_unrounded)
            found = call.taped(name, inputs, partial(forward_and_look, call))
    output, lse, peak, total, largest, entropy, unrounded, more = found
    observed = made(Observed, output=output, lse=lse, max_score=largest, entropy=entropy, kernel="triton", **more)
    return Ran(observed, peak, total, unrounded)


def forward_and_look(call: Call) -> Found:
    """What `forward` gives, and a table of what else is wanted."""
    output, lse, peak, total, largest, entropy, unrounded = forward(call)
    if call.form.width != call.problem.width:
        output = output[..., : call.problem.width].contiguous()
        unrounded = None if unrounded is None else unrounded[..., : call.problem.width].contiguous()
    found = {} if call.problem.want is None else look_again(call, call.problem.want, peak, total)
    return output, lse, peak, total, largest, entropy, unrounded, found


def forward(call: Call) -> Found:
    """(output, lse, peak, total, largest score, entropy, unrounded output), the last three where they are wanted."""
    grid = call.grid
    observing = call.problem.want is not None
    few = grid.queries * call.form.group <= FEW
    given = None if few or not call.rows else hopper.terms(call)
    if given is not None:
        found, odd = hopper.forward(call, given, observing)
        if odd is not None:
            repaired(call, found, odd)
        return found
    found = call.results(observing)
    if not call.rows or not grid.queries:
        return found
    if few:
        decode(call, found)
        return found
    unrounded = found[-1] is not None

    def launch(blocks: Blocks) -> None:
        call.launch(
            ("forward", blocks, observing, unrounded),
            forward_kernel, (cdiv(grid.queries, blocks.rows) * call.rows,),
            call.q, call.k, call.v, *found, call.sinks,
            call.q.stride(), call.k.stride(), call.v.stride(), *call.described(blocks), call.mask.span,
            call.lists(blocks), call.mask.arrays, call.scoring, grid.queries, grid.keys,
            SINKS=call.sinks is not None, ENTROPY=observing, UNROUNDED=unrounded, REVERSED=call.backwards,
            BM=blocks.rows, BN=blocks.columns, form=call.form,
            num_warps=blocks.warps, num_stages=blocks.stages, **EXACT,
        )  # fmt: skip

    call.fitted("forward" if call.form.program is None else "listed", grid.queries, launch)
    return found


def repaired(call: Call, found: Found, odd: torch.Tensor) -> None:
    """The output of another kernel, computed anew in blocks of which it marked a row as not finite."""
    grid, output, unrounded = call.grid, found[0], found[-1]

    def launch(blocks: Blocks) -> None:
        count = cdiv(grid.queries, blocks.rows) * call.rows
        programs = min(count, processors(call.device))
        call.launch(
            ("repair", blocks, unrounded is not None), repair, (programs,),
            call.q, call.k, call.v, output, odd, unrounded, call.q.stride(), call.k.stride(), call.v.stride(),
            *call.described(blocks), call.mask.span, call.lists(blocks), call.mask.arrays, call.scoring,
            grid.queries, grid.keys, cdiv(count, programs), count, UNROUNDED=unrounded is not None,
            BM=blocks.rows, BN=blocks.columns, N=1024, form=call.form,
            num_warps=blocks.warps, num_stages=blocks.stages, **EXACT,
        )  # fmt: skip

    call.fitted("forward", grid.queries, launch)


def decode(call: Call, found: Found) -> None:
    """The same for few queries: keys split over programs, and merged."""
    grid, form = call.grid, call.form
    *_, entropy, unrounded = found
    observing = entropy is not None

    def launch(blocks: Blocks) -> None:
        keys = grid.keys
        if form.program is None and not form.span_by_row:
            span = call.mask.span
            keys = min(span.limit, grid.queries + span.high) - max(span.low, 0) + blocks.columns
        numbers = call.batch * call.problem.key_heads
        splits, per_split = split(max(keys, 1), blocks.columns, numbers, processors(call.device))
        parts = call.empty(grid.queries, splits, form.padded_width + 3)
        call.launch(
            ("split", blocks, splits, observing), split_keys, (numbers * splits,),
            call.q, call.k, call.v, parts, call.q.stride(), call.k.stride(), call.v.stride(),
            call.mask.span, call.mask.arrays, call.scoring, grid.queries, grid.keys, per_split, splits,
            ENTROPY=observing, BM=blocks.rows, BN=blocks.columns, form=form,
            num_warps=blocks.warps, num_stages=blocks.stages, **EXACT,
        )  # fmt: skip
        call.launch(
            ("merge", splits, observing, unrounded is not None), merge_parts, (call.rows * grid.queries,),
            parts, *found, call.sinks, call.scoring, grid.queries, splits,
            SINKS=call.sinks is not None, ENTROPY=observing, UNROUNDED=unrounded is not None,
            SPLITS=power_of_2(splits), form=form, **EXACT,
        )  # fmt: skip

    call.fitted("decode", grid.queries * form.group, launch)


def split(keys: int, tile: int, numbers: int, processors: int) -> tuple[int, int]:
    """How many parts the keys are split into, and how many keys each has: enough to keep every processor busy."""
    tiles = cdiv(keys, tile)
    wanted = max(1, min(PARTS, cdiv(4 * processors, numbers), cdiv(tiles, TILES)))
    each = cdiv(tiles, wanted)
    return cdiv(tiles, each), each * tile


def gradients(
    problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
) -> Gradients:
    """dq, dk and dv shaped as q, k and v, sums over broadcast batch axes included; and dsinks.

    The same call gives the same bits where PyTorch is told so (`torch.use_deterministic_algorithms(True)`), and where
    Hopper's own kernel does not take the problem.
    """
    call = Call.of(problem)
    given = (dout, output, peak, total, dlse)
    name = ("gradients", alike(*given), tuning.GLUON, torch.are_deterministic_algorithms_enabled())
    with call.current():
        dq, dk, dv, dsinks = call.taped(
            name, (call.q, call.k, call.v, call.sinks, *given), partial(all_gradients, call, *given)
        )
    return Gradients(dq, dk, dv, None, dsinks)


def all_gradients(call: Call, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None) -> Found:
    """dq, dk, dv and dsinks or None."""
    problem = call.problem
    dout = call.aligned(call.one_batch_axis(dout))
    output, peak, total = output.contiguous(), peak.contiguous(), total.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    fused = None if any(shared(call)) else hopper.gradients(call, dout, output, peak, total, dlse)
    dq, dk, dv, dsinks = (*fused, None) if fused else two_passes(call, dout, output, peak, total, dlse)
    shaped = [
        summed_like(gradient[..., : like.shape[-1]].reshape(*call.grid.batch, *like.shape[-3:]), like).to(like.dtype)
        for gradient, like in zip((dq, dk, dv), (problem.q, problem.k, problem.v), strict=True)
    ]
    return *shaped, dsinks


def shared(call: Call) -> tuple[bool, bool, bool]:
    """Of q, k and v, which are one array for several batch rows: of those, gradients are added up and then rounded."""
    batch, problem = tuple(call.grid.batch), call.problem
    q, k, v = (tuple(a.shape[:-3]) != batch for a in (problem.q, problem.k, problem.v))
    return q, k, v


def two_passes(
    call: Call, dout: torch.Tensor, output: torch.Tensor, peak: Array, total: Array, dlse: Array | None
) -> Found:
    """dq, dk, dv and dsinks, each number summed by one program in a fixed order."""
    problem, grid, form = call.problem, call.grid, call.form
    shift, inverse, taken = (call.empty(grid.queries) for _ in range(3))
    likeness = alike(dout, output, peak, total, dlse)
    dq, dk, dv = (
        call.launch.room(a.shape, torch.float32 if several else a.dtype, a.device)
        for a, several in zip((call.q, call.k, call.v), shared(call), strict=True)
    )
    if call.rows and grid.queries:
        call.launch(
            ("spread", likeness), spread, (cdiv(grid.queries, 64) * call.rows,),
            dout, output, peak, total, dlse, shift, inverse, taken, dout.stride(), grid.queries, output.shape[-1],
            LSE=dlse is not None, BM=64, form=form,
        )  # fmt: skip
    rows = (shift, inverse, taken)
    strides = (call.q.stride(), call.k.stride(), call.v.stride(), dout.stride())

    def by_keys(blocks: Blocks) -> None:
        call.launch(
            ("keys", blocks, likeness), gradients_of_keys,
            (cdiv(grid.keys, blocks.columns) * call.batch * problem.key_heads,),
            call.q, call.k, call.v, dout, *rows, dk, dv, *strides, call.mask.span, call.lists(blocks, turned=True),
            call.mask.arrays, call.scoring, grid.queries, grid.keys,
            BM=blocks.rows, BN=blocks.columns, form=form, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

    def by_queries(blocks: Blocks) -> None:
        call.launch(
            ("queries", blocks, likeness), gradients_of_queries, (cdiv(grid.queries, blocks.rows) * call.rows,),
            call.q, call.k, call.v, dout, *rows, dq, *strides, call.mask.span, call.lists(blocks),
            call.mask.arrays, call.scoring, grid.queries, grid.keys, REVERSED=call.backwards,
            BM=blocks.rows, BN=blocks.columns, form=form, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

    if call.batch and problem.key_heads and grid.keys:
        call.fitted("keys", grid.queries, by_keys)
    if call.rows and grid.queries:
        call.fitted("queries", grid.queries, by_queries)
    dsinks = None
    if call.sinks is not None:
        sinks = call.sinks.repeat(call.batch)[:, None]
        by_row = torch.exp2(sinks * math.log2(math.e) - shift)
        by_row = torch.where(sinks == math.inf, 1.0, by_row) * inverse
        dsinks = -(by_row * taken).sum(-1).view(call.batch, grid.heads).sum(0)
    return dq, dk, dv, dsinks
