"""Whole layers as worked examples, as plain data: x, positions and projections; results are always computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class LayerExample:
    """One small multi-head layer: tokens, x (T, E), positions (T, E), w_q, w_k, w_v, w_o (E, E), and how many heads."""

    name: str
    about: str
    tokens: tuple[str, ...]
    query: str
    heads: int
    x: np.ndarray
    positions: np.ndarray
    w_q: np.ndarray
    w_k: np.ndarray
    w_v: np.ndarray
    w_o: np.ndarray

    @property
    def arguments(self) -> dict[str, Any]:
        """What `clearhead.trace_layer` is given."""
        names = ("x", "w_q", "w_k", "w_v", "w_o", "heads", "positions")
        return {name: getattr(self, name) for name in names}


# The hand of a clock, an eighth of a turn for each word, in round numbers
_PLACES = [[3.0, 0.0], [2.0, 2.0], [0.0, 3.0], [-2.0, 2.0], [-3.0, 0.0], [-2.0, -2.0], [0.0, -3.0]]

LAYERS: dict[str, LayerExample] = {
    example.name: example
    for example in (
        LayerExample(
            name="bank_river",
            about="which bank? vectors made by hand: water, money, and two features that say where a word stands;"
            " head 0 looks for a like meaning, head 1 at the word before",
            tokens=("I", "saw", "the", "bank", "near", "the", "river"),
            query="bank",
            heads=2,
            # water, money: a bank may be either, a river is water and no more
            x=np.array(
                [
                    [0.0, 0.0, 0.0, 0.0],
                    [0.0, 0.0, 0.0, 0.0],
                    [0.0, 0.0, 0.0, 0.0],
                    [1.0, 1.0, 0.0, 0.0],
                    [0.5, 0.0, 0.0, 0.0],
                    [0.0, 0.0, 0.0, 0.0],
                    [3.0, 0.0, 0.0, 0.0],
                ]
            ),
            positions=np.array([[0.0, 0.0, *place] for place in _PLACES]),
            # head 0 asks with the meaning; head 1 with the place, an eighth of a turn back
            w_q=np.array([[2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.75, -0.75], [0.0, 0.0, 0.75, 0.75]]),
            w_k=np.eye(4),
            # both heads pass on the meaning that they find
            w_v=np.array([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]),
            # what head 1 finds counts half
            w_o=np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0]]),
        ),
    )
}
