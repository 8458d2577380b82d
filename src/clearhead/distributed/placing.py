"""place(): which rank holds which positions, so that a mask gives every rank as many pairs as the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from clearhead.core.array_masks import given_mask
from clearhead.core.arrays import Array
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import Grid, bins, bins_of
from clearhead.core.mask import Mask
from clearhead.distributed.counting import Counter
from clearhead.distributed.placement import Placement, evened

# more than this above the mean, and another placement is looked for
TOLERATED = 0.05
WAYS = ("contiguous", "zigzag", "striped", "pairs")


def place(
    mask: Mask | Array | None,
    n: int,
    world: int,
    how: str | None = None,
    *,
    keys: int | None = None,
    batch: tuple[int, ...] = (),
    heads: int = 1,
) -> Placement:
    """Who holds which of `n` positions on `world` ranks, balanced by the pairs that the mask allows.

    `how` is "contiguous", "zigzag", "striped" or "pairs" (blocks dealt by their counted pairs);
    None takes the first of them whose busiest rank has at most 5 % more pairs than the mean, or the best.

    >>> from clearhead.core.masks import causal, window
    >>> place(causal(), 4096, 4)
    Placement(4096 positions on 4 ranks, zigzag, at most 2 runs each, imbalance 0.0%)
    >>> place(window(64, 64), 4096, 4).how
    'contiguous'

    `keys` is their number where it is not n; `batch` and `heads` are needed by masks that differ by them.
    """
    for name, value, least in (("n", n, 0), ("world", world, 1)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise ArgumentError(name, f"is {shown(value)}, expected a whole number of at least {least}")
    if how is not None and how not in WAYS:
        raise ArgumentError("how", f"is {shown(how)}, expected one of {', '.join(map(repr, WAYS))} or None")
    given = None if mask is None else given_mask("mask", mask)
    grid = Grid(tuple(batch), heads, int(n), int(n) if keys is None else int(keys))
    if given is not None:
        given.check(grid)
    counter = _Counted(Counter(given, grid))
    best: Placement | None = None
    for candidate in _candidates(counter, int(n), int(world), how):
        if best is None or (candidate.imbalance or 0.0) < (best.imbalance or 0.0):
            best = candidate
        if (best.imbalance or 0.0) <= TOLERATED:
            break
    assert best is not None
    return best


class _Counted:
    """Pairs of runs of queries, each stretch counted once."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self.known: dict[range, int] = {}

    def of(self, rows: range) -> int:
        """The pairs of these queries with all keys."""
        if rows not in self.known:
            self.known[rows] = self.counter.of_queries(rows)
        return self.known[rows]

    def counted(self, placement: Placement) -> Placement:
        """The same placement, with the pairs of each rank."""
        own = tuple(sum(self.of(run) for run in runs) for runs in placement.runs)
        return Placement(placement.n, placement.runs, placement.how, own)


def _candidates(counter: _Counted, n: int, world: int, how: str | None) -> itertools.chain[Placement]:
    """Placements from the fewest runs to the most, counted when they are looked at."""
    plain = {
        "contiguous": Placement.contiguous,
        "zigzag": Placement.zigzag,
        "striped": Placement.striped,
    }
    some = (counter.counted(make(n, world)) for name, make in plain.items() if how in (None, name))
    return itertools.chain(some, _dealt(counter, n, world) if how in (None, "pairs") else ())


def _dealt(counter: _Counted, n: int, world: int) -> Iterator[Placement]:
    """Blocks by their pairs: those that are a large part of a rank's share are cut in half, once more each time."""
    parts = [part for part in bins(n, 4 * world) if len(part)]
    share = max(sum(map(counter.of, parts)) / world, 1.0)
    for most in (1.0, 0.25, 0.1, 0.05, 0.02):
        parts = [small for part in parts for small in _cut(counter, part, most * share)]
        yield counter.counted(evened(n, world, parts, [counter.of(part) for part in parts]))


def _cut(counter: _Counted, part: range, most: float) -> list[range]:
    """A block in halves until none has more pairs than that, or more than one query."""
    if counter.of(part) <= most or len(part) == 1:
        return [part]
    return [small for half in bins_of(part, 2) for small in _cut(counter, half, most)]
