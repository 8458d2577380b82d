"""What the view of long contexts asks for: the matrix pooled to a screenful, any part of it, what keys received, and
which keys and queries stand out: sinks, and queries that find one key far away.

Tones are shades on one scale for all heads, by the logarithm of the weight: a byte each, so that a thousand heads of a
model fit into a file. `/edges` says which weight a tone is at most.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from clearhead.calls import observe
from clearhead.core.errors import ArgumentError
from clearhead.explorer.answers import Params, route, whole
from clearhead.explorer.heat_view import numbers
from clearhead.explorer.layered import SIDE, largest
from clearhead.explorer.pooled import Layer, Pooled
from clearhead.explorer.scene import Scene

FINE = 1024  # of the map that is zoomed into before cells are exact, each way, at most
KEPT = 2**24  # numbers of that map, of all heads
MOST = 2**25  # weights that are computed at once for a part
NAMED = 8  # keys and queries that are named
SINK = 0.05  # the share of all attention from which a key is called a sink
FAR = 16  # keys between a query and what it finds, at least, and a tenth of all of them
FINDS = 0.3  # the weight from which a query is said to find a key
EDGES = np.geomspace(1e-7, 1.0, 255)  # tone t: at most the t-th of these weights


@route("/edges")
def edges(scene: Scene, params: Params) -> Any:
    """The weight that each tone is at most."""
    return EDGES


@route("/edges", of=Pooled)
def edges_pooled(subject: Pooled, params: Params) -> Any:
    """The same, whatever is explored."""
    return EDGES


@route("/pooled")
def pooled(scene: Scene, params: Params) -> Any:
    """Largest weights of a part of one head's matrix, or of all of it, pooled to at most SIDE × SIDE.

    Where a part has too many rows to be computed, it is cut out of a finer map of the whole.
    """
    scene = scene.edited(params)
    head = whole(params, "head", scene.heads)
    top, bottom = part(params, "q", scene.queries)
    left, right = part(params, "k", scene.keys)
    if (top, bottom, left, right) == (0, scene.queries, 0, scene.keys):
        return np.asarray(largest(fine_map(scene)[head], SIDE), np.float32)
    if (bottom - top) * scene.keys > MOST:
        found = cut(fine_map(scene)[head], (top, bottom, scene.queries), (left, right, scene.keys))
        return np.asarray(largest(found, SIDE), np.float32)
    rows = numbers(scene, head, "weights", range(top, bottom))
    return np.asarray(largest(rows[:, left:right], SIDE), np.float32)


@route("/pooled", of=Pooled)
def pooled_map(subject: Pooled, params: Params) -> Any:
    """The same of what was observed: exact where the matrix was, else cut out of the map."""
    head, layer = whole(params, "head", subject.heads), subject.parts[subject.layer(params)]
    top, bottom = part(params, "q", layer.entropy.shape[-1])
    left, right = part(params, "k", layer.keys)
    if layer.weights is not None:
        return np.asarray(largest(layer.weights[head, top:bottom, left:right], SIDE), np.float32)
    if layer.map is None:
        raise ArgumentError("address", "no map was observed: observe(map=(64, 64)) pools one")
    found = cut(layer.map[head], (top, bottom, layer.entropy.shape[-1]), (left, right, layer.keys))
    return np.asarray(largest(found, SIDE), np.float32)


@route("/tones")
def tones(scene: Scene, params: Params) -> Any:
    """`/pooled` as tones, a byte each; `side` pools them further, as a file with many heads does."""
    return toned(largest(pooled(scene, params), side(params)))


@route("/tones", of=Pooled)
def tones_pooled(subject: Pooled, params: Params) -> Any:
    """The same of what was observed."""
    return toned(largest(pooled_map(subject, params), side(params)))


@route("/along")
def along(scene: Scene, params: Params) -> Any:
    """What keys received, the largest of each stretch of them, at most SIDE of them."""
    scene = scene.edited(params)
    return stretches(looked(scene), whole(params, "head", scene.heads), part(params, "k", scene.keys), side(params))


@route("/along", of=Pooled)
def along_pooled(subject: Pooled, params: Params) -> Any:
    """The same of what was observed."""
    layer = subject.parts[subject.layer(params)]
    return stretches(layer, whole(params, "head", subject.heads), part(params, "k", layer.keys), side(params))


@route("/received")
def received(scene: Scene, params: Params) -> Any:
    """The keys of one head that received most, its sinks, and the queries that find one key far away."""
    scene = scene.edited(params)
    return outstanding(looked(scene), whole(params, "head", scene.heads), scene.query_tokens, scene.tokens)


@route("/received", of=Pooled)
def received_pooled(subject: Pooled, params: Params) -> Any:
    """The same of what was observed."""
    layer = subject.parts[subject.layer(params)]
    return outstanding(layer, whole(params, "head", subject.heads), *subject.known)


@route("/query")
def query(scene: Scene, params: Params) -> Any:
    """One query: its entropy, and the keys that it looks at most."""
    scene = scene.edited(params)
    head, place = whole(params, "head", scene.heads), whole(params, "query", scene.queries)
    row = numbers(scene, head, "weights", range(place, place + 1))[0]
    return {"entropy": looked(scene).entropy[head, place], "looks": most(row, scene.tokens), "exact": True}


@route("/query", of=Pooled)
def query_pooled(subject: Pooled, params: Params) -> Any:
    """The same of what was observed: of the whole row, or of its top keys."""
    layer, head = subject.parts[subject.layer(params)], whole(params, "head", subject.heads)
    place = whole(params, "query", layer.entropy.shape[-1])
    row, tokens = layer.row(head, place), subject.known[1]
    looks = [] if row is None else most(row, tokens)
    if row is None and layer.top is not None:
        pairs = zip(layer.top[0][head, place][:NAMED], layer.top[1][head, place], strict=False)
        looks = [{"key": int(j), "token": tokens[j], "weight": float(w)} for j, w in pairs if j >= 0]
    return {"entropy": layer.entropy[head, place], "looks": looks, "exact": row is not None}


@lru_cache(maxsize=4)
def looked(scene: Scene) -> Layer:
    """A call, observed as a long one is: without its matrix."""
    seen: Any = observe(scene.q, scene.k, scene.v, received=True, top=2, **scene.options)
    return Layer(0, scene.keys, seen.entropy, received=seen.received, top=(seen.top.indices, seen.top.weights))


@lru_cache(maxsize=2)
def fine_map(scene: Scene) -> np.ndarray:
    """Every head's matrix, pooled, without building it."""
    side = max(SIDE, min(FINE, int((KEPT / scene.heads) ** 0.5)))
    shape = (min(side, scene.queries), min(side, scene.keys))
    seen: Any = observe(scene.q, scene.k, scene.v, map=shape, **scene.options)
    return np.asarray(seen.map.max)


