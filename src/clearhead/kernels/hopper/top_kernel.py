"""The largest weights on Hopper: keys that may be among them are put on a list of each query, then the best are chosen.

The forward gives for each query a score that at least `top` keys reach, and seldom more than one or two others do (see
`level_of` in `softmax.py`). The second look offers every weight; the few that reach the level are put on the query's
list, in whatever order they come. `choose_kernel.py` sorts them out. A query with more candidates than its list holds
is looked at again by `search`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from clearhead.kernels.gpu.device import allowed_by_program, next_tile
from clearhead.kernels.gpu.repair_kernel import part_of
from clearhead.kernels.gpu.tile_lists_kernel import Only
from clearhead.kernels.hopper.pipeline import await_others

HELD = 32  # candidates that a list holds
LISTED = gl.constexpr(HELD)


@cache
def offering(count: int, slots: int) -> tuple[str, str]:
    """Assembly and constraints for 16 or 32 weights of a thread: 2 keys, 8 apart, of 4 or 8 pairs of queries, 8 apart.

    What Gluon says about whole tiles of all warps cannot be said about one thread. Each weight is subtracted from its
    level, and the sign, which NaN does not have, is shifted into a mask: two instructions that wait for little. What
    lies behind the branch is short, a loop over the mask's bits: written out for each weight it filled the instruction
    cache and took three times as long as all the rest.

    A place on a list comes from memory, and waiting for it took a seventh to a quarter of the second look's time. So
    nobody waits: up to `slots` candidates of a thread are pending, with the place that was asked for, and each is put
    down when the next one comes to its slot, by when its place is there. The operands are `count` each of: result (what
    is pending now), weight, level, key, query, what was pending, address of the counters and of the lists. Of what is
    pending the first four of each slot count: place, row, key and weight; the place is −1 where there is none.
    """
    names = ("result", "weight", "level", "key", "query", "pending", "counters", "lists")
    operands = {name: [f"${count * i + j}" for j in range(count)] for i, name in enumerate(names)}
    weight, level, key = operands["weight"], operands["level"], operands["key"]
    lines = ["{", ".reg .pred some, is<32>;", ".reg .b64 at;"]
    lines += [f".reg .b32 mask, mask<4>, bit, place, row, entry, what, had<{4 * slots}>, picked<16>;"]
    lines += [*(f"mov.b32 had{i}, {operands['pending'][i]};" for i in range(4 * slots))]
    for chain in range(count // 8):  # none of which waits for another
        lines += [f"mov.b32 mask{chain}, 0;"]
    for i in range(7, -1, -1):
        for chain in range(count // 8):
            lines += [f"sub.f32 what, {level[8 * chain + i]}, {weight[8 * chain + i]};"]
            lines += [f"shf.l.wrap.b32 mask{chain}, what, mask{chain}, 1;"]
    lines += ["mov.b32 mask, mask0;"]
    lines += [f"mad.lo.u32 mask, mask{chain}, {1 << 8 * chain}, mask;" for chain in range(1, count // 8)]
    lines += ["setp.ne.u32 some, mask, 0;", "@!some bra DONE;"]
    lines += ["AGAIN:"]
    for pending in range(0, 4 * slots, 4):
        lines += ["bfind.u32 place, mask;", "mov.b32 bit, 1;", "shl.b32 bit, bit, place;", "xor.b32 mask, mask, bit;"]
        half, picked = count // 2, weight
        while half:
            lines += [f"and.b32 what, place, {half};", f"setp.ne.u32 is{half}, what, 0;"]
            lines += [f"selp.b32 picked{i}, {picked[i + half]}, {picked[i]}, is{half};" for i in range(half)]
            half, picked = half // 2, [f"picked{i}" for i in range(half)]
        lines += [
            *put_down(pending, operands["lists"][0]),
            "and.b32 what, place, 28;",
            "shl.b32 what, what, 1;",
            "and.b32 place, place, 1;",
            "add.s32 row, what, place;",
            f"add.s32 had{pending + 1}, row, {operands['query'][0]};",
            f"selp.b32 had{pending + 2}, {key[2]}, {key[0]}, is2;",
            f"mov.b32 had{pending + 3}, picked0;",
            f"mad.wide.s32 at, had{pending + 1}, 4, {operands['counters'][0]};",
            f"atom.global.add.u32 had{pending}, [at], 1;",
            "setp.ne.u32 some, mask, 0;",
            "@!some bra DONE;" if pending < 4 * (slots - 1) else "@some bra AGAIN;",
        ]
    lines += ["DONE:"]
    lines += [f"mov.b32 {place}, {f'had{i}' if i < 4 * slots else 0};" for i, place in enumerate(operands["result"])]
    lines += ["}"]
    return "\n".join(lines), ",".join(["=r"] * count + ["f"] * (2 * count) + ["r"] * (3 * count) + ["l"] * (2 * count))


def put_down(pending: int, lists: str) -> list[str]:
    """Assembly that writes a candidate to its place on the list of its row, if there is room; none is at place −1."""
    place, row, key, weight = (f"had{pending + i}" for i in range(4))
    return [
        f"setp.lt.u32 some, {place}, {HELD};",
        f"mad.lo.s32 entry, {row}, {HELD}, {place};",
        f"mad.wide.s32 at, entry, 8, {lists};",
        f"@some st.global.v2.b32 [at], {{{weight}, {key}}};",
    ]


@cache
def ending(count: int, slots: int) -> tuple[str, str]:
    """The same for the end: what is pending is put down. The operands are `count` of: result, pending, lists."""
    lines = ["{", ".reg .pred some;", f".reg .b32 entry, had<{4 * slots}>;", ".reg .b64 at;"]
    lines += [f"mov.b32 had{i}, ${count + i};" for i in range(4 * slots)]
    for pending in range(0, 4 * slots, 4):
        lines += put_down(pending, f"${2 * count}")
    lines += [f"mov.b32 ${i}, 0;" for i in range(count)] + ["}"]
    return "\n".join(lines), ",".join(["=r"] * count + ["r"] * count + ["l"] * count)


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [rows, 2, columns // 2]), [0, 2, 1]))


@gluon.jit
def none_pending(like, COUNT: gl.constexpr):
    """No candidate of any thread, in the form in which `offer` takes and gives them."""
    pending = gl.full(like.shape, -1, gl.int32, like.type.layout)
    for _ in gl.static_range(2):
        if pending.shape[1] >= 4 * COUNT:
            pending, _right = halves(pending)
    return pending


@gluon.jit
def offer(pending, exponent, levels, key, first, counts, found, offset, CONFIG: gl.constexpr):
    """Put keys whose weight is above the level of a query, which is in shared memory, on its list; what is pending."""
    _, key = gl.broadcast(exponent, key[:, None])
    counters = (counts + offset).to(gl.int64)
    lists = (found + offset * LISTED).to(gl.int64)
    return offer_columns(pending, exponent, levels, key, first, counters, lists, CONFIG)


@gluon.jit
def offer_columns(pending, exponent, levels, key, first, counters, lists, CONFIG: gl.constexpr):
    """The same, by so many columns at a time that a thread has as many weights as it compares at once."""
    COUNT: gl.constexpr = CONFIG.value.offered
    HALF: gl.constexpr = exponent.shape[1] // 2
    if HALF >= 2 * COUNT:
        left, right = halves(exponent)
        key_left, key_right = halves(key)
        pending = offer_columns(pending, left, levels.slice(0, HALF), key_left, first, counters, lists, CONFIG)
        pending = offer_columns(
            pending, right, levels.slice(HALF, HALF), key_right, first + HALF, counters, lists, CONFIG
        )
    else:
        layout: gl.constexpr = gl.SliceLayout(0, exponent.type.layout)
        # the first of a thread's columns: 2 · (lane modulo 4)
        query = first + (gl.arange(0, 2 * HALF, layout) & 6)[None, :]
        levels = levels.load(layout)
        operands = [exponent, levels[None, :], key, query, pending, counters, lists]
        TEXT: gl.constexpr = CONFIG.value.offering
        pending = gl.inline_asm_elementwise(TEXT[0], TEXT[1], operands, gl.int32, False, COUNT)
    return pending


@gluon.jit
def end_offers(pending, found, offset, CONFIG: gl.constexpr):
    """What is pending goes to its lists."""
    lists = (found + offset * LISTED).to(gl.int64)
    TEXT: gl.constexpr = CONFIG.value.ending
    gl.inline_asm_elementwise(TEXT[0], TEXT[1], [pending, lists], gl.int32, False, CONFIG.value.offered)


class KeyEdges(NamedTuple):
    """Keys that queries see, a run for each: (1 or B, T, 2), the first and the one after the last, from `start` on."""

    edges: Any
    step: int  # from one batch row to the next
    start: int


@triton.jit(do_not_specialize=["T", "S", "each", "count", "heads", "group", "upper", "lower", "mask", "runs"])
def search(
    q, k, counts, peaks, totals, weights, indices, q_batch, q_head, q_row, k_batch, k_head, k_row, T, S, each, count,
    heads, group, upper, lower, mask, runs, scale, softcap, factor,
    TOP: tl.constexpr, K: tl.constexpr, HEAD_DIM: tl.constexpr, UPPER: tl.constexpr, LOWER: tl.constexpr,
    PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr, HELD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    N: tl.constexpr, AFTER: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """The largest weights of the queries that had more candidates than a list holds; mostly there are none.

    A program has `each` of `count` blocks of queries. K is TOP or the next power of two. PROGRAM is a mask of any kind,
    with `mask` as its arrays, or None; with RUNS it lets no query see a key outside its run. With AFTER it may begin
    while the largest weights are still being chosen, all else being there.
    """
    blocks, first, last, start, stop = part_of(tl.program_id(0), T, each, count, BM)
    some = 0
    for at in range(start, stop, N):
        places = at + tl.arange(0, N)
        many = tl.load(counts + places, mask=places < stop, other=0, cache_modifier=".cg") > HELD
        some = tl.maximum(some, tl.max(many.to(tl.int32), 0))
    if AFTER:
        await_others()
    if some > 0:
        alone: tl.constexpr = Only(None)  # tiles come one after the other
        for index in range(first, last):
            number, block = index // blocks, index % blocks
            head, batch = tl.cast(number % heads, tl.int32), tl.cast(number // heads, tl.int32)
            if has_many(counts, number, block, T, HELD, BM):
                low, high = 0, S
                if UPPER:
                    high = tl.minimum(S, block * BM + BM + upper)
                if LOWER:
                    low = tl.maximum(0, block * BM + lower)
                if RUNS:
                    rows = block * BM + tl.arange(0, BM)
                    run = runs.edges + tl.cast(batch, tl.int64) * runs.step + 2 * rows
                    low = runs.start + tl.min(tl.load(run, mask=rows < T, other=S), 0)
                    high = runs.start + tl.max(tl.load(run + 1, mask=rows < T, other=0), 0)
                low = low // BN
                tiles = 0, tl.maximum(tl.cdiv(high, BN) - low, 0), low, low, low
                search_block(
                    q, k, counts, peaks, totals, weights, indices, q_batch, q_head, q_row, k_batch, k_head, k_row,
                    T, S, group, upper, lower, mask, scale, softcap, factor, block, head, batch, number, tiles, (),
                    TOP, K, HEAD_DIM, UPPER, LOWER, PROGRAM, SOFTCAP, HELD, BM, BN, alone,
                )  # fmt: skip


@triton.jit
def has_many(counts, number, block, T, HELD: tl.constexpr, BM: tl.constexpr):
    """Has a query of a block more candidates than a list holds?"""
    rows = block * BM + tl.arange(0, BM)
    many = tl.load(counts + tl.cast(number, tl.int64) * T + rows, mask=rows < T, other=0) > HELD
    return tl.max(many.to(tl.int32), 0) > 0


@triton.jit
def search_block(
    q, k, counts, peaks, totals, weights, indices, q_batch, q_head, q_row, k_batch, k_head, k_row, T, S, group,
    upper, lower, mask, scale, softcap, factor, block, head, batch, number, tiles, lists,
    TOP: tl.constexpr, K: tl.constexpr, HEAD_DIM: tl.constexpr, UPPER: tl.constexpr, LOWER: tl.constexpr,
    PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr, HELD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """The same of one block of one head, over the tiles that `key_tiles` gave for this form, in the order of keys."""
    rows = block * BM + tl.arange(0, BM)
    here = tl.cast(number, tl.int64) * T + rows
    many = tl.load(counts + here, mask=rows < T, other=0) > HELD
    features = tl.arange(0, HEAD_DIM)
    q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    k += batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    queries = tl.load(q + rows.to(tl.int64)[:, None] * q_row + features[None, :], mask=(rows < T)[:, None], other=0)
    slots = tl.arange(0, K)[None, :]
    best = tl.where(slots < TOP, float("-inf"), float("inf")) + tl.zeros((BM, K), tl.float32)
    where = tl.full((BM, K), 2147483647, tl.int32)
    mixed, full, a, b, c = tiles
    seen_mixed = 0
    for i in range(mixed + full):
        tile, _masked, seen_mixed = next_tile(lists, i, seen_mixed, mixed, full, a, b, c, form)
        columns = tile * BN + tl.arange(0, BN)
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
            rule: tl.constexpr = Only(PROGRAM)
            seen = seen & allowed_by_program(mask, rows[:, None], columns[None, :], head, batch, T, S, rule)
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
