"""Blocks of queries computed anew, of which another kernel has marked a row as not finite."""

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.kernels.gpu.softmax_kernel import finish, store_output, sums_of_block


@triton.jit(do_not_specialize=["span", "lists", "mask", "scoring", "each", "count"])
def repair(
    q, k, v, out, odd_at, unrounded, q_strides, k_strides, v_strides,
    span, lists, mask, scoring, T, S, each, count,
    UNROUNDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The output anew, of blocks of queries that have a row marked as not finite; a program has `each` of `count`.

    It may be so by a value that a query does not see: in the product of a tile its weight of 0 times NaN is NaN.
    """
    blocks, first, last, start, stop = part_of(tl.program_id(0), T, each, count, BM)
    some = 0
    for at in range(start, stop, N):  # nearly always there is none
        places = at + tl.arange(0, N)
        some = tl.maximum(some, tl.max(tl.load(odd_at + places, mask=places < stop, other=0), 0))
    if some > 0:
        for index in range(first, last):
            repair_block(
                q, k, v, out, odd_at, unrounded, q_strides, k_strides, v_strides, span, lists, mask, scoring,
                index // blocks, index % blocks, T, S, UNROUNDED, BM, BN, form,
            )  # fmt: skip


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
    q, k, v, out, odd_at, unrounded, q_strides, k_strides, v_strides, span, lists, mask, scoring, number, block, T, S,
    UNROUNDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
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
        store_output(out, unrounded, values * share[:, None], here, inside, UNROUNDED, form)
