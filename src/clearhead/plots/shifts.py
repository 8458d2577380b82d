"""A picture of what context does to a word: one vector before any attention, moved elsewhere by each text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.core.arrays import Array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.plots.canvas import BLUE, GREEN, GREY, ORANGE, RED, new_axes, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, ORANGE, GREEN, RED)


def plot_shift(
    static: Array,
    contexts: Sequence[Array],
    *,
    labels: Sequence[str] | None = None,
    word: str = "the word",
    others: Mapping[str, Array] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw where context moves a word: an arrow for each text, from its vector by itself to its vector there.

    >>> import numpy as np, clearhead as ch
    >>> words = {"bank": [1.0, 1.0], "river": [3.0, 0.5], "loan": [0.5, 3.0]}
    >>> bank, river, loan = (np.array(words[name]) for name in ("bank", "river", "loan"))
    >>> there = [ch.attention(bank[None], sentence, sentence)[0] for sentence in (np.stack([bank, river]),
    ...                                                                          np.stack([bank, loan]))]
    >>> ax = ch.plot_shift(bank, there, labels=["by the river", "with a loan"], word="bank",
    ...                    others={"river": river, "loan": loan})
    >>> ax.get_title()
    'context moves bank: by 1.53 and 1.53, 118° apart'

    `static` is (D,). Each of `contexts` is (D,), or (layers, D): then the way there is drawn, too. `others` are vectors
    of other words, drawn where they lie. The plane is that of the first two texts' moves, in which lengths and angles
    are true; with three texts or more it is the one that shows most, and the title says how much. `watching.shifts` has
    the vectors of a trained model.
    """
    start = _vector("static", static, None)
    paths = [np.atleast_2d(_vector("contexts", one, start.size)) for one in contexts]
    if not paths:
        raise ArgumentError("contexts", "is empty, expected at least one vector")
    names = [f"text {number}" for number in range(1, len(paths) + 1)] if labels is None else list(labels)
    if len(names) != len(paths):
        raise ArgumentError("labels", f"are {len(names)}, expected one for each of {len(paths)} contexts")
    moves = np.stack([path[-1] - start for path in paths])  # (texts, D)
    plane = _plane(moves)
    ax = new_axes(width=6.4, height=5.2)[0, 0] if ax is None else ax
    points = [np.zeros((1, 2))]
    for number, (name, path) in enumerate(zip(names, paths, strict=True)):
        way = np.vstack([np.zeros(2), (path - start) @ plane])
        points.append(way)
        _arrow(ax, way, COLOURS[number % len(COLOURS)], short(name, 60))
    for name, other in (others or {}).items():
        place = (_vector("others", other, start.size) - start) @ plane
        points.append(place[None])
        ax.plot(*place, marker="o", markersize=5, color=GREY, linestyle="none")
        ax.annotate(short(name), place, xytext=(5, 5), textcoords="offset points", color=GREY, fontsize="small")
    ax.plot(0, 0, marker="o", markersize=8, color="black")
    ax.annotate(
        f"{short(word)} by itself", (0, 0), xytext=(0, -16), textcoords="offset points", ha="center", fontweight="bold"
    )
    _frame(ax, np.vstack(points))
    ax.set_title(_title(short(word), moves, moves @ plane), fontsize="medium")
    return ax


def _vector(argument: str, given: Array, size: int | None) -> np.ndarray:
    try:
        numbers = to_numpy(given).astype(np.float64)
    except (TypeError, ValueError, AttributeError):
        raise ArgumentError(argument, "is no array of numbers") from None
    shape = numbers.shape
    fits = numbers.ndim == 1 and shape[0] > 0 if size is None else numbers.ndim in (1, 2) and shape[-1] == size
    if not fits or not numbers.size:
        expected = (
            "(features,)"
            if size is None
            else f"({size},)" + (f" or (layers, {size})" if argument == "contexts" else "")
        )
        raise ArgumentError(argument, f"has shape {shape}, expected {expected}")
    if not np.isfinite(numbers).all():
        raise ArgumentError(argument, "has numbers that are not finite: there is no place to draw them")
    return numbers


def _plane(moves: np.ndarray) -> np.ndarray:
    """Two directions (D, 2): for two moves the plane that they span, the first leaning left and the second right."""
    directions = np.linalg.svd(moves)[2][:2].T  # (D, 2), or (1, 1) where there is one feature
    if directions.shape[1] < 2:
        return np.hstack([directions, np.zeros_like(directions)])
    flat = moves @ directions
    across = flat[1] - flat[0] if len(moves) > 1 else np.array([flat[0, 1], -flat[0, 0]])  # one alone points upwards
    length = np.linalg.norm(across)
    if length > 0:
        x, y = across / length
        directions = directions @ np.array([[x, -y], [y, x]])
    return directions * np.array([1.0, -1.0 if (moves @ directions)[:, 1].sum() < 0 else 1.0])


def _arrow(ax: Axes, way: np.ndarray, colour: str, words: str) -> None:
    if len(way) > 2:
        ax.plot(*way.T, color=colour, linestyle=":", linewidth=1, marker=".", markersize=5)
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", xy=tuple(way[-1]), xytext=(0, 0), arrowprops=style)
    ax.plot([], [], color=colour, linewidth=2.2, label=words)  # an arrow has no place in a legend


def _frame(ax: Axes, points: np.ndarray) -> None:
    low, high = points.min(0), points.max(0)
    edge = max(float((high - low).max()), 1e-9)
    # room for the word below the place that the arrows start from, and for names beside points
    ax.set_xlim(min(low[0], -0.2 * edge) - 0.1 * edge, max(high[0], 0.2 * edge) + 0.2 * edge)
    ax.set_ylim(low[1] - 0.2 * edge, high[1] + 0.15 * edge)
    ax.set_aspect("equal")
    ax.axhline(0, color=GREY, linewidth=0.5, zorder=0)
    ax.axvline(0, color=GREY, linewidth=0.5, zorder=0)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False)
    ax.set_xticks([])
    ax.set_yticks([])


def _title(word: str, moves: np.ndarray, flat: np.ndarray) -> str:
    lengths: Any = np.linalg.norm(moves, axis=-1)
    shown = [f"{length:.3g}" for length in lengths]
    words = f"context moves {word}: by {' and '.join([', '.join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)}"
    if len(moves) == 2 and lengths.min() > 0:
        cosine = float(np.clip(moves[0] @ moves[1] / lengths.prod(), -1.0, 1.0))
        return f"{words}, {np.degrees(np.arccos(cosine)):.0f}° apart"
    whole = float((moves**2).sum())
    if len(moves) > 2 and whole > 0:
        words += f"; {float((flat**2).sum()) / whole:.0%} of it lies in this plane"
    return words
