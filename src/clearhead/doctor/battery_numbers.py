"""The checks of arithmetic: large scores, float16, float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clearhead.doctor.answers import Failed
from clearhead.doctor.battery import same
from clearhead.doctor.battery_both import lowered
from clearhead.doctor.exam import Exam
from clearhead.doctor.forms import Module
from clearhead.doctor.probes import Probe, distance, padded, with_mask
from clearhead.doctor.variants import RIGHT

HALF = float(np.finfo(np.float16).eps)
DOUBLE = float(np.finfo(np.float64).eps)


def check_large(exam: Exam) -> None:
    """Does it survive scores of a thousand?"""
    if exam.variant.axis not in ("keys", "queries", "heads", "batch", "all", "twice"):
        exam.skipped("large scores", "there is no softmax")
        return
    strength = 30.0 if isinstance(exam.way.form, Module) else 512.0

    def shared(small: Probe) -> Probe:
        """What is one input stays one."""
        k = small.q if exam.alone else small.k
        return replace(small, k=k, v=k if exam.shared else small.v)

    def all_large(small: Probe) -> Probe:
        k = small.k * strength if isinstance(exam.way.form, Module) else small.k
        return shared(replace(small, q=small.q * strength, k=k))

    def one_large(small: Probe) -> Probe:
        q = small.q / 64.0
        q[:, :, 0] *= 64.0 * strength
        return shared(replace(small, q=q))

    apart = not (exam.shared or isinstance(exam.way.form, Module))  # else no score is surely below 0
    far_below = (lowered, "maximum-starts-at-zero", "scores of about −1,000, each of them, give NaN or infinity")
    for prepare, mistake, words in (
        (all_large, "no-maximum-subtracted", "scores of about ±1,000 give NaN or infinity"),
        (one_large, "maximum-of-the-whole-matrix", "one query with large scores makes the others NaN or infinite"),
        *((far_below,) if apart and exam.variant == RIGHT else ()),
    ):
        # with one query in all, its own largest score is that of the whole matrix
        alone = prepare is all_large
        sizes = replace(exam.found.sizes, batch=1, heads=1, queries=1) if alone else exam.found.sizes
        given = prepare(exam.problem(sizes, 7))
        got = exam.call(given)
        expected = exam.way.form.reference(exam.variant, given, exam.align)
        finite = True if expected is None else np.isfinite(expected[0])
        if not np.isfinite(got.output)[finite].all():
            exam.failed("large scores", mistake, words, prepare, given)
            return
        if not exam.agrees(given, got):
            exam.failed("large scores", "unknown", "right for small scores, wrong for large ones", prepare, given)
            return
    exam.passed("large scores", "±1,000 is neither NaN nor wrong")


def check_half(exam: Exam) -> None:
    """Does it work in float16, with a mask too?"""
    given = exam.problem(exam.found.sizes, 8)
    try:
        got = exam.call(given, "float16")
    except Failed as failed:
        exam.skipped("float16", f"it does not take it: {failed}")
        return
    if not exam.agrees(given, got, eps=HALF):
        exam.failed("float16", "unknown", "right in float32, wrong in float16", same, given, "float16")
        return
    mask = exam.way.mask
    if mask is None or exam.variant.masking != "right" or mask.encoding == "additive -1e9":
        exam.passed("float16", f"right, and it comes back as {got.dtype}")
        return

    def masked(small: Probe) -> Probe:
        return padded(small, 1) if mask.only_keys else with_mask(small, 1, by_batch=mask.by_batch)

    given = masked(given)
    try:
        got = exam.call(given, "float16")
        right, words = exam.agrees(given, got, eps=HALF), "with a mask, float16 gives NaN or infinity"
        known = not np.isfinite(got.output).all()
    except Failed as failed:
        right, words, known = False, f"with a mask, float16 raises {failed}", "overflow" in str(failed).lower()
    if right:
        exam.passed("float16", f"right with and without a mask, and it comes back as {got.dtype}")
    elif known:
        exam.failed("float16", "penalty-overflows-float16", words, masked, given, "float16", hazard=True)
    else:
        exam.failed("float16", "unknown", "right in float32, wrong in float16 with a mask", masked, given, "float16")


def check_precision(exam: Exam) -> None:
    """Is a float64 input answered to the digits of float64?"""
    if exam.way.library == "jax" or exam.variant.factor is not None:
        jax = exam.way.library == "jax"
        exam.skipped("float64", "JAX has it only where it is switched on" if jax else "its scale was only measured")
        return
    if exam.variant.rotary:
        exam.skipped("float64", "angles of rotary positions are usually kept in float32")
        return
    if exam.variant.axis != "keys" or exam.variant.masking != "right":
        exam.skipped("float64", "the formula is wrong already")
        return
    given = exam.problem(exam.found.sizes, 9)
    try:
        got = exam.call(given, "float64")
    except Failed as failed:
        exam.skipped("float64", f"it does not take it: {failed}")
        return
    if exam.agrees(given, got, eps=DOUBLE):
        exam.passed("float64", "right to its last digits")
        return
    expected = exam.way.form.reference(exam.variant, given, exam.align)
    assert expected is not None
    off = distance(got.output, expected[0])
    words = f"float64 inputs are answered only to {off:.1g}, where float64 has {DOUBLE:.1g}"
    exam.failed("float64", "precision-lost", words, same, given, "float64", hazard=True)
