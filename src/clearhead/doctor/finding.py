"""Finding out how a function wants to be called, and which formula it computes, by trying."""

from __future__ import annotations

import importlib
import itertools
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from clearhead.doctor import speech
from clearhead.doctor.answers import Failed, Got, Hung
from clearhead.doctor.declared import USUAL, declared, refused
from clearhead.doctor.forms import LAYOUTS, PACKED, RETURNED, TURNED, Form, Module
from clearhead.doctor.masks import LENGTHS, MaskWay
from clearhead.doctor.matching import differs, explains, matching, measured_scale
from clearhead.doctor.probes import Probe, distance, probe
from clearhead.doctor.projections import given_projections, projections_of
from clearhead.doctor.sizes import DISTINCT, Bounds, Sizes
from clearhead.doctor.subject import Subject
from clearhead.doctor.turning import BASES
from clearhead.doctor.variants import RIGHT, Variant, broken, broken_blocks, broken_causals, rotated
from clearhead.doctor.ways import Way

LOST = 0.03
# Seconds after which no other way of calling is looked for
PATIENCE = 30.0
# Masks that let everything through, for functions that will not be called without one
OPEN = tuple(
    (encoding, shape)
    for shape in ("B1TS", "TS", "BTS", "B11S", "BS", "BHTS", "B1S")
    for encoding in ("attend", "additive", "hide", "attend 1/0", "attend 1.0/0.0")
)

# Words that speak of positions before the batch
POSITIONS_FIRST = re.compile(
    r"\(\s*(?:t|s|l|n|seq\w*|length|time|positions?|tokens?)\s*,\s*(?:b|bs|bsz|batch\w*)\b|(seq|time|length).first",
    re.IGNORECASE,
)

Attempt = tuple[Way, Probe, Got]


@dataclass(frozen=True, eq=False)
class Found:
    """How a function is called and which variant of the formula it computes; None where no variant fits."""

    way: Way
    sizes: Sizes
    variant: Variant | None
    always_causal: bool = False
    align: str = "end"  # of a function that is always causal: which corner it has chosen
    distance: float = 0.0
    lost: bool = False  # the formula is right, but not to the digits that the inputs have
    one_head: bool = False  # right with one head, and with several it is not
    across: bool = False  # it attends across the batch: right, were positions the first axis


