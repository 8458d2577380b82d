"""The one file that knows how Triton and PyTorch launch and allocate inside, which they promise nobody.

Triton looks at every argument of every launch to find the kernel that was compiled for such arguments, and PyTorch's
`empty` parses its own: each takes longer than a short kernel runs. What is here skips that. It is written for Triton
3.6 and used with no other; `CLEARHEAD_LAUNCH=plain` turns all of it off, and every call is made the documented way.
`bench/gpu.py launching` measures both.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from clearhead.core.arrays import made

PLAIN = os.environ.get("CLEARHEAD_LAUNCH") == "plain"
DIRECT = triton.__version__.startswith("3.6.") and not PLAIN
MAPS = 4096  # addresses of one tensor that are remembered with their descriptors, of 128 bytes each


class Unknown(Exception):
    """Raised where Triton's objects are not as they are known here."""


# Empty tensors


def _quick(device: str) -> Any:
    """What PyTorch's own compiled code calls for an empty tensor on the current device; None where there is nothing."""
    try:
        return None if PLAIN else getattr(torch._C._dynamo.guards, f"_empty_strided_{device}", None)
    except AttributeError:
        return None


# device → a function of (shape, strides, dtype) or None
QUICK_EMPTY = {device: _quick(device) for device in ("cuda", "cpu")}


# Compiled kernels, found without Triton's look at all arguments


class Ready(NamedTuple):
    """A compiled kernel and what it is launched with."""

    run: Any
    function: Any
    metadata: Any
    stream: Any  # of a device, the current one
    device: int
    rest: tuple[None, ...]  # what it is compiled for has a place among its arguments, but is not looked at

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Launch it on the current stream."""
        x, y, z = (*grid, 1, 1)[:3]
        stream = self.stream(self.device)
        self.run(x, y, z, stream, self.function, self.metadata, None, None, None, *args, *self.rest)


class Variants:
    """The compiled forms of one kernel, each by all that Triton compiles for.

    Of an argument that is its type, and more for whole numbers (1 or not, divisible by 16 or not), for tensors (where
    memory starts) and for descriptors (block and layout). Triton's own function says it here too, so that nothing can
    be forgotten; what takes Triton long is the rest. Inside a tuple, as arguments are handed to it here, it looks at
    everything, whether declared `do_not_specialize` or not: that tells apart more than is needed, and never less.
    """

    def __init__(self, kernel: Any, given: int) -> None:
        self.kernel = kernel  # kept, so that no other has its id
        self.ready: dict[Any, Ready] = {}
        constants = [place for place, parameter in enumerate(kernel.params) if parameter.is_constexpr]
        self.first = min(constants, default=given)  # of the arguments that are compiled in

    def key(self, device: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What tells the compiled form for these arguments from all others."""
        from triton._C.libtriton import native_specialize_impl

        backend = self.kernel.device_caches[device][3]
        numbers = native_specialize_impl(backend, args[: self.first], False, True, True)
        return (device, numbers, args[self.first :], *options, *options.values())

    def find(self, grid: tuple[int, ...], args: tuple[Any, ...], options: Any) -> tuple[Ready, bool]:
        """What launches the kernel for these arguments; and whether it was launched, as the first time it is."""
        device = driver.active.get_current_device()
        key = self.key(device, args, options)
        ready = self.ready.get(key)
        if ready is not None:
            return ready, False
        compiled = self.kernel[grid](*args, **options)
        rest = (None,) * (len(self.kernel.params) - len(args))
        stream = driver.active.get_current_stream
        ready = Ready(compiled.run, compiled.function, compiled.packed_metadata, stream, device, rest)
        self.ready[key] = ready
        return ready, True


_variants: dict[tuple[int, int], Variants | None] = {}


def variants_of(kernel: Any, given: int) -> Variants | None:
    """The compiled forms of a kernel that is launched with so many arguments in place.

    None where kernels are interpreted, or what they are compiled for does not come last.
    """
    place = (id(kernel), given)
    if place not in _variants:
        able = isinstance(kernel, JITFunction) and constants_last(kernel.params, given)
        _variants[place] = Variants(kernel, given) if able else None
    return _variants[place]


def constants_last(parameters: list[Any], given: int) -> bool:
    """True where a kernel's arguments end with those it is compiled for, and what is not given is among them."""
    constant = [parameter.is_constexpr for parameter in parameters]
    return constant == sorted(constant) and all(constant[given:])


# Descriptors of tensors, for the copy engine (TMA)


def descriptor_of(kind: type, base: Any, **fields: Any) -> Any:
    """A tensor descriptor of one of Triton's classes, as its constructor makes it but for the checks, 5 µs each.

    The caller has made them: an address and strides of whole 16 bytes, a last stride of 1, no axis of size 0.
    """
    return kind(base, **fields) if PLAIN else made(kind, base=base, padding="zero", **fields)


