"""Calls of one kind: they differ in nothing but the numbers in q, k and v, and what is prepared for one serves all."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, is_torch
from clearhead.core.grid import Alignment
from clearhead.core.mask import Both, Either, Mask, Not
from clearhead.core.masks import Band, Before, Documents, GlobalTokens, RandomBlocks
from clearhead.core.positions import Alibi
from clearhead.core.problem import Problem
from clearhead.kernels.gpu import tuning

SMALL = 4096  # bytes of an array that are compared as a part of the key
MOST = 128  # kinds that are remembered


class Unlike(Exception):
    """Raised for what may differ without a sign: arrays on a device, or of a class that is not known here."""


class Kind:
    """What prepared things depend on: a key, and the arrays of masks that are too large to be a part of it.

    A mask with large arrays is in the key by its identity, and known by a weak reference alone. Its arrays may share
    memory with the caller's, who may write to it: they are compared with copies of what they were.
    """

    def __init__(self, problem: Problem) -> None:
        self.owners: list[weakref.ref[Mask]] = []
        self.arrays: list[np.ndarray] = []
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
        if problem.bias is not None or not by_place(problem.mask):
            return None
        shapes, strides = self.key[:3], self.key[3:6]
        return (
            *[(shape[:-2], shape[-1], min(shape[-2], 2)) for shape in shapes],
            *[step % 16 if step else None for steps in strides for step in steps],
            *[steps[-1] for steps in strides],
            self.rest,
        )

    def of_mask(self, mask: Mask) -> Any:
        """A mask's part of the key."""
        if isinstance(mask, Band):
            return (Band, mask.back, mask.ahead, self.of_alignment(mask.alignment, mask))
        if isinstance(mask, Before):
            return (Before, self.of_array(mask.count, mask))
        if isinstance(mask, Documents):
            queries = None if mask.queries is None else self.of_array(mask.queries, mask)
            return (Documents, self.of_array(mask.keys, mask), queries)
        if isinstance(mask, GlobalTokens):
            return (GlobalTokens, self.of_array(mask.indices, mask), self.of_alignment(mask.alignment, mask))
        if isinstance(mask, RandomBlocks):
            return (RandomBlocks, mask.block, mask.count, mask.seed)
        if isinstance(mask, Both | Either):
            return (type(mask), self.of_mask(mask.left), self.of_mask(mask.right))
        if isinstance(mask, Not):
            return (Not, self.of_mask(mask.mask))
        raise Unlike

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
        if array.nbytes <= SMALL:
            return (array.shape, array.dtype.char, array.tobytes())
        self.owners.append(weakref.ref(owner))
        self.arrays.append(array)
        return self.owners[-1]


def kind_of(problem: Problem) -> Kind | None:
    """The kind of a problem, found once for all who ask; None where it has none."""
    if "kind" not in problem.found:
        try:
            problem.found["kind"] = Kind(problem)
        except Unlike:
            problem.found["kind"] = None
    kind: Kind | None = problem.found["kind"]
    return kind


def by_place(mask: Mask | None) -> bool:
    """True for a mask that says with numbers alone how far a query sees from its place."""
    if isinstance(mask, Both):
        return by_place(mask.left) and by_place(mask.right)
    return mask is None or (isinstance(mask, Band) and mask.alignment.given is None)


class Latest(OrderedDict[Any, Any]):
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


class Remembered:
    """Something for each of the last kinds; forgotten with a mask that it is for, or when that was written to."""

    def __init__(self) -> None:
        self.known = Latest()  # (copies of a mask's arrays, something)
        self.owners: dict[Any, list[weakref.ref[Mask]]] = {}  # of those that go with a mask

    def get(self, kind: Kind) -> Any:
        """What was kept for calls of this kind; None where there is nothing, or arrays of its mask have changed."""
        found = self.known.asked(kind.key)
        if found is None or (kind.arrays and not all(map(np.array_equal, kind.arrays, found[0]))):
            return None
        return found[1]

    def keep(self, kind: Kind, thing: Any) -> None:
        """Keep something for all calls of this kind."""
        for key, owners in list(self.owners.items()):
            if any(owner() is None for owner in owners):
                self.known.pop(key, None)
                self.owners.pop(key, None)
        gone = self.known.keep(kind.key, ([array.copy() for array in kind.arrays], thing))
        self.owners.pop(gone, None)
        if kind.owners:
            self.owners[kind.key] = kind.owners
