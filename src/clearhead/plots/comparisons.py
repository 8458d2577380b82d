"""A picture of mechanisms side by side: the weights of each, over the same queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.approximations.comparing import Comparison
from clearhead.core.errors import ArgumentError
from clearhead.plots.canvas import WEIGHTS, label_positions, new_axes

# Positions that are labelled one by one
MOST = 16


def plot_comparison(
    comparison: Comparison, tokens: Sequence[str] | None = None, *, head: int = 0, columns: int = 4
) -> np.ndarray:
    r"""Draw the weights of one head under every mechanism that has weights, all by one scale of colours.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 4))
    >>> [ax.get_title() for ax in ch.plot_comparison(ch.compare(q, k, v, [None, ch.causal()]))]
    ['full', 'causal()\n1.096 from full']
    """
    some = [one for one in comparison.mechanisms if one.weights is not None]
    if not some:
        raise ArgumentError("comparison", "has no weights to draw: there are more than it keeps")
    across = min(columns, len(some))
    down = -(-len(some) // across)
    axes = new_axes(down, across, width=2.9, height=2.9).ravel()
    first = comparison.mechanisms[0].name
    maps = [_one(one.weights, head) for one in some]
    largest = max(float(weights.max()) for weights in maps)
    for ax, one, weights in zip(axes, some, maps, strict=False):
        ax.imshow(weights, cmap=WEIGHTS, vmin=0.0, vmax=largest, interpolation="nearest", aspect="auto")
        ax.set_title(
            one.name if one.name == first else f"{one.name}\n{one.distance:.3f} from {first}", fontsize="small"
        )
        if max(weights.shape) <= MOST:  # more would touch in panels as small as these
            label_positions(ax, tokens or weights.shape[1], weights.shape[0] if tokens is None else tokens)
    for ax in axes[len(some) :]:
        ax.set_axis_off()
    return axes[: len(some)]


def _one(weights: Any, head: int) -> np.ndarray:
    """The matrix of one head of the first batch row."""
    weights = np.asarray(weights)
    while weights.ndim > 3:
        weights = weights[0]
    if weights.ndim == 2:
        return weights
    if not -weights.shape[0] <= head < weights.shape[0]:
        raise ArgumentError("head", f"is {head}, expected one of {weights.shape[0]}")
    return weights[head]
