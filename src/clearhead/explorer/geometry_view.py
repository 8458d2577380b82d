"""What the geometry view asks for: queries, keys and values as arrows in a plane, and where a dragged arrow leads."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.explorer.answers import Params, number, route, whole
from clearhead.explorer.scene import Scene


@route("/geometry")
def geometry(scene: Scene, params: Params) -> Any:
    """One query among its keys, and the values with the output among them, each in the plane that shows most."""
    scene = scene.edited(params)
    head, query = whole(params, "head", scene.heads), whole(params, "query", scene.queries)
    row = scene.trace(query, head).row
    asking, axes, share = plane(np.concatenate([row.q[None], row.k]))
    answering, value_axes, value_share = plane(np.concatenate([row.output[None], row.v]))
    norms = np.linalg.norm(row.k, axis=-1)
    length = float(np.linalg.norm(row.q))
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines = row.dots / (norms * length)
    return {
        "query": asking[0],
        "keys": asking[1:],
        "share": share,
        "output": answering[0],
        "values": answering[1:],
        "value_share": value_share,
        "dots": row.dots,
        "scaled": row.scaled,
        "weights": row.weights,
        "allowed": None if row.allowed is None else row.allowed.astype(int),
        "cosines": cosines,
        "norms": norms,
        "length": length,
        "flat": len(axes) == row.q.size and len(value_axes) == row.v.shape[-1],
    }


@route("/drag")
def drag(scene: Scene, params: Params) -> Any:
    """The edits that put the tip of a query's or key's arrow where it was dragged to, in the plane it was seen in."""
    scene = scene.edited(params)
    head, query = whole(params, "head", scene.heads), whole(params, "query", scene.queries)
    row = scene.trace(query, head).row
    name = params.get("name", "")
    if name not in ("q", "k"):
        raise ArgumentError("name", f"is {name[:20]!r}, expected q or k")
    place = query if name == "q" else whole(params, "row", scene.keys)
    old = row.q if name == "q" else row.k[place]
    seen, axes, _ = plane(np.concatenate([row.q[None], row.k]))
    tip = np.array([number(params, "x", 0.0), number(params, "y", 0.0)])[: len(axes)]
    at = seen[0] if name == "q" else seen[1 + place]
    new = old + (tip - at[: len(axes)]) @ axes
    group = scene.heads // scene.k.shape[0]
    owner = head if name == "q" else head // group
    return {"edits": ";".join(f"{name}.{owner}.{place}.{c}.{float(x)!r}" for c, x in enumerate(new))}


def plane(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Points (n, d) as (n, 2), the axes they are seen along, and which share of their squared lengths is seen.

    Arrows begin at the origin, so the axes go through it: those of the largest singular values. Two features are
    shown as they are.
    """
    features = points.shape[1]
    if features <= 2:
        return np.pad(points, ((0, 0), (0, 2 - features))), np.eye(features), 1.0
    _, sizes, axes = np.linalg.svd(np.nan_to_num(points), full_matrices=False)
    axes = axes[:2] * np.where(np.abs(axes[:2]).max(1) == axes[:2].max(1), 1.0, -1.0)[:, None]
    total = float((sizes**2).sum())
    seen = points @ axes.T
    return np.pad(seen, ((0, 0), (0, 2 - seen.shape[1]))), axes, float((sizes[:2] ** 2).sum() / total) if total else 1.0
