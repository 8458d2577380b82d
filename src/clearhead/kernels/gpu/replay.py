"""What a call launches, on tape: recorded for calls of one kind, and played for the next ones with other addresses.

Such calls differ in nothing but where their tensors lie. Finding out again which kernels they launch, with which
arguments, takes Python several times as long as launching them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

from clearhead.core.arrays import made
from clearhead.kernels.gpu.allocate import QUICK, room, strides_of
from clearhead.kernels.gpu.launcher import Launches, Ready

TRIES = 4  # calls that are recorded at most before a kind is given up
MOST = 64  # tapes of one kind
MAPS = 64  # addresses of one tensor that are remembered with their descriptors


class Void(Exception):
    """Raised for what a tape cannot hold."""


class Spot(NamedTuple):
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


class Recorder(Launches):
    """Launches that are taken down, with the tensors that they are for.

    What it holds stays until the recording ends, so that no two tensors have had the same address.
    """

    def __init__(self, launches: Launches, inputs: Sequence[torch.Tensor | None]) -> None:
        self.known = launches.known
        self.tensors: list[Any] = list(inputs)
        self.given = len(self.tensors)
        self.rooms: list[Room] = []
        self.launched: list[tuple[Any, ...]] = []

    def __call__(self, name: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch a kernel."""
        super().__call__(name, kernel, grid, *args, **options)
        self.launched.append((self.known.get(name), kernel, grid, args, options))

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An empty tensor."""
        empty = super().room(shape, dtype, device)
        self.tensors.append(empty)
        shape = tuple(shape)
        self.rooms.append(Room(shape, strides_of(shape), dtype, device, QUICK.get(device.type), zeros=False))
        return empty

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of zeros."""
        zeros = super().zeros(shape, dtype, device)
        self.rooms[-1] = self.rooms[-1]._replace(zeros=True)
        return zeros

    def tape(self, found: Any, lasting: Iterable[torch.Tensor]) -> Tape | None:
        """What was recorded, for a call that gave `found`; None where a call has done more than can be played.

        That is so where a tensor is neither an input nor room nor among those that outlive a call, as what PyTorch
        computed in between is.
        """
        there = {tensor.untyped_storage().data_ptr() for tensor in lasting}
        if any(map(written_to, self.tensors[self.given :], self.rooms)):
            return None
        try:
            steps = [self.step(there, *launched) for launched in self.launched]
            results = self.result(found)
        except Void:
            return None
        return Tape(self.rooms, steps, results) if steps else None

    def result(self, found: Any) -> Any:
        """Results with a place in a room for each tensor: the room's number, or where it lies in it."""
        if found is None:
            return None
        if isinstance(found, dict):
            return {name: self.result(part) for name, part in found.items()}
        if isinstance(found, tuple):
            parts = [self.result(part) for part in found]
            return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
        spot = self.spot(found) if isinstance(found, torch.Tensor) else None
        if spot is None or spot.slot < self.given:
            raise Void
        return spot.slot if spot.same else spot

    def spot(self, tensor: torch.Tensor) -> Spot | None:
        """Where a tensor lies; None where it is none of the inputs and rooms.

        Two inputs may lie in one piece of memory. Then a part of it says not whose it is.
        """
        start, look = tensor.untyped_storage().data_ptr(), seen(tensor)
        near = {n: t for n, t in enumerate(self.tensors) if t is not None and t.untyped_storage().data_ptr() == start}
        same = [n for n, other in near.items() if seen(other) == look]
        if len(same) == 1:
            return Spot(same[0], 0, True, *look[1:])
        if not near:
            return None
        if same or len(near) > 1:
            raise Void
        [(slot, base)] = near.items()
        return Spot(slot, look[0] - base.data_ptr(), False, *look[1:])

    def step(self, lasting: set[int], ready: Ready | None, kernel: Any, grid: Any, args: Any, options: Any) -> Any:
        """One launch."""
        spots: dict[int, Spot] = {}
        # a part of nothing would keep the whole
        args = [arg.new_empty(0) if isinstance(arg, torch.Tensor) and not arg.numel() else arg for arg in args]
        for place, arg in enumerate(args):
            tensor = getattr(arg, "base", arg)
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                spot = self.spot(tensor)
                if spot is not None:
                    spots[place] = spot
                elif tensor.untyped_storage().data_ptr() not in lasting:
                    raise Void
            elif isinstance(arg, tuple):
                for tensor in tensors_of(arg):
                    if self.spot(tensor) is not None or tensor.untyped_storage().data_ptr() not in lasting:
                        raise Void
        if ready is None:
            return Whole(kernel, grid, args, options, spots)
        try:
            return bare(ready, grid, args, spots)
        except (AttributeError, KeyError, TypeError, ValueError):  # Triton's objects are not as they were in 3.6
            raise Void from None


def written_to(tensor: torch.Tensor, room: Room) -> bool:
    """True for room that PyTorch has put numbers into, which a tape would not. In inference mode it does not tell."""
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
    """Results with the tensors of a call in the places of slots and spots."""
    kind = type(results)
    if kind is int:
        return tensors[results]
    if results is None:
        return None
    if kind is Spot:
        return results.of(tensors)
    if kind is dict:
        return {name: filled(part, tensors) for name, part in results.items()}
    parts = [filled(part, tensors) for part in results]
    return parts if kind is tuple else kind(*parts)


