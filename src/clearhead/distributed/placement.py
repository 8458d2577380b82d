"""Placement: who holds which positions of a sequence, as a value; shard and gather go there and back.

A rank holds runs of positions that follow one another, in ascending order; along its tensors' sequence axis they lie
one after the other. Masks and biases are asked about the positions, so that every placement means the same.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, Library, require_array
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import blocks
from clearhead.core.once import once


@dataclass(frozen=True, repr=False)
class Placement:
    """The runs of positions that each rank holds; `pairs`, where they were counted, are those of its queries.

    >>> Placement.contiguous(10, 4)
    Placement(10 positions on 4 ranks, contiguous, at most 1 runs each)
    >>> Placement.contiguous(10, 4).lengths
    (2, 3, 2, 3)
    """

    n: int
    runs: tuple[tuple[range, ...], ...]
    how: str = "by hand"
    pairs: tuple[int, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        held = sorted((run for own in self.runs for run in own if len(run)), key=lambda run: run.start)
        if not self.runs:
            raise ArgumentError("runs", "is empty, expected the runs of at least one rank")
        end = 0
        if not self.everywhere:
            for run in held:
                if run.start != end or run.step != 1:
                    raise ArgumentError("runs", f"has {run}, expected each of {self.n} positions once")
                end = run.stop
            if end != self.n:
                raise ArgumentError("runs", f"ends at position {end}, expected each of {self.n} positions once")

    @classmethod
    def of_lengths(cls, lengths: Any, how: str = "contiguous") -> Placement:
        """One run for each rank, as long as given.

        >>> Placement.of_lengths([3, 0, 2]).runs
        ((range(0, 3),), (), (range(3, 5),))
        """
        edges = np.cumsum([0, *lengths]).tolist()
        own = tuple((range(low, high),) if high > low else () for low, high in itertools.pairwise(edges))
        return cls(edges[-1], own, how)

    @classmethod
    def contiguous(cls, n: int, world: int) -> Placement:
        """The first positions on rank 0, the next on rank 1, …, as many on each to within one."""
        return cls.of_lengths([(rank + 1) * n // world - rank * n // world for rank in range(world)])

    @classmethod
    def zigzag(cls, n: int, world: int) -> Placement:
        """2 · world runs: rank r holds the r-th from the front and the r-th from the back, even for causal masks.

        >>> Placement.zigzag(16, 2).runs
        ((range(0, 4), range(12, 16)), (range(4, 12),))
        """
        edges = [i * n // (2 * world) for i in range(2 * world + 1)]
        parts = [range(low, high) for low, high in itertools.pairwise(edges)]
        return cls(n, tuple(joined([parts[rank], parts[2 * world - 1 - rank]]) for rank in range(world)), "zigzag")

    @classmethod
    def striped(cls, n: int, world: int, block: int | None = None) -> Placement:
        """Blocks in turn: block i on rank i mod world.

        >>> Placement.striped(7, 2, block=2).runs
        ((range(0, 2), range(4, 6)), (range(2, 4), range(6, 7)))
        """
        block = max(1, -(-n // (8 * world))) if block is None else block
        own: list[list[range]] = [[] for _ in range(world)]
        for number, part in enumerate(blocks(n, block)):
            own[number % world].append(part)
        return cls(n, tuple(joined(parts) for parts in own), "striped")

    @classmethod
    def on_all(cls, n: int, world: int) -> Placement:
        """All positions on every rank, as the one query of a decoding step is."""
        return cls(n, ((range(n),) if n else (),) * world, "everywhere")

    @property
    def everywhere(self) -> bool:
        """True where every rank holds all positions."""
        return self.how == "everywhere"

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.runs)

    @once
    def lengths(self) -> tuple[int, ...]:
        """How many positions each rank holds."""
        return tuple(sum(map(len, own)) for own in self.runs)

    def positions(self, rank: int) -> np.ndarray:
        """The positions that a rank holds, in the order they lie there."""
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(run.start, run.stop) for run in self.runs[rank])])

    @once
    def order(self) -> np.ndarray:
        """All positions, rank after rank: where each place of what is laid end to end belongs."""
        return np.concatenate([self.positions(rank) for rank in range(1 if self.everywhere else self.world)])

    @once
    def places(self) -> np.ndarray:
        """The inverse: where each position lies in what is laid end to end."""
        return np.argsort(self.order)

    @property
    def imbalance(self) -> float | None:
        """How much more the busiest rank has to do than the mean, in pairs; None where they were not counted."""
        if self.pairs is None or not sum(self.pairs):
            return None if self.pairs is None else 0.0
        return max(self.pairs) * self.world / sum(self.pairs) - 1.0

    def __repr__(self) -> str:
        runs = max(map(len, self.runs))
        even = "" if self.imbalance is None else f", imbalance {self.imbalance:.1%}"
        return f"Placement({self.n} positions on {self.world} ranks, {self.how}, at most {runs} runs each{even})"


def joined(parts: list[range]) -> tuple[range, ...]:
    """Ranges in order, those that touch as one, empty ones left out."""
    found: list[range] = []
    for part in sorted((one for one in parts if len(one)), key=lambda one: one.start):
        if found and found[-1].stop == part.start:
            part = range(found.pop().start, part.stop)
        found.append(part)
    return tuple(found)


def shard(array: Array, placement: Placement, rank: int, *, axis: int = -2) -> Array:
    """The part of a whole array that a rank holds, along the sequence axis.

    >>> shard(np.arange(8), Placement.zigzag(8, 2), 0, axis=0).tolist()
    [0, 1, 6, 7]
    """
    require_array("array", array)
    if not 0 <= rank < placement.world:
        raise ArgumentError("rank", f"is {shown(rank)}, expected 0 to {placement.world - 1}")
    axis = _axis(array, axis)
    if array.shape[axis] != placement.n:
        raise ArgumentError("array", f"has {array.shape[axis]} positions, expected {placement.n} of the placement")
    before = (slice(None),) * axis
    parts = [array[(*before, slice(run.start, run.stop))] for run in placement.runs[rank]]
    return parts[0] if len(parts) == 1 else _concat(array, parts, axis)


def unshard(parts: list[Array], placement: Placement, *, axis: int = -2) -> Array:
    """What `shard` gave for every rank, as the whole array.

    >>> placement = Placement.striped(7, 3)
    >>> unshard([shard(np.arange(7), placement, rank, axis=0) for rank in range(3)], placement, axis=0).tolist()
    [0, 1, 2, 3, 4, 5, 6]
    """
    if len(parts) != placement.world:
        raise ArgumentError("parts", f"has {len(parts)} arrays, expected one for each of {placement.world} ranks")
    axis = _axis(parts[0], axis)
    for rank, part in enumerate(parts):
        if part.shape[axis] != placement.lengths[rank]:
            raise ArgumentError(
                f"parts[{rank}]", f"has {part.shape[axis]} positions, expected {placement.lengths[rank]}"
            )
    if placement.everywhere:
        return parts[0]
    whole = _concat(parts[0], parts, axis)
    library = Library.of(whole)
    return library.xp.take(whole, library.asarray(placement.places), axis=axis)


def evened(n: int, world: int, parts: list[range], weights: list[int]) -> Placement:
    """Blocks dealt so that the sums of their weights are close: the heaviest first, each to the rank with the least.

    No rank gets more than a quarter above its share of the positions, as far as blocks allow.
    """
    sums, held = [0] * world, [0] * world
    own: list[list[range]] = [[] for _ in range(world)]
    # of equal weight in order, so that neighbours are not scattered more than is needed
    for number in sorted(range(len(parts)), key=lambda i: (-weights[i], i)):
        part = parts[number]
        free = [r for r in range(world) if 4 * (held[r] + len(part)) * world <= 5 * n] or list(range(world))
        rank = min(free, key=lambda r: (sums[r], held[r], r))
        own[rank].append(part)
        sums[rank] += weights[number]
        held[rank] += len(part)
    return Placement(n, tuple(joined(some) for some in own), "pairs")


def _axis(array: Array, axis: int) -> int:
    if not -array.ndim <= axis < array.ndim:
        raise ArgumentError("axis", f"is {axis}, expected an axis of shape {tuple(array.shape)}")
    return axis % array.ndim


def _concat(like: Array, parts: list[Array], axis: int) -> Array:
    library = Library.of(like)
    if not parts:
        return like[(slice(None),) * axis + (slice(0, 0),)]
    return library.xp.concat(parts, axis=axis)
