"""Exercises 9, 10, 11 and 20: projections, heads that are split and merged, causal multi-head attention, key heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from clearhead.calls import attention
from clearhead.doctor.forms import merge, split
from clearhead.doctor.mistake import Mistake
from clearhead.doctor.mistakes import CATALOGUE
from clearhead.doctor.variants import RIGHT, Variant, broken, broken_causals, causal_allowed, compute
from clearhead.learning.exercise import Case, Exercise, Function, Slip, drawn, slips
from clearhead.learning.tasks.attending import by_variant

Arrays = np.ndarray


def _crossing() -> list[Case]:
    """x (T, E), memory (S, F), and projections to D and Dv features."""
    found = []
    small = ((1, 1, 1, 1, 1, 1), (1, 2, 1, 1, 1, 1), *[(1, 2, 2, 2, 1, 1)] * 4, (2, 3, 2, 2, 2, 2))
    large = ((3, 5, 7, 11, 4, 2), (3, 3, 5, 5, 5, 5))  # in the last everything fits everything: mistakes do not raise
    for seed, (queries, keys, width, other, features, out) in enumerate((*small, *large)):
        shapes = ((queries, width), (keys, other), (width, features), (other, features), (other, out))
        arrays = drawn(90 + seed, *shapes, whole=seed < 4)
        found.append(dict(zip(("x", "memory", "w_q", "w_k", "w_v"), arrays, strict=True)))
    one = np.ones((1, 1))
    far = {"x": 1000 * one, "memory": np.array([[1.0], [2.0]]), "w_q": one, "w_k": one, "w_v": one}
    return [*found[:2], far, *found[2:]]


def _crossed(asks: str = "x", offers: str = "m", passes: str = "m", scale: str = "features") -> Callable[..., Arrays]:
    """Cross-attention whose queries, keys and values come from x or from the memory."""

    def made(x: Arrays, memory: Arrays, w_q: Arrays, w_k: Arrays, w_v: Arrays) -> Arrays:
        side = {"x": x, "m": memory}
        q, k, v = side[asks] @ w_q, side[offers] @ w_k, side[passes] @ w_v
        divisor = {"features": q.shape[-1], "model": x.shape[-1], "none": 1.0, "memory": memory.shape[-1]}[scale]
        return np.asarray(attention(q, k, v, scale=1 / math.sqrt(divisor)))

    return made


def _unshifted(q: Arrays, k: Arrays, v: Arrays) -> Arrays:
    """Attention whose exponentials are taken as they come, and overflow where scores are large."""
    weights = np.exp(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))
    return weights / weights.sum(-1, keepdims=True) @ v


def _exchanged(x: Arrays, memory: Arrays, w_q: Arrays, w_k: Arrays, w_v: Arrays) -> Arrays:
    return np.asarray(attention(x @ w_q, memory @ w_v, memory @ w_k))


def _bare(x: Arrays, memory: Arrays, w_q: Arrays, w_k: Arrays, w_v: Arrays) -> Arrays:
    return np.asarray(attention(x, memory, memory))


ASKED = Mistake(
    "queries-from-the-memory",
    "the queries come from the memory",
    "x asks, and the memory answers: there is an output for each position of x",
    "the result has as many rows as x",
)
ITSELF = Mistake(
    "attends-to-itself",
    "keys and values come from x: it is self-attention",
    "the memory has no influence on the result",
    "say of each projection what it is a projection of",
)
HALF = Mistake(
    "memory-used-in-part",
    "only one of keys and values comes from the memory",
    "a key and its value belong to the same position",
    "say of each projection what it is a projection of",
)
WIDTH = Mistake(
    "scale-d-model",
    "the scores are divided by the root of the width of x or of the memory",
    "a query has as many features as its projection gives it, and these are multiplied",
    "print the shape of the queries, once they are projected",
)
BARE = Mistake(
    "projections-forgotten",
    "the projections are not used",
    "x and memory are compared as they are, which works only where they happen to have as many features",
    "there is a matrix for each of queries, keys and values",
)
CROSS = Exercise(
    9,
    "cross-attention",
    "09_cross_attention",
    """Write cross_attention(x, memory, w_q, w_k, w_v): the positions of x attend to those of memory. x has the shape
