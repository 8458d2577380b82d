"""Hints in words for mistakes of the doctor, whose own advice is a line of code: here that line is the exercise."""

from __future__ import annotations

from clearhead.doctor.mistake import Mistake
from clearhead.doctor.mistakes import CATALOGUE

SIZES = "print the shape of q: which of its sizes is the number of features of one head?"
AXES = "only the last two axes change places, counted from the end; a reshape would keep the order in memory"
HIDDEN = "a hidden score becomes −∞, whatever it was: choose between the two, and multiply or add nothing"

HINTS = {
    "scale-d-model": "a query is shorter once the heads are split: its length then is what counts",
    "scale-d-model-no-root": "a query is shorter once the heads are split, and of its length a root is taken",
    "scale-d": "a root is taken, and it is divided by once",
    "scale-keys": SIZES,
    "scale-queries": SIZES,
    "scale-dv": SIZES,
    "scale-heads": SIZES,
    "scale-inverted": "scores are to become smaller by it, and the more features there are, the smaller",
    "no-denominator": "a row sums to 1 once all of it is divided by the same number",
    "maximum-over-queries": "what is subtracted is one number a row: the largest over its keys",
    "keepdims-forgotten": "the sums need an axis of length 1 where the keys were, so that each divides its own row",
    "keys-not-transposed": "the inner sizes of a product of matrices are what is summed over: the features",
    "keys-reshaped": AXES,
    "weights-transposed": "weights are (queries, keys) and values (keys, width): they meet as they are",
    "key-left-out": "count how often the loop runs",
    "blocks-not-rescaled": "all that was summed so far shrinks by one factor whenever a larger score comes",
    "output-projection-forgotten": "one of the four matrices is never used",
    "mask-added-as-number": HIDDEN,
    "mask-times-infinity": HIDDEN,
    "lengths-off-by-one": "a row of length 3 has three real tokens: count them",
    "causal-other-corner": "the last query sees every key, also where there are more keys than queries",
    "transpose-reverses-batch": AXES,
    "batch-axis-transposed": AXES,
    "needs-contiguous-inputs": "an array may lie in memory in another order than its axes have",
    "padding-hides-queries": "keys are the last axis of the scores, and so they are of the mask",
    "no-maximum-subtracted": (
        "a softmax stays the same when one number is taken off a whole row: with which one is no exponential above 1?"
    ),
    "maximum-of-the-whole-matrix": "what keeps one row from overflowing lets another vanish: each row has its own",
    "penalty-overflows-float16": "−∞ is a number that every precision has",
    "inputs-written-to": "make a new array where you change the one that came in",
    "dropout-in-evaluation": "leave dropout out",
}


def hint_for(mistake: Mistake) -> str:
    """What to do about a mistake, without a line of code; an exercise's own mistake of the same name has its own."""
    known = CATALOGUE.get(mistake.name)
    doctors = known is not None and known.mends == mistake.mends
    return HINTS.get(mistake.name, mistake.mends) if doctors else mistake.mends
