"""Exercises 12, 13 and 14: positions by sines and cosines, by turning, and by a bias."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clearhead.core.positions import Alibi, alibi, rotary, sinusoidal
from clearhead.doctor.mistake import Mistake
from clearhead.learning.exercise import Case, Exercise, Function, drawn, slips

Arrays = np.ndarray


def _angles(positions: Arrays, pairs: int, d: int, base: float = 10000.0, step: float = 2.0) -> Arrays:
    return positions[:, None] * base ** (-step * np.arange(pairs) / d)


def _waves(kind: str = "", start: int = 0, base: float = 10000.0, step: float = 2.0) -> Callable[[int, int], Arrays]:
    def made(n: int, d: int) -> Arrays:
        if kind == "every":  # the exponent counts features, not pairs of them
            angles = _angles(np.arange(n), d, d, step=1.0)
            return np.where(np.arange(d) % 2, np.cos(angles), np.sin(angles))
        angles = _angles(np.arange(start, n + start), d // 2, d, base, step)
        sine, cosine = np.sin(angles), np.cos(angles)
        if kind == "halves":
            return np.concatenate([sine, cosine], -1)
        pair = (cosine, sine) if kind == "swapped" else (sine, cosine)
        return np.stack(pair, -1).reshape(n, d)

    return made


HALVES = Mistake(
    "sines-then-cosines",
    "all sines come first, then all cosines",
    "here they alternate: sine, cosine, sine, cosine",
    "feature 0 is the sine and feature 1 the cosine of the same angle",
)
SWAPPED = Mistake(
    "sine-and-cosine-swapped",
    "cosines stand where sines should, and sines where cosines should",
    "position 0 is 0, 1, 0, 1, …: the sine of 0 is 0",
    "even features are sines",
)
FROM_ONE = Mistake(
    "positions-from-one",
    "positions are counted from 1",
    "the first position is 0, whose angles are all 0",
    "look at the first row",
)
EXPONENT = Mistake(
    "another-exponent",
    "the angles shrink too fast or too slowly from pair to pair",
    "the exponent goes from 0 to nearly 1 over the pairs: 2i/d for pair i of d/2",
    "print the exponents for d = 4: they are 0 and 1/2",
)
EVERY = Mistake(
    "an-angle-for-each-feature",
    "a sine and its cosine have different angles",
    "features 2i and 2i + 1 are a pair with one angle; here each feature has an angle of its own",
    "there are half as many angles as features",
)
ACROSS = Mistake(
    "transposed",
    "the result is transposed",
    "there is a row for each position and a column for each feature",
    "the shape is (n, d)",
)
BASE = Mistake(
    "another-base",
    "the base is another than 10,000",
    "it decides how slowly the last pair turns",
    "compare with the formula in the text",
)
SINES = Exercise(
    12,
    "sinusoidal positions",
    "11_positions",
    """Write sinusoidal(n, d): (n, d), d even. Position p has the sine of p / 10000^(2i/d) at feature 2i and its
cosine at 2i + 1.""",
    "first all angles, (n, d/2); then two arrays, which are woven together",
    functions=(
        Function(
            "sinusoidal", ("n", "d"), sinusoidal,
            lambda: [{"n": n, "d": d} for n, d in ((1, 2), (2, 2), (2, 4), (3, 6), (11, 10))],
            slips(
                (HALVES, _waves("halves")),
                (SWAPPED, _waves("swapped")),
                (FROM_ONE, _waves(start=1)),
                (EVERY, _waves("every")),
                *((EXPONENT, _waves(step=step)) for step in (1.0, 4.0, 0.0)),
                *((BASE, _waves(base=base)) for base in (1000.0, 100.0, 100000.0)),
                (ACROSS, lambda n, d: sinusoidal(n, d).T),
            ),
        ),
    ),
    notes={"sinusoidal": "(n, d), d even: sines at even features, cosines at odd ones."},
)  # fmt: skip


def _turning_cases() -> list[Case]:
    found: list[Case] = []
    for seed, (n, d) in enumerate([(1, 2), (2, 2), (2, 4), (3, 6), (5, 10)]):
        (x,) = drawn(170 + seed, (n, d), whole=seed < 3)
        found.append({"x": x})
    return found


def _turned(sign: float = 1.0, start: int = 0, step: float = 2.0, kind: str = "") -> Callable[[Arrays], Arrays]:
    def made(x: Arrays) -> Arrays:
        n, d = x.shape
        angles = _angles(np.arange(start, n + start), d // 2, d, step=step)
        cosine, sine = np.cos(angles), sign * np.sin(angles)
        if kind == "swapped":
            cosine, sine = sine, cosine
        one, two = x[:, 0::2], x[:, 1::2]
        if kind == "cosine":
            sine = np.zeros_like(sine)
        if kind == "sum":
            return x + sinusoidal(n, d)
        pair = (one * cosine - two * sine, two * cosine + one * sine)
        if kind == "joined":
            return np.concatenate(pair, -1)
        if kind == "mirrored":
            pair = (one * cosine + two * sine, two * cosine + one * sine)
        return np.stack(pair, -1).reshape(n, d)

    return made


PAIRS = Mistake(
    "pairs-of-halves",
    "feature i is turned with feature i + d/2, not with its neighbour",
    "models have both; here neighbours are a pair, features 2i and 2i + 1, as in the paper",
    "which two features share an angle",
)
BACKWARDS = Mistake(
    "turned-backwards",
    "the pairs are turned the other way",
    "a sine has the wrong sign",
    "turn (1, 0) by a quarter: it becomes (0, 1)",
)
NO_TURN = Mistake(
    "no-turn",
    "the features are only shrunk, not turned",
    "turning a pair mixes its two features; its length stays as it was",
    "each new feature is made of both old ones",
)
MIRROR = Mistake(
    "one-sign-missing",
    "both features add the other's part: one has to subtract it",
    "the length of each pair changes, so it is no turn",
    "turn (1, 0) and (0, 1) by a quarter, and compare",
)
JOINED = Mistake(
    "pairs-not-woven-back",
    "the pairs are right, and are left apart: all first features, then all second ones",
    "feature 2i has to be back where it was",
    "the result is woven as the input was",
)
SUMMED = Mistake(
    "added-not-turned",
    "sinusoidal positions are added, and nothing is turned",
    "rotary positions turn queries and keys, so that a score depends only on how far apart they are",
    "multiply with cosines and sines",
)
TURNS = Exercise(
    13,
    "rotary positions",
    "11_positions",
    """Write rotate(x): x, (positions, features), with each pair of neighbours (features 2i and 2i + 1) turned by an
