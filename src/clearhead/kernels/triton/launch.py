"""Running the GPU kernels: forward, then what is wanted; and gradients."""

from __future__ import annotations

from typing import Any

import torch

from clearhead.arrays import Array
from clearhead.formula import Gradients
from clearhead.kernels.contract import Ran
from clearhead.kernels.triton.call import Call
from clearhead.kernels.triton.forward import forward as forward_kernel
from clearhead.kernels.triton.tuning import forward_blocks
from clearhead.observe import Observed
from clearhead.problem import Problem

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def run(problem: Problem) -> Ran:
    """Output and log-sum-exp, and what is wanted."""
    call = Call(problem)
    output, lse, peak, total, largest, entropy = forward(call)
    found: dict[str, Any] = {"max_score": largest, "entropy": entropy}
    observed = Observed(
        output=call.shaped(output),
        lse=call.shaped(lse),
        kernel="triton",
        **{name: None if value is None else call.shaped(value) for name, value in found.items()},
    )
    return Ran(observed, call.shaped(peak), call.shaped(total))


def forward(call: Call) -> Rows:
    """(output, lse, peak, total, largest score, entropy); the last two where something is to be observed."""
    grid, form = call.grid, call.form
    observing = call.problem.want is not None
    output = call.empty(grid.queries, form.width, dtype=call.q.dtype)
    lse, peak, total = (call.empty(grid.queries) for _ in range(3))
    largest, entropy = (call.empty(grid.queries) if observing else None for _ in range(2))
    blocks = forward_blocks(*call.key, grid.queries)
    count = -(-grid.queries // blocks.rows) * call.rows
    if count:
        forward_kernel[(count,)](
            call.q, call.k, call.v, output, lse, peak, total, largest, entropy, call.sinks,
            call.q.stride(), call.k.stride(), call.v.stride(), call.mask.span, call.lists(blocks), call.mask.arrays,
            call.scoring, grid.queries, grid.keys,
            SINKS=call.sinks is not None, ENTROPY=observing, REVERSED=call.backwards,
            BM=blocks.rows, BN=blocks.columns, form=form, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return output, lse, peak, total, largest, entropy


def gradients(problem: Problem, dout: Array, output: Array, peak: Array, total: Array) -> Gradients:
    """dq, dk and dv."""
    raise NotImplementedError
