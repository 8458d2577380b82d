"""After a kernel that spoils more than it may: blocks in which it marked a row as not finite are computed anew."""

from __future__ import annotations

import torch

from clearhead.kernels.gpu.call import EXACT, Call, Forward, processors
from clearhead.kernels.gpu.repair_kernel import repair
from clearhead.kernels.gpu.tuning import Blocks, cdiv


def repaired(call: Call, forward: Forward, odd: torch.Tensor) -> None:
    """The output of a kernel, computed anew in blocks of which it marked a row as not finite."""
    grid, output, unrounded = call.grid, forward.output, forward.unrounded

    def launch(blocks: Blocks) -> None:
        count = cdiv(grid.queries, blocks.rows) * call.rows
        programs = min(count, processors(call.device))
        call.launch(
            ("repair", blocks, unrounded is not None), repair, (programs,),
            call.q, call.k, call.v, output, odd, unrounded, call.q.stride(), call.k.stride(), call.v.stride(),
            call.mask.span, call.lists(blocks), call.mask.arrays, call.scoring,
            grid.queries, grid.keys, cdiv(count, programs), count, UNROUNDED=unrounded is not None,
            BM=blocks.rows, BN=blocks.columns, N=1024, form=call.form,
            num_warps=blocks.warps, num_stages=blocks.stages, **EXACT,
        )  # fmt: skip

    call.fitted("repair", grid.queries, launch)
