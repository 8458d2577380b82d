"""The sizes that a function was built for, as far as it says: its attributes, what it closes over, what it refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from clearhead.doctor.roles import FEATURES, HEADS, KEY_HEADS, MODEL, WIDTHS
from clearhead.doctor.sizes import Bounds
from clearhead.doctor.subject import Subject

# Features that people build for, in the order of how often: tried where nothing else is known
USUAL = (64, 32, 16, 8, 4, 128, 12, 24, 48, 2, 3, 5, 6, 7, 10, 20, 40, 80, 96, 256, 512, 768, 1)
# Beyond this a square of a scale is hardly a number of features
MOST = 1024


def declared(subject: Subject, d: int | None = None) -> list[Bounds]:
    """The sizes to probe at, the likeliest first; empty where nothing is declared."""
    if d is not None:
        heads = _of(dict(_numbers(subject)), HEADS)
        return [
            Bounds(features=d, heads=None if heads is None else heads[1], source="d was stated"),
            Bounds(features=d),
        ]
    found = dict(_numbers(subject))
    features, model = _of(found, FEATURES), _of(found, MODEL)
    heads, key_heads, width = _of(found, HEADS), _of(found, KEY_HEADS), _of(found, WIDTHS)
    count = None if heads is None else heads[1]
    groups = heads[1] // key_heads[1] if heads and key_heads and key_heads[1] and not heads[1] % key_heads[1] else None
    choices = []
    if features is not None:
        wide = None if width is None else width[1]
        choices.append(Bounds(features[1], wide, count, groups, source=f"{features[0]} = {features[1]}"))
    if model is not None:
        name, number = model
        if heads is not None and not number % heads[1]:
            source = f"{name} = {number}, {heads[0]} = {heads[1]}"
            choices.append(Bounds(number // heads[1], None, count, groups, source=source))
        choices.append(Bounds(number, source=f"{name} = {number}"))
    if features is None:
        choices += [Bounds(number, source=f"{name} = {value:.5g}") for name, value, number in _squares(subject)]
    if count is not None and not choices:
        choices.append(Bounds(heads=count, groups=groups, source=f"{heads[0] if heads else ''} = {count}"))
    return choices


def refused(said: list[str]) -> list[int]:
    """Sizes that messages of refusal speak of: one of them may be what is taken.

    >>> refused(["ValueError: q has 13 features, expected d_k, 6"])
    [6]
    """
    numbers = [int(number) for words in said for number in re.findall(r"(?<![\w.])(\d{1,4})(?![\w.]|\s*ways)", words)]
    spoken = [
        number for number in dict.fromkeys(numbers) if 0 < number <= MOST and number not in (1, 2, 3, 5, 7, 11, 13)
    ]
    return spoken[:8]


def _of(found: dict[str, int], names: tuple[str, ...]) -> tuple[str, int] | None:
    lowered = {name.lower().lstrip("_"): (name, number) for name, number in reversed(found.items())}
    return next((lowered[name] for name in names if name in lowered), None)


def _values(subject: Subject) -> Iterator[tuple[str, Any]]:
    """What a function was built with: arguments of its class, attributes, defaults, what it closes over, globals."""
    yield from subject.built.items()
    owner = subject.owner
    yield from getattr(owner, "__dict__", {}).items()
    for part in getattr(owner, "_modules", {}).values():
        if type(part).__module__.partition(".")[0] != "torch":
            yield from getattr(part, "__dict__", {}).items()
    yield from (getattr(subject.function, "keywords", None) or {}).items()
    for name, parameter in subject.parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default
    function = getattr(subject.function, "__func__", subject.function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = getattr(function, "__globals__", {})
    yield from ((name, names[name]) for name in code.co_names if name in names)


def _numbers(subject: Subject) -> Iterator[tuple[str, int]]:
    for name, value in _values(subject):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 65536:
            yield name, value


def _squares(subject: Subject) -> Iterator[tuple[str, float, int]]:
    """Scales that are the root of a whole number, or one divided by it: (name, scale, number)."""
    for name, value in _values(subject):
        if not re.search(r"scal|sqrt|temper|root|norm", name.lower()):
            continue
        item = getattr(value, "item", None)
        try:
            number = float(item() if item is not None else value)
        except (TypeError, ValueError, RuntimeError):
            continue
        for square in (number**2, number**-2 if number else 0.0):
            if math.isfinite(square) and 1.5 < square <= MOST and abs(square - round(square)) < 1e-4 * square:
                yield name, number, round(square)
