"""Exercises 26 to 30: the chapter's five about "The cat sat on mat", explained once they are answered."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from clearhead.doctor.mistake import Mistake
from clearhead.doctor.mistakes import CATALOGUE
from clearhead.learning.exercise import Blank, Case, Exercise, Function, Guess, slips
from clearhead.textbook.exercises import SENTENCE, factor, not_largest, orthogonal, product_variance, row, unscaled

ARRAYS = """The cat sat on mat, d_k = 4:
    Q  The 1 0 1 0   cat 0 2 0 1   sat 1 1 1 0   on 0 0 1 1   mat 1 0 0 1
    K  The 0 1 0 1   cat 1 0 1 0   sat 1 1 0 0   on 0 0 1 1   mat 1 0 0.5 0.5"""
NAMES = SENTENCE.tokens


def _blanks(names: tuple[str, ...], numbers: np.ndarray) -> tuple[Blank, ...]:
    return tuple(Blank(name, float(number)) for name, number in zip(names, numbers, strict=True))


def _numbers(numbers: np.ndarray) -> tuple[float, ...]:
    return tuple(map(float, numbers))


def _written(numbers: np.ndarray) -> str:
    return ", ".join(f"{number:.4f}" for number in numbers)


def _weights(scores: np.ndarray) -> np.ndarray:
    return np.exp(scores) / np.exp(scores).sum()


SAT = SENTENCE.k @ SENTENCE.q[2]
THE = SENTENCE.k @ SENTENCE.q[0]
ANOTHER = Mistake(
    "another-row",
    "that is the row of another token",
    "rows are queries: the row of a token is made from its own query and all keys",
    "begin with the query that the exercise names",
)
COLUMN = Mistake(
    "queries-and-keys-swapped",
    "the token's key is compared with all queries",
    "a row of weights belongs to a query, which is compared with all keys",
    "take the token from Q and the others from K",
)
OUTPUT = Mistake(
    "output-in-place-of-weights",
    "those are numbers of the output",
    "five weights are asked for, one a key",
    "stop before the values come in",
)
SAT_ROW = Exercise(
    26,
    "the chapter, 1: the row of sat",
    "05_weighted_sum",
    f"""{ARRAYS}
Compute the row of sat: how much weight does it give The, cat, sat, on and mat? Type five numbers, with two
decimals or more.""",
    "two of the five weights are equal, and two others",
    blanks=_blanks(NAMES, row("sat")[0]),
    guesses=(
        Guess(CATALOGUE["no-scale"], _numbers(unscaled("sat"))),
        Guess(CATALOGUE["scale-d"], _numbers(_weights(SAT / 4))),
        Guess(CATALOGUE["no-softmax"], _numbers(SAT)),
        Guess(CATALOGUE["no-softmax"], _numbers(SAT / 2)),
        Guess(CATALOGUE["no-denominator"], _numbers(np.exp(SAT / 2))),
        Guess(CATALOGUE["normalised-by-sum"], _numbers(SAT / SAT.sum())),
        Guess(COLUMN, _numbers(_weights(SENTENCE.q @ SENTENCE.k[2] / 2))),
        *(Guess(ANOTHER, _numbers(row(token)[0])) for token in NAMES if token != "sat"),
    ),
    explained=lambda: (
        f"The weights are {_written(row('sat')[0])}, and the output {_written(row('sat')[1])}.\n"
        "cat and sat get the same, since both products are 2: the query meets two of its ones in each key."
    ),
)

SHARPER = Mistake(
    "scaled-all-the-same",
    "those are the scaled weights",
    "the scaling is to be left out, to see what it does",
    "take e to the power of the products themselves",
)
WINNER = Mistake(
    "another-winner",
    "another token has the largest product",
    "with products 128 times as large, the largest takes nearly all",
    "look which of the five weights is largest already",
)
UNSCALED = Exercise(
    27,
    "the chapter, 2: without the scaling",
    "03_scaling",
    f"""{ARRAYS}
