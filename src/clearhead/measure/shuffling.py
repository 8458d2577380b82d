"""shuffle_weights(): does the output change when each query's weights are shuffled among the keys that it sees?"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Never

import numpy as np

from clearhead.core import formula
from clearhead.core.arrays import AnyArray, is_traced, to_numpy
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.foreign import ATTENTION, closed, refuse_others
from clearhead.core.grid import part
from clearhead.core.mask import Mask
from clearhead.core.positions import Bias
from clearhead.core.problem import Problem, pose
from clearhead.core.temperature import tempered
from clearhead.measure.tables import WIDTH, number

# As many weights as are looked at together
AT_ONCE = 2**18


@dataclass(frozen=True, eq=False)
class Shuffled:
    """How far shuffling moves each output, as a distance in the space of values; all arrays are (…, T).

    - drawn: root mean square of |shuffled output − output| over the `shuffles` that were drawn with `seed`;
      None where none were.
    - expected: the same over all m! shuffles of the m keys that a query sees. It is exact, and takes no drawing:
      |o − W v̄|² + Σ(w − W/m)² Σ|v − v̄|² / (m − 1), for weights that sum to W and values with mean v̄.
    - equal: |output with equal weights − output|.
    - output: |output|. keys: m, how many keys a query sees.

    Print it: it says whether it matters which key gets which weight.
    """

    drawn: np.ndarray | None
    expected: np.ndarray
    equal: np.ndarray
    output: np.ndarray
    keys: np.ndarray
    rounding: np.ndarray
    shuffles: int
    seed: int

    @property
    def moves(self) -> np.ndarray:
        """True for queries whose output depends on which key gets which weight, beyond rounding; (…, T)."""
        return (self.expected > self.rounding) & ~self.unknown

    @property
    def matters(self) -> bool | None:
        """True where the output of any query depends on it; None where none does that can be told, and some cannot."""
        return True if self.moves.any() else None if self.unknown.any() else False

    @property
    def unknown(self) -> np.ndarray:
        """True for queries of which it cannot be told: weights or values are not finite, or too large; (…, T)."""
        return ~np.isfinite(self.expected) | ~np.isfinite(self.rounding)

    def share(self, field: str = "expected") -> float:
        """A distance beside the output's own length, as root mean squares over all queries: 0.5 is half of it."""
        numbers, lengths = getattr(self, field), self.output
        known = np.isfinite(numbers) & np.isfinite(lengths)
        length = _root_mean_square(lengths[known])
        return _root_mean_square(numbers[known]) / length if length else math.nan

    def text(self, width: int = WIDTH) -> str:
        """What was found, in words, within a width."""
        queries, moved = self.moves.size, int(self.moves.sum())
        facts = [
            f"The weights of {queries:,} queries, each shuffled among the keys that it sees, move the output by",
            f"  {number(self.share(), 4)} of its length over all shuffles there are, exactly",
            f"  {number(self.share('equal'), 4)} where they are made equal",
        ]
        if self.drawn is not None:
            drawn = f"  {number(self.share('drawn'), 4)} over {self.shuffles:,} that were drawn, seed {self.seed}"
            facts.insert(2, drawn)
        facts.append(f"{moved:,} of {queries:,} queries move at all.")
        unknown = int(self.unknown.sum())
        verdict = ""
        if unknown:
            facts.append(
                f"Of {unknown:,} queries it cannot be told: their weights or values are not finite, or too large."
            )
        if self.matters:
            verdict = "It matters which key gets which weight."
        elif self.matters is False:
            verdict = (
                "It does not matter which key gets which weight: weights are equal, or values, or one key is seen."
            )
        lines = [textwrap.wrap(words, width, subsequent_indent="    ") for words in facts]
        return "\n".join(line for part in (*lines, textwrap.wrap(verdict, width)) for line in part)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


