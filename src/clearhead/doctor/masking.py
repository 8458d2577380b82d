"""Finding out how a function takes its mask, and how it applies it, by trying."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from clearhead.doctor.answers import Failed, Got
from clearhead.doctor.finding import Attempt, Found
from clearhead.doctor.masks import ENCODINGS, LENGTHS, SHAPES, MaskWay
from clearhead.doctor.matching import EPS, explains, matching
from clearhead.doctor.probes import Probe, agrees, padded, probe, with_mask
from clearhead.doctor.subject import Subject
from clearhead.doctor.variants import Variant, broken_masks
from clearhead.doctor.ways import Way

# Each mistake is looked for first where a mask says what may be attended to, then where it says what is hidden
POLARITIES = ("attend", "hide", "additive", "lengths")


def find_mask(
    subject: Subject, found: Found, variant: Variant, stated: str | None, *, only: bool = False
) -> tuple[Way, Variant, Probe, Got] | None:
    """How a mask is handed over, and how it is applied; None where no way of handing it over has worked.

    What was stated of it is tried first, and with `only` nothing else.
    """
    unknown = None
    for said, way in itertools.product(dict.fromkeys((stated,) if only else (stated, None)), _sized(found)):
        calls = []
        for attempt in _calls(subject, way, found, said):
            if matching(attempt[0].form, variant, attempt[1], attempt[2], found.align):
                return attempt[0], variant, attempt[1], attempt[2]
            calls.append(attempt)
        told = _explained(calls, variant, found, said) if calls else None
        if told is not None and told[1].masking != "unknown":
            return told
        unknown = unknown or told
    return unknown


def _sized(found: Found) -> Iterator[Way]:
    """The sizes it was found to take, then as many keys as queries: whoever mixes up the two takes only those."""
    yield found.way
    if found.sizes.queries != found.sizes.keys:
        yield replace(found.way, bounds=replace(found.way.bounds, square=True))


def _calls(subject: Subject, base: Way, found: Found, stated: str | None) -> Iterator[Attempt]:
    """Every way of handing a mask over that is answered."""
    plain = probe(base.fit(found.sizes), 1, shared=base.form.shared)
    plain = replace(plain, causal=found.always_causal)
    for mask in itertools.chain(*map(_ways, subject.masks())):
        name = mask.parameter
        if ("pad" in name.lower() and not mask.only_keys) or (stated and mask.polarity == "additive"):
            continue
        given = padded(plain) if mask.only_keys else with_mask(plain, 1, by_batch=mask.by_batch)
        way = replace(base, mask=mask)
        try:
            yield way, given, subject.call(way, given)
        except Failed:
            continue


def _ways(name: str) -> Iterator[MaskWay]:
    if LENGTHS.match(name):
        yield MaskWay(name, "lengths", "B")
        return
    for shape, encoding in itertools.product(SHAPES, ENCODINGS):
        if encoding != "lengths":
            yield MaskWay(name, encoding, shape)


def _explained(
    calls: list[Attempt], variant: Variant, found: Found, stated: str | None
) -> tuple[Way, Variant, Probe, Got]:
    """The mistake that explains one of the answers; "unknown" where none does."""
    polarities = (stated, "lengths") if stated else POLARITIES
    for polarity in polarities:
        for way, given, got in calls:
            if way.mask is None or way.mask.polarity != polarity:
                continue
            lengths = polarity == "lengths"  # which have only one meaning
            for wrong in broken_masks(variant, lengths=lengths):
                if wrong.masking == "nan" and polarity == "additive":
                    continue  # −inf was handed over, and many a thing makes NaN of that
                if wrong.masking == "ignored" or (wrong.masking == "inverted" and not (stated or lengths)):
                    continue
                told = explains(way.form, wrong, given, got, found.align)
                if told is not None:
                    return way, told, given, got
            if way.mask.only_keys and _hides_queries(way, variant, given, got, found.align):
                return way, replace(variant, masking="queries"), given, got
    ignored = replace(variant, masking="ignored")
    if all(matching(way.form, ignored, given, got, found.align) for way, given, got in calls):
        return calls[0][0], ignored, *calls[0][1:]
    return calls[0][0], replace(variant, masking="unknown"), *calls[0][1:]


def _hides_queries(way: Way, variant: Variant, given: Probe, got: Got, align: str) -> bool:
    """True where queries that stand where a key is padded are changed, and the others see every key."""
    plain = way.form.reference(replace(variant, masking="ignored"), given, align)
    if plain is None or given.allowed is None or given.sizes.queries != given.sizes.keys:
        return False
    with np.errstate(all="ignore"):
        allowance = way.form.tolerance(given, plain[1], EPS, variant) + EPS * np.abs(plain[0])
    real = given.allowed[:, 0, 0]  # (B, S), True for keys that are not padding, and here for queries as well
    for row, shown in enumerate(real):
        here = (slice(row, row + 1), slice(None), shown)
        hidden = (slice(row, row + 1), slice(None), ~shown)
        if not agrees(got.output[here], plain[0][here], allowance[here]):
            return False
        if agrees(got.output[hidden], plain[0][hidden], allowance[hidden]):
            return False
    return True
