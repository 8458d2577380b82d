"""Gradients, the weights recomputed by tile: for keys and values by blocks of keys, for queries by blocks of queries.

No two programs write to one place and nothing is added by atomics, so the same call gives the same bits. It costs two
products more than a single pass: Hopper's own kernel (`kernels/hopper/backward_kernel.py`) goes first where it takes
the problem, unless PyTorch is told to be deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.kernels.gpu.device import (
    allowed_by_program,
    allowed_by_span,
    finite_part,
    kept,
    key_tile,
    key_tiles,
    load_numbers,
    load_rows,
    multiply,
    multiply_allowed,
    score,
    span_of,
    spoil,
)


@triton.jit
def deltas(
    dout, out, peak_at, total_at, dlse_at, shift_at, inverse_at, delta_at, dout_strides, T, width,
    LSE: tl.constexpr, BM: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """For each query Σ dout · out − dlse, and its denominator as the other kernels read it; rows of out are `width`."""
    WIDTH: tl.constexpr = form.padded_value_dim
    blocks = tl.cdiv(T, BM)
    number, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    batch, head = number // form.heads, number % form.heads
    dout += batch.to(tl.int64) * dout_strides[0] + head.to(tl.int64) * dout_strides[1]
    out += number.to(tl.int64) * T * width
    given = load_rows(dout, dout_strides[2], block * BM, 0, T, BM, form.value_dim, WIDTH, False).to(tl.float32)
    rows = block * BM + tl.arange(0, BM)
    columns = tl.arange(0, WIDTH)[None, :]
    real = (rows < T)[:, None] & (columns < width)
    result = tl.load(out + rows.to(tl.int64)[:, None] * width + columns, mask=real, other=0.0).to(tl.float32)
    here, inside = number.to(tl.int64) * T + rows, rows < T
    peak = tl.load(peak_at + here, mask=inside, other=0.0)
    total = tl.load(total_at + here, mask=inside, other=1.0)
    dead = peak == float("-inf")
    # rows that attend to nothing, or to a sink alone, take no part, whatever their gradient holds
    delta = tl.sum(tl.where(result == 0, 0.0, given * result), 1)
    if LSE:
        delta -= tl.load(dlse_at + here, mask=inside, other=0.0)
    tl.store(delta_at + here, tl.where(dead, 0.0, delta), mask=inside)
    tl.store(shift_at + here, tl.where(dead, 0.0, peak) * 1.4426950408889634, mask=inside)
    tl.store(inverse_at + here, tl.where(dead, 0.0, 1.0 / tl.where(total == 0, 1.0, total)), mask=inside)


@triton.jit
def asked_rows(limits, rows):
    """True for queries that may attend to some key, by a span."""
    return tl.maximum(rows + limits[0], 0) <= tl.minimum(rows + limits[1], limits[2] - 1)


@triton.jit
def query_tiles(span, lists, batch, head, block, T, BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr):
    """The tiles of queries that a block of keys meets, as numbers for `key_tile`; see `key_tiles`."""
    if form.program is None:
        low, high, count = span_of(span, batch, form)
        first = block * BN
        last = tl.minimum(first + BN, count) - 1
        start = tl.maximum(first - high, 0)
        stop = tl.where(first < count, tl.minimum(last - low + 1, T), 0)
        a = start // BM
        end = tl.maximum(tl.cdiv(stop, BM), a)
        b = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(first + BN - 1 - high, 0), BM), a), end)
        c = tl.minimum(tl.maximum(tl.minimum(first - low + 1, T) // BM, b), end)
        c = tl.where(first + BN <= count, c, b)
        full = c - b
        mixed = end - a - full
    else:
        row = (batch * lists.by_batch * lists.mask_heads + head * lists.by_head) * lists.down + block
        a = tl.load(lists.counts + 3 * row).to(tl.int64)
        mixed = tl.load(lists.counts + 3 * row + 1)
        full = tl.load(lists.counts + 3 * row + 2)
        b = mixed
        c = mixed
    return mixed, full, a, b, c


@triton.jit
def query_step(
    state, keys, values, q, dout, rows_at, strides, tile, columns, limits, mask, scoring, head, batch, T, S,
    FULL: tl.constexpr, BM: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """One tile of queries joins the gradients of a block of keys and values; tiles are turned, keys down."""
    dk, dv = state
    first = tile * BM
    rows = (first + tl.arange(0, BM))[None, :]
    # a listed tile is full when all queries that there are see it: the last may be past the end
    ALL: tl.constexpr = FULL and form.program is None
    queries = load_rows(q, strides[0], first, 0, T, BM, form.head_dim, form.padded_head_dim, ALL)
    given = load_rows(dout, strides[1], first, 0, T, BM, form.value_dim, form.padded_value_dim, ALL)
    shift = load_numbers(rows_at[0], first, 0, T, BM, 0.0)[None, :]
    inverse = load_numbers(rows_at[1], first, 0, T, BM, 0.0)[None, :]
    delta = load_numbers(rows_at[2], first, 0, T, BM, 0.0)[None, :]
    if not FULL:
        if form.program is None:
            allowed = allowed_by_span(limits[0], limits[1], limits[2], rows, columns)
        else:
            allowed = allowed_by_program(mask, rows, columns, head, batch, T, S, form)
        allowed = allowed & (rows < T)  # past the end there are zeros, and zero times a key of inf is NaN
        # queries that see none of these keys may hold anything, NaN too, and 0 · NaN is NaN
        asked = tl.max(allowed.to(tl.int32), 0) > 0
        queries = tl.where(asked[:, None], queries, 0.0)
        whole = tl.where(asked[:, None], given, 0.0)
        given = finite_part(whole)  # what is not finite in it is in `delta` too, and spoils the scores from there
    product = multiply(keys, tl.trans(queries), tl.zeros((keys.shape[0], BM), tl.float32), form)
    scores, slope = score(product, scoring, rows, columns, head, batch, T, S, form)
    weights = tl.exp2(tl.fma(scores, scoring.factor, -shift)) * inverse
    if not FULL:
        weights = tl.where(allowed, weights, 0.0)
    dweights = multiply(values, tl.trans(given), tl.zeros((keys.shape[0], BM), tl.float32), form)
    after = weights
    if form.dropout:
        left = tl.where(kept(scoring, rows, columns, head, batch, form), scoring.rescale, 0.0)
        after = weights * left
        dweights = dweights * left
    dscores = weights * (dweights - delta)
    if form.softcap:
        dscores = dscores * slope
    if FULL:
        dv = multiply(after.to(given.dtype), given, dv, form)
        dk = multiply(dscores.to(queries.dtype), queries, dk, form)
    else:  # a pair that is not allowed may hold NaN
        dscores = tl.where(allowed, dscores, 0.0)
        dv = spoil(multiply(after.to(given.dtype), given, dv, form), allowed, whole)
        dk = multiply_allowed(dscores.to(queries.dtype), queries, allowed, dk, form)
    return dk, dv


@triton.jit(do_not_specialize=["span", "lists", "mask", "scoring"])
def gradients_of_keys(
    q, k, v, dout, shift_at, inverse_at, delta_at, dk_at, dv_at, q_strides, k_strides, v_strides, dout_strides,
    span, lists, mask, scoring, T, S, BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, over all query heads that share them."""
    PADDED: tl.constexpr = form.padded_head_dim
    WIDTH: tl.constexpr = form.padded_value_dim
    KEY_HEADS: tl.constexpr = form.heads // form.group
    across = tl.cdiv(S, BN)
    number, block = tl.program_id(0) // across, tl.program_id(0) % across
    batch, key_head = number // KEY_HEADS, number % KEY_HEADS
    k += batch.to(tl.int64) * k_strides[0] + key_head.to(tl.int64) * k_strides[1]
    v += batch.to(tl.int64) * v_strides[0] + key_head.to(tl.int64) * v_strides[1]
    places = block * BN + tl.arange(0, BN)
    limits = span_of(span, batch, form)
    count = tl.minimum(S, limits[2])
    keys = load_rows(k, k_strides[2], block * BN, 0, count, BN, form.head_dim, PADDED, False)
    values = load_rows(v, v_strides[2], block * BN, 0, count, BN, form.value_dim, WIDTH, False)
    state = (tl.zeros((BN, PADDED), tl.float32), tl.zeros((BN, WIDTH), tl.float32))
    strides = (q_strides[2], dout_strides[2])
    for member in range(form.group):
        head = key_head * form.group + member
        here = (batch.to(tl.int64) * form.heads + head) * T
        rows_at = (shift_at + here, inverse_at + here, delta_at + here)
        q_head = q + batch.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1]
        dout_head = dout + batch.to(tl.int64) * dout_strides[0] + head.to(tl.int64) * dout_strides[1]
        mixed, full, a, b, c = query_tiles(span, lists, batch, head, block, T, BM, BN, form)
        for i in range(mixed):
            tile = key_tile(lists, i, a, b, c, False, form)
            state = query_step(
                state, keys, values, q_head, dout_head, rows_at, strides, tile, places[:, None], limits, mask, scoring,
                head, batch, T, S, False, BM, form,
            )  # fmt: skip
        for i in range(full):
            tile = key_tile(lists, i, a, b, c, True, form)
            state = query_step(
                state, keys, values, q_head, dout_head, rows_at, strides, tile, places[:, None], limits, mask, scoring,
                head, batch, T, S, True, BM, form,
            )  # fmt: skip
    features, width = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    at = number.to(tl.int64) * S + places
    dk_at += (at * form.head_dim)[:, None] + features[None, :]
    dv_at += (at * form.value_dim)[:, None] + width[None, :]
    inside = (places < S)[:, None]
    dk = state[0] * scoring.scale
    tl.store(dk_at, dk.to(dk_at.dtype.element_ty), mask=inside & (features < form.head_dim)[None, :])
    tl.store(dv_at, state[1].to(dv_at.dtype.element_ty), mask=inside & (width < form.value_dim)[None, :])


