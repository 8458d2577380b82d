"""Temperature: the scale that it stands for, 1/(τ√D)."""

from __future__ import annotations

import math
from typing import Any

from clearhead.core.arrays import dtype_name, is_traced
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.problem import default_scale, refuse_gradient


def tempered(temperature: Any, scale: Any, q: Any) -> Any:
    """The scale of a call divided by a temperature; it is 1/√D unless given.

    >>> import numpy as np
    >>> q = np.zeros((5, 16))
    >>> tempered(2.0, None, q), tempered(0.5, 0.1, q)
    (0.125, 0.2)

    A number that is not known yet, as under `jax.jit`, is divided by as it is.
    """
    if not is_traced(temperature):
        temperature = _known(temperature)
    elif dtype_name(temperature) == "bool":
        raise ArgumentError("temperature", "has dtype bool, expected a number above 0")
    if scale is None:
        # what is no array is refused by who checks arrays
        scale = default_scale(q) if len(getattr(q, "shape", ())) else 1.0
    elif not is_traced(scale):
        scale = _finite(scale)
    quotient = scale / temperature
    if isinstance(quotient, float) and not math.isfinite(quotient):
        raise ArgumentError(
            "temperature", f"is {shown(temperature)}, by which the scale {shown(scale)} becomes larger than any number"
        )
    return quotient


def _finite(scale: Any) -> float:
    """A scale as a float of Python, that a temperature divides in float64 whatever it was given in."""
    number = _number("scale", scale)
    if not math.isfinite(number):
        raise ArgumentError("scale", f"is {shown(scale)}, expected a finite number")
    return number


def _known(temperature: Any) -> float:
    number = _number("temperature", temperature)
    if not 0 < number < math.inf:
        why = ": towards 0 the key with the largest score takes all the weight" if number == 0 else ""
        raise ArgumentError("temperature", f"is {shown(temperature)}, expected a finite number above 0{why}")
    return number


def _number(name: str, value: Any) -> float:
    """A value as a float of Python; NaN for what is none, though Python would make one of a bool or a string."""
    refuse_gradient(name, value)
    try:
        return math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
