"""Attention as a Markov chain: each query's weights are the chances of stepping to each key; O(n) memory.

    p_{t+1} = p_t A,    A = softmax(Q Kᵀ · scale [mask]),    A x = attention(q, k, x),    p A = ∂⟨p, A v⟩/∂v

The matrix is never built: products from the left are the gradient of attention by its values, which is Aᵀ times what
comes in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clearhead.calls import attention, gradients
from clearhead.core.arrays import AnyArray, Array, is_array, is_traced, to_numpy
from clearhead.core.errors import ArgumentError, shown

# Starts that are followed at once
AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Chain:
    """A chain of steps among n positions, by weights or by q, k and the options of `attention`; see `chain`.

    >>> import numpy as np, clearhead as ch
    >>> walk = ch.chain(np.array([[0.5, 0.5], [1.0, 0.0]]))
    >>> walk.size, walk.stationary().round(4).tolist()
    (2, [0.6667, 0.3333])
    """

    size: int
    lead: tuple[int, ...]
    weights: np.ndarray | None = None
    q: np.ndarray | None = None
    k: np.ndarray | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def ahead(self, x: Array, steps: int = 1) -> np.ndarray:
        """Aᵗ x for x (…, n, c): what is expected of x after t steps, from each position."""
        x = self._columns("x", x)
        for _ in range(_count("steps", steps)):
            if self.weights is not None:
                x = self.weights @ x
            else:
                assert self.q is not None
                assert self.k is not None
                x = attention(self.q, self.k, x, **self.options)
        return x

    def back(self, p: Array, steps: int = 1) -> np.ndarray:
        """p Aᵗ for p (…, n), or (…, m, n) for several: where a walk is after t steps that began at p."""
        p = np.asarray(to_numpy(p) if is_array(p) else p, dtype=np.float64)
        single = p.ndim < 2 or p.shape[:-1] == self.lead
        columns = self._columns("p", (p[..., None, :] if single else p).swapaxes(-1, -2))  # (…, n, m)
        for _ in range(_count("steps", steps)):
            if self.weights is not None:
                columns = self.weights.swapaxes(-1, -2) @ columns
            else:
                columns = self._received(columns)
        return columns[..., 0] if single else columns.swapaxes(-1, -2)

    def stationary(self, tolerance: float = 1e-12, most: int = 10_000) -> np.ndarray:
        """The distribution that a step leaves as it is, (…, n): where a walk from anywhere is in the long run.

        It is iterated from the uniform one until it moves by less than the tolerance; a chain that falls apart has
        several, and this is one of them.
        """
        now = np.full((*self.lead, self.size), 1.0 / self.size)
        for _ in range(_count("most", most)):
            # the mean of staying and stepping: the same distribution, and no walk in circles keeps it from settling
            then = 0.5 * (now + self.back(now))
            if np.abs(then - now).sum(-1).max(initial=0.0) < tolerance:
                return then
            now = then
        raise ArgumentError(
            "most", f"is {most:,} steps, after which the distribution still moves; expected more of them"
        )

    def mixing_time(self, distance: float = 0.25, most: int = 1000, starts: Any = None) -> int | None:
        """The least t after which a walk from any start is within a total variation of the stationary distribution.

        None where it is not after `most` steps. `starts` are the positions to begin at, all of them unless given.
        """
        if not 0 < distance < 1:
            raise ArgumentError("distance", f"is {shown(distance)}, expected a number between 0 and 1")
        places = np.arange(self.size) if starts is None else np.asarray(starts)
        if places.ndim != 1 or not places.size or places.min() < 0 or places.max() >= self.size:
            raise ArgumentError("starts", f"are {shown(starts)[:60]}, expected positions from 0 to {self.size - 1}")
        settled, longest = self.stationary(), 0
        for first in range(0, len(places), AT_ONCE):
            some = places[first : first + AT_ONCE]
            now = np.broadcast_to(np.eye(self.size)[some], (*self.lead, len(some), self.size))
            for steps in range(_count("most", most) + 1):
                off = 0.5 * np.abs(now - settled[..., None, :]).sum(-1).max()
                # distances never grow, so what is near stays near, and the last of all starts decides
                if off <= distance:
                    longest = max(longest, steps)
                    break
                now = self.back(now)
            else:
                return None
        return longest

    def _received(self, columns: np.ndarray) -> np.ndarray:
        """Aᵀ columns: the gradient by values of attention whose output's gradient they are."""
        assert self.q is not None
        assert self.k is not None
        columns = np.ascontiguousarray(columns)
        values = np.zeros((*self.k.shape[:-1], columns.shape[-1]))
        return gradients(self.q, self.k, values, columns, **self.options)[2]

    def _columns(self, name: str, x: Any) -> np.ndarray:
        x = np.asarray(to_numpy(x) if is_array(x) else x, dtype=np.float64)
        if x.ndim < 2 or x.shape[-2] != self.size:
            raise ArgumentError(name, f"has shape {x.shape}, expected {self.size} positions")
        return np.broadcast_to(x, (*self.lead, *x.shape[-2:]))