def cut(map: np.ndarray, rows: tuple[int, int, int], columns: tuple[int, int, int]) -> np.ndarray:
    """The blocks of a map that hold some of its rows and columns: (first, past the last, of how many)."""
    (top, bottom, count), (left, right, width) = rows, columns
    down, across = map.shape
    return map[
        top * down // count : (bottom - 1) * down // count + 1,
        left * across // width : (right - 1) * across // width + 1,
    ]


def toned(weights: np.ndarray) -> np.ndarray:
    """Weights as tones: the first of EDGES that is as large.

    >>> toned(np.array([0.0, 1.0, 1e-7])).tolist()
    [0, 254, 0]
    """
    return np.searchsorted(EDGES * (1 + 1e-6), np.minimum(np.nan_to_num(weights), 1.0)).astype(np.uint8)


def stretches(layer: Layer, head: int, keys: tuple[int, int], side: int) -> np.ndarray:
    """What each stretch of keys received at most."""
    if layer.received is None:
        raise ArgumentError("address", "was not observed: observe(received=True) sums what each key received")
    return np.asarray(largest(layer.received[head : head + 1, slice(*keys)], side)[0], np.float32)


def outstanding(layer: Layer, head: int, queries: tuple[str, ...], keys: tuple[str, ...]) -> dict[str, Any]:
    """What stands out in one head, by name; None for what was not observed."""
    told: dict[str, Any] = {
        "keys": layer.keys,
        "most": None,
        "sinks": None,
        "found": None,
        "ceiling": None,
        "entropy": np.nan_to_num(layer.entropy[head]).mean(),
    }
    taken: set[int] = set()
    if layer.received is not None:
        each = np.asarray(layer.received[head], np.float64)
        shares = each / (each.sum() or 1.0)
        named = [{"key": int(j), "token": keys[j], "received": each[j], "share": shares[j]} for j in first_of(each)]
        # of few keys each has a large share: a sink has several times what would be even
        told["sinks"] = [one for one in named if one["share"] > max(SINK, 3 / layer.keys)]
        told["most"] = named
        taken = {one["key"] for one in told["sinks"]}
        # beside a sink nothing else would be seen
        told["ceiling"] = next((one["received"] for one in named if one["key"] not in taken), each.max())
    if layer.top is not None:
        told["found"] = found_far(layer, head, taken, queries, keys)
    return told


def found_far(
    layer: Layer, head: int, sinks: set[int], queries: tuple[str, ...], keys: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The queries that give much of their weight to one key far before them that is no sink, as retrieval does."""
    assert layer.top is not None
    indices, weights = (np.asarray(one[head][:, 0]) for one in layer.top)
    strong = np.flatnonzero(weights >= FINDS)
    first = layer.keys - len(indices) if len(indices) < layer.keys else 0  # of fewer queries the last stands at the end
    keys_of = indices[strong]
    far = (keys_of >= 0) & (np.abs(first + strong - keys_of) >= max(FAR, layer.keys // 10))
    strong = strong[far & ~np.isin(keys_of, list(sinks))]
    best = strong[first_of(weights[strong])]
    return [
        {
            "query": int(i),
            "token": queries[i],
            "key": int(indices[i]),
            "key_token": keys[indices[i]],
            "weight": weights[i],
        }
        for i in best
    ]


def most(row: np.ndarray, tokens: tuple[str, ...]) -> list[dict[str, Any]]:
    """The keys with the largest weights of a row, by name."""
    return [{"key": int(j), "token": tokens[j], "weight": float(row[j])} for j in first_of(row)]


def first_of(numbers: np.ndarray) -> np.ndarray:
    """Where the NAMED largest numbers are, the largest first; of equal ones the first, without sorting them all.

    >>> first_of(np.array([1.0, 3.0, 2.0, 3.0])).tolist()
    [1, 3, 2, 0]
    """
    if len(numbers) <= NAMED:
        return np.argsort(-numbers, kind="stable")
    least = np.partition(numbers, -NAMED)[-NAMED]
    some = np.flatnonzero(numbers >= least)
    return some[np.argsort(-numbers[some], kind="stable")][:NAMED]


def side(params: Params) -> int:
    """How many cells each way are asked for, at most."""
    return whole(params, "side", SIDE + 1, SIDE) or SIDE


def part(params: Params, name: str, count: int) -> tuple[int, int]:
    """From where to where, of `count`: `q0` and `q1`, or `k0` and `k1`."""
    first = whole(params, f"{name}0", count)
    last = whole(params, f"{name}1", count + 1, count)
    if last <= first:
        raise ArgumentError(f"{name}1", f"is {last}, expected more than {name}0, which is {first}")
    return first, last
