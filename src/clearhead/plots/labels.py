"""Labels that do not lie on one another, on an arrow or outside the picture: each is in nobody's way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clearhead.plots.fonts import families

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# How far from its point a label may stand, in points, and in how many directions
DISTANCES, DIRECTIONS = (5, 9, 14, 20, 28, 38, 50, 64), 16
# Dots that a label keeps from others
AIR = 2.0


class Label(NamedTuple):
    """Words at a point of the plane, in a colour."""

    words: str
    point: Sequence[float]
    colour: str
    bold: bool = False


def place(ax: Axes, labels: Sequence[Label], arrows: Sequence[tuple[Any, Any]]) -> None:
    """Write each label beside its point, where it covers neither a label that is there already nor an arrow."""
    ax.figure.draw_without_rendering()  # type: ignore[union-attr]  # settles where the axes are, to the dot
    frame = ax.get_window_extent()
    lines = [ax.transData.transform(np.array(ends, dtype=float)) for ends in arrows]
    dots = ax.figure.dpi / 72
    taken: list[tuple[float, float, float, float]] = []
    for label in labels:
        if not np.isfinite(label.point).all():
            continue
        text = ax.annotate(
            label.words,
            (float(label.point[0]), float(label.point[1])),
            xytext=(0, 0),
            textcoords="offset points",
            color=label.colour,
            ha="center",
            va="center",
            fontsize="medium" if label.bold else "small",
            fontweight="bold" if label.bold else "normal",
            fontfamily=families(label.words),
        )
        text.set_in_layout(False)  # the axes stay where the label was put
        box = text.get_window_extent()
        wide, high = box.width, box.height
        at = ax.transData.transform(label.point)
        best, where = math.inf, (0.0, 0.0)
        for distance in DISTANCES:
            for turn in range(DIRECTIONS):
                angle = math.pi / 4 + 2 * math.pi * turn / DIRECTIONS  # above and to the right first
                away = np.array([math.cos(angle), math.sin(angle)])
                middle = at + away * (distance * dots + np.abs(away) @ (wide / 2, high / 2))
                space = (middle[0] - wide / 2, middle[1] - high / 2, middle[0] + wide / 2, middle[1] + high / 2)
                cost = distance + 1e4 * _outside(space, frame) + 1e3 * sum(_overlap(space, other) for other in taken)
                cost += 1e2 * sum(_crosses(space, line) for line in lines)
                if cost < best:
                    best, where, used = cost, tuple((middle - at) / dots), space
        text.set_position(where)
        taken.append(used)


def _outside(space: tuple[float, ...], frame: Any) -> bool:
    left, low, right, high = space
    return left < frame.x0 + AIR or low < frame.y0 + AIR or right > frame.x1 - AIR or high > frame.y1 - AIR


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] + AIR and other[0] < one[2] + AIR and one[1] < other[3] + AIR and other[1] < one[3] + AIR


def _crosses(space: tuple[float, ...], line: np.ndarray) -> bool:
    """Does a line from one end to the other touch the space? It is cut down to each side in turn."""
    (x, y), (dx, dy) = line[0], line[1] - line[0]
    start, end = 0.0, 1.0
    for place, step, low, high in ((x, dx, space[0], space[2]), (y, dy, space[1], space[3])):
        low, high = low - AIR, high + AIR
        if abs(step) < 1e-12:
            if not low <= place <= high:
                return False
            continue
        first, last = sorted(((low - place) / step, (high - place) / step))
        start, end = max(start, first), min(end, last)
    return start <= end
