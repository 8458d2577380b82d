"""Masks as parts of keys under which calls are remembered, with the numbers in their arrays."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.core.arrays import Array
from clearhead.core.mask import Mask, Where
from clearhead.core.mask_keys import mask_key

# bytes of an array up to which it is compared with one that was seen before, and how many of its numbers are its hash
LARGE, SAMPLES = 2**17, 64
NO_MASK = ()


class Numbers:
    """An array of a mask as part of a key: equal to one of the same numbers. Some of them are its hash."""

    __slots__ = ("array", "hash")

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        some = array.reshape(-1)[:: max(1, array.size // SAMPLES)]
        self.hash = hash((array.shape, array.dtype.char, some.tobytes()))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Numbers)
            and self.array.dtype == other.array.dtype
            and np.array_equal(self.array, other.array)
        )

    def __hash__(self) -> int:
        return self.hash


def as_none(array: Array, owner: Mask) -> None:
    """No part of a key: an array may be written to, and nobody would know."""


def as_numbers(array: Array, owner: Mask) -> Numbers | None:
    """An array as it is now, where it is NumPy's and not large: to compare it takes less than to prepare it."""
    few = isinstance(array, np.ndarray) and array.dtype.kind in "biu" and array.nbytes <= LARGE
    return Numbers(array) if few else None


class Lying:
    """An array of pairs as part of a key: equal to itself alone, while it is alive and lies as it did.

    Its numbers are no part of it: a native call reads them where they lie, each time.
    """

    __slots__ = ("array", "place", "said")

    def __init__(self, array: np.ndarray) -> None:
        self.array = weakref.ref(array)
        self.place = int(array.ctypes.data)
        self.said = (id(array), self.place, array.shape, array.strides, array.dtype.char)

    def __eq__(self, other: object) -> bool:
        alive = self.array()
        return isinstance(other, Lying) and alive is not None and alive is other.array() and self.said == other.said

    def __hash__(self) -> int:
        return hash(self.said)


def as_lying(array: Array, owner: Mask) -> Numbers | Lying | None:
    """An array as it is now, or where it is one of pairs, as it lies."""
    if type(owner) is Where and isinstance(array, np.ndarray):
        return Lying(array)
    return as_numbers(array, owner)


def as_copy(array: Array, owner: Mask) -> Numbers | None:
    """The numbers of one, to be kept: who writes to the array does not write to the key."""
    return to_keep(as_numbers(array, owner))


def to_keep(key: Any) -> Any:
    """A key with copies of the arrays in it: who writes to those does not write to the key."""
    if type(key) is tuple:
        return tuple(map(to_keep, key))
    return Numbers(key.array.copy()) if type(key) is Numbers else key


def part_of(mask: Any, scale: Any, of_array: Callable[[Array, Mask], Any] = as_none) -> Any:
    """What the key has of a call's mask: its class and fields; None where mask or scale are more than a key can say."""
    if not (scale is None or type(scale) is float):
        return None
    if mask is None:
        return NO_MASK
    return mask_key(mask, of_array) if isinstance(mask, Mask) else None


def numbers_in(key: Any) -> list[Numbers]:
    """The arrays in a key that are compared by their numbers."""
    return [one for one in parts_of(key) if type(one) is Numbers]


def places_in(key: Any) -> set[int]:
    """Where the others lie."""
    return {one.place for one in parts_of(key) if type(one) is Lying}


def parts_of(key: Any) -> list[Any]:
    """What a key is made of, and what its parts are made of."""
    return [one for part in key for one in parts_of(part)] if type(key) is tuple else [key]