(queries, width), memory (keys, other width); queries are x @ w_q, and so on. The result has a row for each
position of x. It is scaled by the features of a query, which is not the width of x.
Scores may be large.""",
    "who asks is projected to queries; who is asked, to keys and to values",
    functions=(
        Function(
            "cross_attention", ("x", "memory", "w_q", "w_k", "w_v"), _crossed(), _crossing,
            slips(
                (ITSELF, _crossed("x", "x", "x")),
                (ASKED, _crossed("m", "x", "x")),
                (ASKED, _crossed("m", "m", "m")),
                (HALF, _crossed("x", "m", "x")),
                (HALF, _crossed("x", "x", "m")),
                (CATALOGUE["no-scale"], _crossed(scale="none")),
                (WIDTH, _crossed(scale="model")),
                (WIDTH, _crossed(scale="memory")),
                (CATALOGUE["keys-and-values-swapped"], _exchanged),
                (BARE, _bare),
                (
                    CATALOGUE["no-maximum-subtracted"],
                    lambda x, memory, w_q, w_k, w_v: _unshifted(x @ w_q, memory @ w_k, memory @ w_v),
                ),
            ),
        ),
    ),
    notes={"cross_attention": "x (queries, width), memory (keys, other width) → (queries, features of a value)."},
)  # fmt: skip


def _split_cases() -> list[Case]:
    found = []
    for seed, (length, heads, features) in enumerate([(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (3, 5, 2)]):
        (x,) = drawn(110 + seed, (length, heads * features), whole=seed < 4)
        found.append({"x": x, "heads": heads})
    return found


def _merge_cases() -> list[Case]:
    return [{"y": _splitting("transpose")(case["x"], case["heads"])} for case in _split_cases()]


def _splitting(way: str) -> Callable[[Arrays, int], Arrays]:
    return lambda x, heads: split(x[None], heads, way)[0]


def _merging(way: str) -> Callable[[Arrays], Arrays]:
    return lambda y: merge(y[None], way)[0]


FIRST_LEFT = Mistake(
    "heads-not-moved",
    "the heads stand after the positions",
    "a head attends over positions: the last two axes are to be positions and features",
    "exchange two axes",
)
HEADS = Exercise(
    10,
    "split and merge heads",
    "10_multi_head",
    """Write split_heads(x, heads): (positions, heads · features) → (heads, positions, features), where head 0 has
the first features of every position, head 1 the next, and so on. And merge_heads(y), which undoes it.""",
    "a reshape keeps numbers in the order they have in memory; only a transpose changes which axis comes first",
    functions=(
        Function(
            "split_heads", ("x", "heads"), _splitting("transpose"), _split_cases,
            slips(
                (CATALOGUE["heads-split-without-transpose"], _splitting("reshape")),
                (CATALOGUE["heads-split-features-first"], _splitting("features first")),
                (FIRST_LEFT, _splitting("unmoved")),
                (CATALOGUE["heads-in-reverse-order"], lambda x, heads: _splitting("transpose")(x, heads)[::-1]),
            ),
        ),
        Function(
            "merge_heads", ("y",), _merging("transpose"), _merge_cases,
            slips(
                (CATALOGUE["heads-merged-without-transpose"], _merging("reshape")),
                (CATALOGUE["heads-merged-features-first"], _merging("features first")),
                (CATALOGUE["heads-in-reverse-order"], _merging("reversed")),
                (FIRST_LEFT, lambda y: y.swapaxes(0, 1)),
            ),
        ),
    ),
    notes={
        "split_heads": "x (positions, heads · features) → (heads, positions, features).",
        "merge_heads": "y (heads, positions, features) → (positions, heads · features).",
    },
)  # fmt: skip


def _layer_cases() -> list[Case]:
    """x (T, E) and four projections (E, E); the smallest first."""
    found = []
    for seed, (length, heads, features) in enumerate(
        [(1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 2, 2), (5, 3, 2), (3, 3, 4)]
    ):
        width = heads * features
        arrays = drawn(130 + seed, (length, width), *[(width, width)] * 4, whole=seed < 3)
        found.append(dict(zip(("x", "w_q", "w_k", "w_v", "w_o"), arrays, strict=True)) | {"heads": heads})
    big = dict(found[3])
    return [*found, big | {"x": 64 * big["x"]}]


def layered(
    variant: Variant, x: Arrays, w_q: Arrays, w_k: Arrays, w_v: Arrays, w_o: Arrays, heads: int
) -> Arrays | None:
    """Causal multi-head attention by a variant of the formula."""
    strong = math.sqrt(heads) if variant.split == "whole scaled" else 1.0
    q, k, v = (split((x @ w)[None], heads, variant.split) for w in (w_q, w_k, w_v))
    allowed = causal_allowed(variant.causal, q.shape[-2], k.shape[-2], "end")
    found = compute(variant, strong * q, k, v, np.broadcast_to(allowed, (1, 1, *allowed.shape)))
    if found is None:
        return None
    merged = merge(found[0], variant.merge, len(x))[0]
    output = merged if variant.output == "unprojected" else merged @ w_o
    return output + x if variant.added == "queries" else output


def _layer_variants() -> Iterator[Variant]:
    """Every mistake alone, causality among them, then in pairs; those of fused projections do not occur here."""

    def fits(variant: Variant) -> bool:
        return not variant.split.startswith("fused") and variant.added != "values"

    yield Variant(causal="ignored")
    yield from broken_causals(RIGHT)
    yield from filter(fits, broken(RIGHT, True, True))


MULTI_HEAD = Exercise(
    11,
    "causal multi-head attention",
    "10_multi_head",
    """Write multi_head(x, w_q, w_k, w_v, w_o, heads): x, (positions, width), is projected by x @ w_q and so on,
