"""What the code view asks for: the formula in plain NumPy, line by line, with what each line gave for this call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clearhead.explorer.answers import Params, route, whole
from clearhead.explorer.scene import Scene

MOST_SHOWN = 24  # rows and columns of a value that is shown

# each line binds one name; those that use an option are left out of a call that does not have it
OPTIONS = ("softcap", "bias", "allowed", "sink")
LINES = (
    ("scores", "scores = q @ k.T", "one product for each query and key"),
    ("scores", "scores = scores * scale", "so that scores spread alike whatever d is"),
    ("scores", "scores = softcap * np.tanh(scores / softcap)", "no score leaves ± softcap"),
    ("scores", "scores = scores + bias", "what positions add to each pair"),
    ("scores", "scores = np.where(allowed, scores, -np.inf)", "what is hidden cannot be chosen"),
    ("largest", "largest = scores.max(axis=-1, keepdims=True)", "taken off, so that no exponential overflows"),
    ("largest", "largest = np.maximum(largest, sink)", "the sink is one score more"),
    ("e", "e = np.exp(scores - largest)", "positive, and largest where the score is"),
    ("total", "total = e.sum(axis=-1, keepdims=True)", "one number a query"),
    ("total", "total = total + np.exp(sink - largest)", "and takes its share, for nothing"),
    ("weights", "weights = e / total", "each row sums to one"),
    ("output", "output = weights @ v", "the average of the values, by weight"),
)


@route("/code")
def code(scene: Scene, params: Params) -> Any:
    """Each line, its shape and values, as NumPy gives them; the last is what `attention` gives."""
    scene = scene.edited(params)
    names: dict[str, Any] = {"np": np, **called(scene, params)}
    first = begin(scene, params, names)
    told = []
    for name, line, says in LINES:
        if any(option in line and names[option] is None for option in OPTIONS):
            continue
        with np.errstate(all="ignore"):
            exec(line, names)  # lines of this file, none of a request
        found = np.asarray(names[name])
        told.append(
            {"line": line, "says": says, "shape": found.shape, "value": found[:MOST_SHOWN, :MOST_SHOWN], "name": name}
        )
    program = [*first, *(str(one["line"]) for one in told), "print(output)"]
    return {"lines": told, "python": "\n".join(program)}


def begin(scene: Scene, params: Params, names: Mapping[str, Any]) -> list[str]:
    """What has to be defined, beside q, k and v, before the lines can be run elsewhere."""
    head, group = whole(params, "head", scene.heads), scene.heads // scene.k.shape[0]
    lines = [f"q, k, v = q[{head}], k[{head // group}], v[{head // group}]"] if scene.heads > 1 else []
    for name in ("scale", *OPTIONS):
        if names[name] is not None:
            value = names[name]
            text = f"np.array({value.tolist()})" if isinstance(value, np.ndarray) else repr(value)
            lines.append(f"{name} = {text}")
    return lines


def called(scene: Scene, params: Params) -> dict[str, Any]:
    """What the lines begin with: q, k and v of one head, the scale, and which pairs are seen."""
    head = whole(params, "head", scene.heads)
    group = scene.heads // scene.k.shape[0]
    allowed = None
    mask = scene.options.get("mask")
    if mask is not None:
        dense = np.asarray(mask.dense(scene.queries, scene.keys, heads=scene.heads) if hasattr(mask, "dense") else mask)
        allowed = np.broadcast_to(dense, (scene.heads, scene.queries, scene.keys))[head]
    rows = [scene.trace(i, head).row for i in range(scene.queries if scene.options.get("bias") is not None else 1)]
    return {
        "q": scene.q[head], "k": scene.k[head // group], "v": scene.v[head // group],
        "scale": rows[0].scale, "softcap": rows[0].softcap, "allowed": allowed, "sink": rows[0].sink,
        "bias": None if rows[0].bias is None else np.stack([row.bias for row in rows if row.bias is not None]),
    }  # fmt: skip
