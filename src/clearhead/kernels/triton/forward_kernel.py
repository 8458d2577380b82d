"""The forward kernel: a block of queries against the tiles of keys it meets, with an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.kernels.gpu.softmax_kernel import finish, store_output, sums_of_block


@triton.jit(do_not_specialize=["span", "lists", "mask", "scoring"])
def forward(
    q, k, v, out, lse_at, peak_at, total_at, largest_at, entropy_at, unrounded, sinks,
    q_strides, k_strides, v_strides, k_described, v_described, span, lists, mask, scoring, T, S,
    SINKS: tl.constexpr, ENTROPY: tl.constexpr, UNROUNDED: tl.constexpr, REVERSED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head; blocks with the most keys start first (REVERSED: the last ones)."""
    blocks = tl.cdiv(T, BM)
    number, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if REVERSED:
        block = blocks - 1 - block
    rows = block * BM + tl.arange(0, BM)
    values, largest, sums, weighted = sums_of_block(
        q, k, v, q_strides, k_strides, v_strides, (k_described, v_described), span, lists, mask, scoring,
        number, block, rows, T, S, ENTROPY, True, BM, BN, form,
    )  # fmt: skip
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + number % form.heads)
    share, lse, peak, total, largest, entropy = finish(largest, sums, weighted, sink, scoring, SINKS, ENTROPY, form)
    here = number.to(tl.int64) * T + rows
    inside = rows < T
    tl.store(lse_at + here, lse, mask=inside)
    tl.store(peak_at + here, peak, mask=inside)
    tl.store(total_at + here, total, mask=inside)
    if ENTROPY:
        tl.store(largest_at + here, largest, mask=inside)
        tl.store(entropy_at + here, entropy, mask=inside)
    place = here * form.value_dim
    store_output(out, unrounded, values * share[:, None], place, here, inside, UNROUNDED, form)
