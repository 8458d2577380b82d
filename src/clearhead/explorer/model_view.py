"""What the view of heads asks for: a thumbnail and numbers of each, means of some, what flows through all layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.explorer.answers import Params, route, whole
from clearhead.explorer.layered import Layered, largest
from clearhead.watching.words import merge_subwords

SIDE = 48  # cells of a thumbnail, each way, at most
MANY, SMALL = 400, 24  # heads past which thumbnails are smaller, and how small
GRID = 8  # rows and columns of what is drawn


@route("/heads", of=Layered)
def heads(subject: Layered, params: Params) -> Any:
    """Of each layer and head: mean entropy, mean distance, the share of the first token; None where it was not seen."""
    looks = subject.looks(params)
    told: dict[str, Any] = dict(subject.facts(params))
    for name in ("entropy", "distance", "first"):
        found = [getattr(one, name) for one in looks]
        told[name] = None if any(one is None for one in found) else np.array(found)
    return told


@route("/atlas", of=Layered)
def atlas(subject: Layered, params: Params) -> Any:
    """Every head's map as shades, (layers, heads, rows, columns), each by its own largest."""
    maps = pooled_maps(subject, params)
    side = SMALL if maps.shape[0] * maps.shape[1] > MANY else SIDE
    maps = largest(maps, side)
    top = maps.max((-1, -2), keepdims=True)
    return (254 * maps / np.where(top > 0, top, 1.0)).astype(np.uint8)


@route("/like", of=Layered)
def like(subject: Layered, params: Params) -> Any:
    """How like each head is to what was drawn: the correlation of its pooled map with eight rows of eight."""
    text = params.get("drawn", "")
    if len(text) != GRID * GRID or set(text) - {"0", "1"}:
        raise ArgumentError("drawn", f"is {text[:20]!r}, expected {GRID * GRID} signs, 0 or 1")
    drawn = np.array([int(one) for one in text], np.float64).reshape(GRID, GRID)
    found = largest(np.asarray(pooled_maps(subject, params), np.float64), GRID)
    rows, columns = (np.arange(GRID) * count // GRID for count in found.shape[-2:])  # fewer tokens than rows drawn
    found, drawn = found[..., rows[:, None], columns], drawn - drawn.mean()
    found = found - found.mean((-1, -2), keepdims=True)
    sizes = np.linalg.norm(found, axis=(-1, -2)) * np.linalg.norm(drawn)
    return {"like": (found * drawn).sum((-1, -2)) / np.where(sizes > 0, sizes, 1.0)}


@route("/words", of=Layered)
def words(subject: Layered, params: Params) -> Any:
    """Weights with their names: of one head, of the mean of all or of chosen ones, or followed through all layers."""
    which = params.get("which", "head")
    if which == "rollout":
        weights = subject.rollout(params)
    elif which == "mean":
        layers = range(len(subject.facts(params)["layers"]))
        weights = np.mean([subject.weights(params, layer).mean(0) for layer in layers], axis=0)
    elif which == "chosen":
        weights = mean_of(subject, params)
    elif which == "head":
        every = subject.weights(params, subject.layer(params))
        weights = every[whole(params, "head", len(every))]
    else:
        raise ArgumentError("which", f"is {which[:20]!r}, expected head, mean, chosen or rollout")
    queries, keys = subject.names(params)
    if params.get("merged") == "1":
        merged = merge_subwords(weights, keys, query_tokens=queries)
        return {"weights": merged.weights, "tokens": merged.keys, "query_tokens": merged.queries}
    return {"weights": weights, "tokens": keys, "query_tokens": queries}


def mean_of(subject: Layered, params: Params) -> np.ndarray:
    """The mean of the heads that `chosen` names, as `layer.head` with commas between them."""
    text = params.get("chosen", "")
    pairs = [one.split(".") for one in text.split(",")] if text else []
    if not pairs or not all(len(one) == 2 and all(n.isdigit() and len(n) < 6 for n in one) for one in pairs):
        raise ArgumentError("chosen", f"is {text[:40]!r}, expected heads as layer.head, with commas between them")
    wanted: dict[int, list[int]] = {}
    for layer, head in {(int(layer), int(head)) for layer, head in pairs}:
        wanted.setdefault(layer, []).append(head)
    found = []
    for layer, some in sorted(wanted.items()):
        every = subject.weights(params, subject.layer({**params, "layer": str(layer)}))
        outside = [head for head in some if head >= len(every)]
        if outside:
            raise ArgumentError("chosen", f"has head {outside[0]}, expected 0 to {len(every) - 1}")
        found += [every[head] for head in sorted(some)]
    return np.mean(found, axis=0)


def pooled_maps(subject: Layered, params: Params) -> np.ndarray:
    """Every head's map, (layers, heads, rows, columns)."""
    maps = [one.map for one in subject.looks(params)]
    if len({None if one is None else one.shape for one in maps}) > 1:
        raise ArgumentError("address", "layers have different sizes: they have no common atlas")
    if maps[0] is None:
        raise ArgumentError("address", "no map was observed: observe(map=(64, 64)) pools one")
    return np.stack([np.asarray(one) for one in maps])
