"""Exercises 22 and 23: linear attention in O(n), and the backward pass of attention by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from clearhead.approximations.approximating import approximate
from clearhead.approximations.linear_transformer import linear
from clearhead.calls import attention, gradients
from clearhead.core.formula import softmax
from clearhead.core.masks import causal
from clearhead.doctor.mistake import Mistake
from clearhead.learning.exercise import Case, Exercise, Function, drawn, slips
from clearhead.learning.memory import whole_matrix
from clearhead.learning.tasks.merging import OVER

Arrays = np.ndarray


def _positions() -> list[Case]:
    found = []
    for seed, (length, features, width) in enumerate([(1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 2, 1), (7, 5, 3)]):
        shapes = ((length, features), (length, features), (length, width))
        q, k, v = drawn(270 + seed, *shapes, whole=seed < 4)
        found.append({"q": q, "k": k, "v": v})
    return found


def _linear(kind: str = "") -> Callable[[Arrays, Arrays, Arrays], Arrays]:
    """Linear attention with its matrix, as somebody has it who gets one thing wrong."""

    def features(x: Arrays) -> Arrays:
        below = {"elu": np.exp(x) - 1, "relu": np.zeros_like(x), "none": x}.get(kind, np.exp(x))
        return np.where(x > 0, x + (0.0 if kind in ("elu", "relu", "none") else 1.0), below)

    def made(q: Arrays, k: Arrays, v: Arrays) -> Arrays:
        if kind == "softmax":
            return np.asarray(attention(q, k, v, mask=causal()))
        weights = features(q) @ features(k).T
        if kind == "exponential":
            weights = np.exp(q @ k.T)
        weights = weights if kind == "open" else weights * np.tri(len(q), k=-1 if kind == "strict" else 0)
        if kind == "undivided":
            return weights @ v
        if kind == "by count":
            return weights @ v / np.arange(1, len(q) + 1)[:, None]
        if kind == "by all":
            return weights @ v / (features(q) @ features(k).sum(0))[:, None]
        return weights @ v / weights.sum(-1, keepdims=True)

    return made


UNDIVIDED = Mistake(
    "no-denominator",
    "the sums are not divided by the sum of weights",
    "the output then grows with the length",
    "a second sum runs along, of φ(k) alone",
)
BY_ALL = Mistake(
    "denominator-sees-the-future",
    "the denominator sums over all keys, also those to come",
    "what is divided by has to be the sum of the weights that were used",
    "both sums grow together",
)
OPEN = Mistake(
    "causal-ignored",
    "every position sees all of them",
    "the sums run over all keys at once",
    "add a key to the sums, then answer its position, and go on",
)
STRICT = Mistake(
    "causal-excludes-itself",
    "a position does not see itself",
    "it is answered before its own key is added; the first one is 0 / 0",
    "add first, then answer",
)
FEATURES = Mistake(
    "another-feature-map",
    "φ is another function",
    "it is x + 1 above 0 and eˣ below, which is never negative, so that no weight is",
    "φ(0) = 1, φ(1) = 2, φ(−1) = 0.3679",
)
EXACT = Mistake(
    "softmax-in-place-of-features",
    "that is attention with its exponential",
    "an exponential of q · k cannot be taken apart into what belongs to q and what to k; φ(q) · φ(k) can",
    "there is no softmax in it",
)
LINEAR = Exercise(
    22,
    "linear attention, causal",
    "20_linear",
    """Write linear_attention(q, k, v): where attention has e^(q · k), it has φ(q) · φ(k), with φ(x) = x + 1 for x >
