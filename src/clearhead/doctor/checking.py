"""check(): find out how somebody's attention is called, examine it, and report."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.doctor import battery
from clearhead.doctor.chance import check_chance
from clearhead.doctor.conventions import Found, find, libraries
from clearhead.doctor.exam import Exam
from clearhead.doctor.forms import LAYOUTS, Form, Module
from clearhead.doctor.mistakes import CATALOGUE
from clearhead.doctor.report import Checked, Finding, Report
from clearhead.doctor.subject import MaskWay, Subject, Way
from clearhead.doctor.variants import RIGHT


def check(
    function: Any,
    *,
    mask: Literal["attend", "hide"] | None = None,
    causal: Literal["end", "start"] | None = None,
    layout: Literal["BHTD", "BTHD", "BTD", "TD"] | None = None,
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
    or (weights, output). It may be an object or an `nn.Module`; one with projections of its own is held against them.
    How it is called is found out by trying, and said in the report. Where that is not for the
    function to choose, say so: `mask` is what True means, `causal` which query and key are aligned, `layout` the axes.
    """
    if not callable(function):
        raise ArgumentError("function", f"is a {type(function).__name__}, expected something to call")
    stated: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
        ("mask", mask, ("attend", "hide")),
        ("causal", causal, ("end", "start")),
        ("layout", layout, tuple(form.name for form in LAYOUTS)),
    )
    for name, value, choices in stated:
        if value is not None and value not in choices:
            raise ArgumentError(name, f"is {value!r}, expected one of {', '.join(map(repr, choices))}")
    subject = Subject.of(function)
    found, said = find(subject, layout)
    if found is None:
        for library in libraries(subject):
            reversing = _reversing(subject, library, layout)
            if reversing is not None:
                return reversing
        first = said[0] if said else "no library to call it with was found"
        raise ArgumentError("function", f"could not be called in any of {len(said)} ways; the first: {first}")
    exam = Exam(subject, found, found.way, found.variant or RIGHT, "end")
    if found.variant is None:
        if not check_chance(exam):
            battery.check_formula(exam)
    elif found.lost:
        battery.check_formula(exam)
    else:
        _examine(exam, mask, causal)
    return Report(subject.name, _conventions(exam, found), tuple(exam.checks), tuple(exam.findings))


def _reversing(subject: Subject, library: str, layout: str | None) -> Report | None:
    """The report of a function that takes only sizes with which its `.T` does not show."""
    form = next((form for form in LAYOUTS if form.name == layout and len(form.axes) > 2), None)
    words = None if form is None else battery.reverses(subject, Way(library, form))
    if form is None or words is None:
        return None
    mistake = CATALOGUE["transpose-reverses-batch"]
    finding = Finding(mistake, "batch axes", f"distinct sizes raise, and {words}")
    checks = (Checked("batch axes", "failed", mistake.title),)
    return Report(subject.name, {"library": library, "layout": form.words}, checks, (finding,))


def _examine(exam: Exam, mask: str | None, causal: str | None) -> None:
    battery.check_formula(exam)
    battery.check_sizes(exam)
    battery.check_batch_axes(exam)
    battery.check_weights(exam)
    battery.check_mask(exam, mask)
    battery.check_causal(exam, causal)
    battery.check_empty_rows(exam)
    battery.check_padding(exam)
    battery.check_large(exam)
    battery.check_half(exam)
    battery.check_precision(exam)
    battery.check_habits(exam)


def _conventions(exam: Exam, found: Found) -> dict[str, str]:
    way = exam.way
    words = {"library": way.library, "layout": _layout(way.form)}
    others = {None: "the output", 0: "(weights, output)", 1: "(output, weights)"}
    words["returns"] = others.get(way.weights, "the output and the weights, among others")
    if way.weights is None and way.output not in (None, 0):
        words["returns"] = f"the output as item {way.output}"
    if way.mask is not None:
        words["mask"] = _mask_words(way.mask)
    if found.always_causal:
        words["causal"] = "always"
    elif way.causal is not None:
        words["causal"] = f"{way.causal}=True"
    if np.isfinite(found.distance) and found.variant is None:
        words["distance"] = f"{found.distance:.3g} of the largest number"
    return words


def _layout(form: Form) -> str:
    if isinstance(form, Module):
        return f"{form.order} through its own projections, {form.own.heads} heads"
    return form.words


def _mask_words(mask: MaskWay) -> str:
    meaning = {
        "attend": "True means may attend",
        "hide": "True hides a key, as in torch.nn.MultiheadAttention; PyTorch's function, JAX and clearhead mean the"
        " opposite",
        "additive": "added to the scores, −inf where hidden",
        "additive -1e9": "added to the scores, −1e9 where hidden",
        "attend 1/0": "1 means may attend, 0 hides",
        "hide 1/0": "1 hides a key, 0 shows it",
        "attend 1.0/0.0": "1.0 means may attend, 0.0 hides",
    }[mask.encoding]
    axes = {"T": "queries", "S": "keys", "B": "batch", "H": "heads", "1": "1"}
    return f"{mask.parameter}: {meaning}; shape ({', '.join(axes[letter] for letter in mask.shape)})"
