"""Bins of queries, the rows of a map: the tiles of each, those that see a block of keys, numbers laid out by tile."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from clearhead.kernels.hopper.choose_kernel import denominator
from clearhead.kernels.hopper.pipeline import await_others, others_may_begin

ROWS_OF_NUMBERS = 4  # that are laid out for a tile of queries, the last of them room: one copy brings all
LAID_OUT = gl.constexpr(ROWS_OF_NUMBERS)


class Bins(NamedTuple):
    """Bins of queries, the rows of a map: how many of both, tiles of each bin, its queries if all have as many.

    Where one bin has all queries, which is known before the kernel is compiled, nothing is divided: a program of the
    second look begins with all of this, and divisions of what is not known took a tenth of its time.
    """

    queries: Any
    count: Any
    each: Any
    size: Any
    even: Any
    alone: Any


@gluon.jit
def tile_of_row(row, bins, N: gl.constexpr):
    """The tile that holds a query."""
    queries, count, each, _, _, alone = bins
    tile = row // N
    if not alone:
        bin = (row.to(gl.int64) * count // queries).to(gl.int32)
        tile = bin * each + (row - first_of_bin(bin, bins)) // N
    return tile


@gluon.jit
def first_of_bin(bin, bins):
    """The first query of a bin."""
    queries, count, _, size, even, _ = bins
    first = bin * size
    if not even:
        first = ((bin.to(gl.int64) * queries + count - 1) // count).to(gl.int32)
    return first


@gluon.jit
def first_of_tile(tile, bins, N: gl.constexpr):
    """The first query of a tile."""
    first = tile * N
    if not bins.alone:
        bin = tile // bins.each
        first = first_of_bin(bin, bins) + (tile - bin * bins.each) * N
    return first


@gluon.jit
def tiles_seen(first, rows: gl.constexpr, bins, skipped, upper, lower, FORM: gl.constexpr, N: gl.constexpr):
    """The tiles [begin, end) hold the queries that see some key of a block; those in [low, high) see all of it.

    What the first `skipped` queries see does not count.
    """
    queries, count, each, _, _, _ = bins
    begin = 0
    end = count * each
    low = 0
    high = end
    if FORM.value.upper:
        seen = gl.maximum(first - upper, 0)
        whole = gl.maximum(first + rows - 1 - upper, 0)
        begin = gl.where(seen < queries, tile_of_row(gl.minimum(seen, queries - 1), bins, N), end)
        low = tile_of_row(gl.minimum(whole, queries - 1), bins, N)
        low = gl.where(first_of_tile(low, bins, N) < whole, low + 1, low)
    if FORM.value.lower:
        last = gl.minimum(first + rows - 1 - lower, queries - 1)
        whole = gl.minimum(first - lower - N + 1, queries - 1)
        end = gl.where(last >= 0, tile_of_row(gl.maximum(last, 0), bins, N) + 1, 0)
        high = gl.where(whole >= 0, tile_of_row(gl.maximum(whole, 0), bins, N) + 1, 0)
    counted = tile_of_row(gl.minimum(skipped, queries - 1), bins, N)
    begin = gl.maximum(begin, counted)
    if first_of_tile(counted, bins, N) < skipped:
        low = gl.maximum(low, counted + 1)
    end = gl.maximum(begin, end)
    low = gl.minimum(gl.maximum(low, begin), end)
    high = gl.maximum(gl.minimum(high, end), low)
    return begin, low, high, end


@gluon.jit
def half_of(tiles, half):
    """The first or the second half of what `tiles_seen` gives."""
    begin, low, high, end = tiles
    middle = (begin + end + 1) // 2
    begin = gl.where(half == 0, begin, middle)
    end = gl.where(half == 0, middle, end)
    low = gl.minimum(gl.maximum(low, begin), end)
    return begin, low, gl.minimum(gl.maximum(high, low), end), end


@gluon.jit(
    do_not_specialize=["queries", "keys", "skipped", "count", "each", "size"],
    do_not_specialize_on_alignment=["peaks", "totals", "levels", "large", "counts", "received"],
)
def lay_out(peaks, totals, levels, shifts, large, counts, received, queries, keys, skipped, count, each, size, scale,
            factor, N: gl.constexpr, EVEN: gl.constexpr, ALONE: gl.constexpr, TOP: gl.constexpr,
            ADDED: gl.constexpr):  # fmt: skip
    """Rows for one tile of queries: shifts, exponents from which keys may be among the largest, corrections, and room.

    A shift is +inf where there is no query, or one that sees nothing or is skipped. With TOP, no query has any yet of
    the largest weights, which are counted from here on; with ADDED, no key has received anything yet.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    bins = Bins(queries, count, each, size, EVEN, ALONE)
    tile = gl.program_id(0)
    number = gl.program_id(1)
    stop = queries
    if not ALONE:
        stop = first_of_bin(tile // each + 1, bins)
    column = gl.arange(0, N, layout)
    row = first_of_tile(tile, bins, N) + column
    place = number.to(gl.int64) * queries + row
    inside = (row < stop) & (row >= skipped)
    await_others()
    others_may_begin()
    peak = gl.load(peaks + place, inside, 0.0)
    total = gl.load(totals + place, inside, 0.0)
    shift, correction = denominator(peak, total, scale, factor)
    level = gl.load(levels + place, inside, 0.0) * factor
    slack = 2**-12 + gl.abs(level) * 2**-18  # keys times queries may round otherwise than queries times keys
    level = gl.where(total > 0, gl.maximum(level - shift - slack, -3e38), float("inf"))
    entry = (number * count * each + tile).to(gl.int64) * LAID_OUT * N + column
    gl.store(shifts + entry, shift)
    gl.store(shifts + entry + N, level)
    gl.store(shifts + entry + 2 * N, correction)
    if TOP:
        gl.store(counts + place, gl.full([N], 0, gl.int32, layout), row < stop)
    if ADDED:
        for start in range(tile * N, keys, gl.num_programs(0) * N):
            gl.store(
                received + number.to(gl.int64) * keys + start + column,
                gl.full([N], 0.0, gl.float32, layout),
                start + column < keys,
            )
    if gl.max(gl.where(total > 0, gl.abs(shift), 0.0), 0) > 32:  # whose rounding is more than that of a weight
        gl.store(large, 1)
