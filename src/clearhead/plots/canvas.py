"""What the pictures share: figures that nobody else knows of, tick labels, colours, and how wide a picture is."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.core.installing import brings
from clearhead.plots.fonts import drawable, families

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Past this many positions the labels would touch: every second, fifth or tenth is shown
MOST_TICKS = 40
# Dots an inch of a picture in a notebook
SCREEN = 96

WEIGHTS, SIGNED = "Blues", "RdBu_r"
# Told apart by those who see colours differently, and in print (Okabe and Ito)
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"
HIDDEN, HATCH = "#f2f2f2", "#b5b5b5"


class Panels(np.ndarray):
    """An array of axes that a notebook shows as their picture."""

    def _repr_png_(self) -> Any:
        return _png(self.ravel()[0].figure) if self.size else None


@cache
def _shown_axes() -> type[Axes]:
    """matplotlib's axes, which a notebook shows as their picture; made when matplotlib is first there."""
    from matplotlib.axes import Axes

    class ShownAxes(Axes):
        """Axes that a notebook shows as the picture that they are part of."""

        def _repr_png_(self) -> Any:
            return _png(self.figure)

    ShownAxes.__qualname__ = "ShownAxes"  # where pickle finds it again, by `__getattr__` below
    return ShownAxes


def __getattr__(name: str) -> Any:
    if name == "ShownAxes":
        return _shown_axes()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _png(figure: Any) -> tuple[bytes, dict[str, int]]:
    """The picture with twice as many dots as it is wide, as sharp screens have them."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=2 * SCREEN)
    width, height = figure.get_size_inches()
    return file.getvalue(), {"width": round(SCREEN * width), "height": round(SCREEN * height)}


def new_axes(rows: int = 1, columns: int = 1, *, width: float = 5.0, height: float = 4.2, **share: Any) -> np.ndarray:
    """A grid of axes in a figure of its own: pyplot, which keeps figures alive and may show them, never hears of it.

    As the last value of a notebook's cell they show themselves.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"plots need matplotlib: {brings('plot')}") from None
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    kind = {"axes_class": _shown_axes()}
    return np.asarray(figure.subplots(rows, columns, squeeze=False, subplot_kw=kind, **share)).view(Panels)


def tick_step(count: int) -> int:
    """Every how many positions are labelled.

    >>> [tick_step(n) for n in (7, 40, 41, 100, 1000, 5000)]
    [1, 1, 2, 5, 50, 200]
    """
    step = 1
    while count / step > MOST_TICKS:
        # 1, 2, 5, 10, 20, 50, …
        power = 10 ** int(math.log10(step))
        step = {1: 2, 2: 5, 5: 10}[step // power] * power
    return step


def hatched(ax: Axes) -> None:
    """A hatched ground, which shows through wherever a map has nothing."""
    from matplotlib.patches import Rectangle

    ground = Rectangle((0, 0), 1, 1, transform=ax.transAxes, facecolor=HIDDEN, edgecolor=HATCH, hatch="////")
    ground.set_linewidth(0)
    ground.set_zorder(0)
    ax.add_patch(ground)


def label_positions(ax: Axes, keys: Sequence[str] | int, queries: Sequence[str] | int, room: int = 36) -> None:
    """Names or numbers at the cells of a map, thinned where there are many; queries down, keys across.

    Labels that have more characters than there is `room` for stand upright.
    """
    for axis, names, kind in ((ax.xaxis, keys, "key"), (ax.yaxis, queries, "query")):
        count = names if isinstance(names, int) else len(names)
        places = list(range(0, count, tick_step(count)))
        labels = [str(i) if isinstance(names, int) else short(names[i]) for i in places]
        axis.set_ticks(places, labels)
        in_fonts(axis.get_ticklabels())
        axis.set_label_text(kind)
        if len(labels) > MOST_TICKS // 2:
            axis.set_tick_params(labelsize="x-small")
        if kind == "key" and len(labels) * (max(map(len, labels), default=0) + 1) > room:
            ax.tick_params(axis="x", labelrotation=90)


def in_fonts(labels: Iterable[Any]) -> None:
    """Labels whose letters the usual font has not, in one that has them."""
    for label in labels:
        if (names := families(label.get_text())) is not None:
            label.set_fontfamily(names)


def short(name: str, most: int = 14) -> str:
    r"""A token as a label: cut short, and with nothing that matplotlib would take for mathematics or a new line.

    >>> print(short("a$b"), short("antidisestablishmentarianism"))
    a\$b antidisestabl…
    """
    name = drawable("".join(sign if sign.isprintable() else "�" for sign in name[: most + 1]))
    name = name if len(name) <= most else f"{name[: most - 1]}…"
    return name.replace("$", r"\$")
