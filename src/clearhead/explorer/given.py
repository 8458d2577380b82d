"""A small call that the page itself hands over, as an example of something that went wrong: arrays as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from clearhead.core.array_masks import where
from clearhead.core.errors import ArgumentError
from clearhead.core.spelling import read_mask
from clearhead.explorer.scene import Scene, scene_of

MOST = 4096  # numbers of an array


def given_scene(text: str) -> Scene:
    """The scene of `{"q": [[…]], "k": [[…]], "v": [[…]]}`, with `"mask"` in words or `"allowed"` in 0 and 1.

    >>> given_scene('{"q": [[1, 0]], "k": [[1, 2], [3, 4]], "v": [[5], [6]], "mask": "causal()"}').keys
    2
    """
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, Mapping):
        raise ArgumentError("given", "is no call, expected q, k and v as JSON")
    options: dict[str, Any] = {}
    if isinstance(read.get("mask"), str):
        options["mask"] = read_mask(read["mask"], "given")
    elif read.get("allowed") is not None:
        options["mask"] = where(_array(read, "allowed") > 0)
    tokens = read.get("tokens")
    if tokens is not None and not (isinstance(tokens, list) and all(isinstance(one, str) for one in tokens)):
        raise ArgumentError("given", "has tokens that are no list of names")
    return scene_of(*(_array(read, name) for name in "qkv"), name="example", tokens=tokens, **options)


def _array(read: Mapping[str, Any], name: str) -> np.ndarray:
    try:
        array = np.asarray(read.get(name), np.float64)
    except (TypeError, ValueError):
        array = np.zeros(())
    if array.ndim not in (2, 3) or array.size > MOST:
        raise ArgumentError("given", f"has no {name} of two or three axes and at most {MOST:,} numbers")
    return array
