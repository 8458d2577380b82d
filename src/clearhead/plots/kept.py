"""A picture of what a cache kept: a row for each layer and key head, a column for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.core.arrays import is_array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.plots.canvas import WEIGHTS, label_positions, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_kept(cache: Any, tokens: Sequence[str] | None = None, *, row: int = 0, ax: Axes | None = None) -> Axes:
    """Draw which tokens a cache that evicts still holds: a row for each layer and key head, dark where one was kept.

    >>> import torch, clearhead as ch
    >>> from clearhead.nn.eviction import StreamingLLM
    >>> cache = ch.nn.KVCache(keep=StreamingLLM(keep=6, sinks=2))
    >>> with torch.no_grad():
    ...     output = ch.nn.MultiHeadAttention(8, 2, causal=True).eval()(torch.randn(1, 9, 8), cache=cache)
    >>> ch.plot_kept(cache).get_xlabel()
    'token'

    `cache` is a `KVCache(keep=…)`, a list of them, one for each layer, or an `EvictingCache`. `tokens` are the words so
    far; `row` is the batch row.
    """
    layers = _layers(cache)
    names, rows = [], []
    length = max(int(positions.max(initial=-1)) for positions in layers.values()) + 1
    if tokens is not None:
        if len(tokens) < length:
            raise ArgumentError("tokens", f"has {len(tokens)} words, expected one for each of {length} tokens so far")
        length = len(tokens)
    for layer, positions in layers.items():
        if not -len(positions) <= row < len(positions):
            raise ArgumentError("row", f"is {row}, expected one of {len(positions)} batch rows")
        for head, held in enumerate(positions[row]):
            line = np.zeros(length)
            line[held[held >= 0]] = 1.0
            rows.append(line)
            names.append(f"{layer}.{head}" if len(layers) > 1 else f"{head}")
    if ax is None:
        ax = new_axes(height=max(1.6, min(4.8, 0.6 + 0.16 * len(rows))))[0, 0]
    ax.imshow(np.array(rows), cmap=WEIGHTS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    label_positions(ax, length if tokens is None else list(tokens), names)
    ax.set_xlabel("token")
    ax.set_ylabel("layer.head" if len(layers) > 1 else "head")
    held = np.array(rows).sum(1).mean()
    ax.set_title(f"{held:.4g} of {length} tokens kept a head")
    return ax


def _layers(cache: Any) -> dict[int, np.ndarray]:
    """The positions that each layer holds, (batch, heads, slots), for those that let any go."""
    if isinstance(cache, list | tuple):
        given = [getattr(one, "positions", one) for one in cache]
    else:
        given = getattr(cache, "positions", cache)
        given = given if isinstance(given, list) else [given]
    found = {n: to_numpy(one) for n, one in enumerate(given) if is_array(one)}
    if not found or any(one.ndim != 3 or one.dtype.kind != "i" for one in found.values()):
        raise ArgumentError(
            "cache", f"is {type(cache).__name__} that dropped nothing yet, expected one with keep=, after it was used"
        )
    return found
