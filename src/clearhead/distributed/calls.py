"""attention() and observe() over many ranks: check, agree, plan, run; gradients through PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from clearhead.core.array_masks import given_mask, of_pytorch
from clearhead.core.arrays import dtype_name, is_torch
from clearhead.core.errors import ArgumentError, KernelRefused
from clearhead.core.grid import Grid
from clearhead.core.observations import Observed, Want
from clearhead.core.partial import keys_share
from clearhead.core.positions import as_bias
from clearhead.core.problem import Problem, pose
from clearhead.core.temperature import tempered
from clearhead.distributed.agreement import agree
from clearhead.distributed.differentiated import run
from clearhead.distributed.jobs import Job
from clearhead.distributed.links import Links, group_of
from clearhead.distributed.pieces import Whole
from clearhead.distributed.placement import Placement
from clearhead.distributed.planning import WAYS, DistributedPlan, Shape, planned
from clearhead.distributed.schedule import scheduled
from clearhead.distributed.tensors import local, wrapped
from clearhead.distributed.wanting import wanted_of_parts
from clearhead.kernels.choose import named
from clearhead.kernels.extension import NOT_BUILT
from clearhead.torch_bridge import autograd

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """What PyTorch's compiler leaves as it is: messages between ranks are no part of a graph."""
    return cast(Function, cast(Any, torch.compiler.disable)(function))


# queries that `compiled` takes for decoding (`native/decode.h`)
FEW = 4
OPTIONS = ("bias", "scale", "softcap", "sinks", "dropout", "kernel")


@uncompiled
def attention_over_ranks(given: dict[str, Any]) -> Tensor:
    """The output for the queries of this rank; `given` are the arguments of `attention`."""
    call = Call(given)
    output, _, _ = call.run()
    return call.restored(output)


@uncompiled
def observe_over_ranks(given: dict[str, Any], asked: dict[str, Any]) -> Observed[Tensor]:
    """The output and what was attended to; `asked` is what is observed."""
    call = Call(given, asked)
    output, lse, job = call.run()
    observed = job.observed(output, lse, job.ended)
    if call.problem.sinks is not None:
        share = keys_share(call.problem.library, call.problem.sinks, observed.lse)
        observed = Observed(**{**vars(observed), "share": share})
    return observed.each(call.problem.restore) if call.problem.headless else observed


