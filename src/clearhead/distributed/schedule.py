"""Who needs which keys of whom: the stretches that a mask lets a rank's queries see, pairs and bytes of each.

What nobody needs is neither sent nor computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from clearhead.core.grid import Grid
from clearhead.core.mask import Mask
from clearhead.distributed.counting import keys_seen, pairs
from clearhead.distributed.placement import Placement


@dataclass(frozen=True, eq=False)
class Schedule:
    """Queries and keys placed on the same ranks, under one mask."""

    mask: Mask | None
    grid: Grid
    queries: Placement
    keys: Placement

    @cached_property
    def _needs(self) -> dict[tuple[int, int], tuple[range, ...]]:
        return {}

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.queries.world

    def needs(self, rank: int, owner: int) -> tuple[range, ...]:
        """The keys of `owner` that the queries of `rank` see."""
        if (rank, owner) not in self._needs:
            found = [keys_seen(self.mask, self.queries.runs[rank], run, self.grid) for run in self.keys.runs[owner]]
            self._needs[rank, owner] = tuple(part for parts in found for part in parts)
        return self._needs[rank, owner]

    @lru_cache(maxsize=4096)  # noqa: B019  # a schedule is itself remembered, and forgotten with this
    def asks(self, rank: int, owner: int) -> tuple[range, ...]:
        """The runs of queries of `rank` that see any key of `owner`, where queries travel in place of keys."""
        sees = self.needs(rank, owner)
        return tuple(
            run
            for run in self.queries.runs[rank]
            if any(keys_seen(self.mask, (run,), part, self.grid) for part in sees)
        )

    def pairs(self, rank: int, owner: int) -> int:
        """The pairs of queries of `rank` and keys of `owner`, in all batch rows and heads."""
        return sum(
            pairs(self.mask, rows, columns, self.grid)
            for rows in self.queries.runs[rank]
            for columns in self.needs(rank, owner)
        )


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
