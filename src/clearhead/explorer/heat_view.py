"""What the heat map asks for: a number of every pair of one head, the same as shades, and what stands beside it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from clearhead.calls import observe
from clearhead.core import formula
from clearhead.core.arrays import to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import part
from clearhead.core.observations import Observed
from clearhead.core.problem import pose
from clearhead.explorer.answers import Params, route, whole
from clearhead.explorer.scene import Scene

SHADES = ("linear", "log", "no sink")
MATRICES = ("dots", "scaled", "scores", "weights", "contributions")
MOST_CELLS = 2048 * 2048  # of a matrix that is shown whole
MOST_TOLD = 2**16  # pairs up to which each is told by a word whether it is allowed; past it the shades say so
LEAST = 1e-6  # below which a log scale tells nothing apart


@route("/matrix")
def matrix(scene: Scene, params: Params) -> Any:
    """One number of every pair of one head, (queries, keys): scores are −inf where the mask hides a key."""
    return numbers(*asked(scene, params))


@route("/shade")
def shade(scene: Scene, params: Params) -> Any:
    """The same matrix as shades of 0 to 254, for pixels; 255 is hidden by the mask or not finite."""
    scene, head, what = asked(scene, params)
    found = numbers(scene, head, what)
    hidden = allowed(scene, head)
    return shades(found, None if hidden is None else ~hidden, params.get("scale_of", "linear"), from_zero(what))


@route("/number")
def number(scene: Scene, params: Params) -> Any:
    """One number of the matrix, where it has too many to be sent together."""
    scene = scene.edited(params)
    what, head = params.get("what", "weights"), whole(params, "head", scene.heads)
    refuse_other(what)
    query, key = whole(params, "query", scene.queries), whole(params, "key", scene.keys)
    return {"number": numbers(scene, head, what, range(query, query + 1))[0, key]}


@route("/margins")
def margins(scene: Scene, params: Params) -> Any:
    """Beside the matrix of one head: sums of its rows and columns, entropy of rows, and which pairs are hidden."""
    scene, head, what = asked(scene, params)
    seen = observed(scene)
    may = allowed(scene, head)
    return {
        "entropy": seen.entropy[head],
        "received": None if seen.received is None else seen.received[head],
        "max_score": seen.max_score[head],
        "lse": seen.lse[head],
        "allowed": None if may is None or may.size > MOST_TOLD else may.astype(int),
        **sums(numbers(scene, head, what), may),
    }


def asked(scene: Scene, params: Params) -> tuple[Scene, int, str]:
    """The call, the head and the matrix that are asked for, or words that say why they cannot be shown whole."""
    scene = scene.edited(params)
    what = params.get("what", "weights")
    refuse_other(what)
    refuse_many(scene.queries, scene.keys)
    return scene, whole(params, "head", scene.heads), what


def refuse_other(what: str) -> None:
    """Words, where there is no such matrix."""
    if what not in MATRICES:
        raise ArgumentError("what", f"is {what[:40]!r}, expected one of {', '.join(MATRICES)}")


def refuse_many(queries: int, keys: int) -> None:
    """Words, where a matrix has too many cells to be sent whole."""
    if queries * keys > MOST_CELLS:
        raise ArgumentError("what", f"has {queries:,} × {keys:,} cells: ask for a pooled map, as Long context does")


@lru_cache(maxsize=4)
def numbers(scene: Scene, head: int, what: str, rows: range | None = None) -> np.ndarray:
    """One number of each pair of some queries and all keys, by the formula itself; `contributions` are ‖w·v‖."""
    rows = range(scene.queries) if rows is None else rows
    q, k, v, given = parts(scene, head, rows)
    with np.errstate(invalid="ignore", over="ignore"):  # padding may hold anything
        if what == "dots":
            return formula.score(q, k, scale=1.0)
        if what == "scaled":
            return formula.score(q, k, scale=given["scale"])
        if what == "scores":
            q, k, _ = formula.blank(given["mask"], q, k, v)
            return formula.score(q, k, **{name: one for name, one in given.items() if name != "sinks"})
        weights = formula.attention(q, k, v[:, :0], **given).weights
        if what == "weights":
            return weights
        # of w·v, the length: what is hidden adds nothing, whatever its value holds
        return formula.allowed_only(given["mask"], weights * np.linalg.norm(v, axis=-1))


def parts(scene: Scene, head: int, rows: range) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Queries, keys and values of one head, and the options of the formula that go with them."""
    problem = pose(scene.q, scene.k, scene.v, **scene.options)
    columns, at = range(scene.keys), (head,)
    mask = bias = None
    if problem.mask is not None:
        tile = problem.mask.tile(rows, columns, problem.grid)
        mask = np.full((1, 1), tile) if isinstance(tile, bool) else part(to_numpy(tile), at)
        mask = np.broadcast_to(mask, (len(rows), len(columns)))
    if problem.bias is not None:
        bias = part(to_numpy(problem.bias.tile(rows, columns, problem.grid)), at)
    sinks = None if problem.sinks is None else to_numpy(problem.sinks).astype(float)[head : head + 1]
    theirs = head // problem.group
    options = {"scale": problem.scale, "softcap": problem.softcap, "bias": bias, "mask": mask, "sinks": sinks}
    return scene.q[head, rows.start : rows.stop], scene.k[theirs], scene.v[theirs], options