@triton.jit
def key_step(
    dq, queries, given, k, v, numbers, strides, tile, rows, seen_low, seen_high, limits, mask, scoring,
    head, batch, T, S, FULL: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """One tile of keys joins the gradient of a block of queries."""
    first = tile * BN
    columns = (first + tl.arange(0, BN))[None, :]
    keys = load_rows(k, strides[0], first, seen_low, seen_high, BN, form.head_dim, form.padded_head_dim, FULL)
    values = load_rows(v, strides[1], first, seen_low, seen_high, BN, form.value_dim, form.padded_value_dim, FULL)
    if not FULL:
        if form.program is None:
            allowed = allowed_by_span(limits[0], limits[1], limits[2], rows, columns)
        else:
            allowed = allowed_by_program(mask, rows, columns, head, batch, T, S, form)
            seen = tl.max(allowed.to(tl.int32), 0) > 0
            keys = tl.where(seen[:, None], keys, 0.0)
            values = tl.where(seen[:, None], values, 0.0)
    product = multiply(queries, tl.trans(keys), tl.zeros((queries.shape[0], BN), tl.float32), form)
    scores, slope = score(product, scoring, rows, columns, head, batch, T, S, form)
    weights = tl.exp2(tl.fma(scores, scoring.factor, -numbers[0])) * numbers[1]
    if not FULL:
        weights = tl.where(allowed, weights, 0.0)
    dweights = multiply(given, tl.trans(values), tl.zeros((queries.shape[0], BN), tl.float32), form)
    if form.dropout:
        dweights = dweights * tl.where(kept(scoring, rows, columns, head, batch, form), scoring.rescale, 0.0)
    dscores = weights * (dweights - numbers[2])
    if form.softcap:
        dscores = dscores * slope
    if FULL:
        dq = multiply(dscores.to(keys.dtype), keys, dq, form)
    else:
        dq = multiply_allowed(tl.where(allowed, dscores, 0.0).to(keys.dtype), keys, allowed, dq, form)
    return dq


@triton.jit(do_not_specialize=["span", "lists", "mask", "scoring"])
def gradients_of_queries(
    q, k, v, dout, shift_at, inverse_at, delta_at, dq_at, q_strides, k_strides, v_strides, dout_strides,
    span, lists, mask, scoring, T, S, REVERSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries."""
    PADDED: tl.constexpr = form.padded_head_dim
    blocks = tl.cdiv(T, BM)
    number, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if REVERSED:
        block = blocks - 1 - block
    batch, head = number // form.heads, number % form.heads
    q += batch.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1]
    dout += batch.to(tl.int64) * dout_strides[0] + head.to(tl.int64) * dout_strides[1]
    k += batch.to(tl.int64) * k_strides[0] + (head // form.group).to(tl.int64) * k_strides[1]
    v += batch.to(tl.int64) * v_strides[0] + (head // form.group).to(tl.int64) * v_strides[1]
    places = block * BM + tl.arange(0, BM)
    rows = places[:, None]
    here = number.to(tl.int64) * T
    numbers = (
        load_numbers(shift_at + here, block * BM, 0, T, BM, 0.0)[:, None],
        load_numbers(inverse_at + here, block * BM, 0, T, BM, 0.0)[:, None],
        load_numbers(delta_at + here, block * BM, 0, T, BM, 0.0)[:, None],
    )
    limits = span_of(span, batch, form)
    queries = load_rows(q, q_strides[2], block * BM, 0, T, BM, form.head_dim, PADDED, False)
    given = load_rows(dout, dout_strides[2], block * BM, 0, T, BM, form.value_dim, form.padded_value_dim, False)
    seen_low, seen_high = 0, S
    if form.program is None:
        # queries that see nothing may hold anything
        asked = asked_rows(limits, rows)
        queries = tl.where(asked, queries, 0.0)
        given = tl.where(asked, given, 0.0)
        seen_low = block * BM + limits[0]
        seen_high = tl.minimum(limits[2], tl.minimum(block * BM + BM, T) + limits[1])
    dq = tl.zeros((BM, PADDED), tl.float32)
    strides = (k_strides[2], v_strides[2])
    mixed, full, a, b, c = key_tiles(span, lists, batch, head, block, T, BM, BN, form)
    for i in range(mixed):
        tile = key_tile(lists, i, a, b, c, False, form)
        dq = key_step(
            dq, queries, given, k, v, numbers, strides, tile, rows, seen_low, seen_high, limits, mask, scoring,
            head, batch, T, S, False, BN, form,
        )  # fmt: skip
    for i in range(full):
        tile = key_tile(lists, i, a, b, c, True, form)
        dq = key_step(
            dq, queries, given, k, v, numbers, strides, tile, rows, seen_low, seen_high, limits, mask, scoring,
            head, batch, T, S, True, BN, form,
        )  # fmt: skip
    features = tl.arange(0, PADDED)
    dq_at += ((here + places) * form.head_dim)[:, None] + features[None, :]
    dq = dq * scoring.scale
    inside = (places < T)[:, None] & (features < form.head_dim)[None, :]
    tl.store(dq_at, dq.to(dq_at.dtype.element_ty), mask=inside)
