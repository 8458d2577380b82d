"""audit(): how far anything that is called as attention is lies from exact attention, at sampled queries, in O(n)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never

import numpy as np

from clearhead.approximations.audits import Audit, Charged, Part, Weighed, relative
from clearhead.approximations.exact_rows import EPS, Rows, exact_rows, in_parts, sampled
from clearhead.approximations.method import Method, Spent, crossover, exact, whole
from clearhead.approximations.sight import Sight, sight
from clearhead.core.array_masks import of_pytorch
from clearhead.core.arrays import AnyArray, Array, dtype_name, is_array, is_torch, is_traced, to_numpy
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.foreign import ATTENTION, closed, refuse_others
from clearhead.core.mask import Mask
from clearhead.core.positions import Bias
from clearhead.core.problem import Problem, pose
from clearhead.core.temperature import tempered

# Keys over which somebody's kernel is run again, as shares of all: does its error grow with their number?
PREFIXES = (64, 16, 4)
FEWEST = 16


@closed
def audit(
    approximation: Method | Callable[..., Any],
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
    queries: int = 64,
    top: int = 8,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    **others: Never,
) -> Audit:
    """How far from exact attention an approximation, or anybody's kernel, is: by head, by length, by size of scores.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 500, 16)).astype(np.float32)
    >>> print(ch.audit(ch.performer(128), q / 2, k / 2, v))
    performer(128) beside exact attention, 64 queries a head, float32
    head   error      KL  variation   top 8
       0  0.3006  0.0256     0.0739  0.2988
       1  0.3617  0.0335     0.0806  0.2422
     all  0.3357  0.0295     0.0772  0.2705
    <BLANKLINE>
            score   error
    0.451 … 0.708  0.2838
     0.71 … 0.783  0.3603
     0.783 … 0.92  0.3460
     0.923 … 1.35  0.3454
    <BLANKLINE>
    17.66 MFLOP on paper, exact 34.5 MFLOP; cheaper from 257 positions on.

    `approximation` is a method, such as `performer(256)`, or anything that is called as `attention` is and has the same
    result: a kernel in low precision, a quantised cache, a model's own extension. It is handed q, k, v and the options
    that are given, and is run once. At `queries` queries of each head, one drawn from each stretch of the sequence, its
    output is held against the formula in float64, O(n) for each.

    Of a method there are also the implied weights: how far they are from exact ones (KL, total variation), which share
    of the `top` largest they keep, what it costs on paper and from which length on that is less. Of anything else it is
    said whether the difference is more than rounding. Without a mask and a bias it is run again over the first 1/64,
    1/16 and 1/4 of the keys, or the `lengths` given (none where empty), to see whether the error grows with them.
    """
    if others:
        refuse_others("audit", others, ATTENTION)
    if not callable(approximation):
        raise ArgumentError(
            "approximation", f"is {shown(approximation)[:60]}, expected a method or a function of q, k, v"
        )
    for name, value, least in (("queries", queries, 1), ("top", top, 1), ("seed", seed, 0)):
        whole(name, value, least)
    if temperature is not None:
        scale = tempered(temperature, scale, q)
    mask = of_pytorch("mask", mask, q, k) if is_torch(q) else mask
    problem = pose(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks)
    if any(map(is_traced, (problem.q, problem.k, problem.v))):
        raise ArgumentError("q, k, v", "hold no numbers yet: audit outside of what traces them")
    if 0 in (*problem.grid.shape, problem.width):
        raise ArgumentError("q, k, v", f"are empty: there is nothing to compare in {problem.grid}")
    given: dict[str, Any] = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
    options = {name: value for name, value in given.items() if value is not None}
    if isinstance(approximation, Method) and not approximation.scaled:
        options.pop("scale", None)
    output = approximation(q, k, v, **options)
    found = judged(approximation, problem, output, queries, top, seed)
    if mask is not None or bias is not None or (lengths is None and isinstance(approximation, Method)):
        if lengths:
            raise ArgumentError("lengths", "are given together with a mask or a bias, which speak of all keys")
        return found
    prefixes = _prefixes(problem.grid.keys, lengths)
    if not prefixes:
        return found
    by_prefix = [_over(approximation, problem, (q, k, v), options, count, found.queries) for count in prefixes]
    whole_of_it = Part(problem.grid.keys, problem.grid.keys, found.error)
    return Audit(**{**_fields(found), "by_prefix": (*by_prefix, whole_of_it)})


def judged(approximation: Any, problem: Problem, output: Array, queries: int, top: int, seed: int) -> Audit:
    """An output that is there already, beside the exact rows of its call."""
    grid = problem.grid
    shape = (*grid.batch, grid.heads, grid.queries, problem.width)
    expected = shape[1:] if problem.headless else shape
    if not is_array(output) or tuple(output.shape) != expected:
        gave = tuple(output.shape) if is_array(output) else f"a {type(output).__name__}"
        raise ArgumentError("approximation", f"gave {gave}, expected an array of shape {expected} as attention gives")
    places = sampled(grid.queries, queries, seed)
    method = approximation if isinstance(approximation, Method) else None
    seen = None if method is None else sight(problem, method, causal=method.acausal)
    lead, count = shape[:-2], len(places)
    distance, length, keys, score = np.zeros((4, *lead, count))
    off, size, apart = np.zeros((3, *lead))
    weighed = None if method is None else np.zeros((3, *lead, count))
    for rows in in_parts(problem, places):
        some = places[rows]
        got = to_numpy(_taken(problem, output, some)).astype(np.float64).reshape(*lead, len(some), problem.width)
        implied = None if method is None or seen is None else method.rows(problem, seen, some)
        implied = None if implied is None else to_numpy(implied)
        weighed = None if implied is None else weighed
        for at in np.ndindex(*lead):
            true = exact_rows(problem, some, at)
            difference = got[at] - true.output
            distance[at][rows] = np.sqrt((difference**2).sum(-1))
            length[at][rows] = np.sqrt((true.output**2).sum(-1))
            keys[at][rows], score[at][rows] = true.keys, true.score
            off[at] = max(off[at], np.abs(difference).max(initial=0.0))
            size[at] = max(size[at], np.abs(true.output).max(initial=0.0))
            apart[at] = max(apart[at], np.abs(true.plain - true.output).max(initial=0.0))
            if weighed is not None and implied is not None:
                weighed[(slice(None), *at, rows)] = compared(implied[at].astype(np.float64), true, top)
    dtype = dtype_name(problem.q)
    allowed = 2 * apart + np.sqrt(grid.keys) * EPS[dtype] * size
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(off == 0, 0.0, off / allowed)
    arrays = {"distance": distance, "length": length, "keys": keys, "score": score, "excess": excess}
    if problem.headless:
        arrays = {name: array[0] for name, array in arrays.items()}
        weighed = None if weighed is None else weighed[:, 0]
    return Audit(
        _name(approximation), places, **arrays, dtype=dtype, top=min(top, grid.keys),
        weights=None if weighed is None else Weighed(*(weighed.mean(-1))),
        charged=None if method is None or seen is None else charged(method, problem, seen),
    )  # fmt: skip


def compared(implied: np.ndarray, true: Rows, top: int) -> np.ndarray:
    """Of each query KL, total variation and recall: (3, n)."""
    weights = np.exp(true.logs)
    positive = implied > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(positive, implied * (np.log(np.where(positive, implied, 1.0)) - true.logs), 0.0)
    kl = terms.sum(-1)
    # rounding leaves a little below zero; what is really negative has no logarithm
    kl[(implied < -1e-6).any(-1)] = np.nan
    variation = 0.5 * np.abs(implied - weights).sum(-1)
    recall = np.ones(len(weights))
    for row, seen in enumerate(true.keys.astype(int)):
        count = min(top, seen)
        if count:
            best, kept = (set(np.argsort(-a[row], kind="stable")[:count].tolist()) for a in (weights, implied))
            recall[row] = len(best & kept) / count
    return np.stack([kl, variation, recall])


def charged(method: Method, problem: Problem, seen: Sight) -> Charged:
    """Cost on paper, all heads and batch rows; a call of unequal lengths counts as one of their geometric mean."""
    grid, causal = problem.grid, seen.first is not None
    length = round((grid.queries * grid.keys) ** 0.5)
    heads = int(np.prod((*grid.batch, grid.heads)))
    sizes = (length, problem.q.shape[-1], problem.width)

    def times(one: Spent) -> Spent:
        return Spent(one.flops * heads, one.held * heads)

    beyond = crossover(method, problem.q.shape[-1], problem.width, causal=causal)
    return Charged(times(method.spent(*sizes, causal)), times(exact(*sizes, causal)), beyond)


def _prefixes(keys: int, lengths: Sequence[int] | None) -> list[int]:
    if lengths is None:
        return [count for share in PREFIXES if (count := keys // share) >= FEWEST]
    for count in lengths:
        if not 1 <= whole("lengths", count) <= keys:
            raise ArgumentError(
                "lengths", f"has {count:,}, expected numbers from 1 to {keys:,}, the keys that there are"
            )
    return sorted(count for count in lengths if count < keys)


def _over(
    approximation: Any,
    problem: Problem,
    arrays: tuple[Any, ...],
    options: dict[str, Any],
    count: int,
    places: np.ndarray,
) -> Part:
    """The error over the first so many keys."""
    q, k, v = arrays
    k, v = k[..., :count, :], v[..., :count, :]
    shorter = pose(q, k, v, scale=problem.scale, softcap=problem.softcap, sinks=problem.sinks)
    found = judged(approximation, shorter, approximation(q, k, v, **options), len(places), 1, 0)
    return Part(count, count, float(relative(found.distance, found.length, axis=None)))


def _taken(problem: Problem, output: Array, places: np.ndarray) -> Array:
    return problem.library.xp.take(output, problem.library.asarray(places), axis=-2)


def _name(approximation: Any) -> str:
    if isinstance(approximation, Method):
        return repr(approximation)
    return getattr(approximation, "__name__", type(approximation).__name__)


def _fields(found: Audit) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Audit.__dataclass_fields__}
