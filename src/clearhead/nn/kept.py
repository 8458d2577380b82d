"""What is left of the keys and values of past tokens: for each key head those that a policy keeps, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.nn.eviction import INFINITE, Policy

State = tuple[Any, ...]
FAR = 2**62  # the first position of a row that has had none yet


class Kept:
    """Keys, values, positions (batch, key heads, slots), and scores by which they stay; position −1 is padding.

    Nothing is written in place: whoever has the state of before has all of it.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.positions: Tensor | None = None
        self.scores: Tensor | None = None
        self.first: Tensor | None = None  # the first and the last position of each row, (batch, 1, 1)
        self.last: Tensor | None = None
        self.before: Tensor | None = None  # what was the last before the new ones
        self.padded = False  # some positions are −1
        self.awaited = 0  # queries whose attention has not been seen yet
        self.real: Tensor | None = None  # which of them are, (batch, T), where some are padding

    @property
    def state(self) -> State:
        """All of it, for who wants to go back to it."""
        rows = self.first, self.last, self.before
        return self.k, self.v, self.positions, self.scores, *rows, self.padded, self.awaited, self.real

    @state.setter
    def state(self, state: State) -> None:
        self.k, self.v, self.positions, self.scores, *rows, self.padded, self.awaited, self.real = state
        self.first, self.last, self.before = rows

    def add(self, k: Tensor, v: Tensor, places: Tensor, padded: bool) -> tuple[Tensor, Tensor]:
        """All keys and values with the new ones, (batch, key heads, T, …) at `places` (batch, T)."""
        batch, heads, queries = k.shape[:3]
        new = places[:, None].expand(batch, heads, queries)
        if self.k is None or self.v is None or self.positions is None:
            self.k, self.v, self.positions = k, v, new
        else:
            self.k, self.v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
            self.positions = torch.cat([self.positions, new], dim=2)
        last = places.amax(1)[:, None, None]
        self.before = self.last
        self.last = last if self.before is None else torch.maximum(self.before, last)
        self.padded, self.awaited, self.real = self.padded or padded, queries, places >= 0 if padded else None
        return self.k, self.v

    def pad(self, real: Tensor) -> None:
        """Tell which of the tokens that were added last are none but padding, (batch, T), False where one is."""
        assert self.positions is not None
        old = self.positions.shape[-1] - real.shape[-1]
        hidden = torch.nn.functional.pad(~real, (old, 0), value=False)[:, None]
        self.positions = torch.where(hidden, -1, self.positions)
        last = self.positions[..., old:].amax((1, 2), keepdim=True)
        self.last = last if self.before is None else torch.maximum(self.before, last)
        self.padded, self.real = True, real

    def asked(self) -> dict[str, Any]:
        """What is to be observed of the call whose keys were added last; queries that are padding do not count.

        They see nothing, by the mask. The last ones are then others in each row, which weights of queries say.
        """
        asked = self.policy.asked(self.awaited)
        for name, counted in asked.items() if self.real is not None else ():
            if type(counted) is int and name in ("received_max", "removal"):
                last = f"the last {counted} queries, and in rows that are padded they are others"
                raise ArgumentError("keep", f"asks for {name} of {last}")
        if self.real is not None and type(asked.get("received")) is int:
            after = self.real.flip(1).cumsum(1).flip(1)  # how many real ones there are from each on
            asked["received"] = (self.real & (after <= asked["received"]))[:, None]
        return asked

    def settle(self, observed: Observed | None) -> None:
        """Drop what the policy does not keep, now that the new queries have attended."""
        policy, positions = self.policy, self.positions
        assert self.k is not None
        assert self.v is not None
        assert positions is not None
        queries, self.awaited = self.awaited, 0
        if self.padded or self.first is None:
            first = torch.where(positions < 0, FAR, positions).amin((1, 2), keepdim=True)
            self.first = first if self.first is None else torch.minimum(self.first, first)
        scores = None
        if policy.asked(queries):
            assert observed is not None
            scores = policy.found(observed, self.k.shape[1]).detach()
            if policy.carries and self.scores is not None:
                scores = scores + torch.nn.functional.pad(self.scores, (0, scores.shape[-1] - self.scores.shape[-1]))
        if positions.shape[-1] > policy.keep and (policy.decodes or queries > 1):
            chosen = self.chosen(scores, positions)
            self.k, self.v = (t.gather(2, chosen[..., None].expand(-1, -1, -1, t.shape[3])) for t in (self.k, self.v))
            self.positions = positions.gather(2, chosen)
            scores = None if scores is None else scores.gather(2, chosen)
        self.scores = scores if policy.carries else None

    def chosen(self, scores: Tensor | None, positions: Tensor) -> Tensor:
        """The slots that are kept, (batch, key heads, keep), in order."""
        policy, last = self.policy, self.last
        assert last is not None
        assert self.first is not None
        if scores is None:
            scores = torch.zeros(positions.shape, device=positions.device)
        slots = None
        if self.padded:  # each row as if it were alone: padding in front of it, positions from its first token on
            slots = positions.argsort(dim=-1, stable=True)
            positions, scores = positions.gather(2, slots), scores.gather(2, slots)
            ranks = policy.ranks(scores, positions - self.first, last - self.first)
        else:
            ranks = policy.ranks(scores, positions, last)
        ranks = torch.where(positions > last - policy.protected, INFINITE, ranks)
        ranks = torch.where(positions < 0, -INFINITE, ranks)
        chosen = ranks.topk(policy.keep, dim=-1).indices
        return (chosen if slots is None else slots.gather(2, chosen)).sort(dim=-1).values

    def select(self, rows: Tensor) -> None:
        """Take these batch rows."""
        if self.k is None or self.v is None or self.positions is None or self.last is None:
            return
        self.k, self.v = self.k.index_select(0, rows), self.v.index_select(0, rows)
        self.positions, self.last = self.positions.index_select(0, rows), self.last.index_select(0, rows)
        self.first = None if self.first is None else self.first.index_select(0, rows)
        self.scores = None if self.scores is None else self.scores.index_select(0, rows)
