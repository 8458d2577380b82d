"""The checks of the formula: at the sizes it was found with, at others, with other memory, twice."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np

from clearhead.doctor.answers import Failed
from clearhead.doctor.exam import Exam
from clearhead.doctor.forms import LAYOUTS, Module, permuted_keys
from clearhead.doctor.matching import EPS
from clearhead.doctor.probes import Probe, agrees, distance, probe, tolerance
from clearhead.doctor.sizes import LONG, MORE, Bounds, Sizes
from clearhead.doctor.subject import Subject
from clearhead.doctor.variants import RIGHT, broken_blocks, scale_of
from clearhead.doctor.ways import Way

# Words that speak of a batch axis: the word itself, or a shape of three axes that begins with one
BATCHES = re.compile(r"(?<!no )(?<!without )(?<!without a )batch|\(\s*(?:b|bs|bsz)\s*,\s*\w+\s*,\s*\w+", re.IGNORECASE)

# Words that speak of positions that are part of the scores
POSITIONS = re.compile(r"\w*(?:rotary|rope|rotate_half|freqs_cis|alibi|rel_pos|relative_position)\w*", re.IGNORECASE)


def same(given: Probe) -> Probe:
    """A problem as it is."""
    return given


def check_formula(exam: Exam) -> None:
    """Does it compute softmax(q kᵀ / √D) v?"""
    found, variant = exam.found, exam.found.variant
    sizes = found.sizes
    heads = found.way.form.inner(sizes).heads
    words = f"batch {sizes.batch}, heads {heads}, {sizes.queries} queries, {sizes.keys} keys"
    if found.one_head:
        exam.failed("formula", "wrong-with-several-heads", "right with one head; with three it raises or is wrong")
    elif found.across:
        seen = "the answer is that of attention across the batch: right, were positions the first axis"
        exam.failed("formula", "batch-axis-transposed", f"{words}: {seen}")
    elif variant is None:
        _unexplained(exam, words)
    elif found.lost:
        words = f"float32 inputs are answered only to {found.distance:.1g}, where float32 has {EPS:.1g}"
        exam.failed("formula", "precision-lost", words, same)
    elif variant.factor is not None:
        right = 1.0 / math.sqrt(found.way.form.inner(sizes).features)
        exam.failed("formula", "scale-other", f"scores × {variant.factor:.5g}, expected × {right:.5g} = 1/√D", same)
    elif variant.mistakes:
        for i, mistake in enumerate(variant.mistakes):
            seen = f"{words}: the answer is that of this formula, up to rounding"
            if i:
                exam.failed("formula", mistake.name, f"{seen}; the example above shows both")
            else:
                exam.failed("formula", mistake.name, seen, same)
    else:
        more = (", causal" if found.always_causal else "") + (", rotary positions" if variant.rotary else "")
        exam.passed("formula", f"softmax(q kᵀ / √D) v{more}: {words}")


def _unexplained(exam: Exam, words: str) -> None:
    """A formula that nothing explains: wrong, unless the module has parts of which nothing is known here."""
    form, far = exam.way.form, exam.found.distance
    if isinstance(form, Module) and form.own.others:
        parts = ", ".join(form.own.others)
        exam.noted("formula", f"cannot be said: it has parts that are no projections of q, k, v or the output: {parts}")
        return
    inside = POSITIONS.search(exam.subject.source())
    if isinstance(form, Module) and inside is not None:
        words = f"cannot be said: positions are inside ({inside.group()}), and not as rotary ones usually are"
        exam.noted("formula", f"{words}; none of the checks was made")
        return
    off = "it is not finite or of another shape" if math.isinf(far) else f"it is off by {far:.1%}"
    exam.failed("formula", "unknown", f"{words}: {off}", same)


def check_sizes(exam: Exam) -> None:
    """Is it the same formula at other sizes, and with more keys than go into a block?"""
    tried = refused = 0
    long = LONG[1:2] if exam.way.library == "jax" else LONG  # each shape is compiled anew there
    for sizes in dict.fromkeys(map(exam.fit, (*MORE, *long))):
        given = exam.problem(sizes)
        try:
            got = exam.call(given)
        except Failed:
            refused += 1
            continue
        tried += 1
        if exam.agrees(given, got):
            continue
        for variant in broken_blocks(exam.variant):
            if exam.agrees(given, got, variant):
                words = f"right for few keys; with {sizes.keys} of them the answer is that of blocks of {variant.block}"
                exam.failed("sizes", variant.mistakes[-1].name, words)
                return
        exam.failed("sizes", "unknown", f"right at some sizes, wrong at {sizes}", same, given)
        return
    words = f"{tried} other sizes" + (f", {refused} refused" if refused else "")
    if tried:
        exam.passed("sizes", words)
    else:
        exam.skipped("sizes", "it takes no other sizes")


def check_groups(exam: Exam) -> None:
    """Do query heads that share a key head share the right one?"""
    bounds = exam.way.bounds
    if isinstance(exam.way.form, Module):
        return  # its projections say how many heads there are, and the formula was checked with them
    if 1 not in exam.way.form.axes or exam.shared or (bounds.heads and not bounds.groups):
        exam.skipped("grouped heads", "it takes as many key heads as query heads, or no heads")
        return
    sizes = exam.fit(replace(exam.found.sizes, heads=6, groups=bounds.groups or 3))
    given = replace(exam.problem(sizes, 12), causal=exam.found.always_causal)
    try:
        got = exam.call(given)
    except Failed:
        exam.skipped("grouped heads", "it takes as many key heads as query heads")
        return
    words = f"{sizes.heads} query heads over {sizes.heads // sizes.groups} key heads"
    small = exam.fit(Sizes(1, 4, 1, 2, 1, 1, bounds.groups or 2))
    if exam.agrees(given, got):
        exam.passed("grouped heads", f"{words}: each key head serves neighbouring query heads")
    elif exam.agrees(given, got, replace(exam.variant, grouping="tiled")):
        shown = exam.tiny(small)
        exam.failed("grouped heads", "groups-in-the-wrong-order", f"{words}, repeated as a whole", None, shown)
    else:
        exam.failed(
            "grouped heads", "unknown", f"{words}: right with as many key heads, and wrong with fewer", None, given
        )


def check_memory(exam: Exam) -> None:
    """Does it read arrays whose memory lies in another order, as a transpose leaves it?"""
    if exam.way.library == "jax":
        exam.skipped("memory order", "JAX has no views")
        return
    given = exam.problem(exam.found.sizes, 13)
    plain = exam.call(given).output
    try:
        got = exam.call(given, strided=True)
    except Failed as failed:
        words = f"transposed views of the same numbers raise {failed}"
        if len(exam.way.form.axes) == 4 and not exam.way.form.name.startswith("BTE"):
            exam.failed("memory order", "needs-contiguous-inputs", words, hazard=True)
        else:
            exam.noted("memory order", words)
        return
    if agrees(got.output, plain, 1e-4 * np.abs(plain[np.isfinite(plain)]).max(initial=0.0)):
        exam.passed("memory order", "transposed views give the same")
    else:
        exam.failed(
            "memory order", "needs-contiguous-inputs", "transposed views of the same numbers give another result"
        )


def check_weights(exam: Exam) -> None:
    """Are the weights it returns those that gave the output?"""
    check_weights_of(exam, exam.problem(exam.found.sizes, 2), "weights")


def check_weights_of(exam: Exam, given: Probe, name: str) -> None:
    """Compare the weights that came with one problem's answer."""
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
        q, k = (given.k, given.q) if exam.variant.values == "swapped" else (given.q, given.k)
        allowance = tolerance(q, k, keys, expected[1], abs(scale), EPS)
    if agrees(got.weights, expected[1], allowance):
        exam.passed(name, "those that gave the output")
    elif exam.agrees(given, got):
        exam.failed(name, "weights-not-those-used", f"they are off by {distance(got.weights, expected[1]):.2g}")


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
    intended = BATCHES.search(exam.subject.source()) is not None
    for form in (LAYOUTS[2], LAYOUTS[0]):
        way = replace(exam.way, form=replace(form, shared=exam.shared), mask=None, bounds=Bounds())
        seen = transposed(exam.subject, way)
        if seen is None:
            continue
        mistake, words = seen
        if mistake == "batch-axis-transposed" or intended:
            exam.failed("batch axes", mistake, f"right for two axes; {words}")
        else:
            why = ", because .T reverses them all" if mistake else ""
            exam.noted("batch axes", f"two axes only: {words}{why}")
        return
    exam.passed("batch axes", "it takes two axes, and no more in silence")


