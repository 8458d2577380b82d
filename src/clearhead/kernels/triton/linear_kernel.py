"""Causal sums of factorised weights, φ(q) · φ(k), by chunks: forward and gradients (`approximations/prefix_sums.py`).

A sequence is cut into segments, one for each program, and a segment into chunks. What lies before a segment (for
gradients of keys and values, what lies after it) is a matrix of F × V numbers, summed by `segment_sums` and handed in;
a program walks through its chunks, takes pairs inside of each, and adds the chunk to the matrix it carries. No two
programs write to one place and nothing is added by atomics, so the same call gives the same bits.

    num_i = Σ_{j ≤ i} (a_i · b_j) v_j,  den_i = Σ_{j ≤ i} a_i · b_j,  out_i = num_i / (den_i + ε)

Gradients, with s_i = 1 / (den_i + ε), d_i = s_i dout_i and w_i = −s_i (dout_i · out_i):

    da_i = Σ_{j ≤ i} (d_i · v_j + w_i) b_j,  db_j = Σ_{i ≥ j} (d_i · v_j + w_i) a_i,  dv_j = Σ_{i ≥ j} (a_i · b_j) d_i
"""

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.kernels.gpu.device import INTERPRETED

# φ: the numbers as they are, elu(x) + 1, or what is above 0
PLAIN, ELU, RELU = 0, 1, 2


@triton.jit
def features(x, inside, FEATURE: tl.constexpr):
    """φ(x) in float32, and 0 outside of the array, where elu(0) + 1 would be 1."""
    x = x.to(tl.float32)
    if FEATURE == 1:
        x = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    if FEATURE == 2:
        x = tl.maximum(x, 0.0)
    return tl.where(inside, x, 0.0)


@triton.jit
def slope(x, FEATURE: tl.constexpr):
    """φ′(x)."""
    x = x.to(tl.float32)
    if FEATURE == 1:
        found = tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    else:
        found = tl.where(x > 0, 1.0, 0.0)
    return found


@triton.jit
def tile(at, stride, rows, columns, T, WIDTH: tl.constexpr):
    """Some rows and columns of (T, WIDTH), zero outside; and what is inside."""
    inside = (rows < T)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(at + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0), inside


@triton.jit
def times(left, right, PRECISION: tl.constexpr):
    """A product with float32 sums: of bfloat16 where that is what was given, else of float32 as it is, or as tf32."""
    if PRECISION == "bf16":
        left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
        if INTERPRETED:  # bfloat16 products are wrong in the interpreter
            found = tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
        else:
            found = tl.dot(left, right)
    else:
        found = tl.dot(left, right, input_precision=PRECISION)
    return found