0 and eˣ otherwise; no scale. The weights of a position, over itself and what came before, are divided by
their sum. No matrix of positions × positions is needed: what came before fits into sums of fixed size. Memory
is watched.""",
    "Σ φ(k) vᵀ and Σ φ(k), over the positions so far, are all that a query has to know",
    functions=(
        Function(
            "linear_attention", ("q", "k", "v"),
            lambda q, k, v: approximate(q, k, v, linear(eps=0.0), mask=causal()), _positions,
            slips(
                (UNDIVIDED, _linear("undivided")),
                (UNDIVIDED, _linear("by count")),
                (BY_ALL, _linear("by all")),
                (OPEN, _linear("open")),
                (STRICT, _linear("strict")),
                *((FEATURES, _linear(kind)) for kind in ("elu", "relu", "none")),
                (EXACT, _linear("softmax")),
                (EXACT, _linear("exponential")),
            ),
            also=whole_matrix(),
        ),
    ),
    notes={"linear_attention": "q, k (positions, features), v (positions, width) → (positions, width), causal."},
)  # fmt: skip


def _given_back() -> list[Case]:
    found = []
    sizes = ((1, 1, 1, 1), (1, 2, 1, 1), (2, 2, 2, 1), (2, 3, 2, 2), (3, 5, 7, 2))
    for seed, (queries, keys, features, width) in enumerate(sizes):
        shapes = ((queries, features), (keys, features), (keys, width), (queries, width))
        arrays = drawn(290 + seed, *shapes, whole=seed < 4)
        found.append(dict(zip(("q", "k", "v", "d_out"), arrays, strict=True)))
    unit = np.ones((1, 1))
    large = {"q": 1000 * unit, "k": np.array([[1.0], [1.0]]), "v": np.array([[0.0], [2.0]]), "d_out": unit}
    return [*found[:3], large, *found[3:]]


def _backward(kind: str = "") -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    def made(q: Arrays, k: Arrays, v: Arrays, d_out: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        scale = 1.0 / math.sqrt(q.shape[-1])
        scores = scale * q @ k.T
        weights = softmax(scores)[0]
        if kind == "unshifted":
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        d_weights = d_out @ v.T
        inner = (weights * d_weights).sum(-2 if kind == "columns" else -1, keepdims=True)
        if kind == "mean":
            inner = d_weights.mean(-1, keepdims=True)
        d_scores = weights * (d_weights - (0.0 if kind == "diagonal" else inner))
        if kind == "weights forgotten":
            d_scores = d_weights - inner
        if kind == "no softmax":
            d_scores = d_weights
        by = {"unscaled": 1.0, "twice": scale * scale}.get(kind, scale)
        dq, dk, dv = by * d_scores @ k, by * d_scores.T @ q, weights.T @ d_out
        if kind == "sign":
            dq, dk = -dq, -dk
        if kind == "swapped":
            dq, dk = dk, dq
        if kind == "values":
            dv = (scale * q @ k.T).T @ d_out
        return dq, dk, dv

    return made


def _gradients(q: Arrays, k: Arrays, v: Arrays, d_out: Arrays) -> tuple[Arrays, Arrays, Arrays]:
    dq, dk, dv = gradients(q, k, v, d_out)[:3]
    return np.asarray(dq), np.asarray(dk), np.asarray(dv)


def _terms(q: Arrays, k: Arrays, v: Arrays, d_out: Arrays) -> tuple[Arrays, Arrays, Arrays]:
    """A score's gradient is a difference of two sums that nearly cancel: this is how large they are."""
    scale = 1.0 / math.sqrt(q.shape[-1])
    weights = softmax(scale * q @ k.T)[0]
    d_weights = np.abs(d_out) @ np.abs(v).T
    sizes = scale * weights * (d_weights + (weights * d_weights).sum(-1, keepdims=True))
    return sizes @ np.abs(k), sizes.T @ np.abs(q), weights.T @ np.abs(d_out)


DIAGONAL = Mistake(
    "softmax-treated-as-one-number",
    "of the softmax's derivative only a part is there",
    "raising one score lowers all other weights of its row, since they sum to 1: a score's gradient is relative to the"
    " row's mean",
    "with one key the weight is always 1, and dq and dk are 0",
)
COLUMNS = Mistake(
    "mean-over-queries",
    "the mean is taken over the queries, not over the keys",
    "a row of weights sums to 1, and a column does not",
    "the softmax runs over keys, and so does its derivative",
)
UNWEIGHTED = Mistake(
    "mean-not-weighted",
    "what is subtracted is not the mean under the weights",
    "keys with more weight count more in it",
    "multiply with the weights before you sum",
)
NO_WEIGHTS = Mistake(
    "weights-forgotten",
    "the gradient of a score is not multiplied with its weight",
    "a key without weight cannot change the output",
    "each score's gradient has its weight as a factor",
)
NO_SCALE = Mistake(
    "scale-forgotten",
    "dq and dk lack the scale",
    "the scores are q · k times 1/√d, and so are their derivatives",
    "the factor of the forward pass comes back once",
)
TWICE = Mistake(
    "scale-twice",
    "dq and dk have the scale twice",
    "it is a factor of the scores, and comes back once",
    "take it either with the scores' gradient or at the end",
)
SIGN = Mistake(
    "gradients-negated",
    "dq and dk have the wrong sign",
    "what is subtracted is the mean, from each weight's gradient",
    "follow the sign through the last step",
)
SWAPPED = Mistake(
    "gradients-swapped",
    "dq and dk stand in each other's place",
    "the gradient by q has the shape of q",
    "compare the shapes",
)
VALUES = Mistake(
    "values-by-scores",
    "dv is made with scores, not with weights",
    "the output is weights · v: its derivative by v is the weights",
    "transpose what v was multiplied with",
)
BACKWARD = Exercise(
    23,
    "the backward pass",
    "21_gradients",
    """The output of attention is o = softmax(q kᵀ / √d) v. Write backward(q, k, v, d_out): the gradients (dq, dk,
dv) of the sum of o · d_out, by hand: d_out has the shape of the output, and no library differentiates for
you.""",
    "backwards, step by step: dv; the gradient by the weights; by the scores, through the softmax; dq and dk",
    functions=(
        Function(
            "backward", ("q", "k", "v", "d_out"), _gradients, _given_back,
            slips(
                (DIAGONAL, _backward("diagonal")),
                (COLUMNS, _backward("columns")),
                (UNWEIGHTED, _backward("mean")),
                (NO_WEIGHTS, _backward("weights forgotten")),
                (DIAGONAL, _backward("no softmax")),
                (NO_SCALE, _backward("unscaled")),
                (TWICE, _backward("twice")),
                (SIGN, _backward("sign")),
                (SWAPPED, _backward("swapped")),
                (VALUES, _backward("values")),
                (OVER, _backward("unshifted")),
            ),
            gives=("dq", "dk", "dv"), terms=_terms,
        ),
    ),
    notes={"backward": "q, k, v and d_out, which has the output's shape → (dq, dk, dv)."},
)  # fmt: skip

EXERCISES = (LINEAR, BACKWARD)
