"""Sums over keys that factorise: whole, or up to each query's position by chunks, in O(n) time and memory.

Where a weight is a product of features, a_i · b_j, the sum over keys needs no pairs:

    Σ_j (a_i · b_j) v_j = a_i (Σ_j b_j v_jᵀ)

A causal sum stops at the query's own position. Inside of a chunk of C positions it is taken by pairs; what lies before
is the sum over whole chunks, which adds up along the sequence. That is C·n pairs and n/C sums of F × W numbers, and
what is left at the end is all that decoding needs to go on. Values carry a column of ones, whose sum is the
denominator.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from clearhead.core.arrays import Array, Library
from clearhead.core.grid import blocks

# As many positions go through together: beyond it, memory that need not be kept is used again
AT_ONCE = 8192


class State(NamedTuple):
    """What all keys so far come to: `sums` (…, Hk, 1, F, Dv + 1), the last column the denominator's.

    `peak` is the exponent that features were scaled down by, so that none overflows; None where none can. It is a plain
    tuple of arrays, which JAX and PyTorch take apart by themselves; its size is the same for any number of tokens.
    """

    sums: Array
    peak: Array | None = None


def with_ones(library: Library, v: Array) -> Array:
    """Values with a column of ones."""
    ones = library.zeros((*v.shape[:-1], 1), v.dtype) + 1.0
    return library.xp.concat([v, ones], axis=-1)


def total(library: Library, b: Array, v: Array) -> Array:
    """Σ_j b_j v_jᵀ over all keys, (…, F, W)."""
    return library.xp.matrix_transpose(b) @ v


def up_to(library: Library, a: Array, b: Array, v: Array, before: Array) -> tuple[Array, Array]:
    """Σ_{j ≤ i} (a_i · b_j) v_j for as many keys as queries, `before` (…, F, W) added; and the sum after all of them.

    a (…, T, F), b (…, T, F), v (…, T, W) give (…, T, W) and (…, F, W).
    """
    xp, size = library.xp, chunk(a.shape[-1], v.shape[-1])
    done = []
    for rows in blocks(a.shape[-2], AT_ONCE):
        here = slice(rows.start, rows.stop)
        found, before = _by_chunks(library, a[..., here, :], b[..., here, :], v[..., here, :], before, size)
        done.append(found)
    return done[0] if len(done) == 1 else xp.concat(done, axis=-2), before


def _by_chunks(library: Library, a: Array, b: Array, v: Array, before: Array, size: int) -> tuple[Array, Array]:
    xp, length = library.xp, a.shape[-2]
    size = min(size, length)
    a, b, v = (_cut(library, array, size) for array in (a, b, v))  # (…, chunks, C, ·)
    pairs = xp.tril(a @ xp.matrix_transpose(b))  # (…, chunks, C, C)
    sums = xp.matrix_transpose(b) @ v  # (…, chunks, F, W)
    lead = tuple(max(one, other) for one, other in zip(before.shape[:-2], sums.shape[:-3], strict=True))
    before = xp.broadcast_to(before, (*lead, *before.shape[-2:]))[..., None, :, :]
    sums = xp.broadcast_to(sums, (*lead, *sums.shape[-3:]))
    # added up from the left: a difference of two long sums would lose what the first chunks hold
    grown = xp.concat([before, sums], axis=-3)  # (…, chunks + 1, F, W)
    # PyTorch's own, which its compiler follows
    grown = grown.cumsum(-3) if library.name == "torch" else xp.cumulative_sum(grown, axis=-3)
    found = pairs @ v + a @ grown[..., :-1, :, :]
    found = xp.reshape(found, (*found.shape[:-3], -1, found.shape[-1]))[..., :length, :]
    return found, grown[..., -1, :, :]


def _cut(library: Library, array: Array, size: int) -> Array:
    """(…, n, ·) as (…, chunks, size, ·), the last chunk filled up with zeros."""
    *lead, length, width = array.shape
    missing = -length % size
    if missing:
        array = library.xp.concat([array, library.zeros((*lead, missing, width), array.dtype)], axis=-2)
    return library.xp.reshape(array, (*lead, (length + missing) // size, size, width))


def chunk(features: int, width: int) -> int:
    """Positions of a chunk: where pairs inside of it and sums before it take about as much memory.

    >>> chunk(64, 65), chunk(256, 65), chunk(2, 2)
    (64, 128, 16)
    """
    return min(max(2 ** round(math.log2(max(features * width, 1)) / 2), 16), 256)
