"""Gradients on Hopper's own units: one pass over all pairs, five matrix products for a tile instead of seven.

A program owns a block of keys, and tiles of queries go by, with the gradients of their outputs. Tiles are turned, keys
down, so that weights are left operands where they are computed, in registers:

    scoresᵀ = k @ qᵀ                        (rows of keys, columns of queries)
    pᵀ      = 2^(c·scoresᵀ − shift)         `shift` of a query is c·peak + log2 total; +inf where it sees nothing
    dpᵀ     = v @ doutᵀ
    dsᵀ     = pᵀ · (dpᵀ − delta)            `delta` of a query is Σ dout · output − dlse
    dv     += pᵀ @ dout
    dk     += dsᵀ @ q
    dq      = ds @ k                        added to what other blocks of keys give these queries

One warp, the producer, copies tiles of queries and of gradients into a pipeline in shared memory. Two consumers, of
four warps and 64 keys each, compute. For dq they need each other's ds, which goes through shared memory: a consumer
computes the scores of the next tile before it asks for the other's, so that neither waits long, and takes exponentials
while ds @ k is computed. FlashAttention-3's backward (Shah and others, 2024, arXiv:2407.08608) divides the work so.

dq is added up in float32, in memory, in the order in which blocks come to it, so its last bits may differ from run to
run. It lies there by pieces, in the order in which threads hold it, so that a thread adds four numbers at a time.

CONFIG and FORM are the values of `backward.py` that say how the work is cut up and what is computed.
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

from clearhead.kernels.hopper.jobs import head_and_row
from clearhead.kernels.hopper.pipeline import async_load, async_store, new_query_pipeline, share

LOG2E = gl.constexpr(math.log2(math.e))
PRODUCER_REGISTERS = gl.constexpr(24)
ROWS = gl.constexpr(64)  # keys of a consumer; and rows and columns of a piece of dq
CONSUMERS = gl.constexpr(2)


@gluon.jit
def tiles_seen(first, queries, upper, lower, FORM: gl.constexpr, N: gl.constexpr):
    """The tiles [begin, end) hold the queries that see some key of a block."""
    begin = 0
    end = queries
    if FORM.value.upper:
        begin = gl.minimum(gl.maximum(first - upper, 0), queries - 1) // N
    if FORM.value.lower:
        end = gl.minimum(gl.maximum(first + ROWS * CONSUMERS - lower, 0), queries)
    return begin, gl.maximum((end + N - 1) // N, begin + 1)


@gluon.jit
def place_of(step, walk, FORM: gl.constexpr):
    """The tile of a step, and which of the heads that share the keys it is from; past the last, any."""
    begin, count, tiles = walk
    number, member = number_of(step, count, FORM)
    tile = begin + number
    if FORM.value.tiles:
        tile = gl.load(tiles + begin + gl.minimum(number, gl.maximum(count - 1, 0)))
    return tile, member


@gluon.jit
def number_of(step, count, FORM: gl.constexpr):
    """How many tiles of one head came before this step's, and which of the heads that share the keys it is from."""
    member = 0
    number = step
    if FORM.value.grouped:
        member = step // gl.maximum(count, 1)
        number = step - member * count
    return number, member


