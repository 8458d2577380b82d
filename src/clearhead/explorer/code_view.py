"""What the code view asks for: the formula in plain NumPy, line by line, with what each line gave for this call."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.explorer.answers import Params, route, whole
from clearhead.explorer.scene import Scene

MOST_SHOWN = 24  # rows and columns of a value that is shown

# each line binds one name; `mask` and `softcap` lines are left out of a call that has none
LINES = (
    ("scores", "scores = q @ k.T", "one product for each query and key"),
    ("scores", "scores = scores * scale", "so that scores spread alike whatever d is"),
    ("scores", "scores = softcap * np.tanh(scores / softcap)", "no score leaves ± softcap"),
    ("scores", "scores = np.where(allowed, scores, -np.inf)", "what is hidden cannot be chosen"),
    ("largest", "largest = scores.max(axis=-1, keepdims=True)", "taken off, so that no exponential overflows"),
    ("e", "e = np.exp(scores - largest)", "positive, and largest where the score is"),
    ("total", "total = e.sum(axis=-1, keepdims=True)", "one number a query"),
    ("weights", "weights = e / total", "each row sums to one"),
    ("output", "output = weights @ v", "the average of the values, by weight"),
)


@route("/code")
def code(scene: Scene, params: Params) -> Any:
    """Each line, its shape and values, as NumPy gives them; the last is what `attention` gives."""
    scene = scene.edited(params)
    head = whole(params, "head", scene.heads)
    row = scene.trace(0, head).row
    group = scene.heads // scene.k.shape[0]
    names: dict[str, Any] = {
        "np": np, "q": scene.q[head], "k": scene.k[head // group], "v": scene.v[head // group],
        "scale": row.scale, "softcap": scene.options.get("softcap"), "allowed": None,
    }  # fmt: skip
    mask = scene.options.get("mask")
    if mask is not None:
        dense = np.asarray(mask.dense(scene.queries, scene.keys, heads=scene.heads)) if hasattr(mask, "dense") else mask
        names["allowed"] = np.broadcast_to(np.asarray(dense), (scene.heads, scene.queries, scene.keys))[head]
    told = []
    for name, line, says in LINES:
        if ("softcap" in line and names["softcap"] is None) or ("allowed" in line and names["allowed"] is None):
            continue
        with np.errstate(all="ignore"):
            exec(line, names)  # lines of this file, none of a request
        found = np.asarray(names[name])
        told.append(
            {"line": line, "says": says, "shape": found.shape, "value": found[:MOST_SHOWN, :MOST_SHOWN], "name": name}
        )
    return told
