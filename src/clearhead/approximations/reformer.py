"""LSH attention: each query attends exactly, to the keys that fall into its own bucket in any of some rounds.

    o_i = Σ_{j ∈ P_i} e^(s_ij − z_i) v_j,      P_i = {j : h_r(q_i) = h_r(k_j) for some round r},
    h_r(x) = argmax [x R_r ; −x R_r],          R_r (D, buckets / 2) normal

Kitaev, Kaiser and Levskaya 2020, "Reformer", sections 2 and 3. A round sorts queries and keys by bucket, so that what
may be attended to lies in blocks along the diagonal, and the rest is skipped; rounds merge by their log-sum-exp.
Conventions: a pair that shares a bucket in several rounds counts once (duplicates=True counts it in each, which is
quicker and what much published code does). Queries and keys may differ, where Reformer shares them; so buckets hold
unequal numbers of both, none is cut off at chunks, and a query whose bucket has no key has output 0. The R are drawn by
NumPy from the seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from clearhead.approximations.method import Method, Spent, whole
from clearhead.approximations.pooling import side_by_side, softmax
from clearhead.approximations.sight import Sight
from clearhead.calls import observe
from clearhead.core.arrays import Array, Library, alike, settled, without_gradient
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import Grid
from clearhead.core.mask import Mask, Tile, Where, decided
from clearhead.core.masks import documents
from clearhead.core.partial import Partial, merge
from clearhead.core.problem import Problem


@dataclass(frozen=True)
class LSH(Method):
    """LSH attention as a value; `lsh(…)` makes one."""

    buckets: int
    rounds: int = 4
    seed: int = 0
    duplicates: bool = False

    source: ClassVar[str] = "Kitaev et al. 2020"

    def hashed(self, library: Library, x: Array) -> list[Array]:
        """The bucket of each vector in each round, (…, n)."""
        xp, found = library.xp, []
        x = without_gradient(x)
        for turn in rotations(self.rounds, int(x.shape[-1]), self.buckets, self.seed):
            along = x @ library.asarray(turn, x.dtype)
            found.append(xp.argmax(xp.concat([along, -along], axis=-1), axis=-1))
        return found

    def run(self, problem: Problem, seen: Sight) -> Array:
        library, xp, grid = problem.library, problem.library.xp, problem.grid
        heads = side_by_side(problem, seen)
        lead = tuple(heads.q.shape[:-2])

        def as_rows(array: Array, trailing: int) -> Array:
            """(*batch, heads, …) as (rows, …): buckets differ by head, and masks by batch row."""
            return xp.reshape(array, (-1, *array.shape[array.ndim - trailing :]))

        keys = None if heads.keys is None else as_rows(xp.broadcast_to(heads.keys, (*lead, grid.keys)), 1)
        q, k, v = (as_rows(array, 2) for array in heads[:3])
        of_queries, of_keys = self.hashed(library, q), self.hashed(library, k)
        parts = []
        for round_, (mine, theirs) in enumerate(zip(of_queries, of_keys, strict=True)):
            down, across = (xp.argsort(buckets, axis=-1, stable=True) for buckets in (mine, theirs))
            mask = documents(sorted_by(xp, theirs, across), queries=sorted_by(xp, mine, down))
            for other in range(0 if self.duplicates else round_):
                ids = sorted_by(xp, of_keys[other], across), sorted_by(xp, of_queries[other], down)
                mask = mask & ~documents(ids[0], queries=ids[1])
            if keys is not None:
                mask = mask & Where(settled(sorted_by(xp, keys, across)[:, None, None, :]))
            if seen.first is not None:
                mask = mask & UpTo(settled(down + seen.first), settled(across))
            found = observe(
                *(rows_by(xp, a, order)[:, None, ...] for a, order in ((q, down), (k, across), (v, across))),
                mask=mask, scale=problem.scale, kernel=None if seen.first is None else "tiled",
            )  # fmt: skip
            back = xp.argsort(down, axis=-1, stable=True)[:, None, :]
            parts.append(Partial(rows_by(xp, found.output, back), sorted_by(xp, found.lse, back)))
        output = parts[0].output if len(parts) == 1 else merge(*parts).output
        return xp.reshape(output, (*lead, grid.queries, problem.width))

    def rows(self, problem: Problem, seen: Sight, queries: Any) -> Array | None:
        library, xp = problem.library, problem.library.xp
        heads = side_by_side(problem, seen)
        places = library.asarray(queries)
        q = xp.take(heads.q, places, axis=-2)
        count: Array = 0
        for mine, theirs in zip(self.hashed(library, q), self.hashed(library, heads.k), strict=True):
            count = count + xp.astype(mine[..., :, None] == theirs[..., None, :], q.dtype)
        allowed = count > 0
        if heads.keys is not None:
            allowed = allowed & heads.keys[..., None, :]
        if seen.first is not None:
            allowed = allowed & (xp.arange(problem.grid.keys, device=library.device) <= places[:, None] + seen.first)
        scores = problem.scale * (q @ xp.matrix_transpose(heads.k))
        if self.duplicates:
            scores = scores + xp.log(xp.where(allowed, count, xp.ones_like(count)))
        return softmax(library, scores, allowed)

    def spent(self, length: int, features: int, width: int, causal: bool = False) -> Spent:
        pairs = length * (length + 1) / 2 if causal else float(length * length)
        hashing = 2.0 * length * features * self.buckets * self.rounds
        met = pairs * self.rounds / self.buckets * (2 * features + 2 * width + 5)
        return Spent(hashing + met, length * (2.0 * features + 2 * width + self.buckets))

    def __repr__(self) -> str:
        extra = f", seed={self.seed}" * bool(self.seed) + ", duplicates=True" * self.duplicates
        return f"lsh({self.buckets}, rounds={self.rounds}{extra})"


@dataclass(frozen=True, eq=False, repr=False)
class UpTo(Mask):
    """Pairs in which the key stands no later than the query, by the places that both had: (rows, T) and (rows, S)."""

    queries: Array
    keys: Array

    def tile(self, rows: range, columns: range, grid: Grid) -> Tile:
        mine = self.queries[..., None, rows.start : rows.stop, None]
        theirs = self.keys[..., None, None, columns.start : columns.stop]
        mine, theirs = alike(mine, theirs)
        return decided(theirs <= mine)

    def reason(self, query: int, key: int, grid: Grid, at: tuple[int, ...]) -> str:
        return f"{self!r} compares where they stood before they were sorted"

    def __repr__(self) -> str:
        return "no later than the query"


def sorted_by(xp: Any, numbers: Array, order: Array) -> Array:
    """Numbers (…, n) in an order (…, n)."""
    return xp.take_along_axis(numbers, order, axis=-1)


def rows_by(xp: Any, array: Array, order: Array) -> Array:
    """Rows of (…, n, D) in an order (…, n)."""
    index = xp.broadcast_to(order[..., None], (*order.shape, array.shape[-1]))
    return xp.take_along_axis(array, index, axis=-2)


@lru_cache(maxsize=32)
def rotations(rounds: int, features: int, buckets: int, seed: int) -> np.ndarray:
    """The R of each round, (rounds, features, buckets / 2)."""
    generator = np.random.default_rng([seed, rounds, features, buckets])
    return generator.standard_normal((rounds, features, buckets // 2))


def lsh(buckets: int, rounds: int = 4, *, seed: int = 0, duplicates: bool = False) -> LSH:
    """LSH attention (Kitaev et al. 2020, Reformer): exact attention within buckets that vectors are hashed to.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 300, 16))
    >>> [round(ch.audit(ch.lsh(8, rounds), 2 * k, k, v).error, 2) for rounds in (1, 4, 16)]
    [0.44, 0.17, 0.01]

    It pays where few keys have most of the weight, and queries point where those keys do: Reformer shares them.
    Buckets are even in number, and their number should grow with the length. More rounds find more of the keys.
    """
    if whole("buckets", buckets, 2) % 2:
        raise ArgumentError("buckets", f"is {shown(buckets)}, expected an even number: each direction has an opposite")
    if not isinstance(duplicates, bool):
        raise ArgumentError("duplicates", f"is {shown(duplicates)}, expected True or False")
    return LSH(buckets, whole("rounds", rounds), whole("seed", seed, 0), duplicates)
