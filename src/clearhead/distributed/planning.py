"""plan(): the ways to compute a call over many ranks, with pairs, bytes and steps of each rank, and what it would take.

Bytes are those that are then sent, to the last one; times are of links and ranks as they are described, not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from clearhead.core.array_masks import given_mask
from clearhead.core.arrays import Array
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import Grid
from clearhead.core.mask import Mask
from clearhead.core.once import once
from clearhead.distributed.placement import Placement
from clearhead.distributed.placing import place
from clearhead.distributed.schedule import Schedule, scheduled

WAYS = ("ring", "gather", "heads", "queries")
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Machine:
    """What ranks and links can do: bytes a second and seconds a message of a link, multiply-adds a second of a rank."""

    bandwidth: float = 25e9
    latency: float = 10e-6
    rate: float = 2e13


@dataclass(frozen=True)
class Shape:
    """The sizes that bytes are counted by: heads, features, batch rows, and bytes of a number here and in sums."""

    batch: int
    heads: int
    key_heads: int
    features: int
    width: int
    item: int
    sums: int


@dataclass(frozen=True)
class WayCost:
    """One way: what each rank sends forward and backward, in how many steps, and how long it would take."""

    name: str
    sent: tuple[int, ...]
    sent_backward: tuple[int, ...]
    steps: int
    seconds: float
    refused: str | None = None


@dataclass(frozen=True, repr=False)
class DistributedPlan:
    """Who holds what, how many pairs each rank has, and every way to compute it; `way` is the one that is taken.

    >>> import clearhead as ch
    >>> found = ch.distributed.plan((1, 8, 4096, 64), (1, 8, 4096, 64), world=4, mask=ch.causal())
    >>> found.way, len(found.pairs), found.chosen.steps
    ('heads', 4, 2)
    """

    schedule: Schedule
    shape: Shape
    machine: Machine
    ways: tuple[WayCost, ...]
    way: str

    @property
    def chosen(self) -> WayCost:
        """What the way that is taken costs."""
        return next(one for one in self.ways if one.name == self.way)

    @once
    def pairs(self) -> tuple[int, ...]:
        """Query–key pairs of each rank's queries, in all batch rows and heads."""
        return tuple(self.schedule.pairs(rank) for rank in range(self.schedule.world))

    @property
    def imbalance(self) -> float:
        """How much more the busiest rank has to do than the mean."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs) - 1.0 if sum(self.pairs) else 0.0

    def __repr__(self) -> str:
        grid, world = self.schedule.grid, self.schedule.world
        lines = [
            f"{grid.queries:,} queries × {grid.keys:,} keys on {world} ranks, {self.schedule.queries.how}: "
            f"{sum(self.pairs):,} pairs, imbalance {self.imbalance:.1%}",
            f"{'way':<9}{'sent, most by a rank':>22}{'backward':>16}{'steps':>7}{'estimated':>12}",
        ]
        for one in self.ways:
            mark = "→" if one.name == self.way else " "
            if one.refused is not None:
                lines.append(f"{mark} {one.name:<7} refused: {one.refused}")
                continue
            lines.append(
                f"{mark} {one.name:<7}{max(one.sent):>20,} B{max(one.sent_backward):>14,} B{one.steps:>7}"
                f"{_time(one.seconds):>12}"
            )
        return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def plan(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...] | None = None,
    *,
    world: int,
    mask: Mask | Array | None = None,
    dtype: str = "float32",
    placement: Placement | None = None,
    key_placement: Placement | None = None,
    way: str | None = None,
    bandwidth: float = Machine.bandwidth,
    latency: float = Machine.latency,
    rate: float = Machine.rate,
) -> DistributedPlan:
    """What attention over `world` ranks would do: shapes are those of the whole call, nothing is computed.

    >>> from clearhead.core.masks import causal
    >>> found = plan((1, 8, 4096, 64), (1, 2, 4096, 64), world=4, mask=causal())
    >>> found.way, round(found.imbalance, 3)
    ('ring', 0.0)

    Without a placement the mask decides it (`place`). `bandwidth` is of each rank's link in bytes a second, `latency`
    in seconds a message, `rate` in multiply-adds a second of a rank.
    """
    v = k if v is None else v
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) < 3:
            raise ArgumentError(name, f"is {shown(shape)}, expected a shape (…, heads, positions, features)")
    if dtype not in SIZES:
        raise ArgumentError("dtype", f"is {shown(dtype)}, expected one of {', '.join(SIZES)}")
    grid = Grid(tuple(q[:-3]), q[-3], q[-2], k[-2])
    given = None if mask is None else given_mask("mask", mask)
    if placement is None:
        placement = place(given, grid.queries, world, keys=grid.keys, batch=grid.batch, heads=grid.heads)
    if key_placement is None:
        key_placement = placement if grid.keys == grid.queries else Placement.contiguous(grid.keys, world)
    sizes = Shape(math.prod(grid.batch), q[-3], k[-3], q[-1], v[-1], SIZES[dtype], 8 if dtype == "float64" else 4)
    schedule = scheduled(given, grid, placement, key_placement)
    return planned(schedule, sizes, way=way, machine=Machine(bandwidth, latency, rate))


def planned(
    schedule: Schedule, shape: Shape, *, way: str | None = None, machine: Machine | None = None, looks: bool = False
) -> DistributedPlan:
    """The plan of a schedule; the fastest way by what it would take, unless one is asked for.

    `looks` says that more is observed than rows, for which keys are needed where the queries are.
    """
    if way is not None and way not in WAYS:
        raise ArgumentError("way", f"is {shown(way)}, expected one of {', '.join(map(repr, WAYS))} or None")
    machine = machine or Machine()
    costs = tuple(_cost(name, schedule, shape, machine, looks) for name in WAYS)
    able = [one for one in costs if one.refused is None]
    if way is None:
        way = min(able, key=lambda one: (one.seconds, WAYS.index(one.name))).name
    asked = next(one for one in costs if one.name == way)
    if asked.refused is not None:
        raise ArgumentError("way", f"is {way!r}, which is refused: {asked.refused}")
    return DistributedPlan(schedule, shape, machine, costs, way)


def refusal(name: str, schedule: Schedule, shape: Shape, looks: bool) -> str | None:
    """Why a way cannot be gone; None where it can."""
    if schedule.queries.everywhere:
        return None if name == "queries" else "every rank holds all queries, and keys stay where they are"
    if name == "queries" and looks:
        return "weights are observed where the queries are"
    if name == "heads":
        if shape.heads % schedule.world:
            return f"{shape.heads} query heads cannot be dealt evenly to {schedule.world} ranks"
        if shape.key_heads % schedule.world and schedule.world % shape.key_heads:
            return f"{shape.key_heads} key heads and {schedule.world} ranks: neither divides the other"
    return None


def _cost(name: str, schedule: Schedule, shape: Shape, machine: Machine, looks: bool) -> WayCost:
    world = schedule.world
    refused = refusal(name, schedule, shape, looks)
    if refused is not None:
        return WayCost(name, (0,) * world, (0,) * world, 0, math.inf, refused)
    forward, backward = _bytes(name, schedule, shape)
    steps = world - 1 if name == "ring" else min(world - 1, 1) * (2 if name in ("heads", "queries") else 1)
    work = _multiply_adds(name, schedule, shape) / machine.rate
    travel = max(forward) / machine.bandwidth
    waits = steps * machine.latency + (0 if name == "ring" else min(world - 1, 1) * (world - 2) * machine.latency / 8)
    seconds = (max(work, travel) if name == "ring" else work + travel) + waits
    return WayCost(name, forward, backward, steps, seconds)


def _multiply_adds(name: str, schedule: Schedule, shape: Shape) -> float:
    """Of the busiest rank, forward."""
    world, each = schedule.world, shape.features + shape.width
    if schedule.queries.everywhere or name == "queries":
        return max(schedule.pairs_of_keys(owner) for owner in range(world)) * each
    by_rank = [schedule.pairs(rank) for rank in range(world)]
    return (sum(by_rank) / world if name == "heads" else max(by_rank)) * each


def _bytes(name: str, schedule: Schedule, shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What each rank sends, forward and backward; broadcast batch axes count as if they were whole."""
    ranks = range(schedule.world)
    key = shape.batch * shape.key_heads * (shape.features + shape.width)
    if name in ("ring", "gather"):
        taken = np.stack([schedule.taken(rank) for rank in ranks])  # [reader, owner]
        np.fill_diagonal(taken, 0)
        forward = tuple(int(count) * key * shape.item for count in taken.sum(0))
        back = tuple(int(count) * key * shape.sums for count in taken.sum(1))
        return forward, tuple(one + two for one, two in zip(forward, back, strict=True))
    row = shape.batch * shape.heads
    if name == "queries":
        return _bytes_of_queries(schedule, shape, row)
    held, keys, last = schedule.queries.lengths, schedule.keys.lengths, schedule.world - 1
    own_heads = shape.heads // schedule.world
    own_keys = max(shape.key_heads // schedule.world, 1)
    batch = shape.batch
    there = [
        batch * last * (held[r] * own_heads * shape.features + keys[r] * own_keys * (shape.features + shape.width))
        for r in ranks
    ]
    answer = [batch * (schedule.queries.n - held[r]) * own_heads for r in ranks]
    forward = tuple(there[r] * shape.item + answer[r] * (shape.width + 3) * shape.sums for r in ranks)
    backward = tuple(
        shape.sums
        * (
            batch * last * held[r] * own_heads * shape.width
            + answer[r] * shape.features
            + batch * (schedule.keys.n - keys[r]) * own_keys * (shape.features + shape.width)
        )
        for r in ranks
    )
    return forward, backward


def _bytes_of_queries(schedule: Schedule, shape: Shape, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ranks = range(schedule.world)
    if schedule.queries.everywhere:
        rows = schedule.queries.n * (schedule.world - 1) * row
        part = (rows * (shape.width + 2) * shape.sums,) * schedule.world
        return part, (rows * shape.features * shape.sums,) * schedule.world
    sent = np.array([[sum(map(len, schedule.asks(a, b))) for b in ranks] for a in ranks])  # [guest, host]
    np.fill_diagonal(sent, 0)
    go, come = ([int(count) * row for count in sent.sum(axis)] for axis in (1, 0))
    forward = tuple(go[a] * shape.features * shape.item + come[a] * (shape.width + 2) * shape.sums for a in ranks)
    backward = tuple((go[a] * (2 * shape.width + 3) + come[a] * shape.features) * shape.sums for a in ranks)
    return forward, backward
