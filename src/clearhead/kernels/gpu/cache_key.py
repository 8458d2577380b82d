"""Cache keys: calls of one key differ in nothing but the numbers in q, k and v; what is prepared for one serves all."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, is_torch
from clearhead.core.grid import Alignment, Grid
from clearhead.core.lowered import Node
from clearhead.core.mask import Mask
from clearhead.core.mask_keys import mask_key
from clearhead.core.once import once
from clearhead.core.positions import Alibi
from clearhead.core.problem import Problem
from clearhead.kernels.gpu import tuning

SMALL = 4096  # bytes of an array that are compared as a part of the key
MOST = 128  # keys that are remembered
LARGE = 2**20  # bytes of truth values that are not kept for being compared


class Unlike(Exception):
    """Raised for what may differ without a sign: arrays on a device, or of a class that is not known here."""


class Identity:
    """Who holds an array: equal to itself alone, where masks are equal by their numbers; it keeps nobody alive."""

    __slots__ = ("hash", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner, self.hash = weakref.ref(owner), id(owner)

    def __eq__(self, other: object) -> bool:
        owner = self.owner()
        return owner is not None and isinstance(other, Identity) and other.owner() is owner

    def __hash__(self) -> int:
        return self.hash


class CacheKey:
    """What prepared things depend on: a key, and the arrays of masks that are too large to be a part of it.

    A mask with large arrays is in the key by its identity, and known by a weak reference alone. Its arrays may share
    memory with the caller's, who may write to it: they are compared with copies of what they were.
    """

    def __init__(self, problem: Problem) -> None:
        self.owners: list[weakref.ref[Mask]] = []
        self.arrays: list[np.ndarray] = []
        self.numbers_alone = True  # the mask has no arrays
        self.seen: list[np.ndarray] | None = None  # copies that they were found to be like
        q, k, v, sinks = problem.q, problem.k, problem.v, problem.sinks
        if problem.dropout is not None or not (sinks is None or is_torch(sinks)):
            raise Unlike
        # all but shapes and strides
        self.rest = (
            q.dtype, q.device, q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16,
            problem.scale, problem.softcap, None if sinks is None else (sinks.dtype, sinks.data_ptr() % 16),
            None if problem.mask is None else self.of_mask(problem.mask),
            None if problem.bias is None else self.of_bias(problem.bias),
            tuple(tuning.FIXED.items()), tuning.written,
        )  # fmt: skip
        self.key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), self.rest)

    def family(self, problem: Problem) -> Any:
        """A key of all problems that differ from this one only in how many positions they have, for `Call.resized`.

        Such problems are prepared alike: their tensors are taken as they are or not, and can be fetched by the copy
        engine or not, as a stride or a size of 1 decides that. None where a mask or bias has more to it than numbers.
        """
        if problem.bias is not None or not self.numbers_alone or not is_span(problem.lowered, problem.grid):
            return None
        shapes, strides = self.key[:3], self.key[3:6]
        return (
            *[(shape[:-2], shape[-1], min(shape[-2], 2)) for shape in shapes],
            *[step % 16 if step else None for steps in strides for step in steps],
            *[steps[-1] for steps in strides],
            self.rest,
        )

    @once
    def copies(self) -> list[np.ndarray]:
        """The arrays as they are now, copied once for all that is kept."""
        return [array.copy() for array in self.arrays]

    def unchanged(self, copies: list[np.ndarray]) -> bool:
        """True where the arrays still are what they were; looked at once by all who choose for one call."""
        if self.arrays and self.seen is not copies:
            if not all(map(np.array_equal, self.arrays, copies)):
                return False
            self.seen = copies
        return True

    def looks_again(self) -> None:
        """Who has arrays may write to them from now on."""
        self.seen = None

    def of_mask(self, mask: Mask) -> Any:
        """A mask's part of the key: its class and its fields, which say it all."""
        key = mask_key(mask, self.of_array)
        if key is None:  # there is more to it
            raise Unlike
        return key

    def of_bias(self, bias: Any) -> Any:
        """A bias's part of the key."""
        if not isinstance(bias, Alibi):
            raise Unlike
        return (Alibi, self.of_array(bias.slopes, bias), self.of_alignment(bias.alignment, bias))

    def of_alignment(self, alignment: Alignment, owner: Any) -> Any:
        """An alignment's part of the key."""
        return alignment.align if alignment.given is None else self.of_array(alignment.given, owner)

    def of_array(self, array: Array, owner: Any) -> Any:
        """An array's part of the key: its numbers, or where they are many, who holds it."""
        if not isinstance(array, np.ndarray):
            raise Unlike
        if array.ndim > 1 and array.dtype == bool and array.nbytes > LARGE:  # one for each pair, most likely
            raise Unlike
        self.numbers_alone = False
        if array.nbytes <= SMALL:
            return (array.shape, array.dtype.char, array.tobytes())
        self.owners.append(weakref.ref(owner))
        self.arrays.append(array)
        return Identity(owner)


