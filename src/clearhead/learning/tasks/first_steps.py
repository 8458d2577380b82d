"""Exercises 1 to 6: one row by hand, scores, the scale, the softmax, attention, and where its output lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from clearhead.calls import attention
from clearhead.core.formula import softmax
from clearhead.doctor.mistake import Mistake
from clearhead.doctor.mistakes import CATALOGUE
from clearhead.learning.exercise import Blank, Case, Exercise, Function, Guess, drawn, slips
from clearhead.learning.tasks.attending import attended, by_variant

QUERY = np.array([2.0, 0.0, 2.0, 0.0])
KEYS = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]])
DOTS = KEYS @ QUERY
ORDER = Mistake(
    "another-order",
    "the weights stand in another order",
    "the first weight belongs to the first key",
    "begin with the key that stands first in the text",
)


def _weights(scores: np.ndarray) -> np.ndarray:
    return np.asarray(softmax(scores[None])[0][0])


ROW = _weights(DOTS / 2)
ONE_ROW = Exercise(
    1,
    "one row by hand",
    "01_two_meanings",
    """A query q = [2, 0, 2, 0] looks at three keys:
    a = [1, 0, 0, 0]    b = [0, 1, 0, 1]    c = [1, 0, 1, 0]
How much weight does each of them get? Multiply q with each key, divide by √4, take e to the power of each,
and divide by their sum. Type the weights of a, b and c, with two decimals or more.""",
    "each product of q with a key is one number; the three weights are positive and sum to 1",
    blanks=(Blank("a", float(ROW[0])), Blank("b", float(ROW[1])), Blank("c", float(ROW[2]))),
    guesses=tuple(
        Guess(mistake, tuple(map(float, answers)))
        for mistake, answers in (
            (CATALOGUE["no-scale"], _weights(DOTS)),
            (CATALOGUE["scale-d"], _weights(DOTS / 4)),
            (CATALOGUE["scale-inverted"], _weights(DOTS * 2)),
            (CATALOGUE["no-softmax"], DOTS / 2),
            (CATALOGUE["no-softmax"], DOTS),
            (CATALOGUE["normalised-by-sum"], DOTS / DOTS.sum()),
            (CATALOGUE["no-denominator"], np.exp(DOTS / 2)),
            (CATALOGUE["only-the-largest"], np.array([0.0, 0.0, 1.0])),
            (ORDER, ROW[::-1]),
            (CATALOGUE["scores-negated"], _weights(-DOTS / 2)),
        )
    ),
    explained=lambda: (
        "The products are 2, 0 and 4, half of them 1, 0 and 2. e¹, e⁰ and e² are 2.718, 1 and 7.389, which sum to\n"
        f"11.107: so the weights are {', '.join(f'{w:.4f}' for w in ROW)}. b shares nothing with q and still has 9%."
    ),
)


def pairs() -> list[Case]:
    """Queries and keys, from one number each to distinct primes."""
    found = []
    for seed, (queries, keys, features) in enumerate([(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (2, 3, 4)]):
        q, k = drawn(seed, (queries, features), (keys, features), whole=True)
        found.append({"q": q, "k": k})
    for seed, (queries, keys, features) in enumerate([(3, 5, 7), (5, 5, 5)]):
        q, k = drawn(10 + seed, (queries, features), (keys, features))
        found.append({"q": q, "k": k})
    return found


TURNED = Mistake(
    "queries-and-keys-swapped",
    "the matrix is transposed: keys on rows, queries on columns",
    "row i has to hold what query i makes of every key",
    "the shape is (queries, keys)",
)
UNTURNED = Mistake(
    "keys-not-transposed",
    "the keys are not transposed",
    "it runs only where there are as many keys as features, and then compares queries with columns of k",
    "the inner sizes of a product of matrices are what is summed over: the features",
)
EARLY = Mistake(
    "scaled-already",
    "the products are scaled",
    "here they are wanted as they are; the scale comes in the next exercise",
    "leave the division out",
)
PRODUCTS = Mistake(
    "products-not-summed",
    "the products are not summed over the features",
    "a dot product is one number for a query and a key: the sum of the products of their features",
    "the features are the axis that goes away",
)
DISTANCE = Mistake(
    "distance-in-place-of-product",
    "the distance between query and key is computed, not their product",
    "a key that is long and points the same way has a large product and is far away",
    "multiply and sum; subtract nothing",
)
_SCORES: tuple[tuple[Mistake, Callable[..., np.ndarray]], ...] = (
    (TURNED, lambda q, k: k @ q.T),
    (EARLY, lambda q, k: q @ k.T / math.sqrt(q.shape[-1])),
    (UNTURNED, lambda q, k: q @ k),
    (CATALOGUE["keys-reshaped"], lambda q, k: q @ k.reshape(k.shape[::-1])),
    (CATALOGUE["scores-negated"], lambda q, k: -q @ k.T),
    (
        CATALOGUE["cosine-in-place-of-product"],
        lambda q, k: (q @ k.T) / np.linalg.norm(q, axis=-1)[:, None] / np.linalg.norm(k, axis=-1),
    ),
    (PRODUCTS, lambda q, k: q[:, None] * k[None]),
    (DISTANCE, lambda q, k: np.linalg.norm(q[:, None] - k[None], axis=-1)),
    (DISTANCE, lambda q, k: ((q[:, None] - k[None]) ** 2).sum(-1)),
    (CATALOGUE["queries-as-keys"], lambda q, k: q @ q.T),
    (CATALOGUE["no-softmax"], lambda q, k: softmax(q @ k.T)[0]),
)
TOO_FAR = Mistake(
    "softmax-already",
    "the softmax is taken already",
    "here the scores themselves are wanted",
    "stop one step earlier",
)
SCORES = Exercise(
    2,
    "dot-product scores",
    "02_dot_products",
    """Write scores(q, k): how well each query matches each key, as a dot product. q has the shape (queries,
features), k (keys, features); the result (queries, keys), where row i, column j is q[i] · k[j].""",
    "the result has a row for each query and a column for each key",
    functions=(
        Function(
            "scores", ("q", "k"), lambda q, k: q @ k.T, pairs,
            slips(*_SCORES[:-1], (TOO_FAR, _SCORES[-1][1])),
        ),
    ),
    notes={"scores": "q (queries, features) and k (keys, features) → (queries, keys)."},
)  # fmt: skip


def _divided(by: Callable[[np.ndarray, np.ndarray], float]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda q, k: q @ k.T / by(q, k)


SCALED = Exercise(
    3,
    "scaled scores",
    "03_scaling",
    """Write scaled_scores(q, k): the dot products of exercise 2, divided by the square root of the number of