class Search:
    """One function that is tried in one way after another, and what all the calls gave."""

    def __init__(self, subject: Subject, layout: str | None, d: int | None) -> None:
        self.subject, self.layout, self.stated = subject, layout, d
        self.said: list[str] = []
        self.attempts: list[Attempt] = []
        self.own = projections_of(subject.owner)
        self.known = declared(subject, d)
        self.ends = time.perf_counter() + PATIENCE

    def run(self) -> Found | None:
        """The first way in which the function is right, or the one that a broken formula explains best."""
        tried: list[str] = []
        for library in self._libraries(tried):
            tried.append(library)
            found = self._in(library)
            if found is not None:
                return found
            if self.attempts:
                told = _explained(self.attempts)
                return None if told is None else self._aligned(told)
        return None

    def _libraries(self, tried: list[str]) -> Iterator[str]:
        yield from speech.libraries(self.subject.library)
        # a function may import its library when it is called, or only use the methods of its arrays
        strange = any(re.search("ndarray|Tensor", words) for words in self.said)
        for name in ("torch", "jax"):
            if name not in tried and (name in sys.modules or (strange and speech.installed(name))):
                importlib.import_module(name)
                yield name

    def _in(self, library: str) -> Found | None:
        """The right way in one library, if there is one; sizes that are not declared come first."""
        bounds = self.known if self.stated else [Bounds(), *self.known]
        for one in bounds:
            before, kept = len(self.attempts), 0
            for mask in self._masks():
                found = self._at(library, one, mask)
                if found is not None:
                    return found
                # of masks that have to be given, the first that was answered stands for all
                kept = kept or len(self.attempts) - before
                del self.attempts[before + kept :]
        if self.attempts:
            # what it was built for says more of it than sizes that it merely takes
            built = [attempt for attempt in self.attempts if attempt[0].bounds.source]
            self.attempts = built + [attempt for attempt in self.attempts if attempt not in built]
            return None
        # where the code names a library, others are tried, but not at all sizes
        other = self.subject.library not in (None, library) or (library == "jax" and self.subject.library is None)
        return None if self.own or other else self._elsewhere(library)

    def _masks(self) -> Iterator[MaskWay | None]:
        yield None
        required = self.subject.required_mask()
        if required is not None and LENGTHS.match(required):
            yield MaskWay(required, "lengths", "B")
        elif required is not None:
            for encoding, shape in OPEN:
                yield MaskWay(required, encoding, shape)

    def _elsewhere(self, library: str) -> Found | None:
        """Where no call has answered: sizes that it spoke of, groups of heads, sizes that hide a missing transpose."""
        groups = [Bounds(groups=number) for number in (2, 4, 3, 8)]
        cubes = [Bounds(features=7, keys=7), Bounds(features=7, even=True, queries=7, keys=7, square=True)]
        spoken = [] if self.stated else [Bounds(features=n, source="the features it takes") for n in refused(self.said)]
        usual = [] if self.stated else [Bounds(features=n, source="the features it takes") for n in USUAL]
        for one in (*spoken, *groups, *cubes, *usual):
            found = self._at(library, one, None)
            if found is not None:
                return found
            if self.attempts or time.perf_counter() > self.ends:
                break
        return None

    def _at(self, library: str, bounds: Bounds, mask: MaskWay | None) -> Found | None:
        wrong: list[Attempt] = []
        for form in self._forms(bounds):
            if self.layout not in (None, form.name) and not isinstance(form, Module):
                continue
            for order in self._orders():
                got, given = self._first(Way(library, form, mask=mask, bounds=bounds, order=order))
                if got is None or given is None:
                    continue
                if matching(form, RIGHT, given, got) and self._free(got.way):
                    return self._judged(Found(got.way, given.sizes, RIGHT), wrong)
                wrong.append((got.way, given, got))
        self.attempts += wrong
        return self._across(wrong) if wrong else None

    def _aligned(self, found: Found) -> Found:
        """With two more keys than queries, off by one and the other corner may be one mask: as many tell them apart."""
        sizes, variant = found.sizes, found.variant
        if variant is None or variant.causal != "strict" or found.align != "end" or sizes.keys - sizes.queries != 2:
            return found
        other = replace(found, variant=replace(variant, causal="ahead"), align="start")
        given = replace(probe(replace(sizes, keys=sizes.queries), shared=found.way.form.shared), causal=True)
        try:
            got = self.subject.call(found.way, given)
        except Failed:
            return found
        told = explains(found.way.form, replace(variant, causal="ahead"), given, got, "start")
        return found if told is None else replace(other, variant=told)

    def _across(self, wrong: list[Attempt]) -> Found | None:
        """Right with positions before the batch: its layout, where its own words say so; else it attends across it."""
        for way, _, _ in wrong:
            form: Form
            if isinstance(way.form, Module) and way.form.batch_first and 0 in way.form.axes:
                form = replace(way.form, batch_first=False)
            elif way.form.name == "BTD":
                form = replace(TURNED, shared=way.form.shared)
            else:
                continue
            got, given = self._first(replace(way, form=form, bounds=replace(way.bounds, square=False, even=False)))
            if got is not None and given is not None and matching(form, RIGHT, given, got):
                said = POSITIONS_FIRST.search(self.subject.source())
                return Found(got.way, given.sizes, RIGHT, across=not said)
        return None

    def _free(self, way: Way) -> bool:
        """True where other features than those of the first problem are right too, or none are declared."""
        if not self.known or way.bounds.features or isinstance(way.form, Module):
            return True
        other = replace(way, bounds=replace(way.bounds, features=6))
        given = probe(other.fit(DISTINCT), shared=way.form.shared)
        try:
            return matching(way.form, RIGHT, given, self.subject.call(other, given))
        except Failed:
            return False

    def _judged(self, found: Found, before: list[Attempt]) -> Found:
        """A right answer, unless more axes or more heads were answered wrongly before."""
        form = found.way.form
        if isinstance(form, Module) and 0 not in form.axes:
            across = self._across(before)
            if across is not None:
                return across
        # one that runs with more axes and is wrong there, in a way that has a name, is meant to be right there
        wrong = _named_mistake([attempt for attempt in before if len(attempt[0].form.axes) > len(form.axes)])
        if wrong is not None:
            return wrong
        if self.subject.heads() is not None and 1 not in form.axes:
            packed = _explained([attempt for attempt in before if attempt[0].form.packed])
            if packed is not None and packed.variant is not None and packed.variant.mistakes:
                return packed
            return replace(found, one_head=True)
        return found

    def _forms(self, bounds: Bounds) -> tuple[Form, ...]:
        """The forms to try: a module's own projections, packed heads where they can be given, and plain layouts."""
        subject, shared = self.subject, self.subject.inputs.shared
        if subject.inputs.weights:
            draw = np.random.default_rng(3).standard_normal
            own = given_projections(12, 8, "o" in subject.inputs.weights, draw)
            subject.given = {role: matrix for role, (matrix, _) in own.matrices.items()}
            module = Module("module", "", projections=own, shared=shared)
            return module, replace(module, axes=(2, 3))
        if self.own:
            first = bool(getattr(subject.owner, "batch_first", True))
            modules = [Module("module", "", projections=one, shared=shared, batch_first=first) for one in self.own]
            return (*modules, *(replace(module, axes=(2, 3)) for module in modules))
        plain = tuple(replace(form, shared=shared) for form in (*LAYOUTS, *RETURNED))
        packed = subject.heads() is not None or (bounds.heads is not None and bounds.source)
        return (replace(PACKED, shared=shared), *plain) if packed else plain

    def _orders(self) -> tuple[tuple[int, ...] | None, ...]:
        """The usual order of arguments; every other one where their names say nothing."""
        if not self.subject.inputs.guessed:
            return (None,)
        return (None, *list(itertools.permutations(range(3)))[1:])

    def _first(self, way: Way) -> tuple[Got | None, Probe | None]:
        """The first answer in one form, on sizes that ask less and less."""
        tried = set()
        for bounds in way.bounds.ladder():
            one = replace(way, bounds=bounds)
            for sizes in _lengths(one):
                if sizes in tried:
                    continue
                tried.add(sizes)
                given = probe(sizes, shared=way.form.shared)
                try:
                    return self.subject.call(one, given), given
                except Hung:
                    raise
                except Failed as failed:
                    self.said.append(f"{way.library} {way.form.name}: {failed}")
        return None, None


