"""What several methods share: heads side by side, means of stretches of a sequence, and a softmax over allowed keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from clearhead.approximations.sight import Sight
from clearhead.core.arrays import Array, Library
from clearhead.core.grid import bins
from clearhead.core.mask import Mask, Where
from clearhead.core.problem import Problem


class Heads(NamedTuple):
    """q, k and v (…, H, n, ·) in the precision of sums, a key head for each query head; keys (…, H or 1, S) or None."""

    q: Array
    k: Array
    v: Array
    keys: Array | None

    @property
    def mask(self) -> Mask | None:
        """The keys that are there, as a mask for `attention`."""
        return None if self.keys is None else Where(self.keys[..., None, :])


def side_by_side(problem: Problem, seen: Sight) -> Heads:
    """The arrays of a call, whole batches of heads; keys that are not there are zeros, whatever they held."""
    library, xp = problem.library, problem.library.xp
    q, k, v = map(library.computing, (problem.q, problem.k, problem.v))
    if problem.group != 1:
        k, v = (xp.repeat(a, problem.group, axis=-3) for a in (k, v))
    q, k, v = (xp.broadcast_to(a, (*problem.grid.batch, *a.shape[-3:])) for a in (q, k, v))
    if seen.keys is None:
        return Heads(q, k, v, None)
    keys = seen.keys if seen.keys.ndim > 1 else seen.keys[None, ...]
    k, v = (xp.where(keys[..., None], a, xp.zeros_like(a)) for a in (k, v))
    return Heads(q, k, v, keys)


def stretches(library: Library, length: int, count: int, dtype: Any) -> Array:
    """1 where a position belongs to a stretch: (count, length), stretches equal to within one.

    >>> stretches(Library.of(np.zeros(1)), 5, 2, np.float64)
    array([[1., 1., 1., 0., 0.],
           [0., 0., 0., 1., 1.]])
    """
    table = np.zeros((min(count, length), length), dtype=np.float32)
    for row, one in enumerate(bins(length, count)):
        table[row, one.start : one.stop] = 1
    return library.asarray(table, dtype)


def means(library: Library, array: Array, keys: Array | None, count: int) -> tuple[Array, Array | None]:
    """The mean of each stretch over the positions that are there, (…, count, D), and where there is any, (…, count)."""
    table = stretches(library, array.shape[-2], count, array.dtype)
    if keys is None:
        return (table @ array) / library.xp.sum(table, axis=-1)[:, None], None
    xp = library.xp
    present = xp.astype(keys, array.dtype)[..., None]  # (…, S, 1)
    counts = table @ present
    return (table @ array) / xp.where(counts == 0, xp.ones_like(counts), counts), counts[..., 0] > 0


def softmax(library: Library, scores: Array, allowed: Array | None = None) -> Array:
    """Weights over the keys that are allowed; a query that has none has weights 0."""
    xp = library.xp
    if allowed is not None:
        scores = xp.where(allowed, scores, -xp.inf)
    peak = xp.max(scores, axis=-1, keepdims=True)
    weights = xp.exp(scores - xp.where(peak == -xp.inf, xp.zeros_like(peak), peak))
    total = xp.sum(weights, axis=-1, keepdims=True)
    return weights / xp.where(total == 0, xp.ones_like(total), total)
