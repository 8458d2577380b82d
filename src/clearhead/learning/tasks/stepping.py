"""Exercises 18 and 19: attention that holds a few keys at a time, and one that adds a token to a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from clearhead.calls import attention
from clearhead.doctor.by_block import in_blocks
from clearhead.doctor.mistake import Mistake
from clearhead.doctor.mistakes import BY_SETTING, CATALOGUE
from clearhead.doctor.variants import BLOCK_SETTINGS, LOST, RIGHT, Variant, broken
from clearhead.learning.exercise import Case, Exercise, Function, Slip, drawn, slips
from clearhead.learning.memory import whole_matrix
from clearhead.learning.tasks.attending import attended, by_variant
from clearhead.learning.tasks.merging import OVER, STARTS

Arrays = np.ndarray


def _tiles() -> list[Case]:
    found = []
    small = ((1, 2, 1, 1, 1), *[(1, 3, 1, 1, 2)] * 4, *[(2, 4, 2, 2, 2)] * 2)
    sizes = (*small, (2, 5, 2, 2, 3), (7, 11, 3, 2, 4))
    for seed, (queries, keys, features, width, tile) in enumerate(sizes):
        q, k, v = drawn(230 + seed, (queries, features), (keys, features), (keys, width), whole=seed < len(small))
        found.append({"q": q, "k": k, "v": v, "tile": tile})
    large = {"q": np.array([[1000.0]]), "k": np.array([[1.0], [2.0], [0.0]]), "v": np.array([[0.0], [1.0], [2.0]])}
    below = large | {"k": np.array([[-1.0], [-2.0], [-3.0]])}
    return [*found[:3], large | {"tile": 2}, below | {"tile": 2}, *found[3:]]


def _tiled(variant: Variant, q: Arrays, k: Arrays, v: Arrays, tile: int) -> Arrays | None:
    if variant.blocks == "right":
        return attended(variant, q, k, v)
    scores = (q @ k.T / math.sqrt(q.shape[-1]))[None, None]
    found = in_blocks(variant.blocks, tile, scores, v[None, None], None)
    # with one tile there is nothing to be forgotten
    return np.asarray(attention(q, k, v)) if found is None else found[0][0, 0]


def _from_zero(q: Arrays, k: Arrays, v: Arrays, tile: int) -> Arrays:
    scores = q @ k.T / math.sqrt(q.shape[-1])
    fresh = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), 0.0))
    return (fresh @ v) / fresh.sum(-1, keepdims=True)


def _unshifted(q: Arrays, k: Arrays, v: Arrays, tile: int) -> Arrays:
    fresh = np.exp(q @ k.T / math.sqrt(q.shape[-1]))
    return (fresh @ v) / fresh.sum(-1, keepdims=True)


def _tile_slips() -> Iterator[Slip]:
    yield Slip(OVER, _unshifted)
    yield Slip(STARTS, _from_zero)
    for setting in (*LOST, *BLOCK_SETTINGS):
        variant = Variant(blocks=setting)
        yield Slip(BY_SETTING["blocks", setting], lambda *given, variant=variant: _tiled(variant, *given))
    yield from by_variant(_tiled, lambda: broken(RIGHT, False))()


BY_TILES = Exercise(
    18,
    "O(n) memory, by tiles",
    "14_flash",
    """Write attention_by_tiles(q, k, v, tile): attention of one head, with keys taken `tile` at a time, so that no
array of queries × keys is ever held. The number of keys need not be a multiple of tile. It is run with 1,024
positions while its memory is watched.""",
    "exercise 16 in rows: a running maximum and a running sum for each query, and a running output beside them",
    functions=(
        Function(
            "attention_by_tiles", ("q", "k", "v", "tile"), lambda q, k, v, tile: attention(q, k, v), _tiles,
            _tile_slips,
            also=whole_matrix(32),
        ),
    ),
    notes={"attention_by_tiles": "q (queries, features), k and v (keys, ·), `tile` keys at a time → (queries, width)."},
)  # fmt: skip


def _caches() -> list[Case]:
    found = []
    for seed, (heads, held, features) in enumerate([(1, 0, 1), (1, 1, 1), (1, 2, 2), (2, 3, 2), (3, 5, 7)]):
        one, many = (heads, features), (heads, held, features)
        arrays = drawn(250 + seed, one, one, one, many, many, whole=seed < 4)
        found.append(dict(zip(("q", "k", "v", "keys", "values"), arrays, strict=True)))
    unit = np.ones((1, 1))
    large = {"q": 1000 * unit, "k": unit, "v": unit, "keys": 2 * unit[None], "values": 3 * unit[None]}
    return [*found[:2], large, *found[2:]]


def _decoded(kind: str = "") -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    def made(q: Arrays, k: Arrays, v: Arrays, keys: Arrays, values: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        first = kind == "first"
        grown = [np.concatenate([x[:, None], y] if first else [y, x[:, None]], 1) for x, y in ((k, keys), (v, values))]
        seen = (keys, values) if kind == "unseen" else (k[:, None], v[:, None]) if kind == "alone" else grown
        scores = np.einsum("hd,hnd->hn", q, seen[0]) / (1.0 if kind == "unscaled" else math.sqrt(q.shape[-1]))
        weights = np.exp(scores - (0.0 if kind == "unshifted" else scores.max(-1, keepdims=True)))
        weights /= weights.sum(-1, keepdims=True)
        output = np.einsum("hn,hnd->hd", weights, seen[1])
        if kind == "mean":
            output = np.broadcast_to(output.mean(0), output.shape)
        left = (keys, values) if kind == "not kept" else grown
        return output, left[0], left[1]

    return made


UNSEEN = Mistake(
    "new-token-unseen",
    "the new token does not see itself",
    "its own key and value belong to what it attends to; with an empty cache there is nothing else",
    "let the cache grow before attending",
)
NOT_KEPT = Mistake(
    "cache-not-grown",
    "the output is right, and the caches come back as they were",
    "the next step would not know of this token",
    "return what was attended to",
)
IN_FRONT = Mistake(
    "cache-grown-at-the-front",
    "the new token is put before the others",
    "the output does not notice; a mask or a window of the next step would",
    "the last position is the newest",
)
ALONE = Mistake(
    "cache-ignored",
    "only the new token is attended to",
    "what came before has no influence",
    "the scores have a number for each token so far",
)
DECODE = Exercise(
    19,
    "a decode step with a cache",
    "15_cache",
    """One token is generated: its q, k and v have the shape (heads, features); keys and values of all tokens before
it lie in caches (heads, tokens, features), which may be empty. Write decode_step(q, k, v, keys, values):
return (output, keys, values): attention of the new token over all tokens and itself, (heads, features), and
the caches with it at their end. The caches that were handed over stay as they are.
Scores may be large.""",
    "one query a head: the scores of a head are one row",
    functions=(
        Function(
            "decode_step", ("q", "k", "v", "keys", "values"), _decoded(), _caches,
            slips(
                (UNSEEN, _decoded("unseen")),
                (NOT_KEPT, _decoded("not kept")),
                (IN_FRONT, _decoded("first")),
                (ALONE, _decoded("alone")),
                (CATALOGUE["no-scale"], _decoded("unscaled")),
                (OVER, _decoded("unshifted")),
            ),
            gives=("output", "keys", "values"),
        ),
    ),
    notes={"decode_step": "q, k, v (heads, features), caches (heads, tokens, features) → (output, keys, values)."},
)  # fmt: skip

EXERCISES = (BY_TILES, DECODE)
