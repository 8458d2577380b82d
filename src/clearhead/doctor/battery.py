"""The checks, one function each: formula, sizes, masks, causality, padding, large scores, precisions, habits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from clearhead.doctor.conventions import EPS, find_mask, stated_polarity
from clearhead.doctor.exam import Exam
from clearhead.doctor.forms import LAYOUTS, Module, reversed_transpose
from clearhead.doctor.probes import MORE, Probe, Sizes, agrees, distance, padded, probe, tolerance, with_mask
from clearhead.doctor.subject import Failed, Subject, Way
from clearhead.doctor.variants import CAUSALS, RIGHT, scale_of

HALF = float(np.finfo(np.float16).eps)
DOUBLE = float(np.finfo(np.float64).eps)


def same(given: Probe) -> Probe:
    """A problem as it is."""
    return given


def check_formula(exam: Exam) -> None:
    """Does it compute softmax(q kᵀ / √D) v?"""
    found, variant = exam.found, exam.found.variant
    sizes = found.sizes
    heads = found.way.form.own.heads if isinstance(found.way.form, Module) else sizes.heads
    words = f"batch {sizes.batch}, heads {heads}, {sizes.queries} queries, {sizes.keys} keys"
    if variant is None:
        off = (
            "it is not finite or of another shape"
            if math.isinf(found.distance)
            else f"it is off by {found.distance:.1%}"
        )
        exam.failed("formula", "unknown", f"{words}: {off}", same)
    elif found.lost:
        words = f"float32 inputs are answered only to {found.distance:.1g}, where float32 has {EPS:.1g}"
        exam.failed("formula", "precision-lost", words, same)
    elif variant.factor is not None:
        right = 1.0 / math.sqrt(sizes.features)
        exam.failed("formula", "scale-other", f"scores × {variant.factor:.5g}, expected × {right:.5g} = 1/√D", same)
    elif variant.mistakes:
        for i, mistake in enumerate(variant.mistakes):
            seen = f"{words}: the answer is that of this formula, up to rounding"
            if i:
                exam.failed("formula", mistake.name, f"{seen}; the example above shows both")
            else:
                exam.failed("formula", mistake.name, seen, same)
    else:
        exam.passed("formula", f"softmax(q kᵀ / √D) v{', causal' if found.always_causal else ''}: {words}")


def check_sizes(exam: Exam) -> None:
    """Is it the same formula at other sizes?"""
    tried = refused = 0
    for sizes in dict.fromkeys(map(exam.fit, MORE)):
        given = exam.problem(sizes)
        try:
            got = exam.call(given)
        except Failed:
            refused += 1
            continue
        tried += 1
        if not exam.agrees(given, got):
            exam.failed("sizes", "unknown", f"right at some sizes, wrong at {sizes}", same, given)
            return
    words = f"{tried} other sizes" + (f", {refused} refused" if refused else "")
    if tried:
        exam.passed("sizes", words)
    else:
        exam.skipped("sizes", "it takes no other sizes")


def check_mask(exam: Exam, stated: str | None) -> None:
    """Which convention does its mask have, and is it applied as it should be?"""
    names = exam.subject.masks()
    if not names:
        exam.skipped("mask", "it has no mask")
        return
    found = find_mask(exam.subject, exam.found, exam.variant)
    if found is None:
        exam.skipped("mask", f"no way of handing over {names[0]!r} worked")
        return
    exam.way, variant, given, _ = found
    mask = exam.way.mask
    assert mask is not None
    polarity = mask.encoding.split()[0]
    claimed = stated or stated_polarity(exam.subject, mask.parameter)

    def masked(small: Probe) -> Probe:
        return padded(small, 1) if mask.only_keys else with_mask(small, 1, by_batch=mask.by_batch)

    if variant.masking == "unknown":
        exam.failed("mask", "unknown", "with a mask it gives what no known way of masking gives", masked, given)
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
    exam.variant = replace(exam.variant, masking=variant.masking, penalty=variant.penalty)
    _check_weights(exam, given, "weights with a mask")


def check_weights(exam: Exam) -> None:
    """Are the weights it returns those that gave the output?"""
    _check_weights(exam, exam.problem(exam.found.sizes, 2), "weights")


def _check_weights(exam: Exam, given: Probe, name: str) -> None:
    if exam.way.weights is None or exam.variant.masking == "unknown":
        return
    got = exam.call(given)
    expected = exam.way.form.reference(exam.variant, given, exam.align)
    if got.weights is None or expected is None or got.weights.shape != expected[1].shape:
        return
    if isinstance(exam.way.form, Module):
        allowance = np.asarray(exam.way.form.tolerance(given, expected[1], EPS).max())
    else:
        keys = np.broadcast_to(np.eye(given.sizes.keys), (*given.k.shape[:2], given.sizes.keys, given.sizes.keys))
        scale = scale_of(exam.variant, given.q, given.k, given.v)
        allowance = tolerance(given.q, given.k, keys, expected[1], scale, EPS)
    if agrees(got.weights, expected[1], allowance):
        exam.passed(name, "those that gave the output")
    elif exam.agrees(given, got):
        exam.failed(name, "weights-not-those-used", f"they are off by {distance(got.weights, expected[1]):.2g}")


def check_causal(exam: Exam, stated: str | None) -> None:
    """Does its causal flag, or its causality that cannot be switched off, hide exactly what comes later?"""
    flag = exam.subject.causal()
    if flag is None and not exam.found.always_causal:
        exam.skipped("causal", "it has no causal flag")
        return
    if exam.found.always_causal:
        if exam.variant.causal == "end":
            exam.passed("causal", "always: a query sees the keys up to its own position")
        _check_corner(exam, stated or "end")
        return
    exam.way = replace(exam.way, causal=flag)

    def flagged(small: Probe) -> Probe:
        return replace(small, causal=True)

    sizes = replace(exam.found.sizes, queries=5, keys=5)
    given = replace(exam.problem(sizes, 3), causal=True)
    try:
        got = exam.call(given)
    except Failed as failed:
        exam.skipped("causal", f"{flag}=True: {failed}")
        return
    for setting in ("end", *CAUSALS):
        if exam.agrees(given, got, replace(exam.variant, causal=setting)):
            break
    else:
        exam.failed("causal", "unknown", f"{flag}=True hides what no causal mask hides", flagged, given)
        return
    if setting == "end":
        exam.passed("causal", f"{flag}=True: a query sees the keys up to its own position")
        # PyTorch's is_causal is documented to align the first query with the first key
        _check_corner(exam, stated or ("start" if flag == "is_causal" else "end"))
        return
    mistake = next(m for m in replace(RIGHT, causal=setting).mistakes)
    exam.failed("causal", mistake.name, f"with {flag}=True the answer is that of this mask", flagged, given)


def _check_corner(exam: Exam, align: str) -> None:
    sizes = exam.found.sizes
    if sizes.queries == sizes.keys and (exam.alone or not exam.found.always_causal):
        return
    given = replace(probe(exam.way.form.fit(replace(sizes, queries=3, keys=7)), 4), causal=True)
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
        exam.failed("causal corner", "causal-other-corner", words, lambda small: replace(small, causal=True), given)
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
        exam.failed("fully masked rows", "nan-for-fully-masked-rows", words, hidden, given)
    else:
        exam.noted("fully masked rows", "finite but not 0: such a query averages what is hidden from it")


def check_padding(exam: Exam) -> None:
    """Does what hidden keys hold ever reach the output?"""
    if exam.way.mask is None or exam.variant.masking not in ("right", "inverted"):
        exam.skipped("padding", "it has no mask" if exam.way.mask is None else "its mask is wrong already")
        return
    if replace(exam.variant, scale="right", factor=None, masking="right", causal="end") != RIGHT:
        exam.skipped("padding", "the formula is wrong already")
        return
    if exam.alone:
        exam.skipped("padding", "keys are also queries, so padding cannot be changed alone")
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


def check_large(exam: Exam) -> None:
    """Does it survive scores of a thousand?"""
    strength = 30.0 if isinstance(exam.way.form, Module) else 512.0

    def all_large(small: Probe) -> Probe:
        if isinstance(exam.way.form, Module):
            return replace(small, q=small.q * strength, k=small.k * strength)
        return replace(small, q=small.q * strength)

    def one_large(small: Probe) -> Probe:
        q = small.q / 64.0
        q[:, :, 0] *= 64.0 * strength
        return replace(small, q=q, k=q if exam.alone else small.k)

    for prepare, mistake, words in (
        (all_large, "no-maximum-subtracted", "scores of about ±1,000 give NaN or infinity"),
        (one_large, "maximum-of-the-whole-matrix", "one query with large scores makes the others NaN or infinite"),
    ):
        # with one query in all, its own largest score is that of the whole matrix
        alone = prepare is all_large
        sizes = replace(exam.found.sizes, batch=1, heads=1, queries=1) if alone else exam.found.sizes
        given = prepare(exam.problem(sizes, 7))
        got = exam.call(given)
        if not np.isfinite(got.output).all():
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
        exam.failed("float16", "penalty-overflows-float16", words, masked, given, "float16")
    else:
        exam.failed("float16", "unknown", "right in float32, wrong in float16 with a mask", masked, given, "float16")


def check_precision(exam: Exam) -> None:
    """Is a float64 input answered to the digits of float64?"""
    if exam.way.library == "jax" or exam.variant.factor is not None:
        jax = exam.way.library == "jax"
        exam.skipped("float64", "JAX has it only where it is switched on" if jax else "its scale was only measured")
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
    exam.failed("float64", "precision-lost", words, same, given, "float64")


def check_habits(exam: Exam) -> None:
    """Does it answer the same twice, and leave its inputs alone?"""
    given = exam.problem(exam.found.sizes, 10)
    one, two = exam.call(given), exam.call(given)
    if agrees(one.output, two.output, np.abs(one.output) * 2.0**-20):
        exam.passed("determinism", "the same inputs give the same output")
    else:
        exam.failed("determinism", "nondeterministic", "two calls with the same inputs differ")
    if exam.written:
        names = ", ".join(exam.written)
        exam.failed("inputs", "inputs-written-to", f"after the call {names} held other numbers")
    else:
        exam.passed("inputs", "are not written to")
    if one.dtype != "float32":
        exam.noted("dtype", f"float32 inputs come back as {one.dtype}")


def check_batch_axes(exam: Exam) -> None:
    """A function of two axes: does it refuse more of them, or answer wrongly where sizes happen to agree?"""
    if exam.way.form.name != "TD":
        return
    for form in (LAYOUTS[2], LAYOUTS[0]):
        words = reverses(exam.subject, Way(exam.way.library, form, exam.way.output, exam.way.weights))
        if words is not None:
            exam.noted("batch axes", f"two axes only: {words}, because .T reverses them all")
            return
    exam.passed("batch axes", "it takes two axes, and no more in silence")


def reverses(subject: Subject, way: Way) -> str | None:
    """In words, what a function does whose `.T` reverses the batch axes; None where it does not do that."""
    size, form = 3, way.form
    given = probe(Sizes(size, size if 1 in form.axes else 1, size, size, size, size), 11)
    try:
        got = subject.call(way, given)
    except Failed:
        return None
    reverse = reversed_transpose(form.give(given), scale_of(RIGHT, given.q, given.k, given.v))
    taken = None if reverse is None else form.take(reverse, given)
    expected = form.reference(RIGHT, given)
    if taken is None or expected is None or not agrees(got.output, taken, 1e-4 * np.abs(taken)):
        return None
    off = distance(got.output, expected[0])
    return f"with {len(form.axes)} axes of size {size} the answer is off by {off:.0%}, in silence"
