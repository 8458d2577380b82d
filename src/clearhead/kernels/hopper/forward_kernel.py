"""Attention on Hopper's own units: copies by descriptor, and matrix products that run while the softmax is computed.

A program owns a block of queries and walks over tiles of keys, from the last tile to the first:

    scores = q @ kᵀ                        (rows, columns)
    peak'  = max(peak, max scores)
    p      = 2^(c·scores − c·peak')        c = scale · log2 e: one multiply-add and one exponential for each score
    total  = total · 2^(c·peak − c·peak') + Σ p
    sums   = sums  · 2^(c·peak − c·peak') + p @ v

One warp, the producer, copies keys and values into two pipelines of tiles in shared memory. The consumers, of four
warps and 64 queries each, compute. The product p @ v of one tile and q @ kᵀ of the next are in flight while a consumer
computes exponentials (`overlap`), and consumers take turns at the matrix units (`turns`), so that one has them while
another computes exponentials. The plan is FlashAttention-3's (Shah and others, 2024, arXiv:2407.08608).

Where there are fewer programs than blocks, each takes several, and the producer copies the tiles of the next block
while the consumers finish the last: blocks that see few keys would otherwise wait longer than they compute.

CONFIG and FORM are the values of `schedule.py` and `forward.py` that say how the work is cut up and what is computed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from clearhead.kernels.hopper.jobs import Bounds, Extent, block_of, seen_by
from clearhead.kernels.hopper.pipeline import (
    Pipeline,
    async_load,
    async_store,
    await_tile,
    barrier,
    copy_tile,
    end_turn,
    job_of,
    new_pipeline,
    others_may_begin,
    release_tile,
    rounds_of,
    take_turn,
    tile_of,
)
from clearhead.kernels.hopper.softmax import (
    Rows,
    Scales,
    added_by_thread,
    added_up,
    as_operand,
    largest_by_group,
    level_of,
    packed,
    relative_to_scaled,
    seen_in,
    soften,
)

PRODUCER_REGISTERS = gl.constexpr(24)
LN2 = gl.constexpr(math.log(2))


class Slopes(NamedTuple):
    """ALiBi's slopes, one a head, and the position of query 0."""

    slopes: Any
    offset: Any


class Outputs(NamedTuple):
    """Where results go; of each row, and the output itself in float32."""

    peak: Any
    total: Any
    lse: Any
    largest: Any
    entropy: Any
    level: Any
    unrounded: Any
    odd: Any


