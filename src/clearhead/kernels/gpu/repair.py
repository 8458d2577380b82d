"""After a kernel that spoils more than it may: blocks in which it marked a row as not finite are computed anew."""

from __future__ import annotations

import torch

from clearhead.kernels.gpu.call import EXACT, Call, Forward, processors
from clearhead.kernels.gpu.device import Lists
from clearhead.kernels.gpu.repair_kernel import repair
from clearhead.kernels.gpu.tuning import Blocks, cdiv


def repaired(call: Call, forward: Forward, odd: torch.Tensor) -> Forward:
    """The output of a kernel, computed anew in blocks of which it marked a row as not finite; and if there were any."""
    grid, output, unrounded = call.grid, forward.output, forward.unrounded
    told = room_to_tell(call)

    def launch(blocks: Blocks) -> None:
        count = cdiv(grid.queries, blocks.rows) * call.rows
        programs = len(told)
        call.launch(
            ("repair", blocks, unrounded is not None), repair, (programs,),
            call.q, call.k, call.v, output, odd, unrounded, forward.total, told,
            call.q.stride(), call.k.stride(), call.v.stride(), steps_of(output), call.mask.span,
            call.lists(blocks, coarse=True), call.mask.arrays, call.scoring,
            grid.queries, grid.keys, cdiv(count, programs), count, grid.heads, UNROUNDED=unrounded is not None,
            BM=blocks.rows, BN=blocks.columns, N=1024, form=call.form,
            num_warps=blocks.warps, num_stages=blocks.stages, **begun_early(call.device), **EXACT,
        )  # fmt: skip

    call.fitted("repair", grid.queries, launch)
    return forward._replace(told=told)


def lists_to_repair_by(call: Call) -> Lists:
    """The tiles that `repaired` goes by. Who asks before anything is launched need not wait for that to be copied."""
    return call.lists(call.fitting("repair", call.grid.queries), coarse=True)


def begun_early(device: torch.device) -> dict[str, bool]:
    """How a kernel is launched that may begin before the one before it ends, which lets it; AFTER: it waits for that.

    An interpreter runs one after the other.
    """
    return {"AFTER": True, "launch_pdl": True} if device.type == "cuda" else {"AFTER": False}


def room_to_tell(call: Call) -> torch.Tensor:
    """A number for each program that looks for rows which are not finite."""
    return call.launch.room((processors(call.device),), torch.int32, call.device)


def steps_of(output: torch.Tensor) -> tuple[int, int, int]:
    """From one batch row, all of them counted, head and query of an output without gaps to the next."""
    return output.stride(-4) if output.ndim > 3 else 0, output.stride(-3), output.stride(-2)
