"""What is seldom left to do after both looks, in one launch: rows that are not finite, lists that were too short."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from clearhead.kernels.gpu.device import key_tiles
from clearhead.kernels.gpu.repair_kernel import part_of, repair_block, without_sum
from clearhead.kernels.hopper.top_kernel import has_many, search_block


@triton.jit(do_not_specialize=["span", "lists", "mask", "scoring", "each", "count", "group", "upper", "lower"])
def mend(
    q, k, v, out, odd_at, unrounded, told, counts, peaks, totals, weights, indices, q_strides, k_strides, v_strides,
    out_strides, span, lists, mask, scoring, T, S, each, count, heads, group, upper, lower, scale, softcap, factor,
    UNROUNDED: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, HEAD_DIM: tl.constexpr, UPPER: tl.constexpr,
    LOWER: tl.constexpr, PROGRAM: tl.constexpr, SOFTCAP: tl.constexpr, HELD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, N: tl.constexpr, form: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """What `repair` and `search` do, of blocks of queries; a program has `each` of `count`.

    With AFTER it may begin while the largest weights are still being chosen, all else being there.
    """
    blocks, first, last, start, stop = part_of(tl.program_id(0), T, each, count, BM)
    some, empty, odd = 0, 0, 0
    for at in range(start, stop, N):  # nearly always there is none
        places = at + tl.arange(0, N)
        marked = tl.load(odd_at + places, mask=places < stop, other=0, cache_modifier=".cg")  # of kernels just ended
        odd = tl.maximum(odd, tl.max(marked, 0))
        many = tl.load(counts + places, mask=places < stop, other=0, cache_modifier=".cg") > HELD
        some = tl.maximum(some, tl.max(many.to(tl.int32), 0))
        empty = tl.maximum(empty, without_sum(totals, places, stop))
    tl.store(told + tl.program_id(0), tl.maximum(odd, empty))
    if AFTER:
        gdc_wait()
    if tl.maximum(some, odd) > 0:
        for index in range(first, last):
            number, block = index // blocks, index % blocks
            repair_block(
                q, k, v, out, odd_at, unrounded, q_strides, k_strides, v_strides, out_strides, span, lists, mask,
                scoring, number, block, T, S, heads, UNROUNDED, BM, BN, form,
            )  # fmt: skip
            if has_many(counts, number, block, T, HELD, BM):
                head, batch = tl.cast(number % heads, tl.int32), tl.cast(number // heads, tl.int32)
                tiles = key_tiles(span, lists, batch, head, block, T, BM, BN, form)
                search_block(
                    q, k, counts, peaks, totals, weights, indices, q_strides[0], q_strides[1], q_strides[2],
                    k_strides[0], k_strides[1], k_strides[2], T, S, group, upper, lower, mask, scale, softcap, factor,
                    block, head, batch, number, tiles, lists,
                    TOP, K, HEAD_DIM, UPPER, LOWER, PROGRAM, SOFTCAP, HELD, BM, BN, form,
                )  # fmt: skip