def cache_key_of(problem: Problem) -> CacheKey | None:
    """The cache key of a problem, found once for all who ask; None where it has none."""
    if "cache key" not in problem.found:
        try:
            problem.found["cache key"] = CacheKey(problem)
        except Unlike:
            problem.found["cache key"] = None
    key: CacheKey | None = problem.found["cache key"]
    return key


def is_span(root: Node | None, grid: Grid) -> bool:
    """True for a mask that says with a few numbers how far a query sees from its place."""
    if root is None:
        return True
    span = root.span(grid.keys)
    return span is not None and all(isinstance(limit, int) for limit in span)


class LeastRecentlyUsed(OrderedDict[Any, Any]):
    """A table of what was asked for last: the rest makes way, so that what comes once does not drive out the usual."""

    def asked(self, key: Any) -> Any:
        """What is known by this key, from now on the last to go; None where there is nothing."""
        found = self.get(key)
        if found is not None:
            try:  # noqa: SIM105  # suppress() takes as long as all else here
                self.move_to_end(key)
            except KeyError:  # another thread has let it go
                pass
        return found

    def keep(self, key: Any, thing: Any) -> Any:
        """Take something in; gives the key that made way for it, or None."""
        self[key] = thing
        self.move_to_end(key)
        return self.popitem(last=False)[0] if len(self) > MOST else None


class Cache:
    """Something for each of the last cache keys; forgotten with a mask that it is for, or when that was written to."""

    def __init__(self) -> None:
        self.known = LeastRecentlyUsed()  # (copies of a mask's arrays, something)
        self.owners: dict[Any, list[weakref.ref[Mask]]] = {}  # of those that go with a mask
        self.left: deque[Any] = deque()  # the keys of masks that are gone

    def get(self, key: CacheKey) -> Any:
        """What was kept for calls of this key; None where there is nothing, or arrays of its mask have changed."""
        found = self.known.asked(key.key)
        return None if found is None or not key.unchanged(found[0]) else found[1]

    def keep(self, key: CacheKey, thing: Any) -> None:
        """Keep something for all calls of this key."""
        for _ in range(len(self.left)):
            with suppress(IndexError):  # another thread has taken it
                self.forget(self.left.popleft())
        gone = self.known.keep(key.key, (key.copies, thing))
        self.owners.pop(gone, None)
        if key.owners and key.key not in self.owners:
            leave = partial(self.leave, key.key)
            there = [owner() for owner in key.owners]
            self.owners[key.key] = [weakref.ref(owner, leave) for owner in there if owner is not None]

    def forget(self, key: Any) -> None:
        """Let go of what was kept for calls of a key."""
        self.known.pop(key, None)
        self.owners.pop(key, None)

    def leave(self, key: Any, _: Any) -> None:
        """Take down that a mask of this key is gone: what was kept for it goes when something else is kept."""
        self.left.append(key)