1. Leave out the scaling for The: what are its five weights?
2. Imagine d_k = 512, each column taken 128 times: which token gets nearly all of the weight, without scaling?
Type five numbers and a token.""",
    "only the division by 2 is left out; everything after it stays",
    blanks=(*_blanks(NAMES, unscaled("The")), Blank("token", "cat")),
    guesses=(
        Guess(SHARPER, (*_numbers(row("The")[0]), None)),
        Guess(WINNER, (*_numbers(unscaled("The")), None)),
        Guess(CATALOGUE["no-softmax"], (*_numbers(THE), None)),
        Guess(CATALOGUE["no-denominator"], (*_numbers(np.exp(THE)), None)),
        Guess(CATALOGUE["scale-inverted"], (*_numbers(_weights(2 * THE)), None)),
        *(Guess(ANOTHER, (*_numbers(unscaled(token)), None)) for token in NAMES if token != "The"),
    ),
    explained=lambda: (
        f"Scaled, the weights of The are {_written(row('The')[0])};\nunscaled, {_written(unscaled('The'))}.\n"
        f"With 512 features and no scaling they are {_written(unscaled('The', d_k=512))}:\n"
        "a choice of cat alone, through which no gradient comes.\n"
        f"Divided by √512 they are {_written(unscaled('The', d_k=512, scaled=True))}."
    ),
)

ALWAYS = Mistake(
    "diagonal-taken-for-largest",
    "the diagonal is not always the largest",
    "x · x is large where x is long; x · y is as large where y has the same ones and some more",
    "compare the product of each token with itself to its products with the others",
)
WHO = Mistake(
    "another-token",
    "it is right that the diagonal is not always alone the largest, and it is another token",
    "a token ties where another has at least the same product with it",
    "go through the five rows, and compare the product of each token with itself to the others",
)
DIAGONAL = Exercise(
    28,
    "the chapter, 3: keys that are the queries",
    "02_dot_products",
    f"""{ARRAYS}
1. Set K = Q, so that every token is compared with itself: is its own weight always alone the largest? Type
yes or no.
2. With K = Q, which token has another one beside it with the same weight?
3. And with Q = K, the rows of K on both sides?
Type yes or no, and two tokens.""",
    "the product of a vector with itself is its length squared; with a longer one it may be more",
    blanks=(Blank("always", "no"), Blank("with K = Q", "The"), Blank("with Q = K", "mat")),
    guesses=(Guess(ALWAYS, ("yes", None, None)), Guess(WHO, ("no", None, None))),
    explained=lambda: "\n".join(
        [
            "No. "
            + " ".join(
                f"With {words}, {token} ties with {' and '.join(others)}."
                for words, x in (("K = Q", SENTENCE.q), ("Q = K", SENTENCE.k))
                for token, others in not_largest(x, NAMES).items()
            ),
            "A longer vector in the same direction even wins: x · y = |x| |y| cos θ.",
        ]
    ),
)

LEVEL = Mistake(
    "all-alike",
    "a key that is orthogonal still has e⁰ = 1 before the division",
    "nothing in common is a score of 0, and not a weight of 0",
    "take e to the power of the scaled scores, of which one is not 0",
)
_SHARE = orthogonal(4)
ORTHOGONAL = Exercise(
    29,
    "the chapter, 4: orthogonal keys",
    "06_geometry",
    """Four tokens, whose queries and keys are the rows of the identity: token i has a 1 at place i and 0 elsewhere,
