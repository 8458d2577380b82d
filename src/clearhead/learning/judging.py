"""Is a function what the exercise asks for, and if not, which mistake is it: answers are compared with formulas.

As the doctor does it: a mistake is named only where its formula explains every digit of every answer. How far an answer
may be from exact is derived: as far as the exact one moves when every input is rounded, for as many roundings as the
longest sum has terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.doctor.checking import check
from clearhead.doctor.mistake import Mistake
from clearhead.doctor.mistakes import CATALOGUE
from clearhead.doctor.report import listed, spelled
from clearhead.explain.render.page import figure
from clearhead.learning.calling import Answer, Called, Trouble, called, libraries, misfit
from clearhead.learning.exercise import Case, Function, Stream
from clearhead.learning.troubles import TROUBLES

EPS = float(np.finfo(np.float32).eps)
# As often every input is rounded up or down by chance, to see how far the exact answer moves
ROUNDINGS = 6
# Arrays with more numbers than this are not written out in an example
MOST = 48
# A difference that one sees at a glance
SEEN = 0.01
# What is wrong by less than this, relative to the largest number, is right but for digits that were lost
NEARLY = 1e-3


@dataclass(frozen=True, eq=False)
class Found:
    """A mistake that was found, what was seen of it, and the smallest example, as lines and as data."""

    mistake: Mistake
    seen: str
    example: tuple[str, ...] = ()
    data: dict[str, Any] | None = None


def examine(asked: Function, function: Any) -> Found | None:
    """The mistake in a function; None where it is right."""
    trouble = misfit(function, asked)
    if trouble is not None:
        return Found(TROUBLES[trouble.name], trouble.seen)
    first = None
    for library in libraries(function):
        found = _Trial(asked, function, library).verdict()
        if found is None or found.mistake.name not in ("raises", "wrong-type"):
            return found
        first = first or found
    return first


class _Trial:
    """A function on all cases, in one library."""

    def __init__(self, asked: Function, function: Any, library: str) -> None:
        self.asked, self.function, self.library = asked, function, library
        self.cases = asked.cases()
        self.calls: list[Called] = []
        for case in self.cases:
            self.calls.append(called(function, case, library, asked))
            answer = self.calls[-1].answer
            if isinstance(answer, Trouble) and answer.name in ("took-too-long", "not-written-yet"):
                break
        self.place = self._place()

    def verdict(self) -> Found | None:
        """What is wrong, by its name; None where nothing is."""
        wrong = [i for i in range(len(self.calls)) if not self._fits(self.asked.right, i)]
        if not wrong:
            return self._habits()
        first = self.calls[wrong[0]].answer
        if isinstance(first, Trouble) and first.name in ("took-too-long", "not-written-yet"):
            return self._told(TROUBLES[first.name], first.seen, None)
        slip = self._slip()
        if slip is not None:
            count = len(self.calls)
            return self._told(slip, f"that formula gives every digit of all {count} answers", self._plainest(wrong))
        spoiled = self._written()
        if spoiled is not None:
            return spoiled
        doctored = self._doctored() if self.asked.doctor else None
        if doctored is not None:
            return doctored
        if isinstance(first, Trouble):
            return self._told(TROUBLES[first.name], first.seen, wrong[0])
        return self._unnamed(wrong)

    def _unnamed(self, wrong: list[int]) -> Found:
        right, count = len(self.calls) - len(wrong), len(self.calls)
        expected, got = self._pair(wrong[0])
        for one, other in zip(expected, got, strict=False):
            if not _same_shape(other, one, self.asked):
                words = f"it gave {_shape(other)}, expected {_shape(one)}"
                return self._told(TROUBLES["wrong-shape"], words, wrong[0])
        bad = [i for i in wrong if _spoiled(*self._pair(i))]
        if bad and len(bad) == len(wrong):
            words = f"of {count} problems {right} were right, and {len(bad)} gave NaN or infinity"
            return self._told(TROUBLES["gives-nan"], words, bad[0])
        far = max(_distance(*self._pair(i)) for i in wrong)
        if far < NEARLY:
            words = f"it is off by up to {far:.1e} of the largest number"
            return self._told(TROUBLES["precision-lost"], words, wrong[0])
        others = (call.answer for call in self.calls if isinstance(call.answer, Trouble))
        more = "".join(f"; on another {one.seen}" for one in list(others)[:1])
        words = f"of {count} problems {right} were right{more}"
        return self._told(TROUBLES["unknown"], words, self._plainest(wrong))

    def _plainest(self, wrong: list[int]) -> int:
        """The smallest case in which one sees what is wrong: a difference in the sixth decimal shows little."""
        few = [i for i in wrong if _size(self.cases[i]) <= MOST]
        return next((i for i in few if _far(*self._pair(i))), wrong[0])

    def _slip(self) -> Mistake | None:
        """The first mistake whose formula gives what the function gave, everywhere."""
        if not any(isinstance(call.answer, tuple) for call in self.calls):
            return None
        # the largest case rules out most formulas
        order = sorted(range(len(self.calls)), key=lambda i: -_size(self.cases[i]))
        for slip in self.asked.slips():
            if all(self._fits(slip.formula, i, raising=True) for i in order):
                return slip.mistake
        return None

    def _fits(self, formula: Callable[..., Any], i: int, *, raising: bool = False) -> bool:
        """True where an answer is what the formula gives; one that cannot be computed fits an error, if `raising`."""
        answer = self.calls[i].answer
        expected = _computed(formula, self.cases[i])
        if expected is None or isinstance(answer, Trouble):
            raised = isinstance(answer, Trouble) and answer.name == "raises"
            return raising and raised and expected is None
        got = answer if self.asked.gives else answer[self.place : self.place + 1]
        if len(got) != len(expected) or not all(_roughly(a, b, self.asked) for a, b in zip(got, expected, strict=True)):
            return False
        allowed = _allowances(self.asked, formula, self.cases[i], expected)
        return all(_agrees(a, b, c, self.asked) for a, b, c in zip(got, expected, allowed, strict=True))

    def _place(self) -> int:
        """Which of several things that came back is the answer: the first that has its shape, in the last case."""
        answer = self.calls[-1].answer
        expected = _computed(self.asked.right, self.cases[len(self.calls) - 1])
        if self.asked.gives or isinstance(answer, Trouble) or expected is None:
            return 0
        fitting = (i for i, part in enumerate(answer) if _same_shape(part, expected[0], self.asked))
        return next(fitting, 0)

    def _pair(self, i: int) -> tuple[Answer, Answer]:
        expected, answer = _computed(self.asked.right, self.cases[i]), self.calls[i].answer
        assert expected is not None
        if isinstance(answer, Trouble):
            return expected, ()
        return expected, answer if self.asked.gives else answer[self.place : self.place + 1]

    def _habits(self) -> Found | None:
        """What right answers do not show: inputs that were written to, chance, memory; what else the doctor finds."""
        spoiled = self._written()
        if spoiled is not None:
            return spoiled
        last = len(self.cases) - 1
        again = called(self.function, self.cases[last], self.library, self.asked)
        self.calls[last] = again
        if not self._fits(self.asked.right, last):
            return self._told(CATALOGUE["nondeterministic"], "the same call gave another answer", None)
        if self.asked.also is not None:
            seen: tuple[str, str] | None = self.asked.also(self.function, self.library)
            if seen is not None:
                return Found(TROUBLES[seen[0]], seen[1])
        return self._doctored() if self.asked.doctor else None

    def _written(self) -> Found | None:
        for i, call in enumerate(self.calls):
            if call.written:
                words = f"after the call {' and '.join(call.written)} held other numbers"
                return self._told(CATALOGUE["inputs-written-to"], words, i)
        return None

    def _doctored(self) -> Found | None:
        """What `clearhead check` finds, of what is no mere hazard."""
        try:
            report = check(self.function)
        except ArgumentError:
            return None
        for finding in report.findings:
            if not finding.hazard and finding.name != "unknown":
                example = finding.example
                lines = () if example is None else tuple(example.lines())
                return Found(finding.mistake, finding.words, lines, None if example is None else example.data())
        return None

    def _told(self, mistake: Mistake, seen: str, i: int | None) -> Found:
        if i is None:
            return Found(mistake, seen)
        expected, got = self._pair(i)
        answer = self.calls[i].answer
        words = answer.seen.removeprefix("it ") if isinstance(answer, Trouble) else ""
        return Found(mistake, seen, *_example(self.asked, self.cases[i], expected, got, words))


def _computed(formula: Callable[..., Any], case: Case) -> Answer | None:
    """What a formula gives, as arrays; None where its sizes do not fit."""
    given = [tuple(value) if isinstance(value, Stream) else value for value in case.values()]
    with np.errstate(all="ignore"):
        try:
            result = formula(*given)
        except (ValueError, IndexError, TypeError, ArithmeticError):
            return None
    if result is None:
        return None
    return tuple(np.asarray(part) for part in (result if isinstance(result, tuple) else (result,)))


def _allowances(asked: Function, formula: Callable[..., Any], case: Case, expected: Answer) -> list[float]:
    """How far each array may be off."""
    if asked.within is not None:
        return [asked.within] * len(expected)
    moved = [0.0] * len(expected)
    for seed in range(ROUNDINGS):
        signs = np.random.default_rng([seed, len(case)])
        other = _computed(formula, {name: _rounded(value, signs) for name, value in case.items()})
        for i, (one, two) in enumerate(zip(expected, other or expected, strict=True)):
            if one.dtype.kind == "f" and one.shape == two.shape:
                finite = np.isfinite(one) & np.isfinite(two)
                with np.errstate(all="ignore"):
                    moved[i] = max(moved[i], float(np.abs(one - two)[finite].max(initial=0.0)))
    count = max((max(value.shape, default=1) for value in case.values() if isinstance(value, np.ndarray)), default=1)
    sizes = [
        float(np.abs(one[np.isfinite(one)]).max(initial=0.0)) if one.dtype.kind == "f" else 0.0 for one in expected
    ]
    if asked.terms is not None:
        terms = _computed(asked.terms, case) or expected
        sizes = [max(size, float(np.abs(term).max(initial=0.0))) for size, term in zip(sizes, terms, strict=True)]
    return [(count + 8) * (move + EPS * size) for move, size in zip(moved, sizes, strict=True)]


def _rounded(value: Any, signs: np.random.Generator) -> Any:
    """Every number one rounding up or down."""
    if isinstance(value, Stream):
        return Stream(_rounded(np.array(value.numbers), signs))
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        return value
    return value * (1.0 + EPS * signs.choice([-1.0, 1.0], value.shape))


def _fitted(got: np.ndarray, expected: np.ndarray, asked: Function) -> np.ndarray | None:
    """The answer in the shape that is expected, where only axes of length 1 are too many; None where it has another."""
    if got.shape == expected.shape:
        return got
    loose = asked.reshaped or expected.ndim == 0
    bare = tuple(size for size in got.shape if size != 1)
    if loose and bare == tuple(size for size in expected.shape if size != 1):
        return got.reshape(expected.shape)
    return None


def _same_shape(got: np.ndarray, expected: np.ndarray, asked: Function) -> bool:
    return _fitted(got, expected, asked) is not None


def _roughly(got: np.ndarray, expected: np.ndarray, asked: Function) -> bool:
    """False where a glance tells that one is not the other: most formulas are ruled out so."""
    fitted = _fitted(got, expected, asked)
    if fitted is None:
        return False
    if expected.dtype.kind == "b" or not expected.size:
        return True
    one, two = float(fitted.flat[-1]), float(expected.flat[-1])
    return not np.isfinite(one) or not np.isfinite(two) or abs(one - two) <= 0.05 * (1.0 + abs(two))


def _agrees(got: np.ndarray, expected: np.ndarray, allowed: float, asked: Function) -> bool:
    fitted = _fitted(got, expected, asked)
    assert fitted is not None
    if expected.dtype.kind == "b":
        return bool(np.isin(fitted, (0, 1)).all() and (fitted.astype(bool) == expected).all())
    finite = np.isfinite(expected)
    if (np.isfinite(fitted) != finite).any():
        return False
    apart = np.abs(fitted[finite].astype(np.float64) - expected[finite].astype(np.float64))
    return bool((apart <= allowed).all())


def _spoiled(expected: Answer, got: Answer) -> bool:
    pairs = zip(expected, got, strict=False)
    return any(b.dtype.kind == "f" and (~np.isfinite(b)).any() and np.isfinite(a).all() for a, b in pairs)


def _far(expected: Answer, got: Answer) -> bool:
    """True where two decimals tell the answers apart."""
    pairs = list(zip(expected, got, strict=False))
    if len(got) != len(expected) or any(one.shape != other.shape for one, other in pairs):
        return True
    with np.errstate(all="ignore"):
        return any(not (np.abs(one.astype(float) - other.astype(float)) < SEEN).all() for one, other in pairs)


def _distance(expected: Answer, got: Answer) -> float:
    """The largest difference, relative to the largest number; ∞ where it cannot be said."""
    found = 0.0 if len(expected) == len(got) else np.inf
    for one, other in zip(expected, got, strict=False):
        if one.dtype.kind == "b" or one.size != other.size or not np.isfinite(other).all():
            return np.inf
        size = max(float(np.abs(one).max(initial=0.0)), 1e-300)
        found = max(found, float(np.abs(one.ravel() - other.ravel()).max(initial=0.0)) / size)
    return float(found)


def _size(case: Case) -> int:
    return sum(value.size if isinstance(value, np.ndarray) else 1 for value in case.values())


def _shape(array: np.ndarray) -> str:
    return f"shape {array.shape}" if array.ndim else "one number"


def _example(
    asked: Function, case: Case, expected: Answer, got: Answer, words: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The case as lines and as data: what goes in, what was expected, what came."""
    inputs = {name: np.asarray(tuple(v) if isinstance(v, Stream) else v) for name, v in case.items()}
    at = 0
    for i, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one.size != other.size or not np.allclose(one.ravel(), other.ravel(), 1e-3, 1e-5):
            at = i
            break
    name = f"{asked.gives[at]} " if asked.gives and not words else ""
    wanted, came = expected[at], got[at] if at < len(got) else None
    if came is not None and wanted.dtype.kind == "b" and np.isin(came, (0, 1)).all():
        came = came.astype(bool)
    lines = [f"{name} = {_spelled(array)}" for name, array in inputs.items()]
    lines.append(f"expected {name}{_spelled(wanted, figure)}")
    lines.append(f"got      {name}{words if came is None else _spelled(came, figure)}")
    data = {
        "inputs": {name: listed(array) for name, array in inputs.items()},
        "expected": listed(wanted),
        "got": words if came is None else listed(came),
    }
    return tuple(lines), data


def _spelled(array: np.ndarray, number: Any = None) -> str:
    if array.size > MOST:
        return f"an array of shape {array.shape}"
    if array.dtype.kind == "b":
        array = array.astype(int)
    return spelled(array) if number is None else spelled(array, number)
