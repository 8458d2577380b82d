"""Additive (Bahdanau) attention, to compare with: a score is vᵀ tanh(W q + U k) instead of q · k / √d.

    e_ij = v · tanh(W q_i + U k_j)        weights = softmax(e)        output = weights V

Queries and keys need not have the same number of features, and no scale is needed: tanh keeps each term within ±1. But
every pair of query and key has `hidden` tanh of its own, where a dot product is one row of a matrix product, and those
n² · hidden numbers have to be kept for the gradients. That is what scaled dot products were chosen over.

>>> print(compare(n=512, d=64, hidden=64))
n 512, d 64, hidden 64   dot product    additive
multiply-adds of scores   16,777,216  20,971,520
tanh                               0  16,777,216
numbers kept                 262,144  17,039,360
parameters                         0       8,256
"""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.core.arrays import Array, Library
from clearhead.core.errors import ArgumentError
from clearhead.core.formula import mix, softmax
from clearhead.core.mask import Mask
from clearhead.textbook.faces import allowed, numbers, same_dtype, side_by_side, whole


def additive_scores(Q: Array, K: Array, W: Array, U: Array, v: Array) -> Array:
    """v · tanh(W q + U k) for each pair: Q (…, T, d_q), K (…, S, d_k), W (hidden, d_q), U (hidden, d_k), v (hidden,).

    >>> import numpy as np
    >>> additive_scores(np.array([[1.0]]), np.array([[0.0], [1.0]]), np.eye(1), np.eye(1), np.ones(1)).round(4)
    array([[0.7616, 0.964 ]])
    """
    Q, K = side_by_side(Q=Q, K=K)
    W, U, v = numbers("W", W), numbers("U", U), numbers("v", v)
    same_dtype(Q=Q, K=K, W=W, U=U, v=v)
    hidden = tuple(v.shape)
    if len(hidden) != 1:
        raise ArgumentError("v", f"has shape {hidden}, expected (hidden,)")
    for name, matrix, features in (("W", W, Q.shape[-1]), ("U", U, K.shape[-1])):
        if tuple(matrix.shape) != (*hidden, features):
            raise ArgumentError(name, f"has shape {tuple(matrix.shape)}, expected {(*hidden, features)}")
    xp = Library.of(Q).xp
    queries, keys = Q @ xp.matrix_transpose(W), K @ xp.matrix_transpose(U)  # (…, T, hidden), (…, S, hidden)
    return xp.tanh(queries[..., :, None, :] + keys[..., None, :, :]) @ v  # (…, T, S)


def additive_attention(
    Q: Array, K: Array, V: Array, W: Array, U: Array, v: Array, mask: Mask | Array | None = None
) -> tuple[Array, Array]:
    """(output, weights) with additive scores; a mask is True where a query may attend, as everywhere in clearhead.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = rng.standard_normal((5, 3)), rng.standard_normal((7, 4)), rng.standard_normal((7, 2))
    >>> W, U, v = rng.standard_normal((6, 3)), rng.standard_normal((6, 4)), rng.standard_normal(6)
    >>> output, weights = additive_attention(Q, K, V, W, U, v)
    >>> output.shape, weights.shape
    ((5, 2), (5, 7))
    """
    Q, K, V = side_by_side(Q=Q, K=K, V=V)
    same_dtype(Q=Q, K=K, V=V)
    if V.shape[-2] != K.shape[-2]:
        raise ArgumentError("V", f"has {V.shape[-2]} positions, expected {K.shape[-2]} as K has")
    scores = additive_scores(Q, K, W, U, v)
    if mask is not None:
        mask = allowed(mask, Q, tuple(scores.shape))
        scores = Library.of(scores).xp.where(mask, scores, -Library.of(scores).xp.inf)
    weights = softmax(scores)[0]
    return mix(weights, V, mask), weights


@dataclass(frozen=True)
class Comparison:
    """What the scores of n queries over n keys cost either way; printed, it is a table.

    >>> Comparison(n=512, d=64, hidden=64).additive["tanh"]
    16777216
    """

    n: int
    d: int
    hidden: int

    @property
    def dot_product(self) -> dict[str, int]:
        """Scaled dot products: one matrix product."""
        pairs = self.n * self.n
        return {"multiply-adds of scores": pairs * self.d, "tanh": 0, "numbers kept": pairs, "parameters": 0}

    @property
    def additive(self) -> dict[str, int]:
        """W and U once for each position, then `hidden` tanh and multiply-adds for each pair."""
        terms = self.n * self.n * self.hidden
        return {
            "multiply-adds of scores": 2 * self.n * self.d * self.hidden + terms,
            "tanh": terms,
            "numbers kept": terms + self.n * self.n,
            "parameters": 2 * self.d * self.hidden + self.hidden,
        }

    def __str__(self) -> str:
        rows = [(f"n {self.n}, d {self.d}, hidden {self.hidden}", "dot product", "additive")]
        rows += [(name, f"{count:,}", f"{self.additive[name]:,}") for name, count in self.dot_product.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)


def compare(n: int, d: int, hidden: int) -> Comparison:
    """Additive attention beside scaled dot products, counted: n queries and keys of d features.

    >>> compare(512, 64, 64).additive["tanh"] == 512 * 512 * 64
    True
    """
    return Comparison(whole("n", n, least=1), whole("d", d, least=1), whole("hidden", hidden, least=1))
