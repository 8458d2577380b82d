"""Exercise 15: what attention costs, counted on paper."""

from __future__ import annotations

from clearhead.doctor.mistake import Mistake
from clearhead.learning.exercise import Blank, Exercise, Guess

N, HEADS, FEATURES = 1024, 8, 64
PRODUCT = N * N * FEATURES
WITHIN = 0.02

BY_HEADS = Mistake(
    "all-heads-counted",
    "all heads are counted where one is asked for, or one where all are",
    "the first number is of one head, the second of all eight",
    "read what each number is of",
)
SQUARED_FEATURES = Mistake(
    "features-squared",
    "the features are squared, not the positions",
    "there is a score for each pair of positions, and each takes as many multiply-adds as there are features",
    "count the scores first",
)
FLOPS = Mistake(
    "flops-in-place-of-multiply-adds",
    "multiplications and additions are counted apart",
    "that is FLOPs, twice as many: a multiply-add is one here",
    "one multiply-add a feature",
)
HALF_OF_IT = Mistake(
    "one-product-of-two",
    "only one of the two products is counted",
    "weights times values takes as many as queries times keys",
    "there are two products of matrices in attention",
)
DOUBLE = Mistake(
    "grows-linearly",
    "twice the length takes more than twice as much",
    "every position looks at every position",
    "count the pairs of 2 positions, and of 4",
)
COUNT = Exercise(
    15,
    "count the multiply-adds",
    "13_cost",
    """A layer has 1,024 positions and 8 heads of 64 features. A multiply-add counts as one.
1. How many does q kᵀ take, in one head?
2. How many do q kᵀ and weights · v take together, in all heads?
3. How many times as many are they at 2,048 positions?
Type three numbers; 12.3M, 1.2G and 5e6 are read, too.""",
    "a product of a (n, d) and a (d, m) matrix has n · m numbers, each a sum of d products",
    blanks=(
        Blank("scores of one head", float(PRODUCT), WITHIN),
        Blank("both products, all heads", float(2 * HEADS * PRODUCT), WITHIN),
        Blank("times as many", 4.0, WITHIN),
    ),
    guesses=(
        Guess(DOUBLE, (float(PRODUCT), float(2 * HEADS * PRODUCT), 2.0)),
        Guess(HALF_OF_IT, (float(PRODUCT), float(HEADS * PRODUCT), None)),
        Guess(BY_HEADS, (float(HEADS * PRODUCT), None, None)),
        Guess(BY_HEADS, (float(PRODUCT), float(2 * PRODUCT), None)),
        Guess(FLOPS, (float(2 * PRODUCT), None, None)),
        Guess(SQUARED_FEATURES, (float(N * FEATURES**2), None, None)),
    ),
    explained=lambda: (
        f"1,024 · 1,024 scores of 64 products each are {PRODUCT:,}. Twice that, in 8 heads: {2 * HEADS * PRODUCT:,}.\n"
        "Twice the positions are four times the pairs. `clearhead profile --paper` counts it for published models."
    ),
)

EXERCISES = (COUNT,)
