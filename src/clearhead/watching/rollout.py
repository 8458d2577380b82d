"""Attention rollout: a query followed through all layers down to the input, vector by vector.

Abnar and Zuidema, "Quantifying Attention Flow in Transformers" (2020, arXiv:2005.00928): with the residual connection
each layer mixes positions by A = ½ W + ½ I, W the mean over heads, and the whole model by the product of them all. Row
i of that product is e_i · A_last · … · A_first: as many products of a vector and a matrix as there are layers, of which
none has to be built.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.watching.call import Call, whole_numbers
from clearhead.watching.record import Record

# rows that are carried at once: they are the features of one call
TOGETHER = 64


def layers_for(seen: Record) -> list[Call]:
    """The calls to follow, first layer first, or words that say why they cannot be followed."""
    if not len(seen):
        raise ArgumentError("seen", "has no calls")
    for call in seen:
        if len(call.shape) < 3:
            raise ArgumentError(
                "seen", f"has {call.name!r} without heads, (queries, keys) alone, which is not followed"
            )
        if call.shape[-2] != call.shape[-1]:
            raise ArgumentError(
                "seen",
                f"has {call.name!r} with {call.shape[-2]} queries and {call.shape[-1]} keys: only calls of a sequence"
                " on itself can be followed; choose them by step() or named()",
            )
        if call.shape[-1] != seen[0].shape[-1] or call.shape[:-3] != seen[0].shape[:-3]:
            raise ArgumentError("seen", "has calls of different lengths: choose a step(), or some by named()")
    if len({call.step for call in seen}) > 1:
        raise ArgumentError("seen", "has more than one step: choose one by step()")
    return list(seen)


def check_share(residual: float) -> None:
    """The share of the residual connection is one."""
    if isinstance(residual, bool) or not isinstance(residual, int | float | np.number) or not 0 <= residual <= 1:
        raise ArgumentError("residual", f"is {residual!r}, expected a share from 0 to 1")


def rollout(seen: Record, query: int | Sequence[int] | None = None, *, residual: float = 0.5) -> np.ndarray:
    """What each query's output is made of, in shares of the input positions: (…, queries, positions).

    One `query` gives (…, positions). Without one all are followed, and the answer itself is a matrix of n × n. Watching
    must have kept weights, or queries and keys: `want={"keep": True}`. What goes to a sink is lost on the way.

    >>> import torch, clearhead as ch
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3).eval()
    >>> with ch.watch(model, want={"keep": True}) as seen:
    ...     output = model(torch.zeros(1, 7, 16))
    >>> seen.rollout(-1).round(3).tolist()
    [[0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.25]]
    """
    calls = layers_for(seen)
    *lead, _, length, _ = calls[0].shape
    check_share(residual)
    places = range(length) if query is None else whole_numbers("query", query, length)
    found = []
    for start in range(0, len(places), TOGETHER):
        some = [place % length for place in places[start : start + TOGETHER]]
        rows = np.zeros((*lead, len(some), length))
        rows[..., np.arange(len(some)), some] = 1.0
        for call in reversed(calls):
            heads = call.shape[-3]
            back = np.broadcast_to(rows[..., None, :, :], (*lead, heads, *rows.shape[-2:]))
            rows = (1.0 - residual) * call.carried(back).mean(-3) + residual * rows
        found.append(rows)
    whole = np.concatenate(found, axis=-2) if found else np.zeros((*lead, 0, length))
    return whole[..., 0, :] if isinstance(query, int | np.integer) else whole
