"""After a kernel that gives sums alone: log-sum-exp and entropy of each row, and rows that are not finite anew."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from clearhead.kernels.gpu.call import EXACT, Call, Forward, processors
from clearhead.kernels.gpu.repair_kernel import finish_rows, repair
from clearhead.kernels.gpu.tuning import Blocks, cdiv


def finished(
    call: Call, peak: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor | None
) -> tuple[Any, Any, Any]:
    """Log-sum-exp; and largest score and entropy, where Σ x e^x of x = score − peak is given."""
    new = partial(call.launch.room, peak.shape, torch.float32, call.device)
    lse, entropy = new(), weighted is not None
    largest, entropies = (new() if entropy else None for _ in range(2))
    call.launch(
        ("finish", entropy), finish_rows, (cdiv(lse.numel(), 1024),),
        peak, total, weighted, lse, largest, entropies, lse.numel(), ENTROPY=entropy, N=1024,
    )  # fmt: skip
    return lse, largest, entropies


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
