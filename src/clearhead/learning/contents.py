"""All exercises, by their numbers."""

from __future__ import annotations

from clearhead.learning.exercise import Exercise
from clearhead.learning.tasks import (
    chapter,
    counting,
    first_steps,
    further,
    hiding,
    layers,
    merging,
    places,
    stepping,
    walks,
)

EXERCISES: dict[int, Exercise] = {
    exercise.number: exercise
    for exercise in sorted(
        (
            one
            for module in (first_steps, hiding, layers, places, counting, merging, stepping, further, walks, chapter)
            for one in module.EXERCISES
        ),
        key=lambda exercise: exercise.number,
    )
}
