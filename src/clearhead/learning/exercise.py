"""What an exercise is: its text, what is asked for, what it is tried on, and the mistakes that have a name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clearhead.doctor.mistake import Mistake

# Arguments of one call, by name and in order: NumPy arrays, whole numbers, or a `Stream`
Case = dict[str, Any]


class Stream:
    """Numbers that are handed over one at a time, and only once."""

    def __init__(self, numbers: Iterable[float]) -> None:
        self.numbers = tuple(map(float, numbers))

    def __iter__(self) -> Iterator[float]:
        return iter(self.numbers)


@dataclass(frozen=True, eq=False)
class Slip:
    """A mistake and the formula of who makes it: it takes what the function takes, and gives what it would give."""

    mistake: Mistake
    formula: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Function:
    """A function that is asked for: how it is called, what it should give, and what it is tried on, smallest first.

    `gives` names what comes back where it is several things. `slips` are tried in order; they may be made when asked
    for. `also` finds what answers alone do not show, such as memory: it is handed the function and its library.
    `within` is how far an answer may be from exact where the exercise says so; `terms` gives the size of what is
    subtracted from one another on the way, where that is more than what is left.
    """

    name: str
    takes: tuple[str, ...]
    right: Callable[..., Any]
    cases: Callable[[], list[Case]]
    slips: Callable[[], Iterable[Slip]]
    gives: tuple[str, ...] = ()
    also: Callable[[Any, str], Any] | None = None
    within: float | None = None
    terms: Callable[..., Any] | None = None
    reshaped: bool = False  # axes of length 1 may be added between
    doctor: bool = False  # it is an attention that `check` can examine, too

    @property
    def signature(self) -> str:
        """How it is called."""
        return f"{self.name}({', '.join(self.takes)})"


@dataclass(frozen=True)
class Blank:
    """Something to be typed: what it is called and what is right; a word, or a number with a relative allowance."""

    name: str
    right: float | str
    within: float | None = None  # of the number itself; without it, as many decimals as were typed


@dataclass(frozen=True, eq=False)
class Guess:
    """A mistake in typed answers, and what somebody who makes it types; None stands for anything."""

    mistake: Mistake
    answers: tuple[float | str | None, ...]


@dataclass(frozen=True, eq=False)
class Exercise:
    """One exercise: functions to write, or blanks to fill in; `lesson` is the page that it belongs to."""

    number: int
    title: str
    lesson: str
    task: str
    hint: str
    functions: tuple[Function, ...] = ()
    blanks: tuple[Blank, ...] = ()
    guesses: tuple[Guess, ...] = ()
    explained: Callable[[], str] | None = None
    notes: dict[str, str] = field(default_factory=dict)  # what each function's docstring in the starting file says

    @property
    def typed(self) -> bool:
        """True where answers are typed and nothing is written."""
        return bool(self.blanks)


def drawn(seed: int, *shapes: tuple[int, ...], whole: bool = False) -> list[np.ndarray]:
    """Arrays of these shapes, the same for the same seed: small whole numbers, or of about 1 and exact in float16."""
    draw = np.random.default_rng([21, seed])
    if whole:
        return [draw.integers(-2, 4, shape).astype(np.float64) for shape in shapes]
    return [draw.standard_normal(shape).astype(np.float16).astype(np.float64) for shape in shapes]


def slips(*pairs: tuple[Mistake, Callable[..., Any]]) -> Callable[[], Iterable[Slip]]:
    """Mistakes and their formulas, as a function has them."""
    made = tuple(Slip(mistake, formula) for mistake, formula in pairs)
    return functools.partial(tuple, made)
