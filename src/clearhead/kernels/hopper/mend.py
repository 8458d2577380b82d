"""Launching what is seldom left to do after both looks (`mend_kernel.py`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from clearhead.kernels.gpu.call import EXACT, Call, Forward
from clearhead.kernels.gpu.repair import begun_early, steps_of
from clearhead.kernels.gpu.tuning import Blocks, cdiv
from clearhead.kernels.hopper.mend_kernel import mend


class Searched(NamedTuple):
    """What a search for the largest weights goes by: counters, denominators, results, numbers and constants."""

    counts: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    weights: torch.Tensor
    indices: torch.Tensor
    numbers: tuple[Any, ...]  # group, upper, lower, scale, softcap, factor
    constants: dict[str, Any]


def mended(call: Call, forward: Forward, odd: torch.Tensor, told: torch.Tensor, searched: Searched) -> None:
    """Blocks in which a row is marked as not finite computed anew; and the largest weights of queries with too many.

    `told` hears of such rows.
    """
    grid, output, unrounded = call.grid, forward.output, forward.unrounded
    counts, peak, total, weights, indices, numbers, constants = searched

    def launch(blocks: Blocks) -> None:
        count = cdiv(grid.queries, blocks.rows) * call.rows
        programs = len(told)
        call.launch(
            ("mend", blocks, unrounded is not None, constants["TOP"]), mend, (programs,),
            call.q, call.k, call.v, output, odd, unrounded, told, counts, peak, total, weights, indices,
            call.q.stride(), call.k.stride(), call.v.stride(), steps_of(output), call.mask.span,
            call.lists(blocks, coarse=True), call.mask.arrays, call.scoring,
            grid.queries, grid.keys, cdiv(count, programs), count, grid.heads, *numbers,
            UNROUNDED=unrounded is not None, **constants, BM=blocks.rows, BN=blocks.columns, N=1024, form=call.form,
            num_warps=blocks.warps, num_stages=blocks.stages, **begun_early(call.device), **EXACT,
        )  # fmt: skip

    call.fitted("repair", grid.queries, launch)
