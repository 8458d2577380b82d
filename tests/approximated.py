"""Each approximation by its own formula, from pairs and in any precision: what the library's forms are held to.

They share no code with the library but the random directions, which are data. All take q (T, D), k (S, D), v (S, Dv) of
one head and `seen` (T, S), True where a query may attend, and give the output (T, Dv) and the weights (T, S).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from budget import Expected

from clearhead.approximations.directions import directions
from clearhead.approximations.reformer import rotations

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


def by_softmax(scores: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    scores = np.where(allowed, scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(peak), peak, 0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def scaled(q: np.ndarray) -> Any:
    return 1 / np.sqrt(q.dtype.type(q.shape[-1]))


def stretches(length: int, count: int) -> list[list[int]]:
    """Positions of each of `count` stretches: i is in stretch i · count // length."""
    count = min(count, length)
    return [[i for i in range(length) if i * count // length == s] for s in range(count)]


def means(x: np.ndarray, there: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    rows = [[i for i in one if there[i]] for one in stretches(len(x), count)]
    found = [x[one].sum(0) / x.dtype.type(max(len(one), 1)) for one in rows]
    return np.stack(found), np.array([bool(one) for one in rows])


def linformer(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, *, length: int, arrays: Any = None
) -> Answer:
    there = seen.any(0)
    if arrays is None:
        pooled, some = means(np.eye(len(k), dtype=q.dtype), there, length)
        e = f = pooled
    else:
        e, f = (np.where(there, a[:, : len(k)].astype(q.dtype), 0) for a in arrays)
        some = np.ones(len(e), bool)
    k, v = (np.where(there[:, None], a, 0) for a in (k, v))
    weights = by_softmax(scaled(q) * (q @ (e @ k).T), np.broadcast_to(some, (len(q), len(some))))
    return weights @ (f @ v), weights @ f


def nystrom(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, *, landmarks: int, iterations: int = 6
) -> Answer:
    there, scale, count = seen.any(0), scaled(q), min(landmarks, len(q), len(k))
    k, v = (np.where(there[:, None], a, 0) for a in (k, v))
    near_q, _ = means(q, np.ones(len(q), bool), count)
    near_k, some = means(k, there, count)
    left = by_softmax(scale * (q @ near_k.T), np.broadcast_to(some, (len(q), count)))
    middle = by_softmax(scale * (near_q @ near_k.T), np.broadcast_to(some, (count, count)))
    right = by_softmax(scale * (near_q @ k.T), np.broadcast_to(there, (count, len(k))))
    norm = middle.sum(0).max() * middle.sum(1).max()
    z, one = middle.T / (norm if norm else 1), np.eye(count, dtype=q.dtype)
    for _ in range(iterations):
        az = middle @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return left @ (z @ (right @ v)), left @ z @ right


def lsh(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, *, buckets: int, rounds: int, seed: int = 0,
    duplicates: bool = False,
) -> Answer:  # fmt: skip
    k, v = (np.where(seen.any(0)[:, None], a, 0) for a in (k, v))
    times = np.zeros(seen.shape, q.dtype)
    for turn in rotations(rounds, q.shape[-1], buckets, seed):
        mine, theirs = (np.concatenate([x @ turn, -(x @ turn)], -1).argmax(-1) for x in (q, k))
        times += mine[:, None] == theirs
    scores = scaled(q) * (q @ k.T)
    if duplicates:
        scores = scores + np.log(np.maximum(times, 1))
    weights = by_softmax(scores, seen & (times > 0))
    return weights @ v, weights


def topk_blocks(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, *, keep: int, block: int, first: int | None = None
) -> Answer:
    there = seen.any(0) if first is None else np.ones(len(k), bool)
    down, across = ([range(s, min(s + block, len(x))) for s in range(0, len(x), block)] for x in (q, k))
    allowed = np.zeros(seen.shape, bool)
    for rows in down:
        promises = []
        for columns in across:
            real = [j for j in columns if there[j]]
            promise = scaled(q) * (q[list(rows)].mean(0) @ k[real].mean(0)) if real else -np.inf
            if first is not None and columns[0] > rows[-1] + first:
                promise = -np.inf
            elif first is not None and columns[0] + block > rows[0] + first:
                promise = np.inf  # it holds the position of one of these queries
            promises.append(promise)
        for best in np.argsort(-np.array(promises, dtype=np.float64), kind="stable")[:keep]:
            allowed[np.ix_(list(rows), list(across[best]))] = True
    k, v = (np.where(seen.any(0)[:, None], a, 0) for a in (k, v))
    weights = by_softmax(scaled(q) * (q @ k.T), allowed & seen)
    return weights @ v, weights


def clusters(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, *, count: int, iterations: int = 10, seed: int = 0
) -> Answer:
    count = min(count, len(q))
    picked = np.sort(np.random.default_rng([seed, len(q), count]).choice(len(q), count, replace=False))
    centroids = q[picked]

    def nearest() -> np.ndarray:
        return ((q[:, None] - centroids[None]) ** 2).sum(-1).argmin(-1)

    mine = nearest()
    for _ in range(iterations):
        centroids = np.stack([q[mine == c].mean(0) if (mine == c).any() else centroids[c] for c in range(count)])
        mine = nearest()
    centroids = np.stack([q[mine == c].mean(0) if (mine == c).any() else centroids[c] for c in range(count)])
    k, v = (np.where(seen.any(0)[:, None], a, 0) for a in (k, v))
    weights = by_softmax(scaled(q) * (centroids @ k.T), np.broadcast_to(seen.any(0), (count, len(k))))[mine]
    return weights @ v, weights


def drawn(case: str, shapes: tuple[tuple[int, ...], ...], mask: Any, dtype: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Arrays of these shapes, and which keys each query sees."""
    generator = np.random.default_rng([len(case), *case.encode()])
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    arrays = [generator.standard_normal(shape).astype(kind) for shape in shapes]
    q, k = shapes[:2]
    seen = np.ones((1, 1), bool) if mask is None else mask.dense(q[-2], k[-2], batch=q[:-3], heads=q[-3])
    return arrays, np.broadcast_to(seen, (*q[:-1], k[-2]))


def expected(
    formula: Any, how: dict[str, Any], given: list[np.ndarray], seen: np.ndarray, dtype: str
) -> tuple[Expected, Expected]:
    """Output and weights by the formula, exactly and in the precision of sums."""
    q, k, v = given
    k, v = (np.broadcast_to(a, (*q.shape[:-3], *a.shape[-3:])) for a in (k, v))
    own = np.float64 if dtype == "float64" else np.float32
    exact, plain = (
        in_heads(formula, q, k, v, seen, kind, **how)
        for kind in (np.longdouble if dtype == "float64" else np.float64, own)
    )
    rounded = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    return (
        Expected(exact[0], plain[0].astype(rounded), float(ml_dtypes.finfo(rounded).eps)),
        Expected(exact[1], plain[1], float(np.finfo(own).eps)),
    )
