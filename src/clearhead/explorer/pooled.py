"""What was observed of attention, without the arrays that it came from: pooled maps, what keys received, top keys.

Of a long context this is all there is: nobody keeps the matrix. One `Observed` is one layer; a watched model has many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never

import numpy as np

from clearhead.core.arrays import to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.observations import OBSERVATIONS, Observed
from clearhead.explain.tokens import names_for
from clearhead.explorer.layered import SIDE, Layered, Look, Names, largest, side_for
from clearhead.watching.seen import Seen

SHOWN = ("map", "received", "top", "queries", "weights")


@dataclass(frozen=True, eq=False)
class Layer:
    """What was observed of one layer, of its first batch row: each array begins with heads; what was not is None."""

    number: int
    keys: int
    entropy: np.ndarray  # (heads, queries)
    map: np.ndarray | None = None
    received: np.ndarray | None = None
    top: tuple[np.ndarray, np.ndarray] | None = None
    rows: tuple[list[int], np.ndarray] | None = None
    weights: np.ndarray | None = None
    distance: np.ndarray | None = None

    def row(self, head: int, query: int) -> np.ndarray | None:
        """The exact weights of one query, where they were observed."""
        if self.weights is not None:
            return np.asarray(self.weights[head, query], np.float64)
        if self.rows is not None and query in self.rows[0]:
            return np.asarray(self.rows[1][head, self.rows[0].index(query)], np.float64)
        return None


class Pooled(Layered):
    """Layers of which only observations are left. `seen` is there where they were watched: it can follow them."""

    def __init__(
        self,
        name: str,
        layers: Sequence[Layer],
        queries: Names,
        keys: Names,
        seen: Seen | None = None,
    ) -> None:
        if len({one.entropy.shape for one in layers}) > 1 or len({one.keys for one in layers}) > 1:
            raise ArgumentError("q", "has layers of different sizes: choose a step(), or some of them by named()")
        self.name, self.parts, self.known, self.watched = name, list(layers), (queries, keys), seen
        self.glances: list[Look] | None = None

    @property
    def heads(self) -> int:
        """How many heads each layer has."""
        return int(self.parts[0].entropy.shape[0])

    @property
    def views(self) -> list[str]:
        """The views that what was observed is enough for."""
        there = [name for name in ("map", "weights") if getattr(self.parts[0], name) is not None]
        found = ["heat"] if "weights" in there else []
        found += ["heads"] if there else []
        return [*found, "long"]

    def scene(self, params: Mapping[str, str]) -> Never:
        """There is no call to compute anything of."""
        raise ArgumentError("address", "needs q, k and v: explore(q, k, v), or watch(model, want={'keep': True})")

    def facts(self, params: Mapping[str, str]) -> dict[str, Any]:
        """What a page has to know."""
        numbers = [one.number for one in self.parts]
        return {
            "layers": numbers,
            "text": "",
            "reads": False,
            "whole": self.parts[0].weights is not None,
            "side": side_for(len(numbers) * self.heads),
        }

    def looks(self, params: Mapping[str, str]) -> list[Look]:
        """Every layer at a glance, computed once."""
        if self.glances is None:
            self.glances = [glance(one) for one in self.parts]
        return self.glances

    def weights(self, params: Mapping[str, str], layer: int) -> np.ndarray:
        """The whole matrix of each head, where it was observed."""
        found = self.parts[layer].weights
        if found is None:
            raise ArgumentError("address", "needs the whole matrix: observe(weights=True) keeps it")
        return found

    def names(self, params: Mapping[str, str]) -> tuple[Names, Names]:
        """What queries and keys are called."""
        return self.known

    def rollout(self, params: Mapping[str, str]) -> np.ndarray:
        """Each query followed through all layers, where they were watched."""
        if self.watched is None:
            raise ArgumentError("address", "follows layers of a watched model: explore(seen)")
        found = np.asarray(self.watched.rollout())
        return found.reshape(-1, *found.shape[-2:])[0]


def glance(one: Layer) -> Look:
    """One layer at a glance."""
    seen = one.map if one.map is not None else None if one.weights is None else largest(one.weights, SIDE)
    first = None
    if one.received is not None:
        total = one.received.sum(-1)
        first = one.received[:, 0] / np.where(total > 0, total, 1.0)
    elif one.weights is not None:
        first = one.weights[..., 0].mean(-1)
    far = None if one.distance is None else np.nan_to_num(one.distance).mean(-1)
    return Look(np.nan_to_num(one.entropy).mean(-1), far, first, seen)


def pooled_of(
    given: Observed | Sequence[Observed],
    tokens: Sequence[str] | None,
    query_tokens: Sequence[str] | None,
    name: str = "observed",
) -> Pooled:
    """One `Observed`, or one for each layer.

    How many keys there are is what received, exact rows or the whole matrix say, or the tokens; a map alone is taken as
    that of a sequence on itself.
    """
    every = [given] if isinstance(given, Observed) else list(given)
    count = None if tokens is None else len(tokens)
    layers = [layer_of(one, number, count) for number, one in enumerate(every)]
    return Pooled(name, layers, *names_of(layers[0], tokens, query_tokens))


def pooled_seen(seen: Seen, name: str = "model") -> Pooled:
    """What was watched of a model without keeping queries and keys: its first step, a layer for each call."""
    calls = [call for call in seen if call.step == 0]
    layers = [layer_of(call.observed, call.layer, call.keys, call.distance) for call in calls]
    queries, keys = calls[0].names(0)
    return Pooled(name, layers, queries, keys, seen.step(0))


def names_of(layer: Layer, tokens: Sequence[str] | None, query_tokens: Sequence[str] | None) -> tuple[Names, Names]:
    """What the queries and the keys are called."""
    keys = names_for("tokens", tokens, layer.keys, "keys")
    queries = layer.entropy.shape[-1]
    if query_tokens is None and queries == layer.keys:
        query_tokens = keys
    return names_for("query_tokens", query_tokens, queries, "queries"), keys


def layer_of(seen: Observed, number: int, keys: int | None, distance: Any = None) -> Layer:
    """The first batch row of what was observed of one call."""
    there = {name: value for name in SHOWN if (value := getattr(seen, name)) is not None}
    if not there:
        raise ArgumentError(
            "q", "is an Observed with nothing to look at: observe(map=(64, 64), received=True, top=4) gives something"
        )
    lead = len(seen.lse.shape) - 1  # batch axes and heads, which a call of two axes has not

    def first(array: Any) -> np.ndarray:
        found = to_numpy(array)
        return found[None] if lead == 0 else found.reshape(-1, *found.shape[lead - 1 :])[0]

    said = [count for name, value in there.items() if (count := OBSERVATIONS[name].keys(value)) is not None]
    count = said[0] if said else keys if keys is not None else int(seen.lse.shape[-1])
    return Layer(
        number,
        count,
        first(seen.entropy),
        None if seen.map is None else first(seen.map.max),
        None if seen.received is None else first(seen.received),
        None if seen.top is None else (first(seen.top.indices), first(seen.top.weights)),
        None if seen.queries is None else (np.asarray(seen.queries.indices).tolist(), first(seen.queries.weights)),
        None if seen.weights is None else first(seen.weights),
        None if distance is None else first(distance),
    )
