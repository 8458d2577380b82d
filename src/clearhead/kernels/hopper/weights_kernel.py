"""The second look on Hopper's own units: weights again from queries, keys and denominators, read by keys.

A program owns a block of keys, and tiles of queries go by. A weight is 2^(c·score − shift), where `shift` of a query is
c·peak + log2 total, so that a weight costs one multiply-add and one exponential, as in the forward. What a key receives
and its part of a map are sums along a row of

    scores = k @ qᵀ                        (rows of keys, columns of queries)

and so stay in registers: no other program adds to them, and every run gives the same bits.

One warp, the producer, copies tiles of queries and their shifts into a pipeline in shared memory (`queries_kernel.py`).
A tile never crosses an edge of the map: each bin of queries has `each` tiles of its own, and what a tile has beyond its
bin has the shift +inf, which makes the weight 0; so do queries that see nothing.

Under a mask of any kind (`tile_runs.py`) a block of keys has a list of the tiles of queries that see some of it, the
mixed ones first, of which bits say who sees whom; then there is one bin. A long list is shared out among programs: the
first writes what it found, the others put it aside, and `add_parts` adds it up in their order.

Without such a list, and where there are few programs for a processor, two of them share a block of keys (`halved`), the
first and the last of its tiles. Both add what they found to zero, and a sum of two numbers has no order.

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

from clearhead.kernels.hopper.bins_kernel import Bins, first_of_bin, half_of, tiles_seen
from clearhead.kernels.hopper.jobs import head_and_row
from clearhead.kernels.hopper.pipeline import async_load, await_others, others_may_begin
from clearhead.kernels.hopper.queries_kernel import (
    PRODUCER_REGISTERS,
    LookPipeline,
    QueryTiles,
    numbers_of,
    produce_either,
)
from clearhead.kernels.hopper.softmax import bits_of, capped, masked_by_bits
from clearhead.kernels.hopper.top_kernel import end_offers, none_pending, offer

LOG2E = gl.constexpr(math.log2(math.e))
UNMASKED, BY_PLACE, BY_BITS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # how a tile is masked


class LookOutputs(NamedTuple):
    """Where results go: by key, aside, by key and bin twice, and by query how many of the largest, and which."""

    received: Any
    parts: Any
    sums: Any
    tops: Any
    counts: Any
    found: Any


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
    """log2 of the weights of a tile. `sees`: the first and the last query that see a key, or bits of a mixed tile."""
    scale, softcap, factor = scales
    start, stop = sees
    if FORM.value.softcap:
        scores = capped(scores, scale, softcap)
    exponent = scores * factor - shift[None, :]
    if MASKED == BY_BITS:
        exponent = masked_by_bits(exponent, start)
    elif MASKED:
        column = gl.arange(0, CONFIG.value.columns, gl.SliceLayout(0, scores.type.layout))[None, :]
        seen = (column >= (start - first)[:, None]) & (shift != float("inf"))[None, :]  # a hidden key may hold NaN
        if FORM.value.lower:
            seen = seen & (column <= (stop - first)[:, None])
        exponent = gl.where(seen, exponent, float("-inf"))
    if FORM.value.some and MASKED != BY_PLACE:
        exponent = gl.where((shift != float("inf"))[None, :], exponent, float("-inf"))  # who does not count may be NaN
    return exponent


@gluon.jit
def end_bin(state, outputs, key, keys, number, bins, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """A bin of queries is done: its sums and largest weights go to the strip, and the sums to what was received."""
    received, sums, tops, bin, _, pending = state
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
    return received, nothing, nothing + float("-inf"), bin + 1, bins.each, pending


@gluon.jit
def consume(work, INDEX: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """All that one consumer's keys receive, bin by bin."""
    outputs, first, number, tiles, bins, bounds, _, k_block, k_full, _ = work
    ROWS: gl.constexpr = CONFIG.value.rows
    N: gl.constexpr = CONFIG.value.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    begin, low, high, end = tiles
    keys, upper, lower, _, words, aside = bounds
    key = first + INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    start = gl.full([ROWS], -(2**30), gl.int32, gl.SliceLayout(1, LAYOUT))
    if FORM.value.upper:
        start = key - upper
    sees = (gl.where(key < keys, start, 2**30), key - lower)  # nobody sees what is not a key
    if FORM.value.top and first + ROWS * CONFIG.value.consumers > keys:
        high = low
        if not FORM.value.tiles:
            low = end
            high = end
    nothing = gl.sum(in_thread(gl.full([ROWS, N], 0.0, gl.float32, LAYOUT)), 1)
    bin = begin - begin
    left = bin + 2**30  # one bin does not end before the tiles do
    if FORM.value.map:
        bin = begin // bins.each
        left = (bin + 1) * bins.each - begin
    pending = left  # of the largest weights
    if FORM.value.top:
        pending = none_pending(gl.full([ROWS, N], 0.0, gl.float32, LAYOUT), CONFIG.value.offered)
    state = (nothing, nothing, nothing + float("-inf"), bin, left, pending)
    k = k_block.index(INDEX).reshape([ROWS, FORM.value.head_dim])
    mbarrier.wait(k_full, 0)
    if FORM.value.tiles:
        EACH: gl.constexpr = ROWS * CONFIG.value.consumers * 4
        for tile in range(begin, low):
            bits = words + (tile - begin) * EACH + INDEX * ROWS * 4
            state = advance(tile, state, work, k, key, (bits, bits), BY_BITS, FORM, CONFIG)
    else:
        for tile in range(begin, low):
            state = advance(tile, state, work, k, key, sees, BY_PLACE, FORM, CONFIG)
    for tile in range(low, high):
        state = advance(tile, state, work, k, key, sees, UNMASKED, FORM, CONFIG)
    if FORM.value.lower or (FORM.value.tiles and FORM.value.top):
        for tile in range(high, end):
            state = advance(tile, state, work, k, key, sees, BY_PLACE, FORM, CONFIG)
    if FORM.value.top:
        end_offers(state[5], outputs.found, number.to(gl.int64) * bins.queries, CONFIG)
    if FORM.value.map and begin < end and state[4] < bins.each:
        state = end_bin(state, outputs, key, keys, number, bins, FORM, CONFIG)
    if FORM.value.received:
        received, sums, _, _, _, _ = state
        total = gl.sum(received + sums, 1)
        place = gl.convert_layout(key, total.type.layout)
        if FORM.value.halved:
            # without an order among others: nobody reads it before the kernel has ended, and the order's fences took
            # a tenth of a program's time
            gl.atomic_add(outputs.received + number.to(gl.int64) * keys + place, total, place < keys, sem="relaxed")
        elif FORM.value.tiles:
            if aside >= 0:
                gl.store(outputs.parts + aside * (ROWS * CONFIG.value.consumers) + place - first, total)
            else:
                gl.store(outputs.received + number.to(gl.int64) * keys + place, total, place < keys)
        else:
            gl.store(outputs.received + number.to(gl.int64) * keys + place, total, place < keys)


