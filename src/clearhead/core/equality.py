"""When two values made of fields are equal: a mask is what it says, and its arrays are compared by their numbers.

NumPy's arrays are equal where their numbers are. They may share memory with the caller's, who may write to it; a key
must not change, so a mask that is hashed takes copies of them first and keeps those. Any other array
is equal to itself alone, be it traced, on an accelerator, or one of JAX that `jax.tree.map` has put into a mask: no
comparison waits for a device.
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
    """The hash of an object of a dataclass, the same for equal ones; its arrays become copies that nobody writes to."""
    parts: list[Any] = [type(value)]
    for name in type(value).__dataclass_fields__:
        part = getattr(value, name)
        if isinstance(part, np.ndarray):
            if part.flags.writeable or not part.flags.owndata:
                part = part.copy()
                part.flags.writeable = False
                object.__setattr__(value, name, part)
            part = (part.shape, part.dtype.str, part.tobytes())
        elif is_array(part):
            part = id(part)
        parts.append(part)
    return hash(tuple(parts))


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if is_array(left) or is_array(right):
        if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
            return False
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and bool(left == right)
