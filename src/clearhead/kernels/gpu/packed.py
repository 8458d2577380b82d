"""A recorded call played into one piece of memory: what is looked at later, apart from the output and what is not.

Whoever observes hundreds of calls while a model runs wants their outputs at once, and the rest when all is done. So the
rest of a call is one array of bytes here: one to allocate, to hold and to take to the host; arrays are made of it when
somebody reads them. Beside it goes what tells later whether all numbers were finite: what the kernel noticed of its
rows, where that is enough, or the largest numbers of q, k and v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from clearhead.kernels.gpu import bypass
from clearhead.kernels.gpu.allocate import room
from clearhead.kernels.gpu.largest_kernel import largest
from clearhead.kernels.gpu.launcher import Launcher, hooked
from clearhead.kernels.gpu.replay import Allocation, Placement, Recorder, Replay, bytes_of, padded
from clearhead.kernels.gpu.tuning import cdiv, power_of_2

GIVEN = 4  # q, k, v and sinks: the inputs of a replay
ROWS = 128  # of an array whose largest number one program finds
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Array(NamedTuple):
    """An array in a piece of memory."""

    start: int  # byte
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, whole: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The array, of bytes that begin with its piece's byte `first`."""
        begin = whole.storage_offset() + self.start - first
        empty = torch.empty(0, dtype=self.dtype, device=whole.device)
        return empty.set_(whole.untyped_storage(), begin // self.dtype.itemsize, self.shape, self.strides)


class Packed:
    """The launches of calls of one kind, and where what they give lies."""

    def __init__(
        self, replay: Replay, results: dict[str, Any], lasting: Any, q: Any, k: Any, v: Any, told: int | None = None
    ) -> None:
        """`results` are places of a replay's results by name, the output a room by itself; what lasts is held on to.

        `told` is the room in which something is not 0 where numbers are not finite.
        """
        self.lasting = lasting
        output = results["output"]
        if type(output) is not int:
            raise ValueError("the output is part of something else")
        self.told = told is not None
        self.replays = [replay] if self.told else [replay, norms_of(q, k, v)]
        self.output = replay.rooms[output - GIVEN]
        kept = {name: slot_of(place) for name, place in results.items() if name != "output"}
        # whole numbers of 64 bits last: they may go to the host as 32
        order = sorted(set(kept.values()), key=lambda slot: replay.rooms[slot - GIVEN].dtype == torch.int64)
        self.size = self.scratch = self.whole = self.zeros = 0
        starts: dict[int, int] = {}
        norms = self.replays[-1].rooms[0 if told is None else told - GIVEN]
        self.norms = self._array(norms, GIVEN)
        if told is not None:
            starts[told] = self.norms.start
        for slot in order:
            one = replay.rooms[slot - GIVEN]
            if one.dtype == torch.int64 and not self.whole:
                self.whole = self.size
            starts[slot] = self._array(one, slot).start
        self.whole = self.whole or self.size
        self.arrays = {name: within(place, starts, replay.rooms) for name, place in results.items() if name != "output"}
        self.places = [self._places(replay, starts, output), [(1, self.norms.start)]][: len(self.replays)]
        # what is kept and starts from zero is cleared by itself, and all else that does in one piece
        cleared = [n for n, one in enumerate(replay.rooms) if one.zeros and self.places[0][n][0] == 1]
        self.cleared = [cleared, []][: len(self.replays)]
        # q, k and v come first, and nothing where sinks would be
        wheres = [[(n, 0) for n in range(GIVEN)] + [(GIVEN + piece, first) for piece, first in p] for p in self.places]
        steps = [(step, where) for one, where in zip(self.replays, wheres, strict=True) for step in one.steps]
        self.script = None if any(step.stream is None for step, _ in steps) else bypass.Script(steps)
        self.counts = [programs(a) for a in (q, k, v)]
        self.device = q.device

    def _array(self, one: Allocation, slot: int) -> Array:
        """Room for an array at the end of what is kept."""
        start = self.size
        self.size += padded(one)
        return Array(start, one.shape, one.strides, one.dtype)

    def _places(self, replay: Replay, starts: dict[int, int], output: int) -> list[tuple[int, int]]:
        """For each room of a replay the piece that it lies in and its first byte.

        0 is the output, 1 what is kept, 2 what is not, 3 what is not and starts from zero.
        """
        found = []
        for slot, one in enumerate(replay.rooms, GIVEN):
            if slot == output:
                found.append((0, 0))
            elif slot in starts:
                found.append((1, starts[slot]))
            elif one.zeros:
                found.append((3, self.zeros))
                self.zeros += padded(one)
            else:
                found.append((2, self.scratch))
                self.scratch += padded(one)
        return found

    def play(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The output, and all else as bytes; None where somebody wants to hear of every launch."""
        if hooked():
            return None
        self.replays[0].played = True
        shape, strides, dtype, device, make, zeros = self.output
        output = room(shape, dtype, device, strides) if make is None else make(shape, strides, dtype)
        if zeros:
            output.zero_()
        kept = bytes_of(self.size, device)
        pieces = [output, kept]
        if self.scratch or self.zeros:
            pieces.append(bytes_of(self.scratch, device))
        if self.zeros:
            pieces.append(bytes_of(self.zeros, device).zero_())
        bases = [q.data_ptr(), k.data_ptr(), v.data_ptr(), 0, *[piece.data_ptr() for piece in pieces]]
        if self.script is not None:
            if self.cleared[0]:
                self._tensors(self.replays[0], self.places[0], pieces, self.cleared[0], every=False)
            stream = self.replays[0].stream
            self.script.run(bases, stream() if stream else None)
            return output, kept
        for replay, places, cleared in zip(self.replays, self.places, self.cleared, strict=True):
            tensors = [q, k, v, None, *self._tensors(replay, places, pieces, cleared, every=True)]
            addresses = bases[:GIVEN] + [bases[GIVEN + piece] + first for piece, first in places]
            stream = replay.stream() if replay.stream else None
            for step in replay.steps:
                step.go(tensors, addresses, stream)
        return output, kept

    def _tensors(
        self, replay: Replay, places: Any, pieces: Sequence[torch.Tensor], cleared: list[int], *, every: bool
    ) -> list[Any]:
        """Rooms as tensors: all of them, or those alone that start from zero, which they then do."""
        found: list[Any] = []
        for number, (one, (piece, first)) in enumerate(zip(replay.rooms, places, strict=True)):
            if not every and number not in cleared:
                found.append(None)
                continue
            array = Array(first, one.shape, one.strides, one.dtype)
            found.append(pieces[0] if piece == 0 else array.of(pieces[piece]))
            if one.zeros and piece == 1:
                found[-1].zero_()
        return found

    def finite(self, norms: torch.Tensor, factor: float) -> bool:
        """Were all numbers of a call finite, and its scores, by what is on the host of it: products times `factor`?"""
        if self.told:
            return not norms.any()
        q, k, v = self.largest(norms)
        return q * k * factor < torch.finfo(torch.float32).max and math.isfinite(v)

    def largest(self, norms: torch.Tensor) -> tuple[float, float, float]:
        """The largest numbers of q, k and v without their signs, of those of their blocks, on the host."""
        bits = torch.split(norms, self.counts)
        q, k, v = (float(part.view(torch.float32)[part.argmax()]) if len(part) else 0.0 for part in bits)
        return q, k, v


def slot_of(place: Any) -> int:
    """The room that a result lies in."""
    slot: int = place if type(place) is int else place.slot
    return slot


def within(place: Any, starts: dict[int, int], rooms: Sequence[Allocation]) -> Array:
    """A result, a room or a part of one, in the piece that is kept."""
    if isinstance(place, Placement):
        return Array(starts[place.slot] + place.offset, place.shape, place.strides, place.dtype)
    one = rooms[place - GIVEN]
    return Array(starts[place], one.shape, one.strides, one.dtype)


def programs(tensor: torch.Tensor) -> int:
    """How many programs look for the largest number of a tensor."""
    return cdiv(math.prod(tensor.shape[:-1]), ROWS)


def norms_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Replay:
    """What looks through three tensors of four axes each, recorded: it is run once here."""
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype or not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError("these are not looked through")
    launch = Recorder(Launcher(), (q, k, v, None))
    replay = launch.replay((look_through(q, k, v, launch),), [])
    if replay is None:
        raise ValueError("it cannot be played")
    return replay


def look_through(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: Launcher) -> torch.Tensor:
    """The largest number of each block of rows, as its bits: first those of q, then of k and of v."""
    counts = [programs(tensor) for tensor in (q, k, v)]
    found = launch.room((sum(counts),), torch.int32, q.device)
    launch(
        "largest", largest, (sum(counts),), q, k, v, found, q.stride(), k.stride(), v.stride(),
        tuple(q.shape), tuple(k.shape), tuple(v.shape), counts[0], counts[1],
        ROWS=ROWS, WIDTH=power_of_2(max(q.shape[-1], v.shape[-1])),
    )  # fmt: skip
    return found
