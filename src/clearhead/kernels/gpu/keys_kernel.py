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
def lengths_of_outputs(
    outputs_at, inverse_at, wholes_at, sharp_at, T, W: tl.constexpr, PADDED_W: tl.constexpr, BM: tl.constexpr
):
    """‖o‖² of each query, and for each BM queries whether any may have a weight above a half.

    No weight is above the inverse of its total, but for the rounding of scores.
    """
    down = tl.cdiv(T, BM)
    number, tile = tl.program_id(0) // down, tl.program_id(0) % down
    first = tile * BM
    rows = first + tl.arange(0, BM)
    outputs_at += number.to(tl.int64) * T * W
    outputs = load_rows(outputs_at, W, first, 0, T, BM, W, PADDED_W, False).to(tl.float32)
    at = number.to(tl.int64) * T + rows
    tl.store(wholes_at + at, tl.sum(outputs * outputs, 1), mask=rows < T)
    inverse = tl.load(inverse_at + at, mask=rows < T, other=0.0)
    tl.store(sharp_at + tl.program_id(0), (tl.max(inverse, 0) > 0.25).to(tl.int32))


@triton.jit
def changes(weights, product, squares, wholes):
    """‖o − o without the key‖² = (w / (1 − w))² ‖v − o‖², (keys, queries), of weights up to a half.

    ‖v‖² − 2 v·o + ‖o‖² with the same o, as rounded, in all three: what rounding took from o then counts for no more
    than its part along v − o.
    """
    apart = squares[:, None] + wholes[None, :] - 2.0 * product
    apart = tl.maximum(apart, 0.0, propagate_nan=tl.PropagateNan.ALL)
    ratio = weights / (1.0 - weights)
    return tl.where(weights == 0.0, 0.0, ratio * ratio * apart)


@triton.jit
def large_changes(weights, large, v, stride, outputs, first_key, W: tl.constexpr):
    """The same of the one key that may have more than half of a query's weight, (queries).

    There v is nearly o, and that difference has no digits: it is taken feature by feature, from outputs in float32.
    Where nothing else is left, o is all that is lost.
    """
    places = tl.arange(0, weights.shape[0])[:, None]
    key = first_key + tl.max(tl.where(large, places, 0), 0)
    weight = tl.max(tl.where(large, weights, 0.0), 0)
    features = tl.arange(0, outputs.shape[1])
    near = tl.load(v + key.to(tl.int64)[:, None] * stride + features[None, :], mask=(features < W)[None, :], other=0.0)
    near = near.to(tl.float32) - outputs
    left = 1.0 - weight
    alone = left < ALONE
    ratio = weight / tl.where(alone, 1.0, left)
    return tl.where(alone, tl.sum(outputs * outputs, 1), ratio * ratio * tl.sum(near * near, 1))


@triton.jit(do_not_specialize=["span", "states", "mask", "scoring"])
def more_by_key(
    q, k, v, output_at, rounded_at, wholes_at, sharp_at, shift_at, inverse_at, most_at, removal_at,
    q_strides, k_strides, v_strides, span, states, mask, scoring, T, S, most_from, removal_from,
    MOST: tl.constexpr, REMOVAL: tl.constexpr, LISTED: tl.constexpr, W: tl.constexpr, PADDED_W: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The largest weight that each key of a block got, and Σ ‖o − o without it‖², of the queries from a number on.

    `output_at` is (batch · heads, T, W) in float32, without gaps, and `rounded_at` the same as the values are rounded;
    `wholes_at` and `sharp_at` are what `lengths_of_outputs` gives. LISTED is the number of queries that an entry of
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
    rounded_at += number.to(tl.int64) * T * W
    wholes_at += number.to(tl.int64) * T
    sharp_at += number * tl.cdiv(T, BM)
    keys = load_rows(k, k_strides[2], block * BN, 0, S, BN, form.head_dim, form.padded_head_dim, False)
    values = keys
    squares = tl.zeros((BN,), tl.float32)
    if REMOVAL:
        values = load_rows(v, v_strides[2], block * BN, 0, S, BN, W, PADDED_W, False)
        in_full = values.to(tl.float32)
        squares = tl.sum(in_full * in_full, 1)
    places = block * BN + tl.arange(0, BN)
    columns = places[:, None]
    limits = span_of(span, batch, form)
    lowest, latest = T, 0  # the first query that counts for anything, and the first from which all count for all
    if MOST:
        lowest, latest = tl.minimum(lowest, most_from), tl.maximum(latest, most_from)
    if REMOVAL:
        lowest, latest = tl.minimum(lowest, removal_from), tl.maximum(latest, removal_from)
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
        if LISTED == 0:
            full = (first + BM <= T) & (first + BM - 1 + limits[0] <= block * BN)
            full = full & (first + limits[1] >= block * BN + BN - 1) & (block * BN + BN <= limits[2])
        else:
            last = tl.minimum(first + BM, T) - 1
            one = tl.load(states.tiles + tl.cast(state_row + first // LISTED, tl.int64) * across + block)
            two = tl.load(states.tiles + tl.cast(state_row + last // LISTED, tl.int64) * across + block)
            live = (one + two) > 0
            full = ((one + two) == 4) & (first + BM <= T)
        if live:
            queries = load_rows(q, q_strides[2], first, 0, T, BM, form.head_dim, form.padded_head_dim, False)
            product = multiply(keys, tl.trans(queries), tl.zeros((BN, BM), tl.float32), form)
            rows = (first + tl.arange(0, BM))[None, :]
            scores, _ = score(product, scoring, rows, columns, head, batch, T, S, form)
            shift = load_numbers(shift_at, first, 0, T, BM, 0.0)
            inverse = load_numbers(inverse_at, first, 0, T, BM, 0.0)
            sharp = 0
            if REMOVAL:
                sharp = tl.load(sharp_at + i)
            weights = tl.exp2(tl.fma(scores, scoring.factor, -shift[None, :])) * inverse[None, :]
            if not full:
                inside = allowed(limits, mask, rows, columns, head, batch, T, S, form)
                weights = tl.where(inside & (rows < T), weights, 0.0)
            counted = weights
            if MOST:
                if first < latest:
                    counted = tl.where(rows >= most_from, weights, 0.0)
                sums += tl.sum(counted, 1)
                most = tl.maximum(most, tl.max(counted, 1))
            if REMOVAL:
                if first < latest:
                    counted = tl.where(rows >= removal_from, weights, 0.0)
                else:
                    counted = weights
                rounded = load_rows(rounded_at, W, first, 0, T, BM, W, PADDED_W, False)
                wholes = load_numbers(wholes_at, first, 0, T, BM, 0.0)
                with_values = multiply(values, tl.trans(rounded), tl.zeros((BN, BM), tl.float32), form)
                change = changes(counted, with_values, squares, wholes)
                if sharp > 0:
                    large = counted > 0.5
                    if tl.max(tl.max(large.to(tl.int32), 1), 0) > 0:
                        outputs = load_rows(output_at, W, first, 0, T, BM, W, PADDED_W, False).to(tl.float32)
                        instead = large_changes(counted, large, v, v_strides[2], outputs, block * BN, W)
                        change = tl.where(large, instead[None, :], change)
                removal += tl.sum(change, 1)
    at = tl.cast(number, tl.int64) * S + places
    if MOST:  # a maximum does not keep NaN, a sum does
        tl.store(most_at + at, tl.where(sums == sums, most, sums), mask=places < S)
    if REMOVAL:
        tl.store(removal_at + at, removal, mask=places < S)
