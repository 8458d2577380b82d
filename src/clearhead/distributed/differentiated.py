"""A call over ranks as PyTorch's autograd sees it: one function, its backward over the same ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.core.arrays import is_torch
from clearhead.distributed.jobs import Job
from clearhead.distributed.learning import LearnedBias
from clearhead.kernels.tally import Ended
from clearhead.torch_bridge.refused import NO_SECOND


def run(job: Job, q: Tensor, k: Tensor, v: Tensor, learned: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the queries here, with gradients where any are wanted."""
    if not learned:
        with torch.no_grad():
            job.ended = job.forward(q.detach(), k.detach(), v.detach())
        return job.ended.output.to(q.dtype), job.ended.lse
    bias = None if job.whole.bias is None else job.whole.bias.parameter
    parameters = (job.whole.sinks if is_torch(job.whole.sinks) else None, bias if is_torch(bias) else None)
    output, lse = spread(job, q, k, v, *parameters)
    return output, lse


class Spread(torch.autograd.Function):
    """Attention over ranks, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, job: Job, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ended = job.ended = job.forward(q.detach(), k.detach(), v.detach())
        ctx.job = job
        ctx.save_for_backward(q, k, v, sinks, bias, ended.output, ended.lse, ended.peak, ended.total)
        ctx.set_materialize_grads(False)
        return ended.output.to(q.dtype, copy=True), ended.lse.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        job: Job = ctx.job
        q, _, _, sinks, bias, output, lse, peak, total = ctx.saved_tensors  # also checks that none was written to
        ended = Ended(output, lse, peak, total, None, None)
        dout = output.new_zeros(output.shape, dtype=q.dtype) if dout is None else dout.contiguous()
        learner = None
        if bias is not None and ctx.needs_input_grad[5]:
            assert job.whole.bias is not None
            learner = job.work.learns = LearnedBias(job.whole.bias, job.work.dtype)
        dq, dk, dv, dsinks = job.backward(dout, ended, dlse)
        return (
            None, dq, dk, dv,
            None if sinks is None or dsinks is None else dsinks.to(sinks.dtype),
            None if learner is None or bias is None else learner.gradient.to(bias.dtype),
        )  # fmt: skip


spread: Any = Spread.apply
