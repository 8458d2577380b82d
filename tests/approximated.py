"""Each approximation by its own formula, from pairs and in any precision: what the library's forms are held to.

They share no code with the library but the random directions, which are data. All take q (T, D), k (S, D), v (S, Dv) of
one head and `seen` (T, S), True where a query may attend, and give the output (T, Dv) and the weights (T, S).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.approximations.directions import directions

Answer = tuple[np.ndarray, np.ndarray]


def divided(weights: np.ndarray, v: np.ndarray, seen: np.ndarray, eps: float = 0.0) -> Answer:
    weights = np.where(seen, weights, 0)
    below = weights.sum(-1, keepdims=True) + weights.dtype.type(eps)
    weights = np.where(below == 0, 0, weights / np.where(below == 0, 1, below))
    return weights @ np.where(seen.any(0)[:, None], v, 0), weights


def linear(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, *, feature: Any = "elu+1", eps: float = 1e-6
) -> Answer:
    def phi(x: np.ndarray) -> np.ndarray:
        if callable(feature):
            return feature(x)
        return np.maximum(x, 0) if feature == "relu" else np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    return divided(phi(q) @ phi(np.where(seen.any(0)[:, None], k, 0)).T, v, seen, eps)


def performer(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, *, features: int, seed: int = 0,
    orthogonal: bool = True, kind: str = "softmax", eps: float = 0.0, scale: float | None = None,
) -> Answer:  # fmt: skip
    dtype = q.dtype.type
    scale = 1 / np.sqrt(dtype(q.shape[-1])) if scale is None else dtype(scale)
    omega = directions(features, q.shape[-1], seed, orthogonal).astype(dtype)
    k = np.where(seen.any(0)[:, None], k, 0)

    def phi(x: np.ndarray, keys: bool) -> np.ndarray:
        x = x * np.sqrt(scale)
        if kind == "relu":
            return (np.maximum(x @ omega.T, 0) + dtype(eps)) / np.sqrt(dtype(features))
        exponents = x @ omega.T - (x**2).sum(-1, keepdims=True) / 2
        # what is taken off cancels, so here it is one number for all keys, and one for each query
        peak = exponents[seen.any(0)].max(initial=-np.inf) if keys else exponents.max(-1, keepdims=True)
        return np.exp(exponents - (peak if np.isfinite(peak).all() else 0)) + dtype(eps)

    return divided(phi(q, False) @ phi(k, True).T, v, seen)


def in_heads(
    formula: Callable[..., Answer], q: Any, k: Any, v: Any, seen: np.ndarray, dtype: Any, **how: Any
) -> Answer:
    """The same for arrays (…, H, T, D), with fewer key heads where queries share them."""
    q, k, v = (a.astype(dtype) for a in (q, k, v))
    lead, group = q.shape[:-2], q.shape[-3] // k.shape[-3]
    seen = np.broadcast_to(seen, (*lead, q.shape[-2], k.shape[-2]))
    output = np.zeros((*lead, q.shape[-2], v.shape[-1]), dtype)
    weights = np.zeros(seen.shape, dtype)
    for at in np.ndindex(*lead):
        shared = (*at[:-1], at[-1] // group)
        output[at], weights[at] = formula(q[at], k[shared], v[shared], seen[at], **how)
    return output, weights
