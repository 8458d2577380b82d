"""One function under examination: calling it, comparing, shrinking what fails, and noting what was found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from clearhead.doctor.answers import Failed, Got
from clearhead.doctor.finding import Found
from clearhead.doctor.matching import EPS, matching
from clearhead.doctor.mistakes import CATALOGUE
from clearhead.doctor.probes import Probe, probe, tiny
from clearhead.doctor.report import Checked, Example, Finding
from clearhead.doctor.sizes import Sizes, small_sizes
from clearhead.doctor.subject import Subject
from clearhead.doctor.variants import RIGHT, Variant
from clearhead.doctor.ways import Way

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
        """True for a function that takes one input for queries, keys and values."""
        return self.way.form.shared == "qkv"

    @property
    def shared(self) -> str:
        """Which of q, k and v are one and the same input."""
        return self.way.form.shared

    @property
    def right(self) -> Variant:
        """The formula as it should be, with the positions that the function rotates in."""
        return replace(RIGHT, rotary=self.variant.rotary)

    @property
    def wrong(self) -> bool:
        """True where a mistake was found already, and not only a hazard."""
        return any(not finding.hazard for finding in self.findings)

    def fit(self, sizes: Sizes) -> Sizes:
        """Sizes that the function was found to take; one that is always causal has a key for every query."""
        sizes = self.way.fit(sizes)
        short = self.found.always_causal and sizes.keys < sizes.queries
        return self.way.fit(replace(sizes, keys=sizes.queries)) if short else sizes

    def problem(self, sizes: Sizes, seed: int = 0) -> Probe:
        """A problem of these sizes, cut down to what the function takes."""
        return replace(probe(self.fit(sizes), seed, shared=self.shared), causal=self.found.always_causal)

    def tiny(self, sizes: Sizes, seed: int = 0) -> Probe:
        """A problem of these sizes, in small whole numbers."""
        return replace(tiny(sizes, seed, shared=self.shared), causal=self.found.always_causal)

    def call(self, given: Probe, dtype: str = "float32", *, strided: bool = False) -> Got:
        """Call the function; what it writes to is remembered."""
        got = self.subject.call(self.way, given, dtype, strided=strided)
        for name in got.written:
            self.written.setdefault(name, given)
        return got

    def repeats(self) -> bool:
        """True where the first problem is still answered as it was."""
        given = self.problem(self.found.sizes)
        try:
            return self.agrees(given, self.subject.call(self.found.way, given), self.found.variant)
        except Failed:
            return False

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
        *,
        hazard: bool = False,
    ) -> None:
        """Note a mistake, with the smallest example of it that `prepare` gives, or the problem that showed it.

        A hazard is one that nobody meets who does not ask for it: no key left for a query, float16, float64, a corner.
        """
        if mistake == "unknown" and self.wrong:
            # what follows from a mistake that has a name is no second one
            self.checks.append(Checked(check, "skipped", f"{words}: after the mistake above"))
            return
        self.checks.append(Checked(check, "failed", CATALOGUE[mistake].title))
        if any(finding.name == mistake for finding in self.findings):
            return
        example = self.smallest(prepare, dtype) if prepare is not None else None
        if example is None and given is not None:
            example = self.example(given, dtype, wrong=False)
        self.findings.append(Finding(CATALOGUE[mistake], check, words, example, hazard))

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
                given = self.tiny(fitted, seed)
                try:
                    found = self.example(prepare(given), dtype)
                except (ValueError, IndexError):
                    continue  # too small for what is prepared
                if found is not None:
                    return found
        return None

    def example(self, given: Probe, dtype: str, *, wrong: bool = True) -> Example | None:
        """The problem as an example; None where the function is right on it and `wrong` was asked for."""
        expected = self.way.form.reference(self.right, given, self.align)
        if expected is None:
            return None
        got: np.ndarray | str
        try:
            answer = self.subject.call(self.way, given, dtype)
            if wrong and matching(self.way.form, self.right, given, answer, self.align, _eps(dtype)):
                return None
            got = _squeezed(answer.output)
        except Failed as failed:
            if not wrong:
                return None
            got = f"raised {failed}"
        names = {"qkv": ("x",), "kv": ("x", "memory")}.get(self.shared, ("q", "k", "v"))
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
