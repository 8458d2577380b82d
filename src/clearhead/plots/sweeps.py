"""A picture of errors: how far methods are from exact as their features, the length or the temperature grow."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.approximations.sweeping import Sweep
from clearhead.plots.canvas import BLUE, GREEN, GREY, ORANGE, RED, new_axes

COLOURS = (BLUE, RED, GREEN, ORANGE, "#CC79A7", "#56B4E9", GREY)
FINEST = 1e-4
MARKS = ("o", "s", "^", "D", "v", "P", "X")


def plot_sweep(sweep: Sweep, *, ax: Any = None) -> Any:
    """Draw what `sweep` found: relative error against what was changed, both axes logarithmic, bars for seeds.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 64, 8))
    >>> ch.plot_sweep(ch.sweep(ch.performer(), q, k, v, at=[4, 16])).get_ylabel()
    'relative error of outputs'

    Dotted is 1/√features, by which random features come nearer.
    """
    ax = new_axes(width=6.4, height=4.2).ravel()[0] if ax is None else ax
    for place, name in enumerate(sweep.names):
        points = sweep.of(name)
        ax.errorbar(
            [point.at for point in points], [point.error for point in points],
            yerr=[point.deviation for point in points], color=COLOURS[place % len(COLOURS)],
            marker=MARKS[place % len(MARKS)], markersize=4, capsize=2, linewidth=1.2, label=name,
        )  # fmt: skip
    if sweep.by == "features" and sweep.points:
        first = sweep.points[0]
        places = np.array(sorted({point.at for point in sweep.points}))
        ax.plot(
            places,
            first.error * np.sqrt(first.at / places),
            color=GREY,
            linestyle=":",
            linewidth=1,
            label="1/√features",
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    # a method that leaves nothing out is exact to rounding, which would squeeze all others into a line
    lowest = min((point.error for point in sweep.points), default=1.0)
    if lowest < FINEST:
        ax.set_ylim(bottom=FINEST)
    ax.set_xlabel(sweep.by)
    ax.set_ylabel("relative error of outputs")
    ax.legend(frameon=False, fontsize="small")
    return ax