def transposed(subject: Subject, way: Way) -> tuple[str, str] | None:
    """What a function does wrong with more axes: a mistake, "" without a name, and words; None where nothing is."""
    size, form = 3, way.form
    given = probe(form.fit(Sizes(size, size if 1 in form.axes else 1, size, size, size, size)), 11, shared=form.shared)
    try:
        got = subject.call(way, given)
    except Failed:
        return None
    expected = form.reference(RIGHT, given)
    if expected is None or agrees(got.output, expected[0], 1e-4 * np.abs(expected[0]).max()):
        return None
    count = len(form.axes)
    off = distance(got.output, expected[0])
    words = f"with {count} axes of size {size} the answer is off by {off:.0%}, in silence"
    scale = scale_of(RIGHT, given.q, given.k, given.v)
    arrays = (form.lay(given.q), form.lay(given.k), form.lay(given.v))
    for axes in itertools.permutations(range(count)):
        reverse = permuted_keys(arrays, scale, axes)
        taken = None if reverse is None else form.take(reverse, given)
        if taken is not None and agrees(got.output, taken, 1e-4 * np.abs(taken).max()):
            # .T, and the exchange of axes 0 and 1, are how two axes are transposed
            usual = (tuple(range(count))[::-1], (1, 0, *range(2, count)))
            return ("transpose-reverses-batch" if axes in usual else "batch-axis-transposed"), words
    return "", words
