"""Which layers and heads `watch` was asked for, checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from clearhead.core.arrays import is_torch
from clearhead.core.errors import ArgumentError


def layers_of(given: Any) -> tuple[int | str, ...] | None:
    """Numbers of layers and names of modules, as they were given; None for all.

    >>> layers_of(3), layers_of(["encoder.*", np.int64(1)])
    ((3,), ('encoder.*', 1))
    """
    if given is None:
        return None
    chosen = tuple(_number(one) for one in _several(given))
    for one in chosen:
        if not (isinstance(one, str) or _counts(one)):
            raise ArgumentError("layers", f"has {one!r}, expected numbers from 0, or names of modules")
    if not chosen:
        raise ArgumentError("layers", "is empty, expected at least one number or name")
    return chosen


def heads_of(given: Any) -> tuple[int, ...] | None:
    """Numbers of heads; None for all."""
    if given is None:
        return None
    chosen = tuple(_number(one) for one in _several(given))
    for one in chosen:
        if not _counts(one):
            raise ArgumentError("heads", f"has {one!r}, expected numbers from 0")
    if not chosen:
        raise ArgumentError("heads", "is empty, expected at least one number")
    return chosen


def _several(given: Any) -> Iterable[Any]:
    """What was given, or the things in it."""
    single = isinstance(given, str) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0
    return (given,) if single else given


def _number(one: Any) -> Any:
    """NumPy's and PyTorch's whole numbers as Python's."""
    whole = isinstance(one, np.integer) or (is_torch(one) and one.ndim == 0 and not one.is_complex())
    return one.item() if whole else one


def _counts(one: Any) -> bool:
    return isinstance(one, int) and not isinstance(one, bool) and one >= 0