class Room(NamedTuple):
    """Memory that a call takes, and what makes it quickly or None."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    make: Any
    zeros: bool


class Tape:
    """The launches of a call, one after the other."""

    def __init__(self, rooms: list[Room], steps: list[Any], results: Any) -> None:
        self.rooms = rooms
        self.steps = steps
        self.results = results
        self.stream = next((step.stream for step in steps if step.stream), None)

    def play(self, inputs: Sequence[torch.Tensor | None]) -> Any:
        """The same call with other inputs."""
        tensors = list(inputs)
        for shape, strides, dtype, device, make, zeros in self.rooms:
            empty = room(shape, dtype, device) if make is None else make(shape, strides, dtype)
            tensors.append(empty.zero_() if zeros else empty)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        stream = self.stream() if self.stream else None
        for step in self.steps:
            step.go(tensors, addresses, stream)
        return filled(self.results, tensors)


class Whole:
    """A launch the ordinary way, with tensors."""

    stream = None

    def __init__(self, kernel: Any, grid: Any, args: list[Any], options: Any, spots: dict[int, Spot]) -> None:
        self.kernel, self.grid, self.options, self.spots = kernel, grid, options, spots
        self.args = [copied(arg, None) if place in spots else arg for place, arg in enumerate(args)]

    def go(self, tensors: Sequence[torch.Tensor], addresses: list[int], stream: Any) -> None:
        """Launch it."""
        args = list(self.args)
        for place, spot in self.spots.items():
            args[place] = copied(args[place], spot.of(tensors))
        self.kernel[self.grid](*args, **self.options)


def copied(arg: Any, tensor: torch.Tensor | None) -> Any:
    """An argument, a tensor or a descriptor of one, for another tensor."""
    if arg is None or isinstance(arg, torch.Tensor):
        return tensor
    return made(type(arg), **{**vars(arg), "base": tensor})


class Bare:
    """A launch by Triton's compiled launcher, with addresses: all else that it is given stays as it was."""

    def __init__(self, stream: Any, launch: Any, args: list[Any], places: list[Any], maps: list[Any]) -> None:
        self.stream, self.launch, self.args, self.places, self.maps = stream, launch, args, places, maps

    def go(self, tensors: Sequence[torch.Tensor], addresses: list[int], stream: Any) -> None:
        """Launch it."""
        args = self.args.copy()
        args[STREAM] = stream
        for place, slot, offset in self.places:
            args[place] = addresses[slot] + offset
        for place, slot, offset, maps in self.maps:
            args[place] = maps[addresses[slot] + offset]
        self.launch(*args)


# numbers of types that the driver and the device count differently
HOST_TYPES = {8: 10, 9: 8, 10: 9}

STREAM = 3  # its place among the arguments of a compiled launcher


class Maps(dict[int, Any]):
    """What the copy engine is given for one tensor, by its address."""

    def __init__(self, *rest: Any) -> None:
        super().__init__()
        self.rest = rest  # of what describes the tensor, all but the address

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAPS:
            self.clear()
        found = self[address] = driver.active.utils.fill_tma_descriptor(address, *self.rest)
        return found


def bare(ready: Ready, grid: tuple[int, ...], args: list[Any], spots: dict[int, Spot]) -> Bare:
    """A launch as Triton's own objects would make it in the end."""
    launcher = ready.run
    if torch.version.hip or launcher.global_scratch_size or launcher.profile_scratch_size:
        raise Void
    launch, described = launcher.launch, {}
    if not inspect.isbuiltin(launch):  # but a function around it, which expands descriptors
        around = inspect.getclosurevars(launch).nonlocals
        launch = around["launcher"]
        described = dict(zip(sorted(around["tensordesc_indices"]), around["tensordesc_meta"], strict=True))
    x, y, z = (*grid, 1, 1)[:3]
    given = [x, y, z, None, ready.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None]
    given += [ready.metadata, None, None, None]
    places: list[Any] = []
    maps: list[Any] = []
    for place, arg in enumerate(args):
        spot = spots.get(place)
        if place in described:
            if spot is None or described[place] is None:
                raise Void
            maps.append((len(given), spot.slot, spot.offset, maps_of(arg, described[place])))
            given += [None, *arg.shape, *arg.strides]
        elif spot is not None:
            places.append((len(given), spot.slot, spot.offset))
            given.append(None)
        else:
            given.append(arg)
    return Bare(partial(ready.stream, ready.device), launch, [*given, *ready.rest], places, maps)


def maps_of(descriptor: Any, metadata: dict[str, Any]) -> Maps:
    """What Triton makes of a descriptor for a kernel compiled so."""
    if metadata["fp4_padded"]:
        raise Void
    kind = HOST_TYPES.get(metadata["elem_type"], metadata["elem_type"])
    return Maps(
        metadata["swizzle"], metadata["elem_size"], kind, metadata["block_size"],
        descriptor.shape, descriptor.strides, int(descriptor.padding == "nan"),
    )  # fmt: skip
