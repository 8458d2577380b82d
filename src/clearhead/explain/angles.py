"""A query's dot products as geometry: q · k = |q| |k| cos θ, and which of the three makes a score large."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from clearhead.explain.render.page import figure
from clearhead.explain.row import Row
from clearhead.explain.tell import shown_keys


@dataclass(frozen=True, eq=False)
class Angles:
    """The lengths of a query and its keys and the angles between them, in float64; NaN where there is no angle.

    `query` is |q|; `keys` (S,) are |k|, `cosines` (S,) cos θ and `degrees` (S,) θ itself; `dots` (S,) are
    q · k. A vector of length 0 has no angle with any other.
    """

    query: float
    keys: np.ndarray
    cosines: np.ndarray
    dots: np.ndarray
    names: tuple[str, ...]
    shown: tuple[int, ...]

    @property
    def degrees(self) -> np.ndarray:
        """θ, from 0 where they point the same way to 180."""
        return np.degrees(np.arccos(self.cosines))

    def __str__(self) -> str:
        rows = [("", "|q|", "|k|", "cos θ", "q · k", "θ")]
        for j in self.shown:
            there = math.isfinite(self.cosines[j])
            cosine, angle = (figure(self.cosines[j]), f"{self.degrees[j]:.1f}°") if there else ("–", "–")
            rows.append((self.names[j], figure(self.query), figure(self.keys[j]), cosine, figure(self.dots[j]), angle))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        signs = ("   ", " × ", " × ", " = ", "   ")
        lines = ["q · k = |q| |k| cos θ", ""]
        for number, row in enumerate(rows):
            line = row[0].ljust(widths[0])
            for i, sign in enumerate(signs):
                line += (sign if number else "   ") + row[i + 1].rjust(widths[i + 1])
            lines.append(line.rstrip())
        gone = len(self.keys) - len(self.shown)
        return "\n".join([*lines, *([f"and {gone:,} keys more"] if gone else [])])

    __repr__ = __str__


def angles_of(row: Row, names: tuple[str, ...], most: int) -> Angles:
    """The lengths and angles of a row, in O(n) memory; at most so many keys are printed."""
    query, turned = _split(row.q[None])
    keys, others = _split(row.k)
    with np.errstate(invalid="ignore"):
        cosines = np.clip(others @ turned[0], -1.0, 1.0)  # rounding may leave the ends
    return Angles(float(query[0]), keys, cosines, row.dots, names, tuple(shown_keys(row, most)))


def _split(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lengths (n,) and directions (n, D) of vectors; directions are NaN where the length is 0 or not finite.

    >>> lengths, directions = _split(np.array([[3.0, 4.0], [0.0, 0.0]]))
    >>> lengths.tolist(), directions.tolist()
    ([5.0, 0.0], [[0.6, 0.8], [nan, nan]])
    """
    numbers = vectors.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        # a square of 10²⁰⁰ is no number, nor is one of 10⁻²⁰⁰: the largest feature's power of two is taken out first
        power = np.frexp(np.abs(numbers).max(-1, keepdims=True, initial=0.0))[1]
        small = np.ldexp(numbers, -power)
        length = np.sqrt((small**2).sum(-1, keepdims=True))
        return np.ldexp(length, power)[:, 0], small / length
