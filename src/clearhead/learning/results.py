"""From a solution to its outcome: every function that an exercise asks for is examined, or what was typed is."""

from __future__ import annotations

from typing import Any

from clearhead.learning import typed_answers
from clearhead.learning.contents import EXERCISES
from clearhead.learning.exercise import Exercise
from clearhead.learning.hints import hint_for
from clearhead.learning.judging import Found, examine
from clearhead.learning.outcome import Outcome

# Mistakes of which only the exercise knows what helps
OWN_HINT = ("unknown", "numbers-off", "gives-nan")


def result(exercise: Exercise, answer: tuple[Any, ...]) -> Outcome:
    """What comes of functions, or of what was typed."""
    if exercise.typed:
        return told(exercise, typed_answers.judge(exercise, answer))
    for asked, function in zip(exercise.functions, answer, strict=True):
        found = examine(asked, function)
        if found is not None:
            several = len(exercise.functions) > 1
            return told(exercise, found, f"{asked.name}: " if several else "")
    return told(exercise, None)


def told(exercise: Exercise, found: Found | None, of: str = "") -> Outcome:
    """The outcome of what was found; `of` says in which of several functions."""
    number, title = exercise.number, exercise.title
    if found is None:
        following = EXERCISES.get(number + 1)
        words = "" if following is None else f"Next: exercise {following.number}, {following.title}."
        explained = exercise.explained() if exercise.explained is not None else ""
        return Outcome(number, title, True, explained=explained, following=words)
    mistake = found.mistake
    hint = exercise.hint if mistake.name in OWN_HINT or not mistake.mends else hint_for(mistake)
    seen = f"{of}{found.seen}"
    return Outcome(
        number, title, False, mistake.name, mistake.title, seen, mistake.why, hint, found.example, found.data
    )
