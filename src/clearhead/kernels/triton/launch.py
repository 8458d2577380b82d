"""Running the portable GPU kernels: forward, then what is wanted; and gradients."""

from __future__ import annotations

import math

import torch

from clearhead.core.arrays import Array
from clearhead.core.formula import Gradients
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Ran
from clearhead.kernels.gpu import run as shared_run
from clearhead.kernels.gpu import tuning
from clearhead.kernels.gpu.call import EXACT, Call, Forward, processors
from clearhead.kernels.gpu.launcher import alike
from clearhead.kernels.gpu.run import Looked, narrowed
from clearhead.kernels.gpu.second_look import look_again
from clearhead.kernels.gpu.tuning import Blocks, cdiv, power_of_2
from clearhead.kernels.triton.backward_kernel import deltas, gradients_of_keys, gradients_of_queries
from clearhead.kernels.triton.decode_kernel import merge_parts, split_keys
from clearhead.kernels.triton.forward_kernel import forward as forward_kernel

PARTS = 128  # parts of the keys, at most
TILES = 2  # of keys, at least, in a part


def run(problem: Problem) -> Ran:
    """Output and log-sum-exp, and what is wanted."""
    return shared_run.run("triton", problem, forward_and_look)


def gradients(
    problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
) -> Gradients:
    """dq, dk and dv, each number summed by one program in a fixed order: the same call gives the same bits."""
    return shared_run.gradients("triton", problem, two_passes, dout, output, peak, total, dlse)


def forward_and_look(call: Call) -> Looked:
    """What `forward` gives, and what else is wanted."""
    found = narrowed(call, forward(call))
    outputs = (found.output if found.unrounded is None else found.unrounded, found.output)
    return Looked(found, look_again(call, call.problem.want, found.peak, found.total, outputs=outputs))


def forward(call: Call) -> Forward:
    """Attention of all queries, each kind of problem by the kernel that suits it."""
    grid = call.grid
    found = call.results(call.problem.want is not None)
    if not call.rows or not grid.queries:
        return found
    if grid.queries * call.form.group <= tuning.FEW:
        decode(call, found)
    else:
        by_blocks(call, found)
    return found


def by_blocks(call: Call, found: Forward) -> None:
    """A block of queries for each program, and all keys that they see."""
    grid, observing, unrounded = call.grid, found.entropy is not None, found.unrounded is not None

    def launch(blocks: Blocks) -> None:
        call.launch(
            ("forward", blocks, observing, unrounded),
            forward_kernel, (cdiv(grid.queries, blocks.rows) * call.rows,),
            call.q, call.k, call.v, *found.arrays, call.sinks,
            call.q.stride(), call.k.stride(), call.v.stride(), *call.described(blocks), call.mask.span,
            call.lists(blocks), call.mask.arrays, call.scoring, grid.queries, grid.keys,
            SINKS=call.sinks is not None, ENTROPY=observing, UNROUNDED=unrounded, REVERSED=call.backwards,
            BM=blocks.rows, BN=blocks.columns, form=call.form,
            num_warps=blocks.warps, num_stages=blocks.stages, **EXACT,
        )  # fmt: skip

    call.fitted("forward" if call.form.program is None else "listed", grid.queries, launch)


def decode(call: Call, found: Forward) -> None:
    """The same for few queries: keys split over programs, and merged."""
    grid, form = call.grid, call.form
    observing, unrounded = found.entropy is not None, found.unrounded is not None

    def launch(blocks: Blocks) -> None:
        keys = grid.keys
        if form.program is None and not form.span_by_row:
            span = call.mask.span
            keys = min(span.limit, grid.queries + span.high) - max(span.low, 0) + blocks.columns
        numbers = call.batch * call.problem.key_heads
        splits, per_split = split(max(keys, 1), blocks.columns, numbers, processors(call.device))
        parts = call.empty(grid.queries, splits, form.padded_value_dim + 3)
        call.launch(
            ("split", blocks, splits, observing), split_keys, (numbers * splits,),
            call.q, call.k, call.v, parts, call.q.stride(), call.k.stride(), call.v.stride(),
            call.mask.span, call.mask.arrays, call.scoring, grid.queries, grid.keys, per_split, splits,
            ENTROPY=observing, ALIKE=grid.queries == 1 and form.program is None,
            BM=blocks.rows, BN=blocks.columns, form=form,
            num_warps=blocks.warps, num_stages=blocks.stages, **EXACT,
        )  # fmt: skip
        call.launch(
            ("merge", splits, observing, unrounded), merge_parts, (call.rows * grid.queries,),
            parts, *found.arrays, call.sinks, call.scoring, grid.queries, splits,
            SINKS=call.sinks is not None, ENTROPY=observing, UNROUNDED=unrounded,
            SPLITS=power_of_2(splits), form=form, **EXACT,
        )  # fmt: skip

    call.fitted("decode", grid.queries * form.group, launch)


def split(keys: int, tile: int, numbers: int, processors: int) -> tuple[int, int]:
    """How many parts the keys are split into, and how many keys each has: enough to keep every processor busy."""
    tiles = cdiv(keys, tile)
    wanted = max(1, min(PARTS, cdiv(4 * processors, numbers), cdiv(tiles, TILES)))
    each = cdiv(tiles, wanted)
    return cdiv(tiles, each), each * tile


def shared(call: Call) -> tuple[bool, bool, bool]:
    """Of q, k and v, which are one array for several batch rows: of those, gradients are added up and then rounded."""
    batch, problem = tuple(call.grid.batch), call.problem
    q, k, v = (tuple(a.shape[:-3]) != batch for a in (problem.q, problem.k, problem.v))
    return q, k, v


def two_passes(
    call: Call, dout: torch.Tensor, output: torch.Tensor, peak: Array, total: Array, dlse: Array | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv and dsinks, each number summed by one program in a fixed order."""
    problem, grid, form = call.problem, call.grid, call.form
    shift, inverse, delta = (call.empty(grid.queries) for _ in range(3))
    likeness = alike(dout, output, peak, total, dlse)
    dq, dk, dv = (
        call.launch.room(a.shape, torch.float32 if several else a.dtype, a.device)
        for a, several in zip((call.q, call.k, call.v), shared(call), strict=True)
    )
    if call.rows and grid.queries:
        call.launch(
            ("deltas", likeness), deltas, (cdiv(grid.queries, 64) * call.rows,),
            dout, output, peak, total, dlse, shift, inverse, delta, dout.stride(), grid.queries, output.shape[-1],
            LSE=dlse is not None, BM=64, form=form,
        )  # fmt: skip
    rows = (shift, inverse, delta)
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
        dsinks = -(by_row * delta).sum(-1).view(call.batch, grid.heads).sum(0)
    return dq, dk, dv, dsinks
