"""Small problems that tell formulas apart, and how far from exact a right answer may be, derived and not tuned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from clearhead.core.formula import score


@dataclass(frozen=True)
class Sizes:
    """Batch rows, heads, queries, keys, features of a key and of a value: distinct primes where they may be."""

    batch: int = 2
    heads: int = 3
    queries: int = 5
    keys: int = 7
    features: int = 13
    width: int = 11

    @property
    def elements(self) -> int:
        """How many numbers q, k and v have together, to tell small from large."""
        of_query = self.queries * self.features + self.keys * (self.features + self.width)
        return self.batch * self.heads * of_query


DISTINCT = Sizes()
# Not every function takes values of another width, or other keys than queries: less and less is asked of it
LADDER = (
    DISTINCT,
    replace(DISTINCT, width=13),
    replace(DISTINCT, keys=5),
    replace(DISTINCT, keys=5, width=13),
)
# What else a right function must get right; each is cut down to what the function was found to take
MORE = (
    Sizes(1, 1, 3, 5, 2, 7),
    Sizes(3, 2, 7, 3, 5, 2),
    Sizes(2, 5, 1, 11, 3, 13),
    Sizes(1, 2, 17, 19, 64, 32),
)


@dataclass(frozen=True, eq=False)
class Probe:
    """One problem: q (B, H, T, D), k (B, H, S, D), v (B, H, S, Dv) in float64, and which pairs a mask allows.

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
        return Sizes(batch, heads, queries, self.k.shape[-2], features, self.v.shape[-1])

    def rounded(self, dtype: str) -> Probe:
        """The same with numbers that the dtype holds exactly, so that rounding the inputs is no error."""
        q, k, v = (a.astype(dtype).astype(np.float64) for a in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)


def probe(sizes: Sizes, seed: int = 0, *, same: bool = False) -> Probe:
    """A problem with numbers of about 1; `same` is self-attention of one input, for modules that take only one."""
    draw = np.random.default_rng([seed, *vars(sizes).values()]).standard_normal
    q = draw((sizes.batch, sizes.heads, sizes.queries, sizes.features))
    if same:
        return Probe(q, q, q).rounded("float16")
    k = draw((sizes.batch, sizes.heads, sizes.keys, sizes.features))
    v = draw((sizes.batch, sizes.heads, sizes.keys, sizes.width))
    # in float16 every number is exact in every type a function may compute in
    return Probe(q, k, v).rounded("float16")


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
    """The same with the last keys hidden from every query."""
    sizes = given.sizes
    allowed = np.ones((sizes.batch, 1, sizes.queries, sizes.keys), bool)
    allowed[..., sizes.keys - hidden :] = False
    return replace(given, allowed=allowed)


def tiny(sizes: Sizes, seed: int, *, same: bool = False) -> Probe:
    """A problem of small whole numbers, that can be followed by hand."""
    draw = np.random.default_rng([seed, *vars(sizes).values()]).integers
    q = draw(-2, 3, (sizes.batch, sizes.heads, sizes.queries, sizes.features)).astype(np.float64)
    if same:
        return Probe(q, q, q)
    k = draw(-2, 3, (sizes.batch, sizes.heads, sizes.keys, sizes.features)).astype(np.float64)
    v = draw(0, 4, (sizes.batch, sizes.heads, sizes.keys, sizes.width)).astype(np.float64)
    return Probe(q, k, v)


def small_sizes() -> Iterator[Sizes]:
    """Sizes in the order in which a failing example is looked for: the fewest numbers first."""
    choices = [
        Sizes(batch, heads, queries, keys, features, width)
        for batch in (1, 2)
        for heads in (1, 2)
        for queries in (1, 2, 3)
        for keys in (1, 2, 3)
        for features in (1, 2, 3)
        for width in (1, 2, 3)
    ]
    return iter(sorted(choices, key=lambda sizes: (sizes.elements, str(sizes))))


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
