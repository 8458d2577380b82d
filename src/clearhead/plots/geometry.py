"""Attention as geometry: query and keys as arrows, weights, and the weighted sum of the values, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from clearhead.core.arrays import Array
from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Mask
from clearhead.explain.tracing import trace
from clearhead.plots.canvas import BLUE, GREEN, GREY, HATCH, ORANGE, RED, in_fonts, new_axes, short
from clearhead.plots.labels import Label, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What is written in a panel, and the arrows that it must not lie on
Labelled: TypeAlias = tuple[list[Label], list[tuple[Any, Any]]]


def plot_geometry(
    q: Array,
    k: Array,
    v: Array,
    *,
    query: int | str = 0,
    tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    axes: Any = None,
) -> np.ndarray:
    """Draw one query in the plane: similarity to each key, the weights, and the values summed tip to tail.

    >>> import clearhead as ch
    >>> from clearhead.textbook import EXAMPLES
    >>> example = EXAMPLES["it_animal"]
    >>> axes = ch.plot_geometry(example.q, example.k, example.v, tokens=example.tokens)
    >>> [ax.get_title() for ax in axes]
    ['similarity: q · k', 'weights', 'weighted sum of values']

    Keys and values need two features each, as the plane has. Every number is that of `trace`.
    """
    shown = trace(q, k, v, query=query, tokens=tokens, query_tokens=query_tokens, mask=mask, scale=scale)
    row = shown.row
    for name, array in (("k", row.k), ("v", row.v)):
        if array.shape[-1] != 2:
            raise ArgumentError(name, f"has {array.shape[-1]} features, expected 2: arrows are drawn in the plane")
    axes = new_axes(1, 3, width=4.0, height=4.0).ravel() if axes is None else np.asarray(axes).ravel()
    if len(axes) != 3:
        raise ArgumentError("axes", f"has {len(axes)}, expected 3")
    names = [short(name) for name in shown.tokens]
    similar = _similarity(axes[0], row, names, short(shown.query_token or "query"))
    _bars(axes[1], row, names)
    summed = _sum(axes[2], row, names)
    # last: labels are put where the axes are, and what stands beside one moves the others
    place(axes[0], *similar)
    place(axes[2], *summed)
    return axes


def _arrow(ax: Axes, start: Any, end: Any, colour: str, width: float = 1.8, alpha: float = 1.0) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "alpha": alpha, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", xy=tuple(end), xytext=tuple(start), arrowprops=style)


def _frame(ax: Axes, points: np.ndarray) -> None:
    """Room for every arrow, the same measure along both axes, and the origin marked."""
    finite = points[np.isfinite(points).all(-1)]
    low, high = np.minimum(finite.min(0), 0.0), np.maximum(finite.max(0), 0.0)
    edge = 0.18 * max(float((high - low).max()), 1e-9)
    ax.set_xlim(low[0] - edge, high[0] + edge)
    ax.set_ylim(low[1] - edge, high[1] + edge)
    ax.set_aspect("equal")
    ax.axhline(0, color=GREY, linewidth=0.5)
    ax.axvline(0, color=GREY, linewidth=0.5)
    ax.set_xlabel("feature 1")
    ax.set_ylabel("feature 2")


def _similarity(ax: Axes, row: Any, names: list[str], query: str) -> Labelled:
    labels = [Label(query, row.q, ORANGE, bold=True)]
    for j, name in enumerate(names):
        colour = BLUE if row.may(j) else HATCH
        _arrow(ax, (0, 0), row.k[j], colour)
        words = f"{name}\n{row.dots[j]:.2f}" if row.may(j) else f"{name}\nhidden"
        labels.append(Label(words, row.k[j], colour))
    _arrow(ax, (0, 0), row.q, ORANGE, 2.6)
    _frame(ax, np.vstack([row.k, row.q[None]]))
    ax.set_title("similarity: q · k")
    return labels, [((0.0, 0.0), end) for end in (*row.k, row.q)]


def _bars(ax: Axes, row: Any, names: list[str]) -> None:
    places = np.arange(len(names))
    ax.barh(places, row.weights, color=BLUE)
    for j, weight in enumerate(row.weights):
        ax.annotate(f" {weight:.2f}" if row.may(j) else " hidden", (weight, j), va="center", fontsize="small")
    ax.set_yticks(places, names)
    in_fonts(ax.get_yticklabels())
    ax.invert_yaxis()
    ax.set_xlim(0, 1.15)
    ax.set_xlabel("weight")
    ax.set_title("weights")


def _sum(ax: Axes, row: Any, names: list[str]) -> Labelled:
    at, points = np.zeros(2), [row.output]
    labels = [Label("output", row.output, RED, bold=True)]
    arrows: list[tuple[Any, Any]] = [((0.0, 0.0), row.output)]
    _arrow(ax, (0, 0), row.output, RED, 6.0, 0.35)  # wide and pale, so that what it is made of shows on it
    for j, name in enumerate(names):
        if not row.may(j):
            continue
        _arrow(ax, (0, 0), row.v[j], GREEN, 1.0, 0.35)
        labels.append(Label(name, row.v[j], GREEN))
        end = at + row.contribution(j)
        arrows += [((0.0, 0.0), row.v[j]), (at, end)]
        _arrow(ax, at, end, BLUE)
        points += [row.v[j], end]
        at = end
    _frame(ax, np.array(points))
    ax.set_title("weighted sum of values")
    return labels, arrows
