"""The best blocks of keys, exactly: each block of queries attends to the few blocks of keys that promise most.

    o_i = Σ_{j ∈ B(i)} e^(s_ij − z_i) v_j,      B(i) the `keep` blocks with the largest q̄ · k̄

q̄ and k̄ are the means of a block of queries and of a block of keys. Selection by block means is that of Lu et al. 2025,
"MoBA: Mixture of Block Attention", where each query chooses; here a block of queries chooses
together, as kernels want it. Causal calls keep the blocks that hold the queries' own positions before all others, as
there, and they count among the `keep`. Choosing takes (n / block)² scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.approximations.method import Method, Spent, whole
from clearhead.approximations.pooling import Heads, side_by_side, softmax
from clearhead.approximations.sight import Sight
from clearhead.core.arrays import Array, Library, without_gradient
from clearhead.core.grid import blocks
from clearhead.core.problem import Problem

# As many numbers of keys are gathered together
AT_ONCE = 2**23


@dataclass(frozen=True)
class TopBlocks(Method):
    """Attention to the best blocks as a value; `topk_blocks(…)` makes one."""

    keep: int
    block: int = 64

    source: ClassVar[str] = "Lu et al. 2025"

    def chosen(self, problem: Problem, seen: Sight, heads: Heads) -> Array:
        """The blocks of keys for each block of queries, (…, query blocks, keep)."""
        library, xp, grid = problem.library, problem.library.xp, problem.grid
        q = block_means(library, without_gradient(heads.q), None, self.block)[0]
        k, some = block_means(library, without_gradient(heads.k), heads.keys, self.block)
        promise = problem.scale * (q @ xp.matrix_transpose(k))  # (…, query blocks, key blocks)
        down, across = promise.shape[-2:]
        promise = xp.where(some[..., None, :], promise, -xp.inf)
        if seen.first is not None:
            first = xp.arange(down, device=library.device)[:, None] * self.block + seen.first
            last = (
                xp.where(first + self.block > grid.queries + seen.first, grid.queries + seen.first, first + self.block)
                - 1
            )
            begins = xp.arange(across, device=library.device) * self.block
            promise = xp.where(begins > last, -xp.inf, promise)
            own = (begins <= last) & (begins + self.block > first)
            promise = xp.where(own & some[..., None, :], xp.inf, promise)
        return library.largest(promise, min(self.keep, across))[1]

    def run(self, problem: Problem, seen: Sight) -> Array:
        library, xp, grid = problem.library, problem.library.xp, problem.grid
        heads, size = side_by_side(problem, seen), self.block
        chosen = self.chosen(problem, seen, heads)
        q, k, v = (cut(library, array, size) for array in heads[:3])  # (…, blocks, size, ·)
        lead, kept = tuple(q.shape[:-3]), chosen.shape[-1]
        there = present(library, heads, grid.keys)
        there = xp.broadcast_to(there, (*lead, grid.keys))[..., None]
        there = cut(library, there, size)  # (…, blocks, size, 1), False beyond the end
        numbers = 2 * max(int(k.shape[-1]), 1) * kept * size
        for axis in lead:
            numbers *= axis
        done = []
        for some in blocks(q.shape[-3], max(1, AT_ONCE // max(numbers, 1))):
            here = chosen[..., some.start : some.stop, :]
            keys, values, allowed = (
                gathered(library, array, here) for array in (k, v, there)
            )  # (…, rows, kept · size, ·)
            scores = problem.scale * (q[..., some.start : some.stop, :, :] @ xp.matrix_transpose(keys))
            allowed = xp.matrix_transpose(allowed)  # (…, rows, 1, kept · size)
            if seen.first is not None:
                inside = xp.arange(size, device=library.device)
                places = xp.reshape(here[..., None] * size + inside, (*here.shape[:-1], 1, kept * size))
                queries = xp.arange(some.start, some.stop, device=library.device)[:, None] * size + inside
                allowed = allowed & (places <= queries[..., None] + seen.first)
            done.append(softmax(library, scores, allowed) @ values)
        output = xp.concat(done, axis=-3)
        return xp.reshape(output, (*lead, -1, problem.width))[..., : grid.queries, :]

    def rows(self, problem: Problem, seen: Sight, queries: Any) -> Array | None:
        library, xp, grid = problem.library, problem.library.xp, problem.grid
        heads = side_by_side(problem, seen)
        places = library.asarray(queries)
        chosen = xp.take(self.chosen(problem, seen, heads), places // self.block, axis=-2)  # (…, rows, keep)
        block = xp.arange(grid.keys, device=library.device) // self.block
        allowed = xp.any(chosen[..., None] == block, axis=-2) & present(library, heads, grid.keys)[..., None, :]
        if seen.first is not None:
            allowed = allowed & (xp.arange(grid.keys, device=library.device) <= places[:, None] + seen.first)
        q = xp.take(heads.q, places, axis=-2)
        return softmax(library, problem.scale * (q @ xp.matrix_transpose(heads.k)), allowed)

    def spent(self, length: int, features: int, width: int, causal: bool = False) -> Spent:
        count = -(-length // self.block)
        met = float(length) * min(self.keep, count) * self.block
        return Spent(
            2.0 * count * count * features + 2.0 * length * features + met * (2 * features + 2 * width + 5),
            float(count * count) + AT_ONCE,
        )

    def __repr__(self) -> str:
        return f"topk_blocks({self.keep}{'' if self.block == 64 else f', block={self.block}'})"


def present(library: Library, heads: Heads, count: int) -> Array:
    """The keys that are there, (…, S), all of them unless some are said not to be."""
    return (
        library.xp.ones((1, count), dtype=library.xp.bool, device=library.device) if heads.keys is None else heads.keys
    )


def cut(library: Library, array: Array, size: int) -> Array:
    """(…, n, ·) as (…, blocks, size, ·), zeros or False beyond the end."""
    *lead, length, width = array.shape
    missing = -length % size
    if missing:
        array = library.xp.concat([array, library.zeros((*lead, missing, width), array.dtype)], axis=-2)
    return library.xp.reshape(array, (*lead, (length + missing) // size, size, width))


def block_means(library: Library, array: Array, keys: Array | None, size: int) -> tuple[Array, Array]:
    """The mean of each block over the positions that are there, (…, blocks, D), and whether there is any."""
    xp = library.xp
    real = xp.ones((1, array.shape[-2]), dtype=xp.bool, device=library.device) if keys is None else keys
    counts = xp.sum(cut(library, xp.astype(real, array.dtype)[..., None], size), axis=-2)  # (…, blocks, 1)
    total = xp.sum(cut(library, array, size), axis=-2)
    return total / xp.where(counts == 0, xp.ones_like(counts), counts), counts[..., 0] > 0


def gathered(library: Library, array: Array, chosen: Array) -> Array:
    """The chosen blocks (…, rows, keep) of (…, blocks, size, ·), side by side: (…, rows, keep · size, ·)."""
    xp = library.xp
    *lead, count, size, width = array.shape
    rows, kept = chosen.shape[-2:]
    flat = xp.reshape(array, (*lead, count, size * width))
    index = xp.reshape(chosen, (*lead, rows * kept, 1))
    found = xp.take_along_axis(flat, xp.broadcast_to(index, (*lead, rows * kept, size * width)), axis=-2)
    return xp.reshape(found, (*lead, rows, kept * size, width))


def topk_blocks(keep: int, *, block: int = 64) -> TopBlocks:
    """Keep the best blocks of keys and attend to them exactly (block means choose, as in MoBA, Lu et al. 2025).

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 512, 16))
    >>> [round(ch.audit(ch.topk_blocks(keep, block=32), q, k, v, mask=ch.causal()).error, 2) for keep in (2, 8, 16)]
    [1.34, 0.33, 0.0]

    With as many as there are blocks it is exact. Where q, k and v have no order along the sequence, as here, the means
    of blocks say little; on text they say more.
    """
    return TopBlocks(whole("keep", keep), whole("block", block))
