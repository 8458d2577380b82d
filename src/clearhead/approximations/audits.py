"""What an audit found: how far from exact, by head, by length, by the size of scores; and how it is said."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clearhead.approximations.method import Spent
from clearhead.core.grid import bins
from clearhead.core.once import once
from clearhead.measure.plans import quantity
from clearhead.measure.tables import laid_out, number

WIDTH = 76
# More heads than this are not all printed; the worst are
MOST = 16
# An error is said to sit somewhere where it is so many times what it is elsewhere
TIMES = 2.0


class Part(NamedTuple):
    """The error of some of the queries: those that see from `low` to `high` keys, or whose scores are so large."""

    low: float
    high: float
    error: float


class Weighed(NamedTuple):
    """Implied weights beside exact ones, (…, heads) each, means over the queries.

    `kl` is Σ ŵ ln(ŵ / w) in nats, NaN where a weight is negative; `variation` is ½ Σ |ŵ − w|, from 0 to 1 for weights
    that are none of them negative; `recall` the share of each query's largest exact weights that are among its largest
    implied ones.
    """

    kl: np.ndarray
    variation: np.ndarray
    recall: np.ndarray


class Charged(NamedTuple):
    """What a method and exact attention cost on paper, all heads together, and the length where they cost the same."""

    method: Spent
    exact: Spent
    crossover: int | None


@dataclass(frozen=True, eq=False)
class Audit:
    """How far an approximation is from exact attention, at sampled queries. `print` it, or ask for `json()`.

    - distance, length: |approximate − exact| and |exact| of each sampled query's output, (…, heads, queries).
    - keys, score: how many keys each sees, and its largest |score|; the same shape.
    - weights: of the implied weights, None where there are none. top: how many weights `recall` looks at.
    - excess (…, heads): the largest difference by what rounding alone would allow, 2 · |plain − exact| + √S · eps ·
      max|exact|; up to 1 it is attention as exact as its precision has it.
    - charged: cost on paper, None for what is no method.
    - by_prefix: the error over the first so many keys, where it was computed again for that.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4))
    >>> found = ch.audit(ch.linear(), q, k, v)
    >>> round(found.error, 4), found.by_head.round(4).tolist(), found.exact
    (0.4505, [0.4237, 0.4673], False)
    """

    name: str
    queries: np.ndarray
    distance: np.ndarray
    length: np.ndarray
    keys: np.ndarray
    score: np.ndarray
    excess: np.ndarray
    dtype: str
    top: int
    weights: Weighed | None = None
    charged: Charged | None = None
    by_prefix: tuple[Part, ...] = ()

    @once
    def by_head(self) -> np.ndarray:
        """The relative error of each head, (…, heads): root mean squares of distance by those of length."""
        return relative(self.distance, self.length, axis=-1)

    @property
    def error(self) -> float:
        """The relative error of all heads together."""
        return float(relative(self.distance, self.length, axis=None))

    @property
    def exact(self) -> bool:
        """True where no difference is larger than rounding allows."""
        return bool((self.excess <= 1).all())

    @once
    def by_length(self) -> tuple[Part, ...]:
        """The error of queries by how many keys they see, in up to four parts; or over prefixes of the keys."""
        return self.by_prefix or self._parts(self.keys)

    @once
    def by_score(self) -> tuple[Part, ...]:
        """The error of queries by their largest |score|, in up to four parts."""
        return self._parts(self.score)

    def _parts(self, by: np.ndarray) -> tuple[Part, ...]:
        flat, distance, length = by.reshape(-1), self.distance.reshape(-1), self.length.reshape(-1)
        order = np.argsort(flat, kind="stable")
        found = []
        for one in bins(len(order), 4):
            some = order[one.start : one.stop]
            found.append(
                Part(float(flat[some[0]]), float(flat[some[-1]]), float(relative(distance[some], length[some])))
            )
        return tuple(found) if found and found[0].low < found[-1].high else ()

    @property
    def where(self) -> list[str]:
        """Where the error sits, in sentences; none where it is everywhere alike."""
        said: list[str] = []
        if self.charged is None and self.exact:  # what rounding leaves may lie anywhere
            return said
        heads = self.by_head.reshape(-1)
        if len(heads) > 1:
            worst, middle = int(heads.argmax()), float(np.median(heads))
            if heads[worst] > TIMES * middle:
                times = f"{heads[worst] / middle:.3g} times the median head's" if middle else "and in no other"
                said.append(f"It sits in head {self._named(worst)}: {times}.")
        for parts, words in ((self.by_length, "the number of keys"), (self.by_score, "the size of scores")):
            if len(parts) < 2:
                continue
            first, last = parts[0], parts[-1]
            if last.error > TIMES * first.error:
                said.append(
                    f"It grows with {words}: × {_ratio(last.error, first.error)} from {_span(first)} to {_span(last)}."
                )
            elif first.error > TIMES * last.error:
                said.append(
                    f"It falls with {words}: × {_ratio(last.error, first.error)} from {_span(first)} to {_span(last)}."
                )
        return said

    def _named(self, place: int) -> str:
        return ",".join(str(int(i)) for i in np.unravel_index(place, self.by_head.shape)) or "0"

    def text(self, width: int = WIDTH) -> str:
        """The table and what it says, within a width."""
        lines = textwrap.wrap(
            f"{self.name} beside exact attention, {len(self.queries):,} queries a head, {self.dtype}", width
        )
        titles, rows = ["head", "error"], []
        columns = [self.by_head]
        if self.weights is not None:
            titles += ["KL", "variation", f"top {self.top}"]
            columns += list(self.weights)
        flat = [column.reshape(-1) for column in columns]
        order = np.argsort(-flat[0], kind="stable") if flat[0].size > MOST else np.arange(flat[0].size)
        rows += [[self._named(place), *(_cell(column[place]) for column in flat)] for place in order[:MOST].tolist()]
        whole = [
            _cell(self.error),
            *(_cell(float(np.nanmean(c)) if np.isfinite(c).any() else math.nan) for c in flat[1:]),
        ]
        rows.append(["all", *whole])
        lines += laid_out(titles, rows, width)
        if flat[0].size > MOST:
            lines += textwrap.wrap(f"The {MOST} worst of {flat[0].size:,} heads.", width)
        for parts, title in ((self.by_length, "keys"), (self.by_score, "score")):
            if parts:
                lines += ["", *laid_out([title, "error"], [[_span(one), _cell(one.error)] for one in parts], width)]
        lines += [""] if self.where or self.charged else []
        for sentence in self.where:
            lines += textwrap.wrap(sentence, width)
        lines += [line for sentence in self._verdicts() for line in textwrap.wrap(sentence, width)]
        return "\n".join(lines)

    def _verdicts(self) -> list[str]:
        if self.charged is None:
            most = float(self.excess.max(initial=0.0))
            if self.exact:
                return [f"It is exact to the rounding of {self.dtype}: at most {most:.2g} of what that allows."]
            return [f"It is not exact: {_times(most)} what the rounding of {self.dtype} allows."]
        method, exact, crossover = self.charged
        spent = f"{quantity(method.flops, 1000, 'FLOP')} on paper, exact {quantity(exact.flops, 1000, 'FLOP')}"
        if crossover is None:
            return [f"{spent}; it is cheaper at no length."]
        return [f"{spent}; cheaper from {crossover:,} positions on."]

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def json(self) -> str:
        """What was found, by head, by length and by score."""
        found = {
            "name": self.name, "dtype": self.dtype, "queries": self.queries.tolist(), "error": _known(self.error),
            "by_head": _listed(self.by_head), "excess": _listed(self.excess), "exact": self.exact,
            "by_length": [one._asdict() for one in self.by_length],
            "by_score": [one._asdict() for one in self.by_score],
            "where": self.where, "top": self.top,
        }  # fmt: skip
        if self.weights is not None:
            found["weights"] = {name: _listed(value) for name, value in self.weights._asdict().items()}
        if self.charged is not None:
            method, exact, crossover = self.charged
            found["cost"] = {"flops": method.flops, "exact_flops": exact.flops, "crossover": crossover}
        return json.dumps(found)


def relative(distance: np.ndarray, length: np.ndarray, axis: int | None = -1) -> np.ndarray:
    """Root mean squares of distances by those of lengths; 0 where both are 0.

    >>> relative(np.array([0.0, 3.0]), np.array([4.0, 4.0])).round(4).tolist()
    0.5303
    """
    above, below = (np.sqrt((a.astype(np.float64) ** 2).mean(axis)) for a in (distance, length))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(above == 0, 0.0, above / below)


def _cell(value: float) -> str:
    return "–" if math.isnan(value) else number(float(value), 4)


def _span(part: Part) -> str:
    low, high = (f"{x:,.0f}" if x == round(x) else f"{x:.3g}" for x in (part.low, part.high))
    return low if low == high else f"{low} … {high}"


def _ratio(last: float, first: float) -> str:
    return f"{last / first:.3g}" if first else "∞"


def _times(most: float) -> str:
    return f"{most:.3g} times" if math.isfinite(most) else "without bound beyond"


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _listed(array: np.ndarray) -> object:
    numbers: object = array.tolist()

    def known(value: object) -> object:
        if isinstance(value, list):
            return [known(one) for one in value]
        return _known(value) if isinstance(value, float) else value

    return known(numbers)
