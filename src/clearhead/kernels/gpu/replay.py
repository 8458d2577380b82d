"""What a call launches, recorded for calls of one kind, and replayed for the next ones with other addresses.

Such calls differ in nothing but where their tensors lie. Finding out again which kernels they launch, with which
arguments, takes Python several times as long as launching them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch

from clearhead.core.arrays import made
from clearhead.kernels.gpu import bypass
from clearhead.kernels.gpu.allocate import room, strides_of
from clearhead.kernels.gpu.launcher import Launcher
from clearhead.kernels.gpu.tuning import cdiv

TRIES = 4  # calls that are recorded at most before a kind is given up
MOST = 64  # recordings of one kind
APART = 256  # bytes that arrays start at multiples of, as those of PyTorch's allocator do


class NotReplayable(Exception):
    """Raised for what a recording cannot hold."""


class Placement(NamedTuple):
    """A tensor: which input or room of a call it lies in, how many bytes from its start, and what it looks like."""

    slot: int
    offset: int
    same: bool  # as the input or room itself
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same part of other tensors."""
        base = tensors[self.slot]
        if self.same:
            return base
        storage = base.untyped_storage()
        start = (base.data_ptr() - storage.data_ptr() + self.offset) // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=base.device).set_(storage, start, self.shape, self.strides)


