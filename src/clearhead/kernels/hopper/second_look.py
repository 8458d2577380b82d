"""Launching Hopper's second look (`weights_kernel.py`, `choose_kernel.py`): received, pooled map, largest weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from clearhead.core.observations import Map, Top
from clearhead.kernels.gpu.bypass import descriptor_of
from clearhead.kernels.gpu.call import processors
from clearhead.kernels.gpu.launcher import Launcher
from clearhead.kernels.gpu.observe_kernel import pool
from clearhead.kernels.gpu.repair import begun_early
from clearhead.kernels.gpu.tuning import pooling
from clearhead.kernels.hopper.accepts import MOST_HEADS
from clearhead.kernels.hopper.bins_kernel import ROWS_OF_NUMBERS, lay_out
from clearhead.kernels.hopper.choose_kernel import choose
from clearhead.kernels.hopper.forward import Done, described
from clearhead.kernels.hopper.mend import Searched
from clearhead.kernels.hopper.parts_kernel import add_parts
from clearhead.kernels.hopper.schedule import KeyRanges, side_by_side
from clearhead.kernels.hopper.tile_runs import TileRuns
from clearhead.kernels.hopper.top_kernel import HELD, KeyEdges, ending, offering, search
from clearhead.kernels.hopper.weights_kernel import by_key

CHOOSING = 4  # warps that choose the largest, of so many queries each:
SORTED, BY_ROUNDS = 16, 8
SEARCHED = 64  # queries whose largest are searched for together
MOST_COPIED = 256  # numbers side by side that one copy brings
EVENLY = 1.5  # causal programs for each that runs at once, from which on their shares are about even, measured


@dataclass(frozen=True)
class LookConfig:
    """How the work is cut up: `rows` keys a consumer, 16 for each of its warps; `columns` queries a tile."""

    columns: int = 128
    stages: int = 3
    consumers: int = 3
    rows: int = 64
    registers: int = 160
    offered: int = 16  # weights that a thread compares with their levels at once: 16 or 32
    pending: int = 2  # candidates of a thread that wait for their places on lists: 2 or 4
    limit: int = 0  # registers of a thread in the mean, so that several programs run on a processor; 0: all that it has

    @property
    def offering(self) -> tuple[str, str]:
        """Assembly by which the weights of a tile are offered to the largest, and its constraints."""
        return offering(self.offered, self.pending)

    @property
    def ending(self) -> tuple[str, str]:
        """The same for the end."""
        return ending(self.offered, self.pending)


# By head_dim, under a mask of any kind: blocks and tiles of a power of two, as masks are looked at. Lists are short,
# and a program's beginning, its products and the places on lists that it asks for are waited for. So programs are
# small, with one consumer, and as many as registers and shared memory hold run on a processor: four. Where queries see
# few keys more of them are candidates, often several of one thread.
LISTED = {
    64: LookConfig(64, 3, 1, offered=32, pending=4, limit=64),
    128: LookConfig(64, 2, 1, offered=32, pending=4, limit=64),
    256: LookConfig(64, 3, 2, registers=240, offered=32, pending=4),
}


@dataclass(frozen=True)
class LookForm:
    """What is wanted, as far as it changes the code."""

    head_dim: int
    upper: bool  # query i sees no key after i + upper
    lower: bool  # query i sees no key before i + lower
    softcap: bool
    received: bool
    map: bool
    pooled: bool  # the keys of a warp are in one cell of the map
    top: bool
    even: bool  # all bins have the same number of queries
    tiles: bool = False  # a mask of any kind, by lists of tiles
    some: bool = False  # of such a mask, not all queries count
    halved: bool = False  # two programs share a block of keys
    sided: bool = False  # programs are numbered by several heads at a time, block by block
    careful: bool = False

    @property
    def parts(self) -> int:
        """How many numbers of each query are brought with it: its shift, or all that are laid out."""
        return ROWS_OF_NUMBERS if self.careful or self.top else 1


class Masked(NamedTuple):
    """A mask of any kind: for each block of keys the tiles of queries; and as the program that says who sees whom.

    And the run of keys that each query sees, where that is how the forward took it.
    """

    runs: TileRuns
    program: tuple[tuple[int, ...], ...]
    arrays: tuple[Any, ...]
    ranges: KeyRanges | None = None


class Observations(NamedTuple):
    """What was wanted: (B, H, S); (B, H, rows, columns) twice; (B, H, T, top) twice."""

    received: torch.Tensor | None = None
    map: Map | None = None
    top: Top | None = None


def look(
    q: torch.Tensor,
    k: torch.Tensor,
    done: Done,
    scale: float,
    causal_offset: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    received: int | None = None,
    map: tuple[int, int] | None = None,
    top: int = 0,
    masked: Masked | None = None,
    launch: Launcher | None = None,
    searching: Callable[[Searched], None] | None = None,
) -> Observations:
    """What each key received of the last `received` queries, the weights pooled, the `top` largest of each query.

    q (B, H, T, D), k (B, Hk, S, D) and the rest as `forward` took them; `done` is what it gave, with the same
    `top`. Under a mask of any kind there is no map. Calls with one `launch` are of one kind. Everything comes from one
    product of all queries with all keys, or two where `received` counts but some. `searching` looks again, in place of
    `search`, at queries with more candidates than their lists hold.
    """
    batch, heads, queries, head_dim = q.shape
    if received is not None and received < queries and (map or top):
        options = (q, k, done, scale, causal_offset, window, softcap)
        alone = look(*options, received=received, masked=masked, launch=launch)
        rest = look(*options, map=map, top=top, masked=masked, launch=launch, searching=searching)
        return rest._replace(received=alone.received)
    keys = k.shape[2]
    launch = launch or Launcher()
    new = partial(launch.room, dtype=torch.float32, device=q.device)
    count, cells = (min(map[0], queries), min(map[1], keys)) if map else (1, 1)
    got = new((batch, heads, keys)) if received is not None else None
    if not q.shape[:3].numel() or not keys:
        flat = Map(*new((2, batch, heads, count, cells)).zero_()) if map else None
        none = torch.full((batch, heads, queries, top), -1, device=q.device)
        best = Top(none, new(none.shape).zero_()) if top else None
        return Observations(None if got is None else got.zero_(), flat, best)
    largest = -(-queries // count)  # bin
    config = preferred(head_dim, largest, bool(top), bool(map)) if masked is None else LISTED[head_dim]
    each = -(-largest // config.columns)
    pooled = bool(map) and keys % (cells * 16) == 0
    units = keys // 16 if pooled else keys
    strips = batch * heads * count * units if map else 0
    shifts = new((batch * heads * count * each * config.columns * ROWS_OF_NUMBERS,))
    sums = tops = shifts
    if map:  # strips of keys that no query of a bin sees are not written
        padded = -(-strips // 4) * 4
        sums, tops = launch.zeros((2 * padded,), torch.float32, q.device).split_with_sizes((padded, padded))
    assert done.levels is not None
    large = done.levels.view(torch.int32)
    counts = launch.room((batch, heads, queries), torch.int32, q.device) if top else large
    found = launch.room((batch, heads, queries, HELD) if top else (0,), torch.int64, q.device)
    skipped = 0 if received is None else max(queries - received, 0)
    upper = causal_offset or 0
    lower = upper - (window or 0)
    factor = (scale if softcap is None else 1.0) * math.log2(math.e)
    blocks = -(-keys // (config.rows * config.consumers))
    parts = None
    causal = causal_offset is not None and window is None
    enough = seats(config, q.device) * (EVENLY if causal else 1)
    halved = masked is None and not map and blocks * batch * heads < enough
    sided = causal and blocks <= MOST_HEADS
    plain, careful = looks(
        head_dim, causal_offset is not None, window is not None, softcap is not None, got is not None, bool(map),
        pooled, bool(top), queries % count == 0, masked is not None, masked is not None and skipped > 0, halved,
        sided,
    )  # fmt: skip
    name = (received, map, top)
    launch(
        ("lay out", name), lay_out, (count * each, batch * heads),
        done.peak, done.total, done.levels[4:] if top else done.peak, shifts, large, counts,
        shifts if got is None else got, queries, keys, skipped, count, each, queries // count,
        scale if softcap is None else 1.0, factor, config.columns, plain.even, not map, bool(top),
        halved and got is not None,
        num_warps=1, launch_pdl=True,
    )  # fmt: skip
    rows = (
        described(q, queries, config.columns),
        described(k, keys, config.rows),
        described_numbers(shifts, min(config.columns * ROWS_OF_NUMBERS, MOST_COPIED) if top else config.columns),
    )
    side = side_by_side(blocks, batch * heads, q.device) if sided else 1
    grid: tuple[int, ...] = (blocks * (1 + halved), 1, batch * heads)
    if sided:
        grid = (side * (1 + halved), blocks, -(-batch * heads // side))
    lists = (large, large, large) if masked is None else (masked.runs.table, masked.runs.tiles, masked.runs.bits)
    if masked is not None:  # of a block that most queries see there are several
        side = masked.runs.each
        grid = (len(masked.runs.table) * side,)
        if got is not None and masked.runs.added is not None:
            parts = new((masked.runs.places * side, config.rows * config.consumers))
    launch(
        ("by key", name), by_key, grid,
        *rows, sums if got is None else got, sums if parts is None else parts, sums, tops, counts, found,
        large, *lists, queries, keys, heads, batch * heads, side, heads // k.shape[1], skipped, upper, lower, count,
        each, queries // count, scale, softcap or 1.0, factor, plain, careful, config, num_warps=config.rows // 16,
        launch_pdl=True,
        **({"maxnreg": config.limit} if config.limit else {}),
    )  # fmt: skip
    if parts is not None and masked is not None and masked.runs.added is not None:
        launch(
            ("add parts", name), add_parts, (len(masked.runs.added) * side,),
            got, parts, masked.runs.added, keys, heads, side, config.rows * config.consumers, num_warps=1,
            launch_pdl=True,
        )  # fmt: skip
    flat = None
    if map:
        flat = Map(new((batch, heads, count, cells)), new((batch, heads, count, cells)))
        at_once, units_at_once = pooling(units, cells)
        launch(
            ("pool", name), pool, (batch * heads * count, -(-cells // at_once)),
            sums, tops, *flat, units, queries, keys, count, cells, 0, EVEN=plain.even and units % cells == 0,
            CELLS=at_once, BN=units_at_once, num_warps=2,
        )  # fmt: skip
    best = None
    if top:
        shape = (batch, heads, queries, top)
        best = Top(launch.room(shape, torch.int64, q.device), new(shape))
        power = 1 << (top - 1).bit_length()
        at_once = CHOOSING * (SORTED if top <= 8 else BY_ROUNDS)
        launch(
            ("choose", name), choose, (-(-batch * heads * queries // at_once),),
            counts, found, done.peak, done.total, best.weights, best.indices, batch * heads * queries,
            scale if softcap is None else 1.0, factor, top, power, num_warps=CHOOSING,
            launch_pdl=True,
        )  # fmt: skip
        constants = {
            "TOP": top, "K": max(2, power), "HEAD_DIM": head_dim, "UPPER": plain.upper,
            "LOWER": plain.lower, "PROGRAM": None if masked is None else masked.program, "SOFTCAP": plain.softcap,
            "HELD": HELD,
        }  # fmt: skip
        numbers = (heads // k.shape[1], upper, lower, scale, softcap or 1.0, factor)
        if searching is not None:
            searching(Searched(counts, done.peak, done.total, best.weights, best.indices, numbers, constants))
            return Observations(got, flat, best)
        if q.stride(-1) != 1 or k.stride(-1) != 1:
            q, k = q.contiguous(), k.contiguous()
        ranges = None if masked is None else masked.ranges
        several = batch * heads * -(-queries // SEARCHED)
        programs = min(several, processors(q.device))
        launch(
            ("search", name), search, (programs,),
            q, k, counts, done.peak, done.total, best.weights, best.indices, *q.stride()[:3], *k.stride()[:3],
            queries, keys, -(-several // programs), several, heads, *numbers[:3],
            () if masked is None else masked.arrays, edges_of(ranges, queries), *numbers[3:],
            **constants, RUNS=ranges is not None, BM=SEARCHED, BN=64, N=1024,
            num_warps=4, num_stages=1, **begun_early(q.device),
        )  # fmt: skip
    return Observations(got, flat, best)


def edges_of(ranges: KeyRanges | None, queries: int) -> tuple[Any, ...]:
    """Runs of keys as `search` takes them."""
    return () if ranges is None else KeyEdges(ranges.edges, 2 * queries * (len(ranges.edges) > 1), ranges.start)


@lru_cache(maxsize=256)
def looks(*given: Any) -> tuple[LookForm, LookForm]:
    """The quick form and the careful one."""
    form = LookForm(*given)
    return form, replace(form, careful=True)


@lru_cache(maxsize=256)
def preferred(head_dim: int, bin: int, top: bool, map: bool) -> LookConfig:
    """The config for a head_dim, the number of queries in a bin of a map, and whether the largest and a map are wanted.

    Measured on an H200. Where the largest are wanted and no map, two programs on a processor take five sixths of the
    time of one at 4,096 tokens, and nine tenths at 16,384.
    """
    if head_dim == 256:
        return LookConfig(64, 3, 2, 64, 240)
    if top and not map:
        return LookConfig(64, 4, 2, 64, 104, offered=32, limit=80)
    return LookConfig(64 if bin <= 64 else 128, 4 if top else 3, offered=16 if bin <= 64 else 32)


def seats(config: LookConfig, device: torch.device) -> int:
    """How many programs run at once."""
    return processors(device) * (2 if config.limit else 1)


def described_numbers(array: torch.Tensor, columns: int) -> Any:
    """A descriptor of numbers for each query, read by tiles."""
    return descriptor_of(
        TensorDescriptor, array, shape=[array.numel()], strides=[1], block_shape=[columns], layout=tiles_of(columns)
    )


@cache
def tiles_of(columns: int) -> Any:
    """How such a tile lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([columns], gl.float32)
