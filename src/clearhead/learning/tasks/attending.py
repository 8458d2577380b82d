"""The formula with one thing wrong, or two, as the doctor has it: what attention exercises are held against."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from clearhead.doctor.mistake import Mistake
from clearhead.doctor.variants import RIGHT, SETTINGS, Variant, broken, compute
from clearhead.doctor.weighing import RARE_AXES
from clearhead.learning.exercise import Slip


def by_variant(
    formula: Callable[..., np.ndarray | None], variants: Callable[[], Iterable[Variant]] | None = None
) -> Callable[[], Iterable[Slip]]:
    """Every mistake of the catalogue: `formula` takes a variant and what the function takes.
    Those alone come first, then those in pairs.
    """

    def made() -> Iterator[Slip]:
        for variant in (_usual if variants is None else variants)():
            if variant.mistakes:
                yield Slip(both(variant.mistakes), functools.partial(formula, variant))

    return made


def _usual() -> Iterator[Variant]:
    """What the doctor tries, and a scale that is wrong beside any softmax that is."""
    yield from broken(RIGHT, False)
    for scale, axis in itertools.product(SETTINGS["scale"], RARE_AXES):
        yield Variant(scale=scale, axis=axis)


def both(mistakes: tuple[Mistake, ...]) -> Mistake:
    """Several mistakes told as one, under the name of the first."""
    first, *others = mistakes
    return replace(first, title="; and ".join([first.title, *(other.title for other in others)]))


def attended(variant: Variant, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray | None:
    """One head, (T, D), (S, D) and (S, Dv), by a variant of the formula."""
    found = compute(variant, q[None, None], k[None, None], v[None, None])
    return None if found is None else found[0][0, 0]
