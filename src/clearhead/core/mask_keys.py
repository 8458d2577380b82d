"""Masks as parts of keys under which calls are remembered: the class of a mask and its fields, which say it all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clearhead.core.arrays import Array
from clearhead.core.grid import Alignment
from clearhead.core.mask import Mask

# what is compared as it is, and how many fields each class of masks has
PLAIN = frozenset((int, str, bool, type(None)))
FIELDS: dict[type, int] = {}


def mask_key(mask: Mask, of_array: Callable[[Array, Mask], Any]) -> tuple[Any, ...] | None:
    """A mask as part of a key, arrays as `of_array(array, who has it)` gives them; None where it is more than fields.

    What `of_array` gives None for is more than a key can say, and so is the mask.

    >>> from clearhead.core.masks import causal, lengths
    >>> mask_key(causal(), lambda array, owner: None)[1:]
    (None, 0, 'end')
    >>> mask_key(causal() & lengths([3, 1]), lambda array, owner: None) is None
    True
    """
    kind = type(mask)
    if kind not in FIELDS:
        fields = getattr(kind, "__dataclass_fields__", None)
        FIELDS[kind] = -1 if fields is None else len(fields)  # what is no dataclass may depend on anything
    parts: list[Any] = [kind]
    for value in vars(mask).values():
        if type(value) in PLAIN:
            parts.append(value)
            continue
        if type(value) is Alignment:
            part = value.align if value.given is None else of_array(value.given, mask)
        elif isinstance(value, Mask):
            part = mask_key(value, of_array)
        else:
            part = of_array(value, mask)
        if part is None:
            return None
        parts.append(part)
    return tuple(parts) if len(parts) == 1 + FIELDS[kind] else None
