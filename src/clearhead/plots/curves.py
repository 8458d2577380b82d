"""Curves: what grows with the number of features, and what grows with the length."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.measure.profiling import Profile
from clearhead.measure.scales import Scaling
from clearhead.plots.canvas import BLUE, GREY, ORANGE, RED, new_axes


def _axes(axes: Any, count: int, width: float) -> np.ndarray:
    found = new_axes(1, count, width=width, height=3.4).ravel() if axes is None else np.asarray(axes).ravel()
    if len(found) != count:
        raise ArgumentError("axes", f"has {len(found)}, expected {count}")
    return found


def plot_scaling(scaling: Scaling, *, axes: Any = None) -> np.ndarray:
    """Draw what `scaling` found: spread of scores, entropy, largest weight and gradient, with 1/√d and without.

    >>> import clearhead as ch
    >>> [ax.get_title() for ax in ch.plot_scaling(ch.scaling([4, 64]))]
    ['spread of scores', 'entropy (nats)', 'largest weight', 'softmax gradient']
    """
    axes = _axes(axes, 4, 3.2)
    places = [row.d_k for row in scaling.rows]
    fields = ("deviation", "entropy", "largest", "gradient")
    titles = ("spread of scores", "entropy (nats)", "largest weight", "softmax gradient")
    for ax, field, title in zip(axes, fields, titles, strict=True):
        for way, label, colour, mark in (("unscaled", "without", RED, "o"), ("scaled", "with 1/√d", BLUE, "s")):
            numbers = [getattr(getattr(row, way), field) for row in scaling.rows]
            ax.plot(places, numbers, color=colour, marker=mark, markersize=4, label=label)
            if field == "deviation":
                theory = [getattr(row, way).predicted for row in scaling.rows]
                ax.plot(places, theory, color=GREY, linestyle=":", linewidth=1)
        ax.set_xscale("log", base=2)
        ax.set_title(title, fontsize="medium")
        ax.set_xlabel("features d")
    axes[0].set_yscale("log", base=2)
    axes[1].axhline(scaling.uniform, color=GREY, linestyle=":", linewidth=1)
    axes[0].legend(frameon=False)
    return axes


def plot_profile(profile: Profile, *, axes: Any = None) -> np.ndarray:
    """Draw what `profile` measured: time and peak memory against the length, both axes logarithmic.

    >>> import clearhead as ch
    >>> [ax.get_ylabel() for ax in ch.plot_profile(ch.profile([32, 64], heads=1, features=8))]
    ['seconds', 'bytes']
    """
    axes = _axes(axes, 2, 4.4)
    lengths = [point.length for point in profile.points]
    ran = [point for point in profile.points if point.formula is not None]
    kernel = f"kernel {', '.join(map(repr, profile.names))}"
    for ax, field, label in zip(axes, ("seconds", "peak"), ("seconds", "bytes"), strict=True):
        formula = [getattr(point.formula, field) for point in ran]
        ax.plot([point.length for point in ran], formula, color=RED, marker="o", markersize=4, label="the formula")
        numbers = [getattr(point.kernel, field) for point in profile.points]
        ax.plot(lengths, numbers, color=BLUE, marker="s", markersize=4, label=kernel)
        if field == "peak":
            matrix = [point.matrix for point in profile.points]
            ax.plot(lengths, matrix, color=ORANGE, linestyle=":", label="the matrix alone")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=10 if field == "seconds" else 2)
        ax.set_xlabel("length")
        ax.set_ylabel(label)
        ax.legend(frameon=False, fontsize="small")
    fits = ((profile.formula_fit, RED), (profile.kernel_fit, BLUE))
    words = [f"n^{fit.exponent:.2f} ± {fit.error:.2f}" for fit, _ in fits if fit is not None]
    axes[0].set_title("time: " + " and ".join(words) if words else "time", fontsize="medium")
    axes[1].set_title("peak memory", fontsize="medium")
    return axes