def _lengths(way: Way) -> Iterable[Sizes]:
    """The sizes of a way; a module whose keys lack their transpose answers only as many positions as features."""
    yield way.fit(DISTINCT)
    if isinstance(way.form, Module) and way.bounds.square and way.bounds.even:
        length = way.form.own.features
        yield replace(way.fit(DISTINCT), queries=length, keys=length)


def _named_mistake(attempts: list[Attempt]) -> Found | None:
    for way, given, got in attempts:
        for variant in broken(RIGHT, way.form.packed):
            if len(variant.mistakes) == 1 and matching(way.form, variant, given, got):
                if differs(way.form, variant, given):
                    return Found(way, given.sizes, variant)
    return None


def _explained(attempts: list[Attempt]) -> Found | None:
    """Of calls that gave something else than the formula, the one that a broken formula explains best."""
    if not attempts:
        return None
    for align in ("end", "start"):
        for way, given, got in _causal(attempts, align):
            if matching(way.form, RIGHT, given, got, align):
                return Found(way, given.sizes, RIGHT, always_causal=True, align=align)
    return (
        _rotary(attempts)
        or _broken_causal(attempts)
        or _broken(attempts)
        or _scaled(attempts)
        or _broken_rotary(attempts)
        or _unknown(attempts)
    )


def _rotary(attempts: list[Attempt]) -> Found | None:
    """A module that is right with its queries and keys rotated by their positions."""
    for way, given, got in attempts:
        for variant in rotated(RIGHT) if isinstance(way.form, Module) else ():
            for causal in (False, True):
                if matching(way.form, variant, replace(given, causal=causal), got):
                    return Found(way, given.sizes, variant, always_causal=causal)
    return None


def _broken_rotary(attempts: list[Attempt]) -> Found | None:
    """A module with rotary positions and one mistake beside them."""
    for way, given, got in attempts:
        for base in rotated(RIGHT, BASES[:1]) if isinstance(way.form, Module) else ():
            for causal in (False, True):
                asked = replace(given, causal=causal)
                for variant in itertools.chain(broken(base, True, True), broken_causals(base) if causal else ()):
                    if len(variant.mistakes) == 1 and matching(way.form, variant, asked, got):
                        return Found(way, given.sizes, variant, always_causal=causal)
    return None


def _causal(attempts: list[Attempt], align: str) -> Iterator[Attempt]:
    """Each attempt as one of a function that is always causal."""
    for way, given, got in attempts:
        if align == "end" or given.sizes.queries != given.sizes.keys:
            yield way, replace(given, causal=True), got


def _broken_causal(attempts: list[Attempt]) -> Found | None:
    for align in ("end", "start"):
        for way, given, got in _causal(attempts, align):
            for variant in broken_causals(RIGHT):
                told = explains(way.form, variant, given, got, align)
                if told is not None:
                    return Found(way, given.sizes, told, always_causal=True, align=align)
    return None


def _broken(attempts: list[Attempt]) -> Found | None:
    contexts = [*((*attempt, "end", False) for attempt in attempts)]
    contexts += [(*attempt, align, True) for align in ("end", "start") for attempt in _causal(attempts, align)]
    for way, given, got, align, causal in contexts:
        variants = broken(RIGHT, way.form.packed, isinstance(way.form, Module))
        for variant in itertools.chain(variants, () if causal else broken_blocks(RIGHT)):
            if matching(way.form, variant, given, got, align) and differs(way.form, variant, given, align):
                return Found(way, given.sizes, variant, always_causal=causal, align=align)
    return None


def _scaled(attempts: list[Attempt]) -> Found | None:
    for align in (None, "end", "start"):
        for way, given, got in attempts if align is None else _causal(attempts, align):
            factor = measured_scale(way.form, given, got, align or "end")
            if factor is not None:
                variant = replace(RIGHT, factor=factor)
                return Found(way, given.sizes, variant, always_causal=given.causal, align=align or "end")
    return None


def _unknown(attempts: list[Attempt]) -> Found:
    far = [(_distance(way.form, given, got), i) for i, (way, given, got) in enumerate(attempts)]
    least, index = min(far)
    way, given, got = attempts[index]
    # numbers that passed through float16 or bfloat16 are off by a few parts in a thousand, and by no more
    lost = least <= LOST and matching(way.form, RIGHT, given, got, eps=2.0**-8)
    return Found(way, given.sizes, RIGHT if lost else None, distance=least, lost=lost)


def _distance(form: Form, given: Probe, got: Got) -> float:
    expected = form.reference(RIGHT, given)
    return math.inf if expected is None else distance(got.output, expected[0])
