"""Clustered attention: queries that lie together attend together, by their mean.

    o_i = softmax(c_{g(i)} Kᵀ · scale) V,       c_g the mean of the queries of cluster g

Vyas, Katharopoulos and Fleuret 2020, "Fast Transformers with Clustered Attention", section 3.1: the centroids attend
exactly, and every query takes the output of its own. Conventions: clusters are found by Lloyd's K-means on the queries
themselves, from queries that the seed picks, where the authors hash them to bits first; their "improved" form, which
recomputes the largest weights of each query, is not here. Gradients flow through the means, not through who belongs
where, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from clearhead.approximations.method import Method, Spent, whole
from clearhead.approximations.pooling import side_by_side, softmax
from clearhead.approximations.sight import Sight
from clearhead.calls import attention
from clearhead.core.arrays import Array, Library, without_gradient
from clearhead.core.problem import Problem


@dataclass(frozen=True)
class Clusters(Method):
    """Clustered attention as a value; `clusters(…)` makes one."""

    count: int = 64
    iterations: int = 10
    seed: int = 0

    source: ClassVar[str] = "Vyas et al. 2020"
    acausal: ClassVar[str | None] = "the queries of a cluster stand at different positions and attend as one"

    def members(self, library: Library, q: Array) -> Array:
        """1 where a query belongs to a cluster, (…, T, count)."""
        xp, q = library.xp, without_gradient(q)
        length = int(q.shape[-2])
        count = min(self.count, length)
        picked = np.sort(np.random.default_rng([self.seed, length, count]).choice(length, count, replace=False))
        centroids = xp.take(q, library.asarray(picked), axis=-2)
        belongs = nearest(library, q, centroids)
        for _ in range(self.iterations):
            sums, sizes = xp.matrix_transpose(belongs) @ q, xp.sum(belongs, axis=-2)[..., None]
            # a cluster that nobody belongs to stays where it is
            centroids = xp.where(sizes == 0, centroids, sums / xp.where(sizes == 0, xp.ones_like(sizes), sizes))
            belongs = nearest(library, q, centroids)
        return belongs

    def centroids(self, library: Library, q: Array) -> tuple[Array, Array]:
        """The mean of each cluster's queries, (…, count, D), and who belongs to it."""
        xp, belongs = library.xp, self.members(library, q)
        sizes = xp.sum(belongs, axis=-2)[..., None]
        return xp.matrix_transpose(belongs) @ q / xp.where(sizes == 0, xp.ones_like(sizes), sizes), belongs

    def run(self, problem: Problem, seen: Sight) -> Array:
        heads = side_by_side(problem, seen)
        centroids, belongs = self.centroids(problem.library, heads.q)
        return belongs @ attention(centroids, heads.k, heads.v, scale=problem.scale, mask=heads.mask)

    def rows(self, problem: Problem, seen: Sight, queries: Any) -> Array | None:
        library, xp = problem.library, problem.library.xp
        heads = side_by_side(problem, seen)
        centroids, belongs = self.centroids(library, heads.q)
        q = xp.take(belongs, library.asarray(queries), axis=-2) @ centroids
        allowed = None if heads.keys is None else heads.keys[..., None, :]
        return softmax(library, problem.scale * (q @ xp.matrix_transpose(heads.k)), allowed)

    def spent(self, length: int, features: int, width: int, causal: bool = False) -> Spent:
        count = min(self.count, length)
        finding = (self.iterations + 1) * 4.0 * length * count * features
        attending = length * count * (2.0 * features + 2 * width + 5) + 2.0 * length * count * width
        return Spent(finding + attending, float(length * count))

    def __repr__(self) -> str:
        extra = "" if self.iterations == 10 else f", iterations={self.iterations}"
        return f"clusters({self.count}{extra}{f', seed={self.seed}' if self.seed else ''})"


def nearest(library: Library, q: Array, centroids: Array) -> Array:
    """1 where a centroid is the nearest of a query, (…, T, count); of equal ones the first."""
    xp = library.xp
    near = q @ xp.matrix_transpose(centroids) - 0.5 * xp.sum(centroids * centroids, axis=-1)[..., None, :]
    best = xp.argmax(near, axis=-1)[..., None]
    return xp.astype(best == xp.arange(centroids.shape[-2], device=library.device), q.dtype)


def clusters(count: int = 64, *, iterations: int = 10, seed: int = 0) -> Clusters:
    """Clustered attention (Vyas et al. 2020): queries are grouped, and each group attends exactly by its mean, in O(n).

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 300, 16))
    >>> [round(ch.audit(ch.clusters(c), q, k, v).error, 2) for c in (16, 64, 300)]
    [0.71, 0.6, 0.0]

    It has no causal form.
    """
    return Clusters(whole("count", count), whole("iterations", iterations, 0), whole("seed", seed, 0))
