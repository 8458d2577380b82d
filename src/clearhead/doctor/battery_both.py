"""The checks of masks beside other things: masks of each batch row, causality, biases, scores far below 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clearhead.core.formula import softmax
from clearhead.doctor.answers import Failed
from clearhead.doctor.exam import Exam
from clearhead.doctor.forms import Module
from clearhead.doctor.matching import EPS, explains, matching
from clearhead.doctor.probes import Probe, agrees, padded, with_mask
from clearhead.doctor.variants import RIGHT, scale_of, spread


def check_beside(exam: Exam) -> None:
    """What a mask that is right by itself does beside other things; said only where it goes wrong."""
    if exam.way.mask is None or exam.variant.masking != "right" or exam.wrong:
        return
    _check_rows(exam)
    _check_causal(exam)
    _check_bias(exam)
    _check_low(exam)


def _masked(exam: Exam, small: Probe) -> Probe:
    assert exam.way.mask is not None
    return padded(small, 1) if exam.way.mask.only_keys else with_mask(small, 1, by_batch=exam.way.mask.by_batch)


def _check_rows(exam: Exam) -> None:
    """A mask without a batch axis was right: is each batch row's own, where masks differ?"""
    plain = exam.way
    assert plain.mask is not None
    if plain.mask.by_batch or exam.found.sizes.batch < 2 or 0 not in plain.form.axes:
        return
    for shape in ("B1TS", "BTS", "BHTS"):
        exam.way = replace(plain, mask=replace(plain.mask, shape=shape))
        given = with_mask(exam.problem(exam.found.sizes, 15), 1)
        try:
            got = exam.call(given)
        except Failed:
            continue
        finally:
            exam.way = plain
        if not exam.agrees(given, got) and explains(plain.form, replace(exam.variant, masking="first row"), given, got):
            exam.way = replace(plain, mask=replace(plain.mask, shape=shape))
            words = f"{plain.mask.parameter} with a batch axis: every row is masked as the first"
            exam.failed("mask", "mask-of-the-first-row", words, lambda small: with_mask(small, 1), given)
            exam.way = plain
            return


def _check_causal(exam: Exam) -> None:
    """A mask and causality together: does one switch the other off?"""
    flag, mask = exam.way.causal, exam.way.mask
    own = exam.subject.is_module and type(exam.subject.function).__module__.startswith("torch.")
    if flag is None or mask is None or exam.variant.causal != "end" or own:
        return

    def both(small: Probe) -> Probe:
        return replace(_masked(exam, small), causal=True)

    given = both(exam.problem(replace(exam.found.sizes, queries=5, keys=5), 14))
    try:
        got = exam.call(given)
    except Failed:
        return  # both at once are refused, as PyTorch's function does
    if exam.agrees(given, got):
        return
    if explains(exam.way.form, replace(exam.variant, causal="ignored"), given, got, exam.align):
        words = f"together with {mask.parameter}, {flag}=True has no effect"
        exam.failed("causal", "causal-ignored", words, both, given)
    elif explains(
        exam.way.form, replace(exam.variant, masking="ignored"), replace(given, allowed=None), got, exam.align
    ):
        words = f"together with {flag}=True, {mask.parameter} has no effect"
        exam.failed("mask", "mask-ignored", words, both, given)


def _check_bias(exam: Exam) -> None:
    """What is called a bias: are its numbers added as they are, to scores that are scaled already?"""
    mask = exam.way.mask
    named = mask is not None and mask.parameter.lower().endswith("bias") and mask.polarity == "additive"
    if mask is None or not named or mask.only_keys or isinstance(exam.way.form, Module):
        return
    given = exam.problem(exam.found.sizes, 16)
    sizes, draw = given.sizes, np.random.default_rng(16).standard_normal
    rows = draw((sizes.batch if mask.by_batch else 1, 1, sizes.queries, sizes.keys)).astype(np.float16).astype(float)
    bias = np.broadcast_to(rows, (sizes.batch, *rows.shape[1:]))
    try:
        got = exam.call(replace(given, allowed=bias))
    except Failed:
        return
    scale = scale_of(exam.variant, given.q, given.k, given.v)
    k, v = (spread(exam.variant, given.q, array) for array in (given.k, given.v))
    for factor in (1.0, scale):
        weights = softmax(scale * (given.q @ k.swapaxes(-1, -2)) + factor * bias)[0]
        # a bias makes the largest score larger, and each rounding with it
        more = 8 * EPS * (1.0 + np.abs(bias).max()) * (weights @ np.abs(v))
        if agrees(got.output, weights @ v, exam.way.form.tolerance(given, weights, EPS) + more):
            if factor != 1.0:
                words = f"{mask.parameter} is multiplied with {scale:.4g} = 1/√D, as the scores are"
                exam.failed("mask", "bias-scaled", words)
            return


def _check_low(exam: Exam) -> None:
    """Hidden keys beside scores of about −1,000: is what stands for −∞ still below them?"""
    mask = exam.way.mask
    if mask is None or isinstance(exam.way.form, Module) or exam.shared or exam.variant != RIGHT:
        return

    def low(small: Probe) -> Probe:
        return _masked(exam, lowered(small))

    given = low(exam.problem(exam.found.sizes, 17))
    got = exam.call(given)
    if np.isfinite(got.output).all() and not matching(exam.way.form, exam.variant, given, got, exam.align):
        exam.failed("mask", "mask-too-weak", "where scores are about −1,000 hidden keys have more weight", low, given)


def lowered(given: Probe) -> Probe:
    """The same with every score about −1,000."""
    q, k = np.abs(given.q), -np.abs(given.k)
    size = np.abs(q).mean() * np.abs(k).mean() * np.sqrt(q.shape[-1])
    return replace(given, q=q * np.round(1000.0 / max(size, 1e-3)), k=k)