angle, counter-clockwise. Position p turns pair i by p / 10000^(2i/d), d being the number of features.""",
    "to turn (a, b) by an angle mixes a and b, with the cosine and the sine of the angle; position 0 stays as it is",
    functions=(
        Function(
            "rotate", ("x",), rotary(layout="interleaved"), _turning_cases,
            slips(
                (PAIRS, rotary(layout="half")),
                (BACKWARDS, _turned(sign=-1.0)),
                (FROM_ONE, _turned(start=1)),
                *((EXPONENT, _turned(step=step)) for step in (1.0, 4.0, 0.0)),
                (SWAPPED, _turned(kind="swapped")),
                (NO_TURN, _turned(kind="cosine")),
                (MIRROR, _turned(kind="mirrored")),
                (JOINED, _turned(kind="joined")),
                (SUMMED, _turned(kind="sum")),
            ),
        ),
    ),
    notes={"rotate": "x (positions, features) → the same shape, neighbours turned by their position."},
)  # fmt: skip


def _slopes(heads: int) -> Arrays:
    bias = alibi(heads)
    assert isinstance(bias, Alibi)
    return bias.slopes


def _bias(slopes: Callable[[int], Arrays], kind: str = "") -> Callable[[int, int], Arrays]:
    def made(n: int, heads: int) -> Arrays:
        apart = np.arange(n)[:, None] - np.arange(n)  # how far the key lies behind the query
        far = {"signed": apart, "turned": -apart, "causal": np.maximum(apart, 0)}.get(kind, np.abs(apart))
        found = -slopes(heads)[:, None, None] * far
        return -found if kind == "positive" else np.moveaxis(found, 0, -1) if kind == "last" else found

    return made


SIGN = Mistake(
    "bias-positive",
    "what is far away is raised, not lowered",
    "the bias is to make far keys weigh less",
    "0 on the diagonal, and below 0 elsewhere",
)
NO_SIZE = Mistake(
    "distance-with-a-sign",
    "the distance has a sign: keys on one side are raised",
    "how far two positions are apart is the same from both sides",
    "row 0, column 1 and row 1, column 0 are alike",
)
CAUSAL_ONLY = Mistake(
    "later-keys-not-lowered",
    "keys after the query have no bias",
    "under a causal mask it makes no difference; here both sides are asked for",
    "row 0, column 1 and row 1, column 0 are alike",
)
ZERO = Mistake(
    "slopes-from-one",
    "the slopes begin at 1: heads are counted from 0",
    "of 8 heads the first has the slope 1/2 and the last 1/256",
    "print the slopes of 8 heads",
)
REVERSED = Mistake(
    "slopes-reversed",
    "the slopes come in reverse order",
    "the first head has the steepest slope",
    "print the slopes of 8 heads: they begin with 1/2",
)
FIXED = Mistake(
    "slopes-of-eight-heads",
    "the slopes do not depend on how many heads there are",
    "1/2, 1/4, … are those of 8 heads; with 4 they are 1/4, 1/16, …, so that the last is always 1/256",
    "the number of heads belongs into the exponent",
)
AXES = Mistake(
    "heads-last",
    "the heads are the last axis",
    "scores have the shape (heads, queries, keys), and the bias is added to them",
    "heads come first",
)
BIAS = Exercise(
    14,
    "an ALiBi bias",
    "11_positions",
    """Write alibi_bias(n, heads): (heads, n, n), to be added to the scores: −slope · distance, where the distance of
a query and a key is how many positions they are apart. Head h, counted from 1, has the slope 2^(−8h/heads);
heads is a power of two.""",
    "slopes, (heads,), and distances, (n, n), are made apart, and multiplied by broadcasting",
    functions=(
        Function(
            "alibi_bias", ("n", "heads"), _bias(_slopes),
            lambda: [{"n": n, "heads": heads} for n, heads in ((1, 1), (2, 1), (2, 2), (3, 4), (5, 8))],
            slips(
                (SIGN, _bias(_slopes, "positive")),
                (NO_SIZE, _bias(_slopes, "signed")),
                (NO_SIZE, _bias(_slopes, "turned")),
                (CAUSAL_ONLY, _bias(_slopes, "causal")),
                (ZERO, _bias(lambda heads: 2.0 ** (-8 * np.arange(heads) / heads))),
                (REVERSED, _bias(lambda heads: _slopes(heads)[::-1])),
                (FIXED, _bias(lambda heads: 2.0 ** -np.arange(1.0, heads + 1))),
                (AXES, _bias(_slopes, "last")),
            ),
        ),
    ),
    notes={"alibi_bias": "(heads, n, n): −slope · distance."},
)  # fmt: skip

EXERCISES = (SINES, TURNS, BIAS)
