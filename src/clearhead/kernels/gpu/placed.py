"""A recorded call played where others have put its arrays: inputs and results at addresses, in turn on their stream.

XLA's programs say where they want results. A recording knows its arrays by number, so what it gives is written there
at once; only what has another type there is copied. The rest of its room is taken anew by each call, on that stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from clearhead.kernels.gpu import bypass
from clearhead.kernels.gpu.allocate import strides_of
from clearhead.kernels.gpu.at_address import NAMES, tensor_at
from clearhead.kernels.gpu.launcher import hooked
from clearhead.kernels.gpu.packed import Array
from clearhead.kernels.gpu.replay import Placement, Replay, bytes_of, padded
from clearhead.kernels.xla.lending import Place

ALIGNED = 16  # bytes that kernels were compiled for arrays to start at multiples of


class Placed:
    """The launches of calls of one kind, with what they read and what they give at addresses that each call names."""

    def __init__(
        self, replay: Replay, lasting: Any, inputs: Sequence[int | None], found: Sequence[Any], results: Sequence[Place]
    ) -> None:
        """`inputs` are those of the recording, by number of what is given; `found` the places of its results."""
        self.replay, self.lasting, self.inputs = replay, lasting, inputs
        first = len(inputs)
        where = [(slot, 0) for slot in range(first + len(replay.rooms))]
        plain = any(step.stream is None for step in replay.steps)  # which take tensors
        self.script = None if plain else bypass.Script([(step, where) for step in replay.steps])
        # the result that each room of the recording is, or −1 and where it begins in what is taken for the call
        self.places: list[tuple[int, int]] = [(-1, 0)] * len(replay.rooms)
        self.copied: list[tuple[int, Any]] = []
        for number, (place, result) in enumerate(zip(found, results, strict=True)):
            if (
                type(place) is int
                and self.places[place - first][0] < 0
                and self._is(replay.rooms[place - first], result)
            ):
                self.places[place - first] = (number, 0)
            else:
                self.copied.append((number, place))
        # what starts from zero comes first: it is cleared in one piece
        self.cleared = self.size = 0
        inner = [n for n, (number, _) in enumerate(self.places) if number < 0]
        for n in sorted(inner, key=lambda n: not replay.rooms[n].zeros):
            one = replay.rooms[n]
            self.places[n] = (-1, self.size)
            self.size += padded(one)
            self.cleared = self.size if one.zeros else self.cleared
        places = zip(self.places, replay.rooms, strict=True)
        self.cleared_results = [number for (number, _), one in places if number >= 0 and one.zeros]

    @staticmethod
    def _is(room: Any, result: Place) -> bool:
        """Whether a room is laid out as a result is."""
        _, number, shape = result
        lies = room.dtype == getattr(torch, NAMES[number]) and room.strides == strides_of(room.shape)
        return lies and math.prod(room.shape) == math.prod(shape)

    def play(self, stream: int, given: Sequence[Place], results: Sequence[Place]) -> bool:
        """Launch it on the current stream, which is this one; False where it has to be done the long way."""
        if hooked() or any(place[0] % ALIGNED for place in (*given, *results)):
            return False
        device = torch.device("cuda", torch.cuda.current_device()) if stream else torch.device("cpu")
        whole = bytes_of(self.size, device)
        if self.cleared:
            whole[: self.cleared].zero_()
        for number in self.cleared_results:
            tensor_at(results[number], stream).zero_()
        begin = whole.data_ptr()
        addresses = [0 if number is None else given[number][0] for number in self.inputs]
        addresses += [begin + start if number < 0 else results[number][0] for number, start in self.places]
        tensors: list[Any] = []
        if self.script is None:
            tensors = [None if number is None else tensor_at(given[number], stream) for number in self.inputs]
            tensors += [self._room(n, whole, results, stream) for n in range(len(self.places))]
        if self.script is not None:
            self.script.run(addresses, stream)
        else:
            for step in self.replay.steps:
                step.go(tensors, addresses, stream)
        for number, place in self.copied:
            source = self._found(place, whole, results, stream)
            tensor_at(results[number], stream).view(source.shape).copy_(source)
        return True

    def _room(self, n: int, whole: torch.Tensor, results: Sequence[Place], stream: int) -> torch.Tensor:
        """A room of the recording as a tensor."""
        number, start = self.places[n]
        one = self.replay.rooms[n]
        if number >= 0:
            return tensor_at(results[number], stream).view(one.shape)
        return Array(start, one.shape, one.strides, one.dtype).of(whole)

    def _found(self, place: Any, whole: torch.Tensor, results: Sequence[Place], stream: int) -> torch.Tensor:
        """A result of the recording that lies elsewhere than it is wanted."""
        first = len(self.inputs)
        if isinstance(place, Placement):
            room = self._room(place.slot - first, whole, results, stream)
            return place._replace(slot=0).of([room])
        return self._room(place - first, whole, results, stream)
