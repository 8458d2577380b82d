"""Attention on Hopper's own units: copies by descriptor, and matrix products that run while the softmax is computed.

A program owns a block of queries and walks over tiles of keys, from the last tile to the first:

    scores = q @ kᵀ                        (rows, columns)
    peak'  = max(peak, max scores)
    p      = 2^(c·scores − c·peak')        c = scale · log2 e: one multiply-add and one exponential for each score
    total  = total · 2^(c·peak − c·peak') + Σ p
    sums   = sums  · 2^(c·peak − c·peak') + p @ v

One warp, the producer, copies keys and values into two rings of tiles in shared memory. The consumers, of four warps
and 64 queries each, compute. The product p @ v of one tile and q @ kᵀ of the next are in flight while a consumer
computes exponentials (`overlap`), and consumers take turns at the matrix units (`turns`), so that one has them while
another computes exponentials. The plan is FlashAttention-3's (Shah and others, 2024, arXiv:2407.08608).

CUT and FORM are the values of `gluon.py` that say how the work is cut up and what is computed.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(math.log2(math.e))
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def tiles_seen(first, rows: gl.constexpr, keys, upper, lower, FORM: gl.constexpr, N: gl.constexpr):
    """The tiles [begin, end) hold the keys that some query of a block may see; in [low, high) every query sees all."""
    begin = 0
    low = 0
    high = keys // N
    end = keys
    if FORM.value.upper:
        high = gl.minimum(keys, gl.maximum(first + upper + 1, 0)) // N
        end = gl.minimum(keys, gl.maximum(first + rows + upper, 0))
    if FORM.value.lower:
        begin = gl.minimum(gl.maximum(first + lower, 0), keys - 1) // N
        low = (gl.maximum(first + rows - 1 + lower, 0) + N - 1) // N
    # a block that sees nothing still walks over one tile, all of it masked
    end = gl.maximum((end + N - 1) // N, begin + 1)
    low = gl.minimum(gl.maximum(low, begin), end - 1)
    high = gl.maximum(gl.minimum(high, end - 1), low)
    return begin, low, high, end


@gluon.jit
def copy_tile(descriptor, place, tile, ring, step, CUT: gl.constexpr):
    """Start to copy a tile of keys or values into the ring's slot for this step."""
    slot = step % CUT.value.stages
    buffer = ring[0].index(slot)
    full = ring[1].index(slot)
    mbarrier.expect(full, descriptor.block_type.nbytes)
    coordinates = [place[0], place[1], tile * CUT.value.columns, 0]
    tma.async_copy_global_to_shared(descriptor, coordinates, full, buffer)


@gluon.jit
def produce(load, CUT: gl.constexpr):
    """Copy all tiles, last to first, each as soon as its slot is free."""
    k_rows, v_rows, place, tiles, k_ring, v_ring = load
    begin, _, _, end = tiles
    for step in range(end - begin):
        slot = step % CUT.value.stages
        round = step // CUT.value.stages
        mbarrier.wait(k_ring[2].index(slot), (round & 1) ^ 1)
        copy_tile(k_rows, place, end - 1 - step, k_ring, step, CUT)
        mbarrier.wait(v_ring[2].index(slot), (round & 1) ^ 1)
        copy_tile(v_rows, place, end - 1 - step, v_ring, step, CUT)


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
def capped(scores, scale, softcap):
    """softcap · tanh(scale · scores / softcap), by an exponential that may overflow and still be right."""
    doubled = gl.exp2(scores * (scale / softcap * 2 * LOG2E))
    return softcap - 2 * softcap / (doubled + 1)