@closed
def shuffle_weights(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    mask: Mask | AnyArray | None = None,
    bias: Bias | AnyArray | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    shuffles: int = 10,
    seed: int = 0,
    **others: Never,
) -> Shuffled:
    """Shuffle each query's weights among the keys that it sees: does the output change, and how far?

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 50, 16))
    >>> found = ch.shuffle_weights(q, k, v, mask=ch.causal())
    >>> print(found)
    The weights of 100 queries, each shuffled among the keys
        that it sees, move the output by
      0.9154 of its length over all shuffles there are, exactly
      0.9083 over 10 that were drawn, seed 0
      0.6597 where they are made equal
    98 of 100 queries move at all.
    It matters which key gets which weight.

    Weights that can be shuffled without the output changing explain nothing about it (Jain and Wallace 2019). Where all
    values are alike they can:

    >>> ch.shuffle_weights(q, k, np.ones((2, 50, 3))).matters
    False

    The arguments are those of `attention`; everything is computed in float64, a row of weights at a time, so it takes
    O(n) memory. The same seed draws the same shuffles, which only show what `expected` knows:
    with shuffles=0 none are.
    """
    if others:
        refuse_others("shuffle_weights", others, ATTENTION)
    for name, value, least in (("shuffles", shuffles, 0), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value < 2**40:
            raise ArgumentError(name, f"is {shown(value)}, expected a whole number of at least {least}")
    if temperature is not None:
        scale = tempered(temperature, scale, q)
    problem = pose(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks)
    if any(map(is_traced, (problem.q, problem.k, problem.v))):
        raise ArgumentError("q, k, v", "hold no numbers yet: shuffle outside of what traces them")
    grid = problem.grid
    lead = (*grid.batch, grid.heads)
    found = np.zeros((6, *lead, grid.queries))
    for place, at in enumerate(np.ndindex(*lead)):
        generator = np.random.default_rng([int(seed), place])
        for query, (weights, values) in enumerate(_rows(problem, at)):
            found[(slice(None), *at, query)] = _distances(weights, values, int(shuffles), generator)
    drawn, expected, equal, output, keys, rounding = found[:, 0] if problem.headless else found
    return Shuffled(
        drawn if shuffles else None, expected, equal, output, keys.astype(np.int64), rounding, int(shuffles), int(seed)
    )


class _Values:
    """The values (m, Dv) of the keys that a query sees, and what is the same for all queries that see those keys."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        if not len(values):
            return
        with np.errstate(invalid="ignore", over="ignore"):
            self.apart = values - values.mean(0)
            self.spread = (self.apart**2).sum()
            longest = float(np.sqrt((values**2).sum(-1)).max())
            # each product of a sum of m terms is rounded, and so is the mean that is taken off
            self.rounding = 8 * np.finfo(np.float64).eps * math.sqrt(len(values)) * longest


def _distances(
    weights: np.ndarray, seen: _Values, shuffles: int, generator: np.random.Generator
) -> tuple[float, float, float, float, int, float]:
    """What is found for one query: its weights (m,), and what it sees."""
    count = len(weights)
    if not count:
        return 0.0, 0.0, 0.0, 0.0, 0, 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        uneven, apart = weights - weights.sum() / count, seen.apart
        output, shift = weights @ seen.values, uneven @ apart  # shift is output − total · mean, without cancelling
        spread = float((uneven**2).sum() * seen.spread) / max(count - 1, 1)
        squares = 0.0
        if count > 1 and shuffles:
            mixed = generator.permuted(np.broadcast_to(uneven, (shuffles, count)), axis=1)
            squares = float((((mixed @ apart) - shift) ** 2).sum()) / shuffles
        equal = float(shift @ shift)
        expected = equal + spread if count > 1 else 0.0
        length = float(np.sqrt((output**2).sum()))
    return math.sqrt(squares), math.sqrt(expected), math.sqrt(equal), length, count, seen.rounding


def _rows(problem: Problem, at: tuple[int, ...]) -> Iterator[tuple[np.ndarray, _Values]]:
    """For each query of one head, its weights on the keys that it sees, and their values."""
    grid = problem.grid
    k_at = (*at[:-1], at[-1] // problem.group)
    q = to_numpy(part(problem.q, at)).astype(np.float64)
    k, v = (to_numpy(part(array, k_at)).astype(np.float64) for array in (problem.k, problem.v))
    sinks = None if problem.sinks is None else to_numpy(problem.sinks).astype(np.float64)[at[-1] : at[-1] + 1]
    step = max(1, AT_ONCE // max(grid.keys, 1))
    before, seen = np.ones(grid.keys, bool), _Values(v)
    for start in range(0, grid.queries, step):
        rows, columns = range(start, min(start + step, grid.queries)), range(grid.keys)
        bias = mask = None
        if problem.bias is not None:
            bias = part(to_numpy(problem.bias.tile(rows, columns, grid)), at).astype(np.float64)
        if problem.mask is not None:
            tile = problem.mask.tile(rows, columns, grid)
            allowed = np.full((1, 1), tile) if isinstance(tile, bool) else part(to_numpy(tile), at)
            mask = np.broadcast_to(allowed, (len(rows), grid.keys))
        with np.errstate(invalid="ignore", over="ignore"):  # padding may hold anything; it takes no part
            answer = formula.attention(
                q[rows.start : rows.stop], k, v, scale=problem.scale, softcap=problem.softcap, bias=bias, mask=mask,
                sinks=sinks,
            )  # fmt: skip
        for i in range(len(rows)):
            if mask is not None and not np.array_equal(mask[i], before):
                before, seen = mask[i], _Values(v[mask[i]])
            yield (answer.weights[i] if mask is None else answer.weights[i][mask[i]]), seen


def _root_mean_square(numbers: np.ndarray) -> float:
    return float(np.sqrt((numbers**2).mean())) if numbers.size else 0.0
