"""What the comparison asks for: the same numbers under several mechanisms, and how far their outputs are apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.calls import observe
from clearhead.core.masks import causal, window
from clearhead.core.positions import alibi, rotary
from clearhead.explorer.answers import Params, route
from clearhead.explorer.scene import Scene


@route("/compare")
def compare(scene: Scene, params: Params) -> Any:
    """Each mechanism: the weights of its first head, its output, and the largest difference from full attention."""
    scene = scene.edited(params)
    q, k, v = scene.q, scene.k, scene.v
    square = scene.queries == scene.keys
    ways: list[tuple[str, str, Any]] = [
        ("full", "every key", observe(q, k, v, weights=True)),
        ("causal", "no key after the query", observe(q, k, v, mask=causal(), weights=True)),
        ("window(1, 1)", "one key to either side", observe(q, k, v, mask=window(1, 1), weights=True)),
        ("ALiBi", "farther keys score less", observe(q, k, v, bias=alibi(scene.heads), mask=causal(), weights=True)),
    ]
    if q.shape[-1] % 2 == 0 and square:
        turned_q, turned_k = (np.asarray(rotary()(a)) for a in (q, k))
        ways.append(("rotary", "turned by position", observe(turned_q, turned_k, v, weights=True)))
    if q.shape[-1] % 2 == 0 and scene.heads == 1:
        half = q.shape[-1] // 2
        pair = np.concatenate([q[..., :half], q[..., half:]])
        found = observe(pair, k[..., :half], v, weights=True)
        ways.append(("grouped, 2 heads", "both halves of q over the first half of k", found))
    first = ways[0][2].output[0]
    return [
        {
            "name": name,
            "says": says,
            "weights": seen.weights[0],
            "output": seen.output[0],
            "difference": float(np.abs(seen.output[0] - first).max()),
        }
        for name, says, seen in ways
    ]
