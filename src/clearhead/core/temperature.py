"""Temperature: the scale that it stands for, 1/(τ√D)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError, shown


def tempered(temperature: Any, scale: Any, features: int) -> Any:
    """The scale divided by a temperature; scale is 1/√features unless given.

    >>> tempered(2.0, None, 16), tempered(0.5, 0.1, 16)
    (0.125, 0.2)

    A number that is not known yet, as under `jax.jit`, is divided by as it is.
    """
    if isinstance(temperature, bool | str) or temperature is None:
        raise ArgumentError("temperature", f"is {temperature!r}, expected a finite number above 0")
    if isinstance(temperature, int | float | np.integer | np.floating):
        if not 0 < temperature < math.inf:
            why = "; towards 0 the key with the largest score has all the weight" if temperature == 0 else ""
            raise ArgumentError("temperature", f"is {shown(temperature)}, expected a finite number above 0{why}")
        temperature = float(temperature)
    if scale is None:
        return 1.0 / (temperature * math.sqrt(features)) if features else 1.0
    return scale / temperature