@gluon.jit
def advance(tile, state, work, k, key, sees, MASKED: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """One tile of queries."""
    outputs, _, number, tiles, bins, bounds, scales, _, _, pipeline = work
    step = tile - tiles[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CONFIG.value.columns, 16])
    if MASKED == BY_BITS:  # from memory: products are waited for meanwhile
        sees = (bits_of(sees[0], CONFIG.value.rows, CONFIG.value.columns, layout), sees[1])
    scores = times_queries(k, pipeline, step, CONFIG)
    slot = step % CONFIG.value.stages
    shift = numbers_of(pipeline, slot, 0, FORM, CONFIG).load(gl.SliceLayout(0, layout))
    scores = warpgroup_mma_wait(0, deps=(scores,))
    received, sums, tops, bin, left, pending = state
    first = tile * CONFIG.value.columns
    if FORM.value.tiles:
        first = gl.load(bounds[3] + tile) * CONFIG.value.columns
    elif FORM.value.map:
        first = first_of_bin(bin, bins) + (bins.each - left) * CONFIG.value.columns
    exponent = exponents(scores, shift, first, sees, scales, MASKED, FORM, CONFIG)
    if FORM.value.top:
        levels = numbers_of(pipeline, slot, 1, FORM, CONFIG)
        offset = number.to(gl.int64) * bins.queries
        pending = offer(pending, exponent, levels, key, first, outputs.counts, outputs.found, offset, CONFIG)
    weight = gl.exp2(exponent)
    if FORM.value.careful:
        weight *= numbers_of(pipeline, slot, 2, FORM, CONFIG).load(gl.SliceLayout(0, layout))[None, :]
        exponent = weight  # the largest is sought among weights: what is to be multiplied in differs by query
    mbarrier.arrive(pipeline.empty.index(slot), count=1)
    sums += gl.sum(in_thread(weight), 1)
    if FORM.value.map:
        tops = gl.maximum(tops, gl.max(in_thread(exponent), 1))
    state = (received, sums, tops, bin, left - 1, pending)
    if FORM.value.map:
        if left == 1:
            state = end_bin(state, outputs, key, bounds[0], number, bins, FORM, CONFIG)
    return state


@gluon.jit
def consume_either(work, large, INDEX: gl.constexpr, FORM: gl.constexpr, CAREFUL: gl.constexpr, CONFIG: gl.constexpr):
    """One of two forms of a consumer, the loops of each by itself."""
    if gl.load(large) != 0:
        consume(work, INDEX, CAREFUL, CONFIG)
    else:
        consume(work, INDEX, FORM, CONFIG)


