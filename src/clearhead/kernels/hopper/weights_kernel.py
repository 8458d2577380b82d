"""The second look on Hopper's own units: weights again from queries, keys and denominators, read by keys.

A program owns a block of keys, and tiles of queries go by. A weight is 2^(c·score − shift), where `shift` of a query is
c·peak + log2 total, so that a weight costs one multiply-add and one exponential, as in the forward. What a key receives
and its part of a map are sums along a row of

    scores = k @ qᵀ                        (rows of keys, columns of queries)

and so stay in registers: no other program adds to them, and every run gives the same bits.

One warp, the producer, copies tiles of queries and their shifts into a pipeline in shared memory. A tile never crosses
an edge of the map: each bin of queries has `each` tiles of its own, and what a tile has beyond its bin has the shift
+inf, which makes the weight 0; so do queries that see nothing.

CONFIG and FORM are the values of `second_look.py` that say how the work is cut up and what is wanted.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from clearhead.kernels.hopper.pipeline import async_load, share
from clearhead.kernels.hopper.softmax import capped
from clearhead.kernels.hopper.top_kernel import denominator, offer

LOG2E = gl.constexpr(math.log2(math.e))
PRODUCER_REGISTERS = gl.constexpr(24)


class Bins(NamedTuple):
    """Bins of queries, the rows of a map: how many of both, tiles of each bin, its queries if all have as many."""

    queries: Any
    count: Any
    each: Any
    size: Any
    even: Any


class LookPipeline(NamedTuple):
    """Slots for tiles of queries and of their numbers; barriers for 'it is there' and 'it was used'."""

    queries: Any
    numbers: Any
    full: Any
    empty: Any


class LookOutputs(NamedTuple):
    """Where results go: by key, by key and bin twice, and by query how many of the largest, and which."""

    received: Any
    sums: Any
    tops: Any
    counts: Any
    found: Any


@gluon.jit
def tile_of_row(row, bins, N: gl.constexpr):
    """The tile that holds a query."""
    queries, count, each, _, _ = bins
    bin = (row.to(gl.int64) * count // queries).to(gl.int32)
    return bin * each + (row - first_of_bin(bin, bins)) // N


@gluon.jit
def first_of_bin(bin, bins):
    """The first query of a bin."""
    queries, count, _, size, even = bins
    first = bin * size
    if not even:
        first = ((bin.to(gl.int64) * queries + count - 1) // count).to(gl.int32)
    return first


@gluon.jit
def first_of_tile(tile, bins, N: gl.constexpr):
    """The first query of a tile."""
    bin = tile // bins.each
    return first_of_bin(bin, bins) + (tile - bin * bins.each) * N


@gluon.jit
def tiles_seen(first, rows: gl.constexpr, bins, upper, lower, FORM: gl.constexpr, N: gl.constexpr):
    """The tiles [begin, end) hold the queries that see some key of a block; those in [low, high) see all of it."""
    queries, count, each, _, _ = bins
    begin = 0
    end = count * each
    low = 0
    high = end
    if FORM.value.upper:
        seen = gl.maximum(first - upper, 0)
        whole = gl.maximum(first + rows - 1 - upper, 0)
        begin = gl.where(seen < queries, tile_of_row(gl.minimum(seen, queries - 1), bins, N), end)
        low = tile_of_row(gl.minimum(whole, queries - 1), bins, N)
        low = gl.where(first_of_tile(low, bins, N) < whole, low + 1, low)
    if FORM.value.lower:
        last = gl.minimum(first + rows - 1 - lower, queries - 1)
        whole = gl.minimum(first - lower - N + 1, queries - 1)
        end = gl.where(last >= 0, tile_of_row(gl.maximum(last, 0), bins, N) + 1, 0)
        high = gl.where(whole >= 0, tile_of_row(gl.maximum(whole, 0), bins, N) + 1, 0)
    end = gl.maximum(begin, end)
    low = gl.minimum(gl.maximum(low, begin), end)
    high = gl.maximum(gl.minimum(high, end), low)
    return begin, low, high, end


@gluon.jit
def produce(load, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """Copy all tiles of queries and what belongs to them, each as soon as its slot is free."""
    q_rows, shifts, place, tiles, bins, pipeline = load
    batch, head, number = place
    begin, _, _, end = tiles
    N: gl.constexpr = CONFIG.value.columns
    PARTS: gl.constexpr = 3 if FORM.value.careful else 2 if FORM.value.top else 1
    for tile in range(begin, end):
        slot = (tile - begin) % CONFIG.value.stages
        round = (tile - begin) // CONFIG.value.stages
        mbarrier.wait(pipeline.empty.index(slot), (round & 1) ^ 1)
        full = pipeline.full.index(slot)
        mbarrier.expect(full, q_rows.block_type.nbytes + PARTS * shifts.block_type.nbytes)
        async_load(q_rows, [batch, head, first_of_tile(tile, bins, N), 0], full, pipeline.queries.index(slot))
        entry = (number * bins.count * bins.each + tile) * 3
        for part in gl.static_range(PARTS):
            async_load(shifts, [(entry + part) * N], full, pipeline.numbers.index(slot * PARTS + part))


@gluon.jit
def times_queries(k, pipeline, step, CONFIG: gl.constexpr):
    """Wait for a tile of queries and start k @ qᵀ."""
    slot = step % CONFIG.value.stages
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CONFIG.value.columns, 16])
    zeros = gl.full([CONFIG.value.rows, CONFIG.value.columns], 0.0, gl.float32, layout)
    mbarrier.wait(pipeline.full.index(slot), (step // CONFIG.value.stages) & 1)
    tile = pipeline.queries.index(slot)
    q = tile.reshape([tile.shape[2], tile.shape[3]])
    return warpgroup_mma(k, q.permute((1, 0)), zeros, is_async=True, use_acc=False)


@gluon.jit
def in_thread(x):
    """Columns that one thread holds along the middle axis: (rows, columns / 8, 8)."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return gl.reshape(x, [rows, columns // 8, 8])


