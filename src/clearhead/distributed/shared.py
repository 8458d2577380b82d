"""Attention of whole tensors that every rank has: each computes some rows, and all get all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.core.array_masks import given_mask, of_pytorch
from clearhead.core.arrays import dtype_name, is_torch, summed_like
from clearhead.core.errors import ArgumentError
from clearhead.core.positions import as_bias
from clearhead.core.problem import Problem, pose
from clearhead.distributed.agreement import agree
from clearhead.distributed.calls import FEW, uncompiled
from clearhead.distributed.entry import attention
from clearhead.distributed.jobs import everyone
from clearhead.distributed.learning import LearnedBias
from clearhead.distributed.links import Links, group_of
from clearhead.distributed.pieces import Whole, Work
from clearhead.distributed.placement import Placement, shard, unshard
from clearhead.distributed.placing import place
from clearhead.torch_bridge.refused import NO_SECOND


@uncompiled
def shared_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: Any = None, timeout: float | None = None, **options: Any
) -> Tensor:
    """`clearhead.attention`, its work shared out: the same whole tensors and options are given on every rank."""
    links = Links(group_of(mesh), timeout)
    wrong: Exception | None = None
    try:
        plain = {name: options.get(name) for name in ("scale", "softcap", "sinks", "dropout")}
        problem = pose(q, k, v, **plain)
        mask = of_pytorch("mask", options.get("mask"), q, k)
        mask = None if mask is None else given_mask("mask", mask)
        bias = None if options.get("bias") is None else as_bias(options["bias"])
        for one in (mask, bias):
            if one is not None:
                one.check(problem.grid)
    except ArgumentError as error:
        wrong = error
    shapes = None if wrong else [(tuple(t.shape), dtype_name(t)) for t in (q, k, v)]
    same = {"shapes": shapes, "mask": None if wrong else mask, "bias": None if wrong else bias, "options": None}
    if wrong is None:
        same["options"] = [plain[name] for name in plain]
    agree(links, "attention of whole tensors", same, {}, wrong)
    parameter = None if bias is None else bias.parameter
    learned = torch.is_grad_enabled() and any(
        t is not None and is_torch(t) and t.requires_grad for t in (q, k, v, problem.sinks, parameter)
    )
    if problem.grid.queries < links.world and not learned:
        keys = Placement.contiguous(problem.grid.keys, links.world)
        return attention(
            q, shard(k, keys, links.rank), shard(v, keys, links.rank), mesh=mesh, timeout=timeout,
            placement=Placement.on_all(problem.grid.queries, links.world), key_placement=keys, **options,
        )  # fmt: skip
    grid = problem.grid
    placement = place(mask, grid.queries, links.world, keys=grid.keys, batch=grid.batch, heads=grid.heads)
    short = learned and any(len(run) <= FEW for runs in placement.runs for run in runs)
    whole = Whole(
        problem.library, grid, problem.scale, mask, bias, problem.softcap, problem.sinks, problem.dropout, None,
        options.get("kernel"), short=short,
    )  # fmt: skip
    rows = Rows(links, placement, whole, problem)
    if not learned:
        with torch.no_grad():
            return problem.restore(rows.forward(problem.q, problem.k, problem.v))
    sinks = problem.sinks if is_torch(problem.sinks) else None
    found = run(rows, problem.q, problem.k, problem.v, sinks, parameter if is_torch(parameter) else None)
    output: Tensor = problem.restore(found)
    return output


class Rows:
    """The rows that one rank computes."""

    def __init__(self, links: Links, placement: Placement, whole: Whole, problem: Problem) -> None:
        self.links, self.placement, self.whole = links, placement, whole
        self.rank = links.rank
        self.shape = (*problem.grid.batch, problem.grid.heads)

    def all_of(self, rows: Tensor, number: int) -> Tensor:
        """Rows of every rank, in the order of positions."""
        lengths = self.placement.lengths
        each = rows.shape[:-2].numel() * rows.shape[-1]
        others = [rank for rank in range(self.links.world) if rank != self.rank]
        sends = {rank: rows.reshape(-1) for rank in others}
        expects = {rank: (lengths[rank] * each, rows.dtype) for rank in others}
        came = self.links.start(sends, expects, number, rows).landed()
        parts = [
            came[r].reshape(*rows.shape[:-2], lengths[r], rows.shape[-1]) if r != self.rank else rows
            for r in range(self.links.world)
        ]
        return unshard(parts, self.placement)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The whole output."""
        self.work = Work(
            self.whole, self.placement.runs[self.rank], shard(q, self.placement, self.rank), k.shape[-3], v.shape[-1]
        )
        self.work.settle(None, k, v)
        self.work.attend(range(self.whole.grid.keys), k, v)
        self.ended = self.work.ended()
        return self.all_of(self.ended.output.to(q.dtype), 0)

    def backward(self, dout: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq, dk, dv and dsinks, whole, on every rank the same."""
        mine = shard(dout, self.placement, self.rank).contiguous()
        work = self.work
        dq = torch.zeros((*work.lead, *work.q.shape[-2:]), dtype=work.dtype, device=dout.device)
        dk, dv = work.gradients(range(self.whole.grid.keys), k, v, mine, self.ended, None, dq)
        dsinks = work.sink_gradient(mine, self.ended, None)
        return self.all_of(dq, 1), self.sum_of(dk), self.sum_of(dv), None if dsinks is None else self.sum_of(dsinks)

    def sum_of(self, part: Tensor) -> Tensor:
        """Parts of every rank, added in order."""
        parts = everyone(self.links, part)
        whole = parts[0]
        for other in parts[1:]:
            whole = whole + other
        return whole


class SharedRows(torch.autograd.Function):
    """Rows shared out, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Rows, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(q, k, v, sinks, bias)
        return rows.forward(q.detach(), k.detach(), v.detach())

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        rows: Rows = ctx.rows
        q, k, v, sinks, bias = ctx.saved_tensors
        learner = None
        if bias is not None and ctx.needs_input_grad[5] and rows.whole.bias is not None:
            learner = rows.work.learns = LearnedBias(rows.whole.bias, rows.work.dtype)
        dq, dk, dv, dsinks = rows.backward(dout, k.detach(), v.detach())
        found = (summed_like(g, like).to(like.dtype) for g, like in zip((dq, dk, dv), (q, k, v), strict=True))
        dbias = None if learner is None or bias is None else rows.sum_of(learner.gradient).to(bias.dtype)
        return None, *found, None if sinks is None or dsinks is None else dsinks.to(sinks.dtype), dbias


run: Any = SharedRows.apply