d_k = 4. How much weight does a token give itself, and how much each of the others? Type two numbers, with two
decimals or more.""",
    "the scores of a row are one number and three zeros",
    blanks=(Blank("itself", float(_SHARE[0, 0])), Blank("each other", float(_SHARE[0, 1]))),
    guesses=(
        Guess(CATALOGUE["no-scale"], (math.e / (math.e + 3), 1 / (math.e + 3))),
        Guess(CATALOGUE["scale-d"], (math.exp(0.25) / (math.exp(0.25) + 3), 1 / (math.exp(0.25) + 3))),
        Guess(LEVEL, (1.0, 0.0)),
        Guess(replace(LEVEL, why="one score is larger than the others, and so is its weight"), (0.25, 0.25)),
        Guess(CATALOGUE["no-denominator"], (math.exp(0.5), 1.0)),
        Guess(
            Mistake("rest-not-shared", "the second number is that of all others together", "three tokens share it",
                    "the four weights sum to 1"),
            (float(_SHARE[0, 0]), float(1 - _SHARE[0, 0])),
        ),
    ),
    explained=lambda: (
        f"{_SHARE[0, 0]:.4f} and {_SHARE[0, 1]:.4f}: each token prefers itself by e^(1/√4) = {math.exp(0.5):.4f},\n"
        "and all others are alike. Unlike keys still share the rest."
    ),
)  # fmt: skip


def _sizes() -> list[Case]:
    return [{"sigma": sigma, "d": d} for sigma, d in ((1.0, 1), (1.0, 4), (2.0, 1), (2.0, 9), (0.5, 64), (3.0, 7))]


def _powers(sigma_power: float, d_power: float) -> Callable[[float, int], float]:
    return lambda sigma, d: sigma**sigma_power * float(d) ** d_power


POWER = Mistake(
    "another-power-of-sigma",
    "σ has another power",
    "a product of two entries has the variance σ² · σ², for they are independent and of mean 0",
    "with d = 1, ask what the variance of one product is",
)
DIMENSION = Mistake(
    "another-power-of-d",
    "d has another power",
    "variances of independent terms add up: d of them",
    "with σ = 1, ask what changes from d = 1 to d = 4",
)
DEVIATION = Mistake(
    "variance-or-deviation",
    "a variance and a standard deviation are mixed up",
    "a number that is multiplied with c has c times the deviation, and c² times the variance",
    "dividing by the standard deviation gives variance 1",
)
VARIANCE = Exercise(
    30,
    "the chapter, 5: entries of variance σ²",
    "03_scaling",
    """The entries of q and k are independent, of mean 0 and variance σ² (sigma is the standard deviation), d of them
each. Write product_variance(sigma, d): the variance of q · k. And write factor(sigma, d): what q · k has to
be multiplied with so that its variance is 1; for sigma = 1 it is the scale of attention.""",
    "first one product of two entries, then the sum of d of them",
    functions=(
        Function(
            "product_variance", ("sigma", "d"), product_variance, _sizes,
            slips(
                *((POWER, _powers(power, 1.0)) for power in (0.0, 1.0, 2.0, 3.0, 8.0)),
                *((DIMENSION, _powers(4.0, power)) for power in (0.0, 2.0)),
                (DEVIATION, _powers(2.0, 0.5)),
            ),
        ),
        Function(
            "factor", ("sigma", "d"), factor, _sizes,
            slips(
                *((POWER, _powers(-power, -0.5)) for power in (0.0, 1.0, 4.0)),
                *((DIMENSION, _powers(-2.0, power)) for power in (0.0, -2.0)),
                (DEVIATION, _powers(-4.0, -1.0)),
                (DEVIATION, _powers(-2.0, -1.0)),
                (DEVIATION, _powers(2.0, 0.5)),
            ),
        ),
    ),
    notes={"product_variance": "the variance of q · k.", "factor": "what brings that variance to 1."},
    explained=lambda: (
        "One product of entries has the variance σ⁴, and d of them σ⁴ d;\nthe factor is 1 / (σ² √d).\n"
        "For σ = 1 that is the usual 1/√d.\n"
        f"With σ = 2 and d = 64: {product_variance(2.0, 64):g} and {factor(2.0, 64):g}."
    ),
)  # fmt: skip

EXERCISES = (SAT_ROW, UNSCALED, DIAGONAL, ORTHOGONAL, VARIANCE)
