"""Nyströmformer: the matrix of weights from its columns and rows at a few landmarks.

    O = softmax(Q K̃ᵀ · scale)  Z  (softmax(Q̃ Kᵀ · scale) V),        Z ≈ softmax(Q̃ K̃ᵀ · scale)⁺

Xiong et al. 2021, "Nyströmformer"; Q̃ and K̃ are the means of m stretches of queries and of keys.
The pseudo-inverse Z is iterated as in the paper, Z ← ¼ Z (13 I − A Z (15 I − A Z (7 I − A Z))), from
Aᵀ / (‖A‖₁ ‖A‖∞), six times. Conventions: norms are each matrix's own (the authors' code has that as an option, and by
default takes the largest over the batch); stretches are equal to within one, where their code wants lengths that
divide; their convolution of the values, which is added to the output, is no part of it. The outer and the last factor
are calls of `attention`, so no n × m matrix is ever built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.approximations.method import Method, Spent, whole
from clearhead.approximations.pooling import Heads, means, side_by_side, softmax
from clearhead.approximations.sight import Sight
from clearhead.calls import attention
from clearhead.core.arrays import Array, Library
from clearhead.core.mask import Where
from clearhead.core.problem import Problem


@dataclass(frozen=True)
class Nystrom(Method):
    """Nyström attention as a value; `nystrom(…)` makes one."""

    landmarks: int = 64
    iterations: int = 6

    source: ClassVar[str] = "Xiong et al. 2021"
    acausal: ClassVar[str | None] = "its landmarks are means over all positions, so a query would see what comes later"

    def between(self, problem: Problem, heads: Heads) -> tuple[Array, Array, Array, Array | None]:
        """Q̃, K̃ (…, m, D), Z (…, m, m), and the landmarks of keys that stand for any, (…, m)."""
        library, xp = problem.library, problem.library.xp
        count = min(self.landmarks, problem.grid.queries, problem.grid.keys)
        q, _ = means(library, heads.q, None, count)
        k, some = means(library, heads.k, heads.keys, count)
        scores = problem.scale * (q @ xp.matrix_transpose(k))
        middle = softmax(library, scores, None if some is None else some[..., None, :])
        return q, k, inverse(library, middle, self.iterations), some

    def run(self, problem: Problem, seen: Sight) -> Array:
        heads = side_by_side(problem, seen)
        q, k, z, some = self.between(problem, heads)
        values = z @ attention(q, heads.k, heads.v, scale=problem.scale, mask=heads.mask)
        mask = None if some is None else Where(some[..., None, :])
        return attention(heads.q, k, values, scale=problem.scale, mask=mask)

    def rows(self, problem: Problem, seen: Sight, queries: Any) -> Array | None:
        library, xp = problem.library, problem.library.xp
        heads = side_by_side(problem, seen)
        q, k, z, some = self.between(problem, heads)
        rows = xp.take(heads.q, library.asarray(queries), axis=-2)
        left = softmax(
            library, problem.scale * (rows @ xp.matrix_transpose(k)), None if some is None else some[..., None, :]
        )
        allowed = None if heads.keys is None else heads.keys[..., None, :]
        right = softmax(library, problem.scale * (q @ xp.matrix_transpose(heads.k)), allowed)
        return left @ z @ right

    def spent(self, length: int, features: int, width: int, causal: bool = False) -> Spent:
        m = min(self.landmarks, length)
        pairs = 2.0 * length * m * (2 * features + 2 * width + 5)
        return Spent(pairs + self.iterations * 8.0 * m**3 + 2.0 * length * features, 3.0 * m * m + 3 * length)

    def __repr__(self) -> str:
        return f"nystrom({self.landmarks}{'' if self.iterations == 6 else f', iterations={self.iterations}'})"


def inverse(library: Library, a: Array, iterations: int) -> Array:
    """The Moore–Penrose pseudo-inverse of square matrices with no negative entries, by products alone.

    >>> import numpy as np
    >>> a = np.array([[0.8, 0.2], [0.3, 0.7]])
    >>> bool(np.abs(inverse(Library.of(a), a, 6) - np.linalg.inv(a)).max() < 1e-6)
    True
    """
    xp = library.xp
    norms = xp.max(xp.sum(a, axis=-1), axis=-1) * xp.max(xp.sum(a, axis=-2), axis=-1)
    norms = xp.where(norms == 0, xp.ones_like(norms), norms)  # nothing may be seen at all
    z = xp.matrix_transpose(a) / norms[..., None, None]
    one = xp.eye(a.shape[-1], dtype=a.dtype, device=library.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * (z @ (13.0 * one - az @ (15.0 * one - az @ (7.0 * one - az))))
    return z


def nystrom(landmarks: int = 64, *, iterations: int = 6) -> Nystrom:
    """Nyström attention (Xiong et al. 2021): weights from their columns and rows at landmarks, in O(n).

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 300, 16))
    >>> [round(ch.audit(ch.nystrom(m), q / 2, k / 2, v).error, 2) for m in (16, 64, 300)]
    [0.25, 0.2, 0.04]

    With as many landmarks as positions it is exact, up to the iterations for the inverse. It has no causal form.
    """
    return Nystrom(whole("landmarks", landmarks), whole("iterations", iterations))