class Recorder(Launcher):
    """A launcher that takes down what it launches, with the tensors that they are for.

    What it holds stays until the recording ends, so that no two tensors have had the same address.
    """

    def __init__(self, launcher: Launcher, inputs: Sequence[torch.Tensor | None]) -> None:
        self.known = launcher.known
        self.tensors: list[Any] = list(inputs)
        self.given = len(self.tensors)
        self.rooms: list[Allocation] = []
        self.launched: list[tuple[Any, ...]] = []

    def __call__(self, name: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch a kernel."""
        super().__call__(name, kernel, grid, *args, **options)
        self.launched.append((self.known.get(name), kernel, grid, args, options))

    def room(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, strides: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """An empty tensor without gaps, its axes in the order of the strides."""
        empty = super().room(shape, dtype, device, strides)
        self.tensors.append(empty)
        shape = tuple(shape)
        make = bypass.QUICK_EMPTY.get(device.type)
        self.rooms.append(Allocation(shape, strides or strides_of(shape), dtype, device, make, zeros=False))
        return empty

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of zeros."""
        zeros = super().zeros(shape, dtype, device)
        self.rooms[-1] = self.rooms[-1]._replace(zeros=True)
        return zeros

    def replay(self, found: Any, lasting: Iterable[torch.Tensor]) -> Replay | None:
        """What was recorded, for a call that gave `found`; None where a call has done more than can be replayed.

        That is so where a tensor is neither an input nor room nor among those that outlive a call, as what PyTorch
        computed in between is.
        """
        there = {tensor.untyped_storage().data_ptr() for tensor in lasting}
        if any(map(written_to, self.tensors[self.given :], self.rooms)):
            return None
        try:
            steps = [self.step(there, *launched) for launched in self.launched]
            results = self.result(found)
        except (NotReplayable, bypass.Unknown):
            return None
        return Replay(self.given, self.rooms, steps, results) if steps else None

    def result(self, found: Any) -> Any:
        """Results with a place in a room for each tensor: the room's number, or where it lies in it."""
        if found is None:
            return None
        if isinstance(found, dict):
            return {name: self.result(part) for name, part in found.items()}
        if isinstance(found, tuple):
            parts = [self.result(part) for part in found]
            return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
        place = self.placement(found) if isinstance(found, torch.Tensor) else None
        if place is None or place.slot < self.given:
            raise NotReplayable
        return place.slot if place.same else place

    def placement(self, tensor: torch.Tensor) -> Placement | None:
        """Where a tensor lies; None where it is none of the inputs and rooms.

        Two inputs may lie in one piece of memory. Then a part of it says not whose it is.
        """
        start, look = tensor.untyped_storage().data_ptr(), seen(tensor)
        near = {n: t for n, t in enumerate(self.tensors) if t is not None and t.untyped_storage().data_ptr() == start}
        same = [n for n, other in near.items() if seen(other) == look]
        if len(same) == 1:
            return Placement(same[0], 0, True, *look[1:])
        if not near:
            return None
        if same or len(near) > 1:
            raise NotReplayable
        [(slot, base)] = near.items()
        return Placement(slot, look[0] - base.data_ptr(), False, *look[1:])

    def step(
        self, lasting: set[int], ready: bypass.Ready | None, kernel: Any, grid: Any, args: Any, options: Any
    ) -> Any:
        """One launch."""
        places: dict[int, Placement] = {}
        # a part of nothing would keep the whole
        args = [arg.new_empty(0) if isinstance(arg, torch.Tensor) and not arg.numel() else arg for arg in args]
        for number, arg in enumerate(args):
            tensor = getattr(arg, "base", arg)
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                place = self.placement(tensor)
                if place is not None:
                    places[number] = place
                elif tensor.untyped_storage().data_ptr() not in lasting:
                    raise NotReplayable
            elif isinstance(arg, tuple):
                for tensor in tensors_of(arg):
                    if self.placement(tensor) is not None or tensor.untyped_storage().data_ptr() not in lasting:
                        raise NotReplayable
        if ready is None:
            return PlainLaunch(kernel, grid, args, options, places)
        return bypass.direct_launch(ready, grid, args, places)


def written_to(tensor: torch.Tensor, room: Allocation) -> bool:
    """True for room that PyTorch has put numbers into, which a replay would not. In inference mode it does not tell."""
    return not tensor.is_inference() and tensor._version != int(room.zeros)


def seen(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """A tensor by all that a kernel sees of it."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in tuples, lists, tables and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value] if value.numel() else []
    if isinstance(value, dict):
        value = value.values()
    elif is_dataclass(value):
        value = vars(value).values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for part in value for tensor in tensors_of(part)]


def filled(results: Any, tensors: Sequence[Any]) -> Any:
    """Results with the tensors of a call in their places."""
    kind = type(results)
    if kind is int:
        return tensors[results]
    if results is None:
        return None
    if kind is Placement:
        return results.of(tensors)
    if kind is dict:
        return {name: tensors[part] if type(part) is int else filled(part, tensors) for name, part in results.items()}
    parts = [filled(part, tensors) for part in results]
    return parts if kind is tuple else kind(*parts)


class Allocation(NamedTuple):
    """Memory that a call takes, and what makes it quickly or None."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    make: Any
    zeros: bool


class Replay:
    """The launches of a call, one after the other."""

    def __init__(self, given: int, rooms: list[Allocation], steps: list[Any], results: Any) -> None:
        """The first `given` slots are inputs, the others rooms."""
        self.given, self.rooms, self.steps, self.results = given, rooms, steps, results
        self.played = False
        self.stream = next((step.stream for step in steps if step.stream), None)
        self.layout = layout_of(self)  # at once, while what was recorded still runs

    def giving(self, results: Any) -> Replay:
        """The same launches for who wants other results of them."""
        return Replay(self.given, self.rooms, self.steps, results)

    def play(self, inputs: Sequence[torch.Tensor | None]) -> Any:
        """The same call with other inputs."""
        self.played = True
        own, cleared, script, results = self.layout
        tensors = [
            room(shape, dtype, device, strides) if make is None else make(shape, strides, dtype)
            for shape, strides, dtype, device, make, _ in own
        ]
        for number in cleared:
            tensors[number].zero_()
        bases = [0 if tensor is None else tensor.data_ptr() for tensor in inputs]
        bases += [tensor.data_ptr() for tensor in tensors]
        stream = self.stream() if self.stream else None
        if script is None:
            for step in self.steps:
                step.go([*inputs, *tensors], bases, stream)
        else:
            script.run(bases, stream)
        return filled(results, tensors)


class Layout(NamedTuple):
    """What a replay allocates, which of it starts from zero, its launches, and results by what is allocated."""

    own: list[Allocation]
    cleared: list[int]
    script: bypass.Script | None
    results: Any


def layout_of(replay: Replay) -> Layout:
    """Rooms that are no results, where launches take addresses, in two pieces of memory: one starts from zero."""
    given, rooms, steps, results = replay.given, replay.rooms, replay.steps, replay.results
    if any(step.stream is None for step in steps):  # which take tensors
        cleared = [number for number, one in enumerate(rooms) if one.zeros]
        return Layout(rooms, cleared, None, moved(results, {given + n: n for n in range(len(rooms))}))
    wanted = slots_of(results)
    own: list[Allocation] = []
    places: dict[int, int] = {}
    for slot, one in enumerate(rooms, given):
        if slot in wanted:
            places[slot] = len(own)
            own.append(one)
    where = [(slot, 0) for slot in range(given)]
    sizes = [0, 0]
    for slot, one in enumerate(rooms, given):
        if slot in wanted:
            where.append((given + places[slot], 0))
        else:
            where.append((given + len(own) + one.zeros, sizes[one.zeros]))
            sizes[one.zeros] += padded(one)
    for zeros, size in enumerate(sizes):
        shape = (size,)
        own.append(Allocation(shape, (1,), torch.uint8, rooms[0].device, rooms[0].make, bool(zeros)))
    script = bypass.Script([(step, where) for step in steps])
    if not sizes[1]:
        own.pop()
    cleared = [number for number, one in enumerate(own) if one.zeros]
    return Layout(own, cleared, script, moved(results, places))


def moved(results: Any, places: dict[int, int]) -> Any:
    """Results by other numbers of the rooms that they lie in."""
    if type(results) is int:
        return places[results]
    if isinstance(results, Placement):
        return results._replace(slot=places[results.slot])
    if isinstance(results, dict):
        return {name: moved(part, places) for name, part in results.items()}
    if isinstance(results, tuple):
        parts = [moved(part, places) for part in results]
        return type(results)(*parts) if hasattr(results, "_fields") else tuple(parts)
    return results


def slots_of(results: Any) -> set[int]:
    """The rooms that results lie in."""
    if type(results) is int:
        return {results}
    if isinstance(results, Placement):
        return {results.slot}
    parts = results.values() if isinstance(results, dict) else results or ()
    return {slot for part in parts for slot in slots_of(part)}


def padded(one: Allocation) -> int:
    """Bytes from the start of a room to that of the next in one piece of memory."""
    return cdiv(math.prod(one.shape) * one.dtype.itemsize, APART) * APART


def bytes_of(size: int, device: Any) -> torch.Tensor:
    """Room for so many bytes."""
    make = bypass.QUICK_EMPTY.get(device.type)
    return room((size,), torch.uint8, device) if make is None else make((size,), (1,), torch.uint8)


class PlainLaunch:
    """A launch the ordinary way, with tensors."""

    stream = None

    def __init__(self, kernel: Any, grid: Any, args: list[Any], options: Any, places: dict[int, Placement]) -> None:
        self.kernel, self.grid, self.options, self.places = kernel, grid, options, places
        self.args = [copied(arg, None) if number in places else arg for number, arg in enumerate(args)]

    def go(self, tensors: Sequence[torch.Tensor], addresses: list[int], stream: Any) -> None:
        """Launch it."""
        args = list(self.args)
        for number, place in self.places.items():
            args[number] = copied(args[number], place.of(tensors))
        self.kernel[self.grid](*args, **self.options)


def copied(arg: Any, tensor: torch.Tensor | None) -> Any:
    """An argument, a tensor or a descriptor of one, for another tensor."""
    if arg is None or isinstance(arg, torch.Tensor):
        return tensor
    return made(type(arg), **{**vars(arg), "base": tensor})
