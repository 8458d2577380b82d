"""One call over many ranks, from the tensors of this one to its answer: forward, backward, what is observed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clearhead.core.arrays import summed_like
from clearhead.core.grid import bins
from clearhead.core.observations import Map, Observed, Rows, Top
from clearhead.distributed.exchange import Exchange
from clearhead.distributed.links import Links
from clearhead.distributed.looking import Look, largest, rows_of, top_of
from clearhead.distributed.pieces import BY_KEY, Whole, Work
from clearhead.distributed.rotation import Rotation
from clearhead.distributed.schedule import Schedule, places_of
from clearhead.distributed.visiting import Visit
from clearhead.kernels.tally import Ended


class Job:
    """What one rank does: its tensors, the way they go, and what came of it."""

    def __init__(self, links: Links, schedule: Schedule, whole: Whole, way: str) -> None:
        self.links, self.schedule, self.whole, self.way = links, schedule, whole, way
        self.found: dict[str, Any] = {}
        self.ended: Ended

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Ended:
        """The answer for the queries here, all heads."""
        self.q, self.k, self.v = q, k, v
        runs = self.schedule.queries.runs[self.links.rank]
        if self.way == "heads":
            self.heads = Exchange(self.links, self.schedule, self.whole, q, k, v)
            self.work, self.inner = self.heads.forward()
            rows = self.heads.rows(self.inner, q.dtype)
            ended = Ended(*(rows.get(name) for name in ("output", "lse", "peak", "total", "largest", "entropy")))
        else:
            self.work = Work(self.whole, runs, q, k.shape[-3], v.shape[-1])
            self.work.settle(None, k, v)
            ended = self.mover().forward(self.work)
            self.inner = ended
        if self.whole.want is not None:
            self.observe(ended)
        return ended

    def mover(self) -> Rotation | Visit:
        """Who brings queries and keys together."""
        if self.way == "queries":
            self.visit = Visit(self.links, self.schedule, self.whole, self.q, self.k, self.v)
            return self.visit
        self.rotation = Rotation(self.links, self.schedule, self.k, self.v, together=self.way == "gather")
        return self.rotation

    @property
    def kernel(self) -> str:
        """The name of the kernel that ran."""
        return "tiled" if self.work.kernel is None else self.work.kernel.name

    def backward(self, dout: Tensor, ended: Ended, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq, dk, dv as the tensors here, and this rank's share of the sinks' gradient."""
        if self.way == "heads":
            found = self.heads.backward(self.work, dout, self.inner, dlse)
        else:
            mover = self.visit if self.way == "queries" else self.rotation
            found = mover.backward(self.work, dout, ended, dlse)
        dsinks = self.sinks_here().sink_gradient(dout, ended, dlse)
        dq, dk, dv = (
            summed_like(gradient, like).to(like.dtype)
            for gradient, like in zip(found, (self.q, self.k, self.v), strict=True)
        )
        return dq, dk, dv, dsinks

    def sinks_here(self) -> Work:
        """The queries here with all heads, whatever way they went."""
        runs = self.schedule.queries.runs[self.links.rank]
        return Work(self.whole, runs, self.q, self.k.shape[-3], self.v.shape[-1])

    def observe(self, ended: Ended) -> None:
        """What was asked for beyond each row's numbers, where it belongs: see `distributed.observe`."""
        want = self.whole.want
        assert want is not None
        visit = self.way == "queries"
        work = self.visit.guests.get(self.links.rank, self.work) if visit else self.work
        if not want.names:
            return
        if want.top is not None:
            self.found["top"] = self.top(top_of(work, self.inner, want.top), work, want.top)
        if want.queries is not None:
            rows = self.of_all(rows_of(work, self.inner, want.queries))
            self.found["queries"] = Rows(torch.tensor(want.queries, dtype=torch.int64).numpy(), rows)
        if self.whole.looks_again:
            self.look(work)

    def top(self, top: Top, work: Work, count: int) -> Top:
        """The largest weights of the queries here."""
        heads = self.q.shape[-3]
        if self.way == "heads":
            return Top(*(self.heads.to_rows(part, self.schedule.queries, heads, 8 + i) for i, part in enumerate(top)))
        if self.way == "queries":  # of the keys here; the others have theirs
            return largest(
                work,
                list(zip(*(everyone(self.links, part) for part in top), strict=True)),
                top.weights.shape[-2],
                count,
            )
        return top

    def look(self, work: Work) -> None:
        """All keys once more, with the denominators of all."""
        look, want = Look(work, self.inner), self.whole.want
        assert want is not None
        if self.way == "heads":
            _, k, v = self.heads.here
            look.see(range(self.schedule.keys.n), k, v)
        elif self.way == "queries":
            runs = self.schedule.keys.runs[self.links.rank]
            for columns, at in zip(runs, places_of(runs, runs), strict=True):
                look.see(columns, self.k[..., at, :], self.v[..., at, :])
        else:
            self.rotation.look(look)
        sums = look.sums()
        by_key = [name for name in BY_KEY if name in sums]
        if by_key:
            self.found |= self.of_keys({name: sums[name] for name in by_key})
        if "map" in sums:
            total, most = sums["map"]
            cells = self.cells(want.map).to(total)
            total, most = self.of_all(total), self.of_all(most, most=True)
            self.found["map"] = Map(total / cells, most)
        if look.weights is not None:
            weights = look.weights
            if self.way == "heads":
                weights = self.heads.to_rows(weights, self.schedule.queries, self.q.shape[-3], 12)
            elif self.way == "queries":
                weights = self.of_all(weights)
            self.found["weights"] = weights

    def cells(self, shape: Any) -> Tensor:
        """How many pairs each cell of a map has."""
        grid = self.whole.grid
        rows, columns = (
            torch.tensor([len(part) for part in bins(n, most)])
            for n, most in zip((grid.queries, grid.keys), shape, strict=True)
        )
        return torch.outer(rows, columns)

    def of_all(self, part: Tensor, most: bool = False) -> Tensor:
        """What every rank has a part of, on every rank: parts of heads side by side, others added in order."""
        parts = everyone(self.links, part)
        if self.way == "heads":
            axis = len(self.whole.grid.batch)
            return torch.cat(parts, dim=axis)
        whole = parts[0]
        for other in parts[1:]:
            whole = torch.maximum(whole, other) if most else whole + other
        return whole

    def of_keys(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the keys here got, from what the queries here gave to all keys: all of it in one message to each."""
        part = torch.stack(list(sums.values()), dim=-1)  # (…, S, names)
        keys, rank = self.schedule.keys, self.links.rank
        if self.way == "heads":
            whole = self.heads.to_rows(part, keys, self.q.shape[-3], 10)
        else:
            where = [torch.as_tensor(keys.positions(owner), device=part.device) for owner in range(self.links.world)]
            whole = part[..., where[rank], :]
            if self.way != "queries":
                largest = torch.tensor([name == "received_max" for name in sums], device=part.device)
                whole = self.from_all(part, whole, where, largest)
        return {name: one.contiguous() for name, one in zip(sums, whole.unbind(-1), strict=True)}

    def from_all(self, part: Tensor, own: Tensor, where: list[Tensor], largest: Tensor) -> Tensor:
        """What the queries of all ranks gave to the keys here, in the order of ranks: added up, or the largest."""
        keys, rank, others = self.schedule.keys, self.links.rank, range(self.links.world)
        sends = {o: part[..., where[o], :].reshape(-1) for o in others if o != rank and keys.lengths[o]}
        expects = {o: (own.numel(), own.dtype) for o in others if o != rank and own.numel()}
        came = self.links.start(sends, expects, 8 * self.links.world, part).landed()
        total = torch.zeros_like(own)
        for owner in others if own.numel() else ():
            one = own if owner == rank else came[owner].reshape(own.shape)
            total = torch.where(largest, torch.maximum(total, one), total + one)
        return total

    def observed(self, output: Tensor, lse: Tensor, ended: Ended) -> Observed:
        """All of it as the value that `observe` gives."""
        return Observed(output, lse, ended.largest, ended.entropy, self.kernel, **self.found)


def everyone(links: Links, part: Tensor) -> list[Tensor]:
    """The same tensor of every rank, in order."""
    if links.world == 1:
        return [part]
    mine = part.contiguous()
    mine = mine.cpu() if links.through_host else mine
    found = [torch.empty_like(mine) for _ in range(links.world)]

    def ask() -> None:
        links.wait(dist.all_gather(found, mine, group=links.group, async_op=True), "what is observed did not come")

    links.guarded(ask)
    links.sent += (links.world - 1) * mine.nbytes
    return [one.to(part.device) for one in found]
