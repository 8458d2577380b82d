"""A model that is explored: what was seen of it for each text, and any of its layers as the scene of one call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from clearhead.calls import observe
from clearhead.core.arrays import to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.explorer.layered import Layered, Look, Names, side_for
from clearhead.explorer.scene import Scene, scene_of
from clearhead.watching.call import Call
from clearhead.watching.distance import mean_distance
from clearhead.watching.seen import Seen

LONGEST = 4000  # characters of a text
KEPT = 4  # texts whose answers are remembered
SIDE = 48  # cells of a head's map, each way, at most
MOST_PAIRS = 2**22  # of a layer that is looked at beside all others


class Model(Layered):
    """What was seen of a model; `read` sees another text, on the live page."""

    def __init__(self, name: str, seen: Seen, *, text: str = "", read: Callable[[str], Seen] | None = None) -> None:
        if not len(seen):
            raise ArgumentError("seen", "has no calls: there is nothing to explore")
        if any(call.kept is None for call in seen):
            raise ArgumentError("seen", "did not keep queries, keys and values: watch(model, want={'keep': True}) does")
        self.name, self.text, self.read = name, text, read
        self.known: OrderedDict[str, Seen] = OrderedDict({text: seen})
        self.scenes: OrderedDict[tuple[str, int], Scene] = OrderedDict()
        self.looked: OrderedDict[str, list[Look]] = OrderedDict()
        self.turn = threading.RLock()  # a page asks for several things of a new text at once: one of them reads it

    def asked(self, params: Mapping[str, str]) -> str:
        """The text that is asked for; its own unless there is another."""
        return " ".join(params.get("text", self.text).split()) or self.text

    def seen(self, params: Mapping[str, str]) -> Seen:
        """What was seen for the text that is asked for."""
        text = self.asked(params)
        if len(text) > LONGEST:
            raise ArgumentError("text", f"has {len(text):,} characters, expected at most {LONGEST:,}")
        with self.turn:
            if text not in self.known:
                if self.read is None:
                    raise ArgumentError("text", "can only be changed where the model is: clearhead explore --model")
                remember(self.known, text, self.read(text), KEPT + 1)
            return self.known[text]

    def layers(self, params: Mapping[str, str]) -> list[Call]:
        """One call for each layer, those of the first step."""
        return [call for call in self.seen(params) if call.step == 0]

    def scene(self, params: Mapping[str, str]) -> Scene:
        """The call of one layer, of which every view of a call can be asked."""
        place = self.layer(params)
        key = (self.asked(params), place)
        with self.turn:
            if key not in self.scenes:
                call = self.layers(params)[place]
                remember(self.scenes, key, of_call(f"{self.name}, layer {call.layer}", call), 64)
            return self.scenes[key]

    def facts(self, params: Mapping[str, str]) -> dict[str, Any]:
        """What a page has to know besides the call."""
        calls = self.layers(params)
        return {
            "layers": [call.layer for call in calls],
            "text": self.asked(params),
            "reads": self.read is not None,
            "whole": True,
            "side": side_for(len(calls) * calls[0].shape[-3]),
        }

    def looks(self, params: Mapping[str, str]) -> list[Look]:
        """Every layer at a glance, computed once for a text and without any matrix."""
        text = self.asked(params)
        calls = self.layers(params)
        with self.turn:
            if text not in self.looked:
                remember(self.looked, text, [self.look(params, place, call) for place, call in enumerate(calls)], KEPT)
            return self.looked[text]

    def look(self, params: Mapping[str, str], place: int, call: Call) -> Look:
        """One layer at a glance."""
        scene = self.scene({**params, "layer": str(place)})
        if scene.queries * scene.keys > MOST_PAIRS:
            raise ArgumentError("text", f"has {scene.keys:,} tokens: look at one layer, in Long context")
        side = (min(SIDE, scene.queries), min(SIDE, scene.keys))
        seen: Any = observe(scene.q, scene.k, scene.v, map=side, received=True, **scene.options)
        assert call.kept is not None
        far = mean_distance(call.kept.in_float64())
        rows = None if far is None else to_numpy(far).reshape(-1, scene.heads, scene.queries)[0]
        return Look(
            np.asarray(seen.entropy).mean(-1),
            None if rows is None else np.nan_to_num(rows).mean(-1),
            np.asarray(seen.received)[:, 0] / scene.queries,
            np.asarray(seen.map.max),
        )

    def weights(self, params: Mapping[str, str], layer: int) -> np.ndarray:
        """The whole matrix of each head of a layer."""
        scene = self.scene({**params, "layer": str(layer)})
        return np.asarray(observe(scene.q, scene.k, scene.v, weights=True, **scene.options).weights)

    def names(self, params: Mapping[str, str]) -> tuple[Names, Names]:
        """What queries and keys are called."""
        scene = self.scene(params)
        return scene.query_tokens, scene.tokens

    def rollout(self, params: Mapping[str, str]) -> np.ndarray:
        """Each query followed through all layers."""
        found = np.asarray(self.seen(params).rollout())
        return found.reshape(-1, *found.shape[-2:])[0]


def remember(known: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Keep a value, and forget the oldest past `most`."""
    while len(known) >= most:
        known.popitem(last=False)
    known[key] = value


def of_call(name: str, call: Call) -> Scene:
    """The scene of one call of a model, of its first batch row."""
    steps = call.trace(0)
    problem = steps.problem
    queries, keys = (None if names is None else names[0] for names in (call.queries_named, call.keys_named))
    options: dict[str, Any] = {name: getattr(problem, name) for name in ("mask", "bias", "scale", "softcap", "sinks")}
    arrays = [np.asarray(to_numpy(a), np.float64) for a in (problem.q, problem.k, problem.v)]
    return scene_of(*arrays, name=name, tokens=keys, query_tokens=queries, **options)