features. q has the shape (queries, features), k (keys, features); the result (queries, keys).""",
    "the number of features is the length of one query, and of one key",
    functions=(
        Function(
            "scaled_scores", ("q", "k"), _divided(lambda q, k: math.sqrt(q.shape[-1])), pairs,
            slips(
                (CATALOGUE["no-scale"], lambda q, k: q @ k.T),
                (CATALOGUE["scale-d"], _divided(lambda q, k: q.shape[-1])),
                (CATALOGUE["scale-keys"], _divided(lambda q, k: math.sqrt(k.shape[-2]))),
                (CATALOGUE["scale-queries"], _divided(lambda q, k: math.sqrt(q.shape[-2]))),
                (CATALOGUE["scale-inverted"], _divided(lambda q, k: 1 / math.sqrt(q.shape[-1]))),
                (TURNED, lambda q, k: k @ q.T / math.sqrt(q.shape[-1])),
                (UNTURNED, lambda q, k: q @ k / math.sqrt(q.shape[-1])),
                (TOO_FAR, lambda q, k: softmax(q @ k.T / math.sqrt(q.shape[-1]))[0]),
                (CATALOGUE["scores-negated"], lambda q, k: -q @ k.T / math.sqrt(q.shape[-1])),
            ),
        ),
    ),
    notes={"scaled_scores": "q (queries, features) and k (keys, features) → (queries, keys), scaled."},
)  # fmt: skip


def rows_of_scores() -> list[Case]:
    """Rows of scores: small, far above 0, far apart from one another, hidden, and of more axes."""
    small = ([[0.0, 1.0]], [[0.0, 1.0], [2.0, 0.0]], [[1.0, 0.0, 2.0]])
    hard = ([[1000.0, 999.0]], [[0.0, 1.0], [1000.0, 1001.0]], [[0.0, -np.inf, 1.0]], [[-1000.0, -1001.0]])
    drawn_ones = drawn(30, (3, 5), (2, 3, 7))
    return [{"x": np.array(x)} for x in (*small, *hard)] + [{"x": x} for x in drawn_ones]


def _softmax(shift: str, axis: int | tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    def made(x: np.ndarray) -> np.ndarray:
        peak = {"row": x.max(-1, keepdims=True), "whole": x.max(), "none": np.float64(0.0)}[shift]
        shifted = np.exp(x - peak)
        return shifted / shifted.sum(axis if axis != () else None, keepdims=axis != ())

    return made


OTHER_AXIS = Mistake(
    "softmax-over-another-axis",
    "the softmax runs over another axis than the last",
    "each row is to sum to 1, and here the columns do",
    "say which axis is summed over, and keep it so that the division fits",
)
LOGARITHM = replace(CATALOGUE["logarithm-of-softmax"], title="the logarithm of the softmax is returned")
SOFTMAX = Exercise(
    4,
    "a softmax that never overflows",
    "04_softmax",
    """Write softmax(x): along the last axis, e to the power of each number, divided by the sum of these. x may have
