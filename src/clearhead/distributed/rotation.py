"""Keys travel: around the ring a rank's keys at a time while the last ones are worked on, or all at once.

At step s a rank has the keys of the rank s before it, straight from there; what its queries cannot see was not sent.
Gradients of keys go back the same way, and are added up in the precision of sums, in the order of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from clearhead.core.arrays import summed_like
from clearhead.distributed.links import Flight, Links
from clearhead.distributed.looking import Look
from clearhead.distributed.messages import count_of, packed, unpacked
from clearhead.distributed.pieces import Work
from clearhead.distributed.schedule import Schedule, places_of
from clearhead.kernels.tally import Ended

Part = tuple[range, Tensor, Tensor]


class Rotation:
    """One rank's keys and values, and those that come to it; `together` fetches all before the first is used."""

    def __init__(self, links: Links, schedule: Schedule, k: Tensor, v: Tensor, *, together: bool) -> None:
        self.links, self.schedule, self.k, self.v = links, schedule, k, v
        self.rank, self.world = links.rank, links.world
        steps = list(range(self.world))
        self.groups = [steps] if together else [[step] for step in steps]

    def mine(self, reader: int) -> tuple[range, ...]:
        """What a rank needs of the keys here."""
        return self.schedule.needs(reader, self.rank)

    def theirs(self, owner: int) -> tuple[range, ...]:
        """What this rank needs of another's."""
        return self.schedule.needs(self.rank, owner)

    def places(self, parts: tuple[range, ...]) -> list[slice]:
        """Where they lie among the keys here."""
        return places_of(self.schedule.keys.runs[self.rank], parts)

    def flight(self, group: list[int], number: int) -> Flight | None:
        """The keys of a step under way: to the ranks after this one, from those before."""
        sends, expects = {}, {}
        for step in group:
            reader, owner = (self.rank + step) % self.world, (self.rank - step) % self.world
            if step and (parts := self.mine(reader)):
                sends[reader] = packed((self.k, self.v), self.places(parts))
            if step and (parts := self.theirs(owner)):
                count = count_of((tuple(self.k.shape), tuple(self.v.shape)), sum(map(len, parts)))
                expects[owner] = (count, self.k.dtype)
        return self.links.start(sends, expects, number, self.k) if sends or expects else None

    def steps(self, number: int) -> Iterator[tuple[list[int], list[Part]]]:
        """The keys that this rank's queries see, step by step, the next ones under way meanwhile."""
        shapes = tuple(self.k.shape), tuple(self.v.shape)
        ahead = self.flight(self.groups[0], number)
        for place, group in enumerate(self.groups):
            flight, ahead = ahead, None
            if place + 1 < len(self.groups):
                ahead = self.flight(self.groups[place + 1], number + place + 1)
            came = {} if flight is None else flight.landed()
            parts: list[Part] = []
            for step in group:
                owner = (self.rank - step) % self.world
                wanted = self.theirs(owner)
                if owner == self.rank:
                    cuts = [(self.k[..., at, :], self.v[..., at, :]) for at in self.places(wanted)]
                elif wanted:
                    # two shapes were sent, so that pairs come back
                    cuts = unpacked(came[owner], shapes, [len(part) for part in wanted])  # type: ignore[assignment]  # as said
                else:
                    cuts = []
                parts += [(columns, *both) for columns, both in zip(wanted, cuts, strict=True)]
            yield group, joined(parts)

    def forward(self, work: Work) -> Ended:
        """The answer for the queries here."""
        for _, parts in self.steps(0):
            for part in parts:
                work.attend(*part)
        return work.ended()

    def look(self, look: Look) -> None:
        """All keys once more."""
        for _, parts in self.steps(self.world):
            for part in parts:
                look.see(*part)

    def backward(self, work: Work, dout: Tensor, ended: Ended, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of what is here, in the precision of sums."""
        dq = torch.zeros((*work.lead, *work.q.shape[-2:]), dtype=work.dtype, device=work.q.device)
        dk, dv = (torch.zeros(a.shape, dtype=work.dtype, device=a.device) for a in (self.k, self.v))
        start = 2 * self.world
        waiting: tuple[list[int], Flight | None] = ([], None)
        for place, (group, parts) in enumerate(self.steps(start)):
            found = []
            for columns, k, v in parts:
                both = work.gradients(columns, k, v, dout, ended, dlse, dq)
                found.append((columns, *(summed_like(a, b) for a, b in zip(both, (k, v), strict=True))))
            sends = {}
            for step in group:
                owner = (self.rank - step) % self.world
                wanted = self.theirs(owner)
                some = [cut_out(found, part) for part in wanted]
                if not step:
                    self.add(dk, dv, wanted, some)
                elif wanted:
                    sends[owner] = torch.cat(
                        [a.reshape(-1) for which in (0, 1) for a in (pair[which] for pair in some)]
                    )
            self.take(waiting, dk, dv)
            waiting = group, self.back(group, sends, work, start + self.world + place)
        self.take(waiting, dk, dv)
        return dq, dk, dv

    def back(self, group: list[int], sends: dict[int, Tensor], work: Work, number: int) -> Flight | None:
        """Gradients under way to the owners of keys, and from those that had the keys here."""
        expects = {}
        for step in group:
            reader = (self.rank + step) % self.world
            if step and (parts := self.mine(reader)):
                count = count_of((tuple(self.k.shape), tuple(self.v.shape)), sum(map(len, parts)))
                expects[reader] = (count, work.dtype)
        return self.links.start(sends, expects, number, self.k) if sends or expects else None

    def take(self, waiting: tuple[list[int], Flight | None], dk: Tensor, dv: Tensor) -> None:
        """What came back, added in the order of steps."""
        group, flight = waiting
        came = {} if flight is None else flight.landed()
        for step in group:
            reader = (self.rank + step) % self.world
            if reader in came:
                parts = self.mine(reader)
                shapes = tuple(self.k.shape), tuple(self.v.shape)
                pairs: Any = unpacked(came[reader], shapes, [len(part) for part in parts])  # since two shapes were sent
                self.add(dk, dv, parts, pairs)

    def add(self, dk: Tensor, dv: Tensor, parts: tuple[range, ...], some: list[tuple[Tensor, Tensor]]) -> None:
        """Gradients of some of the keys here."""
        for at, (more_k, more_v) in zip(self.places(parts), some, strict=True):
            dk[..., at, :] += more_k
            dv[..., at, :] += more_v


def joined(parts: list[Part]) -> list[Part]:
    """Stretches in order, those that touch as one: fewer and larger calls of a kernel.

    What is one call and what several changes no answer but by rounding.
    """
    found: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: part[0].start):
        if found and found[-1][-1][0].stop == part[0].start:
            found[-1].append(part)
        else:
            found.append([part])
    whole = []
    for some in found:
        if len(some) == 1:
            whole.append(some[0])
        else:
            k, v = torch.cat([k for _, k, _ in some], dim=-2), torch.cat([v for _, _, v in some], dim=-2)
            whole.append((range(some[0][0].start, some[-1][0].stop), k, v))
    return whole


def cut_out(found: list[Part], part: range) -> tuple[Tensor, Tensor]:
    """The gradients of a stretch, out of those of a longer one."""
    columns, dk, dv = next(one for one in found if one[0].start <= part.start and part.stop <= one[0].stop)
    at = slice(part.start - columns.start, part.stop - columns.start)
    return dk[..., at, :], dv[..., at, :]
