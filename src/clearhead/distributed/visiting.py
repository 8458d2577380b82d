"""Queries travel, for few queries over many keys: each rank attends with the keys it holds, and parts are merged once.

What comes back is peak, total and sums of values of each query, in the precision of sums, merged in the order of
ranks. Where every rank holds all queries, as in decoding, none are sent, and every rank merges the same parts to the
same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.core.arrays import summed_like
from clearhead.distributed.links import Links
from clearhead.distributed.messages import count_of, laid, packed, unpacked
from clearhead.distributed.pieces import Whole, Work
from clearhead.distributed.schedule import Schedule, places_of
from clearhead.kernels.tally import Ended


class Visit:
    """The keys and values of one rank, and the queries of all ranks that come to them."""

    def __init__(self, links: Links, schedule: Schedule, whole: Whole, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.links, self.schedule, self.whole = links, schedule, whole
        self.q, self.k, self.v = q, k, v
        self.rank, self.world = links.rank, links.world
        self.everywhere = schedule.queries.everywhere
        self.guests: dict[int, Work] = {}

    def asks(self, guest: int, host: int) -> tuple[range, ...]:
        """The runs of a rank's queries that see keys of another."""
        return self.schedule.queries.runs[guest] if self.everywhere else self.schedule.asks(guest, host)

    def hosts(self) -> Iterator[int]:
        """Every other rank."""
        return (rank for rank in range(self.world) if rank != self.rank)

    def places(self, host: int) -> list[slice]:
        """Where the queries that visit a host lie among those here."""
        return places_of(self.schedule.queries.runs[self.rank], self.asks(self.rank, host))

    def exchange(self, tensors: tuple[Tensor, ...], number: int) -> dict[int, list[tuple[Tensor, ...]]]:
        """Rows of some tensors (…, T, x) for those that visit: to their hosts, and from the guests here."""
        sends, expects = {}, {}
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if not self.everywhere:
            for other in self.hosts():
                if self.asks(self.rank, other):
                    sends[other] = packed(tensors, self.places(other))
                if runs := self.asks(other, self.rank):
                    expects[other] = (count_of(shapes, sum(map(len, runs))), tensors[0].dtype)
        came = self.links.start(sends, expects, number, self.q).landed() if sends or expects else {}
        found = {}
        for guest in range(self.world):
            runs = self.asks(guest, self.rank)
            if guest == self.rank or self.everywhere:
                if guest == self.rank:
                    found[guest] = [tuple(t[..., at, :] for t in tensors) for at in self.places(self.rank)]
            elif runs:
                found[guest] = unpacked(came[guest], shapes, [len(run) for run in runs])
        return found

    def forward(self, work: Work) -> Ended:
        """The answer for the queries here, which `work` holds."""
        for guest, runs in self.exchange((self.q,), 0).items():
            own = self.asks(guest, self.rank)
            q = torch.cat([run[0] for run in runs], dim=-2) if runs else self.q[..., :0, :]
            visitor = Work(self.whole, own, q, self.k.shape[-3], self.v.shape[-1])
            visitor.settle(None, self.k, self.v)
            keys = self.schedule.needs(guest, self.rank)
            for columns, at in zip(keys, places_of(self.schedule.keys.runs[self.rank], keys), strict=True):
                visitor.attend(columns, self.k[..., at, :], self.v[..., at, :])
            self.guests[guest] = visitor
        self.merge(work)
        return work.ended()

    def merge(self, work: Work) -> None:
        """Parts to those whose queries they are of, and from all hosts, merged in the order of ranks."""
        parts = {guest: told(visitor) for guest, visitor in self.guests.items()}
        width = self.v.shape[-1] + (4 if self.whole.want is not None else 2)
        shape = (*work.lead, 0, width)
        sends, expects = {}, {}
        for other in self.hosts():
            guest = self.rank if self.everywhere else other
            if self.asks(other, self.rank):
                sends[other] = parts[guest].reshape(-1)
            if runs := self.asks(self.rank, other):
                expects[other] = (count_of([shape], sum(map(len, runs))), work.dtype)
        came = self.links.start(sends, expects, 1, self.q).landed() if sends or expects else {}
        for host in range(self.world):
            runs = self.asks(self.rank, host)
            if not runs:
                continue
            rows = parts[self.rank] if host == self.rank else came[host].reshape(*work.lead, -1, width)
            numbers = {run: number for number, run in enumerate(work.runs)}
            for run, at in zip(runs, laid([len(run) for run in runs]), strict=True):
                heard(work, numbers[run], rows[..., at, :])

    def backward(self, work: Work, dout: Tensor, ended: Ended, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of what is here."""
        rows = [ended.peak, ended.total, ended.lse] + ([] if dlse is None else [dlse])
        wide = torch.cat([dout.to(work.dtype), ended.output, *(row.to(work.dtype)[..., None] for row in rows)], dim=-1)
        dk, dv = (torch.zeros(a.shape, dtype=work.dtype, device=a.device) for a in (self.k, self.v))
        width, mine = self.v.shape[-1], {}
        for guest, runs in self.exchange((wide,), 2).items():
            visitor = self.guests[guest]
            visitor.learns = work.learns
            rows_of_guest = torch.cat([run[0] for run in runs], dim=-2) if runs else wide[..., :0, :]
            its_dout, its_output = rows_of_guest[..., :width], rows_of_guest[..., width : 2 * width]
            peak, total, lse, *more = rows_of_guest[..., 2 * width :].unbind(-1)
            end = Ended(its_output.contiguous(), lse, peak, total, None, None)
            dq = torch.zeros((*work.lead, *visitor.q.shape[-2:]), dtype=work.dtype, device=self.q.device)
            keys = self.schedule.needs(guest, self.rank)
            for columns, at in zip(keys, places_of(self.schedule.keys.runs[self.rank], keys), strict=True):
                k, v = self.k[..., at, :], self.v[..., at, :]
                more_k, more_v = visitor.gradients(
                    columns, k, v, its_dout.contiguous(), end, more[0] if more else None, dq
                )
                dk[..., at, :] += summed_like(more_k, k)
                dv[..., at, :] += summed_like(more_v, v)
            mine[guest] = dq
        return self.home(work, mine), dk, dv

    def home(self, work: Work, mine: dict[int, Tensor]) -> Tensor:
        """The gradients of queries to where they are from, added in the order of ranks."""
        shape = (*work.lead, 0, self.q.shape[-1])
        sends, expects = {}, {}
        for other in self.hosts():
            guest = self.rank if self.everywhere else other
            if self.asks(other, self.rank):
                sends[other] = mine[guest].reshape(-1)
            if runs := self.asks(self.rank, other):
                expects[other] = (count_of([shape], sum(map(len, runs))), work.dtype)
        came = self.links.start(sends, expects, 3, self.q).landed() if sends or expects else {}
        dq = torch.zeros((*work.lead, *self.q.shape[-2:]), dtype=work.dtype, device=self.q.device)
        for host in range(self.world):
            runs = self.asks(self.rank, host)
            if not runs:
                continue
            part = mine[self.rank] if host == self.rank else came[host].reshape(*work.lead, -1, self.q.shape[-1])
            for at, here in zip(self.places(host), laid([len(run) for run in runs]), strict=True):
                dq[..., at, :] += part[..., here, :]
        return dq


def told(visitor: Work) -> Tensor:
    """What a visitor found, one row for each query: values, total, peak, and what is observed of rows."""
    rows = []
    for tally in visitor.tallies:
        columns = [tally.total, tally.peak]
        if tally.weighted is not None and tally.largest is not None:
            columns += [tally.weighted, tally.largest]
        rows.append(torch.cat([tally.values, *(column[..., None] for column in columns)], dim=-1))
    return torch.cat(rows, dim=-2) if rows else torch.zeros((*visitor.lead, 0, visitor.width + 2), dtype=visitor.dtype)


def heard(work: Work, number: int, rows: Tensor) -> None:
    """The same, merged."""
    values, total, peak, *seen = rows[..., : work.width], *rows[..., work.width :].unbind(-1)
    weighted, largest = seen if seen else (None, None)
    work.tallies[number].merge(peak, total, values, weighted, largest)
