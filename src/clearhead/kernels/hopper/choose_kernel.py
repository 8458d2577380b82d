"""The largest weights on Hopper, chosen from each query's list of candidates (`top_kernel.py`).

They are sorted by weight, then by key: in what order candidates were put on the list does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from clearhead.kernels.hopper.pipeline import await_others, others_may_begin
from clearhead.kernels.hopper.top_kernel import HELD, LISTED

NO_KEY = gl.constexpr(2147483647)
NOT_LISTED = "0x807fffff"  # −inf, in a form that orders as an integer does


def first_eight() -> tuple[str, str]:
    """Assembly and constraints for the eight largest of a list, in order: four of them in each of two threads.

    A thread has eight entries, or sixteen where a list of its warp is more than half full. An entry is a number of 64
    bits, the weight in a form that orders as an integer does before the key, of which the smaller goes first. Each
    thread sorts its own; of two sorted eights the larger of A's first and B's last, A's second and B's last but one,
    and so on are the eight largest; and of those the even thread takes the upper half.
    The operands are four exponents and four keys that are given, the list's address and its length, four times each.
    """
    sort = ((0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (1, 3), (4, 6), (5, 7), (1, 2), (5, 6), (0, 4), (1, 5), (2, 6),
            (3, 7), (2, 4), (3, 5), (1, 2), (3, 4), (5, 6))  # fmt: skip
    merge = tuple((i, i + step) for step in (4, 2, 1) for i in range(8) if not i & step)
    lines = ["{", ".reg .pred is, odd, more;", ".reg .b32 lane, begin, left, word, key, sign;"]
    lines += [".reg .b64 at, spare, x<8>, y<8>;", "mov.u32 lane, %laneid;", "and.b32 lane, lane, 1;"]
    lines += ["setp.ne.u32 odd, lane, 0;", "shl.b32 begin, lane, 3;"]

    def entries(name: str, first: int) -> list[str]:
        text = [f"add.u32 key, begin, {first};", "sub.s32 left, $12, key;", "mad.wide.u32 at, key, 8, $8;"]
        text += [f"ld.global.v2.b64 {{{name}{i}, {name}{i + 1}}}, [at+{8 * i}];" for i in range(0, 8, 2)]
        for i in range(8):
            text += [f"mov.b64 {{word, key}}, {name}{i};", "shr.s32 sign, word, 31;"]
            text += ["and.b32 sign, sign, 0x7fffffff;", "xor.b32 word, word, sign;", "not.b32 key, key;"]
            text += [f"setp.gt.s32 is, left, {i};", f"selp.b32 word, word, {NOT_LISTED}, is;"]
            text += ["selp.b32 key, key, 0, is;", f"mov.b64 {name}{i}, {{key, word}};"]
        return text

    def in_order(name: str, pairs: Iterable[tuple[int, int]]) -> list[str]:
        text = "setp.gt.s64 is, {1}, {0}; selp.b64 spare, {1}, {0}, is; selp.b64 {1}, {0}, {1}, is; mov.b64 {0}, spare;"
        return [text.format(f"{name}{i}", f"{name}{j}") for i, j in pairs]

    larger = [f"setp.gt.s64 is, y{i}, x{i}; selp.b64 x{i}, y{i}, x{i}, is;" for i in range(8)]
    lines += [*entries("x", 0), *in_order("x", sort)]
    lines += [f"setp.gt.s32 is, $12, {HELD // 2};", "vote.sync.any.pred more, is, 0xffffffff;", "@!more bra ENOUGH;"]
    lines += [*entries("y", HELD // 2), *in_order("y", sort)]
    lines += [f"mov.b64 spare, y{i}; mov.b64 y{i}, y{7 - i}; mov.b64 y{7 - i}, spare;" for i in range(4)]
    lines += [*larger, *in_order("x", merge), "ENOUGH:"]
    for i in range(8):
        lines += [f"mov.b64 {{word, key}}, x{7 - i};"]
        lines += [f"shfl.sync.bfly.b32 {name}, {name}, 1, 0x1f, 0xffffffff;" for name in ("word", "key")]
        lines += [f"mov.b64 y{i}, {{word, key}};"]
    lines += larger
    for i in range(4):
        lines += [f"setp.gt.xor.s64 is, x{i}, x{i + 4}, odd;", f"selp.b64 x{i}, x{i}, x{i + 4}, is;"]
    lines += in_order("x", ((0, 2), (1, 3), (0, 1), (2, 3)))
    for i in range(4):
        lines += [f"mov.b64 {{key, word}}, x{i};", f"not.b32 ${4 + i}, key;", "shr.s32 sign, word, 31;"]
        lines += ["and.b32 sign, sign, 0x7fffffff;", "xor.b32 word, word, sign;", f"mov.b32 ${i}, word;"]
    return "\n".join([*lines, "}"]), ",".join(["=f"] * 4 + ["=r"] * 4 + ["l"] * 4 + ["r"] * 4)


FIRST_EIGHT = gl.constexpr(first_eight())


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
def choose(counts, found, peaks, totals, weights, indices, rows, scale, factor, TOP: gl.constexpr, K: gl.constexpr):
    """The largest weights of a block of queries, in descending order, and their keys, from their lists.

    K is TOP or the next power of two. Up to eight come from a network that sorts, with two threads a query; more by
    rounds, with four threads a query, each a part of its list and of its results, side by side in memory: with one a
    query there were too few to wait for memory with. Most lists are less than half full.
    """
    await_others()
    others_may_begin()
    if TOP <= 8:
        choose_sorted(counts, found, peaks, totals, weights, indices, rows, scale, factor, TOP)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        ROWS: gl.constexpr = 8 * gl.num_warps()
        first = gl.program_id(0) * ROWS
        row = first + gl.arange(0, ROWS, layout)
        many = gl.max(gl.load(counts + row, row < rows, 0), 0)
        if many <= LISTED // 2:
            choose_of(counts, found, peaks, totals, weights, indices, first, rows, scale, factor, LISTED // 2, TOP, K)
        else:
            choose_of(counts, found, peaks, totals, weights, indices, first, rows, scale, factor, LISTED, TOP, K)


@gluon.jit
def choose_sorted(counts, found, peaks, totals, weights, indices, rows, scale, factor, TOP: gl.constexpr):
    """Up to eight of the largest, sorted: thread by thread, and then of the two that have a query."""
    ROWS: gl.constexpr = 16 * gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [gl.num_warps(), 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    inside = row < rows
    row = gl.minimum(row, rows - 1)
    column = gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    count = gl.load(counts + row)[:, None]
    lists = (found + row.to(gl.int64) * LISTED).to(gl.int64)[:, None]
    column, count = gl.broadcast(column, count)
    column, lists = gl.broadcast(column, lists)
    peak = gl.load(peaks + row)
    total = gl.load(totals + row)
    TEXT: gl.constexpr = FIRST_EIGHT
    exponent, key = gl.inline_asm_elementwise(TEXT[0], TEXT[1], [lists, count], (gl.float32, gl.int32), False, 4)
    _, correction = denominator(peak, total, scale, factor)
    weight = gl.where((total == total)[:, None], gl.exp2(exponent) * correction[:, None], total[:, None])
    which = gl.where(weight > 0, key, -1)
    place = row.to(gl.int64)[:, None] * TOP + column
    written = inside[:, None] & (column < TOP)
    gl.store(weights + place, weight, written)
    gl.store(indices + place, which.to(gl.int64), written)


@gluon.jit
def choose_of(counts, found, peaks, totals, weights, indices, first, rows, scale, factor, SLOTS: gl.constexpr,
              TOP: gl.constexpr, K: gl.constexpr):  # fmt: skip
    """The same where lists hold so many at most."""
    ROWS: gl.constexpr = 8 * gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, SLOTS // 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    EACH: gl.constexpr = K // 4 if K >= 4 else 1
    ranks: gl.constexpr = gl.BlockedLayout([1, EACH], [8, 4], [gl.num_warps(), 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, ranks)
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    count = gl.load(counts + row, row < rows, 0)
    peak = gl.load(peaks + row, row < rows, 0.0)
    total = gl.load(totals + row, row < rows, 0.0)
    slot = gl.arange(0, SLOTS, gl.SliceLayout(0, layout))
    listed = slot[None, :] < count[:, None]
    entry = gl.load(found + row.to(gl.int64)[:, None] * LISTED + slot[None, :], listed, 0)
    exponent = gl.where(listed, entry.to(gl.int32).to(gl.float32, bitcast=True), float("-inf"))
    key = gl.where(listed, (entry >> 32).to(gl.int32), NO_KEY)
    _, correction = denominator(peak, total, scale, factor)
    column = gl.arange(0, K, gl.SliceLayout(0, ranks))[None, :]
    best = gl.full([ROWS, K], 0.0, gl.float32, ranks)
    keys = gl.full([ROWS, K], -1, gl.int32, ranks)
    for rank in gl.static_range(TOP):
        most = gl.max(exponent, 1)
        chosen = gl.min(gl.where(exponent == most[:, None], key, NO_KEY), 1)
        weight = gl.where(total == total, gl.exp2(most) * correction, total)
        which = gl.where(weight > 0, chosen, -1)
        best = gl.where(column == rank, gl.convert_layout(weight, by_row, assert_trivial=True)[:, None], best)
        keys = gl.where(column == rank, gl.convert_layout(which, by_row, assert_trivial=True)[:, None], keys)
        exponent = gl.where(key == chosen[:, None], float("-inf"), exponent)
    row = gl.convert_layout(row, by_row, assert_trivial=True)
    place = row.to(gl.int64)[:, None] * TOP + column
    written = (row < rows)[:, None] & (column < TOP)
    gl.store(weights + place, best, written)
    gl.store(indices + place, keys.to(gl.int64), written)
