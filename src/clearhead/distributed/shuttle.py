"""Chunks on their way from the host's memory to a GPU: a few places there, filled in turn while others are worked on.

Pinned keys go as they lie, a copy for each head; others by way of pinned memory, which is used again. A place is
written to when what was computed from it is done, so that a GPU holds a few chunks, however far ahead the host is.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# one chunk is worked on, one waits, one is on its way, and the next has a place of its own
PLACES = 4
# bytes that lie in a row, below which a copy of each takes longer than to put them together first
SMALLEST = 64 * 1024


def straight(part: Tensor) -> bool:
    """True where a chunk can go as it lies: pinned, and in stretches that are worth a copy each."""
    if not part.is_pinned():
        return False
    whole = part.shape[-2] * part.shape[-1] * part.element_size()
    return part.is_contiguous() or (part[(0,) * (part.ndim - 2)].is_contiguous() and whole >= SMALLEST)


def copy_heads(there: Tensor, part: Tensor) -> None:
    """Copy a chunk, head by head where it lies apart: PyTorch would put it together first, in memory not pinned."""
    if part.is_contiguous():
        there.copy_(part, non_blocking=True)
        return
    for at in product(*map(range, part.shape[:-2])):
        there[at].copy_(part[at], non_blocking=True)


class Berth:
    """One place: what a chunk is made of there and, where it needs that, in pinned memory here."""

    def __init__(self) -> None:
        self.there: dict[int, Tensor] = {}
        self.here: dict[int, Tensor] = {}
        self.arrived: Any = None  # events: what was sent is there
        self.used: Any = None  # and what was computed from it is done

    def room(self, rooms: dict[int, Tensor], number: int, part: Tensor, **options: Any) -> Tensor:
        """Memory for a chunk of keys or of values; the same again where it fits."""
        import torch  # which a chunk of tensors needs

        if number not in rooms or rooms[number].shape != part.shape or rooms[number].dtype != part.dtype:
            rooms[number] = torch.empty(part.shape, dtype=part.dtype, **options)
        return rooms[number]

    def fill(self, number: int, part: Tensor, device: Any) -> Tensor:
        """A chunk under way."""
        there = self.room(self.there, number, part, device=device)
        if not straight(part):
            if self.arrived is not None:
                self.arrived.synchronize()  # what lay here before is gone
            part = self.room(self.here, number, part, pin_memory=True).copy_(part)
        copy_heads(there, part)
        return there


class Shuttle:
    """The way to one GPU, on a stream of its own."""

    def __init__(self, device: Any) -> None:
        import torch

        self.cuda: Any = torch.cuda
        self.device, self.stream = device, self.cuda.Stream(device)
        self.berths, self.count = [Berth() for _ in range(PLACES)], 0

    def bring(self, pair: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Keys and values under way, and their place."""
        berth = self.berths[self.count % PLACES]
        self.count += 1
        with self.cuda.stream(self.stream):
            if berth.used is not None:
                self.stream.wait_event(berth.used)
            there = [berth.fill(number, part, self.device) for number, part in enumerate(pair)]
            arrived = self.cuda.Event()
            arrived.record(self.stream)
            berth.arrived = arrived
        return (*there, berth)

    def take(self, berth: Berth) -> None:
        """Work on a chunk begins when it is there."""
        stream = self.cuda.current_stream(self.device)
        stream.wait_event(berth.arrived)
        for tensor in berth.there.values():
            tensor.record_stream(stream)

    def leave(self, berth: Berth) -> None:
        """Whatever is to be computed from a chunk was asked for."""
        used = self.cuda.Event()
        used.record(self.cuda.current_stream(self.device))
        berth.used = used
