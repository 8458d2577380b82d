"""One function under examination: calling it, comparing, shrinking what fails, and noting what was found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from clearhead.doctor.conventions import EPS, Found, matching
from clearhead.doctor.forms import Module
from clearhead.doctor.mistakes import CATALOGUE
from clearhead.doctor.probes import Probe, Sizes, probe, small_sizes, tiny
from clearhead.doctor.report import Checked, Example, Finding
from clearhead.doctor.subject import Failed, Got, Subject, Way
from clearhead.doctor.variants import RIGHT, Variant

# Seconds that may go into looking for a smaller example before the one that failed is shown itself
PATIENCE = 5.0


@dataclass(eq=False)
class Exam:
    """What is known of a function so far; every check adds to `checks` and `findings`."""

    subject: Subject
    found: Found
    way: Way
    variant: Variant
    align: str
    checks: list[Checked] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    written: dict[str, Probe] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """True for a module that takes one input for queries, keys and values."""
        return isinstance(self.way.form, Module) and self.way.form.single

    def fit(self, sizes: Sizes) -> Sizes:
        """Sizes that the function was found to take: equal where it wants them equal."""
        known, sizes = self.found.sizes, self.way.form.fit(sizes)
        if known.width == known.features:
            sizes = replace(sizes, width=sizes.features)
        if known.keys == known.queries:
            sizes = replace(sizes, keys=sizes.queries)
        return sizes

    def problem(self, sizes: Sizes, seed: int = 0) -> Probe:
        """A problem of these sizes, cut down to what the function takes."""
        return replace(probe(self.fit(sizes), seed, same=self.alone), causal=self.found.always_causal)

    def call(self, given: Probe, dtype: str = "float32") -> Got:
        """Call the function; what it writes to is remembered."""
        got = self.subject.call(self.way, given, dtype)
        for name in got.written:
            self.written.setdefault(name, given)
        return got

    def agrees(self, given: Probe, got: Got, variant: Variant | None = None, eps: float = EPS) -> bool:
        """True where the answer is that of the variant the function was found to compute."""
        return matching(self.way.form, variant or self.variant, given, got, self.align, eps)

    def passed(self, check: str, words: str) -> None:
        """Note that a check passed."""
        self.checks.append(Checked(check, "passed", words))

    def noted(self, check: str, words: str) -> None:
        """Note something that is legal, but that one should know."""
        self.checks.append(Checked(check, "noted", words))

    def skipped(self, check: str, why: str) -> None:
        """Note that a check could not be made, and why."""
        self.checks.append(Checked(check, "skipped", why))

    def failed(
        self,
        check: str,
        mistake: str,
        words: str,
        prepare: Callable[[Probe], Probe] | None = None,
        given: Probe | None = None,
        dtype: str = "float32",
    ) -> None:
        """Note a mistake, with the smallest example of it that `prepare` gives, or the problem that showed it."""
        self.checks.append(Checked(check, "failed", CATALOGUE[mistake].title))
        if any(finding.name == mistake for finding in self.findings):
            return
        example = self.smallest(prepare, dtype) if prepare is not None else None
        if example is None and given is not None:
            example = self.example(given, dtype, wrong=False)
        self.findings.append(Finding(CATALOGUE[mistake], check, words, example))

    def smallest(self, prepare: Callable[[Probe], Probe], dtype: str) -> Example | None:
        """The first of many tiny problems, in the order of their size, on which the function is wrong."""
        ends = time.perf_counter() + PATIENCE
        seen = set()
        for sizes in small_sizes():
            fitted = self.fit(sizes)
            if fitted in seen:
                continue
            seen.add(fitted)
            for seed in (0, 1):
                if time.perf_counter() > ends:
                    return None
                given = replace(tiny(fitted, seed, same=self.alone), causal=self.found.always_causal)
                try:
                    found = self.example(prepare(given), dtype)
                except (ValueError, IndexError):
                    continue  # too small for what is prepared
                if found is not None:
                    return found
        return None

    def example(self, given: Probe, dtype: str, *, wrong: bool = True) -> Example | None:
        """The problem as an example; None where the function is right on it and `wrong` was asked for."""
        expected = self.way.form.reference(RIGHT, given, self.align)
        if expected is None:
            return None
        got: np.ndarray | str
        try:
            answer = self.subject.call(self.way, given, dtype)
            if wrong and matching(self.way.form, RIGHT, given, answer, self.align, _eps(dtype)):
                return None
            got = _squeezed(answer.output)
        except Failed as failed:
            if not wrong:
                return None
            got = f"raised {failed}"
        names = ("x",) if self.alone else ("q", "k", "v")
        inputs = dict(zip(names, map(_squeezed, self.way.form.give(given)), strict=True))
        if given.allowed is not None and self.way.mask is not None:
            inputs[self.way.mask.parameter] = self.way.mask.build(given.allowed, given.sizes.heads)
        if given.causal and self.way.causal is not None:
            inputs[self.way.causal] = np.asarray(True)
        return Example(inputs, _squeezed(expected[0]), got)


def _eps(dtype: str) -> float:
    return float(np.finfo(dtype).eps)


def _squeezed(array: np.ndarray) -> np.ndarray:
    """Without leading axes of size one, which only make an example longer to read."""
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    return array
