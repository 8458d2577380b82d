"""Answers that are typed: numbers as people write them, and words; which of them are right, and which mistake it is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from clearhead.core.arrays import is_array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.doctor.mistake import Mistake
from clearhead.learning.exercise import Blank, Exercise, Guess
from clearhead.learning.judging import Found
from clearhead.learning.troubles import TROUBLES

# Fewer decimals than these are not asked for, and more than these are not held against anybody
LEAST, MOST = 2, 4
UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "%": 0.01}
NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([kKMGBT%]?)$")

SUMS = Mistake(
    "numbers-off",
    "some of the numbers are not right",
    "each of them can be checked by itself",
    "",
)
ROUNDED = Mistake(
    "too-few-decimals",
    "the numbers are right as far as they go",
    "with so few decimals others would be as right",
    "type two decimals or more",
)


def spoken(given: Iterable[object]) -> list[str]:
    """What was typed, as words: lists and arrays are taken apart, and commas separate as blanks do.

    >>> spoken(["0.4,0.24", [1, "no"], "1,024"])
    ['0.4', '0.24', '1', 'no', '1024']
    """
    found: list[str] = []
    for one in given:
        if is_array(one):
            found += spoken(to_numpy(one).ravel().tolist())
        elif isinstance(one, list | tuple):
            found += spoken(one)
        elif isinstance(one, str):
            words = re.sub(r"(?<![\d.])(\d{1,3})((?:,\d{3})+)(?![\d,])", lambda m: m[0].replace(",", ""), one)
            found += [word for word in re.split(r"[\s,;]+", words) if word]
        elif isinstance(one, int | float) and not isinstance(one, bool):
            found.append(repr(one))
        elif isinstance(one, bool):
            found.append("yes" if one else "no")
        else:
            raise ArgumentError("answer", f"has a {type(one).__name__}, expected numbers and words")
    return found


def number(word: str) -> float | None:
    """A number as people write it; None where it is none.

    >>> number("12.3M"), number("1/32"), number("24%"), number("cat")
    (12300000.0, 0.03125, 0.24, None)
    """
    word = word.strip("[]()").replace("−", "-").replace("_", "")
    above, stroke, below = word.partition("/")
    if stroke:
        one, two = number(above), number(below)
        return None if one is None or not two else one / two
    match = NUMBER.match(word)
    return None if match is None else float(match[1]) * UNITS.get(match[2], 1.0)


def judge(exercise: Exercise, given: Iterable[object]) -> Found | None:
    """The mistake in what was typed; None where all of it is right."""
    words = spoken(given)
    wanted = exercise.blanks
    asked = ", ".join(blank.name for blank in wanted)
    if len(words) != len(wanted):
        raise ArgumentError("answer", f"has {len(words)} of {len(wanted)} answers, expected {asked}")
    for word, blank in zip(words, wanted, strict=True):
        if not isinstance(blank.right, str) and number(word) is None:
            raise ArgumentError("answer", f"has {word[:40]!r} for {blank.name}, expected a number")
    right = [_fits(word, blank.right, blank) for word, blank in zip(words, wanted, strict=True)]
    if all(right):
        return None
    off = [blank.name for blank, fits in zip(wanted, right, strict=True) if not fits]
    seen = f"not right: {', '.join(off)}" + (f"; right: the other {sum(right)}" if any(right) else "")
    guess = next((guess for guess in exercise.guesses if _guessed(words, guess, exercise)), None)
    if guess is not None:
        return Found(guess.mistake, seen)
    short = [word for word, fits in zip(words, right, strict=True) if not fits]
    if all(fits or _as_far(word, blank) for word, blank, fits in zip(words, wanted, right, strict=True)):
        return Found(ROUNDED, f"{short[0]} has fewer than {LEAST} decimals")
    return Found(SUMS if any(right) else TROUBLES["unknown"], seen)


def _guessed(words: list[str], guess: Guess, exercise: Exercise) -> bool:
    return all(
        answer is None or _fits(word, answer, blank)
        for word, answer, blank in zip(words, guess.answers, exercise.blanks, strict=True)
    )


def _fits(word: str, right: float | str, blank: Blank) -> bool:
    """True where a word or a number is the right one, as far as it was written out."""
    if isinstance(right, str):
        said = {"y": "yes", "n": "no", "true": "yes", "false": "no"}.get(word.lower(), word.lower())
        return said.strip("\"'.") == right.lower()
    found = number(word)
    if found is None or not math.isfinite(found):
        return False
    if blank.within is not None:
        return abs(found - right) <= blank.within * abs(right)
    # by hand the last digit may be one off
    return abs(found - right) <= 10.0 ** -min(max(_decimals(word), LEAST), MOST) * (1 + 1e-9)


def _decimals(word: str) -> int:
    if "/" in word or "e" in word.lower():
        return MOST
    digits = len(word.rstrip("%").partition(".")[2])
    return digits + 2 if word.endswith("%") else digits


def _as_far(word: str, blank: Blank) -> bool:
    """True where a number with few decimals is the right one, rounded to as many."""
    found, places = number(word), _decimals(word)
    if isinstance(blank.right, str) or blank.within is not None or found is None or places >= LEAST:
        return False
    return abs(found - round(blank.right, places)) < 1e-9
