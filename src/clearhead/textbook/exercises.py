"""The chapter's five exercises about "The cat sat on mat", answered by computing them.

1. Compute the row of *sat*: `row("sat")`.
2. Leave out the scaling for *The*, and imagine d_k = 512: `unscaled("The")`, `unscaled("The", d_k=512)`.
3. Set K = Q: is the diagonal always the largest? `not_largest(q, tokens)` says where it is not.
4. Make the keys orthogonal: `orthogonal(4)`.
5. Entries of variance σ²: `product_variance(σ, d)` and `factor(σ, d)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.explain.tokens import names_for, position_of
from clearhead.textbook.examples import EXAMPLES
from clearhead.textbook.faces import both, numbers, whole

SENTENCE = EXAMPLES["cat_sat"]


def row(token: str | int = "sat") -> tuple[np.ndarray, np.ndarray]:
    """Exercise 1: the weights and the output of one token.

    >>> weights, output = row("sat")
    >>> weights.round(4), output.round(4)
    (array([0.1519, 0.2505, 0.2505, 0.1519, 0.1951]), array([0.2495, 0.3481, 0.3481, 0.2495]))

    *cat* and *sat* get the same: both products are 2.
    """
    at = position_of("token", token, SENTENCE.tokens)
    output, weights = both(SENTENCE.q, SENTENCE.k, SENTENCE.v, None, 1 / math.sqrt(4))
    return weights[at], output[at]


def unscaled(token: str | int = "The", d_k: int = 4, *, scaled: bool = False) -> np.ndarray:
    """Exercise 2: the weights of a token without the scaling; for d_k = 512 each column is taken 128 times.

    >>> row("The")[0].round(4), unscaled("The").round(4)
    (array([0.1095, 0.2976, 0.1805, 0.1805, 0.2318]), array([0.0546, 0.4036, 0.1485, 0.1485, 0.2448]))

    The largest weight grows from .2976 to .4036, the smallest halves. With 512 features the products are 128 times as
    large, and the softmax is a choice of one key, through which no gradient comes; divided by √512 less so:

    >>> unscaled("The", d_k=512).round(4), unscaled("The", d_k=512, scaled=True).round(4)
    (array([0., 1., 0., 0., 0.]), array([0.    , 0.938 , 0.0033, 0.0033, 0.0554]))

    The same with random numbers, for every d: `clearhead.scaling()`.
    """
    at = position_of("token", token, SENTENCE.tokens)
    if whole("d_k", d_k, least=4) % 4:
        raise ArgumentError("d_k", f"is {d_k}, expected a multiple of the sentence's 4 columns")
    q, k = (np.repeat(array, d_k // 4, axis=-1) for array in (SENTENCE.q, SENTENCE.k))
    return both(q, k, SENTENCE.v, None, 1 / math.sqrt(d_k) if scaled else 1.0)[1][at]


def not_largest(x: np.ndarray, tokens: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Exercise 3: with Q = K = x, the tokens that give another at least as much weight as themselves, and which.

    >>> not_largest(SENTENCE.q, SENTENCE.tokens), not_largest(SENTENCE.k, SENTENCE.tokens)
    ({'The': ['sat']}, {'mat': ['cat']})

    No, the diagonal is not always the largest. With K = Q, *The* · *sat* is 2, as is *The* · *The*; with Q = K, *mat*
    ties with *cat* at 1.5. A longer vector in the same direction wins outright: x · y = |x| |y| cos θ.

    >>> not_largest(np.array([[1.0, 0.0], [2.0, 0.0]]), ["short", "long"])
    {'short': ['long']}
    """
    x = numbers("x", x)
    if x.ndim != 2:
        raise ArgumentError("x", f"has shape {tuple(x.shape)}, expected (positions, features)")
    names = names_for("tokens", tokens, len(x), "rows")
    weights = both(x, x, x, None, 1 / math.sqrt(x.shape[-1]))[1]
    # equal products may differ in the last place once they are weights
    near = 8 * np.finfo(weights.dtype).eps
    found = {}
    for i, own in enumerate(np.diagonal(weights)):
        ahead = [names[j] for j in np.flatnonzero(weights[i] >= own * (1 - near)) if j != i]
        if ahead:
            found[names[i]] = ahead
    return found


def orthogonal(n: int = 4) -> np.ndarray:
    """Exercise 4: the weights of n tokens whose queries and keys are the rows of the identity.

    >>> orthogonal(4).round(4)
    array([[0.3547, 0.2151, 0.2151, 0.2151],
           [0.2151, 0.3547, 0.2151, 0.2151],
           [0.2151, 0.2151, 0.3547, 0.2151],
           [0.2151, 0.2151, 0.2151, 0.3547]])

    Each token prefers itself by a factor of exp(1/√n), and all others are alike: unlike keys still share the rest.

    >>> bool(np.isclose(orthogonal(4)[0, 0] / orthogonal(4)[0, 1], math.exp(1 / 2)))
    True
    """
    identity = np.eye(whole("n", n, least=1))
    return both(identity, identity, identity, None, 1 / math.sqrt(n))[1]


def product_variance(sigma: float, d: int) -> float:
    """Exercise 5: the variance of q · k with d entries each, independent, of mean 0 and variance σ²: σ⁴ d.

    >>> rng = np.random.default_rng(0)
    >>> q, k = 1.5 * rng.standard_normal((2, 200_000, 16))
    >>> product_variance(1.5, 16), float((q * k).sum(-1).var().round(0))
    (81.0, 81.0)
    """
    return _sigma(sigma) ** 4 * whole("d", d, least=1)


def factor(sigma: float, d: int) -> float:
    """Exercise 5: what brings that variance back to 1: 1 / (σ² √d), which is 1/√d for σ = 1.

    >>> factor(1.0, 64), factor(2.0, 64), factor(2.0, 64) ** 2 * product_variance(2.0, 64)
    (0.125, 0.03125, 1.0)
    """
    return 1.0 / (_sigma(sigma) ** 2 * math.sqrt(whole("d", d, least=1)))


def _sigma(sigma: float) -> float:
    if not 0 < sigma < math.inf:
        raise ArgumentError("sigma", f"is {sigma}, expected a standard deviation above 0")
    return float(sigma)