split into heads as in exercise 10, attended to causally in each head, merged, and projected by w_o. All four
matrices are (width, width).""",
    "everything is there: exercises 5, 7 and 10, one after the other; the scale is that of one head",
    functions=(
        Function(
            "multi_head", ("x", "w_q", "w_k", "w_v", "w_o", "heads"),
            lambda x, w_q, w_k, w_v, w_o, heads: layered(RIGHT, x, w_q, w_k, w_v, w_o, heads),
            _layer_cases, by_variant(layered, _layer_variants),
        ),
    ),
    notes={"multi_head": "x (positions, width) → (positions, width), causal, in so many heads."},
)  # fmt: skip


def _group_cases() -> list[Case]:
    found = []
    sizes = ((1, 1, 1, 1, 1, 1), (2, 1, 1, 2, 1, 1), (4, 2, 1, 2, 1, 1), (4, 2, 2, 2, 2, 2), (6, 2, 3, 5, 7, 4))
    for seed, (heads, groups, queries, keys, features, width) in enumerate(sizes):
        shapes = ((heads, queries, features), (groups, keys, features), (groups, keys, width))
        q, k, v = drawn(150 + seed, *shapes, whole=seed < 4)
        found.append({"q": q, "k": k, "v": v})
    large = {"q": np.array([[[1000.0]]]), "k": np.array([[[1.0], [2.0]]]), "v": np.array([[[0.0], [1.0]]])}
    return [*found[:2], large, *found[2:]]


def _grouped(variant: Variant, q: Arrays, k: Arrays, v: Arrays) -> Arrays | None:
    found = compute(variant, q[None], k[None], v[None])
    return None if found is None else found[0][0]


def _of_the_first(q: Arrays, k: Arrays, v: Arrays) -> Arrays:
    return np.asarray(attention(q, k[:1], v[:1]))


def _of_the_mean(q: Arrays, k: Arrays, v: Arrays) -> Arrays:
    return np.asarray(attention(q, k.mean(0, keepdims=True), v.mean(0, keepdims=True)))


ONE_KEY = Mistake(
    "one-key-head-for-all",
    "all query heads share one key head",
    "with two key heads for six query heads, the first three share one and the last three the other",
    "say which key head the last query head uses",
)


def _group_slips() -> Iterator[Slip]:
    yield Slip(ONE_KEY, _of_the_first)
    yield Slip(ONE_KEY, _of_the_mean)
    yield Slip(
        CATALOGUE["no-maximum-subtracted"],
        lambda q, k, v: _unshifted(q, *(np.repeat(one, len(q) // len(k), 0) for one in (k, v))),
    )
    yield from by_variant(_grouped)()


GROUPED = Exercise(
    20,
    "grouped queries",
    "16_grouped",
    """Write grouped_attention(q, k, v): q has the shape (heads, queries, features), k and v (key heads, keys, ·),
fewer heads. Neighbours share: with 6 heads and 2 key heads, heads 0, 1 and 2 use key head 0, and 3, 4 and 5
key head 1.
Scores may be large.""",
    "how many query heads come to one key head is a quotient; neighbours stay together",
    functions=(
        Function("grouped_attention", ("q", "k", "v"), attention, _group_cases, _group_slips),
    ),
    notes={"grouped_attention": "q (heads, queries, features), k, v (key heads, keys, ·) → (heads, queries, width)."},
)  # fmt: skip

EXERCISES = (CROSS, HEADS, MULTI_HEAD, GROUPED)
