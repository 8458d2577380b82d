"""Finding out how a function wants to be called, and which formula it computes, by trying."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from clearhead.doctor.forms import LAYOUTS, PACKED, RETURNED, Form, Module
from clearhead.doctor.probes import LADDER, Probe, Sizes, agrees, distance, padded, probe, with_mask
from clearhead.doctor.projections import projections_of
from clearhead.doctor.subject import ENCODINGS, LIBRARIES, SHAPES, Failed, Got, MaskWay, Subject, Way
from clearhead.doctor.variants import CAUSALS, RIGHT, Variant, broken, broken_masks

EPS = float(np.finfo(np.float32).eps)
LOST = 0.03
SECOND = re.compile(r"^(k|key|keys|key_states|memory)$", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Found:
    """How a function is called and which variant of the formula it computes; None where no variant fits."""

    way: Way
    sizes: Sizes
    variant: Variant | None
    always_causal: bool = False
    distance: float = 0.0
    lost: bool = False  # the formula is right, but not to the digits that the inputs have


def matching(form: Form, variant: Variant, given: Probe, got: Got, align: str = "end", eps: float = EPS) -> bool:
    """True where a function gave what this variant gives."""
    expected = form.reference(variant, given, align)
    if expected is None:
        return False
    output, weights = expected
    allowance = form.tolerance(given, weights, eps, variant) + eps * np.abs(output)
    return agrees(got.output, output, allowance)


def differs(form: Form, variant: Variant, given: Probe, align: str = "end") -> bool:
    """True where this variant cannot be taken for the right formula on this problem."""
    expected, right = form.reference(variant, given, align), form.reference(RIGHT, given, align)
    return expected is not None and right is not None and not agrees(*_padded(expected[0], right[0]), 1e-3)


def _padded(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (one, other) if one.shape == other.shape else (one, np.full(one.shape, np.inf))


def find(subject: Subject, layout: str | None = None) -> tuple[Found | None, list[str]]:
    """The way to call a function and the formula it computes; and what was said by the calls that failed."""
    attempts: list[tuple[Way, Probe, Got]] = []
    said: list[str] = []
    for library in libraries(subject):
        for form in forms(subject):
            if layout not in (None, form.name):
                continue
            got, given = _first(subject, Way(library, form), said)
            if got is None or given is None:
                continue
            if matching(form, RIGHT, given, got):
                # one that runs with more axes and is wrong there, in a way that has a name, is meant to be right there
                wrong = _named_mistake([attempt for attempt in attempts if len(attempt[0].form.axes) > len(form.axes)])
                return wrong or Found(got.way, given.sizes, RIGHT), said
            attempts.append((got.way, given, got))
        if attempts:
            break
    return _explained(attempts), said


def _first(subject: Subject, way: Way, said: list[str]) -> tuple[Got | None, Probe | None]:
    """The first answer in one form, on sizes that ask less and less."""
    for sizes in dict.fromkeys(map(way.form.fit, LADDER)):
        given = probe(sizes, same=isinstance(way.form, Module) and way.form.single)
        try:
            return subject.call(way, given), given
        except Failed as failed:
            said.append(f"{way.library} {way.form.name}: {failed}")
    return None, None


def _named_mistake(attempts: list[tuple[Way, Probe, Got]]) -> Found | None:
    for way, given, got in attempts:
        for variant in broken(RIGHT, way.form.packed):
            if len(variant.mistakes) == 1 and matching(way.form, variant, given, got):
                if differs(way.form, variant, given):
                    return Found(way, given.sizes, variant)
    return None


def _explained(attempts: list[tuple[Way, Probe, Got]]) -> Found | None:
    """Of calls that gave something else than the formula, the one that a broken formula explains best."""
    contexts = list(_contexts(attempts))
    for way, given, got in contexts:
        if given.causal and matching(way.form, RIGHT, given, got):
            return Found(way, given.sizes, RIGHT, always_causal=True)
    for way, given, got in contexts:
        if given.causal:
            for setting in CAUSALS[:3]:
                if matching(way.form, replace(RIGHT, causal=setting), given, got):
                    return Found(way, given.sizes, replace(RIGHT, causal=setting), always_causal=True)
    for way, given, got in contexts:
        for variant in broken(RIGHT, way.form.packed):
            if matching(way.form, variant, given, got) and differs(way.form, variant, given):
                return Found(way, given.sizes, variant, always_causal=given.causal)
    for way, given, got in contexts:
        factor = measured_scale(way.form, given, got)
        if factor is not None:
            return Found(way, given.sizes, replace(RIGHT, factor=factor), always_causal=given.causal)
    if not attempts:
        return None
    far = [(_distance(way.form, given, got), i) for i, (way, given, got) in enumerate(attempts)]
    least, index = min(far)
    way, given, got = attempts[index]
    # numbers that passed through float16 or bfloat16 are off by a few parts in a thousand, and by no more
    lost = least <= LOST and matching(way.form, RIGHT, given, got, eps=2.0**-8)
    return Found(way, given.sizes, RIGHT if lost else None, distance=least, lost=lost)


def _contexts(attempts: list[tuple[Way, Probe, Got]]) -> Iterator[tuple[Way, Probe, Got]]:
    """Each attempt as it was, and as one of a function that is always causal."""
    yield from attempts
    for way, given, got in attempts:
        if given.sizes.queries == given.sizes.keys:
            yield way, replace(given, causal=True), got


def _distance(form: Form, given: Probe, got: Got) -> float:
    expected = form.reference(RIGHT, given)
    return math.inf if expected is None else distance(got.output, expected[0])


def measured_scale(form: Form, given: Probe, got: Got) -> float | None:
    """The scale that explains an answer, where one does: a search for it and a match at what it finds."""

    def off(factor: float) -> float:
        expected = form.reference(replace(RIGHT, factor=factor), given)
        return math.inf if expected is None else distance(got.output, expected[0])

    grid = np.geomspace(1e-3, 30.0, 60).tolist()
    best = min(range(len(grid)), key=lambda i: off(grid[i]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    for _ in range(80):  # thirds: what is left shrinks by a third each time
        one, two = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, two) if off(one) < off(two) else (one, high)
    factor = (low + high) / 2
    # where it was measured it is uncertain by a little more than the answer is
    return factor if matching(form, replace(RIGHT, factor=factor), given, got, eps=8 * EPS) else None


def libraries(subject: Subject) -> tuple[str, ...]:
    """The libraries to try: the one its code names, then the others that are there."""
    there = [name for name in LIBRARIES if name in sys.modules]
    named = [] if subject.library is None else [subject.library]
    return tuple(dict.fromkeys([*named, *there]))


def forms(subject: Subject) -> tuple[Form, ...]:
    """The forms to try: a module's own projections, packed heads where they can be given, and plain layouts."""
    names = list(subject.parameters)
    single = len(names) < 2 or not SECOND.match(names[1])
    first = bool(getattr(subject.function, "batch_first", True))
    own = projections_of(subject.function)
    if own:
        return tuple(Module("module", "", projections=one, single=single, batch_first=first) for one in own)
    plain = (*LAYOUTS, *RETURNED)
    return (PACKED, *plain) if subject.heads() is not None else plain


