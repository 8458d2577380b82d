"""check(): find out how somebody's attention is called, examine it, and report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.doctor import battery, battery_both, battery_masks, battery_numbers, building, speech
from clearhead.doctor.answers import Failed, Hung
from clearhead.doctor.chance import check_chance
from clearhead.doctor.exam import Exam
from clearhead.doctor.finding import Found, Search
from clearhead.doctor.forms import LAYOUTS, Form, Module
from clearhead.doctor.mistakes import CATALOGUE
from clearhead.doctor.report import Checked, Finding, Report
from clearhead.doctor.subject import Subject
from clearhead.doctor.variants import RIGHT
from clearhead.doctor.ways import Way


def check(
    function: Any,
    *arguments: Any,
    mask: Literal["attend", "hide"] | None = None,
    causal: Literal["end", "start"] | None = None,
    layout: Literal["BHTD", "BTHD", "BTD", "TD"] | None = None,
    d: int | None = None,
    **options: Any,
) -> Report:
    """Is this implementation of attention right, and if not, which mistake is it?

    >>> import numpy as np, clearhead as ch
    >>> def mine(q, k, v):
    ...     scores = q @ k.swapaxes(-1, -2)
    ...     weights = np.exp(scores - scores.max(-1, keepdims=True))
    ...     return weights / weights.sum(-1, keepdims=True) @ v
    >>> report = ch.check(mine)
    >>> report.right, report.names
    (False, ('no-scale',))
    >>> print(report.findings[0].example.lines()[-2])
    expected [[2.9858]]

    `function` takes q, k and v of NumPy, PyTorch or JAX in any usual layout and returns the output, (output, weights)
    or (weights, output). It may be an object, an `nn.Module` or, with the arguments to build it, a class; one with
    projections of its own is held against them. How it is called is found out by trying, and said in the report. Where
    that is not for the function to choose, say so: `mask` is what True means, `causal` which query and key are aligned,
    `layout` the axes, `d` the features of a head that it was built for.

    >>> class Attention:
    ...     def __init__(self, d_k):
    ...         self.scale = 1 / d_k**0.5
    ...     def __call__(self, q, k, v):
    ...         weights = np.exp(self.scale * q @ k.swapaxes(-1, -2))
    ...         return weights @ v
    >>> ch.check(Attention, 4).names
    ('no-denominator',)
    """
    stated: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
        ("mask", mask, ("attend", "hide")),
        ("causal", causal, ("end", "start")),
        ("layout", layout, tuple(form.name for form in LAYOUTS)),
    )
    for name, value, choices in stated:
        if value is not None and value not in choices:
            raise ArgumentError(name, f"is {value!r}, expected one of {', '.join(map(repr, choices))}")
    if d is not None and (isinstance(d, bool) or not isinstance(d, int) or d < 1):
        raise ArgumentError("d", f"is {d!r}, expected the features of one head, a whole number of at least 1")
    made, built = building.build(function, arguments, options)
    subject = Subject.of(made, built)
    search = Search(subject, layout, d)
    try:
        found = search.run()
    except Hung as hung:
        raise ArgumentError("function", f"could not be checked: {hung}") from None
    if found is None:
        for library in speech.libraries(subject.library):
            reversing = _reversing(subject, library, layout)
            if reversing is not None:
                return reversing
        first = search.said[0] if search.said else "no library to call it with was found"
        raise ArgumentError("function", f"could not be called in any of {len(search.said)} ways; the first: {first}")
    exam = Exam(subject, found, found.way, found.variant or RIGHT, found.align)
    try:
        if found.variant is None:
            if not check_chance(exam):
                battery.check_formula(exam)
        elif found.lost or found.one_head or found.across:
            battery.check_formula(exam)
        else:
            _examine(exam, mask, causal)
    except Hung as hung:
        exam.noted("time", f"the other checks were not made: {hung}")
    return Report(subject.name, _conventions(exam, found), tuple(exam.checks), tuple(exam.findings))


def _reversing(subject: Subject, library: str, layout: str | None) -> Report | None:
    """The report of a function that takes only sizes with which its `.T` does not show."""
    form = next((form for form in LAYOUTS if form.name == layout and len(form.axes) > 2), None)
    seen = None if form is None else battery.transposed(subject, Way(library, form))
    if form is None or seen is None or not seen[0]:
        return None
    mistake = CATALOGUE[seen[0]]
    finding = Finding(mistake, "batch axes", f"distinct sizes raise, and {seen[1]}")
    checks = (Checked("batch axes", "failed", mistake.title),)
    return Report(subject.name, {"library": library, "layout": form.words}, checks, (finding,))


def _examine(exam: Exam, mask: str | None, causal: str | None) -> None:
    checks: tuple[tuple[str, Callable[[], None]], ...] = (
        ("formula", lambda: battery.check_formula(exam)),
        ("sizes", lambda: battery.check_sizes(exam)),
        ("grouped heads", lambda: battery.check_groups(exam)),
        ("batch axes", lambda: battery.check_batch_axes(exam)),
        ("memory order", lambda: battery.check_memory(exam)),
        ("weights", lambda: battery.check_weights(exam)),
        ("mask", lambda: battery_masks.check_mask(exam, mask)),
        ("causal", lambda: battery_masks.check_causal(exam, causal)),
        ("fully masked rows", lambda: battery_masks.check_empty_rows(exam)),
        ("padding", lambda: battery_masks.check_padding(exam)),
        ("mask", lambda: battery_both.check_beside(exam)),
        ("large scores", lambda: battery_numbers.check_large(exam)),
        ("float16", lambda: battery_numbers.check_half(exam)),
        ("float64", lambda: battery_numbers.check_precision(exam)),
        ("determinism", lambda: battery.check_habits(exam)),
    )
    for name, one in checks:
        try:
            one()
        except Hung:
            raise
        except Failed as failed:
            exam.skipped(name, str(failed))
            if not exam.repeats():
                exam.failed(
                    "determinism", "nondeterministic", f"a call that was answered before now gives another: {failed}"
                )
                return


def _conventions(exam: Exam, found: Found) -> dict[str, str]:
    way = exam.way
    words = {"library": way.library, "layout": _layout(way.form)}
    if exam.subject.built:
        words["built"] = ", ".join(f"{name}={value!r}" for name, value in exam.subject.built.items())
    if way.bounds.words:
        words["sizes"] = way.bounds.words
    if way.order is not None:
        names = [exam.subject.inputs.names[way.order.index(i)] for i in range(3)]
        words["arguments"] = "queries, keys and values are {}, {} and {}".format(*names)
    others = {None: "the output", 0: "(weights, output)", 1: "(output, weights)"}
    words["returns"] = others.get(way.weights, "the output and the weights, among others")
    if way.weights is None and way.output not in (None, 0):
        words["returns"] = f"the output as item {way.output}"
    if exam.variant.rotary:
        pairs, base = exam.variant.rotary.split()
        words["positions"] = f"rotary, pairs of {pairs}, base {float(base):,.0f}"
    if way.mask is not None:
        words["mask"] = way.mask.words
    if found.always_causal:
        words["causal"] = "always"
    elif way.causal is not None:
        words["causal"] = f"{way.causal}=True"
    if np.isfinite(found.distance) and found.variant is None:
        words["distance"] = f"{found.distance:.3g} of the largest number"
    return words


def _layout(form: Form) -> str:
    if isinstance(form, Module):
        own = form.own
        shared = f" over {own.key_heads} key heads" if own.key_heads != own.heads else ""
        return f"{form.order} through its own projections, {own.heads} heads{shared}"
    return form.words
