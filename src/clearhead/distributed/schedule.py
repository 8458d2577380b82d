"""Who needs which keys of whom: the stretches that a mask lets a rank's queries see, pairs and bytes of each.

What nobody needs is neither sent nor computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from clearhead.core.grid import Grid, blocks
from clearhead.core.mask import Mask
from clearhead.core.once import once
from clearhead.distributed.counting import GRAIN, Counter, stretches
from clearhead.distributed.placement import Placement

# ranks whose keys are remembered one by one
KEPT = 64


@dataclass(frozen=True, eq=False)
class Schedule:
    """Queries and keys placed on the same ranks, under one mask."""

    mask: Mask | None
    grid: Grid
    queries: Placement
    keys: Placement

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.queries.world

    @once
    def _known(self) -> dict[Any, Any]:
        return {}

    def _once(self, key: Any, find: Callable[[], Any]) -> Any:
        """What is found out once and remembered."""
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    @once
    def _counter(self) -> Counter:
        """What the mask allows."""
        return Counter(self.mask, self.grid)

    def needs(self, rank: int, owner: int) -> tuple[range, ...]:
        """The keys of `owner` that the queries of `rank` see."""

        def find() -> tuple[range, ...]:
            found = self._seen(self.queries.runs[rank])
            return tuple(part for run in self.keys.runs[owner] for part in stretches(found, run))

        parts: tuple[range, ...] = self._once(("needs", rank, owner), find)
        return parts

    def _seen(self, runs: tuple[range, ...]) -> np.ndarray:
        """Which keys some queries see: the last answers are kept, for they are asked for every owner in turn."""
        kept: dict[Any, np.ndarray] = self._once("seen", dict)
        if runs not in kept:
            if len(kept) >= KEPT:
                kept.clear()
            kept[runs] = self._counter.seen(runs)
        return kept[runs]

    def asks(self, rank: int, owner: int) -> tuple[range, ...]:
        """The runs of queries of `rank` that see any key of `owner`, where queries travel in place of keys."""
        return tuple(run for run in self.queries.runs[rank] if self._by_owner((run,))[owner])

    def taken(self, rank: int) -> np.ndarray:
        """How many keys of each owner `rank` needs."""
        return self._by_owner(self.queries.runs[rank])

    @once
    def _blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The stretches that keys are sent by: where each starts, how long it is, and whose it is, in order."""
        found = [
            (run.start + part.start, len(part), owner)
            for owner, runs in enumerate(self.keys.runs)
            for run in runs
            for part in blocks(len(run), GRAIN)
        ]
        starts, lengths, owners = np.array(sorted(found), dtype=np.int64).reshape(-1, 3).T
        return starts, lengths, owners

    def _by_owner(self, runs: tuple[range, ...]) -> np.ndarray:
        """How many keys of each owner some queries need, in whole stretches."""

        def find() -> np.ndarray:
            starts, lengths, owners = self._blocks
            if not len(starts):
                return np.zeros(self.world, np.int64)
            some = np.logical_or.reduceat(self._seen(runs), starts)
            return np.bincount(owners, weights=lengths * some, minlength=self.world).astype(np.int64)

        counts: np.ndarray = self._once(("by owner", runs), find)
        return counts

    def pairs(self, rank: int) -> int:
        """The pairs of the queries of a rank with all keys, in all batch rows and heads."""
        count: int = self._once(("pairs", rank), lambda: sum(map(self._counter.of_queries, self.queries.runs[rank])))
        return count

    def pairs_of_keys(self, owner: int) -> int:
        """The pairs of the keys of a rank with all queries."""
        count: int = self._once(("keys", owner), lambda: sum(map(self._counter.of_keys, self.keys.runs[owner])))
        return count


def places_of(runs: tuple[range, ...], parts: tuple[range, ...]) -> list[slice]:
    """Where stretches of positions lie along the sequence axis of a rank that holds `runs`.

    >>> places_of((range(0, 4), range(10, 14)), (range(2, 4), range(10, 11)))
    [slice(2, 4, None), slice(4, 5, None)]
    """
    found, start = {}, 0
    for run in runs:
        found[run] = start - run.start
        start += len(run)
    places = []
    for part in parts:
        by = next(by for run, by in found.items() if run.start <= part.start and part.stop <= run.stop)
        places.append(slice(part.start + by, part.stop + by))
    return places


@lru_cache(maxsize=64)
def scheduled(mask: Mask | None, grid: Grid, queries: Placement, keys: Placement) -> Schedule:
    """The schedule of a call, the same one for all calls alike."""
    return Schedule(mask, grid, queries, keys)
