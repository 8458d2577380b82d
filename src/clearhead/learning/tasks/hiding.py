"""Exercises 7, 8 and 21: masks that say which keys a query may see: causal, for padding, and of a window."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clearhead.doctor.mistake import Mistake
from clearhead.learning.exercise import Case, Exercise, Function, slips

HIDES = Mistake(
    "mask-inverted",
    "True stands where a query may not attend",
    "here True means may attend, as in PyTorch's scaled_dot_product_attention, JAX and clearhead",
    "turn every answer round",
)
ADDED = Mistake(
    "mask-to-be-added",
    "these are numbers to be added to scores, not True and False",
    "0 and −∞ do the same in the end; here the answer for each pair is asked for, yes or no",
    "return what decides between the two numbers",
)
ITSELF = Mistake(
    "causal-excludes-itself",
    "a query does not see its own position",
    "the first query then sees nothing at all",
    "query 0 sees key 0: look at the first row",
)
NEXT = Mistake(
    "causal-sees-the-next",
    "a query sees the position after it",
    "in training the answer leaks: each token sees the one that it should predict",
    "query 0 sees key 0 and no other: look at the first row",
)
FUTURE = Mistake(
    "causal-inverted",
    "a query sees what comes after it, not what came before",
    "rows are queries and columns are keys: the last query sees most",
    "the last row is all True, the first has one",
)
OPEN = Mistake(
    "causal-ignored",
    "every query sees every key",
    "nothing is hidden",
    "compare the position of the key with that of the query",
)


def _below(offset: int) -> Callable[[int], np.ndarray]:
    return lambda n: np.tri(n, k=offset, dtype=bool)


CAUSAL = Exercise(
    7,
    "a causal mask",
    "08_masks",
    """Write causal_mask(n): (n, n), True where a query (row) may attend to a key (column): to itself and to what
came before. 1 and 0 will do for True and False.""",
    "the first row has one True, the last row has n",
    functions=(
        Function(
            "causal_mask", ("n",), _below(0), lambda: [{"n": n} for n in (1, 2, 3, 5)],
            slips(
                (HIDES, lambda n: ~np.tri(n, dtype=bool)),
                (ITSELF, _below(-1)),
                (NEXT, _below(1)),
                (FUTURE, lambda n: np.tri(n, dtype=bool).T),
                (OPEN, lambda n: np.ones((n, n), bool)),
                *((ADDED, lambda n, low=low: np.where(np.tri(n, dtype=bool), 0.0, low)) for low in (-np.inf, -1e9)),
            ),
        ),
    ),
    notes={"causal_mask": "(n, n): True where query (row) may attend to key (column)."},
)  # fmt: skip


def padded() -> list[Case]:
    """Lengths of rows, and the length that they are padded to."""
    return [
        {"lengths": np.array(lengths), "n": n} for lengths, n in (([1], 2), ([2, 1], 2), ([1, 3], 3), ([4, 2, 5], 5))
    ]


def _shorter(more: int) -> Callable[[np.ndarray, int], np.ndarray]:
    return lambda lengths, n: np.arange(n) < lengths[:, None] + more


LENGTH = Mistake(
    "lengths-off-by-one",
    "one key too many or too few is seen",
    "of a row of length 3 the positions 0, 1 and 2 are real, and position 3 is padding",
    "count the True in each row: as many as its length",
)
LEFT = Mistake(
    "padding-on-the-left",
    "the first positions are taken for padding",
    "here the real tokens come first, and padding after them",
    "position 0 of every row is real",
)
FIRST = Mistake(
    "mask-of-the-first-row",
    "every row has the first row's length",
    "rows differ in length",
    "give the lengths an axis of their own, so that each is compared with every position",
)
ACROSS = Mistake(
    "mask-transposed",
    "the mask is transposed: positions on rows",
    "there is a row for each text, and a column for each position",
    "the shape is (batch, n)",
)
PADDING = Exercise(
    8,
    "a padding mask",
    "08_masks",
    """Texts of different lengths were padded at their ends to n tokens. Write padding_mask(lengths, n): True where a
token is real. lengths has one whole number a text, the result the shape (batch, n), or (batch, 1, 1, n) for
heads and queries.""",
    "compare the position of each token with the length of its text",
    functions=(
        Function(
            "padding_mask", ("lengths", "n"), _shorter(0), padded,
            slips(
                (HIDES, lambda lengths, n: np.arange(n) >= lengths[:, None]),
                (LENGTH, _shorter(1)),
                (LENGTH, _shorter(-1)),
                (LEFT, lambda lengths, n: np.arange(n) >= n - lengths[:, None]),
                (FIRST, lambda lengths, n: np.arange(n) < np.full((len(lengths), 1), lengths[0])),
                (ACROSS, lambda lengths, n: np.arange(n)[:, None] < lengths),
                (ADDED, lambda lengths, n: np.where(np.arange(n) < lengths[:, None], 0.0, -np.inf)),
                (ADDED, lambda lengths, n: np.where(np.arange(n) < lengths[:, None], 0.0, -1e9)),
            ),
            reshaped=True,
        ),
    ),
    notes={"padding_mask": "lengths (batch,) and n → (batch, n): True where a token is real."},
)  # fmt: skip


def _band(back: int, ahead: int) -> Callable[[int, int], np.ndarray]:
    """Keys from `back` more than the window up to `ahead`."""

    def made(n: int, window: int) -> np.ndarray:
        apart = np.arange(n)[:, None] - np.arange(n)
        return (apart <= window + back) & (apart >= -ahead)

    return made


BOTH = Mistake(
    "window-on-both-sides",
    "the window reaches ahead too",
    "a query sees what came before it, and nothing that comes after",
    "no True stands to the right of the diagonal",
)
COUNTED = Mistake(
    "window-off-by-one",
    "the window is off by one",
    "`back` counts the keys before the query: with back = 1 it sees two, itself and the one before",
    "in a row far from the edge there are back + 1 True",
)
UNLIMITED = Mistake(
    "window-ignored",
    "a query sees everything before it, however far",
    "the window has no effect",
    "hide what is too far back as well",
)
AHEAD = Mistake(
    "window-ahead",
    "the window lies after the query, not before it",
    "rows are queries and columns are keys",
    "the last row sees the last keys",
)
WINDOW = Exercise(
    21,
    "a window mask",
    "19_sparse",
    """Write window_mask(n, back): (n, n), True where a query (row) sees a key (column): itself and the `back` keys
before it.""",
    "what counts is how far the key stands behind the query",
    functions=(
        Function(
            "window_mask", ("n", "back"), _band(0, 0),
            lambda: [{"n": n, "back": back} for n, back in ((1, 0), (2, 0), (2, 1), (3, 1), (5, 2), (7, 3))],
            slips(
                (HIDES, lambda n, back: ~_band(0, 0)(n, back)),
                (COUNTED, _band(-1, 0)),
                (COUNTED, _band(1, 0)),
                (BOTH, lambda n, back: _band(0, back)(n, back)),
                (BOTH, lambda n, back: _band(0, n)(n, back)),
                (UNLIMITED, lambda n, back: np.tri(n, dtype=bool)),
                (AHEAD, lambda n, back: _band(0, 0)(n, back).T),
                (ITSELF, _band(0, -1)),
                (ADDED, lambda n, back: np.where(_band(0, 0)(n, back), 0.0, -np.inf)),
            ),
        ),
    ),
    notes={"window_mask": "(n, n): True where query (row) sees key (column): itself and `back` before it."},
)  # fmt: skip

EXERCISES = (CAUSAL, PADDING, WINDOW)