def find_mask(subject: Subject, found: Found, variant: Variant) -> tuple[Way, Variant, Probe, Got] | None:
    """How a mask is handed over, and how it is applied; None where no way of handing it over has worked."""
    same = isinstance(found.way.form, Module) and found.way.form.single
    plain = replace(probe(found.sizes, 1, same=same), causal=found.always_causal)
    calls: list[tuple[Way, Probe, Got]] = []
    for name, shape, encoding in itertools.product(subject.masks(), SHAPES, ENCODINGS):
        mask = MaskWay(name, encoding, shape)
        if ("pad" in name.lower()) != mask.only_keys and "pad" in name.lower():
            continue
        given = padded(plain) if mask.only_keys else with_mask(plain, 1, by_batch=mask.by_batch)
        way = replace(found.way, mask=mask)
        try:
            got = subject.call(way, given)
        except Failed:
            continue
        if matching(way.form, variant, given, got):
            return way, variant, given, got
        calls.append((way, given, got))
    for way, given, got in calls:
        if way.mask is not None and way.mask.encoding.startswith("hide"):
            continue  # each mistake is named for a mask that says what may be attended to
        for wrong in broken_masks(variant):
            if wrong.masking != "ignored" and _same_mask(way, wrong, given, got):
                return way, wrong, given, got
    ignored = replace(variant, masking="ignored")
    if calls and all(matching(way.form, ignored, given, got) for way, given, got in calls):
        return calls[0][0], ignored, *calls[0][1:]
    return (calls[0][0], replace(variant, masking="unknown"), *calls[0][1:]) if calls else None


def _same_mask(way: Way, variant: Variant, given: Probe, got: Got) -> bool:
    if variant.masking == "penalty after" and not np.isfinite(got.output).all():
        # −inf in place of −1e9: whatever it meets is not finite
        seen = way.form.reference(replace(variant, masking="ignored"), given)
        return seen is not None and given.allowed is not None and not np.isfinite(got.output).any()
    return matching(way.form, variant, given, got)


def stated_polarity(subject: Subject, parameter: str) -> str | None:
    """Whether a mask's name or the documentation says that True attends or hides; None where neither says."""
    name = parameter.lower()
    if name == "key_padding_mask" or re.search(r"hid|ignor|block|exclud", name):
        return "hide"
    if re.search(r"attend|allow|valid|keep|visib", name):
        return "attend"
    words = " ".join(subject.documentation().lower().split())
    said = set()
    for clause in re.findall(r"\b(?:true|1|1s|ones|nonzero)\b[^.;,]{0,60}", words):
        if re.search(r"\bnot\b|hid|ignor|mask(ed|s)? (out|away)|exclud|block|pad|cannot", clause):
            said.add("hide")
        elif re.search(r"attend|keep|kept|allow|visib|valid|real|take part|see", clause):
            said.add("attend")
    return said.pop() if len(said) == 1 else None
