"""From scores to weights: the softmax over keys, and what is taken for it."""

from __future__ import annotations

import numpy as np

from clearhead.core.formula import softmax

# Mistakes that hardly come in pairs with others
RARE_AXES = (
    "shifted over queries",
    "maximum over queries",
    "keepdims",
    "keepdims shifted",
    "norm",
    "logarithm",
    "one more",
    "one more shifted",
    "largest",
)


def weighed(axis: str, scores: np.ndarray) -> np.ndarray:
    """Weights (…, T, S) of scores, along one axis or by something that is no softmax."""
    if axis == "keys":
        return softmax(scores)[0]
    if axis == "twice":
        return softmax(softmax(scores)[0])[0]
    if axis == "all":
        return softmax(scores.reshape(1, -1))[0].reshape(scores.shape)
    if axis in ("queries", "heads", "batch"):
        place = {"queries": -2, "heads": -3, "batch": 0}[axis]
        return np.moveaxis(softmax(np.moveaxis(scores, place, -1))[0], -1, place)
    if axis == "exponentials":
        return np.exp(scores)
    if axis == "shifted exponentials":
        return np.exp(scores - scores.max(-1, keepdims=True))
    if axis in RARE_AXES and axis != "norm":
        return _rare(axis, scores)
    scores = np.where(np.isfinite(scores), scores, 0.0)
    size = np.abs(scores)
    divided = {
        "norm": (scores, np.sqrt((scores**2).sum(-1, keepdims=True))),
        "sum": (scores, scores.sum(-1, keepdims=True)),
        "absolute sum": (scores, size.sum(-1, keepdims=True)),
        "sum of absolutes": (size, size.sum(-1, keepdims=True)),
        "positive sum": (np.maximum(scores, 0), np.maximum(scores, 0).sum(-1, keepdims=True)),
        "maximum": (scores, scores.max(-1, keepdims=True)),
        "absolute maximum": (scores, size.max(-1, keepdims=True)),
    }.get(axis)
    return scores if divided is None else divided[0] / divided[1]


def _rare(axis: str, scores: np.ndarray) -> np.ndarray:
    fresh = np.exp(scores - scores.max(-1, keepdims=True))
    if axis == "shifted over queries":
        return fresh / fresh.sum(-2, keepdims=True)
    if axis == "maximum over queries":
        return softmax(scores - scores.max(-2, keepdims=True))[0]
    if axis.startswith("keepdims"):  # a row of sums, laid over the columns
        if scores.shape[-1] != scores.shape[-2]:
            return np.full_like(scores, np.nan)
        fresh = fresh if axis.endswith("shifted") else np.exp(scores)
        return fresh / fresh.sum(-1)[..., None, :]
    if axis == "logarithm":
        return np.log(softmax(scores)[0])
    if axis.startswith("one more"):
        fresh = fresh if axis.endswith("shifted") else np.exp(scores)
        return fresh / (1.0 + fresh.sum(-1, keepdims=True))
    return (scores == scores.max(-1, keepdims=True)).astype(float)
