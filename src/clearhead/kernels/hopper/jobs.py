"""What a program of Hopper's forward has to do: its block of queries, the tiles of keys it looks at, in what order."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from clearhead.kernels.hopper.pipeline import share


class Extent(NamedTuple):
    """How much there is: `group` query heads share a key head, `side` heads are worked on at a time."""

    queries: Any
    keys: Any
    heads: Any
    group: Any
    jobs: Any
    side: Any


class Bounds(NamedTuple):
    """The keys that queries see: by their place, or by tables of key ranges, of `several` batch rows or one for all."""

    upper: Any
    lower: Any
    edges: Any
    table: Any
    several: Any
    tiles: Any
    bits: Any


@gluon.jit
def block_of(job, extent, bounds, FORM: gl.constexpr, CONFIG: gl.constexpr):
    """A job: its first query, head and batch row; and its tiles (base, low, high, end, bit).

    Tile t holds keys base + t · columns and on. Those below `end` hold what some query of the block sees, and of those
    in [low, high) every query sees all. A block that sees nothing still has one tile, all of it masked. Of a mask of
    any kind (`tile_runs.py`) tile t is the one at base + end − 1 − t in a list, and `bit` where its bits begin.
    """
    queries, keys, heads, _, jobs, side = extent
    upper, lower, _, table, several, _, _ = bounds
    ROWS: gl.constexpr = CONFIG.value.rows * CONFIG.value.consumers
    N: gl.constexpr = CONFIG.value.columns
    blocks = (queries + ROWS - 1) // ROWS
    bit = 0
    if FORM.value.tiles:  # here `several` is how many heads an entry of the table serves, and base is a place in lists
        entry = table + 8 * (job // several)
        rest = job % several
        head, batch = head_and_row(entry, rest, heads)
        first = gl.load(entry)
        base = gl.load(entry + 3)
        end = gl.load(entry + 5)
        high = end - gl.load(entry + 4)
        low = 0
        bit = gl.load(entry + 6)
    elif FORM.value.ranges:
        batches = jobs // (heads * blocks)
        each = gl.where(several != 0, heads, heads * batches)
        entry = table + 8 * (job // each)
        head = job % heads
        batch = gl.where(several != 0, gl.load(entry + 1), job % each // heads)
        first = gl.load(entry)
        base = gl.load(entry + 2)
        low = gl.load(entry + 3)
        high = gl.load(entry + 4)
        end = gl.load(entry + 5)
    else:
        block, number = share(job, blocks, jobs // blocks, side)
        first = (blocks - 1 - block) * ROWS  # the last queries of a causal head see the most keys: they go first
        head = number % heads
        batch = number // heads
        base = 0
        low = 0
        whole = keys  # all queries see the keys before it
        stop = keys
        if FORM.value.upper:
            whole = gl.minimum(keys, first + upper + 1)
            stop = gl.minimum(keys, first + ROWS + upper)
        if FORM.value.lower:
            base = gl.minimum(gl.maximum(first + lower, 0), keys - 1)
            low = (gl.maximum(first + ROWS - 1 + lower, 0) - base + N - 1) // N
        end = gl.maximum((stop - base + N - 1) // N, 1)
        low = gl.minimum(low, end - 1)
        high = gl.maximum(gl.minimum((whole - base) // N, end - 1), low)
    return first, head, batch, (base, low, high, end, bit)


@gluon.jit
def head_and_row(entry, rest, heads):
    """The head and the batch row of one of those that an entry of a table serves (`tile_runs.py`)."""
    batch = gl.load(entry + 1)
    head = gl.load(entry + 2)
    batch = gl.where(batch >= 0, batch, gl.where(head >= 0, rest, rest // heads))
    return gl.where(head >= 0, head, rest % heads), batch


@gluon.jit
def seen_by(row, batch, base, extent, bounds, FORM: gl.constexpr):
    """The first key that each query sees, and the one after the last, counted from `base`."""
    upper, lower, edges, _, several, _, _ = bounds
    queries = extent.queries
    start = row + lower
    stop = gl.full(row.shape, 0, gl.int32, row.type.layout) + extent.keys
    if FORM.value.ranges:
        place = 2 * ((batch * several).to(gl.int64) * queries + gl.minimum(row, queries - 1))
        start = gl.load(edges + place)
        stop = gl.load(edges + place + 1)
    elif FORM.value.upper:
        stop = gl.minimum(stop, row + upper + 1)
    return start - base, stop - base
