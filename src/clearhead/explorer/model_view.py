"""What the view of a model's heads asks for: a thumbnail and numbers of each, their mean, what flows through all."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.calls import observe
from clearhead.core.errors import ArgumentError
from clearhead.explorer.answers import Params, route
from clearhead.explorer.model import Model
from clearhead.watching.words import merge_subwords

SIDE = 48  # cells of a thumbnail, each way, at most


@route("/heads", of=Model)
def heads(model: Model, params: Params) -> Any:
    """Of each layer and head: mean entropy, mean distance, the share of the first token; and the tokens."""
    entropy, distance, first = [], [], []
    for scene, seen in looked(model, params):
        weights = np.asarray(seen.weights)
        steps = np.abs(np.arange(scene.queries)[:, None] - np.arange(scene.keys))
        entropy.append(np.asarray(seen.entropy).mean(-1))
        distance.append((weights * steps).sum(-1).mean(-1))
        first.append(weights[..., 0].mean(-1))
    scene = model.scene(params)
    return {
        **model.facts(params),
        "tokens": scene.tokens,
        "query_tokens": scene.query_tokens,
        "entropy": np.array(entropy),
        "distance": np.array(distance),
        "first": np.array(first),
    }


@route("/atlas", of=Model)
def atlas(model: Model, params: Params) -> Any:
    """Every head's map as shades, (layers, heads, rows, columns), each by its own largest."""
    found = []
    for _, seen in looked(model, params):
        largest = np.asarray(seen.map.max)
        top = largest.max((-1, -2), keepdims=True)
        found.append((254 * largest / np.where(top > 0, top, 1.0)).astype(np.uint8))
    return np.stack(found)


@route("/like", of=Model)
def like(model: Model, params: Params) -> Any:
    """How like each head is to what was drawn: the correlation of its pooled map with eight rows of eight."""
    text = params.get("drawn", "")
    if len(text) != 64 or set(text) - {"0", "1"}:
        raise ArgumentError("drawn", f"is {text[:20]!r}, expected 64 signs, 0 or 1")
    drawn = np.array([int(one) for one in text], np.float64).reshape(8, 8)
    drawn -= drawn.mean()
    found = []
    for scene, seen in looked(model, params):
        weights = np.asarray(seen.weights)
        rows = np.arange(8 + 1) * scene.queries // 8
        columns = np.arange(8 + 1) * scene.keys // 8
        pooled = np.zeros((scene.heads, 8, 8))
        for i in range(8):
            for j in range(8):
                block = weights[:, rows[i] : rows[i + 1], columns[j] : columns[j + 1]]
                pooled[:, i, j] = block.max((-1, -2)) if block.size else 0.0
        pooled -= pooled.mean((-1, -2), keepdims=True)
        sizes = np.linalg.norm(pooled, axis=(-1, -2)) * np.linalg.norm(drawn)
        found.append((pooled * drawn).sum((-1, -2)) / np.where(sizes > 0, sizes, 1.0))
    return {"like": np.array(found)}


@route("/words", of=Model)
def words(model: Model, params: Params) -> Any:
    """Weights by word: of one layer and head, the mean of all heads, or followed through all layers (rollout)."""
    which = params.get("which", "head")
    scene = model.scene(params)
    if which == "rollout":
        weights = np.asarray(model.seen(params).rollout()).reshape(-1, scene.queries, scene.keys)[0]
    elif which == "mean":
        weights = np.mean([np.asarray(seen.weights).mean(0) for _, seen in looked(model, params)], axis=0)
    elif which == "head":
        head = int(params.get("head", "0") or 0)
        if not 0 <= head < scene.heads:
            raise ArgumentError("head", f"is {head}, expected 0 to {scene.heads - 1}")
        layer = observe(scene.q, scene.k, scene.v, weights=True, **scene.options)
        weights = np.asarray(layer.weights)[head]
    else:
        raise ArgumentError("which", f"is {which[:20]!r}, expected head, mean or rollout")
    if params.get("merged") == "1":
        merged = merge_subwords(weights, scene.tokens, query_tokens=scene.query_tokens)
        return {"weights": merged.weights, "tokens": merged.keys, "query_tokens": merged.queries}
    return {"weights": weights, "tokens": scene.tokens, "query_tokens": scene.query_tokens}


def looked(model: Model, params: Params) -> list[tuple[Any, Any]]:
    """Each layer's scene and what is observed of it."""
    found = []
    for place in range(len(model.layers(params))):
        scene = model.scene({**params, "layer": str(place)})
        if scene.queries * scene.keys > 2**22:
            raise ArgumentError("text", f"has {scene.keys:,} tokens: look at one layer, in Long context")
        side = (min(SIDE, scene.queries), min(SIDE, scene.keys))
        found.append((scene, observe(scene.q, scene.k, scene.v, map=side, weights=True, **scene.options)))
    return found
