"""What Hopper's forward does to a tile of scores: cap, bias, mask, exponentials; and p as an operand."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(math.log2(math.e))


class Scales(NamedTuple):
    """What turns products into scores, and scores into exponents of 2."""

    scale: Any
    softcap: Any
    factor: Any
    slope: Any


class Rows(NamedTuple):
    """Of each row so far the peak, c·peak, Σ p, Σ p log2 p, and the largest score of each of a few groups of keys.

    Of the sums each of the four threads that share a row has its own part: they are added up once, not for each tile.
    """

    peak: Any
    shift: Any
    total: Any
    weighted: Any
    best: Any


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
def seen_in(tile, sees, MASKED: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """What `soften` is told of who sees whom in a tile: of a mixed one its bits, asked for before its scores are there.

    Bits come from memory, and products are waited for meanwhile.
    """
    if FORM.value.tiles and MASKED:
        words, end, position = sees
        COLUMNS: gl.constexpr = CONFIG.value.columns
        EACH: gl.constexpr = CONFIG.value.rows * CONFIG.value.consumers * 4
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])
        words = bits_of(words + (end - 1 - tile) * EACH, CONFIG.value.rows, COLUMNS, layout)
        sees = (words, end, position)
    return sees


@gluon.jit
def added_by_thread(x):
    """Sums along a row of what each thread has of it: (rows, 4)."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return gl.sum(gl.sum(gl.reshape(x, [rows, columns // 8, 4, 2]), 3), 1)


