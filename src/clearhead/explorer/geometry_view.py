"""What the geometry view asks for: queries, keys and values as arrows in a plane, and where a dragged arrow leads."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.explorer.answers import Params, number, route, whole
from clearhead.explorer.scene import Scene


@route("/geometry")
def geometry(scene: Scene, params: Params) -> Any:
    """One query among its keys, and the values with the output among them, each in the plane that shows most.

    The planes are those of the call as it was before anything in it was changed: what is dragged moves, and the rest
    stays where it is.
    """
    head, query = whole(params, "head", scene.heads), whole(params, "query", scene.queries)
    before, row = scene.trace(query, head).row, scene.edited(params).trace(query, head).row
    _, axes = plane(np.concatenate([before.q[None], before.k]))
    _, value_axes = plane(np.concatenate([before.output[None], before.v]))
    asking, share = seen_along(np.concatenate([row.q[None], row.k]), axes)
    answering, value_share = seen_along(np.concatenate([row.output[None], row.v]), value_axes)
    norms = np.linalg.norm(row.k, axis=-1)
    length = float(np.linalg.norm(row.q))
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines = row.dots / (norms * length)
    return {
        "query": asking[0],
        "keys": asking[1:],
        "radii": np.linalg.norm(asking[1:], axis=-1),
        "share": share,
        "output": answering[0],
        "values": answering[1:],
        "value_share": value_share,
        "dots": row.dots,
        "scale": row.scale,
        "scaled": row.scaled,
        "weights": row.weights,
        "allowed": None if row.allowed is None else row.allowed.astype(int),
        "cosines": cosines,
        "norms": norms,
        "length": length,
        "attended": row.output,
    }


@route("/drag")
def drag(scene: Scene, params: Params) -> Any:
    """The edits that put the tip of a query's or key's arrow where it was dragged to, and what is seen then."""
    head, query = whole(params, "head", scene.heads), whole(params, "query", scene.queries)
    before, row = scene.trace(query, head).row, scene.edited(params).trace(query, head).row
    name = params.get("name", "")
    if name not in ("q", "k"):
        raise ArgumentError("name", f"is {name[:20]!r}, expected q or k")
    place = query if name == "q" else whole(params, "row", scene.keys)
    old = row.q if name == "q" else row.k[place]
    _, axes = plane(np.concatenate([before.q[None], before.k]))
    tip = np.array([number(params, "x", 0.0), number(params, "y", 0.0)])[: len(axes)]
    new = old + (tip - old @ axes.T) @ axes
    group = scene.heads // scene.k.shape[0]
    owner = head if name == "q" else head // group
    moved = {f"{name}.{owner}.{place}.{c}": float(x) for c, x in enumerate(new)}
    kept = [one for one in params.get("edits", "").split(";") if one and ".".join(one.split(".")[:4]) not in moved]
    edits = ";".join([*kept, *(f"{where}.{x!r}" for where, x in moved.items())])
    return {"edits": edits, **geometry(scene, {**params, "edits": edits})}


def plane(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points (n, d) as (n, 2), and the axes (at most 2, d) they are seen along.

    Arrows begin at the origin, so the axes go through it: those of the largest singular values. Two features are
    shown as they are.
    """
    features = points.shape[1]
    if features <= 2:
        axes = np.eye(features)
    else:
        axes = np.linalg.svd(np.nan_to_num(points), full_matrices=False)[2][:2]
        axes = axes * np.where(np.abs(axes).max(1) == axes.max(1), 1.0, -1.0)[:, None]
    return seen_along(points, axes)[0], axes


def seen_along(points: np.ndarray, axes: np.ndarray) -> tuple[np.ndarray, float]:
    """Points as (n, 2), and which share of their variance about the origin the axes keep."""
    seen = points @ axes.T
    total = float((points**2).sum())
    share = min(1.0, float((seen**2).sum()) / total) if total else 1.0
    return np.pad(seen, ((0, 0), (0, 2 - seen.shape[1]))), share
