"""gather(): the whole of a tensor that is split over ranks, on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead.core.arrays import dtype_name, is_torch
from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.distributed.agreement import agree
from clearhead.distributed.links import Links, group_of
from clearhead.distributed.pieces import BY_KEY
from clearhead.distributed.placement import Placement, unshard


def gather(
    tensor: Tensor, placement: Placement, mesh: Any = None, *, axis: int = -2, timeout: float | None = None
) -> Tensor:
    """The whole tensor, positions in order, from the part that each rank holds; it carries no gradient.

    Every rank calls it. The other axes are the same on every rank.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # here a world of one process
    >>> gather(torch.zeros(2, 7, 4), Placement.contiguous(7, 1)).shape
    torch.Size([2, 7, 4])
    >>> dist.destroy_process_group()
    """
    links = Links(group_of(mesh), timeout)
    wrong: Exception | None = None
    same: dict[str, Any] = dict.fromkeys(("placement", "dtype", "shapes"))
    try:
        own = _own(tensor, placement, links, axis)
        same = {"placement": (placement.n, placement.how, placement.runs), "dtype": dtype_name(own)}
        same["shapes"] = (tuple(own.shape[1:]), axis % tensor.ndim)
    except ArgumentError as error:
        wrong = error
    agree(links, "gather", same, {}, wrong)
    each = own.shape[1:].numel()
    others = [rank for rank in range(links.world) if rank != links.rank and not placement.everywhere]
    sends = {rank: own.reshape(-1) for rank in others if own.numel()}
    expects = {rank: (placement.lengths[rank] * each, own.dtype) for rank in others if placement.lengths[rank] * each}
    came = links.start(sends, expects, 0, own).landed()
    parts = [
        came[rank].reshape(placement.lengths[rank], *own.shape[1:])
        if rank in came
        else own.new_empty(placement.lengths[rank], *own.shape[1:])
        for rank in range(links.world)
    ]
    parts[links.rank] = own
    if placement.everywhere:
        return tensor.detach()
    return torch.movedim(unshard(parts, placement, axis=0), 0, axis)


def of_all_keys(seen: Observed, keys: Placement, mesh: Any, *, timeout: float | None = None) -> Observed:
    """What was observed, with what all keys got in place of what those of this rank did."""
    own = {name: getattr(seen, name) for name in BY_KEY if getattr(seen, name) is not None}
    if not own:
        return seen
    whole = gather(torch.stack(list(own.values())), keys, mesh, axis=-1, timeout=timeout)
    return replace(seen, **dict(zip(own, whole, strict=True)))


def _own(tensor: Any, placement: Any, links: Links, axis: int) -> Tensor:
    """The part of this rank, positions first."""
    if not is_torch(tensor):
        raise ArgumentError("tensor", f"is a {type(tensor).__name__}, expected a tensor of PyTorch")
    if not isinstance(placement, Placement):
        raise ArgumentError("placement", f"is a {type(placement).__name__}, expected a Placement, as `place` gives")
    if placement.world != links.world:
        raise ArgumentError("placement", f"is for {placement.world} ranks, and the mesh has {links.world}")
    if not -tensor.ndim <= axis < tensor.ndim:
        raise ArgumentError("axis", f"is {axis}, expected an axis of shape {tuple(tensor.shape)}")
    own: Tensor = tensor.detach().movedim(axis, 0).contiguous()
    if own.shape[0] != placement.lengths[links.rank]:
        raise ArgumentError("tensor", f"has {own.shape[0]} positions, expected {placement.lengths[links.rank]}")
    return own
