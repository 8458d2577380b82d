"""Exercises 16 and 17: a softmax that sees its scores one at a time, and two parts that are merged into the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from clearhead.core.partial import Partial, merge
from clearhead.doctor.mistake import Mistake
from clearhead.doctor.mistakes import CATALOGUE
from clearhead.learning.exercise import Case, Exercise, Function, Stream, drawn, slips

Arrays = np.ndarray


def _streams() -> list[Case]:
    (some,) = drawn(190, (7,))
    lists: tuple[Sequence[float], ...] = (
        [1.0], [1.0, 2.0], [2.0, 1.0], [0.0, 3.0, 1.0], [-5.0, -6.0], [1000.0, 1001.0, 999.0], [-math.inf, 1.0],
        [2.0, -math.inf], some.tolist(),
    )  # fmt: skip
    return [{"stream": Stream(numbers)} for numbers in lists]


def _running(kind: str = "") -> Callable[[Sequence[float]], tuple[float, float]]:
    """A running maximum and sum, as they should be or with one thing wrong."""

    def made(numbers: Sequence[float]) -> tuple[float, float]:
        exp = math.exp if kind == "raising" else lambda x: float(np.exp(x))
        if kind in ("no maximum", "raising"):
            return max(numbers), sum(map(exp, numbers))
        peak, total = (0.0 if kind == "zero" else -math.inf), 0.0
        for number in numbers:
            risen = max(peak, number)
            if risen == -math.inf and kind != "nan":
                continue
            shrink = {"kept": 1.0, "inverse": exp(risen - peak) if peak > -math.inf else 0.0}.get(kind)
            shrink = exp(peak - risen) if shrink is None else shrink
            total, peak = total * shrink + exp(number - (peak if kind == "old" and peak > -math.inf else risen)), risen
        return peak, total

    return made


KEPT = CATALOGUE["blocks-not-rescaled"]
SHRUNK = Mistake(
    "rescaled-the-wrong-way",
    "the sum grows when a larger score comes, and should shrink",
    "what was summed relative to a smaller maximum is too large for a larger one",
    "the factor is at most 1",
)
OLD = Mistake(
    "new-score-with-the-old-maximum",
    "the new score is taken relative to the old maximum",
    "both what was summed and what is added have to be relative to the same maximum",
    "find the new maximum first",
)
STARTS = Mistake(
    "maximum-starts-at-zero",
    "the running maximum starts at 0",
    "where every score is below 0 it stays there, and far below 0 all exponentials vanish",
    "what number is smaller than every score",
)
MASKED = Mistake(
    "nan-for-hidden-scores",
    "a score of −∞ at the beginning gives NaN",
    "−∞ − −∞ is NaN: nothing was seen yet, and nothing came",
    "a hidden score adds nothing, and need not be looked at",
)
OVER = Mistake(
    "no-maximum-subtracted",
    "the exponentials are summed as they are",
    "e^1000 is more than any float holds",
    "sum e^(score − largest so far), and correct the sum when a larger one comes",
)
ONLINE = Exercise(
    16,
    "an online softmax",
    "12_stability",
    """Scores come one at a time, and only once. Write online_softmax(stream): go through them with a for loop, and
