"""What the page asks of observations alone: what they are, and the heat map where the whole matrix was observed."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.explorer.answers import Params, route, whole
from clearhead.explorer.heat_view import refuse_many, shades, sums
from clearhead.explorer.pooled import Layer, Pooled

GIVEN = "import clearhead as ch\n\nseen = ...  # as it was observed or watched\n"


@route("/about", of=Pooled)
def about(subject: Pooled, params: Params) -> Any:
    """What was observed, in names and sizes, and the views that it is enough for."""
    queries, tokens = subject.known
    return {
        "name": subject.name,
        "tokens": tokens,
        "query_tokens": queries,
        "heads": subject.heads,
        "shapes": {},
        "q": None,
        "k": None,
        "v": None,
        "mask": None,
        "scale": None,
        "softcap": None,
        "formula": "what was observed, without q, k and v",
        "given": GIVEN,
        "options": "",
        "python": f"{GIVEN}\nch.explore(seen)\n",
        "views": subject.views,
    }


@route("/matrix", of=Pooled)
def matrix(subject: Pooled, params: Params) -> Any:
    """The weights of one head, as they were observed."""
    layer, head = asked(subject, params)
    return weights_of(layer, head)


@route("/shade", of=Pooled)
def shade(subject: Pooled, params: Params) -> Any:
    """The same as shades. What a mask hides has weight 0; that is all that is known of it."""
    layer, head = asked(subject, params)
    return shades(weights_of(layer, head), None, params.get("scale_of", "linear"), True)


@route("/margins", of=Pooled)
def margins(subject: Pooled, params: Params) -> Any:
    """Sums of rows and columns, and entropy beside rows."""
    layer, head = asked(subject, params)
    found = weights_of(layer, head)
    received = found.sum(0) if layer.received is None else layer.received[head]
    return {"entropy": layer.entropy[head], "received": received, "allowed": None, **sums(found, None)}


def asked(subject: Pooled, params: Params) -> tuple[Layer, int]:
    """The layer and the head that are asked for."""
    if params.get("what", "weights") != "weights":
        raise ArgumentError("what", "needs q, k and v: of observations only weights are there")
    layer = subject.parts[subject.layer(params)]
    refuse_many(layer.entropy.shape[-1], layer.keys)
    return layer, whole(params, "head", subject.heads)


def weights_of(layer: Layer, head: int) -> np.ndarray:
    """The matrix of one head, where it was observed."""
    if layer.weights is None:
        raise ArgumentError("address", "needs the whole matrix: observe(weights=True) keeps it")
    return np.asarray(layer.weights[head], np.float64)
