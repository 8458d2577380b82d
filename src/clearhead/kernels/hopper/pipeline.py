"""Rings of tiles in shared memory, as Hopper's kernels pass them from a producer to its consumers; turns; shares."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# the copy engine's verbs and the barrier of a program, where Triton 3.6 has other names for them
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def new_ring(descriptor, CUT: gl.constexpr):
    """Slots for tiles in shared memory; a barrier each for 'it is there' and for 'it has been used by all'."""
    STAGES: gl.constexpr = CUT.value.stages
    SHAPE: gl.constexpr = [STAGES, 1, 1, CUT.value.columns, descriptor.block_shape[3]]
    buffers = gl.allocate_shared_memory(descriptor.dtype, SHAPE, descriptor.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CUT.value.consumers)
    return buffers, full, empty


@gluon.jit
def copy_tile(descriptor, place, key, ring, step, CUT: gl.constexpr):
    """Start to copy a tile of keys or values, from `key` on, into the ring's slot for this step."""
    slot = step % CUT.value.stages
    buffer = ring[0].index(slot)
    full = ring[1].index(slot)
    mbarrier.expect(full, descriptor.block_type.nbytes)
    coordinates = [place[0], place[1], key, 0]
    async_load(descriptor, coordinates, full, buffer)


@gluon.jit
def await_tile(ring, step, CUT: gl.constexpr):
    """Wait until the tile of this step is there."""
    mbarrier.wait(ring[1].index(step % CUT.value.stages), (step // CUT.value.stages) & 1)


@gluon.jit
def tile_of(ring, step, CUT: gl.constexpr):
    """The tile of this step: (columns, width)."""
    tile = ring[0].index(step % CUT.value.stages)
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def release_tile(ring, step, CUT: gl.constexpr):
    """Let the producer fill the slot of this step anew."""
    mbarrier.arrive(ring[2].index(step % CUT.value.stages), count=1)


@gluon.jit
def take_turn(turns, step, INDEX: gl.constexpr, CUT: gl.constexpr):
    """Wait until the consumer before this one has handed its products to the matrix units."""
    if CUT.value.turns:
        mbarrier.wait(turns.index(INDEX), (step & 1) ^ (INDEX == 0))


@gluon.jit
def end_turn(turns, INDEX: gl.constexpr, CUT: gl.constexpr):
    """Let the next consumer hand in its products."""
    if CUT.value.turns:
        mbarrier.arrive(turns.index((INDEX + 1) % CUT.value.consumers), count=1)


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
