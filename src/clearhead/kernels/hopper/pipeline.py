"""Pipelines of tiles in shared memory, from a producer to its consumers; turns at the matrix units; shares of work."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# the copy engine's verbs and the barrier of a program, where Triton 3.6 has other names for them
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# a kernel launched with `launch_pdl` may begin once all programs of the one before it have said `others_may_begin`, or
# have ended; what those write is there after `await_others`
await_others, others_may_begin = gdc_wait, gdc_launch_dependents


class Pipeline(NamedTuple):
    """Slots for tiles in shared memory; a barrier each for 'it is there' and for 'it has been used by all'."""

    buffers: Any
    full: Any
    empty: Any


@gluon.jit
def new_pipeline(descriptor, CONFIG: gl.constexpr):
    """A pipeline for the tiles of a descriptor."""
    STAGES: gl.constexpr = CONFIG.value.stages
    SHAPE: gl.constexpr = [STAGES, 1, 1, CONFIG.value.columns, descriptor.block_shape[3]]
    buffers = gl.allocate_shared_memory(descriptor.dtype, SHAPE, descriptor.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONFIG.value.consumers)
    return Pipeline(buffers, full, empty)


class QueryPipeline(NamedTuple):
    """Slots for tiles of queries, of gradients, and of their numbers; barriers for 'it is there' and 'it was used'."""

    queries: Any
    douts: Any
    numbers: Any
    full: Any
    empty: Any


@gluon.jit
def new_query_pipeline(q_rows, dout_rows, shifts, CONSUMERS: gl.constexpr, CONFIG: gl.constexpr):
    """A pipeline for tiles of queries, and what belongs to them."""
    STAGES: gl.constexpr = CONFIG.value.stages
    SHAPE: gl.constexpr = [STAGES, 1, 1, CONFIG.value.columns, q_rows.block_shape[3]]
    queries = gl.allocate_shared_memory(q_rows.dtype, SHAPE, q_rows.layout)
    douts = gl.allocate_shared_memory(dout_rows.dtype, SHAPE, dout_rows.layout)
    numbers = gl.allocate_shared_memory(gl.float32, [STAGES * 2, CONFIG.value.columns], shifts.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return QueryPipeline(queries, douts, numbers, full, empty)


@gluon.jit
def copy_tile(descriptor, place, key, pipeline, step, CONFIG: gl.constexpr):
    """Start to copy a tile of keys or values, from `key` on, into the slot for this step."""
    slot = step % CONFIG.value.stages
    buffer = pipeline.buffers.index(slot)
    full = pipeline.full.index(slot)
    mbarrier.expect(full, descriptor.block_type.nbytes)
    coordinates = [place[0], place[1], key, 0]
    async_load(descriptor, coordinates, full, buffer)


@gluon.jit
def await_tile(pipeline, step, CONFIG: gl.constexpr):
    """Wait until the tile of this step is there."""
    mbarrier.wait(pipeline.full.index(step % CONFIG.value.stages), (step // CONFIG.value.stages) & 1)


@gluon.jit
def tile_of(pipeline, step, CONFIG: gl.constexpr):
    """The tile of this step: (columns, head_dim)."""
    tile = pipeline.buffers.index(step % CONFIG.value.stages)
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def release_tile(pipeline, step, CONFIG: gl.constexpr):
    """Let the producer fill the slot of this step anew."""
    mbarrier.arrive(pipeline.empty.index(step % CONFIG.value.stages), count=1)


@gluon.jit
def take_turn(turns, step, INDEX: gl.constexpr, CONFIG: gl.constexpr):
    """Wait until the consumer before this one has handed its products to the matrix units."""
    if CONFIG.value.turns:
        mbarrier.wait(turns.index(INDEX), (step & 1) ^ (INDEX == 0))


@gluon.jit
def end_turn(turns, INDEX: gl.constexpr, CONFIG: gl.constexpr):
    """Let the next consumer hand in its products."""
    if CONFIG.value.turns:
        mbarrier.arrive(turns.index((INDEX + 1) % CONFIG.value.consumers), count=1)


@gluon.jit
def share(job, blocks, total, side):
    """The block and the head of a job, heads of all batch rows counted: `side` heads at a time, first blocks first.

    Where the first blocks have the most to do, none of them starts late but in the last heads. With few heads at a time
    what they read stays in the cache.
    """
    before = job // (blocks * side) * side
    job -= before * blocks
    side = gl.minimum(side, total - before)
    block = job // side
    return block, before + job - block * side


@gluon.jit
def rounds_of(jobs):
    """How many jobs this program has, which programs take by turns: the one with the last of a round takes the next."""
    programs = gl.num_programs(0)
    rounds = jobs // programs
    rest = jobs - rounds * programs
    return rounds + (job_of(rounds) - rounds * programs < rest).to(gl.int32)


@gluon.jit
def job_of(round):
    """This program's job in a round. Jobs come longest first, so that turning around evens out what programs have."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    return round * programs + gl.where(round & 1 != 0, programs - 1 - place, place)
