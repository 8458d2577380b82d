"""A model that is explored: what was seen of it for each text, and any of its layers as the scene of one call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from clearhead.core.arrays import to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.explorer.scene import Scene, scene_of
from clearhead.watching.call import Call
from clearhead.watching.seen import Seen

LONGEST = 4000  # characters of a text
KEPT = 4  # texts whose answers are remembered


class Model:
    """What was seen of a model; `read` sees another text, on the live page."""

    def __init__(self, name: str, seen: Seen, *, text: str = "", read: Callable[[str], Seen] | None = None) -> None:
        if not len(seen):
            raise ArgumentError("seen", "has no calls: there is nothing to explore")
        if any(call.kept is None for call in seen):
            raise ArgumentError("seen", "did not keep queries, keys and values: watch(model, want={'keep': True}) does")
        self.name, self.text, self.read = name, text, read
        self.known: OrderedDict[str, Seen] = OrderedDict({text: seen})
        self.scenes: OrderedDict[tuple[str, int], Scene] = OrderedDict()

    def seen(self, params: Mapping[str, str]) -> Seen:
        """What was seen for the text that is asked for; its own unless there is another."""
        text = " ".join(params.get("text", self.text).split()) or self.text
        if len(text) > LONGEST:
            raise ArgumentError("text", f"has {len(text):,} characters, expected at most {LONGEST:,}")
        if text not in self.known:
            if self.read is None:
                raise ArgumentError("text", "can only be changed where the model is: clearhead explore --model")
            while len(self.known) > KEPT:
                self.known.popitem(last=False)
            self.known[text] = self.read(text)
        return self.known[text]

    def layers(self, params: Mapping[str, str]) -> list[Call]:
        """One call for each layer, those of the first step."""
        seen = self.seen(params)
        return [call for call in seen if call.step == 0]

    def scene(self, params: Mapping[str, str]) -> Scene:
        """The call of one layer, of which every view of a call can be asked."""
        calls = self.layers(params)
        text = params.get("layer", "")
        place = int(text) if text.isdigit() and len(text) < 6 else 0
        if place >= len(calls):
            raise ArgumentError("layer", f"is {text[:20]!r}, expected 0 to {len(calls) - 1}")
        key = (params.get("text", self.text), place)
        if key not in self.scenes:
            while len(self.scenes) > 64:
                self.scenes.popitem(last=False)
            self.scenes[key] = of_call(f"{self.name}, layer {calls[place].layer}", calls[place])
        return self.scenes[key]

    def facts(self, params: Mapping[str, str]) -> dict[str, Any]:
        """What a page has to know besides the call."""
        calls = self.layers(params)
        text = " ".join(params.get("text", self.text).split()) or self.text
        return {"layers": [call.layer for call in calls], "text": text, "reads": self.read is not None}


def of_call(name: str, call: Call) -> Scene:
    """The scene of one call of a model, of its first batch row."""
    steps = call.trace(0)
    problem = steps.problem
    queries, keys = (None if names is None else names[0] for names in (call.queries_named, call.keys_named))
    options: dict[str, Any] = {name: getattr(problem, name) for name in ("mask", "bias", "scale", "softcap", "sinks")}
    arrays = [np.asarray(to_numpy(a), np.float64) for a in (problem.q, problem.k, problem.v)]
    return scene_of(*arrays, name=name, tokens=keys, query_tokens=queries, **options)