@gluon.jit
def rounded_product(x, y):
    """x · y rounded to float32, never fused into a sum: all that is computed from c·peak must take the same number."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, True, 1)


@gluon.jit
def soften(scores, tile, rows, numbers, sees, MASKED: gl.constexpr, FORM: gl.constexpr, CUT: gl.constexpr):
    """p for a tile of scores; what the sums so far shrink by; and of each row the peak, c·peak, Σ p and Σ p log2 p.

    With `top`, also the largest score of each of a few groups of keys, key modulo their number.
    """
    peak, shift, total, weighted, best = rows
    scale, softcap, factor = numbers
    start, stop = sees
    if FORM.value.softcap:
        scores = capped(scores, scale, softcap)
    if MASKED:
        column = gl.arange(0, CUT.value.columns, gl.SliceLayout(0, scores.type.layout))
        seen = column[None, :] < (stop - tile * CUT.value.columns)[:, None]
        if FORM.value.lower:
            seen = seen & (column[None, :] >= (start - tile * CUT.value.columns)[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    if FORM.value.top:
        best = gl.maximum(best, largest_by_group(scores, FORM))
        new_peak = gl.convert_layout(gl.max(best, 1), peak.type.layout, assert_trivial=True)
    else:
        new_peak = gl.maximum(peak, gl.max(scores, 1))
    new_shift = rounded_product(new_peak, factor)
    finite = new_shift
    if MASKED:
        finite = gl.where(new_peak == float("-inf"), 0.0, new_shift)  # −inf − −inf is no number
    exponent = scores * factor - finite[:, None]
    p = gl.exp2(exponent)
    shrink = gl.exp2(shift - finite)
    if FORM.value.entropy:
        terms = p * exponent
        if MASKED:
            terms = gl.where(p == 0, 0.0, terms)  # 0 · −inf
        moved = gl.where(peak == float("-inf"), 0.0, shift - finite)
        weighted = (weighted + moved * total) * shrink + gl.sum(terms, 1)
    total = total * shrink + gl.sum(p, 1)
    return p, shrink, (new_peak, new_shift, total, weighted, best)


@gluon.jit
def largest_by_group(scores, FORM: gl.constexpr):
    """The largest score of each row among the keys of each group: (rows, groups), without a word between threads."""
    rows: gl.constexpr = scores.shape[0]
    columns: gl.constexpr = scores.shape[1]
    return gl.max(gl.reshape(scores, [rows, columns // FORM.value.groups, FORM.value.groups]), 1)


@gluon.jit
def level_of(best, FORM: gl.constexpr):
    """A score that at least `top` keys of each row reach, and hardly more: −inf where there are fewer groups."""
    level = gl.max(best, 1)
    for _ in gl.static_range(FORM.value.top - 1):
        best = gl.where(best == level[:, None], float("-inf"), best)
        level = gl.max(best, 1)
    return level


@gluon.jit
def advance(step, state, q, rings, turns, end, numbers, sees, MASKED: gl.constexpr, INDEX: gl.constexpr,
            FORM: gl.constexpr, CUT: gl.constexpr):  # fmt: skip
    """One tile of keys, and the values of the tile before: what is carried along is p, one tile old, and the sums."""
    p, sums, rows = state
    k_ring, v_ring = rings
    p = as_operand(p, q, sums)
    await_tile(k_ring, step, CUT)
    take_turn(turns, step, INDEX, CUT)
    scores = times_keys(q, tile_of(k_ring, step, CUT), CUT)
    sums = warpgroup_mma(p, tile_of(v_ring, step - 1, CUT), sums, is_async=True)
    end_turn(turns, INDEX, CUT)
    if CUT.value.overlap:
        scores = warpgroup_mma_wait(1, deps=(scores,))
    else:
        scores, sums, p = warpgroup_mma_wait(0, deps=(scores, sums, p))
        release_tile(v_ring, step - 1, CUT)
    release_tile(k_ring, step, CUT)
    new, shrink, rows = soften(scores, end - 1 - step, rows, numbers, sees, MASKED, FORM, CUT)
    await_tile(v_ring, step, CUT)  # a branch: the assembler would move the wait below up, before the exponentials
    if CUT.value.overlap:
        sums, p = warpgroup_mma_wait(0, deps=(sums, p))
        release_tile(v_ring, step - 1, CUT)
    sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None]
    return packed(new, q), sums, rows


@gluon.jit
def packed(p, q):
    """p in q's type, two neighbours in one integer: as single halves a loop would carry it in twice the registers."""
    rows: gl.constexpr = p.shape[0]
    columns: gl.constexpr = p.shape[1]
    even, odd = gl.split(gl.reshape(p, [rows, columns // 2, 2]))
    name: gl.constexpr = "bf16x2" if q.dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise("cvt.rn." + name + ".f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, False, 1)


@gluon.jit
def as_operand(pairs, q, sums):
    """p as the left side of a product, from what `packed` gave."""
    rows: gl.constexpr = pairs.shape[0]
    columns: gl.constexpr = pairs.shape[1] * 2
    types: gl.constexpr = (q.dtype, q.dtype)
    even, odd = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], types, True, 1)
    p = gl.reshape(gl.join(even, odd), [rows, columns])
    return gl.convert_layout(p, gl.DotOperandLayout(0, sums.type.layout, 2), assert_trivial=True)


@gluon.jit
def times_keys(q, k, CUT: gl.constexpr):
    """Start q @ kᵀ."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CUT.value.columns, 16])
    zeros = gl.full([CUT.value.rows, CUT.value.columns], 0.0, gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, is_async=True, use_acc=False)


@gluon.jit
def consume(work, INDEX: gl.constexpr, FORM: gl.constexpr, CUT: gl.constexpr):
    """Attention of one consumer's queries, from the first product to what is stored."""
    o_rows, outputs, place, tiles, block, bounds, numbers, q_block, q_full, rings, turns = work
    ROWS: gl.constexpr = CUT.value.rows
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CUT.value.columns, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, FORM.value.width, 16])
    begin, low, high, end = tiles
    first, head = block
    queries, keys, upper, lower = bounds
    k_ring, v_ring = rings
    batch = place[0]
    first += INDEX * ROWS
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    start = row + lower
    stop = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, SCORES)) + keys
    if FORM.value.upper:
        stop = gl.minimum(stop, row + upper + 1)
    sees = (start, stop)
    nothing = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    lowest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    best = lowest
    if FORM.value.top:
        best = largest_by_group(gl.full([ROWS, CUT.value.columns], float("-inf"), gl.float32, SCORES), FORM)
    rows = (lowest, lowest, nothing, nothing, best)
    sums = gl.full([ROWS, FORM.value.width], 0.0, gl.float32, SUMS)

    buffer = q_block.index(INDEX)
    q = buffer.reshape([ROWS, FORM.value.width])
    mbarrier.wait(q_full, 0)
    await_tile(k_ring, 0, CUT)
    take_turn(turns, 0, INDEX, CUT)
    scores = times_keys(q, tile_of(k_ring, 0, CUT), CUT)
    end_turn(turns, INDEX, CUT)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    release_tile(k_ring, 0, CUT)
    new, _, rows = soften(scores, end - 1, rows, numbers, sees, True, FORM, CUT)
    await_tile(v_ring, 0, CUT)
    state = (packed(new, q), sums, rows)
    for step in range(1, end - high):
        state = advance(step, state, q, rings, turns, end, numbers, sees, True, INDEX, FORM, CUT)
    for step in range(end - high, end - low):
        state = advance(step, state, q, rings, turns, end, numbers, sees, False, INDEX, FORM, CUT)
    if FORM.value.lower:
        for step in range(end - low, end - begin):
            state = advance(step, state, q, rings, turns, end, numbers, sees, True, INDEX, FORM, CUT)
    p, sums, rows = state
    p = as_operand(p, q, sums)
    sums = warpgroup_mma(p, tile_of(v_ring, end - begin - 1, CUT), sums, is_async=True)
    sums, p = warpgroup_mma_wait(0, deps=(sums, p))

    total = gl.convert_layout(rows[2], gl.SliceLayout(1, SUMS))[:, None]
    share = 1.0 / gl.where(total == 0, 1.0, total)
    output = gl.where(total == 0, 0.0, sums * share).to(q.dtype)
    q.store(output)  # nobody reads the queries any more
    fence_async_shared()
    tma.async_copy_shared_to_global(o_rows, [batch, head, first, 0], buffer)
    place = (batch * gl.num_programs(1) + head).to(gl.int64) * queries + row
    peak, total, weighted = relative_to_scaled(rows, numbers, FORM)
    gl.store(outputs[0] + place, peak, row < queries)
    gl.store(outputs[1] + place, total, row < queries)
    if FORM.value.entropy:
        gl.store(outputs[2] + place, weighted, row < queries)
    if FORM.value.top:
        level = gl.convert_layout(level_of(rows[4], FORM), gl.SliceLayout(1, SCORES), assert_trivial=True)
        gl.store(outputs[3] + place, level, row < queries)
    tma.store_wait(0)