@triton.jit
def segment_sums(
    x, y, scale_at, weight_at, sums, totals, x_strides, y_strides, T, segments, each,
    FEATURE: tl.constexpr, WEIGHTED: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ φ(x_i) (s_i y_i)ᵀ and Σ w_i φ(x_i) over one segment, for a block of features and one of values."""
    row, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    c = tl.program_id(2) * BV + tl.arange(0, BV)
    x += row.to(tl.int64) * x_strides[0]
    y += row.to(tl.int64) * y_strides[0]
    state = tl.zeros((BF, BV), tl.float32)
    total = tl.zeros((BF,), tl.float32)
    end = tl.minimum((segment + 1) * each, T)
    for start in range(segment * each, end, C):
        rows = start + tl.arange(0, C)
        numbers, inside = tile(x, x_strides[1], rows, f, T, F)
        a = features(numbers, inside, FEATURE)
        values, _ = tile(y, y_strides[1], rows, c, T, V)
        values = values.to(tl.float32)
        if WEIGHTED:
            here = row.to(tl.int64) * T + rows
            values *= tl.load(scale_at + here, mask=rows < T, other=0.0)[:, None]
            total += tl.sum(a * tl.load(weight_at + here, mask=rows < T, other=0.0)[:, None], 0)
        else:
            total += tl.sum(a, 0)
        state += times(tl.trans(a), values, PRECISION)
    place = (row * segments + segment).to(tl.int64)
    within = (f < F)[:, None] & (c < V)[None, :]
    tl.store(sums + place * F * V + f[:, None] * V + c[None, :], state, mask=within)
    if tl.program_id(2) == 0:
        tl.store(totals + place * F + f, total, mask=f < F)


@triton.jit
def carried(sums, totals, place, f, c, F: tl.constexpr, V: tl.constexpr):
    """What lies before a segment, or after it: (features, values) and (features,)."""
    within = (f < F)[:, None] & (c < V)[None, :]
    state = tl.load(sums + place * F * V + f[:, None] * V + c[None, :], mask=within, other=0.0)
    return state, tl.load(totals + place * F + f, mask=f < F, other=0.0)


@triton.jit
def forward(
    q, k, v, sums, totals, out, den, q_strides, k_strides, v_strides, T, segments, each, group, eps,
    FEATURE: tl.constexpr, NORMALIZED: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    FP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of one segment, for a block of values; denominators by the first block."""
    row, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    key_row = row // group
    f = tl.arange(0, FP)
    c = tl.program_id(1) * BV + tl.arange(0, BV)
    q += row.to(tl.int64) * q_strides[0]
    k += key_row.to(tl.int64) * k_strides[0]
    v += key_row.to(tl.int64) * v_strides[0]
    state, total = carried(sums, totals, (key_row * segments + segment).to(tl.int64), f, c, F, V)
    place = tl.arange(0, C)
    lower = place[:, None] >= place[None, :]
    end = tl.minimum((segment + 1) * each, T)
    for start in range(segment * each, end, C):
        rows = start + place
        numbers, inside = tile(q, q_strides[1], rows, f, T, F)
        a = features(numbers, inside, FEATURE)
        numbers, inside = tile(k, k_strides[1], rows, f, T, F)
        b = features(numbers, inside, FEATURE)
        values, _ = tile(v, v_strides[1], rows, c, T, V)
        values = values.to(tl.float32)
        pairs = tl.where(lower, times(a, tl.trans(b), PRECISION), 0.0)
        num = times(pairs, values, PRECISION) + times(a, state, PRECISION)
        here = row.to(tl.int64) * T + rows
        if NORMALIZED:
            below = tl.sum(pairs, 1) + tl.sum(a * total[None, :], 1) + eps
            num = tl.where((below == 0.0)[:, None], 0.0, num / tl.where(below == 0.0, 1.0, below)[:, None])
            if tl.program_id(1) == 0:
                tl.store(den + here, below, mask=rows < T)
        within = (rows < T)[:, None] & (c < V)[None, :]
        tl.store(out + here[:, None] * V + c[None, :], num.to(out.dtype.element_ty), mask=within)
        state += times(tl.trans(b), values, PRECISION)
        total += tl.sum(b, 0)


@triton.jit
def scales(
    dout, out, den, scale_at, weight_at, dout_strides, T, V: tl.constexpr, VP: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """s_i = 1 / den_i, 0 where that is 0, and w_i = −s_i (dout_i · out_i), of one chunk."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * C + tl.arange(0, C)
    c = tl.arange(0, VP)
    here = row * T + rows
    given, _ = tile(dout + row * dout_strides[0], dout_strides[1], rows, c, T, V)
    found, _ = tile(out + row * T * V, V, rows, c, T, V)
    below = tl.load(den + here, mask=rows < T, other=0.0)
    scale = tl.where(below == 0.0, 0.0, 1.0 / tl.where(below == 0.0, 1.0, below))
    tl.store(scale_at + here, scale, mask=rows < T)
    tl.store(weight_at + here, -scale * tl.sum(given.to(tl.float32) * found.to(tl.float32), 1), mask=rows < T)


@triton.jit
def judged(dout, v, scale_at, weight_at, dout_stride, v_stride, here, rows, c, T, lower, V: tl.constexpr,
           PRECISION: tl.constexpr):  # fmt: skip
    """d (C, V), v (C, V), w (C,), and d_i · v_j + w_i for the pairs of a chunk with j ≤ i."""
    given, _ = tile(dout, dout_stride, rows, c, T, V)
    given = given.to(tl.float32)
    given *= tl.load(scale_at + here, mask=rows < T, other=0.0)[:, None]
    values, _ = tile(v, v_stride, rows, c, T, V)
    values = values.to(tl.float32)
    weight = tl.load(weight_at + here, mask=rows < T, other=0.0)
    pairs = tl.where(lower, times(given, tl.trans(values), PRECISION) + weight[:, None], 0.0)
    return given, values, weight, pairs


@triton.jit
def gradients_of_queries(
    q, k, v, dout, scale_at, weight_at, sums, totals, dq, q_strides, k_strides, v_strides, dout_strides,
    T, segments, each, group, FEATURE: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one segment, for a block of features, from the first chunk to the last."""
    row, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    key_row = row // group
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    c = tl.arange(0, VP)
    q += row.to(tl.int64) * q_strides[0]
    dout += row.to(tl.int64) * dout_strides[0]
    k += key_row.to(tl.int64) * k_strides[0]
    v += key_row.to(tl.int64) * v_strides[0]
    state, total = carried(sums, totals, (key_row * segments + segment).to(tl.int64), f, c, F, V)
    place = tl.arange(0, C)
    lower = place[:, None] >= place[None, :]
    end = tl.minimum((segment + 1) * each, T)
    for start in range(segment * each, end, C):
        rows = start + place
        here = row.to(tl.int64) * T + rows
        given, values, weight, pairs = judged(
            dout, v, scale_at, weight_at, dout_strides[1], v_strides[1], here, rows, c, T, lower, V, PRECISION
        )
        numbers, inside = tile(k, k_strides[1], rows, f, T, F)
        b = features(numbers, inside, FEATURE)
        da = times(pairs, b, PRECISION) + times(given, tl.trans(state), PRECISION) + weight[:, None] * total[None, :]
        numbers, inside = tile(q, q_strides[1], rows, f, T, F)
        if FEATURE != 0:
            da *= slope(numbers, FEATURE)
        tl.store(dq + here[:, None] * F + f[None, :], da.to(dq.dtype.element_ty), mask=inside)
        state += times(tl.trans(b), values, PRECISION)
        total += tl.sum(b, 0)


@triton.jit
def gradients_of_keys(
    q, k, v, dout, scale_at, weight_at, sums, totals, dk, q_strides, k_strides, v_strides, dout_strides,
    T, segments, each, group, FEATURE: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    BF: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk of one segment for one query head, for a block of features, from the last chunk to the first."""
    row, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    key_row = row // group
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    c = tl.arange(0, VP)
    q += row.to(tl.int64) * q_strides[0]
    dout += row.to(tl.int64) * dout_strides[0]
    k += key_row.to(tl.int64) * k_strides[0]
    v += key_row.to(tl.int64) * v_strides[0]
    state, total = carried(sums, totals, (row * segments + segment).to(tl.int64), f, c, F, V)
    place = tl.arange(0, C)
    lower = place[:, None] >= place[None, :]
    begin = segment * each
    chunks = tl.cdiv(tl.minimum(begin + each, T) - begin, C)
    for number in range(chunks):
        rows = begin + (chunks - 1 - number) * C + place
        here = row.to(tl.int64) * T + rows
        given, values, weight, pairs = judged(
            dout, v, scale_at, weight_at, dout_strides[1], v_strides[1], here, rows, c, T, lower, V, PRECISION
        )
        numbers, inside = tile(q, q_strides[1], rows, f, T, F)
        a = features(numbers, inside, FEATURE)
        db = times(tl.trans(pairs), a, PRECISION) + times(values, tl.trans(state), PRECISION) + total[None, :]
        numbers, inside = tile(k, k_strides[1], rows, f, T, F)
        if FEATURE != 0:
            db *= slope(numbers, FEATURE)
        tl.store(dk + here[:, None] * F + f[None, :], db.to(dk.dtype.element_ty), mask=inside)
        state += times(tl.trans(a), given, PRECISION)
        total += tl.sum(a * weight[:, None], 0)


@triton.jit
def gradients_of_values(
    q, k, dout, scale_at, sums, totals, dv, q_strides, k_strides, dout_strides,
    T, segments, each, group, FEATURE: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    FP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv of one segment for one query head, for a block of values, from the last chunk to the first."""
    row, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    key_row = row // group
    f = tl.arange(0, FP)
    c = tl.program_id(1) * BV + tl.arange(0, BV)
    q += row.to(tl.int64) * q_strides[0]
    dout += row.to(tl.int64) * dout_strides[0]
    k += key_row.to(tl.int64) * k_strides[0]
    state, _ = carried(sums, totals, (row * segments + segment).to(tl.int64), f, c, F, V)
    place = tl.arange(0, C)
    lower = place[:, None] >= place[None, :]
    begin = segment * each
    chunks = tl.cdiv(tl.minimum(begin + each, T) - begin, C)
    for number in range(chunks):
        rows = begin + (chunks - 1 - number) * C + place
        here = row.to(tl.int64) * T + rows
        numbers, inside = tile(q, q_strides[1], rows, f, T, F)
        a = features(numbers, inside, FEATURE)
        numbers, inside = tile(k, k_strides[1], rows, f, T, F)
        b = features(numbers, inside, FEATURE)
        given, within = tile(dout, dout_strides[1], rows, c, T, V)
        given = given.to(tl.float32) * tl.load(scale_at + here, mask=rows < T, other=0.0)[:, None]
        pairs = tl.where(lower, times(a, tl.trans(b), PRECISION), 0.0)
        found = times(tl.trans(pairs), given, PRECISION) + times(b, state, PRECISION)
        tl.store(dv + here[:, None] * V + c[None, :], found.to(dv.dtype.element_ty), mask=within)
        state += times(tl.trans(a), given, PRECISION)
