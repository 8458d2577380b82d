"""Tiles of queries for the second look: how they come into shared memory, and where the numbers of each query lie."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from clearhead.kernels.hopper.bins_kernel import LAID_OUT, first_of_tile
from clearhead.kernels.hopper.pipeline import async_load

PRODUCER_REGISTERS = gl.constexpr(24)


class LookPipeline(NamedTuple):
    """Slots for tiles of queries and of their numbers; barriers for 'it is there' and 'it was used'."""

    queries: Any
    numbers: Any
    full: Any
    empty: Any


class QueryTiles(NamedTuple):
    """What a program is brought, and where to; `place` is a batch row, a head, and both as one number."""

    q_rows: Any
    shifts: Any
    place: Any
    tiles: Any
    bins: Any
    numbers: Any
    pipeline: Any


@gluon.jit
def produce(load, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """Copy all tiles of queries and what belongs to them, each as soon as its slot is free."""
    begin, _, _, end = load.tiles
    for tile in range(begin, end):
        slot = (tile - begin) % CONFIG.value.stages
        mbarrier.wait(load.pipeline.empty.index(slot), (((tile - begin) // CONFIG.value.stages) & 1) ^ 1)
        bring(tile, load, FORM, CONFIG)


@gluon.jit
def bring(tile, load, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """Start to copy a tile of queries and what belongs to it into its slot, which is free."""
    q_rows, shifts, place, tiles, bins, numbers, pipeline = load
    batch, head, number = place
    N: gl.constexpr = CONFIG.value.columns
    COPIES: gl.constexpr = FORM.value.parts * N // shifts.block_shape[0]
    slot = (tile - tiles[0]) % CONFIG.value.stages
    full = pipeline.full.index(slot)
    mbarrier.expect(full, q_rows.block_type.nbytes + COPIES * shifts.block_type.nbytes)
    listed = tile
    if FORM.value.tiles:
        listed = gl.load(numbers + tile)
    async_load(q_rows, [batch, head, first_of_tile(listed, bins, N), 0], full, pipeline.queries.index(slot))
    entry = (number * bins.count * bins.each + listed) * (LAID_OUT * N)
    for copy in gl.static_range(COPIES):
        place = entry + copy * shifts.block_shape[0]
        async_load(shifts, [place], full, pipeline.numbers.index(slot * COPIES + copy))


@gluon.jit
def numbers_of(pipeline, slot, part: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """In shared memory, one number of each query of a tile: shifts, levels or corrections."""
    N: gl.constexpr = CONFIG.value.columns
    TOGETHER: gl.constexpr = pipeline.numbers.shape[1] // N
    COPIES: gl.constexpr = FORM.value.parts // TOGETHER
    return pipeline.numbers.index(slot * COPIES + part // TOGETHER).slice(part % TOGETHER * N, N)


@gluon.jit
def produce_either(load, large, FORM: gl.constexpr, CAREFUL: gl.constexpr, CONFIG: gl.constexpr):
    """What that form is brought. Where it is the same for both, nobody waits to be told which it is."""
    if FORM.value.parts == CAREFUL.value.parts:
        produce(load, FORM, CONFIG)
    elif gl.load(large) != 0:
        produce(load, CAREFUL, CONFIG)
    else:
        produce(load, FORM, CONFIG)