@gluon.jit
def exponents(scores, shift, first, sees, scales, MASKED: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """log2 of the weights of a tile."""
    scale, softcap, factor = scales
    start, stop = sees
    if FORM.value.softcap:
        scores = capped(scores, scale, softcap)
    exponent = scores * factor - shift[None, :]
    if MASKED:
        column = gl.arange(0, CONFIG.value.columns, gl.SliceLayout(0, scores.type.layout))[None, :]
        seen = (column >= (start - first)[:, None]) & (shift != float("inf"))[None, :]  # a hidden key may hold NaN
        if FORM.value.lower:
            seen = seen & (column <= (stop - first)[:, None])
        exponent = gl.where(seen, exponent, float("-inf"))
    return exponent


@gluon.jit
def end_bin(state, outputs, key, keys, number, bins, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """A bin of queries is done: its sums and largest weights go to the strip, and the sums to what was received."""
    received, sums, tops, bin, _ = state
    if FORM.value.map:
        unit = key
        units = keys
        sum = gl.sum(sums, 1)
        top = gl.max(tops, 1)
        if FORM.value.careful:
            top = gl.maximum(top, 0.0)
        else:
            top = gl.exp2(top)
        if FORM.value.pooled:  # the keys of a warp become one
            WARPS: gl.constexpr = CONFIG.value.rows // 16
            sum = gl.sum(gl.reshape(sum, [WARPS, 16]), 1)
            top = gl.max(gl.reshape(top, [WARPS, 16]), 1)
            unit = gl.max(gl.reshape(gl.convert_layout(key, gl.SliceLayout(1, sums.type.layout)), [WARPS, 16]), 1) // 16
            units = keys // 16
        else:
            unit = gl.convert_layout(key, sum.type.layout)
        place = (number.to(gl.int64) * bins.count + bin) * units + unit
        gl.store(outputs.sums + place, sum, unit < units)
        top = gl.convert_layout(top, sum.type.layout)
        gl.store(outputs.tops + place, gl.where(sum == sum, top, sum), unit < units)  # a maximum does not keep NaN
    if FORM.value.received:
        received += sums
    nothing = gl.full(sums.shape, 0.0, gl.float32, sums.type.layout)
    return received, nothing, nothing + float("-inf"), bin + 1, bins.each


@gluon.jit
def consume(work, INDEX: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """All that one consumer's keys receive, bin by bin."""
    outputs, first, number, tiles, bins, bounds, _, k_block, k_full, _ = work
    ROWS: gl.constexpr = CONFIG.value.rows
    N: gl.constexpr = CONFIG.value.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    begin, low, high, end = tiles
    keys, upper, lower = bounds
    key = first + INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    start = gl.full([ROWS], -(2**30), gl.int32, gl.SliceLayout(1, LAYOUT))
    if FORM.value.upper:
        start = key - upper
    sees = (gl.where(key < keys, start, 2**30), key - lower)  # nobody sees what is not a key
    if FORM.value.top and first + ROWS * CONFIG.value.consumers > keys:
        low = end
        high = end
    nothing = gl.sum(in_thread(gl.full([ROWS, N], 0.0, gl.float32, LAYOUT)), 1)
    bin = begin // bins.each
    state = (nothing, nothing, nothing + float("-inf"), bin, (bin + 1) * bins.each - begin)
    k = k_block.index(INDEX).reshape([ROWS, FORM.value.head_dim])
    mbarrier.wait(k_full, 0)
    for tile in range(begin, low):
        state = advance(tile, state, work, k, key, sees, True, FORM, CONFIG)
    for tile in range(low, high):
        state = advance(tile, state, work, k, key, sees, False, FORM, CONFIG)
    if FORM.value.lower:
        for tile in range(high, end):
            state = advance(tile, state, work, k, key, sees, True, FORM, CONFIG)
    if FORM.value.map and begin < end and state[4] < bins.each:
        state = end_bin(state, outputs, key, keys, number, bins, FORM, CONFIG)
    if FORM.value.received:
        received, sums, _, _, _ = state
        total = gl.sum(received + sums, 1)
        place = gl.convert_layout(key, total.type.layout)
        gl.store(outputs.received + number.to(gl.int64) * keys + place, total, place < keys)


@gluon.jit
def advance(tile, state, work, k, key, sees, MASKED: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """One tile of queries."""
    outputs, _, number, tiles, bins, bounds, scales, _, _, pipeline = work
    step = tile - tiles[0]
    scores = times_queries(k, pipeline, step, CONFIG)
    slot = step % CONFIG.value.stages
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CONFIG.value.columns, 16])
    PARTS: gl.constexpr = 3 if FORM.value.careful else 2 if FORM.value.top else 1
    shift = pipeline.numbers.index(slot * PARTS).load(gl.SliceLayout(0, layout))
    scores = warpgroup_mma_wait(0, deps=(scores,))
    received, sums, tops, bin, left = state
    first = first_of_bin(bin, bins) + (bins.each - left) * CONFIG.value.columns
    exponent = exponents(scores, shift, first, sees, scales, MASKED, FORM, CONFIG)
    if FORM.value.top:
        levels = pipeline.numbers.index(slot * PARTS + 1)
        offset = number.to(gl.int64) * bins.queries
        offer(exponent, levels, key, first, outputs.counts, outputs.found, offset, CONFIG.value.offered)
    weight = gl.exp2(exponent)
    if FORM.value.careful:
        weight *= pipeline.numbers.index(slot * PARTS + 2).load(gl.SliceLayout(0, layout))[None, :]
        exponent = weight  # the largest is sought among weights: what is to be multiplied in differs by query
    mbarrier.arrive(pipeline.empty.index(slot), count=1)
    sums += gl.sum(in_thread(weight), 1)
    if FORM.value.map:
        tops = gl.maximum(tops, gl.max(in_thread(exponent), 1))
    state = (received, sums, tops, bin, left - 1)
    if left == 1:
        state = end_bin(state, outputs, key, bounds[0], number, bins, FORM, CONFIG)
    return state


@gluon.jit(
    do_not_specialize=["queries", "keys", "heads", "total", "side", "group", "upper", "lower", "count", "each", "size"],
    do_not_specialize_on_alignment=["received", "sums", "tops", "counts", "found", "large"],
)
def by_key(q_rows, k_rows, shifts, received, sums, tops, counts, found, large, queries, keys, heads, total, side,
           group, upper, lower, count, each, size, scale, softcap, factor,
           FORM: gl.constexpr, CONFIG: gl.constexpr):  # fmt: skip
    """What a block of keys of one head received: of all queries, and of each of `count` bins of them.

    The careful form, which also multiplies by what the rounding of a shift takes away, runs where `large` says that
    some shift is large, and the other where it does not.
    """
    if (gl.load(large) != 0) != FORM.value.careful:
        return
    ROWS: gl.constexpr = CONFIG.value.rows
    STAGES: gl.constexpr = CONFIG.value.stages
    CONSUMERS: gl.constexpr = CONFIG.value.consumers
    PARTS: gl.constexpr = 3 if FORM.value.careful else 2 if FORM.value.top else 1
    N: gl.constexpr = CONFIG.value.columns
    blocks = (keys + ROWS * CONSUMERS - 1) // (ROWS * CONSUMERS)
    block, number = share(gl.program_id(0), blocks, total, side)
    first = block * (ROWS * CONSUMERS)  # the first keys of a causal head are seen by most: they go first
    head = number % heads
    batch = number // heads
    bins = Bins(queries, count, each, size, FORM.value.even)
    tiles = tiles_seen(first, ROWS * CONSUMERS, bins, upper, lower, FORM, N)

    k_block = gl.allocate_shared_memory(k_rows.dtype, [CONSUMERS, 1, 1, ROWS, FORM.value.head_dim], k_rows.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    q_tiles = gl.allocate_shared_memory(q_rows.dtype, [STAGES, 1, 1, N, FORM.value.head_dim], q_rows.layout)
    number_tiles = gl.allocate_shared_memory(gl.float32, [STAGES * PARTS, N], shifts.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    pipeline = LookPipeline(q_tiles, number_tiles, full, empty)
    mbarrier.expect(k_full, CONSUMERS * k_rows.block_type.nbytes)
    for index in gl.static_range(CONSUMERS):
        rows = first + index * ROWS
        async_load(k_rows, [batch, head // group, rows, 0], k_full, k_block.index(index))

    outputs = LookOutputs(received, sums, tops, counts, found)
    bounds = (keys, upper, lower)
    work = (outputs, first, number, tiles, bins, bounds, (scale, softcap, factor), k_block, k_full, pipeline)
    load = (q_rows, shifts, (batch, head, number), tiles, bins, pipeline)
    WARPS: gl.constexpr = ROWS // 16
    REGISTERS: gl.constexpr = CONFIG.value.registers
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(consume, (work, 0, FORM, CONFIG)), (consume, (work, 1, FORM, CONFIG)), (produce, (load, FORM, CONFIG))],
            [WARPS, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [(consume, (work, 0, FORM, CONFIG)), (consume, (work, 1, FORM, CONFIG)), (consume, (work, 2, FORM, CONFIG)),
             (produce, (load, FORM, CONFIG))],
            [WARPS, WARPS, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(consume, (work, 0, FORM, CONFIG)), (consume, (work, 1, FORM, CONFIG)), (consume, (work, 2, FORM, CONFIG)),
             (consume, (work, 3, FORM, CONFIG)), (produce, (load, FORM, CONFIG))],
            [WARPS, WARPS, WARPS, 1], [REGISTERS, REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["queries", "skipped", "count", "each", "size"],
    do_not_specialize_on_alignment=["peaks", "totals", "levels", "large"],
)
def lay_out(peaks, totals, levels, shifts, large, queries, skipped, count, each, size, scale, factor,
            N: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """Three rows for one tile of queries: shifts, exponents from which keys may be among the largest, corrections.

    A shift is +inf where there is no query, or one that sees nothing or is skipped.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    bins = Bins(queries, count, each, size, EVEN)
    tile = gl.program_id(0)
    number = gl.program_id(1)
    stop = first_of_bin(tile // each + 1, bins)
    column = gl.arange(0, N, layout)
    row = first_of_tile(tile, bins, N) + column
    place = number.to(gl.int64) * queries + row
    inside = (row < stop) & (row >= skipped)
    peak = gl.load(peaks + place, inside, 0.0)
    total = gl.load(totals + place, inside, 0.0)
    shift, correction = denominator(peak, total, scale, factor)
    level = gl.load(levels + place, inside, 0.0) * factor
    slack = 2**-12 + gl.abs(level) * 2**-18  # keys times queries may round otherwise than queries times keys
    level = gl.where(total > 0, gl.maximum(level - shift - slack, -3e38), float("inf"))
    entry = (number * count * each + tile).to(gl.int64) * 3 * N + column
    gl.store(shifts + entry, shift)
    gl.store(shifts + entry + N, level)
    gl.store(shifts + entry + 2 * N, correction)
    if gl.max(gl.where(total > 0, gl.abs(shift), 0.0), 0) > 32:  # whose rounding is more than that of a weight
        gl.store(large, 1)
