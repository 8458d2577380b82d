"""Curves: what grows with the number of features, and what grows with the length."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.measure.profiling import Profile
from clearhead.measure.scales import Scaling
from clearhead.plots.canvas import BLUE, GREEN, GREY, ORANGE, RED, new_axes


def _axes(axes: Any, count: int, width: float) -> np.ndarray:
    found = new_axes(1, count, width=width, height=3.4).ravel() if axes is None else np.asarray(axes).ravel()
    if len(found) != count:
        raise ArgumentError("axes", f"has {len(found)}, expected {count}")
    return found


def plot_scaling(scaling: Scaling, *, axes: Any = None) -> np.ndarray:
    """Draw what `scaling` found: spread of scores, entropy, largest weight and gradient, with 1/√d and without.

    Dotted are theory, and where all keys weigh the same.

    >>> import clearhead as ch
    >>> [ax.get_title() for ax in ch.plot_scaling(ch.scaling([4, 64]))]
    ['spread of scores', 'entropy (nats)', 'largest weight', 'softmax gradient']
    """
    own = axes is None
    axes = _axes(axes, 4, 3.4)
    places = [row.d_k for row in scaling.rows]
    equal = 1 / scaling.keys
    panels = (  # field, title, what it says, and its value where all keys weigh the same
        ("deviation", "spread of scores", "standard deviation of q · k · scale", None),
        ("entropy", "entropy (nats)", f"ln {scaling.keys:,}: all keys the same; 0: one takes all", scaling.uniform),
        ("largest", "largest weight", "of a query, on average; 1: one key takes all", equal),
        ("gradient", "softmax gradient", "Σ ∂w/∂s = 1 − Σ w²; 0: nothing can be learnt", 1 - equal),
    )
    for ax, (field, title, words, level) in zip(axes, panels, strict=True):
        for way, label, colour, mark in (("unscaled", "without", RED, "o"), ("scaled", "with 1/√d", BLUE, "s")):
            numbers = [getattr(getattr(row, way), field) for row in scaling.rows]
            ax.plot(places, numbers, color=colour, marker=mark, markersize=4, label=label)
            if field == "deviation":
                theory = [getattr(row, way).predicted for row in scaling.rows]
                ax.plot(places, theory, color=GREY, linestyle=":", linewidth=1)
        if level is None:
            ax.set_yscale("log", base=2)
        else:
            ax.axhline(level, color=GREY, linestyle=":", linewidth=1)
            ax.set_ylim(bottom=0.0)
        ax.set_xscale("log", base=2)
        ax.set_title(title, fontsize="medium")
        ax.set_xlabel(f"features d\n{words}", fontsize="small")
    axes[0].legend(frameon=False)
    if own:
        axes[0].figure.supxlabel("\n".join(textwrap.wrap(scaling.verdict(), 150)), fontsize="medium")
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
        if profile.method is not None:
            beside = [getattr(point.method, field) for point in profile.points]
            ax.plot(lengths, beside, color=GREEN, marker="^", markersize=4, label=profile.method)
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
