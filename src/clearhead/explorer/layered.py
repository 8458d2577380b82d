"""What has layers of heads: a model that reads texts, or what was observed of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.core.grid import bins

SIDE = 256  # cells of a map, each way, at most
MOST_TONES = 6_000_000  # bytes of all heads' maps: a thousand heads in some megabytes
Params = Mapping[str, str]
Names = tuple[str, ...]


class Look(NamedTuple):
    """One layer at a glance, a number or a map for each head; what was not observed is None.

    `entropy`, `distance` and `first` are (heads,): means over queries. `map` is (heads, rows, columns): the largest
    weight of each block.
    """

    entropy: np.ndarray
    distance: np.ndarray | None
    first: np.ndarray | None
    map: np.ndarray | None


class Layered:
    """What is explored by layers and heads. `Model` computes what is asked for, `Pooled` has what was observed."""

    name: str
    text: str = ""

    def facts(self, params: Params) -> dict[str, Any]:
        """What a page has to know: the numbers of the layers, the text, and whether another one can be read."""
        raise NotImplementedError

    def looks(self, params: Params) -> list[Look]:
        """Every layer at a glance."""
        raise NotImplementedError

    def weights(self, params: Params, layer: int) -> np.ndarray:
        """The whole matrix of each head of a layer, (heads, queries, keys)."""
        raise NotImplementedError

    def names(self, params: Params) -> tuple[Names, Names]:
        """What queries and keys are called."""
        raise NotImplementedError

    def rollout(self, params: Params) -> np.ndarray:
        """Each query followed through all layers, (queries, positions)."""
        raise NotImplementedError

    def layer(self, params: Params) -> int:
        """The place of the layer that is asked for."""
        count = len(self.facts(params)["layers"])
        text = params.get("layer", "")
        place = int(text) if text.isdigit() and len(text) < 6 else 0
        if place >= count:
            raise ArgumentError("layer", f"is {text[:20]!r}, expected 0 to {count - 1}")
        return place


def side_for(heads: int) -> int | None:
    """How far the maps of so many heads are pooled, so that one file holds them all; None where nothing forces it.

    >>> side_for(12), side_for(1024)
    (None, 76)
    """
    side = int((MOST_TONES / heads) ** 0.5)
    return side if side < SIDE else None


def largest(rows: np.ndarray, side: int) -> np.ndarray:
    """The largest of each block of the last two axes, at most `side` each way; blocks as `observe(map=…)` has them.

    >>> largest(np.arange(10.0).reshape(2, 5), 2).tolist()
    [[2.0, 4.0], [7.0, 9.0]]
    """
    for axis in (-2, -1):
        starts = [one.start for one in bins(rows.shape[axis], side)]
        if 0 < len(starts) < rows.shape[axis]:
            rows = np.maximum.reduceat(rows, starts, axis=axis)
    return rows
