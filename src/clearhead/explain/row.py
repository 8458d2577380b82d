"""One query's row, every number on the way to its output, by the formula's own functions in O(n) memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clearhead.core import formula
from clearhead.core.arrays import HALF, dtype_name, is_traced, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import part
from clearhead.core.problem import Problem
from clearhead.core.trees import tree


@tree
@dataclass(frozen=True, eq=False)
class Row:
    """The numbers of one query, in the order they come to be; what the call does not have is None.

    q (D,), k (S, D), v (S, Dv); dots, scaled, capped, bias, scores, exponentials, weights and kept are (S,). `scores`
    are −inf where the query may not attend. `shift` is what exponentials are taken relative to: the largest score, or
    the sink where that is larger. `kept` are the weights after dropout.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    dots: np.ndarray
    scaled: np.ndarray
    softcap: float | None
    capped: np.ndarray | None
    bias: np.ndarray | None
    allowed: np.ndarray | None
    scores: np.ndarray
    max_score: float
    sink: float | None
    shift: float
    exponentials: np.ndarray
    sink_exponential: float | None
    total: float
    weights: np.ndarray
    kept: np.ndarray | None
    rescale: float
    output: np.ndarray
    lse: float
    entropy: float

    @property
    def keys(self) -> int:
        """How many keys there are, S."""
        return self.k.shape[0]

    @property
    def features(self) -> int:
        """How many features a key has, D."""
        return self.k.shape[1]

    @property
    def final(self) -> np.ndarray:
        """The weights that meet the values: after dropout where there is any."""
        return self.weights if self.kept is None else self.kept

    def may(self, key: int) -> bool:
        """May the query attend to this key?"""
        return self.allowed is None or bool(self.allowed[key])

    def contribution(self, key: int) -> np.ndarray:
        """What one value adds to the output, (Dv,): nothing where the query may not attend, whatever is there."""
        with np.errstate(invalid="ignore", over="ignore"):
            return self.final[key] * self.v[key] if self.may(key) else np.zeros_like(self.v[key])


def row_of(problem: Problem, query: int, at: tuple[int, ...]) -> Row:
    """The row of one query in one batch row and head; `at` has an index for each leading axis."""
    grid = problem.grid
    rows, columns = range(query, query + 1), range(grid.keys)
    scale, softcap = problem.scale, problem.softcap
    k_at = (*at[:-1], at[-1] // problem.group)
    q = _numbers(problem.q, at)[query : query + 1]  # (1, D)
    k, v = _numbers(problem.k, k_at), _numbers(problem.v, k_at)  # (S, D), (S, Dv)
    bias = mask = None
    if problem.bias is not None:
        added = part(to_numpy(problem.bias.tile(rows, columns, grid)), at)
        bias = np.broadcast_to(added, (1, grid.keys)).astype(q.dtype)
    if problem.mask is not None:
        tile = problem.mask.tile(rows, columns, grid)
        allowed = np.full((1, 1), tile) if isinstance(tile, bool) else part(to_numpy(tile), at)
        mask = np.broadcast_to(allowed, (1, grid.keys))
    sinks = None if problem.sinks is None else to_numpy(problem.sinks).astype(q.dtype)[at[-1] : at[-1] + 1]
    keep, rescale = None, 1.0
    if problem.dropout is not None:
        number = np.ravel_multi_index(at, (*grid.batch, grid.heads))
        keep, rescale = problem.dropout.keep(np.array(number), rows, columns), problem.dropout.rescale

    with np.errstate(invalid="ignore", over="ignore"):  # padding may hold anything; it is shown and then hidden
        dots = formula.score(q, k, scale=1.0)[0]
        scaled = formula.score(q, k, scale=scale)[0]
        capped = None if softcap is None else formula.score(q, k, scale=scale, softcap=softcap)[0]
        asked, seen, _ = formula.blank(mask, q, k, v)
        scores = formula.score(asked, seen, scale=scale, softcap=softcap, bias=bias, mask=mask)[0]
        answer = formula.attention(
            q, k, v, scale=scale, softcap=softcap, bias=bias, mask=mask, sinks=sinks, keep=keep, rescale=rescale
        )
    peak = answer.max_score[0]
    top = peak if sinks is None else max(peak, sinks[0])
    shift = q.dtype.type(0) if top == -np.inf else top
    with np.errstate(invalid="ignore", over="ignore"):  # ∞ − ∞ is NaN, and shown as that
        exponentials = np.exp(scores - shift)
    sink_exponential = None if sinks is None else float(np.exp(sinks[0] - shift))
    weights = answer.weights[0]
    return Row(
        q=q[0],
        k=k,
        v=v,
        scale=scale,
        dots=dots,
        scaled=scaled,
        softcap=softcap,
        capped=capped,
        bias=None if bias is None else bias[0],
        allowed=None if mask is None else mask[0],
        scores=scores,
        max_score=float(peak),
        sink=None if sinks is None else float(sinks[0]),
        shift=float(shift),
        exponentials=exponentials,
        sink_exponential=sink_exponential,
        total=float(exponentials.sum()) + (sink_exponential or 0.0),
        weights=weights,
        kept=None if keep is None else np.where(keep[0], weights * rescale, 0.0),
        rescale=rescale,
        output=answer.output[0],
        lse=float(answer.lse[0]),
        entropy=float(answer.entropy[0]),
    )


def _numbers(array: object, at: tuple[int, ...]) -> np.ndarray:
    """One head's matrix, in NumPy and in the precision that sums are taken in."""
    if is_traced(array):
        raise ArgumentError("q, k, v", "are being traced by JAX and hold no numbers yet: trace outside of jit")
    one = to_numpy(part(array, at))
    return one.astype(np.float32) if dtype_name(one) in HALF else one
