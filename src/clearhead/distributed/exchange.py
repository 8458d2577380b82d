"""Heads travel (Ulysses): each rank gets all positions of some heads, computes them as one machine would, and sends
rows of the answer back to where they belong.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.core.arrays import summed_like
from clearhead.distributed.links import Links
from clearhead.distributed.pieces import Whole, Work
from clearhead.distributed.placement import Placement
from clearhead.distributed.schedule import Schedule
from clearhead.kernels.tally import Ended


class Exchange:
    """The tensors of one rank, and the heads that are computed here."""

    def __init__(self, links: Links, schedule: Schedule, whole: Whole, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.links, self.schedule = links, schedule
        self.q, self.k, self.v = q, k, v
        self.rank, self.world = links.rank, links.world
        self.whole = replace(whole, some_heads=self.heads_of(self.rank, q.shape[-3]))

    def heads_of(self, rank: int, heads: int) -> range:
        """The heads that a rank computes, of query heads or of key heads, which ranks may share."""
        if heads >= self.world:
            return range(rank * heads // self.world, (rank + 1) * heads // self.world)
        each = self.world // heads
        return range(rank // each, rank // each + 1)

    def to_heads(self, tensors: tuple[tuple[Tensor, Placement], ...], number: int) -> list[Tensor]:
        """Rows of all heads here → all rows of the heads that are computed here, in the order of positions."""
        sends, expects = {}, {}
        for peer in range(self.world):
            if peer == self.rank:
                continue
            cuts = [t[..., self.slice_of(peer, t.shape[-3]), :, :].reshape(-1) for t, _ in tensors]
            sends[peer] = torch.cat(cuts)
            expects[peer] = (sum(self.size(t, p.lengths[peer], self.rank) for t, p in tensors), tensors[0][0].dtype)
        came = self.links.start(only(sends), nonempty(expects), number, self.q).landed()
        found = []
        starts = dict.fromkeys(range(self.world), 0)
        for tensor, placement in tensors:
            own = tensor[..., self.slice_of(self.rank, tensor.shape[-3]), :, :]
            parts = []
            for peer in range(self.world):
                if peer == self.rank:
                    parts.append(own)
                    continue
                size = self.size(tensor, placement.lengths[peer], self.rank)
                shape = (*own.shape[:-2], placement.lengths[peer], own.shape[-1])
                parts.append(
                    came[peer][starts[peer] : starts[peer] + size].reshape(shape) if size else own.new_empty(shape)
                )
                starts[peer] += size
            found.append(ordered(torch.cat(parts, dim=-2), placement))
        return found

    def to_rows(self, tensor: Tensor, placement: Placement, heads: int, number: int) -> Tensor:
        """All rows of the heads here, (…, h, n, x) → the rows that lie here of all heads, shared ones added."""
        laid_out = torch.index_select(tensor, -2, torch.as_tensor(placement.order, device=tensor.device))
        cuts = torch.split(laid_out, list(placement.lengths), dim=-2)
        own, width = placement.lengths[self.rank], tensor.shape[-1]
        sends = {peer: cuts[peer].reshape(-1) for peer in range(self.world) if peer != self.rank}
        expects = {}
        for peer in sends:
            count = tensor.shape[:-3].numel() * len(self.heads_of(peer, heads)) * own * width
            expects[peer] = (count, tensor.dtype)
        came = self.links.start(only(sends), nonempty(expects), number, self.q).landed()
        whole = tensor.new_zeros((*tensor.shape[:-3], heads, own, width))
        for peer in range(self.world):
            share = self.slice_of(peer, heads)
            target = whole[..., share, :, :]
            if peer == self.rank:
                target += cuts[peer]
            elif peer in came:
                target += came[peer].reshape(target.shape)
        return whole

    def slice_of(self, rank: int, heads: int) -> slice:
        """The same heads, as an index."""
        some = self.heads_of(rank, heads)
        return slice(some.start, some.stop)

    def size(self, tensor: Tensor, rows: int, rank: int) -> int:
        """How many numbers so many rows of a rank's heads are."""
        return tensor.shape[:-3].numel() * len(self.heads_of(rank, tensor.shape[-3])) * rows * tensor.shape[-1]

    def forward(self) -> tuple[Work, Ended]:
        """All positions of the heads here: what is worked on, and what it ends with."""
        queries, keys = self.schedule.queries, self.schedule.keys
        q, k, v = self.to_heads(((self.q, queries), (self.k, keys), (self.v, keys)), 0)
        self.here = q, k, v
        runs = (range(queries.n),) if queries.n else ()
        work = Work(self.whole, runs, q, k.shape[-3], v.shape[-1])
        work.settle(None, k, v)
        work.attend(range(keys.n), k, v)
        return work, work.ended()

    def rows(self, ended: Ended, dtype: torch.dtype) -> dict[str, Tensor]:
        """Output and each row's numbers for the queries that lie here, all heads."""
        heads = self.q.shape[-3]
        numbers = [ended.lse, ended.peak, ended.total]
        if ended.largest is not None and ended.entropy is not None:
            numbers += [ended.largest, ended.entropy]
        wide = torch.cat([ended.output, *(number[..., None] for number in numbers)], dim=-1)
        found = self.to_rows(wide, self.schedule.queries, heads, 1)
        width = ended.output.shape[-1]
        names = ("lse", "peak", "total", "largest", "entropy")
        return {"output": found[..., :width], **dict(zip(names, found[..., width:].unbind(-1), strict=False))}

    def backward(self, work: Work, dout: Tensor, ended: Ended, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of what lies here; `ended` is of the heads here."""
        queries, keys = self.schedule.queries, self.schedule.keys
        wide = dout.to(work.dtype)
        wide = wide if dlse is None else torch.cat([wide, dlse.to(work.dtype)[..., None]], dim=-1)
        (given,) = self.to_heads(((wide, queries),), 2)
        q, k, v = self.here
        width = v.shape[-1]
        dq = torch.zeros((*work.lead, *q.shape[-2:]), dtype=work.dtype, device=q.device)
        dk, dv = work.gradients(
            range(keys.n),
            k,
            v,
            given[..., :width].contiguous(),
            ended,
            given[..., width] if dlse is not None else None,
            dq,
        )
        found = (summed_like(a, b) for a, b in zip((dq, dk, dv), (q, k, v), strict=True))
        places = ((queries, self.q), (keys, self.k), (keys, self.v))
        dq, dk, dv = (
            self.to_rows(gradient, placement, like.shape[-3], 3 + number)
            for number, (gradient, (placement, like)) in enumerate(zip(found, places, strict=True))
        )
        return dq, dk, dv


def ordered(tensor: Tensor, placement: Placement) -> Tensor:
    """Rows that lie rank after rank, in the order of positions."""
    return torch.index_select(tensor, -2, torch.as_tensor(placement.places, device=tensor.device))


def only(sends: dict[int, Tensor]) -> dict[int, Tensor]:
    """Messages that hold anything."""
    return {peer: tensor for peer, tensor in sends.items() if tensor.numel()}


def nonempty(expects: dict[int, tuple[int, torch.dtype]]) -> dict[int, tuple[int, torch.dtype]]:
    """The same of those that are waited for."""
    return {peer: what for peer, what in expects.items() if what[0]}
