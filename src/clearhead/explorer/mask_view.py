"""What the view of masks and positions asks for: a mask by its expression, why it hides a pair, biases as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Grid
from clearhead.core.mask import Mask
from clearhead.core.masks import causal
from clearhead.core.positions import alibi, relative_bias, rotary, sinusoidal
from clearhead.core.spelling import read_mask
from clearhead.explorer.answers import Params, Subject, keep, route, spelled, whole
from clearhead.explorer.scene import Scene

MOST = 512  # positions of a picture
MOST_TOLD = 400  # pairs that a saved file can tell of
SPELLED = {
    "alibi": "ch.attention(q, k, v, bias=ch.alibi(8))  # eight heads",
    "relative bias": "ch.attention(q, k, v, bias=ch.relative_bias(table))  # table (32, heads), learnt",
    "rotary": "turn = ch.rotary()\nch.attention(turn(q), turn(k), v)",
    "sinusoidal": "embeddings + ch.sinusoidal({n}, 32)",
}
POSITIONS = tuple(SPELLED)


@route("/mask")
def mask(scene: Scene, params: Params) -> Any:
    """The pairs that an expression lets through, in this call's sizes or others, and how it prints."""
    queries, keys = sizes(scene, params)
    read = expression(scene, params)
    grid = Grid((), 1, queries, keys)
    read.check(grid)
    allowed = np.asarray(read.dense(queries, keys)).reshape(-1, queries, keys)[0]
    return {
        "allowed": allowed.astype(int),
        "spelled": repr(read),
        "count": int(allowed.sum()),
        "share": float(allowed.mean()),
        "empty": np.flatnonzero(~allowed.any(1)),
    }


@route("/why")
def why(scene: Scene, params: Params) -> Any:
    """What a mask says of one pair."""
    queries, keys = sizes(scene, params)
    read = expression(scene, params)
    query, key = whole(params, "query", queries), whole(params, "key", keys)
    grid = Grid((), 1, queries, keys)
    words = read.explain(query, key, queries=queries, keys=keys)
    return {"allowed": read.allows(query, key, grid, (0,)), "words": words}


@route("/position")
def position(scene: Scene, params: Params) -> Any:
    """How positions come into the scores: a bias for each pair, or the turn of each pair of features."""
    kind, count = params.get("kind", "alibi"), whole(params, "count", MOST + 1, 24) or 24
    if kind not in POSITIONS:
        raise ArgumentError("kind", f"is {kind[:30]!r}, expected one of {', '.join(POSITIONS)}")
    everywhere = range(count)
    if kind == "alibi":
        tile = alibi(8).tile(everywhere, everywhere, Grid((), 8, count, count))
        numbers, words = np.asarray(tile)[0], "the first of eight heads: slope 1/2, less for each step away"
    elif kind == "relative bias":
        table = np.random.default_rng(0).standard_normal((32, 1))
        tile = relative_bias(table).tile(everywhere, everywhere, Grid((), 1, count, count))
        numbers, words = np.asarray(tile)[0], "T5's buckets, exact near and wider farther away, with numbers drawn here"
    elif kind == "sinusoidal":
        numbers, words = np.asarray(sinusoidal(count, 32)), "a row for each position, added to its embedding"
    else:
        ones = np.zeros((1, count, 32))
        ones[..., 0::2] = 1.0
        turned = np.asarray(rotary(layout="interleaved")(ones))[0]
        numbers = turned @ turned.T / 16
        words = "the product of two equal vectors, turned by their positions: it depends on the distance alone"
    return {"numbers": np.asarray(numbers, np.float64), "words": words, "python": SPELLED[kind].format(n=count)}


@keep
def kept(subject: Subject) -> Iterator[str]:
    """What a saved file holds of it: every layer's mask, and why each pair of a small call is seen, or is not."""
    for layer in range(1, len(subject.facts({}).get("layers") or [0])):
        yield spelled("/mask", layer=layer)
        yield spelled("/matrix", layer=layer, mask="none", what="weights")
    scene = subject.scene({})
    if scene.queries * scene.keys <= MOST_TOLD:
        yield from (spelled("/why", query=i, key=j) for i in range(scene.queries) for j in range(scene.keys))


def expression(scene: Scene, params: Params) -> Mask:
    """The mask that is asked for; else the call's own, or causal."""
    if params.get("expression"):
        return read_mask(params["expression"], "expression")
    return causal() if scene.mask is None else scene.mask


def sizes(scene: Scene, params: Params) -> tuple[int, int]:
    """How many queries and keys a mask is drawn for."""
    queries = whole(params, "queries", MOST + 1, min(scene.queries, MOST))
    keys = whole(params, "keys", MOST + 1, min(scene.keys, MOST))
    return max(1, queries), max(1, keys)
