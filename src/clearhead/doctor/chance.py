"""Answers that change from call to call: is it dropout, or something else?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clearhead.doctor.answers import Failed
from clearhead.doctor.exam import Exam
from clearhead.doctor.forms import Module
from clearhead.doctor.probes import Probe, agrees, distance
from clearhead.doctor.variants import RIGHT

# Calls whose mean is compared with the exact answer: its error is then a twentieth of one call's
CALLS = 400
# How many of its own standard errors a mean may be away: once in a hundred million by chance, for each number
SIGMAS = 6.0


def check_chance(exam: Exam) -> bool:
    """Note dropout or nondeterminism where two calls differ, and whether they did."""
    given = exam.problem(exam.found.sizes, 10)
    one, two = exam.call(given), exam.call(given)
    if agrees(one.output, two.output, np.abs(one.output) * 2.0**-20):
        return False
    words = f"two calls with the same inputs differ by {distance(one.output, two.output):.2g}"
    share = None if isinstance(exam.way.form, Module) else dropped_share(exam, given)
    if share is not None:
        words += f"; each weight is 0 or × {1 / (1 - share):.3g}: dropout with probability {share:.2f}"
        exam.failed("determinism", "dropout-in-evaluation", words)
    elif unbiased(exam, given):
        words += f"; the mean of {CALLS} calls is right, as it is with dropout"
        exam.failed("determinism", "dropout-in-evaluation", words)
    else:
        exam.failed("determinism", "nondeterministic", words)
    return True


def dropped_share(exam: Exam, given: Probe) -> float | None:
    """The probability of dropout, read off the weights: values that are the identity give the weights back."""
    sizes = given.sizes
    eye = np.broadcast_to(np.eye(sizes.keys), (sizes.batch, sizes.heads, sizes.keys, sizes.keys))
    shown = replace(given, v=eye.copy())
    expected = exam.way.form.reference(RIGHT, shown, exam.align)
    try:
        got = exam.call(shown)
    except Failed:
        return None
    if expected is None or got.output.shape != expected[1].shape:
        return None
    seen = expected[1] > 0
    ratio = got.output[seen] / expected[1][seen]
    kept = ratio[np.abs(ratio) > 1e-6]
    if not kept.size or kept.size == ratio.size or np.ptp(kept) > 1e-3 * kept.mean() or kept.mean() <= 1.0:
        return None
    return float(1.0 - 1.0 / kept.mean())


def unbiased(exam: Exam, given: Probe) -> bool:
    """True where the mean of many calls is the exact answer, and most of the noise is not a rounding."""
    expected = exam.way.form.reference(RIGHT, given, exam.align)
    assert expected is not None
    calls = np.stack([exam.call(given).output for _ in range(CALLS)])
    error = calls.std(0) / np.sqrt(CALLS)
    return bool((np.abs(calls.mean(0) - expected[0]) <= SIGMAS * error + 1e-6).all())
