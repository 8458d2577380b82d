"""The online softmax of a block of queries over the tiles of keys it meets, which the GPU kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.kernels.gpu.device import (
    LN2,
    LOG2E,
    NONE,
    allowed_by_program,
    allowed_by_span,
    any_tile,
    kept,
    key_tile,
    key_tiles,
    load_described,
    load_rows,
    multiply,
    multiply_allowed,
    score,
    span_of,
)


@triton.jit
def softmax_step(scores, peak, total, weighted, factor, RISKY: tl.constexpr, ENTROPY: tl.constexpr):
    """Exponentials of scores relative to the new peak, what older sums are multiplied with, and the sums so far.

    RISKY where a score may be −inf.
    """
    new = tl.maximum(peak, tl.max(scores, 1))
    # a query that has seen nothing yet has a peak of −inf: shift by 0, so that −inf − −inf never happens
    shift = tl.where(new == float("-inf"), 0.0, new)
    if ENTROPY:  # the largest key's term is then exactly 1, and the entropy of a single key exactly 0
        exponents = (scores - shift[:, None]) * factor
        moved = (peak - shift) * factor
    else:
        exponents = tl.fma(scores, factor, -(shift * factor)[:, None])
        moved = peak * factor - shift * factor
    e = tl.exp2(exponents)
    alpha = tl.exp2(moved)
    if ENTROPY:
        if RISKY:
            exponents = tl.maximum(exponents, -1000.0)  # 2^−1000 is 0 here, and 0 · −inf would be NaN
        weighted = alpha * (weighted + total * tl.maximum(moved, -1000.0)) + tl.sum(e * exponents, 1)
    return e, alpha, new, total * alpha + tl.sum(e, 1), weighted


@triton.jit
def attend(
    state, q, k, v, described, strides, tile, rows, seen_low, seen_high, limits, mask, scoring, head, batch, T, S,
    FULL: tl.constexpr, BN: tl.constexpr, ENTROPY: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """One tile of keys joins the sums: (values, peak, total, weighted)."""
    values, peak, total, weighted = state
    first = tile * BN
    columns = (first + tl.arange(0, BN))[None, :]
    if FULL and form.described:
        keys = load_described(described[0], batch, head // form.group, first, BN, form.padded_head_dim)
    else:
        keys = load_rows(k, strides[0], first, seen_low, seen_high, BN, form.head_dim, form.padded_head_dim, FULL)
    product = multiply(q, tl.trans(keys), tl.zeros((q.shape[0], BN), tl.float32), form)
    scores, _ = score(product, scoring, rows[:, None], columns, head, batch, T, S, form)
    if FULL and form.described:
        v_tile = load_described(described[1], batch, head // form.group, first, BN, form.padded_value_dim)
    else:
        v_tile = load_rows(v, strides[1], first, seen_low, seen_high, BN, form.value_dim, form.padded_value_dim, FULL)
    if not FULL:
        if form.program is None:
            allowed = allowed_by_span(limits[0], limits[1], limits[2], rows[:, None], columns)
        else:
            allowed = allowed_by_program(mask, rows[:, None], columns, head, batch, T, S, form)
            # what nobody here sees may hold anything, NaN too, and 0 · NaN is NaN
            seen = tl.max(allowed.to(tl.int32), 0) > 0
            v_tile = tl.where(seen[:, None], v_tile, 0.0)
        scores = tl.where(allowed, scores, float("-inf"))
    e, alpha, peak, total, weighted = softmax_step(
        scores, peak, total, weighted, scoring.factor, (not FULL) or form.bias != NONE, ENTROPY
    )
    if form.dropout:
        e *= tl.where(kept(scoring, rows[:, None], columns, head, batch, form), scoring.rescale, 0.0)
    values = values * alpha[:, None]
    if FULL:
        values = multiply(e.to(v_tile.dtype), v_tile, values, form)
    else:
        values = multiply_allowed(e.to(v_tile.dtype), v_tile, allowed, values, form)
    return values, peak, total, weighted


@triton.jit
def finish(largest, sums, weighted, sink, scoring, SINKS: tl.constexpr, ENTROPY: tl.constexpr, form: tl.constexpr):
    """(share, log-sum-exp, peak, total, largest score, entropy) from the sums over all keys; output is values · share.

    Peak and total are the denominator, sink included: a weight is 2^(score · factor − peak · log₂e) / total, with the
    rounding of peak · log₂e the same for all who use it.
    """
    largest = tl.where(sums == sums, largest, sums)  # a maximum does not keep NaN
    none = largest == float("-inf")
    bare = tl.where(none, 0.0, largest)
    if form.raw:
        largest = largest * scoring.scale
    peak = largest
    if SINKS:
        peak = tl.maximum(largest, sink)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    shift = base * LOG2E
    # from the sums' own shift, which is rounded as `softmax_step` does it, to the one that is handed on
    if ENTROPY:
        apart = tl.fma(bare, scoring.factor, -shift)
    else:
        apart = bare * scoring.factor - shift
    moved = tl.where(none, 0.0, tl.exp2(apart))
    total = sums * moved
    if SINKS:
        # where the sink is the peak this is the rounding of the shift alone, which for a logit of 10³⁰ is huge
        exponent = tl.fma(sink, LOG2E, -shift)
        exponent = tl.where(sink == peak, tl.minimum(tl.maximum(exponent, -1.0), 1.0), exponent)
        exponent = tl.where(sink == float("-inf"), float("-inf"), exponent)  # none, though the peak may be −inf as well
        total += tl.where(sink == float("inf"), 1.0, tl.exp2(exponent))
    some = total != 0  # true for NaN, which is to be seen and not turned into a 0
    divisor = tl.where(some, total, 1.0)
    share = moved / divisor
    logarithm = tl.log2(divisor)
    lse = tl.where(some, base + logarithm * LN2, float("-inf"))
    # −Σ w ln w with ln w = (score − largest) + (largest − lse)
    if SINKS:
        # a sink of inf leaves a share of 0, infinitely far away
        entropy = share * (sums * tl.where(share == 0, 0.0, logarithm - apart) - weighted) * LN2
    else:
        some_keys = tl.where(none, 1.0, sums)
        entropy = (tl.log2(some_keys) - weighted / some_keys) * LN2
    return share, lse, peak, total, largest, entropy


@triton.jit
def sums_of_block(
    q, k, v, q_strides, k_strides, v_strides, described, span, lists, mask, scoring, number, block, rows, T, S,
    ENTROPY: tl.constexpr, APART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The sums of a block of queries of one head over all keys: values, largest score, total and weighted.

    APART: tiles that are full have a loop of their own, which masks nothing, and takes as long to compile as the other.
    """
    WIDTH: tl.constexpr = form.padded_value_dim
    batch, head = tl.cast(number // form.heads, tl.int32), tl.cast(number % form.heads, tl.int32)
    q += batch.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1]
    k += batch.to(tl.int64) * k_strides[0] + (head // form.group).to(tl.int64) * k_strides[1]
    v += batch.to(tl.int64) * v_strides[0] + (head // form.group).to(tl.int64) * v_strides[1]
    queries = load_rows(q, q_strides[2], block * BM, 0, T, BM, form.head_dim, form.padded_head_dim, False)
    limits = span_of(span, batch, form)
    seen_low, seen_high = 0, S
    if form.program is None:
        seen_low = block * BM + limits[0]
        seen_high = tl.minimum(limits[2], tl.minimum(block * BM + BM, T) + limits[1])
    minus = tl.full((BM,), float("-inf"), tl.float32)
    zero = tl.zeros((BM,), tl.float32)
    state = (tl.zeros((BM, WIDTH), tl.float32), minus, zero, zero)
    mixed, full, a, b, c = key_tiles(span, lists, batch, head, block, T, BM, BN, form)
    strides = (k_strides[2], v_strides[2])
    together = mixed
    if not APART:
        together = mixed + full
    for i in range(together):
        tile = any_tile(lists, i, mixed, a, b, c, form)
        state = attend(
            state, queries, k, v, described, strides, tile, rows, seen_low, seen_high, limits, mask, scoring,
            head, batch, T, S, False, BN, ENTROPY, form,
        )  # fmt: skip
    if APART:
        for i in range(full):
            tile = key_tile(lists, i, a, b, c, True, form)
            state = attend(
                state, queries, k, v, described, strides, tile, rows, seen_low, seen_high, limits, mask, scoring,
                head, batch, T, S, True, BN, ENTROPY, form,
            )  # fmt: skip
    return state


@triton.jit
def store_output(out, unrounded, result, place, here, inside, UNROUNDED: tl.constexpr, form: tl.constexpr):
    """A block's output, rows of it from `place` on, rounded; and unrounded where that is wanted too, by row."""
    WIDTH: tl.constexpr = form.padded_value_dim
    columns = tl.arange(0, WIDTH)
    real = inside[:, None] & (columns < form.value_dim)[None, :]
    tl.store(out + place[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=real)
    if UNROUNDED:
        tl.store(unrounded + (here * form.value_dim)[:, None] + columns[None, :], result, mask=real)
