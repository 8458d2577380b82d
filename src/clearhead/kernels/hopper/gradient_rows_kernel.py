"""Before and after Hopper's gradients: shift and delta of each query; dq from where it was added up to its place."""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(math.log2(math.e))
ROWS = gl.constexpr(64)  # queries of a program; and rows and columns of a piece of dq


@gluon.jit(
    do_not_specialize=["first", "queries", "length", "padded", "batch_step", "head_step", "row_step"],
    do_not_specialize_on_alignment=["peaks", "totals", "shifts"],
)
def lay_out(dout, output, peaks, totals, dlses, shifts, dqs, first, queries, length, padded, batch_step, head_step,
            row_step, HEAD_DIM: gl.constexpr, N: gl.constexpr, LSE: gl.constexpr):  # fmt: skip
    """Shift and −delta of 64 queries, tile by tile; of those that are not there, or see nothing, +inf and 0.

    And zeros where their dq is to be added up.
    """
    ACROSS: gl.constexpr = HEAD_DIM // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    head = gl.program_id(1)
    batch = gl.program_id(2)
    number = (batch * gl.num_programs(1) + head).to(gl.int64)
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    inside = row < queries
    place = number * length + first + row
    peak = gl.load(peaks + place, inside, float("-inf"))
    total = gl.load(totals + place, inside, 1.0)
    seen = (peak > float("-inf")) & (total > 0)
    dout += batch.to(gl.int64) * batch_step + head.to(gl.int64) * head_step
    at = (first + row).to(gl.int64)[:, None]
    given = gl.load(dout + at * row_step + column[None, :], inside[:, None], 0.0).to(gl.float32)
    result = gl.load(output + place[:, None] * HEAD_DIM + column[None, :], inside[:, None], 0.0).to(gl.float32)
    delta = gl.sum(given * result, 1)
    if LSE:
        delta -= gl.load(dlses + place, inside, 0.0)
    delta = gl.where(seen, delta, 0.0)
    shift = gl.where(seen, peak * LOG2E + gl.log2(gl.where(seen, total, 1.0)), float("inf"))
    entry = number * padded * 2 + row // N * (2 * N) + row % N
    gl.store(shifts + entry, shift)
    gl.store(shifts + entry + N, -delta)
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    at = (number * padded + gl.program_id(0) * ROWS) * HEAD_DIM + gl.arange(0, ROWS * HEAD_DIM, flat)
    gl.store(dqs + at, gl.full([ROWS * HEAD_DIM], 0.0, gl.float32, flat))


@gluon.jit(do_not_specialize=["first", "queries", "length", "padded"])
def finish(dqs, dq_at, first, queries, length, padded, scale, HEAD_DIM: gl.constexpr):
    """One piece of dq, times scale, to its place among the rows of dq."""
    block = gl.program_id(0)
    part = gl.program_id(1)
    number = gl.program_id(2).to(gl.int64)
    held: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, gl.num_warps(), 1], [2, 1, 0])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    group = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, held)))
    thread = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, held)))
    entry = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, held)))
    base = dqs + number * padded * HEAD_DIM + (block * (HEAD_DIM // ROWS) + part) * (ROWS * ROWS)
    at = group[:, None, None] * 512 + thread[None, :, None] * 4 + entry[None, None, :]
    x = gl.load(base + at) * scale
    # (8 groups of columns, warp, row, pair of columns, row + 8 or not, column) as rows and columns
    x = gl.permute(gl.reshape(x, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    x = gl.convert_layout(gl.reshape(x, [ROWS, ROWS]), rows)
    row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, rows))
    column = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, rows))
    place = (number * length + first + row)[:, None] * HEAD_DIM + column[None, :]
    gl.store(dq_at + place, x.to(dq_at.dtype.element_ty), (row < queries)[:, None])
