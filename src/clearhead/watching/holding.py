"""How what was seen is held: where the model is, or on the host, to which it leaves a GPU while the model runs on."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from clearhead.core.arrays import made
from clearhead.core.observations import Observed
from clearhead.watching.again import Pending
from clearhead.watching.call import Call
from clearhead.watching.given import Given
from clearhead.watching.leaving import Leaving, on_its_way


class Holding:
    """The arrays of one watch."""

    def __init__(self, *, on_device: bool) -> None:
        self.on_device = on_device
        self.leaving = Leaving()
        self.lock = threading.Lock()
        self.last_masks: dict[str, tuple[Any, Any, Any]] = {}

    def observed(self, observed: Observed, *, output: bool) -> Observed:
        """What was observed of a call, as it is to be held; without its output unless that is wanted."""
        if not output:
            none = observed.output.new_empty((*observed.output.shape[:-1], 0))
            observed = made(Observed, **{**vars(observed), "output": none})
        if self.on_device or observed.lse.is_cpu:
            return observed
        if observed.lse.is_cuda:
            return on_its_way(self.leaving, observed)
        return observed.each(lambda array: array.cpu())

    def pending(self, pending: Pending) -> None:
        """What was kept of a played call leaves; where all stays, what tells whether its numbers were finite."""
        if self.on_device:
            norms = pending.kind.packed.norms.of(pending.arrays)
            self.leaving.send([norms], pending.doubts)
        else:
            self.leaving.send_played(pending)

    def kept(self, given: Given) -> Given:
        """A copy of a call; layers that share a mask, boolean or float, share its copy."""
        mine = given.copied()
        mask, bias = self._shared("mask", given.mask, mine.mask), self._shared("bias", given.bias, mine.bias)
        return replace(mine, mask=mask, bias=bias, sinks=self._now(mine.sinks))

    def rest(self, call: Call) -> None:
        """What else a call has: it is exchanged in it when it leaves."""
        owners: list[tuple[Any, str]] = [] if call.distance is None else [(call, "distance")]
        owners += [] if call.kept is None else [(call.kept, name) for name in ("q", "k", "v")]
        for owner, name in [] if self.on_device else owners:
            array = getattr(owner, name)
            if array.is_cuda:
                self.leaving.send([array], partial(_put, owner, name))
            else:
                vars(owner)[name] = array.cpu()

    def settle(self) -> None:
        """Nothing more is to come."""
        self.last_masks = {}
        self.leaving.leave()

    def _now(self, array: Tensor | None) -> Tensor | None:
        """An array as it is to be held, at once."""
        if array is None or self.on_device:
            return array
        return self.leaving.at_once(array) if array.is_cuda else array.cpu()

    def _shared(self, name: str, theirs: Tensor | None, copy: Tensor | None) -> Tensor | None:
        who = _identity(theirs)
        if who is None:
            return self._now(copy)
        with self.lock:
            last = self.last_masks.get(name)
            if last is not None and last[0] == who:
                return last[2]
            copy = self._now(copy)
            self.last_masks[name] = (who, theirs, copy)  # held on to, so that no other mask comes to lie there
        return copy


def _put(owner: Any, name: str, found: list[Tensor]) -> None:
    """A field of a value becomes what left."""
    owner.__dict__[name] = found[0]


def _identity(mask: Tensor | None) -> tuple[Any, ...] | None:
    """Where a mask lies and how often it was written to; None where PyTorch does not count that."""
    if mask is None or mask.is_inference():
        return None
    return mask.data_ptr(), mask.shape, mask.stride(), mask._version