@gluon.jit
def hidden_by_bits(p, words, number, N: gl.constexpr):
    """Pairs of weights of a mixed tile, 0 where a query does not see a key (`tile_bits`)."""
    flat: gl.constexpr = p.type.layout
    split = gl.reshape(p, [ROWS, N // 8, 4])
    layout: gl.constexpr = split.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(1, layout)))
    quad = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    eighth = gl.arange(0, N // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :][:, :, None]
    words += number * (ROWS * CONSUMERS * 4)
    found = gl.load(words + row[:, None] * 4 + quad[None, :])[:, None, :] >> (2 * eighth)
    split = gl.where((found & 1) != 0, split, split & -65536)
    split = gl.where((found & 2) != 0, split, split & 65535)
    return gl.convert_layout(gl.reshape(split, [ROWS, N // 2]), flat, assert_trivial=True)


@gluon.jit
def produce(load, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """Copy all tiles, and one more that nobody uses, each as soon as its slot is free."""
    q_rows, dout_rows, shifts, batch, head, heads, tiles, steps, walk, pipeline = load
    N: gl.constexpr = CONFIG.value.columns
    for step in range(steps + 1):
        slot = step % CONFIG.value.stages
        tile, member = place_of(step, walk, FORM)
        entry = ((batch * heads + head + member) * tiles + tile) * 2
        mbarrier.wait(pipeline.empty.index(slot), ((step // CONFIG.value.stages) & 1) ^ 1)
        full = pipeline.full.index(slot)
        mbarrier.expect(full, 2 * q_rows.block_type.nbytes + 2 * shifts.block_type.nbytes)
        async_load(q_rows, [batch, head + member, tile * N, 0], full, pipeline.queries.index(slot))
        async_load(shifts, [entry * N], full, pipeline.numbers.index(slot * 2))
        async_load(dout_rows, [batch, head + member, tile * N, 0], full, pipeline.douts.index(slot))
        async_load(shifts, [(entry + 1) * N], full, pipeline.numbers.index(slot * 2 + 1))


@gluon.jit
def await_tile(pipeline, step, CONFIG: gl.constexpr):
    """Wait until the tile of this step is there."""
    mbarrier.wait(pipeline.full.index(step % CONFIG.value.stages), (step // CONFIG.value.stages) & 1)


@gluon.jit
def tile_of(tiles, step, CONFIG: gl.constexpr):
    """The queries of this step, or the gradients of their outputs: (columns, head_dim)."""
    tile = tiles.index(step % CONFIG.value.stages)
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def numbers_of(pipeline, step, PART: gl.constexpr, CONFIG: gl.constexpr):
    """Of the queries of this step the shift (0) or −delta (1)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CONFIG.value.columns, 16])
    return pipeline.numbers.index(step % CONFIG.value.stages * 2 + PART).load(gl.SliceLayout(0, layout))


@gluon.jit
def turned_product(block, tile, CONFIG: gl.constexpr):
    """Start block @ tileᵀ."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CONFIG.value.columns, 16])
    zeros = gl.full([ROWS, CONFIG.value.columns], 0.0, gl.float32, layout)
    return warpgroup_mma(block, tile.permute((1, 0)), zeros, is_async=True, use_acc=False)


@gluon.jit
def weights(scores, pipeline, step, tile, bounds, scales, k, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """The weights of a tile, 0 where a query does not see a key; packed in pairs, see `softmax.packed`."""
    keys, upper, lower, first, mine, count, several, words = bounds
    scale, softcap, factor = scales
    N: gl.constexpr = CONFIG.value.columns
    shift = numbers_of(pipeline, step, 0, CONFIG)
    if FORM.value.softcap:
        scores = softcap - 2 * softcap * reciprocal(gl.exp2(scores * (scale / softcap * 2 * LOG2E)) + 1)
    even, odd = gl.split(gl.reshape(gl.exp2(scores * factor - shift[None, :]), [ROWS, N // 2, 2]))
    name: gl.constexpr = "bf16x2" if k.dtype == gl.bfloat16 else "f16x2"
    p = gl.inline_asm_elementwise("cvt.rn." + name + ".f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1)
    if FORM.value.tiles:
        number, _ = number_of(step, count, FORM)
        mixed = number < several
    else:
        mixed = first + ROWS * CONSUMERS > keys
    if FORM.value.upper:
        mixed = mixed | (tile * N + upper < first + ROWS * CONSUMERS - 1)
    if FORM.value.lower:
        mixed = mixed | (tile * N + N - 1 + lower > first)
    if mixed:  # a branch, also where it is never taken: the assembler would move the wait for dq up before it
        if FORM.value.tiles:
            p = hidden_by_bits(p, words, number, N)
        else:
            key = (mine + gl.arange(0, ROWS, gl.SliceLayout(1, p.type.layout)))[:, None]
            query = (tile * N + 2 * gl.arange(0, N // 2, gl.SliceLayout(0, p.type.layout)))[None, :]
            p = gl.where(seen(query, key, keys, upper, lower, FORM), p, p & -65536)
            p = gl.where(seen(query + 1, key, keys, upper, lower, FORM), p, p & 65535)
    return p


@gluon.jit
def seen(query, key, keys, upper, lower, FORM: gl.constexpr):
    """True where a query sees a key."""
    found = (key < keys) & (query >= 0)
    if FORM.value.upper:
        found = found & (key <= query + upper)
    if FORM.value.lower:
        found = found & (key >= query + lower)
    return found


@gluon.jit
def unpacked(pairs, k, layout: gl.constexpr):
    """What `weights` gave, in k's type."""
    rows: gl.constexpr = pairs.shape[0]
    columns: gl.constexpr = pairs.shape[1] * 2
    halves = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), True, 1)
    p = gl.reshape(gl.join(halves[0], halves[1]), [rows, columns]).to(k.dtype, bitcast=True)
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def reciprocal(x):
    """1 / x, to the last bit or two."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def slope_of(p, shift, softcap):
    """The slope of the cap, from the weights that came of it: 1 − (score / softcap)²; any number for a weight of 0."""
    power = gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [p], gl.float32, True, 1)
    score = gl.maximum(power + shift[None, :], -1000.0) * (1.0 / (softcap * LOG2E))  # −inf + inf becomes a number too
    return 1.0 - score * score


@gluon.jit
def add_piece(dqs, piece, dq):
    """Add a piece of dq, 64 by 64, to what is there, in the order in which threads hold it."""
    x = gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), (0, 2, 4, 3, 1, 5))
    x = gl.reshape(x, [128, 8, 4])
    layout: gl.constexpr = x.type.layout
    thread = gl.arange(0, 128, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    part = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    entry = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    base = dqs + piece.to(gl.int64) * (ROWS * ROWS)
    at = thread[:, None, None] * 4 + part[None, :, None] * 512 + entry[None, None, :]
    gl.atomic_add(base + at, x, sem="relaxed")


@gluon.jit
def consume(work, INDEX: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """dk and dv of one consumer's keys, and its half of what the block of keys adds to dq."""
    dk_rows, dv_rows, dqs, place, walk, steps, bounds, scales, blocks, pipeline, exchange = work
    N: gl.constexpr = CONFIG.value.columns
    HEAD_DIM: gl.constexpr = FORM.value.head_dim
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HEAD_DIM, 16])
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    batch, head, heads, key_head, tiles = place
    first = bounds[3]
    k_block, v_block, kv_full = blocks
    ds_tiles, ds_full, done = exchange
    mine = first + INDEX * ROWS
    words = bounds[6]
    if FORM.value.tiles:
        words += INDEX * ROWS * 4
    bounds = (bounds[0], bounds[1], bounds[2], first, mine, bounds[4], bounds[5], words)
    k = k_block.index(INDEX).reshape([ROWS, HEAD_DIM])
    v = v_block.index(INDEX).reshape([ROWS, HEAD_DIM])
    type: gl.constexpr = k.dtype
    dk = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, SUMS)
    dv = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, SUMS)

    mbarrier.wait(kv_full, 0)
    await_tile(pipeline, 0, CONFIG)
    scores = warpgroup_mma_wait(0, deps=(turned_product(k, tile_of(pipeline.queries, 0, CONFIG), CONFIG),))
    tile, _ = place_of(0, walk, FORM)
    pairs = weights(scores, pipeline, 0, tile, bounds, scales, k, FORM, CONFIG)
    dq = gl.full([ROWS, ROWS], 0.0, gl.float32, PIECE)
    piece = ((batch * heads + head) * tiles + tile) * 2 + INDEX
    for step in range(steps):
        # dp − delta, and dv of this tile; meanwhile dq of the tile before goes out
        dout = tile_of(pipeline.douts, step, CONFIG)
        dp = gl.full([ROWS, N], 0.0, gl.float32, SCORES) + numbers_of(pipeline, step, 1, CONFIG)[None, :]
        dp = warpgroup_mma(v, dout.permute((1, 0)), dp, is_async=True)
        p = unpacked(pairs, k, SCORES)
        p_left = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
        dv = warpgroup_mma(p_left, dout, dv, is_async=True)
        add_piece(dqs, piece, dq)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = p.to(gl.float32) * dp
        if FORM.value.softcap:
            ds = ds * slope_of(p.to(gl.float32), numbers_of(pipeline, step, 0, CONFIG), scales[1])
        ds = ds.to(type)
        # ds for both consumers, dk of this tile, the next tile's scores. The slot is free: the other consumer has used
        # what was there before it gave its ds of the step before this, and this one has waited for that.
        slot = step % 2
        ds_tiles.index(slot * CONSUMERS + INDEX).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(slot), count=1)
        ds_left = gl.convert_layout(ds, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
        dk = warpgroup_mma(ds_left, tile_of(pipeline.queries, step, CONFIG), dk, is_async=True)
        await_tile(pipeline, step + 1, CONFIG)
        scores = turned_product(k, tile_of(pipeline.queries, step + 1, CONFIG), CONFIG)
        # all that is done makes room: there is no register to spare
        dv, dk, p_left, ds_left = warpgroup_mma_wait(1, deps=(dv, dk, p_left, ds_left))
        # dq of this tile, the next tile's weights
        mbarrier.wait(ds_full.index(slot), (step // 2) & 1)
        dq = gl.full([ROWS, ROWS], 0.0, gl.float32, PIECE)
        for other in gl.static_range(CONSUMERS):
            left = ds_tiles.index(slot * CONSUMERS + other).permute((1, 0))
            right = k_block.index(other).reshape([ROWS, HEAD_DIM])
            if N > ROWS:
                left = left.slice(INDEX * ROWS, ROWS, dim=0)
            else:
                right = right.slice(INDEX * ROWS, ROWS, dim=1)
            dq = warpgroup_mma(left, right, dq, is_async=True, use_acc=other > 0)
        scores = warpgroup_mma_wait(CONSUMERS, deps=(scores,))
        mbarrier.arrive(pipeline.empty.index(step % CONFIG.value.stages), count=1)
        tile, member = place_of(step, walk, FORM)
        piece = ((batch * heads + head + member) * tiles + tile) * 2 + INDEX
        tile, _ = place_of(step + 1, walk, FORM)
        pairs = weights(scores, pipeline, step + 1, tile, bounds, scales, k, FORM, CONFIG)
        dq = warpgroup_mma_wait(0, deps=(dq,))

    add_piece(dqs, piece, dq)
    mbarrier.arrive(done, count=1)
    v.store(dv.to(type))
    fence_async_shared()
    async_store(dv_rows, [batch, key_head, mine, 0], v_block.index(INDEX))
    mbarrier.wait(done, 0)  # the other consumer reads these keys too
    k.store((dk * scales[0]).to(type))
    fence_async_shared()
    async_store(dk_rows, [batch, key_head, mine, 0], k_block.index(INDEX))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["queries", "keys", "key_heads", "total", "side", "group", "upper", "lower", "tiles"],
    do_not_specialize_on_alignment=["table", "numbers", "bits"],
)
def by_keys(q_rows, dout_rows, k_rows, v_rows, dk_rows, dv_rows, shifts, dqs, table, numbers, bits,
            queries, keys, key_heads, total, side, group, upper, lower, tiles, scale, softcap, factor,
            FORM: gl.constexpr, CONFIG: gl.constexpr):  # fmt: skip
    """dk and dv of one block of keys of one head, and what it adds to dq of all queries that see some of it.

    With a list of tiles for each block (`tile_runs.py`), `side` is how many heads an entry of the table serves.
    """
    N: gl.constexpr = CONFIG.value.columns
    HEAD_DIM: gl.constexpr = FORM.value.head_dim
    blocks = (keys + ROWS * CONSUMERS - 1) // (ROWS * CONSUMERS)
    several = 0
    words = bits
    if FORM.value.tiles:
        entry = table + 8 * (gl.program_id(0) // side)
        key_head, batch = head_and_row(entry, gl.program_id(0) % side, key_heads)
        first = gl.load(entry)
        begin = gl.load(entry + 3)
        several = gl.load(entry + 4)
        count = gl.load(entry + 5)
        words = bits + gl.load(entry + 6).to(gl.int64) * (ROWS * CONSUMERS * 4)
    else:
        block, number = share(gl.program_id(0), blocks, total, side)  # the first keys of a causal head are seen by most
        key_head, batch = number % key_heads, number // key_heads
        first = block * (ROWS * CONSUMERS)
        begin, end = tiles_seen(first, queries, upper, lower, FORM, N)
        count = end - begin
    head = key_head * group
    heads = key_heads * group
    walk = (begin, count, numbers)
    steps = count * group

    k_block = gl.allocate_shared_memory(k_rows.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], k_rows.layout)
    v_block = gl.allocate_shared_memory(v_rows.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], v_rows.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    pipeline = new_query_pipeline(q_rows, dout_rows, shifts, CONSUMERS, CONFIG)
    TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, N], k_rows.dtype)
    ds_tiles = gl.allocate_shared_memory(k_rows.dtype, [2 * CONSUMERS, ROWS, N], TURNED)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(ds_full.index(slot), count=CONSUMERS)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=CONSUMERS)
    fence_async_shared()

    mbarrier.expect(kv_full, CONSUMERS * (k_rows.block_type.nbytes + v_rows.block_type.nbytes))
    for index in gl.static_range(CONSUMERS):
        place = [batch, key_head, first + index * ROWS, 0]
        async_load(k_rows, place, kv_full, k_block.index(index))
        async_load(v_rows, place, kv_full, v_block.index(index))

    work = (dk_rows, dv_rows, dqs, (batch, head, heads, key_head, tiles), walk, steps,
            (keys, upper, lower, first, count, several, words),
            (scale, softcap, factor), (k_block, v_block, kv_full), pipeline, (ds_tiles, ds_full, done))  # fmt: skip
    load = (q_rows, dout_rows, shifts, batch, head, heads, tiles, steps, walk, pipeline)
    gl.warp_specialize(
        [(consume, (work, 0, FORM, CONFIG)), (consume, (work, 1, FORM, CONFIG)), (produce, (load, FORM, CONFIG))],
        [4, 1], [CONFIG.value.registers, PRODUCER_REGISTERS],
    )  # fmt: skip
