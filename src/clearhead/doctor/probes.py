"""Small problems that tell formulas apart, and how far from exact a right answer may be, derived and not tuned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from clearhead.core.formula import score
from clearhead.doctor.sizes import Sizes


@dataclass(frozen=True, eq=False)
class Probe:
    """One problem: q (B, H, T, D), k (B, H/G, S, D), v (B, H/G, S, Dv) in float64, and which pairs a mask allows.

    `allowed` is (B, 1, T, S); `causal` asks for the function's own causal flag.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    allowed: np.ndarray | None = None
    causal: bool = False

    @property
    def sizes(self) -> Sizes:
        """The sizes of the arrays."""
        batch, heads, queries, features = self.q.shape
        groups = heads // self.k.shape[1]
        return Sizes(batch, heads, queries, self.k.shape[-2], features, self.v.shape[-1], groups)

    def rounded(self, dtype: str) -> Probe:
        """The same with numbers that the dtype holds exactly, so that rounding the inputs is no error."""
        q, k, v = (a.astype(dtype).astype(np.float64) for a in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)


def probe(sizes: Sizes, seed: int = 0, *, shared: str = "") -> Probe:
    """A problem with numbers of about 1; `shared` says which of q, k and v are one and the same input."""
    draw = np.random.default_rng([seed, *sizes.seed]).standard_normal
    # in float16 every number is exact in every type a function may compute in
    return _drawn(sizes, shared, lambda shape, _: draw(shape)).rounded("float16")


def tiny(sizes: Sizes, seed: int, *, shared: str = "") -> Probe:
    """A problem of small whole numbers, that can be followed by hand."""
    draw = np.random.default_rng([seed, *sizes.seed]).integers
    return _drawn(sizes, shared, lambda shape, role: draw(*((0, 4) if role == "v" else (-2, 3)), shape).astype(float))


def _drawn(sizes: Sizes, shared: str, draw: Callable[[tuple[int, ...], str], np.ndarray]) -> Probe:
    q = draw((sizes.batch, sizes.heads, sizes.queries, sizes.features), "q")
    if shared == "qkv":
        return Probe(q, q, q)
    k = draw((sizes.batch, sizes.heads // sizes.groups, sizes.keys, sizes.features), "k")
    if shared == "kv":
        return Probe(q, k, k)
    return Probe(q, k, draw((sizes.batch, sizes.heads // sizes.groups, sizes.keys, sizes.width), "v"))


def with_mask(given: Probe, seed: int = 0, *, by_batch: bool = True) -> Probe:
    """The same with a random mask in which each query sees some keys and not others, and no symmetry is left."""
    sizes = given.sizes
    draw = np.random.default_rng([seed, 7]).random
    allowed = draw((sizes.batch if by_batch else 1, 1, sizes.queries, sizes.keys)) < 0.55
    rows = np.arange(sizes.queries)
    allowed[..., rows, rows % sizes.keys] = True
    allowed[..., rows, (rows + 2) % sizes.keys] = False
    return replace(given, allowed=np.broadcast_to(allowed, (sizes.batch, 1, sizes.queries, sizes.keys)).copy())


def padded(given: Probe, hidden: int = 2) -> Probe:
    """The same with the last keys hidden from every query; every other batch row hides one fewer, but at least one."""
    sizes = given.sizes
    allowed = np.ones((sizes.batch, 1, sizes.queries, sizes.keys), bool)
    for row in range(sizes.batch):
        allowed[row, ..., sizes.keys - max(hidden - row % 2, 1) :] = False
    return replace(given, allowed=allowed)


def tolerance(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    weights: np.ndarray,
    scale: float,
    eps: float,
    errors: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """How far each output may be from exact, whatever the order of sums: (B, H, T, Dv).

    A dot product of D terms is off by at most D·eps·Σ|q||k|, and a few roundings more. A softmax whose scores are off
    by δ has weights off by the factor e^±2δ, and a sum of S products is off by S·eps. `errors` are those that q, k and
    v came with.
    """
    dq, dk, dv = (np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)) if errors is None else errors
    terms = scale * (np.abs(q) @ np.abs(k).swapaxes(-1, -2))
    carried = scale * (dq @ np.abs(k).swapaxes(-1, -2) + np.abs(q) @ dk.swapaxes(-1, -2))
    # scale, subtraction of the maximum, exponential: each rounds a number as large as the largest score
    largest = np.abs(score(q, k, scale=scale)).max(-1, keepdims=True, initial=0.0)
    delta = ((q.shape[-1] + 2) * eps * terms + carried).max(-1, keepdims=True, initial=0.0) + 4 * eps * largest
    factor = np.expm1(np.minimum(2 * delta, 50.0)) + (k.shape[-2] + 8) * eps
    size = np.abs(weights) @ np.abs(v)
    return factor * size + np.abs(weights) @ dv + math.ulp(0.0)


def agrees(found: np.ndarray, expected: np.ndarray, allowance: np.ndarray | float) -> bool:
    """True where every number is within its allowance; what is not finite must be the same on both sides."""
    if found.shape != expected.shape:
        return False
    finite = np.isfinite(expected)
    if (np.isfinite(found) != finite).any():
        return False
    with np.errstate(invalid="ignore"):
        return bool((np.abs(found - expected) <= allowance)[finite].all())


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest number expected; ∞ where it cannot be said."""
    if found.shape != expected.shape or not np.isfinite(found).all() or not expected.size:
        return math.inf
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-300))
