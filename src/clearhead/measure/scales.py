"""scaling(): the why of 1/√d, by drawing: scores, entropy, largest weight and gradient, with the scale and without."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from clearhead.calls import observe
from clearhead.core.errors import ArgumentError
from clearhead.core.formula import score

DIMENSIONS = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Sharpness:
    """Means over all queries drawn: how far scores spread, and what the softmax makes of it.

    `deviation` is the scores' standard deviation, `predicted` what theory gives; `entropy` is in nats; `largest` the
    largest weight; `gradient` the Frobenius norm of the softmax's Jacobian, which is 0 where it is saturated.
    """

    deviation: float
    predicted: float
    entropy: float
    largest: float
    gradient: float


@dataclass(frozen=True)
class Spread:
    """One number of features: without the scale and with it."""

    d_k: int
    unscaled: Sharpness
    scaled: Sharpness


@dataclass(frozen=True)
class Scaling:
    """What was found for each number of features; `uniform` is the entropy of equal weights, ln(keys)."""

    keys: int
    queries: int
    sigma: float
    uniform: float
    rows: tuple[Spread, ...]

    def blocks(self) -> list[str]:
        """Two tables, without and with the scale, each at most 60 columns wide."""
        found = []
        theory = "√d" if self.sigma == 1 else f"{self.sigma:g}²√d"
        titles = (
            ("unscaled", f"without a scale: scores spread as {theory}"),
            ("scaled", f"with 1/√d: they spread as {'1' if self.sigma == 1 else f'{self.sigma:g}²'}, whatever d is"),
        )
        for name, title in titles:
            rows = [title, "", f"{'d':>6} {'spread':>8} {'theory':>8} {'entropy':>8} {'largest':>8} {'gradient':>9}"]
            for row in self.rows:
                one: Sharpness = getattr(row, name)
                numbers = f"{one.deviation:>8.3f} {one.predicted:>8.3f} {one.entropy:>8.4f} {one.largest:>8.4f}"
                rows.append(f"{row.d_k:>6,} {numbers} {one.gradient:>9.5f}")
            found.append("\n".join(rows))
        found[0] = f"{found[0]}\n\nequal weights over {self.keys} keys have entropy {self.uniform:.4f}"
        return found

    def __str__(self) -> str:
        return "\n\n".join(self.blocks())

    def json(self) -> str:
        """Every number that was found."""
        return json.dumps(asdict(self))


def scaling(
    d_k: int | Sequence[int] = DIMENSIONS, *, keys: int = 64, queries: int = 256, sigma: float = 1.0, seed: int = 0
) -> Scaling:
    """Why scores are divided by √d: what the softmax does with and without it, as d grows.

    >>> import clearhead as ch
    >>> rows = ch.scaling([16, 256]).rows
    >>> [round(row.unscaled.predicted) for row in rows], [row.scaled.predicted for row in rows]
    ([4, 16], [1.0, 1.0])

    Queries and keys have d independent features of mean 0 and standard deviation `sigma`. A score q · k is then a sum
    of d products of variance σ⁴, so its standard deviation is σ²√d: it grows with d, until one key takes all the weight
    and no gradient is left. Divided by √d it is σ², whatever d is.
    """
    chosen = [d_k] if isinstance(d_k, int | np.integer) else list(d_k)
    for name, values in (("d_k", chosen), ("keys", [keys]), ("queries", [queries])):
        if not values or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in values):
            raise ArgumentError(name, f"is {values!r}, expected whole numbers of at least 1")
    if not (isinstance(sigma, int | float) and math.isfinite(sigma) and sigma > 0):
        raise ArgumentError("sigma", f"is {sigma!r}, expected a finite number above 0")
    rows = []
    for d in map(int, chosen):
        generator = np.random.default_rng([seed, d])
        q = sigma * generator.standard_normal((queries, d))
        k = sigma * generator.standard_normal((keys, d))
        unscaled = _sharpness(q, k, 1.0, sigma**2 * math.sqrt(d))
        scaled = _sharpness(q, k, 1.0 / math.sqrt(d), sigma**2)
        rows.append(Spread(d, unscaled, scaled))
    return Scaling(keys, queries, float(sigma), math.log(keys), tuple(rows))


def _sharpness(q: np.ndarray, k: np.ndarray, scale: float, predicted: float) -> Sharpness:
    seen = observe(q, k, np.zeros((k.shape[0], 1)), scale=scale, weights=True)
    weights: Any = seen.weights
    return Sharpness(
        float(score(q, k, scale=scale).std()),
        predicted,
        float(seen.entropy.mean()),
        float(weights.max(-1).mean()),
        float(jacobian_norm(weights).mean()),
    )


def jacobian_norm(weights: np.ndarray) -> np.ndarray:
    """The Frobenius norm of diag(w) − w wᵀ for each row w, without building it: Σw² − 2Σw³ + (Σw²)².

    >>> jacobian_norm(np.array([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    squares = (weights**2).sum(-1)
    return np.sqrt(np.maximum(squares - 2 * (weights**3).sum(-1) + squares**2, 0.0))