@gluon.jit
def of_rows(x, like):
    """A number of each row, for what is `like` a sum by thread."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def added_up(x, like):
    """What the threads of a row added, as one number of each row that lies as `like` does."""
    return gl.convert_layout(gl.sum(x, 1), like.type.layout, assert_trivial=True)


@gluon.jit
def soften(scores, tile, rows, scales, sees, MASKED: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """p for a tile of scores; alpha, which the sums so far are multiplied with; and what is known of each row.

    With `top`, also the largest score of each of a few groups of keys.
    """
    peak, shift, total, weighted, best = rows
    scale, softcap, factor, slope = scales
    if FORM.value.softcap:
        scores = capped(scores, scale, softcap)
    if FORM.value.tiles:
        if MASKED:
            scores = masked_by_bits(scores, sees[0])
    elif MASKED or FORM.value.alibi:
        scores = biased_and_masked(scores, tile * CONFIG.value.columns, slope, sees, MASKED, FORM)
    if FORM.value.top:
        if FORM.value.tiles:
            best = turned(best, FORM)
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
    alpha = gl.exp2(shift - finite)
    if FORM.value.entropy:
        if MASKED:
            exponent = gl.maximum(exponent, -3e38)  # 0 · −inf is no number, and NaN is in p
        terms = p * exponent
        moved = of_rows(gl.where(peak == float("-inf"), 0.0, shift - finite), total)
        weighted = (weighted + moved * total) * of_rows(alpha, total) + added_by_thread(terms)
    total = total * of_rows(alpha, total) + added_by_thread(p)
    return p, alpha, Rows(new_peak, new_shift, total, weighted, best)


@gluon.jit
def biased_and_masked(scores, first, slope, sees, MASKED: gl.constexpr, FORM: gl.constexpr):
    """Scores less ALiBi's slope times the distance, and −inf for keys that a query does not see.

    Columns are taken as (columns // 8, 8): all of the first axis is one thread's, and so its numbers are written into
    the instructions. Converted and kept, each column's own would take a register.
    """
    start, stop, position = sees
    flat: gl.constexpr = scores.type.layout
    rows: gl.constexpr = scores.shape[0]
    columns: gl.constexpr = scores.shape[1]
    split = gl.reshape(scores, [rows, columns // 8, 8])
    layout: gl.constexpr = split.type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    eighth = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    eight = 8 * gl.arange(0, columns // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    if FORM.value.alibi:
        back = gl.convert_layout(position - first, by_row, assert_trivial=True)[:, None, None] - eighth
        split -= gl.abs(back.to(gl.float32) * slope - eight.to(gl.float32) * slope)
    if MASKED:
        left = gl.convert_layout(stop - first, by_row, assert_trivial=True)[:, None, None] - eighth
        seen = eight < left
        if FORM.value.lower:
            ahead = gl.convert_layout(start - first, by_row, assert_trivial=True)[:, None, None] - eighth
            seen = seen & (eight >= ahead)
        split = gl.where(seen, split, float("-inf"))
    return gl.convert_layout(gl.reshape(split, [rows, columns]), flat, assert_trivial=True)


@gluon.jit
def bits_of(words, rows: gl.constexpr, columns: gl.constexpr, flat: gl.constexpr):
    """The bits of a mixed tile (`tile_bits`), for scores that lie so: one word of each row in a thread."""
    split = gl.reshape(gl.full([rows, columns], 0, gl.int32, flat), [rows, columns // 8, 4, 2])
    layout: gl.constexpr = split.type.layout
    row = gl.arange(0, rows, gl.SliceLayout(1, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    quad = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    return gl.load(words + row[:, None] * 4 + quad[None, :])


@gluon.jit
def masked_by_bits(scores, bits):
    """−inf for the pairs of a mixed tile that are not allowed."""
    flat: gl.constexpr = scores.type.layout
    rows: gl.constexpr = scores.shape[0]
    columns: gl.constexpr = scores.shape[1]
    split = gl.reshape(scores, [rows, columns // 8, 4, 2])
    layout: gl.constexpr = split.type.layout
    bits = bits[:, None, :][:, :, :, None]
    eighth = gl.arange(0, columns // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, layout))))
    place = 2 * eighth[None, :][:, :, None][:, :, :, None] + one[None, :][None, :, :][None, :, :, :]
    split = gl.where(((bits >> place) & 1) != 0, split, float("-inf"))
    return gl.convert_layout(gl.reshape(split, [rows, columns]), flat, assert_trivial=True)


@gluon.jit
def largest_by_group(scores, FORM: gl.constexpr):
    """The largest score of each row among the keys of each group: (rows, groups), without a word between threads.

    A group is the keys of one place modulo their number. Under a mask of any kind it is pairs of neighbours, and one
    of the four threads that share a row has each fourth pair: see `turned`.
    """
    rows: gl.constexpr = scores.shape[0]
    columns: gl.constexpr = scores.shape[1]
    if FORM.value.tiles:
        SLOTS: gl.constexpr = FORM.value.groups // 4
        pairs = gl.max(gl.reshape(scores, [rows, columns // (8 * SLOTS), SLOTS, 4, 2]), 4)
        largest = gl.reshape(gl.max(pairs, 1), [rows, FORM.value.groups])
    else:
        largest = gl.max(gl.reshape(scores, [rows, columns // FORM.value.groups, FORM.value.groups]), 1)
    return largest


@cache
def turning(slots: int) -> tuple[str, str]:
    """Assembly and constraints for `turned`: groups of two rows, of which a thread has so many each.

    A thread's go to the next thread, and there one place on. So what lies at one place of each tile comes to all
    groups, and what all groups of one thread hold of a tile is kept apart from what they hold of the next.
    The operands are 2 · slots results, of each group the one of a row and the one of the row eight on, and as many
    numbers.
    """
    count = 2 * slots
    lines = ["{", f".reg .b32 lane, next, x<{count}>;", "mov.u32 lane, %laneid;", "add.u32 next, lane, 3;"]
    lines += ["and.b32 next, next, 3;", "and.b32 lane, lane, 28;", "or.b32 lane, lane, next;"]
    lines += [f"mov.b32 x{i}, ${count + i};" for i in range(count)]
    lines += [f"shfl.sync.bfly.b32 ${i}, x{count - 2 + i}, 2, 0x1f, 0xffffffff;" for i in range(2)]
    lines += [f"shfl.sync.idx.b32 ${i}, x{i - 2}, lane, 0x1f, 0xffffffff;" for i in range(2, count)]
    return "\n".join([*lines, "}"]), ",".join(["=f"] * count + ["f"] * count)


TURNING = gl.constexpr({groups: turning(groups // 4) for groups in (16, 32)})


@gluon.jit
def turned(best, FORM: gl.constexpr):
    """The groups as the next tile's places are told of them: a place does not stay with a group.

    What a mask lets through may lie at one place of each tile, or with one of the threads that share a row, as under
    `dilated(16)`. Of groups that stay where they are few would hold anything then, and from too few there is no level.
    """
    TEXT: gl.constexpr = TURNING.value[FORM.value.groups]
    return gl.inline_asm_elementwise(TEXT[0], TEXT[1], [best], gl.float32, False, FORM.value.groups // 2)


def half_of_sixteen(tiles: bool = False) -> tuple[str, str]:
    """Assembly and constraints for the eighth largest of 16 numbers of two rows, of which four threads have four each.

    By rounds, each of which takes away the largest, it was two fifths of the code that a block ends with, and code that
    runs once a block is waited for. Here each thread sorts its own, two threads part theirs into the four larger and
    the four smaller ones, and of two such eights, sorted, the eighth largest is the least of the larger ones of A's
    first and B's last, A's second and B's last but one, and so on. What is given is still to be taken the least of by
    threads.
    The operands are eight results and eight numbers: two of a row, two of the row eight on, and the same once more.
    With `tiles` rows take turns.
    """
    lines = ["{", ".reg .pred odd;", ".reg .b32 lane;", ".reg .f32 x<4>, y<4>, z;"]
    lines += ["mov.u32 lane, %laneid;", "and.b32 lane, lane, 1;", "setp.ne.u32 odd, lane, 0;"]

    def in_order(*pairs: tuple[int, int]) -> list[str]:
        text = "max.f32 z, x{0}, x{1}; min.f32 x{1}, x{0}, x{1}; mov.f32 x{0}, z;"
        return [text.format(i, j) for i, j in pairs]

    def from_thread(other: int) -> list[str]:
        return [f"shfl.sync.bfly.b32 y{i}, x{3 - i}, {other}, 0x1f, 0xffffffff;" for i in range(4)]

    for row in ((0, 2, 4, 6), (1, 3, 5, 7)) if tiles else ((0, 1, 4, 5), (2, 3, 6, 7)):
        lines += [f"mov.f32 x{i}, ${8 + place};" for i, place in enumerate(row)]
        lines += in_order((0, 1), (2, 3), (0, 2), (1, 3), (1, 2))
        lines += from_thread(1)
        for i in range(4):
            lines += [f"max.f32 z, x{i}, y{i}; min.f32 y{i}, x{i}, y{i}; selp.f32 x{i}, y{i}, z, odd;"]
        lines += in_order((0, 2), (1, 3), (0, 1), (2, 3))
        lines += from_thread(3)
        lines += [f"max.f32 x{i}, x{i}, y{i};" for i in range(4)]
        lines += ["min.f32 x0, x0, x1;", "min.f32 x2, x2, x3;", "min.f32 x0, x0, x2;"]
        lines += [f"mov.f32 ${place}, x0;" for place in row]
    return "\n".join([*lines, "}"]), ",".join(["=f"] * 8 + ["f"] * 8)


HALF_OF_SIXTEEN = gl.constexpr((half_of_sixteen(), half_of_sixteen(tiles=True)))


@gluon.jit
def level_of(best, FORM: gl.constexpr):
    """A score that at least `top` keys of each row reach, and hardly more: −inf where there are fewer groups."""
    if FORM.value.top == 8 and FORM.value.groups == 16:
        TEXT: gl.constexpr = HALF_OF_SIXTEEN.value[FORM.value.tiles]
        half = gl.inline_asm_elementwise(TEXT[0], TEXT[1], [best], gl.float32, False, 8)
        level, _ = gl.split(gl.permute(gl.reshape(half, [best.shape[0], 2, 8]), [0, 2, 1]))
        if FORM.value.tiles:
            level, _ = gl.split(gl.permute(gl.reshape(level, [best.shape[0], 2, 4]), [0, 2, 1]))
        else:
            level, _ = gl.split(gl.reshape(level, [best.shape[0], 4, 2]))
        level = gl.min(level, 1)
    else:
        level = gl.max(best, 1)
        for _ in gl.static_range(FORM.value.top - 1):
            best = gl.where(best == level[:, None], float("-inf"), best)
            level = gl.max(best, 1)
    return level


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
    halves = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), True, 1)
    p = gl.reshape(gl.join(halves[0], halves[1]), [rows, columns]).to(q.dtype, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, sums.type.layout, 2), assert_trivial=True)


@gluon.jit
def relative_to_scaled(rows, scales, FORM: gl.constexpr):
    """The peak times scale, and for it Σ e^x and Σ x e^x: p was relative to c·peak as rounded, a little off."""
    peak, shift, total, weighted, _ = rows
    scale, factor = scales.scale, scales.factor
    if FORM.value.softcap:
        scale = 1.0
    scaled = rounded_product(peak, scale)
    slip = (peak * scale - scaled) * LOG2E - (peak * factor - shift)  # each a multiply-add: what rounding took away
    slip = gl.where(peak == float("-inf"), 0.0, slip)
    return scaled, total * gl.exp2(slip), (weighted + slip * total) * gl.exp2(slip) / LOG2E