def chain(weights_or_q: AnyArray, k: AnyArray | None = None, **options: Any) -> Chain:
    """Attention as a Markov chain, by its weights (…, n, n), or by q and k with the options of `attention`.

    >>> import numpy as np, clearhead as ch
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1000, 16))
    >>> walk = ch.chain(q, k)                                   # no matrix of a million weights
    >>> settled = walk.stationary()
    >>> settled.shape, walk.mixing_time(starts=[0, 999])
    ((1000,), 2)
    >>> weather = ch.chain(np.array([[0.9, 0.1], [0.5, 0.5]]))
    >>> weather.stationary().round(4).tolist(), weather.mixing_time(0.01)
    ([0.8333, 0.1667], 5)

    There are as many keys as queries, and as many heads of both. All is computed in float64.
    """
    given = {"weights": weights_or_q} if k is None else {"q": weights_or_q, "k": k}
    for name, array in given.items():
        if not is_array(array) or is_traced(array) or array.ndim < 2:
            raise ArgumentError(name, f"is {shown(array)[:60]}, expected an array of numbers (…, n, ·)")
    first, *others = (to_numpy(array).astype(np.float64) for array in given.values())
    if k is None:
        if options:
            raise ArgumentError(next(iter(options)), "is given beside weights, which it could not change")
        if first.shape[-1] != first.shape[-2]:
            raise ArgumentError("weights", f"have shape {first.shape}, expected as many keys as queries")
        if (first < 0).any() or not np.allclose(first.sum(-1), 1.0, atol=1e-5):
            raise ArgumentError("weights", "are no chances: expected rows that are none of them negative and sum to 1")
        first = first / first.sum(
            -1, keepdims=True
        )  # float32 sums to nearly 1, and in the long run nearly is not enough
        return Chain(first.shape[-2], first.shape[:-2], weights=first)
    if first.shape != others[0].shape:
        raise ArgumentError(
            "k", f"has shape {others[0].shape}, expected {first.shape} as q has: steps lead from key to key"
        )
    refused = {"dropout", "sinks"} & options.keys()
    if refused:
        raise ArgumentError(next(iter(refused)), "is given, and weights would not sum to 1")
    return Chain(first.shape[-2], first.shape[:-2], q=first, k=others[0], options=options)


def powers(given: Chain | AnyArray, count: int) -> list[np.ndarray]:
    """A, A², …, A^count as matrices (…, n, n), for looking at small ones: weights over so many steps.

    >>> import numpy as np, clearhead as ch
    >>> [power[0].round(3).tolist() for power in ch.powers(np.array([[0.9, 0.1], [0.5, 0.5]]), 2)]
    [[0.9, 0.1], [0.86, 0.14]]
    """
    one = given if isinstance(given, Chain) else chain(given)
    found = [one.ahead(np.eye(one.size))]
    for _ in range(_count("count", count) - 1):
        found.append(one.ahead(found[-1]))
    return found


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < (0 if name == "steps" else 1):
        raise ArgumentError(
            name, f"is {shown(value)}, expected a whole number of at least {0 if name == 'steps' else 1}"
        )
    return int(value)