return (largest, total): the largest score, and the sum of e^(score − largest) over all of them. Keep no list.
A score may be −∞: it is hidden, and adds nothing. At least one is not.""",
    "when a larger score comes, everything that was summed so far has to shrink by the same factor",
    functions=(
        Function(
            "online_softmax", ("stream",), _running(), _streams,
            slips(
                (KEPT, _running("kept")),
                (SHRUNK, _running("inverse")),
                (OLD, _running("old")),
                (MASKED, _running("nan")),
                (STARTS, _running("zero")),
                (OVER, _running("no maximum")),
                (OVER, _running("raising")),
            ),
            gives=("largest", "total"),
        ),
    ),
    notes={"online_softmax": "an iterator of numbers → (largest, sum of e^(number − largest))."},
)  # fmt: skip


def _halves() -> list[Case]:
    found = []
    for seed, (queries, width) in enumerate([(1, 1), (2, 1), (2, 2), (3, 5)]):
        a, b = drawn(210 + seed, (queries, width), (queries, width), whole=seed < 3)
        one, two = drawn(220 + seed, (queries,), (queries,))
        found.append({"output_a": a, "lse_a": one, "output_b": b, "lse_b": two})
    ends = {"output_a": np.array([[1.0]]), "output_b": np.array([[3.0]])}
    large = ends | {"lse_a": np.array([1000.0]), "lse_b": np.array([1001.0])}
    empty = ends | {"output_a": np.zeros((1, 1)), "lse_a": np.array([-np.inf]), "lse_b": np.array([0.5])}
    names = ("output_a", "lse_a", "output_b", "lse_b")
    return [*found[:2], *({name: case[name] for name in names} for case in (large, empty)), *found[2:]]


def _joined(kind: str = "") -> Callable[..., tuple[Arrays, Arrays]]:
    def made(output_a: Arrays, lse_a: Arrays, output_b: Arrays, lse_b: Arrays) -> tuple[Arrays, Arrays]:
        whole = merge(Partial(output_a, lse_a), Partial(output_b, lse_b))
        one, two, lse = lse_a, lse_b, np.asarray(whole.lse)
        if kind == "naive":
            lse = np.log(np.exp(one) + np.exp(two))
            left, right = np.exp(one) / (np.exp(one) + np.exp(two)), np.exp(two) / (np.exp(one) + np.exp(two))
        else:
            left, right = np.exp(one - lse), np.exp(two - lse)
        if kind in ("mean", "sum"):
            left = right = np.full_like(one, 0.5 if kind == "mean" else 1.0)
        elif kind == "by lse":
            left, right = one / (one + two), two / (one + two)
        elif kind == "swapped":
            left, right = right, left
        output = left[:, None] * output_a + right[:, None] * output_b
        wrong = {"added": one + two, "largest": np.maximum(one, two), "averaged": (one + two) / 2}
        return output, wrong.get(kind, lse)

    return made


def _merged(output_a: Arrays, lse_a: Arrays, output_b: Arrays, lse_b: Arrays) -> tuple[Arrays, Arrays]:
    whole = merge(Partial(output_a, lse_a), Partial(output_b, lse_b))
    return np.asarray(whole.output), np.asarray(whole.lse)


OVER_ALL = replace(
    OVER,
    title="e to the power of a log-sum-exp is taken as it is",
    mends="only how far the two log-sum-exps are apart decides the shares",
)
MEAN = Mistake(
    "parts-averaged",
    "both parts count the same",
    "a part counts with its share of the sum of all exponentials, which its log-sum-exp knows",
    "e to the power of a part's log-sum-exp is its own sum",
)
SUMMED = Mistake(
    "parts-added",
    "the outputs are added up",
    "each was divided by its own sum; together they have to be divided by one",
    "the shares of both parts sum to 1",
)
BY_LOGARITHM = Mistake(
    "shares-of-logarithms",
    "the shares are those of the logarithms",
    "a log-sum-exp is the logarithm of a sum: the shares are those of the sums themselves",
    "a log-sum-exp may be negative, and a share never is",
)
CROSSED = Mistake(
    "shares-swapped",
    "each part counts with the other's share",
    "the part with the larger log-sum-exp counts more",
    "look which of the two the output is nearer to",
)
LOGARITHMS = Mistake(
    "log-sum-exp-merged-wrongly",
    "the output is right, and the log-sum-exp is not",
    "the sums of exponentials are added, and not their logarithms",
    "with two equal parts it grows by the logarithm of 2",
)
MERGE = Exercise(
    17,
    "merge two parts",
    "14_flash",
    """Keys were split in two, and attention was computed over each part: an output, (queries, width), and the log-
sum-exp of its scores, (queries,). Write merge_parts(output_a, lse_a, output_b, lse_b): return (output, lse)
over all keys, exactly. A log-sum-exp may be 1000, and is −∞ where a part has no key that is seen.""",
    "how much of the whole sum of exponentials is each part's",
    functions=(
        Function(
            "merge_parts", ("output_a", "lse_a", "output_b", "lse_b"), _merged, _halves,
            slips(
                (OVER_ALL, _joined("naive")),
                (MEAN, _joined("mean")),
                (SUMMED, _joined("sum")),
                (BY_LOGARITHM, _joined("by lse")),
                (CROSSED, _joined("swapped")),
                *((LOGARITHMS, _joined(kind)) for kind in ("added", "largest", "averaged")),
            ),
            gives=("output", "lse"),
        ),
    ),
    notes={"merge_parts": "two outputs (queries, width) and log-sum-exps (queries,) → (output, lse) of all keys."},
)  # fmt: skip

EXERCISES = (ONLINE, MERGE)
