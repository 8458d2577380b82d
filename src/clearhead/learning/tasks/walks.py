"""Exercises 24 and 25: attention as a walk, and whether its weights explain anything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from clearhead.core.formula import softmax
from clearhead.doctor.mistake import Mistake
from clearhead.learning.exercise import Case, Exercise, Function, drawn, slips
from clearhead.measure.markov import chain

Arrays = np.ndarray


def _chances() -> list[Case]:
    found = [{"weights": np.array(rows)} for rows in ([[1.0]], [[0.5, 0.5], [0.25, 0.75]], [[0.0, 1.0], [0.5, 0.5]])]
    for seed, size in enumerate((3, 5, 7)):
        (scores,) = drawn(310 + seed, (size, size))
        # in 1024ths, so that rows sum to exactly 1 in every precision
        weights = np.floor(1024 * softmax(2 * scores)[0]) / 1024
        weights[np.arange(size), weights.argmax(-1)] += 1 - weights.sum(-1)
        found.append({"weights": weights})
    return found


def _settled(weights: Arrays) -> Arrays:
    return np.asarray(chain(weights).stationary())


def _walked(steps: int, first: bool = False) -> Callable[[Arrays], Arrays]:
    def made(weights: Arrays) -> Arrays:
        start = np.eye(len(weights))[0] if first else np.full(len(weights), 1.0 / len(weights))
        return start @ np.linalg.matrix_power(weights, steps)

    return made


FORWARD = Mistake(
    "the-other-side",
    "the vector stands on the other side: A p, not p A",
    "rows of A sum to 1, so A leaves a vector of equal numbers as it is, whatever the weights are",
    "what a position receives comes down its column",
)
SHORT = Mistake(
    "not-settled",
    "the walk was stopped before it had settled",
    "after one step, or a few, it still depends on where it began",
    "step on until nothing moves, or solve for it",
)
LENGTH = Mistake(
    "not-a-distribution",
    "the numbers do not sum to 1",
    "any multiple of it is left as it is, too; chances sum to 1",
    "divide by the sum",
)
STATIONARY = Exercise(
    24,
    "the stationary distribution",
    "22_markov",
    """Attention weights are the chances of a walk: from a query to a key. Write stationary(weights): weights, (n,
n), has rows that sum to 1; return the distribution p, (n,), that a step leaves as it is: p · weights = p. To
four decimals.""",
    "begin anywhere and walk on, or look for what does not change",
    functions=(
        Function(
            "stationary", ("weights",), _settled, _chances,
            slips(
                (FORWARD, lambda weights: np.full(len(weights), 1.0 / len(weights))),
                (FORWARD, lambda weights: np.ones(len(weights))),
                (FORWARD, lambda weights: np.full(len(weights), 1.0 / math.sqrt(len(weights)))),
                *((SHORT, _walked(steps, first)) for steps in range(1, 9) for first in (False, True)),
                (LENGTH, lambda weights: _settled(weights) * len(weights)),
                (LENGTH, lambda weights: _settled(weights) / np.linalg.norm(_settled(weights))),
                (LENGTH, lambda weights: -_settled(weights) / np.linalg.norm(_settled(weights))),
                (LENGTH, lambda weights: weights.sum(0)),
            ),
            within=1e-4,
        ),
    ),
    notes={"stationary": "weights (n, n), rows that sum to 1 → (n,), which a step leaves as it is."},
)  # fmt: skip


def _shuffled() -> list[Case]:
    found = []
    for seed, (queries, keys, width) in enumerate([(1, 1, 1), (1, 2, 1), (1, 3, 1), (2, 3, 2), (3, 5, 2)]):
        scores, values = drawn(330 + seed, (queries, keys), (keys, width))
        weights = softmax(scores)[0].astype(np.float16).astype(np.float64)
        if seed < 3:  # few digits, to be followed by hand
            weights = (
                (np.arange(1, keys + 1) / np.arange(1, keys + 1).sum()).astype(np.float32)[None].astype(np.float64)
            )
            values = np.arange(keys, dtype=np.float64)[:, None] ** 2
        found.append({"weights": weights, "values": values})
    return found


def _permuted(kind: str = "") -> Callable[[Arrays, Arrays], Arrays]:
    def made(weights: Arrays, values: Arrays) -> Arrays:
        output, keys = weights @ values, weights.shape[-1]
        orders = [np.array(order) for order in itertools.permutations(range(keys))]
        if kind == "without itself":
            orders = orders[1:] or orders
        moved = np.array([np.linalg.norm(weights[:, order] @ values - output, axis=-1) for order in orders])
        if kind == "equal":
            return np.linalg.norm(values.mean(0) - output, axis=-1)
        found = {
            "mean": moved.mean(0),
            "square": (moved**2).mean(0),
            "largest": moved.max(0),
            "relative": np.sqrt((moved**2).mean(0)) / np.linalg.norm(output, axis=-1),
            "all": np.sqrt((moved**2).mean()) if kind == "all" else moved[0],
        }
        return np.asarray(found.get(kind, np.sqrt((moved**2).mean(0))))

    return made


PLAIN = Mistake(
    "mean-of-distances",
    "that is the mean of the distances",
    "the root of the mean of their squares is asked for, in which large ones count more",
    "square first, then take the mean, then the root",
)
NO_ROOT = Mistake(
    "root-forgotten",
    "the root is missing",
    "the mean of squares is no distance yet",
    "one more step at the end",
)
EQUAL = Mistake(
    "equal-weights",
    "that is the distance to the output with equal weights",
    "the mean of all shuffled outputs lies there; how far they lie from the real one on the way is more",
    "measure each shuffled output by itself, and take the mean after that",
)
ITSELF = Mistake(
    "own-order-left-out",
    "the order that the weights have is left out",
    "it is one of all orders, and moves nothing",
    "of 3 keys there are 6 orders",
)
LARGEST = Mistake(
    "largest-of-all",
    "that is the largest distance, not their mean",
    "one order that moves far says little about all of them",
    "take the mean over orders",
)
RELATIVE = Mistake(
    "relative-to-the-output",
    "the distance is divided by the length of the output",
    "that is a sensible number, and another one",
    "leave the last division out",
)
POOLED = Mistake(
    "queries-pooled",
    "all queries are thrown together",
    "each query has a row of weights of its own, and a number of its own",
    "the shape is (queries,)",
)
SHUFFLE = Exercise(
    25,
    "the permutation test",
    "24_not_explanation",
    """If weights can be shuffled among the keys without the output moving, they explain nothing. Write
permutation_test(weights, values): for each query, over all orders of its weights (of 5 keys there are 120),
the distance between weights[order] · values and the real output; of these distances, the root of the mean of
the squares. weights has the shape (queries, keys), with at most 6 keys, values (keys, width); the result
(queries,).""",
    "the standard library lists all orders; all of them count, the one that the weights have among them",
    functions=(
        Function(
            "permutation_test", ("weights", "values"), _permuted(), _shuffled,
            slips(
                (PLAIN, _permuted("mean")),
                (NO_ROOT, _permuted("square")),
                (EQUAL, _permuted("equal")),
                (ITSELF, _permuted("without itself")),
                (LARGEST, _permuted("largest")),
                (RELATIVE, _permuted("relative")),
                (POOLED, _permuted("all")),
            ),
        ),
    ),
    notes={"permutation_test": "weights (queries, keys), values (keys, width) → (queries,)."},
)  # fmt: skip

EXERCISES = (STATIONARY, SHUFFLE)