def allowed(scene: Scene, head: int) -> np.ndarray | None:
    """Which pairs of one head the mask lets attend, (queries, keys); None where there is no mask."""
    found: np.ndarray | None = parts(scene, head, range(scene.queries))[3]["mask"]
    return found


@lru_cache(maxsize=8)
def observed(scene: Scene) -> Observed[np.ndarray]:
    """What is observed of the whole call without its matrix, once for all who ask."""
    return observe(scene.q, scene.k, scene.v, received=True, **scene.options)


def sums(found: np.ndarray, may: np.ndarray | None) -> dict[str, Any]:
    """Sums of rows and of columns, and the least and largest number, over the pairs that are allowed."""
    seen = np.isfinite(found) if may is None else np.isfinite(found) & may
    counted = found if may is None else np.where(may, found, 0.0)
    return {
        "rows": counted.sum(1),
        "columns": counted.sum(0),
        "spread": spread(found, seen),
        "spread_but_first": spread(found[:, 1:], seen[:, 1:]),
    }


def spread(found: np.ndarray, seen: np.ndarray) -> tuple[float, float] | None:
    """The least and the largest of the numbers that are seen."""
    some = found[seen]
    return (float(some.min()), float(some.max())) if some.size else None


def from_zero(what: str) -> bool:
    """Is a matrix of numbers that begin at zero, so that its shades do?"""
    return what in ("weights", "contributions")


def shades(found: np.ndarray, hidden: np.ndarray | None, how: str, zero: bool) -> np.ndarray:
    """Numbers as shades of 0 to 254, evenly or by their logarithms; 255 is what is hidden or not finite.

    "no sink" leaves the first key out of the range, so that what it dwarfs can be told apart.

    >>> shades(np.array([[0.0, 0.5, 1.0]]), None, "linear", True).tolist()
    [[0, 127, 254]]
    """
    if how not in SHADES:
        raise ArgumentError("scale_of", f"is {how[:40]!r}, expected one of {', '.join(SHADES)}")
    seen = np.isfinite(found) if hidden is None else np.isfinite(found) & ~hidden
    if how == "log":
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.log10(np.maximum(np.abs(found), LEAST))
    counted = seen.copy()
    if how == "no sink":
        counted[:, 0] = False
    some = found[counted]
    low = 0.0 if zero and how != "log" else float(some.min(initial=np.inf))
    high = float(some.max(initial=0.0 if zero and how != "log" else -np.inf))
    if not some.size:
        low, high = 0.0, 1.0
    spread = (np.where(seen, found, low) - low) / ((high - low) or 1.0)
    return np.where(seen, np.clip(spread * 254, 0, 254), 255).astype(np.uint8)
