"""Blocks of queries computed anew, of which another kernel has marked a row as not finite."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from clearhead.kernels.gpu.softmax_kernel import finish, store_output, sums_of_block


@triton.jit(do_not_specialize=["span", "lists", "mask", "scoring", "each", "count", "heads"])
def repair(
    q, k, v, out, odd_at, unrounded, totals, told, q_strides, k_strides, v_strides, out_strides,
    span, lists, mask, scoring, T, S, each, count, heads,
    UNROUNDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr, form: tl.constexpr,
    AFTER: tl.constexpr,
):  # fmt: skip
    """The output anew, of blocks of queries that have a row marked as not finite; a program has `each` of `count`.

    It may be so by a value that a query does not see: in the product of a tile its weight of 0 times NaN is NaN. Each
    program also says whether there was such a row, or one without a sum. With AFTER it may begin before the other ends.
    """
    if AFTER:
        gdc_wait()
    blocks, first, last, start, stop = part_of(tl.program_id(0), T, each, count, BM)
    some, empty = 0, 0
    for at in range(start, stop, N):  # nearly always there is none
        places = at + tl.arange(0, N)
        some = tl.maximum(some, tl.max(tl.load(odd_at + places, mask=places < stop, other=0), 0))
        empty = tl.maximum(empty, without_sum(totals, places, stop))
    tl.store(told + tl.program_id(0), tl.maximum(some, empty))
    if some > 0:
        for index in range(first, last):
            repair_block(
                q, k, v, out, odd_at, unrounded, q_strides, k_strides, v_strides, out_strides, span, lists, mask,
                scoring, index // blocks, index % blocks, T, S, heads, UNROUNDED, BM, BN, form,
            )  # fmt: skip


@triton.jit
def without_sum(totals, places, stop):
    """1 where some row sees nothing, or nothing that is more than 0."""
    return tl.max((tl.load(totals + places, mask=places < stop, other=1.0) == 0).to(tl.int32), 0)


@triton.jit
def part_of(program, T, each, count, BM: tl.constexpr):
    """Blocks of a head; of a program, which has `each` of `count`: its first, the one behind its last, their rows."""
    blocks = tl.cdiv(T, BM)
    first = program * each
    last = tl.minimum(first + each, count)
    return (
        blocks, first, last,
        first // blocks * T + first % blocks * BM, last // blocks * T + last % blocks * BM,
    )  # fmt: skip


@triton.jit
def repair_block(
    q, k, v, out, odd_at, unrounded, q_strides, k_strides, v_strides, out_strides, span, lists, mask, scoring, number,
    block, T, S, heads, UNROUNDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The output of one block anew, if it has a row that is marked."""
    rows = block * BM + tl.arange(0, BM)
    here = tl.cast(number, tl.int64) * T + rows
    inside = rows < T
    if tl.max(tl.load(odd_at + here, mask=inside, other=0), 0) > 0:
        values, largest, sums, weighted = sums_of_block(
            q, k, v, q_strides, k_strides, v_strides, (k, v), span, lists, mask, scoring,
            number, block, rows, T, S, False, False, BM, BN, form,
        )  # fmt: skip
        share, _, _, _, _, _ = finish(largest, sums, weighted, 0.0, scoring, False, False, form)
        batch, head = tl.cast(number // heads, tl.int64), tl.cast(number % heads, tl.int64)
        place = batch * out_strides[0] + head * out_strides[1] + rows.to(tl.int64) * out_strides[2]
        store_output(out, unrounded, values * share[:, None], place, here, inside, UNROUNDED, form)
