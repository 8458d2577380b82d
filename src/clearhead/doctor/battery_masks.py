"""The checks of what is hidden: masks, causality, queries that see nothing, padding."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np

from clearhead.core.arrays import is_array, to_numpy
from clearhead.doctor.answers import Failed
from clearhead.doctor.battery import check_weights_of
from clearhead.doctor.exam import Exam
from clearhead.doctor.forms import LAYOUTS
from clearhead.doctor.masking import find_mask
from clearhead.doctor.masks import stated_polarity
from clearhead.doctor.matching import EPS, explains
from clearhead.doctor.probes import Probe, agrees, distance, padded, probe, with_mask
from clearhead.doctor.subject import Subject
from clearhead.doctor.variants import RIGHT, broken_causals

# What a causal mask looks like: what is seen, or what is hidden
TRIANGLES = ((np.tril, 0), (np.triu, 1))


def check_mask(exam: Exam, stated: str | None) -> None:
    """Which convention does its mask have, and is it applied as it should be?"""
    names = exam.subject.masks()
    if not names:
        exam.skipped("mask", "it has no mask")
        return
    found = find_mask(exam.subject, exam.found, exam.variant, stated)
    if found is None and exam.found.way.form.name == "BHTD":
        # without a mask it takes heads too, and with one it may not
        plain = replace(exam.found.way, form=replace(LAYOUTS[2], shared=exam.shared))
        found = find_mask(exam.subject, replace(exam.found, way=plain), exam.variant, stated)
    if found is None:
        exam.skipped("mask", f"no way of handing over {names[0]!r} worked")
        return
    way = found[0].mask
    said = None if stated or way is None else stated_polarity(exam.subject.documentation(), way.parameter)
    if said is not None and way is not None and way.polarity == "additive":
        # numbers are added, and 1 and 0 were spoken of: are they added too?
        as_said = find_mask(exam.subject, exam.found, exam.variant, said, only=True)
        found = as_said if as_said is not None and as_said[1].masking in ("added", "raised") else found
    exam.way, variant, given, _ = found
    mask = exam.way.mask
    assert mask is not None
    polarity = mask.polarity
    claimed = stated or stated_polarity(exam.subject.documentation(), mask.parameter)

    def masked(small: Probe) -> Probe:
        return padded(small, 1) if mask.only_keys else with_mask(small, 1, by_batch=mask.by_batch)

    if variant.masking == "unknown":
        exam.failed("mask", "unknown", "with a mask it gives what no known way of masking gives", masked, given)
    elif variant.masking == "queries":
        words = f"queries that stand where {mask.parameter} hides a key change, and the others see every key"
        exam.failed("mask", "padding-hides-queries", words, masked, given)
    elif variant.masking != "right":
        mistake = next(m for m in variant.mistakes if m.knob == "masking")
        exam.failed("mask", mistake.name, "the answer with a random mask is that of this formula", masked, given)
    elif claimed in ("attend", "hide") and polarity in ("attend", "hide") and claimed != polarity:
        source = "was stated" if stated else "its own name or documentation says"
        exam.way = replace(exam.way, mask=replace(mask, encoding=mask.encoding.replace(polarity, claimed)))
        words = f"{source} that True means {claimed!r}, but it means {polarity!r}"
        exam.failed("mask", "mask-inverted", words, masked)
        exam.way = replace(exam.way, mask=mask)
    else:
        exam.passed("mask", "random masks are applied before the softmax, and weights renormalised")
    exam.variant = replace(exam.variant, masking=variant.masking, penalty=variant.penalty, empty=variant.empty)
    check_weights_of(exam, given, "weights with a mask")


def check_causal(exam: Exam, stated: str | None) -> None:
    """Does its causal flag, or its causality that cannot be switched off, hide exactly what comes later?"""
    flag = exam.subject.causal()
    if flag is None and not exam.found.always_causal:
        why = says_causal(exam.subject)
        if why is None:
            exam.skipped("causal", "it has no causal flag")
        else:
            exam.failed("causal", "causal-ignored", f"{why}, and every query sees every key", _flagged)
        return
    if exam.found.always_causal:
        _check_always(exam, stated)
        return
    exam.way = replace(exam.way, causal=flag)

    sizes = replace(exam.found.sizes, queries=5, keys=5)
    given = replace(exam.problem(sizes, 3), causal=True)
    try:
        got = exam.call(given)
    except Failed as failed:
        exam.skipped("causal", f"{flag}=True: {failed}")
        return
    for variant in (exam.variant, *broken_causals(exam.variant), replace(exam.variant, causal="ignored")):
        told = explains(exam.way.form, variant, given, got, exam.align)
        if told is not None:
            break
    else:
        exam.failed("causal", "unknown", f"{flag}=True hides what no causal mask hides", _flagged, given)
        return
    known = {mistake.name for mistake in exam.variant.mistakes}
    wrong = [mistake for mistake in told.mistakes if mistake.name not in known]
    if not wrong:
        exam.passed("causal", f"{flag}=True: a query sees the keys up to its own position")
        # PyTorch's is_causal is documented to align the first query with the first key
        _check_corner(exam, stated or ("start" if flag == "is_causal" else "end"), stated is not None)
        return
    for mistake in wrong:
        exam.failed("causal", mistake.name, f"with {flag}=True the answer is that of this mask", _flagged, given)


def _flagged(small: Probe) -> Probe:
    return replace(small, causal=True)


def says_causal(subject: Subject) -> str | None:
    """In words, what says that a function is causal: its name, or a triangle that it keeps; None where nothing does."""
    owner = subject.owner
    if any(getattr(owner, name, None) is False for name in ("causal", "is_causal")) or subject.masks():
        return None
    name = subject.name.rsplit(".", 1)[-1]
    if re.search(r"(?<!non_)(?<!non)(?<!not_)causal|autoregress", name, re.IGNORECASE):
        return f"it is called {name}"
    for name, value in getattr(owner, "_buffers", {}).items():
        kept = to_numpy(value) if is_array(value) else np.zeros(1)
        if kept.ndim >= 2 and kept.shape[-1] == kept.shape[-2] > 1:
            seen = kept.reshape(-1, *kept.shape[-2:])[0] != 0
            if any((seen == triangle(np.ones_like(seen), d)).all() for triangle, d in TRIANGLES):
                return f"it keeps a triangle, {name}"
    return None


def _check_always(exam: Exam, stated: str | None) -> None:
    """Causality that cannot be switched off: either corner is a convention, unless one was stated."""
    corners = {"end": "last query aligned with the last key", "start": "first query aligned with the first key"}
    sizes = exam.found.sizes
    if exam.variant.causal == "end" and exam.variant.masking == "right":
        exam.passed("causal", "always: a query sees the keys up to its own position")
    if exam.alone:
        return
    if sizes.queries == sizes.keys:
        _check_corner(exam, stated or "end", stated is not None)
    elif stated is not None and stated != exam.align:
        words = f"{stated!r} was stated, and with {sizes.queries} queries and {sizes.keys} keys the"
        exam.failed("causal corner", "causal-other-corner", f"{words} {corners[exam.align]}")
    else:
        exam.noted("causal corner", corners[exam.align])


def _check_corner(exam: Exam, align: str, stated: bool) -> None:
    sizes = exam.found.sizes
    if exam.alone or (sizes.queries == sizes.keys and not exam.found.always_causal):
        return
    wide = replace(exam.way, bounds=replace(exam.way.bounds, square=False))
    given = replace(probe(wide.fit(replace(sizes, queries=3, keys=7)), 4, shared=exam.shared), causal=True)
    try:
        got = exam.call(given)
    except Failed:
        exam.noted("causal corner", "it takes only as many keys as queries")
        return
    exam.align = align
    setting = exam.variant.causal
    if exam.agrees(given, got, exam.variant):
        exam.passed("causal corner", f"{'last' if align == 'end' else 'first'} query aligned with the "
                    f"{'last' if align == 'end' else 'first'} key")  # fmt: skip
    elif setting == "end" and exam.agrees(given, got, replace(exam.variant, causal="corner")):
        other = "first" if align == "end" else "last"
        words = f"with 3 queries and 7 keys the {other} query is aligned with the {other} key"
        exam.failed("causal corner", "causal-other-corner", words, _flagged, given, hazard=not stated)
    elif setting == "end":
        exam.failed(
            "causal corner", "unknown", "with 3 queries and 7 keys it hides what no causal mask hides", None, given
        )


def check_empty_rows(exam: Exam) -> None:
    """What does a query get that may attend to nothing?"""
    if exam.way.mask is None or exam.variant.masking not in ("right",):
        exam.skipped("fully masked rows", "it has no mask" if exam.way.mask is None else "its mask is wrong already")
        return
    mask = exam.way.mask

    def hidden(small: Probe) -> Probe:
        sizes = small.sizes
        allowed = np.ones((sizes.batch, 1, sizes.queries, sizes.keys), bool)
        if mask.only_keys:
            allowed[0] = False
        else:
            allowed[..., sizes.queries // 2, :] = False
        return replace(small, allowed=allowed)

    given = hidden(exam.problem(exam.found.sizes, 5))
    try:
        got = exam.call(given)
    except Failed as failed:
        exam.skipped("fully masked rows", str(failed))
        return
    if exam.agrees(given, got):
        exam.passed("fully masked rows", "0, and no NaN")
    elif not np.isfinite(got.output).all():
        words = "its output has NaN or infinity where a query may attend to nothing"
        exam.failed("fully masked rows", "nan-for-fully-masked-rows", words, hidden, given, hazard=True)
    else:
        exam.noted("fully masked rows", "finite but not 0: such a query averages what is hidden from it")


def check_padding(exam: Exam) -> None:
    """Does what hidden keys hold ever reach the output?"""
    if exam.way.mask is None or exam.variant.masking not in ("right", "inverted"):
        exam.skipped("padding", "it has no mask" if exam.way.mask is None else "its mask is wrong already")
        return
    if replace(exam.variant, scale="right", factor=None, masking="right", causal="end", rotary="") != RIGHT:
        exam.skipped("padding", "the formula is wrong already")
        return
    if any(finding.name == "mask-inverted" for finding in exam.findings):
        exam.skipped("padding", "its mask is wrong already")
        return
    if exam.shared:
        exam.skipped("padding", "keys are also queries or values, so padding cannot be changed alone")
        return

    def filled(small: Probe, value: float) -> Probe:
        one = padded(small, 1)
        k, v = one.k.copy(), one.v.copy()
        k[..., -1, :] *= value
        v[..., -1, :] *= value
        return replace(one, k=k, v=v)

    given = exam.problem(exam.found.sizes, 6)
    clean = filled(given, 0.0)
    expected = exam.way.form.reference(exam.variant, clean, exam.align)
    assert expected is not None
    allowance = exam.way.form.tolerance(clean, expected[1], EPS, exam.variant)
    got = exam.call(filled(given, 2.0**14))
    if not agrees(got.output, expected[0], allowance):
        words = f"hidden keys and values × 16,384 change the output by {distance(got.output, expected[0]):.2g}"
        exam.failed("padding", "padding-leaks", words, lambda small: filled(small, 2.0**14))
        return
    exam.passed("padding", "what hidden keys hold does not reach the output")
    nan = exam.call(filled(given, math.nan))
    if agrees(nan.output, expected[0], allowance):
        exam.passed("NaN in padding", "does not reach the output either")
    else:
        exam.noted("NaN in padding", "reaches the output (0 · NaN is NaN), as it does in most implementations")