@gluon.jit
def relative_to_scaled(rows, numbers, FORM: gl.constexpr):
    """The peak times scale, and for it Σ e^x and Σ x e^x: p was relative to c·peak as rounded, a little off."""
    peak, shift, total, weighted, _ = rows
    scale, _, factor = numbers
    if FORM.value.softcap:
        scale = 1.0
    scaled = rounded_product(peak, scale)
    slip = (peak * scale - scaled) * LOG2E - (peak * factor - shift)  # each a multiply-add: what rounding took away
    slip = gl.where(peak == float("-inf"), 0.0, slip)
    return scaled, total * gl.exp2(slip), (weighted + slip * total) * gl.exp2(slip) / LOG2E


@gluon.jit(
    do_not_specialize=["queries", "keys", "group", "upper", "lower"],
    do_not_specialize_on_alignment=["peaks", "totals", "weighteds", "levels"],
)
def attend(q_rows, k_rows, v_rows, o_rows, peaks, totals, weighteds, levels, queries, keys, group, upper, lower,
           scale, softcap, factor, FORM: gl.constexpr, CUT: gl.constexpr):  # fmt: skip
    """Attention of one block of queries of one head."""
    ROWS: gl.constexpr = CUT.value.rows
    CONSUMERS: gl.constexpr = CUT.value.consumers
    # the last queries of a causal head see the most keys: they go first, and one head after another shares its keys
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * (ROWS * CONSUMERS)
    head = gl.program_id(1)
    batch = gl.program_id(2)
    place = (batch, head // group)
    tiles = tiles_seen(first, ROWS * CONSUMERS, keys, upper, lower, FORM, CUT.value.columns)

    q_block = gl.allocate_shared_memory(q_rows.dtype, [CONSUMERS, 1, 1, ROWS, FORM.value.width], q_rows.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    k_ring = new_ring(k_rows, CUT)
    v_ring = new_ring(v_rows, CUT)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(index), count=1)
    fence_async_shared()

    mbarrier.expect(q_full, CONSUMERS * q_rows.block_type.nbytes)
    for index in gl.static_range(CONSUMERS):
        rows = first + index * ROWS
        tma.async_copy_global_to_shared(q_rows, [batch, head, rows, 0], q_full, q_block.index(index))

    numbers = (scale, softcap, factor)
    bounds = (queries, keys, upper, lower)
    work = (o_rows, (peaks, totals, weighteds, levels), place, tiles, (first, head), bounds, numbers, q_block, q_full,
            (k_ring, v_ring), turns)  # fmt: skip
    load = (k_rows, v_rows, place, tiles, k_ring, v_ring)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(consume, (work, 0, FORM, CUT)), (produce, (load, CUT))],
            [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(consume, (work, 0, FORM, CUT)), (consume, (work, 1, FORM, CUT)),
             (produce, (load, CUT))],
            [ROWS // 16, 1], [CUT.value.registers, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(consume, (work, 0, FORM, CUT)), (consume, (work, 1, FORM, CUT)), (consume, (work, 2, FORM, CUT)),
             (produce, (load, CUT))],
            [ROWS // 16, ROWS // 16, 1], [CUT.value.registers, CUT.value.registers, PRODUCER_REGISTERS],
        )  # fmt: skip


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