class TensorMaps(dict[int, Any]):
    """What the copy engine is given for one tensor, by its address."""

    def __init__(self, *rest: Any) -> None:
        super().__init__()
        self.rest = rest  # of what describes the tensor, all but the address

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAPS:
            self.clear()
        found = self[address] = driver.active.utils.fill_tma_descriptor(address, *self.rest)
        return found


# numbers of types that the driver and the device count differently
HOST_TYPES = {8: 10, 9: 8, 10: 9}


def maps_of(descriptor: Any, metadata: dict[str, Any]) -> TensorMaps:
    """What Triton makes of a descriptor for a kernel compiled so."""
    if metadata["fp4_padded"]:
        raise Unknown
    kind = HOST_TYPES.get(metadata["elem_type"], metadata["elem_type"])
    return TensorMaps(
        metadata["swizzle"], metadata["elem_size"], kind, metadata["block_size"],
        descriptor.shape, descriptor.strides, int(descriptor.padding == "nan"),
    )  # fmt: skip


# A launch by addresses

STREAM = 3  # its place among the arguments of a compiled launcher


class DirectLaunch:
    """A launch by Triton's compiled launcher, with addresses: all else that it is given stays as it was."""

    def __init__(self, stream: Any, launch: Any, args: list[Any], places: list[Any], maps: list[Any]) -> None:
        self.stream, self.launch, self.args, self.places, self.maps = stream, launch, args, places, maps

    def go(self, tensors: Any, addresses: list[int], stream: Any) -> None:
        """Launch it."""
        args = self.args.copy()
        args[STREAM] = stream
        for place, slot, offset in self.places:
            args[place] = addresses[slot] + offset
        for place, slot, offset, maps in self.maps:
            args[place] = maps[addresses[slot] + offset]
        self.launch(*args)


class Script:
    """Launches one after the other: all that they are given lies in one list, of which each takes its part."""

    def __init__(self, steps: Sequence[tuple[DirectLaunch, Sequence[tuple[int, int]]]]) -> None:
        """Each with where its slots lie: in which piece of memory, how many bytes from its start."""
        addresses: dict[tuple[int, int], int] = {}
        maps: dict[tuple[int, int], tuple[int, TensorMaps]] = {}
        for step, where in steps:
            for _, slot, offset in (*step.places, *(one[:3] for one in step.maps)):
                base, first = where[slot]
                addresses.setdefault((base, first + offset), len(addresses))
        for step, where in steps:
            for _, slot, offset, of_one in step.maps:
                at = addresses[where[slot][0], where[slot][1] + offset]
                maps.setdefault((at, id(of_one)), (at, of_one))
        self.addresses, self.maps = list(addresses), list(maps.values())
        self.first = 1 + len(addresses) + len(maps)  # of what stays as it is; before it come the stream and these
        self.values: list[Any] = [None] * self.first
        self.launches: list[tuple[Any, Any]] = []
        there: dict[int, int] = {}
        for step, where in steps:
            part: list[int] = []
            for value in step.args:
                if id(value) not in there:
                    there[id(value)] = len(self.values)
                    self.values.append(value)
                part.append(there[id(value)])
            part[STREAM] = 0
            for place, slot, offset in step.places:
                part[place] = 1 + addresses[where[slot][0], where[slot][1] + offset]
            for place, slot, offset, of_one in step.maps:
                at = addresses[where[slot][0], where[slot][1] + offset]
                part[place] = 1 + len(addresses) + list(maps).index((at, id(of_one)))
            self.launches.append((step.launch, itemgetter(*part)))

    def run(self, bases: Sequence[int], stream: Any) -> None:
        """Launch all of them, for pieces of memory that start there."""
        values = self.values.copy()
        found: list[Any] = [bases[base] + offset for base, offset in self.addresses]
        values[0] = stream
        values[1 : self.first] = found + [maps[found[at]] for at, maps in self.maps]
        for launch, part in self.launches:
            launch(*part(values))


def direct_launch(ready: Ready, grid: tuple[int, ...], args: list[Any], places_of: dict[int, Any]) -> DirectLaunch:
    """A launch as Triton's own objects would make it in the end, of arguments that lie in `slot`s at `offset`s."""
    try:
        return _direct_launch(ready, grid, args, places_of)
    except (AttributeError, KeyError, TypeError, ValueError):  # Triton's objects are not as they were in 3.6
        raise Unknown from None


def _direct_launch(ready: Ready, grid: tuple[int, ...], args: list[Any], places_of: dict[int, Any]) -> DirectLaunch:
    launcher = ready.run
    if torch.version.hip or launcher.global_scratch_size or launcher.profile_scratch_size:
        raise Unknown
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
    for number, arg in enumerate(args):
        place = places_of.get(number)
        if number in described:
            if place is None or described[number] is None:
                raise Unknown
            maps.append((len(given), place.slot, place.offset, maps_of(arg, described[number])))
            given += [None, *arg.shape, *arg.strides]
        elif place is not None:
            places.append((len(given), place.slot, place.offset))
            given.append(None)
        else:
            given.append(arg)
    return DirectLaunch(partial(ready.stream, ready.device), launch, [*given, *ready.rest], places, maps)