@gluon.jit(
    do_not_specialize=["queries", "keys", "heads", "total", "side", "group", "skipped", "upper", "lower", "count",
                       "each", "size"],
    do_not_specialize_on_alignment=["received", "parts", "sums", "tops", "counts", "found", "large", "table", "numbers",
                                    "bits"],
)  # fmt: skip
def by_key(q_rows, k_rows, shifts, received, parts, sums, tops, counts, found, large, table, numbers, bits, queries,
           keys, heads, total, side, group, skipped, upper, lower, count, each, size, scale, softcap, factor,
           FORM: gl.constexpr, CAREFUL: gl.constexpr, CONFIG: gl.constexpr):  # fmt: skip
    """What a block of keys of one head received: of queries from `skipped` on, and of each of `count` bins of them.

    With a list of tiles for each block (`tile_runs.py`), `side` is how many heads an entry of the table serves. The
    careful form, which also multiplies by what the rounding of a shift takes away, runs where some shift is `large`.
    """
    ROWS: gl.constexpr = CONFIG.value.rows
    STAGES: gl.constexpr = CONFIG.value.stages
    CONSUMERS: gl.constexpr = CONFIG.value.consumers
    N: gl.constexpr = CONFIG.value.columns
    bins = Bins(queries, count, each, size, FORM.value.even, not FORM.value.map)
    words = bits
    aside = gl.program_id(0).to(gl.int64)
    if FORM.value.tiles:
        which = gl.program_id(0) % side
        entry = table + 8 * (gl.program_id(0) // side)
        head, batch = head_and_row(entry, which, heads)
        number = batch * heads + head
        first = gl.load(entry)
        begin = gl.load(entry + 3)
        end = begin + gl.load(entry + 5)
        tiles = (begin, begin + gl.load(entry + 4), end, end)
        words = bits + gl.load(entry + 6).to(gl.int64) * (ROWS * CONSUMERS * 4)
        aside = gl.load(entry + 7).to(gl.int64)
        aside = gl.where(aside > 0, (aside - 1) * side + which, -1)
    else:
        place = gl.program_id(0)
        if FORM.value.halved:
            place = place // 2
        block = place
        number = gl.program_id(2)
        if FORM.value.sided:  # the first keys of a causal head are seen by most: they go first, of several heads
            block = gl.program_id(1)
            number = number * side + place
        first = block * (ROWS * CONSUMERS)
        head = number % heads
        batch = number // heads
        tiles = tiles_seen(first, ROWS * CONSUMERS, bins, skipped, upper, lower, FORM, N)
        if FORM.value.sided:
            if number >= total:  # the last heads may be fewer
                first = keys
                tiles = (tiles[0], tiles[0], tiles[0], tiles[0])
        if FORM.value.halved:
            tiles = half_of(tiles, gl.program_id(0) % 2)

    k_block = gl.allocate_shared_memory(k_rows.dtype, [CONSUMERS, 1, 1, ROWS, FORM.value.head_dim], k_rows.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    q_tiles = gl.allocate_shared_memory(q_rows.dtype, [STAGES, 1, 1, N, FORM.value.head_dim], q_rows.layout)
    COPIES: gl.constexpr = CAREFUL.value.parts * N // shifts.block_shape[0]
    number_tiles = gl.allocate_shared_memory(gl.float32, [STAGES * COPIES, shifts.block_shape[0]], shifts.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    others_may_begin()
    pipeline = LookPipeline(q_tiles, number_tiles, full, empty)
    mbarrier.expect(k_full, CONSUMERS * k_rows.block_type.nbytes)
    for index in gl.static_range(CONSUMERS):
        rows = first + index * ROWS
        async_load(k_rows, [batch, head // group, rows, 0], k_full, k_block.index(index))

    outputs = LookOutputs(received, parts, sums, tops, counts, found)
    bounds = (keys, upper, lower, numbers, words, aside)
    load = QueryTiles(q_rows, shifts, (batch, head, number), tiles, bins, numbers, pipeline)
    work = (outputs, first, number, tiles, bins, bounds, (scale, softcap, factor), k_block, k_full, pipeline)
    await_others()
    WARPS: gl.constexpr = ROWS // 16
    REGISTERS: gl.constexpr = CONFIG.value.registers
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(consume_either, (work, large, 0, FORM, CAREFUL, CONFIG)),
             (produce_either, (load, large, FORM, CAREFUL, CONFIG))],
            [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(consume_either, (work, large, 0, FORM, CAREFUL, CONFIG)),
             (consume_either, (work, large, 1, FORM, CAREFUL, CONFIG)),
             (produce_either, (load, large, FORM, CAREFUL, CONFIG))],
            [WARPS, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [(consume_either, (work, large, 0, FORM, CAREFUL, CONFIG)),
             (consume_either, (work, large, 1, FORM, CAREFUL, CONFIG)),
             (consume_either, (work, large, 2, FORM, CAREFUL, CONFIG)),
             (produce_either, (load, large, FORM, CAREFUL, CONFIG))],
            [WARPS, WARPS, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(consume_either, (work, large, 0, FORM, CAREFUL, CONFIG)),
             (consume_either, (work, large, 1, FORM, CAREFUL, CONFIG)),
             (consume_either, (work, large, 2, FORM, CAREFUL, CONFIG)),
             (consume_either, (work, large, 3, FORM, CAREFUL, CONFIG)),
             (produce_either, (load, large, FORM, CAREFUL, CONFIG))],
            [WARPS, WARPS, WARPS, 1], [REGISTERS, REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