@gluon.jit
def produce(load, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """Copy each block's queries and its tiles, last to first, each as soon as its slot is free."""
    q_rows, k_rows, v_rows, extent, bounds, q_pipeline, k_pipeline, v_pipeline = load
    ROWS: gl.constexpr = CONFIG.value.rows
    CONSUMERS: gl.constexpr = CONFIG.value.consumers
    done = 0
    for round in range(rounds_of(extent.jobs)):
        first, head, batch, tiles = block_of(job_of(round), extent, bounds, FORM, CONFIG)
        base, _, _, end, _ = tiles
        place = (batch, head // extent.group)
        following = base
        if FORM.value.tiles:
            following = gl.load(bounds.tiles + base)
        for step in range(done, done + end):
            key = base + (done + end - 1 - step) * CONFIG.value.columns
            if FORM.value.tiles:  # read one step ahead: nobody waits for it
                key = following * CONFIG.value.columns
                following = gl.load(bounds.tiles + base + gl.minimum(step + 1 - done, end - 1))
            slot = step % CONFIG.value.stages
            phase = ((step // CONFIG.value.stages) & 1) ^ 1
            mbarrier.wait(k_pipeline.empty.index(slot), phase)
            copy_tile(k_rows, place, key, k_pipeline, step, CONFIG)
            if step == done:
                for index in gl.static_range(CONSUMERS):
                    mbarrier.wait(q_pipeline.empty.index(index), (round & 1) ^ 1)
                    full = q_pipeline.full.index(index)
                    mbarrier.expect(full, q_rows.block_type.nbytes)
                    coordinates = [batch, head, first + index * ROWS, 0]
                    async_load(q_rows, coordinates, full, q_pipeline.buffers.index(index))
            mbarrier.wait(v_pipeline.empty.index(slot), phase)
            copy_tile(v_rows, place, key, v_pipeline, step, CONFIG)
        done += end


@gluon.jit
def times_keys(q, k, CONFIG: gl.constexpr):
    """Start q @ kᵀ."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CONFIG.value.columns, 16])
    zeros = gl.full([CONFIG.value.rows, CONFIG.value.columns], 0.0, gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, is_async=True, use_acc=False)


@gluon.jit
def advance(step, state, q, pipelines, turns, last, scales, sees, MASKED: gl.constexpr, INDEX: gl.constexpr,
            FORM: gl.constexpr, CONFIG: gl.constexpr):  # fmt: skip
    """One tile of keys, and the values of the tile before: what is carried along is p, one tile old, and the sums."""
    p, sums, rows = state
    k_pipeline, v_pipeline = pipelines
    p = as_operand(p, q, sums)
    sees = seen_in(last - step, sees, MASKED, FORM, CONFIG)
    await_tile(k_pipeline, step, CONFIG)
    take_turn(turns, step, INDEX, CONFIG)
    scores = times_keys(q, tile_of(k_pipeline, step, CONFIG), CONFIG)
    sums = warpgroup_mma(p, tile_of(v_pipeline, step - 1, CONFIG), sums, is_async=True)
    end_turn(turns, INDEX, CONFIG)
    if CONFIG.value.overlap:
        scores = warpgroup_mma_wait(1, deps=(scores,))
    else:
        scores, sums, p = warpgroup_mma_wait(0, deps=(scores, sums, p))
        release_tile(v_pipeline, step - 1, CONFIG)
    release_tile(k_pipeline, step, CONFIG)
    new, alpha, rows = soften(scores, last - step, rows, scales, sees, MASKED, FORM, CONFIG)
    # a branch: the assembler would move the wait below up, before the exponentials
    await_tile(v_pipeline, step, CONFIG)
    if CONFIG.value.overlap:
        sums, p = warpgroup_mma_wait(0, deps=(sums, p))
        release_tile(v_pipeline, step - 1, CONFIG)
    sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None]
    return packed(new, q), sums, rows


@gluon.jit
def consume(work, INDEX: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """Attention of one consumer's queries of each block."""
    extent = work[2]
    done = 0
    for round in range(rounds_of(extent.jobs)):
        done = attend_block(round, done, work, INDEX, FORM, CONFIG)
    tma.store_wait(0)


@gluon.jit
def attend_block(round, done, work, INDEX: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """Attention of one consumer's queries of a block, from the first product to what is stored."""
    o_rows, outputs, extent, bounds, scales, alibi, q_pipeline, o_block, pipelines, turns = work
    ROWS: gl.constexpr = CONFIG.value.rows
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CONFIG.value.columns, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, FORM.value.head_dim, 16])
    queries, heads = extent.queries, extent.heads
    k_pipeline, v_pipeline = pipelines
    first, head, batch, tiles = block_of(job_of(round), extent, bounds, FORM, CONFIG)
    base, low, high, end, bit = tiles
    first += INDEX * ROWS
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    position = row
    if FORM.value.tiles:
        EACH: gl.constexpr = ROWS * CONFIG.value.consumers * 4
        start = bounds.bits + bit.to(gl.int64) * EACH + INDEX * ROWS * 4
        stop = end
    else:
        start, stop = seen_by(row, batch, base, extent, bounds, FORM)
    slope = 0.0
    if FORM.value.alibi:
        offset = alibi.offset
        if FORM.value.offsets:
            offset = gl.load(offset + batch)
        position = row + offset - base
        slope = gl.load(alibi.slopes + head)
    scales = Scales(scales.scale, scales.softcap, scales.factor, slope)
    sees = (start, stop, position)
    nothing = added_by_thread(gl.full([ROWS, CONFIG.value.columns], 0.0, gl.float32, SCORES))
    lowest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    best = lowest
    if FORM.value.top:
        best = largest_by_group(gl.full([ROWS, CONFIG.value.columns], float("-inf"), gl.float32, SCORES), FORM)
    rows = Rows(lowest, lowest, nothing, nothing, best)
    sums = gl.full([ROWS, FORM.value.head_dim], 0.0, gl.float32, SUMS)

    buffer = q_pipeline.buffers.index(INDEX)
    q = buffer.reshape([ROWS, FORM.value.head_dim])
    seen = seen_in(end - 1, sees, True, FORM, CONFIG)
    mbarrier.wait(q_pipeline.full.index(INDEX), round & 1)
    await_tile(k_pipeline, done, CONFIG)
    take_turn(turns, done, INDEX, CONFIG)
    scores = times_keys(q, tile_of(k_pipeline, done, CONFIG), CONFIG)
    end_turn(turns, INDEX, CONFIG)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    release_tile(k_pipeline, done, CONFIG)
    new, _, rows = soften(scores, end - 1, rows, scales, seen, True, FORM, CONFIG)
    await_tile(v_pipeline, done, CONFIG)
    state = (packed(new, q), sums, rows)
    last = done + end - 1  # tile last − step in this step
    for step in range(done + 1, done + end - high):
        state = advance(step, state, q, pipelines, turns, last, scales, sees, True, INDEX, FORM, CONFIG)
    for step in range(done + end - high, done + end - low):
        state = advance(step, state, q, pipelines, turns, last, scales, sees, False, INDEX, FORM, CONFIG)
    if FORM.value.lower:
        for step in range(done + end - low, done + end):
            state = advance(step, state, q, pipelines, turns, last, scales, sees, True, INDEX, FORM, CONFIG)
    if CONFIG.value.apart:
        mbarrier.arrive(q_pipeline.empty.index(INDEX), count=1)
    p, sums, rows = state
    p = as_operand(p, q, sums)
    done += end
    sums = warpgroup_mma(p, tile_of(v_pipeline, done - 1, CONFIG), sums, is_async=True)
    sums, p = warpgroup_mma_wait(0, deps=(sums, p))
    release_tile(v_pipeline, done - 1, CONFIG)

    peak, shift, total, weighted, best = rows
    rows = Rows(peak, shift, added_up(total, peak), added_up(weighted, peak), best)
    total = gl.convert_layout(rows.total, gl.SliceLayout(1, SUMS))[:, None]
    inverse = 1.0 / gl.where(total == 0, 1.0, total)
    result = gl.where(total == 0, 0.0, sums * inverse)
    if FORM.value.unrounded or FORM.value.marked:
        lines = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        places = (batch * heads + head).to(gl.int64) * queries + first + lines
        there = first + lines < queries
    if FORM.value.unrounded:
        columns = gl.arange(0, FORM.value.head_dim, gl.SliceLayout(0, SUMS))[None, :]
        gl.store(outputs.unrounded + places[:, None] * FORM.value.head_dim + columns, result, there[:, None])
    if FORM.value.marked:
        gl.store(outputs.odd + places, gl.max(gl.where(gl.abs(result) < float("inf"), 0, 1), 1), there)
    output = result.to(q.dtype)
    if CONFIG.value.apart:
        buffer = o_block.index(INDEX)
        tma.store_wait(0)  # of the block before
        barrier()
    buffer.reshape([ROWS, FORM.value.head_dim]).store(output)  # in place of the queries: nobody reads them any more
    fence_async_shared()
    async_store(o_rows, [batch, head, first, 0], buffer)
    place = (batch * heads + head).to(gl.int64) * queries + row
    finish_rows(rows, scales, outputs, place, row < queries, FORM)
    if FORM.value.top:
        level = gl.convert_layout(level_of(rows.best, FORM), gl.SliceLayout(1, SCORES), assert_trivial=True)
        gl.store(outputs.level + 4 + place, level, row < queries)
    if not CONFIG.value.apart:
        tma.store_wait(0)
        mbarrier.arrive(q_pipeline.empty.index(INDEX), count=1)
    return done


@gluon.jit
def finish_rows(rows, scales, outputs, place, inside, FORM: gl.constexpr):
    """What is told of each row: its denominator, log-sum-exp, and on request its largest score and entropy."""
    peak, total, weighted = relative_to_scaled(rows, scales, FORM)
    gl.store(outputs.peak + place, peak, inside)
    gl.store(outputs.total + place, total, inside)
    none = total == 0
    divisor = gl.where(none, 1.0, total)
    logarithm = gl.log2(divisor) * LN2
    gl.store(outputs.lse + place, gl.where(none, float("-inf"), peak + logarithm), inside)
    if FORM.value.entropy:
        gl.store(outputs.largest + place, gl.where(total == total, peak, total), inside)  # a maximum does not keep NaN
        entropy = logarithm - weighted / divisor
        gl.store(outputs.entropy + place, gl.where(none | (entropy < 0), 0.0, entropy), inside)


# Numbers that are stored one by one may begin anywhere. Not so the output in float32, which is room of our own: if it
# might, a thread's two neighbours would go out one by one, half a sector each, and the kernel took up to a third more.
@gluon.jit(
    do_not_specialize=["queries", "keys", "heads", "group", "jobs", "side", "upper", "lower", "several", "offset"],
    do_not_specialize_on_alignment=[
        "peaks",
        "totals",
        "lses",
        "largests",
        "entropies",
        "levels",
        "odd",
        "edges",
        "table",
        "tiles",
        "bits",
        "slopes",
    ],
)
def attend(q_rows, k_rows, v_rows, o_rows, peaks, totals, lses, largests, entropies, levels, unrounded, odd, edges,
           table, tiles, bits, slopes, offset, queries, keys, heads, group, jobs, side, upper, lower, several, scale,
           softcap, factor, FORM: gl.constexpr, CONFIG: gl.constexpr):  # fmt: skip
    """Attention of blocks of queries, one head each."""
    ROWS: gl.constexpr = CONFIG.value.rows
    CONSUMERS: gl.constexpr = CONFIG.value.consumers
    q_block = gl.allocate_shared_memory(q_rows.dtype, [CONSUMERS, 1, 1, ROWS, FORM.value.head_dim], q_rows.layout)
    o_block = q_block
    if CONFIG.value.apart:
        o_block = gl.allocate_shared_memory(q_rows.dtype, [CONSUMERS, 1, 1, ROWS, FORM.value.head_dim], q_rows.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_pipeline = new_pipeline(k_rows, CONFIG)
    v_pipeline = new_pipeline(v_rows, CONFIG)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(index), count=1)
        mbarrier.init(q_empty.index(index), count=1)
        mbarrier.init(turns.index(index), count=1)
    fence_async_shared()
    if FORM.value.looked or FORM.value.marked:
        others_may_begin()
    if FORM.value.looked:
        if gl.program_id(0) == 0:
            gl.store(levels, 0.0)  # of no denominator it is known yet that it is large

    extent = Extent(queries, keys, heads, group, jobs, side)
    bounds = Bounds(upper, lower, edges, table, several, tiles, bits)
    q_pipeline = Pipeline(q_block, q_full, q_empty)
    outputs = Outputs(peaks, totals, lses, largests, entropies, levels, unrounded, odd)
    work = (o_rows, outputs, extent, bounds, Scales(scale, softcap, factor, 0.0), Slopes(slopes, offset),
            q_pipeline, o_block, (k_pipeline, v_pipeline), turns)  # fmt: skip
    load = (q_rows, k_rows, v_rows, extent, bounds, q_pipeline, k_pipeline, v_pipeline)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(consume, (work, 0, FORM, CONFIG)), (produce, (load, FORM, CONFIG))],
            [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(consume, (work, 0, FORM, CONFIG)), (consume, (work, 1, FORM, CONFIG)),
             (produce, (load, FORM, CONFIG))],
            [ROWS // 16, 1], [CONFIG.value.registers, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(consume, (work, 0, FORM, CONFIG)), (consume, (work, 1, FORM, CONFIG)), (consume, (work, 2, FORM, CONFIG)),
             (produce, (load, FORM, CONFIG))],
            [ROWS // 16, ROWS // 16, 1], [CONFIG.value.registers, CONFIG.value.registers, PRODUCER_REGISTERS],
        )  # fmt: skip
