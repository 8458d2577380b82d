"""The largest weights on Hopper: keys that may be among them are put on a list of each query, then the best are chosen.

The forward gives for each query a score that at least `top` keys reach, and seldom more than one or two others do (see
`level_of` in `softmax.py`). The second look offers every weight; the few that reach the level are put on the query's
list, in whatever order they come. `choose` sorts them out: by weight, then by key, so that the order does not matter.
A query with more candidates than its list holds is looked at again by `search`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from clearhead.kernels.gpu.device import allowed_by_program
from clearhead.kernels.gpu.tile_lists_kernel import Only

HELD = 32  # candidates that a list holds
LISTED = gl.constexpr(HELD)
NO_KEY = gl.constexpr(2147483647)


def offering(count: int) -> tuple[str, str]:
    """Assembly and constraints for 16 or 32 weights of a thread: 2 keys, 8 apart, of 4 or 8 pairs of queries, 8 apart.

    One comparison for each weight, and one branch that is seldom taken: what Gluon says about whole tiles of all
    warps cannot be said about one thread. What lies behind the branch is short, a loop over the bits of a mask:
    written out for each weight it filled the instruction cache and took three times as long as all the rest. The
    operands are `count` each of: result (none), weight, level, key, query, address of the counters and of the lists.
    """
    result, weight, level, key, query, counters, lists = ([f"${count * i + j}" for j in range(count)] for i in range(7))
    lines = ["{", ".reg .pred some, is<32>;", ".reg .b32 mask, bit, place, row, slot, what, picked<16>;"]
    lines += [".reg .b64 at;", f"setp.ge.f32 some, {weight[0]}, {level[0]};"]
    lines += [f"setp.ge.or.f32 some, {weight[i]}, {level[i]}, some;" for i in range(1, count)]
    lines += ["@!some bra DONE;", "mov.b32 mask, 0;"]
    for i in range(count):
        lines += [f"setp.ge.f32 some, {weight[i]}, {level[i]};", f"@some or.b32 mask, mask, {1 << i};"]
    lines += ["AGAIN:", "bfind.u32 place, mask;", "mov.b32 bit, 1;", "shl.b32 bit, bit, place;"]
    lines += ["xor.b32 mask, mask, bit;"]
    half, picked = count // 2, weight
    while half:
        lines += [f"and.b32 what, place, {half};", f"setp.ne.u32 is{half}, what, 0;"]
        lines += [f"selp.b32 picked{i}, {picked[i + half]}, {picked[i]}, is{half};" for i in range(half)]
        half, picked = half // 2, [f"picked{i}" for i in range(half)]
    lines += [
        "and.b32 what, place, 28;",
        "shl.b32 what, what, 1;",
        "and.b32 place, place, 1;",
        "add.s32 row, what, place;",
        f"add.s32 row, row, {query[0]};",
        f"selp.b32 what, {key[2]}, {key[0]}, is2;",
        f"mad.wide.s32 at, row, 4, {counters[0]};",
        "atom.global.add.u32 slot, [at], 1;",
        f"setp.lt.u32 some, slot, {HELD};",
        f"mad.wide.s32 at, row, {8 * HELD}, {lists[0]};",
        "mad.wide.u32 at, slot, 8, at;",
        "@some st.global.v2.b32 [at], {picked0, what};",
        "setp.ne.u32 some, mask, 0;",
        "@some bra AGAIN;",
        "DONE:",
    ]
    lines += [f"mov.b32 {place}, 0;" for place in result] + ["}"]
    kinds = ["=r"] * count + ["f", "f", "r", "r", "l", "l"] * count
    kinds[count:] = sorted(kinds[count:], key=["f", "r", "l"].index)
    return "\n".join(lines), ",".join(kinds)


BY_16 = gl.constexpr(offering(16))
BY_32 = gl.constexpr(offering(32))


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [rows, 2, columns // 2]), [0, 2, 1]))


@gluon.jit
def offer(exponent, levels, key, first, counts, found, offset, COUNT: gl.constexpr):
    """Put the keys whose weight reaches the level of a query, which is in shared memory, on its list."""
    _, key = gl.broadcast(exponent, key[:, None])
    counters = (counts + offset).to(gl.int64)
    lists = (found + offset * LISTED).to(gl.int64)
    offer_columns(exponent, levels, key, first, counters, lists, COUNT)


@gluon.jit
def offer_columns(exponent, levels, key, first, counters, lists, COUNT: gl.constexpr):
    """The same, by so many columns at a time that a thread has COUNT weights."""
    HALF: gl.constexpr = exponent.shape[1] // 2
    if HALF >= 2 * COUNT:
        left, right = halves(exponent)
        key_left, key_right = halves(key)
        offer_columns(left, levels.slice(0, HALF), key_left, first, counters, lists, COUNT)
        offer_columns(right, levels.slice(HALF, HALF), key_right, first + HALF, counters, lists, COUNT)
    else:
        layout: gl.constexpr = gl.SliceLayout(0, exponent.type.layout)
        # the first of a thread's columns: 2 · (lane modulo 4)
        query = first + (gl.arange(0, 2 * HALF, layout) & 6)[None, :]
        operands = [exponent, levels.load(layout)[None, :], key, query, counters, lists]
        TEXT: gl.constexpr = BY_32 if COUNT == 32 else BY_16
        gl.inline_asm_elementwise(TEXT[0], TEXT[1], operands, gl.int32, False, COUNT)


@gluon.jit
def denominator(peak, total, scale, factor):
    """(shift, correction): a weight is 2^(factor · score − shift) · correction; the correction is 1 but for rounding.

    `peak` is the largest score times scale. The shift is relative to the factor as rounded: the two products have to
    cancel, however large both are. Where a query sees nothing its shift is +inf, and NaN where a score is none.
    """
    peak = gl.where(total > 0, peak, 0.0)  # −inf − −inf is no number
    exact = peak.to(gl.float64) * (factor.to(gl.float64) / scale.to(gl.float64))
    some = gl.where(total > 0, total, 1.0)
    power = gl.log2(some)
    shift = (exact + power.to(gl.float64)).to(gl.float32)
    lost = (shift.to(gl.float64) - exact - power.to(gl.float64)).to(gl.float32)
    unseen = gl.where(total == total, float("inf"), total)  # a sum keeps NaN where a maximum does not
    return gl.where(total > 0, shift, unseen), gl.exp2(lost) * (gl.exp2(power) / some)


@gluon.jit(do_not_specialize=["rows"])
def choose(counts, found, peaks, totals, weights, indices, rows, scale, factor, TOP: gl.constexpr):
    """The largest weights of a block of queries, in descending order, and their keys, from their lists."""
    layout: gl.constexpr = gl.BlockedLayout([1, LISTED], [32, 1], [gl.num_warps(), 1], [1, 0])
    ROWS: gl.constexpr = 32 * gl.num_warps()
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    slot = gl.arange(0, LISTED, gl.SliceLayout(0, layout))
    count = gl.load(counts + row, row < rows, 0)
    listed = slot[None, :] < count[:, None]
    entry = gl.load(found + row.to(gl.int64)[:, None] * LISTED + slot[None, :], listed, 0)
    exponent = gl.where(listed, entry.to(gl.int32).to(gl.float32, bitcast=True), float("-inf"))
    key = gl.where(listed, (entry >> 32).to(gl.int32), NO_KEY)
    place = row.to(gl.int64) * TOP
    peak = gl.load(peaks + row, row < rows, 0.0)
    total = gl.load(totals + row, row < rows, 0.0)
    _, correction = denominator(peak, total, scale, factor)
    for rank in gl.static_range(TOP):
        most = gl.max(exponent, 1)
        chosen = gl.min(gl.where(exponent == most[:, None], key, NO_KEY), 1)
        weight = gl.where(total == total, gl.exp2(most) * correction, total)
        gl.store(weights + place + rank, weight, row < rows)
        gl.store(indices + place + rank, gl.where(weight > 0, chosen, -1).to(gl.int64), row < rows)
        exponent = gl.where(key == chosen[:, None], float("-inf"), exponent)


@triton.jit(do_not_specialize=["T", "S", "group", "upper", "lower", "mask"])
def search(
    q, k, counts, peaks, totals, weights, indices, q_batch, q_head, q_row, k_batch, k_head, k_row, T, S, group,
    upper, lower, mask, scale, softcap, factor,
    TOP: tl.constexpr, K: tl.constexpr, HEAD_DIM: tl.constexpr, UPPER: tl.constexpr, LOWER: tl.constexpr,
    PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr, HELD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The largest weights of the queries of a block that had more candidates than a list holds; mostly there are none.

    K is TOP or the next power of two. PROGRAM is a mask of any kind, with `mask` as its arrays, or None.
    """
    head, batch = tl.program_id(1), tl.program_id(2)
    search_block(
        q, k, counts, peaks, totals, weights, indices, q_batch, q_head, q_row, k_batch, k_head, k_row, T, S, group,
        upper, lower, mask, scale, softcap, factor, tl.program_id(0), head, batch, batch * tl.num_programs(1) + head,
        TOP, K, HEAD_DIM, UPPER, LOWER, PROGRAM, SOFTCAP, HELD, BM, BN,
    )  # fmt: skip


