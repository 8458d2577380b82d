"""When two values made of fields are equal: a mask is what it says, and its arrays are compared by their numbers.

NumPy's arrays are equal where their numbers are; they may share memory with the caller's, so a mask that was written to
is another one from then on. An array whose numbers cannot be read at once (traced, or on an accelerator) is equal to
itself alone: no comparison waits for a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.core.arrays import is_array


def same(left: Any, right: Any) -> bool:
    """True for two objects of one dataclass whose fields are equal.

    >>> from clearhead.core.masks import lengths
    >>> same(lengths([3, 1]), lengths([3, 1])), same(lengths([3, 1]), lengths([3, 2]))
    (True, False)
    """
    return all(_same(getattr(left, name), getattr(right, name)) for name in type(left).__dataclass_fields__)


def digest(value: Any) -> int:
    """The hash of an object of a dataclass: equal ones have the same, and one that was written to has another."""
    fields = type(value).__dataclass_fields__
    return hash((type(value), *[_hashable(getattr(value, name)) for name in fields]))


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if is_array(left) or is_array(right):
        if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
            return False
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and bool(left == right)


def _hashable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, value.tobytes())
    return id(value) if is_array(value) else value
