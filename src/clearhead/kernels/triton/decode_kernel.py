"""Few queries, many keys: the keys are split over programs, and the parts are merged.

The query heads that share keys lie in one block of rows, so that a key is read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.kernels.gpu.device import (
    allowed_by_program,
    allowed_by_span,
    kept,
    load_rows,
    multiply,
    multiply_allowed,
    score,
    span_of,
)
from clearhead.kernels.gpu.softmax_kernel import finish, softmax_step


@triton.jit
def in_parts(parts, count, WIDTH: tl.constexpr):
    """Where the values of all parts begin, a row each; and their peaks, totals and weighted sums."""
    peaks = parts + count * WIDTH
    return parts, peaks, peaks + count, peaks + 2 * count


@triton.jit(do_not_specialize=["span", "mask", "scoring", "per_split"])
def split_keys(
    q, k, v, parts, q_strides, k_strides, v_strides, span, mask, scoring, T, S, per_split, splits,
    ENTROPY: tl.constexpr, ALIKE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The sums over some of the keys, for all queries of the heads that share them; ALIKE where all see the same."""
    PADDED: tl.constexpr = form.padded_head_dim
    WIDTH: tl.constexpr = form.padded_value_dim
    KEY_HEADS: tl.constexpr = form.heads // form.group
    number, part = tl.program_id(0) // splits, tl.program_id(0) % splits
    batch, key_head = number // KEY_HEADS, number % KEY_HEADS
    place = tl.arange(0, BM)
    inside = place < form.group * T
    member = tl.where(inside, place // T, 0)
    head = (key_head * form.group + member)[:, None]
    rows = tl.where(inside, place - place // T * T, 0)[:, None]
    features = tl.arange(0, PADDED)[None, :]
    q += batch.to(tl.int64) * q_strides[0]
    at = q + head.to(tl.int64) * q_strides[1] + rows.to(tl.int64) * q_strides[2] + features
    queries = tl.load(at, mask=inside[:, None] & (features < form.head_dim), other=0.0)
    k += batch.to(tl.int64) * k_strides[0] + key_head.to(tl.int64) * k_strides[1]
    v += batch.to(tl.int64) * v_strides[0] + key_head.to(tl.int64) * v_strides[1]
    limits = span_of(span, batch, form)
    # the keys that any of the queries sees, and this program's share of them
    seen_low = tl.maximum(limits[0], 0)
    seen_high = tl.minimum(limits[2], T + limits[1])
    begin = seen_low // BN * BN + part * per_split
    end = tl.minimum(begin + per_split, seen_high)
    values = tl.zeros((BM, WIDTH), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    weighted = tl.zeros((BM,), tl.float32)
    for first in range(begin, end, BN):
        columns = (first + tl.arange(0, BN))[None, :]
        keys = load_rows(k, k_strides[2], first, seen_low, seen_high, BN, form.head_dim, PADDED, False)
        v_tile = load_rows(v, v_strides[2], first, seen_low, seen_high, BN, form.value_dim, WIDTH, False)
        product = multiply(queries, tl.trans(keys), tl.zeros((BM, BN), tl.float32), form)
        scores, _ = score(product, scoring, rows, columns, head, batch, T, S, form)
        if form.program is None:
            allowed = allowed_by_span(limits[0], limits[1], limits[2], rows, columns)
        else:
            allowed = allowed_by_program(mask, rows, columns, head, batch, T, S, form)
            seen = tl.max((allowed & inside[:, None]).to(tl.int32), 0) > 0
            v_tile = tl.where(seen[:, None], v_tile, 0.0)
        scores = tl.where(allowed, scores, float("-inf"))
        e, alpha, peak, total, weighted = softmax_step(scores, peak, total, weighted, scoring.factor, True, ENTROPY)
        if form.dropout:
            e *= tl.where(kept(scoring, rows, columns, head, batch, form), scoring.rescale, 0.0)
        if ALIKE:  # what nobody sees was loaded as zeros
            values = multiply(e.to(v_tile.dtype), v_tile, values * alpha[:, None], form)
        else:
            values = multiply_allowed(e.to(v_tile.dtype), v_tile, allowed, values * alpha[:, None], form)
    # of one row they lie together: (batch, heads, T, splits)
    count = tl.num_programs(0).to(tl.int64) * form.group * T
    values_at, peak_at, total_at, weighted_at = in_parts(parts, count, WIDTH)
    here = ((batch.to(tl.int64) * form.heads + key_head * form.group) * T + place) * splits + part
    tl.store(peak_at + here, peak, mask=inside)
    tl.store(total_at + here, total, mask=inside)
    if ENTROPY:
        tl.store(weighted_at + here, weighted, mask=inside)
    width = tl.arange(0, WIDTH)
    tl.store(values_at + (here * WIDTH)[:, None] + width[None, :], values, mask=inside[:, None])


@triton.jit(do_not_specialize=["scoring"])
def merge_parts(
    parts, out, lse_at, denominator_peak, denominator_total, largest_at, entropy_at, unrounded, sinks, scoring, T,
    splits, SINKS: tl.constexpr, ENTROPY: tl.constexpr, UNROUNDED: tl.constexpr, SPLITS: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """One query of one head: its parts become one."""
    WIDTH: tl.constexpr = form.padded_value_dim
    row = tl.program_id(0)
    part = tl.arange(0, SPLITS)
    here = row.to(tl.int64) * splits + part
    count = tl.num_programs(0).to(tl.int64) * splits
    values_at, peak_at, total_at, weighted_at = in_parts(parts, count, WIDTH)
    peaks = tl.load(peak_at + here, mask=part < splits, other=float("-inf"))
    totals = tl.load(total_at + here, mask=part < splits, other=0.0)
    largest = tl.max(peaks, 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    if ENTROPY:
        moved = (peaks - shift) * scoring.factor
    else:
        moved = peaks * scoring.factor - shift * scoring.factor
    alpha = tl.exp2(moved)
    sums = tl.sum(totals * alpha, 0)
    weighted = 0.0
    if ENTROPY:
        sums_weighted = tl.load(weighted_at + here, mask=part < splits, other=0.0)
        weighted = tl.sum(alpha * (sums_weighted + totals * tl.maximum(moved, -1000.0)), 0)
    width = tl.arange(0, WIDTH)
    at = values_at + (here * WIDTH)[:, None] + width[None, :]
    values = tl.sum(tl.load(at, mask=(part < splits)[:, None], other=0.0) * alpha[:, None], 0)
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + row // T % form.heads)
    share, lse, peak, total, largest, entropy = finish(largest, sums, weighted, sink, scoring, SINKS, ENTROPY, form)
    tl.store(lse_at + row, lse)
    tl.store(denominator_peak + row, peak)
    tl.store(denominator_total + row, total)
    if ENTROPY:
        tl.store(largest_at + row, largest)
        tl.store(entropy_at + row, entropy)
    at = row.to(tl.int64) * form.value_dim + width
    tl.store(out + at, (values * share).to(out.dtype.element_ty), mask=width < form.value_dim)
    if UNROUNDED:
        tl.store(unrounded + at, values * share, mask=width < form.value_dim)
