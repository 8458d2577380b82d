"""Whether a formula explains an answer, up to rounding; and the scale that does, where one does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from clearhead.doctor.answers import Got
from clearhead.doctor.forms import Form, allowing
from clearhead.doctor.probes import Probe, agrees, distance
from clearhead.doctor.variants import EMPTY, HIDING, RIGHT, Variant

EPS = float(np.finfo(np.float32).eps)


def matching(form: Form, variant: Variant, given: Probe, got: Got, align: str = "end", eps: float = EPS) -> bool:
    """True where a function gave what this variant gives."""
    with np.errstate(all="ignore"):  # a wrong formula may well give NaN or infinity
        expected = form.reference(variant, given, align)
        if expected is None or not _alike(expected[0], got.output):
            return False
        output, weights = expected
        # a weight of −inf gives infinities as well as NaN: whoever gives only NaN does something else
        if variant.masking == "inf after" and (np.isnan(output) != np.isnan(got.output)).any():
            return False
        allowance = form.tolerance(given, weights, eps, variant) + eps * np.abs(output)
        return agrees(got.output, output, allowance)


def _alike(output: np.ndarray, got: np.ndarray) -> bool:
    """False where the first row tells already that one is not the other: most formulas are ruled out so."""
    if output.shape != got.shape:
        return False
    one, other = output[-1, -1, -1], got[-1, -1, -1]
    near = np.abs(one - other) <= 0.05 * (1.0 + np.abs(one))
    return bool((near | ~np.isfinite(one) | ~np.isfinite(other)).all())


def explains(form: Form, variant: Variant, given: Probe, got: Got, align: str = "end") -> Variant | None:
    """The variant, with what it does for queries that may attend to nothing, where it gave this answer."""
    allowed = allowing(variant, given, align) if variant.masking in HIDING else None
    empty = EMPTY if allowed is not None and not allowed.any(-1).all() else EMPTY[:1]
    choices = (replace(variant, empty=nothing) for nothing in empty)
    return next((choice for choice in choices if matching(form, choice, given, got, align)), None)


def differs(form: Form, variant: Variant, given: Probe, align: str = "end") -> bool:
    """True where this variant cannot be taken for the right formula on this problem."""
    with np.errstate(all="ignore"):
        expected, right = form.reference(variant, given, align), form.reference(RIGHT, given, align)
    return expected is not None and right is not None and not agrees(*_padded(expected[0], right[0]), 1e-3)


def _padded(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (one, other) if one.shape == other.shape else (one, np.full(one.shape, np.inf))


def measured_scale(form: Form, given: Probe, got: Got, align: str = "end") -> float | None:
    """The scale that explains an answer, where one does: a search for it and a match at what it finds."""

    def off(factor: float) -> float:
        expected = form.reference(replace(RIGHT, factor=factor), given, align)
        return math.inf if expected is None else distance(got.output, expected[0])

    grid = np.geomspace(1e-3, 30.0, 60).tolist()
    best = min(range(len(grid)), key=lambda i: off(grid[i]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    for _ in range(80):  # thirds: what is left shrinks by a third each time
        one, two = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, two) if off(one) < off(two) else (one, high)
    factor = (low + high) / 2
    # where it was measured it is uncertain by a little more than the answer is
    return factor if matching(form, replace(RIGHT, factor=factor), given, got, align, eps=8 * EPS) else None