class Call:
    """One call on one rank: its arguments, checked here and compared with those of the others."""

    def __init__(self, given: dict[str, Any], asked: dict[str, Any] | None = None) -> None:
        self.asked = asked
        self.wraps = local(given)
        self.links = Links(
            group_of(given["mesh"] if self.wraps is None else self.wraps.mesh(given["mesh"])), given["timeout"]
        )
        wrong: Exception | None = None
        try:
            self.pose(given)
        except (ArgumentError, KernelRefused) as error:
            wrong = error
        self.settle(given, wrong)

    def pose(self, given: dict[str, Any]) -> None:
        """Arguments as far as they can be judged here alone."""
        q, k, v = given["q"], given["k"], given["v"]
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if not is_torch(tensor):
                raise ArgumentError(name, f"is a {type(tensor).__name__}, expected a tensor of PyTorch")
        q, k, v = autograd.autocast(q, k, v)
        scale = given["scale"]
        if given["temperature"] is not None:
            scale = tempered(given["temperature"], scale, q)
        options = {name: given[name] for name in ("softcap", "sinks", "dropout")}
        self.problem: Problem = pose(q, k, v, scale=scale, **options)
        self.q, self.k, self.v = self.problem.q, self.problem.k, self.problem.v
        mask = of_pytorch("mask", given["mask"], q, k)
        self.mask = None if mask is None else given_mask("mask", mask)
        self.bias = None if given["bias"] is None else as_bias(given["bias"])
        if given["way"] is not None and given["way"] not in WAYS:
            raise ArgumentError("way", f"is {given['way']!r}, expected one of {', '.join(map(repr, WAYS))} or None")
        if given["kernel"] is not None:
            named(given["kernel"])
        for name in ("placement", "key_placement"):
            self.fits(name, given[name], self.q if name == "placement" else self.k)

    def fits(self, name: str, placement: Any, tensor: Tensor) -> None:
        """Refuse a placement that speaks of other ranks or lengths."""
        if placement is None:
            return
        if not isinstance(placement, Placement):
            raise ArgumentError(name, f"is a {type(placement).__name__}, expected a Placement, as `place` gives")
        links = self.links
        if placement.world != links.world:
            raise ArgumentError(name, f"is for {placement.world} ranks, and the mesh has {links.world}")
        if tensor.shape[-2] != placement.lengths[links.rank]:
            raise ArgumentError(
                name,
                f"gives rank {links.rank} {placement.lengths[links.rank]} positions, and it has {tensor.shape[-2]}",
            )

    def settle(self, given: dict[str, Any], wrong: Exception | None) -> None:
        """What all ranks agree on: sizes of the whole call, who holds what, and the way."""
        same: dict[str, Any] = dict.fromkeys(
            ("mask", "dtype", "shapes", *OPTIONS, "placement", "way", "observations", "gradients", "back end")
        )
        own = {"queries": 0, "keys": 0}
        if wrong is None:
            problem = self.problem
            self.learned = torch.is_grad_enabled() and any(
                a is not None and is_torch(a) and a.requires_grad
                for a in (self.q, self.k, self.v, problem.sinks, None if self.bias is None else self.bias.parameter)
            )
            same.update(
                mask=self.mask, bias=self.bias, dtype=dtype_name(self.q),
                shapes=[(*t.shape[:-2], t.shape[-1]) for t in (self.q, self.k, self.v)],
                scale=problem.scale, softcap=problem.softcap, sinks=problem.sinks, dropout=problem.dropout,
                kernel=given["kernel"], way=given["way"], gradients=self.learned,
                observations=None if self.asked is None else [*self.asked.items()],
                placement=[
                    None if p is None else (p.n, p.how, p.runs) for p in (given["placement"], given["key_placement"])
                ],
            )  # fmt: skip
            same["back end"] = (NOT_BUILT == "", self.q.device.type)
            own = {"queries": self.q.shape[-2], "keys": self.k.shape[-2]}
        held = agree(self.links, "attention", same, own, wrong)
        placement, key_placement = given["placement"], given["key_placement"]
        if (
            key_placement is None
            and placement is not None
            and not placement.everywhere
            and list(placement.lengths) == held["keys"]
        ):
            key_placement = placement
        placement = Placement.of_lengths(held["queries"]) if placement is None else placement
        key_placement = Placement.of_lengths(held["keys"]) if key_placement is None else key_placement
        if key_placement.everywhere:
            raise ArgumentError(
                "key_placement", "has all keys on every rank, expected each on one: `clearhead.attention` is for that"
            )
        self.plan_for(placement, key_placement, given)

    def plan_for(self, placement: Placement, key_placement: Placement, given: dict[str, Any]) -> None:
        """Everything that follows from what is agreed, the same on every rank."""
        problem = self.problem
        grid = Grid(problem.grid.batch, problem.grid.heads, placement.n, key_placement.n)
        if self.mask is not None:
            self.mask.check(grid)
        if self.bias is not None:
            self.bias.check(grid)
        wanted: Want | None = None if self.asked is None else wanted_of_parts(problem, grid, self.asked)
        schedule = scheduled(self.mask, grid, placement, key_placement)
        self.plan: DistributedPlan = planned(
            schedule, shape_of(self.q, self.k, self.v, grid), way=given["way"], looks=bool(wanted and wanted.names)
        )
        whole = Whole(
            problem.library, grid, problem.scale, self.mask, self.bias, problem.softcap, problem.sinks,
            problem.dropout, wanted, given["kernel"],
            short=self.learned and any(len(run) <= FEW for runs in placement.runs for run in runs),
        )  # fmt: skip
        self.job = Job(self.links, schedule, whole, self.plan.way)

    def run(self) -> tuple[Tensor, Tensor, Job]:
        """Output and log-sum-exp of the queries here, in one layout."""
        output, lse = run(self.job, self.q, self.k, self.v, self.learned)
        last.update(sent=self.links.sent, received=self.links.received, plan=self.plan, links=self.links)
        return output, lse, self.job

    def restored(self, output: Tensor) -> Tensor:
        """The output as the caller's tensors were."""
        output = self.problem.restore(output)
        return output if self.wraps is None else wrapped(output, self.wraps)


# of the last call in this process: bytes that were sent and received, and its plan
last: dict[str, Any] = {}


def shape_of(q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Shape:
    """The sizes that bytes are counted by."""
    batch = 1
    for size in grid.batch:
        batch *= size
    sums = 8 if q.dtype == torch.float64 else 4
    return Shape(batch, q.shape[-3], k.shape[-3], q.shape[-1], v.shape[-1], q.dtype.itemsize, sums)
