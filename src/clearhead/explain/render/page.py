"""A computation told in steps: the one value that every rendering is made from, and how numbers are written in it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One line of a step: what it is about, the arithmetic, its result, and a note."""

    name: str
    worked: str = ""
    result: str = ""
    note: str = ""
    share: float | None = None  # between 0 and 1, drawn as a bar
    faint: bool = False  # masked: there, but without influence


@dataclass(frozen=True)
class Step:
    """One step: its title, the formula it applies, a line for each key that is shown, and what it comes to."""

    title: str
    formula: str
    latex: str
    lines: tuple[Line, ...] = ()
    says: str = ""


@dataclass(frozen=True)
class Page:
    """A whole computation: title, facts, the formula as text and as LaTeX, and its steps in order."""

    title: str
    facts: tuple[str, ...]
    formula: str
    latex: str
    steps: tuple[Step, ...]


def figure(value: float) -> str:
    """A computed number, with four decimals where that shows it and in powers of ten where it does not.

    >>> figure(0.5), figure(-0.0), figure(1.25e-7), figure(float("-inf"))
    ('0.5000', '0.0000', '1.250e-07', '−∞')
    """
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value and not 5e-5 <= abs(value) < 1e6:
        return f"{value:.3e}"
    return f"{value + 0.0:.4f}"


def given(value: float) -> str:
    """A number of the input, as short as it is.

    >>> given(2.0), given(-0.125), given(1 / 3), given(float("-inf"))
    ('2', '-0.125', '0.3333', '−∞')
    """
    value = float(value)
    return f"{value + 0.0:.4g}" if math.isfinite(value) else figure(value)


def factor(value: float) -> str:
    """A number of the input inside a product: negative ones in brackets.

    >>> factor(-1.5)
    '(-1.5)'
    """
    text = given(value)
    return f"({text})" if text.startswith(("-", "−")) else text


def vector(values: Iterable[float], most: int = 8) -> str:
    """Numbers in brackets, cut short after `most`.

    >>> vector([0.5, 0.25]), vector(range(20), most=3)
    ('[0.5000, 0.2500]', '[0.0000, 1.0000, 2.0000, … 17 more]')
    """
    return _listed([figure(x) for x in values], most)


def given_vector(values: Iterable[float], most: int = 8) -> str:
    """Numbers of the input in brackets, cut short after `most`.

    >>> given_vector([1.0, 0.5])
    '[1, 0.5]'
    """
    return _listed([given(x) for x in values], most)


def summed(terms: list[str], most: int = 6) -> str:
    """Terms with plus signs between, cut short after `most`.

    >>> summed(["1", "2", "3"], most=2)
    '1 + 2 + … 1 more'
    """
    shown = terms if len(terms) <= most else [*terms[:most], f"… {len(terms) - most:,} more"]
    return " + ".join(shown)


def _listed(texts: list[str], most: int) -> str:
    shown = texts if len(texts) <= most else [*texts[:most], f"… {len(texts) - most:,} more"]
    return f"[{', '.join(shown)}]"
