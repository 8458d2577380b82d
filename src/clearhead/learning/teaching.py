"""learn(): the list of exercises, one of them as a task, or a solution that is checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from clearhead.core.errors import ArgumentError, shown
from clearhead.learning import aside, progress
from clearhead.learning.contents import EXERCISES
from clearhead.learning.exercise import Exercise
from clearhead.learning.listing import Assignment, Contents
from clearhead.learning.outcome import Outcome
from clearhead.learning.results import result


@overload
def learn(*, keep: bool = True) -> Contents: ...
@overload
def learn(number: int, /, *, keep: bool = True) -> Assignment: ...
@overload
def learn(number: int, first: Any, /, *others: Any, keep: bool = True) -> Outcome: ...


def learn(number: int | None = None, /, *answer: Any, keep: bool = True) -> Contents | Assignment | Outcome:
    """Exercises that are checked: `learn()` lists them, `learn(3)` shows one, `learn(3, my_function)` checks it.

    >>> import numpy as np, clearhead as ch
    >>> def scaled_scores(q, k):
    ...     return q @ k.T / q.shape[-1]
    >>> print(ch.learn(3, scaled_scores, keep=False))
    Exercise 3, scaled scores: not yet
    <BLANKLINE>
    scale-d: the scores are divided by D, not by √D
      seen  that formula gives every digit of all 7 answers
      why   the root is missing, or the scale is applied twice: attention comes out too flat
      hint  a root is taken, and it is divided by once
      the smallest example found:
        q = [[3, -1]]
        k = [[3, 2]]
        expected [[4.9497]]
        got      [[3.5000]]

    Functions take and give arrays of NumPy, PyTorch or JAX, whichever their code names. Answers that are typed are
    numbers or words, one by one or in a list:

    >>> ch.learn(1, [0.2, 0.1, 0.7], keep=False).right
    False

    The name of a file, "my_solution.py", is run in a process of its own, with a time limit. Progress is kept on this
    machine, in the user's folder for data or the one that `CLEARHEAD_HOME` names, and with keep=False it is not.
    """
    if number is None:
        return Contents(tuple(EXERCISES.values()), progress.read())
    exercise = chosen(number)
    if not answer:
        return Assignment(exercise, exercise.number in progress.read().solved)
    found = _checked(exercise, answer)
    return remembered(found) if keep else found


def chosen(number: Any) -> Exercise:
    """The exercise of this number."""
    if isinstance(number, bool) or not isinstance(number, int) or number not in EXERCISES:
        raise ArgumentError("number", f"is {shown(number)}, expected one of the exercises 1 to {max(EXERCISES)}")
    return EXERCISES[number]


def remembered(found: Outcome) -> Outcome:
    """The outcome, noted in the file of progress; what there is to tell about that is told with it."""
    words = progress.note(found.number, found.right)
    return replace(found, note=words) if words else found


def _checked(exercise: Exercise, answer: tuple[Any, ...]) -> Outcome:
    if exercise.typed:
        return result(exercise, answer)
    if len(answer) == 1 and isinstance(answer[0], str | Path):
        return aside.examined(exercise, Path(answer[0]))
    given = tuple(one for part in answer for one in (part if isinstance(part, list | tuple) else (part,)))
    wanted = [function.signature for function in exercise.functions]
    if len(given) != len(wanted) or not all(map(callable, given)):
        kinds = ", ".join(type(one).__name__ for one in given) or "nothing"
        raise ArgumentError("answer", f"is {kinds}, expected {' and '.join(wanted)}, or the name of a file with it")
    return result(exercise, given)
