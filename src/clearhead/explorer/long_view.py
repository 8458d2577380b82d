"""What the view of long contexts asks for: the matrix pooled to a screenful, any part of it, and what keys received."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from clearhead.calls import observe
from clearhead.core.errors import ArgumentError
from clearhead.explorer.answers import Params, route, whole
from clearhead.explorer.scene import Scene

SIDE = 256  # cells of a map, each way, at most
MOST = 2**25  # weights that are computed at once for a part
NAMED = 8  # keys that are named as those that received most


@route("/pooled")
def pooled(scene: Scene, params: Params) -> Any:
    """Largest weights of a part of one head's matrix, or of all of it, pooled to at most SIDE × SIDE."""
    scene = scene.edited(params)
    head = whole(params, "head", scene.heads)
    top, bottom = part(params, "q", scene.queries)
    left, right = part(params, "k", scene.keys)
    if (top, bottom, left, right) == (0, scene.queries, 0, scene.keys):
        found = whole_map(scene)[head]
        return np.asarray(found, np.float32)
    if (bottom - top) * scene.keys * scene.heads > MOST:
        raise ArgumentError("q1", f"asks for {bottom - top:,} queries at once, expected fewer: zoom in on rows first")
    seen: Any = observe(scene.q, scene.k, scene.v, queries=range(top, bottom), **scene.options)
    rows = seen.queries.weights[head][:, left:right]
    return np.asarray(largest(rows, SIDE), np.float32)


@route("/received")
def received(scene: Scene, params: Params) -> Any:
    """How much attention each key received, pooled along the keys, and the keys that received most."""
    scene = scene.edited(params)
    head = whole(params, "head", scene.heads)
    seen: Any = observe(scene.q, scene.k, scene.v, received=True, **scene.options)
    each = np.asarray(seen.received[head], np.float64)
    most = np.argsort(-each, kind="stable")[:NAMED]
    shares = each / (each.sum() or 1.0)
    named = [{"key": int(j), "token": scene.tokens[j], "received": each[j], "share": shares[j]} for j in most]
    return {
        "keys": scene.keys,
        "along": largest(each[None], SIDE)[0],
        "most": named,
        "sink": bool(most[0] == 0 and shares[0] > 1 / 3),
        "entropy": np.asarray(seen.entropy[head]).mean(),
    }


@lru_cache(maxsize=4)
def whole_map(scene: Scene) -> np.ndarray:
    """Every head's matrix, pooled, without building it."""
    shape = (min(SIDE, scene.queries), min(SIDE, scene.keys))
    seen: Any = observe(scene.q, scene.k, scene.v, map=shape, **scene.options)
    return np.asarray(seen.map.max)


def largest(rows: np.ndarray, side: int) -> np.ndarray:
    """The largest of each block, at most `side` of them each way; blocks as `observe(map=…)` has them."""
    for axis in (0, 1):
        count = rows.shape[axis]
        blocks = min(side, count)
        starts = [-(-i * count // blocks) for i in range(blocks)]
        rows = np.maximum.reduceat(rows, starts, axis=axis)
    return rows


def part(params: Params, name: str, count: int) -> tuple[int, int]:
    """From where to where, of `count`: `q0` and `q1`, or `k0` and `k1`."""
    first = whole(params, f"{name}0", count)
    last = whole(params, f"{name}1", count + 1, count)
    if last <= first:
        raise ArgumentError(f"{name}1", f"is {last}, expected more than {name}0, which is {first}")
    return first, last
