"""A slab: query heads that are worked on together, over the keys they share, tile by tile.

Arrays are laid out as (*batch, key heads, group, positions, features), so that query heads that share keys broadcast
against them. A slab is all of that, or one batch row and key head of it; the code that uses it is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import array_api_compat
import numpy as np

from clearhead.core import formula
from clearhead.core.arrays import Array
from clearhead.core.mask import decided
from clearhead.core.problem import Problem


class Tile(NamedTuple):
    """One tile of a slab: its scores (…, t, s), q (…, t, D), k (…, s, D), v (…, s, Dv) without what nobody of it sees.

    `mask` says which pairs are allowed, and `asked` (…, t, 1) which queries have any; None where all are.
    """

    scores: Array
    q: Array
    k: Array
    v: Array
    asked: Array | None
    mask: Array | None


class Slab:
    """The queries of some heads and the keys they share."""

    def __init__(self, problem: Problem, at: tuple[int, ...]) -> None:
        self.problem, self.at = problem, at
        self.library, self.xp = problem.library, problem.library.xp
        grid = problem.grid
        self.queries, self.keys = grid.queries, grid.keys
        self.q = self.library.computing(self.cut(problem.q))  # (…, group, T, D)
        self.k = self.library.computing(self.cut(problem.k))  # (…, 1, S, D)
        self.v = self.library.computing(self.cut(problem.v))  # (…, 1, S, Dv)
        self.lead = ((*grid.batch, problem.key_heads) if not at else ()) + (problem.group,)

    def cut(self, array: Array) -> Array:
        """This slab's part of an array that broadcasts to (*batch, heads, …, …), query or key heads."""
        problem = self.problem
        rank = len(problem.grid.batch) + 3
        array = array[(None,) * (rank - array.ndim) + (...,)]
        *batch, heads, rows, columns = array.shape
        shared = problem.key_heads
        together = (1, 1) if heads == 1 else (shared, heads // shared if shared else 1)
        array = array_api_compat.array_namespace(array).reshape(array, (*batch, *together, rows, columns))
        lead = array.shape[: len(self.at)]
        return array[(*(0 if size == 1 else i for size, i in zip(lead, self.at, strict=True)), ...)]

    def tile(self, rows: range, columns: range) -> Tile | None:
        """The scores of a tile; None where no query of it may attend to any key of it."""
        problem, library, xp, grid = self.problem, self.library, self.xp, self.problem.grid
        allowed = True if problem.mask is None else problem.mask.tile(rows, columns, grid)
        if not isinstance(allowed, bool):
            allowed = decided(self.cut(allowed))  # one head's part may be empty where another's is not
        if allowed is False:
            return None
        mask = None if allowed is True else library.asarray(allowed)
        q = self.q[..., rows.start : rows.stop, :]
        k = self.k[..., columns.start : columns.stop, :]
        v = self.v[..., columns.start : columns.stop, :]
        bias = None
        if problem.bias is not None:
            bias = library.asarray(self.cut(problem.bias.tile(rows, columns, grid)), q.dtype)
        asked = None
        if mask is not None:
            # where query heads share keys a key is blank only if none of them may see it
            q, k, v = formula.blank(mask, q, k, v)
            asked = xp.any(mask, axis=-1)[..., None]
        scores = formula.score(q, k, scale=problem.scale, softcap=problem.softcap, bias=bias, mask=mask)
        return Tile(scores, q, k, v, asked, mask)

    def keep(self, rows: range, columns: range) -> Array | None:
        """True where dropout keeps a weight of the tile; None without dropout."""
        if self.problem.dropout is None:
            return None
        grid = self.problem.grid
        shape = (*grid.batch, self.problem.key_heads, self.problem.group)
        numbers = np.arange(int(np.prod(shape))).reshape(shape)[self.at]
        return self.library.asarray(self.problem.dropout.keep(numbers, rows, columns))

    def dropped(self, weights: Array, rows: range, columns: range) -> Array:
        """The weights after dropout."""
        keep = self.keep(rows, columns)
        if keep is None:
            return weights
        assert self.problem.dropout is not None
        return weights * (self.xp.astype(keep, weights.dtype) * self.problem.dropout.rescale)

    @property
    def sinks(self) -> Array | None:
        """The sink logits of this slab's heads, (…, group, 1)."""
        if self.problem.sinks is None:
            return None
        sinks = self.library.asarray(self.problem.sinks, self.q.dtype)
        return self.cut(sinks[:, None, None])[..., 0]


def slabs(problem: Problem) -> Iterator[Slab]:
    """The slabs of a problem: one for each batch row and key head in NumPy, all in one elsewhere.

    NumPy has no cost for a call but for memory it walks through twice, so small working sets win. The others have a
    cost for each call, and spread a large one over threads or a device.
    """
    places: Iterator[tuple[int, ...]] = iter([()])
    if problem.library.name == "numpy" and 0 not in (*problem.grid.batch, problem.key_heads):
        places = itertools.product(*map(range, (*problem.grid.batch, problem.key_heads)))
    for at in places:
        yield Slab(problem, at)
