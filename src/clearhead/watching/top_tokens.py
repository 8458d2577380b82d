"""Which tokens a query looks at most, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clearhead.core.errors import ArgumentError


class Token(NamedTuple):
    """A token that is looked at: what it is called, where it stands, and its weight."""

    token: str
    position: int
    weight: float

    def __repr__(self) -> str:
        return f"{self.token!r} at {self.position}: {self.weight:.3f}"


def top_tokens(weights: np.ndarray, names: Sequence[str], count: int) -> list[Token]:
    """The `count` largest weights of one query (keys,), the largest first, and of equals the earliest.

    >>> top_tokens(np.array([0.2, 0.0, 0.5, 0.3]), ["the", "old", "river", "bank"], 2)
    ['river' at 2: 0.500, 'bank' at 3: 0.300]
    """
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
        raise ArgumentError("count", f"is {count!r}, expected a whole number, 0 or more")
    order = np.argsort(-weights, kind="stable")[:count]
    return [Token(names[place], int(place), float(weights[place])) for place in order if weights[place] > 0]