any number of axes, and may hold numbers such as 1000, whose exponential no float holds; −∞ is a score that is
hidden, and gets 0. Every row has at least one number above −∞.""",
    "a softmax does not change when the same number is added to all scores of a row",
    functions=(
        Function(
            "softmax", ("x",), lambda x: softmax(x)[0], rows_of_scores,
            slips(
                (CATALOGUE["no-maximum-subtracted"], _softmax("none", -1)),
                (CATALOGUE["maximum-of-the-whole-matrix"], _softmax("whole", -1)),
                *((OTHER_AXIS, _softmax(shift, -2)) for shift in ("row", "whole", "none")),
                *((OTHER_AXIS, _softmax(shift, 0)) for shift in ("row", "whole", "none")),
                *((CATALOGUE["softmax-over-everything"], _softmax(shift, ())) for shift in ("row", "whole", "none")),
                (CATALOGUE["no-denominator"], lambda x: np.exp(x - x.max(-1, keepdims=True))),
                (CATALOGUE["no-denominator"], np.exp),
                (LOGARITHM, lambda x: np.log(softmax(x)[0])),
                (CATALOGUE["softmax-twice"], lambda x: softmax(softmax(x)[0])[0]),
            ),
        ),
    ),
    notes={"softmax": "x (…, n) → the same shape; every row along the last axis sums to 1."},
)  # fmt: skip


def problems() -> list[Case]:
    """Queries, keys and values of one head, and one whose scores no exponential holds."""
    found = []
    for seed, (queries, keys, features, width) in enumerate([(1, 1, 1, 1), (1, 2, 1, 1), (2, 2, 2, 1), (2, 2, 2, 2)]):
        q, k, v = drawn(50 + seed, (queries, features), (keys, features), (keys, width), whole=True)
        found.append({"q": q, "k": k, "v": v})
    q, k, v = drawn(60, (3, 7), (5, 7), (5, 2))
    return [*found, {"q": np.array([[1000.0]]), "k": np.array([[1.0], [2.0]]), "v": np.array([[0.0], [1.0]])},
            {"q": q, "k": k, "v": v}, {"q": 64 * q, "k": 64 * k, "v": v}]  # fmt: skip


ATTENTION = Exercise(
    5,
    "scaled dot-product attention",
    "05_weighted_sum",
    """Write attention(q, k, v): scaled scores, their softmax over the keys, and with these weights the mean of the
values. q has the shape (queries, features), k (keys, features), v (keys, width); the result (queries, width).
The weights may be returned beside it. Scores may be large, as in exercise 4.""",
    "exercises 3 and 4 give the weights; one more product gives the output",
    functions=(
        Function("attention", ("q", "k", "v"), attention, problems, by_variant(attended), doctor=True),
    ),
    notes={"attention": "q (queries, features), k (keys, features), v (keys, width) → (queries, width)."},
)  # fmt: skip

OUTSIDE = Mistake(
    "outside-the-values",
    "no weights reach that point",
    "weights are positive and sum to 1: an output is a mixture, and never lies outside of what is mixed",
    "draw the three values and the edges between them",
)
CORNER = Mistake(
    "values-not-weighted",
    "the values are added up, or averaged with equal weights",
    "each value counts as much as its weight says",
    "multiply each value with its weight first",
)
WEIGHTS = Mistake(
    "weights-not-one",
    "the weights do not sum to 1",
    "weights of attention always do",
    "what is not on b and c is on a",
)
GEOMETRY = Exercise(
    6,
    "where the output lies",
    "06_geometry",
    """Three values lie in a plane: a = (0, 0), b = (4, 0), c = (0, 4).
1. The weights are 0.5, 0.25 and 0.25. Where is the output? Type x and y.
2. Which weights put the output at (1, 2)? Type those of a, b and c.
3. Can any weights put it at (3, 3)? Type yes or no. Six answers in all, such as: 0 0 1 0 0 yes""",
    "b alone gives x, c alone gives y, and what is left of 1 is on a",
    blanks=(
        Blank("x", 1.0), Blank("y", 1.0), Blank("a", 0.25), Blank("b", 0.25), Blank("c", 0.5), Blank("reached", "no"),
    ),
    guesses=(
        Guess(OUTSIDE, (1.0, 1.0, 0.25, 0.25, 0.5, "yes")),
        Guess(CORNER, (4.0, 4.0, None, None, None, None)),
        Guess(CORNER, (4 / 3, 4 / 3, None, None, None, None)),
        Guess(WEIGHTS, (1.0, 1.0, 0.0, 0.25, 0.5, None)),
        Guess(WEIGHTS, (1.0, 1.0, 0.0, 1.0, 2.0, None)),
        Guess(replace(ORDER, why="the first weight belongs to a"), (1.0, 1.0, 0.5, 0.25, 0.25, None)),
        Guess(replace(ORDER, why="b moves the output along x, c along y"), (1.0, 1.0, 0.25, 0.5, 0.25, None)),
    ),
    explained=lambda: (
        "0.5 · (0, 0) + 0.25 · (4, 0) + 0.25 · (0, 4) = (1, 1). For (1, 2), b has 1/4 and c 2/4, and a the rest.\n"
        "(3, 3) would take 3/4 of b and 3/4 of c, which is more than 1: the output stays inside the triangle."
    ),
)  # fmt: skip

EXERCISES = (ONE_ROW, SCORES, SCALED, SOFTMAX, ATTENTION, GEOMETRY)
