"""The second look, by keys, at more than sums of weights: the largest weight, and what outputs would be without a key.

A block of keys stays and the queries go by, as in `observe_kernel.py`, so that nothing is added in an order that
differs from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.kernels.gpu.device import load_numbers, load_rows, multiply, score, span_of
from clearhead.kernels.gpu.observe_kernel import allowed

# where less is left of a query's weights, what the others hold is lost to rounding; as in core/formula.py
ALONE = tl.constexpr(2.0**-12)


@triton.jit
def times(values, outputs, form: tl.constexpr):
    """values @ outputsᵀ, with outputs in twice the digits of the values: they were summed in float32.

    What is left over is scaled up, for float16 has no room for what is small.
    """
    nothing = tl.zeros((values.shape[0], outputs.shape[0]), tl.float32)
    if values.dtype == tl.float32:
        product = multiply(values, tl.trans(outputs), nothing, form)
    else:
        first = outputs.to(values.dtype)
        second = ((outputs - first.to(tl.float32)) * 2048.0).to(values.dtype)
        product = multiply(values, tl.trans(second), nothing, form) * (1.0 / 2048.0)
        product = multiply(values, tl.trans(first), product, form)
    return product


@triton.jit
def changes(weights, values, v, stride, outputs, wholes, block, T, S, W: tl.constexpr, form: tl.constexpr):
    """‖o − o without the key‖², (keys, queries): (w / (1 − w))² ‖v − o‖², or ‖o‖² where nothing else is left.

    ‖v‖² − 2 v·o + ‖o‖² has no digits where v is nearly o. At most one key of a query has more than half of its weight:
    of that one the distance is taken feature by feature.
    """
    BN: tl.constexpr = weights.shape[0]
    PADDED: tl.constexpr = values.shape[1]
    in_full = values.to(tl.float32)
    squares = tl.sum(in_full * in_full, 1)
    product = times(values, outputs, form)
    apart = squares[:, None] - 2.0 * product + wholes[None, :]
    apart = tl.where(apart < 0, 0.0, apart)  # a maximum would not keep NaN
    large = weights > 0.5
    if tl.max(large.to(tl.int32).reshape(weights.shape[0] * weights.shape[1]), 0) > 0:
        places = tl.arange(0, BN)[:, None]
        largest = block * BN + tl.max(tl.where(large, places, 0), 0)
        features = tl.arange(0, PADDED)
        at = v + largest.to(tl.int64)[:, None] * stride + features[None, :]
        near = tl.load(at, mask=(largest < S)[:, None] & (features < W)[None, :], other=0.0).to(tl.float32)
        near -= outputs
        apart = tl.where(large, tl.sum(near * near, 1)[None, :], apart)
    left = 1.0 - weights
    alone = left < ALONE
    ratio = weights / tl.where(alone, 1.0, left)
    change = tl.where(alone, wholes[None, :], ratio * ratio * apart)
    return tl.where(weights == 0.0, 0.0, change)


@triton.jit(do_not_specialize=["span", "states", "mask", "scoring"])
def more_by_key(
    q, k, v, output_at, shift_at, inverse_at, most_at, removal_at, q_strides, k_strides, v_strides,
    span, states, mask, scoring, T, S, most_from, removal_from,
    MOST: tl.constexpr, REMOVAL: tl.constexpr, LISTED: tl.constexpr, W: tl.constexpr, PADDED_W: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The largest weight that each key of a block got, and Σ ‖o − o without it‖², of the queries from a number on.

    `output_at` is (batch · heads, T, W) in float32, without gaps. LISTED is the number of queries that an entry of
    `states` speaks of, or 0 for spans.
    """
    across = tl.cdiv(S, BN)
    number, block = tl.program_id(0) // across, tl.program_id(0) % across
    batch, head = number // form.heads, number % form.heads
    q += batch.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1]
    k += batch.to(tl.int64) * k_strides[0] + (head // form.group).to(tl.int64) * k_strides[1]
    v += batch.to(tl.int64) * v_strides[0] + (head // form.group).to(tl.int64) * v_strides[1]
    shift_at += number.to(tl.int64) * T
    inverse_at += number.to(tl.int64) * T
    output_at += number.to(tl.int64) * T * W
    keys = load_rows(k, k_strides[2], block * BN, 0, S, BN, form.head_dim, form.padded_head_dim, False)
    values = keys
    if REMOVAL:
        values = load_rows(v, v_strides[2], block * BN, 0, S, BN, W, PADDED_W, False)
    places = block * BN + tl.arange(0, BN)
    columns = places[:, None]
    limits = span_of(span, batch, form)
    lowest = T
    if MOST:
        lowest = tl.minimum(lowest, most_from)
    if REMOVAL:
        lowest = tl.minimum(lowest, removal_from)
    row_low, row_high = lowest, T
    if LISTED == 0:  # the queries that see any of these keys
        row_low = tl.maximum(block * BN - limits[1], lowest)
        row_high = tl.minimum(tl.minimum(block * BN + BN, limits[2]) - limits[0], T)
        row_high = tl.where(block * BN < limits[2], row_high, 0)
    else:
        mask_head = 0
        if states.by_head:
            mask_head = head
        state_row = (batch * states.by_batch * states.mask_heads + mask_head) * states.down
    sums = tl.zeros((BN,), tl.float32)
    most = tl.zeros((BN,), tl.float32)
    removal = tl.zeros((BN,), tl.float32)
    for i in range(row_low // BM, tl.cdiv(row_high, BM)):
        first = i * BM
        live = True
        if LISTED != 0:
            last = tl.minimum(first + BM, T) - 1
            one = tl.load(states.tiles + tl.cast(state_row + first // LISTED, tl.int64) * across + block)
            two = tl.load(states.tiles + tl.cast(state_row + last // LISTED, tl.int64) * across + block)
            live = (one + two) > 0
        if live:
            queries = load_rows(q, q_strides[2], first, 0, T, BM, form.head_dim, form.padded_head_dim, False)
            product = multiply(keys, tl.trans(queries), tl.zeros((BN, BM), tl.float32), form)
            rows = (first + tl.arange(0, BM))[None, :]
            scores, _ = score(product, scoring, rows, columns, head, batch, T, S, form)
            shift = load_numbers(shift_at, first, 0, T, BM, 0.0)
            inverse = load_numbers(inverse_at, first, 0, T, BM, 0.0)
            weights = tl.exp2(tl.fma(scores, scoring.factor, -shift[None, :])) * inverse[None, :]
            inside = allowed(limits, mask, rows, columns, head, batch, T, S, form)
            weights = tl.where(inside & (rows < T), weights, 0.0)
            if MOST:
                counted = tl.where(rows >= most_from, weights, 0.0)
                sums += tl.sum(counted, 1)
                most = tl.maximum(most, tl.max(counted, 1))
            if REMOVAL:
                outputs = load_rows(output_at, W, first, 0, T, BM, W, PADDED_W, False)
                wholes = tl.sum(outputs * outputs, 1)
                change = changes(weights, values, v, v_strides[2], outputs, wholes, block, T, S, W, form)
                removal += tl.sum(tl.where(rows >= removal_from, change, 0.0), 1)
    at = tl.cast(number, tl.int64) * S + places
    if MOST:  # a maximum does not keep NaN, a sum does
        tl.store(most_at + at, tl.where(sums == sums, most, sums), mask=places < S)
    if REMOVAL:
        tl.store(removal_at + at, removal, mask=places < S)
