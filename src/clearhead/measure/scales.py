"""scaling(): the why of 1/√d, by drawing: scores, entropy, largest weight and gradient, with the scale and without."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from clearhead.calls import observe
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.formula import score
from clearhead.measure.memory import require_room
from clearhead.measure.tables import WIDTH, laid_out, number

DIMENSIONS = (1, 4, 16, 64, 256, 1024)
# A query whose largest weight is above this is saturated
SATURATED = 0.99
# A score's variance, σ⁴ d, has to be a float64, and so has its square
SMALLEST, LARGEST = 1e-35, 1e35


@dataclass(frozen=True)
class Sharpness:
    """Means over all queries drawn: how far scores spread, and what the softmax makes of it.

    - deviation: the scores' standard deviation; predicted: what theory gives.
    - entropy: of the weights, in nats. largest: the largest weight.
    - gradient: Σ ∂wⱼ/∂sⱼ = 1 − Σ wⱼ², the trace of the softmax's Jacobian: how far weights still answer to their
      scores. It falls whenever a row gets sharper, from 1 − 1/keys where all weigh the same to 0 where one takes all.
    - saturated: the share of queries whose largest weight is above 0.99, so that no ∂wᵢ/∂sⱼ of theirs exceeds 0.01.
    - norm: the Frobenius norm of the Jacobian. It is small at both ends, since equal weights have small gradients too:
      it rises before it falls, and tells less than the others.
    """

    deviation: float
    predicted: float
    entropy: float
    largest: float
    gradient: float
    saturated: float
    norm: float


@dataclass(frozen=True)
class Spread:
    """One number of features: without the scale and with it."""

    d_k: int
    unscaled: Sharpness
    scaled: Sharpness


@dataclass(frozen=True)
class Scaling:
    """What was found for each number of features; `uniform` is the entropy of equal weights, ln(keys).

    Print it: two tables, what their columns mean, and what they show. `plot_scaling` draws it.

    >>> import clearhead as ch
    >>> found = ch.scaling([16, 64])
    >>> [row.d_k for row in found.rows]
    [16, 64]
    """

    keys: int
    queries: int
    sigma: float
    uniform: float
    rows: tuple[Spread, ...]
    temperature: float = 1.0

    def blocks(self, width: int = WIDTH) -> list[str]:
        """Two tables, without and with the scale."""
        spread = _product("√d", self.sigma, self.temperature)
        with_it = _product("", self.sigma, self.temperature)
        found = []
        for name, title in (
            ("unscaled", f"without a scale: scores spread as {spread}"),
            ("scaled", f"with 1/√d: they spread as {with_it}, whatever d is"),
        ):
            rows = []
            for row in self.rows:
                one: Sharpness = getattr(row, name)
                cells = [number(value, 3) for value in (one.deviation, one.predicted, one.entropy, one.largest)]
                rows.append([f"{row.d_k:,}", *cells, number(one.gradient, 3), f"{one.saturated:.0%}"])
            titles = ["d", "spread", "theory", "entropy", "largest", "gradient", "saturated"]
            found.append("\n".join([*textwrap.wrap(title, width), "", *laid_out(titles, rows, width)]))
        return found

    def meaning(self) -> dict[str, str]:
        """What each column says, in words."""
        theory = f"{_product('√d', self.sigma, self.temperature)} without the scale"
        return {
            "spread": "the standard deviation of the scores",
            "theory": f"what it should be: {theory}, {_product('', self.sigma, self.temperature)} with it",
            "entropy": f"of the weights, in nats: {self.uniform:.3f} = ln {self.keys:,} where all keys weigh the same, "
            "0 where one takes all",
            "largest": "the largest weight of a query, on average",
            "gradient": "Σ ∂wⱼ/∂sⱼ = 1 − Σ wⱼ²: how far weights still answer to their scores; 0 where they no longer "
            "do, and nothing can be learnt",
            "saturated": f"queries whose largest weight is above {SATURATED}: none of their gradients exceeds "
            f"{1 - SATURATED:.2f}",
        }

    def verdict(self) -> str:
        """What the tables show, in a sentence or two, by their own numbers."""
        if self.keys == 1:
            return "One key has all the weight whatever its score is: with fewer than two there is nothing to see."
        last = max(self.rows, key=lambda row: row.d_k)
        without, with_it, best = last.unscaled, last.scaled, 1 - 1 / self.keys
        at, most = f"At d = {last.d_k:,}", f"of at most {number(best, 3)}"
        if with_it.gradient < best / 2:
            spread = _product("", self.sigma, self.temperature)
            needed = "1/(σ²√d)" if self.temperature == 1 else "1/(σ²√d), and a temperature of 1"
            return (
                f"{at} the gradient is {number(with_it.gradient, 3)} {most} even with 1/√d, since scores then still "
                f"spread as {spread}. What keeps their spread at 1 is {needed}."
            )
        if without.gradient > 0.9 * with_it.gradient:
            return (
                f"{at} the gradient without the scale is {number(without.gradient, 3)} {most}: scores spread too "
                "little for it to matter."
            )
        falls = "vanishes" if without.gradient < best / 4 else "falls"
        return (
            f"{at} without the scale one key takes {without.largest:.0%} of the weight, {without.saturated:.0%} of the "
            f"queries are saturated, and the gradient is {number(without.gradient, 3)} {most}: it {falls} as d grows. "
            f"With 1/√d it is {number(with_it.gradient, 3)}."
        )

    def words(self, width: int = WIDTH) -> str:
        """What the columns mean and what they show, within a width."""
        meaning = self.meaning()
        indent = max(map(len, meaning)) + 2 if width >= 40 else 2
        lines = []
        for name, words in meaning.items():
            head = f"{name:<{indent}}" if width >= 40 else f"{name}: "
            lines += textwrap.wrap(words, width, initial_indent=head, subsequent_indent=" " * indent)
        return "\n".join([*lines, "", *textwrap.wrap(self.verdict(), width)])

    def __str__(self) -> str:
        return "\n\n".join([*self.blocks(), self.words()])

    def json(self) -> str:
        """Every number that was found, and what the columns mean."""
        return json.dumps(asdict(self) | {"meaning": self.meaning(), "verdict": self.verdict()})


def _product(root: str, sigma: float, temperature: float) -> str:
    """σ²√d/τ with the numbers that are not 1 put in."""
    square = "" if sigma == 1 else f"{sigma:g}²"
    return (square + root or "1") + ("" if temperature == 1 else f"/{temperature:g}")


def scaling(
    d_k: int | Sequence[int] = DIMENSIONS,
    *,
    keys: int = 64,
    queries: int = 256,
    sigma: float = 1.0,
    temperature: float = 1.0,
    seed: int = 0,
) -> Scaling:
    """Why scores are divided by √d: what the softmax does with and without it, as d grows.

    >>> import clearhead as ch
    >>> found = ch.scaling([16, 64, 1024])
    >>> print(found.blocks()[0])
    without a scale: scores spread as √d
    <BLANKLINE>
        d  spread  theory  entropy  largest  gradient  saturated
       16   4.156   4.000    1.278    0.606     0.524         5%
       64   8.052   8.000    0.569    0.795     0.288        19%
    1,024  32.148  32.000    0.114    0.950     0.068        74%
    >>> [round(row.scaled.gradient, 2) for row in found.rows]
    [0.95, 0.96, 0.96]

    Queries and keys have d independent features of mean 0 and standard deviation `sigma`. A score q · k is then a sum
    of d products of variance σ⁴, so its standard deviation is σ²√d: it grows with d, until one key takes all the weight
    and no gradient is left. Divided by √d it is σ², whatever d is. A `temperature` τ divides all scores: 1/τ and
    1/(τ√d) take the place of 1 and 1/√d.
    """
    chosen = [d_k] if isinstance(d_k, int | np.integer) else list(d_k)
    for name, values in (("d_k", chosen), ("keys", [keys]), ("queries", [queries])):
        if not values or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in values):
            raise ArgumentError(name, f"is {shown(values)}, expected whole numbers of at least 1")
        if max(values) > 2**40:
            raise ArgumentError(name, f"has {shown(max(values))}, expected at most {2**40:,}")
    for name, value in (("sigma", sigma), ("temperature", temperature)):
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise ArgumentError(name, f"is {value!r}, expected a number above 0")
        if not 0 < value < math.inf:
            raise ArgumentError(name, f"is {shown(value)}, expected a finite number above 0")
        if not SMALLEST <= value <= LARGEST:
            why = "the variance of scores, σ⁴ d / τ², has to be a number of float64"
            raise ArgumentError(name, f"is {shown(value)}, expected {SMALLEST:g} to {LARGEST:g}: {why}")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ArgumentError("seed", f"is {shown(seed)}, expected a whole number of at least 0")
    sigma, temperature, keys, queries = float(sigma), float(temperature), int(keys), int(queries)
    # queries and keys twice, as they are drawn and times σ; scores, weights and what is made of them
    needed = 8.0 * (2 * (keys + queries) * max(chosen) + 8 * keys * queries)
    sizes = f"{queries:,} queries and {keys:,} keys of {max(chosen):,} features"
    require_room("d_k, keys and queries", needed, sizes)
    rows = []
    for d in map(int, chosen):
        generator = np.random.default_rng([seed, d])
        q = sigma * generator.standard_normal((queries, d))
        k = sigma * generator.standard_normal((keys, d))
        root = math.sqrt(d)
        unscaled = _sharpness(q, k, 1.0 / temperature, sigma**2 * root / temperature)
        scaled = _sharpness(q, k, 1.0 / (temperature * root), sigma**2 / temperature)
        rows.append(Spread(d, unscaled, scaled))
    return Scaling(keys, queries, sigma, math.log(keys), tuple(rows), temperature)


def _sharpness(q: np.ndarray, k: np.ndarray, scale: float, predicted: float) -> Sharpness:
    seen = observe(q, k, np.zeros((k.shape[0], 1)), scale=scale, weights=True)
    weights: Any = seen.weights
    largest = weights.max(-1)
    return Sharpness(
        float(score(q, k, scale=scale).std()),
        predicted,
        float(seen.entropy.mean()),
        float(largest.mean()),
        float(np.maximum(1 - (weights**2).sum(-1), 0.0).mean()),
        float((largest > SATURATED).mean()),
        float(jacobian_norm(weights).mean()),
    )


def jacobian_norm(weights: np.ndarray) -> np.ndarray:
    """The Frobenius norm of diag(w) − w wᵀ for each row w, without building it: Σw² − 2Σw³ + (Σw²)².

    >>> jacobian_norm(np.array([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    squares = (weights**2).sum(-1)
    return np.sqrt(np.maximum(squares - 2 * (weights**3).sum(-1) + squares**2, 0.0))
