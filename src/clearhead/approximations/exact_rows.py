"""The exact side of an audit: some queries of each head, by the definition in float64, O(n) each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from clearhead.core import formula
from clearhead.core.arrays import Array, dtype_name, to_numpy
from clearhead.core.grid import bins, part
from clearhead.core.problem import Problem

# As many scores are looked at together
AT_ONCE = 2**22
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


class Rows(NamedTuple):
    """Some queries of one head: outputs (n, Dv), logarithms of weights (n, S), and of each query three numbers.

    `plain` is the output by the same formula in the precision of sums; `keys` how many keys are seen; `score` the
    largest |score| among them.
    """

    output: np.ndarray
    plain: np.ndarray
    logs: np.ndarray
    keys: np.ndarray
    score: np.ndarray


def sampled(queries: int, count: int, seed: int) -> np.ndarray:
    """At most `count` queries, one drawn from each of as many stretches of equal length.

    >>> sampled(5, 9, 0).tolist(), sampled(1000, 4, 0).tolist()
    ([0, 1, 2, 3, 4], [212, 409, 627, 817])
    """
    generator = np.random.default_rng(seed)
    return np.array([int(generator.integers(one.start, one.stop)) for one in bins(queries, count)], dtype=np.int64)


def in_parts(problem: Problem, places: np.ndarray) -> Iterator[slice]:
    """Parts of the sampled queries that take little memory in all heads together."""
    grid = problem.grid
    step = max(1, AT_ONCE // max(int(np.prod(grid.shape[:-2])) * grid.keys, 1))
    for start in range(0, len(places), step):
        yield slice(start, start + step)


def exact_rows(problem: Problem, places: np.ndarray, at: tuple[int, ...]) -> Rows:
    """The queries at these places in one batch row and head, by the formula."""
    precise = "float64" if dtype_name(problem.q) == "float64" else "float32"
    call = _options(problem, places, at)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # padding may hold anything
        exact, scores, lse = _attend(problem, places, at, np.float64, call)
        plain, _, _ = _attend(problem, places, at, np.dtype(precise), call)
        seen = scores > -np.inf
        logs = scores - np.where(np.isfinite(lse), lse, 0.0)[..., None]
        largest = np.abs(np.where(seen, scores, 0.0)).max(-1, initial=0.0)
    return Rows(exact, plain.astype(np.float64), logs, seen.sum(-1), largest)


def _options(problem: Problem, places: np.ndarray, at: tuple[int, ...]) -> dict[str, Any]:
    grid, columns = problem.grid, range(problem.grid.keys)
    call: dict[str, Any] = {}
    if problem.mask is not None:
        mask = np.empty((len(places), grid.keys), dtype=bool)
        for row, place in enumerate(places.tolist()):
            tile = problem.mask.tile(range(place, place + 1), columns, grid)
            mask[row] = tile if isinstance(tile, bool) else part(to_numpy(tile), at)[0]
        call["mask"] = mask
    if problem.bias is not None:
        rows = [problem.bias.tile(range(place, place + 1), columns, grid) for place in places.tolist()]
        call["bias"] = np.stack([np.broadcast_to(part(to_numpy(row), at), (1, grid.keys))[0] for row in rows])
    return call


def _attend(
    problem: Problem, places: np.ndarray, at: tuple[int, ...], dtype: Any, call: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, scores and log-sum-exp in one precision."""
    shared = (*at[:-1], at[-1] // problem.group)
    q = _numbers(problem.q, at)[places].astype(dtype)
    k, v = (_numbers(array, shared).astype(dtype) for array in (problem.k, problem.v))
    mask = call.get("mask")
    if mask is not None:
        q, k, v = formula.blank(mask, q, k, v)
    sinks = None if problem.sinks is None else to_numpy(problem.sinks).astype(dtype)[at[-1] : at[-1] + 1]
    bias = None if "bias" not in call else call["bias"].astype(dtype)
    scores = formula.score(q, k, scale=problem.scale, softcap=problem.softcap, bias=bias, mask=mask)
    weights, lse, _ = formula.softmax(scores, sinks)
    return formula.mix(formula.allowed_only(mask, weights), v, mask), scores, lse


def _numbers(array: Array, at: tuple[int, ...]) -> np.ndarray:
    """One head of an array, in NumPy: the others stay where they are."""
    index = tuple(0 if size == 1 else place for size, place in zip(array.shape[:-2], at, strict=True))
    return to_numpy(array[(*index, slice(None), slice(None))])