@triton.jit
def search_block(
    q, k, counts, peaks, totals, weights, indices, q_batch, q_head, q_row, k_batch, k_head, k_row, T, S, group,
    upper, lower, mask, scale, softcap, factor, block, head, batch, number,
    TOP: tl.constexpr, K: tl.constexpr, HEAD_DIM: tl.constexpr, UPPER: tl.constexpr, LOWER: tl.constexpr,
    PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr, HELD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The same of one block of one head."""
    rows = block * BM + tl.arange(0, BM)
    here = tl.cast(number, tl.int64) * T + rows
    many = tl.load(counts + here, mask=rows < T, other=0) > HELD
    if tl.max(many.to(tl.int32), 0) > 0:
        features = tl.arange(0, HEAD_DIM)
        q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
        k += batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
        queries = tl.load(q + rows.to(tl.int64)[:, None] * q_row + features[None, :], mask=(rows < T)[:, None], other=0)
        slots = tl.arange(0, K)[None, :]
        best = tl.where(slots < TOP, float("-inf"), float("inf")) + tl.zeros((BM, K), tl.float32)
        where = tl.full((BM, K), 2147483647, tl.int32)
        stop = S
        if UPPER:
            stop = tl.minimum(S, block * BM + BM + upper)
        for first in range(0, stop, BN):
            columns = first + tl.arange(0, BN)
            keys = tl.load(k + columns.to(tl.int64)[:, None] * k_row + features, mask=(columns < S)[:, None], other=0)
            scores = tl.dot(queries, tl.trans(keys))
            if SOFTCAP:
                scores = softcap - 2 * softcap / (tl.exp2(scores * (scale / softcap * 2 * 1.4426950408889634)) + 1)
            seen = (columns < S)[None, :] & many[:, None]
            if UPPER:
                seen = seen & (columns[None, :] <= rows[:, None] + upper)
            if LOWER:
                seen = seen & (columns[None, :] >= rows[:, None] + lower)
            if PROGRAM is not None:
                form: tl.constexpr = Only(PROGRAM)
                seen = seen & allowed_by_program(mask, rows[:, None], columns[None, :], head, batch, T, S, form)
            scores = tl.where(seen, scores, float("-inf"))
            worst = tl.min(best, 1)
            peak = tl.max(scores, 1)
            while tl.max((peak > worst).to(tl.int32), 0) > 0:
                better = peak > worst
                new = tl.min(tl.where(scores == peak[:, None], columns[None, :], 2147483647), 1)
                slot = tl.min(tl.where(best == worst[:, None], slots, K), 1)
                put = (slots == slot[:, None]) & better[:, None]
                best = tl.where(put, peak[:, None], best)
                where = tl.where(put, new[:, None], where)
                scores = tl.where((columns[None, :] == new[:, None]) & better[:, None], float("-inf"), scores)
                worst = tl.min(best, 1)
                peak = tl.max(scores, 1)
        ratio = tl.cast(factor, tl.float64) / tl.cast(scale, tl.float64)
        if SOFTCAP:
            ratio = tl.cast(factor, tl.float64)
        shift = tl.load(peaks + here, mask=rows < T, other=0.0).to(tl.float64) * ratio
        total = tl.load(totals + here, mask=rows < T, other=1.0)
        best = tl.where(slots < TOP, best, float("-inf"))
        for rank in range(TOP):
            most = tl.max(best, 1)
            chosen = tl.min(tl.where(best == most[:, None], where, 2147483647), 1)
            weight = tl.exp2((most.to(tl.float64) * factor - shift).to(tl.float32)) / total
            weight = tl.where(most == float("-inf"), 0.0, weight)
            tl.store(weights + here * TOP + rank, weight, mask=many & (rows < T))
            tl.store(indices + here * TOP + rank, tl.where(weight > 0, chosen, -1).to(tl.int64), mask=many & (rows < T))
            best = tl.where(where == chosen[:, None], float("-inf"), best)
