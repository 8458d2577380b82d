"""Launching a kernel again: what Triton finds out at a kernel's first launch is not found out at every other one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from clearhead.core.arrays import made
from clearhead.kernels.gpu.allocate import room

# how a compiled kernel is launched is no promise of Triton's: other versions are asked the ordinary way, every time
DIRECT = triton.__version__.startswith("3.6.")


class Variants:
    """The compiled forms of one kernel, each by all that Triton compiles for.

    Of an argument that is its type, and more for whole numbers (1 or not, divisible by 16 or not), for tensors (where
    memory starts) and for descriptors (block and layout). Triton's own function says it here too, so that nothing can
    be forgotten; what takes Triton long is the rest. Inside a tuple, as arguments are handed to it here, it looks at
    everything, whether declared `do_not_specialize` or not: that tells apart more than is needed, and never less.
    """

    def __init__(self, kernel: Any, given: int) -> None:
        self.kernel = kernel  # kept, so that no other has its id
        self.ready: dict[Any, Any] = {}
        constants = [place for place, parameter in enumerate(kernel.params) if parameter.is_constexpr]
        self.first = min(constants, default=given)  # of the arguments that are compiled in

    def key(self, device: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What tells the compiled form for these arguments from all others."""
        from triton._C.libtriton import native_specialize_impl  # as above, no promise

        backend = self.kernel.device_caches[device][3]
        numbers = native_specialize_impl(backend, args[: self.first], False, True, True)
        return (device, numbers, args[self.first :], *options, *options.values())


class Ready(NamedTuple):
    """A compiled kernel and what it is launched with."""

    run: Any
    function: Any
    metadata: Any
    stream: Any  # of a device, the current one
    device: int
    rest: tuple[None, ...]  # what it is compiled for has a place among its arguments, but is not looked at


class Launches:
    """The launches of calls that differ in nothing that a kernel is compiled for.

    Triton looks at every argument of every launch to find the kernel that was compiled for such arguments, which takes
    it longer than a short kernel runs. Who keeps one of these promises that under one name there is always the same
    kernel, with arguments of the same types: numbers that fit the same type, are or are not 1, and divide by 16 or do
    not; tensors whose memory starts at a multiple of 16 bytes or does not. The first launch under a name makes no such
    promise, and is looked up among the kernels that others have launched.
    """

    def __init__(self) -> None:
        self.known: dict[Any, Ready] = {}

    def __call__(self, name: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch a kernel; `options` are what it is compiled for, by name, and come last in its signature."""
        ready = self.known.get(name)
        if ready is None or hooked():
            ready = self.find(name, kernel, grid, args, options)
            if ready is None:
                return
        run, function, metadata, stream, device, compiled_for = ready
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream(device), function, metadata, None, None, None, *args, *compiled_for)

    def find(self, name: Any, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Any) -> Any:
        """What launches a kernel, if it is known; else launch it the ordinary way, remember, and give None."""
        variants = variants_of(kernel, len(args)) if DIRECT and not hooked() else None
        if variants is None:
            kernel[grid](*args, **options)
            return None
        active = driver.active
        device = active.get_current_device()
        key = variants.key(device, args, options)
        ready = variants.ready.get(key)
        if ready is None:
            compiled = kernel[grid](*args, **options)
            rest = (None,) * (len(kernel.params) - len(args))
            variants.ready[key] = self.known[name] = Ready(
                compiled.run, compiled.function, compiled.packed_metadata, active.get_current_stream, device, rest
            )
            return None
        self.known[name] = ready
        return ready

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An empty tensor."""
        return room(shape, dtype, device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of zeros."""
        return self.room(shape, dtype, device).zero_()


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


def hooked() -> bool:
    """True where something, a profiler say, wants to hear of every launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def described(kind: type, base: Any, **fields: Any) -> Any:
    """A tensor descriptor of one of Triton's classes, as its constructor makes it but for the checks, 5 µs each.

    The caller has made them: an address and strides of whole 16 bytes, a last stride of 1, no axis of size 0.
    """
    return made(kind, base=base, padding="zero", **fields)


def alike(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """What kernels are compiled for of tensors, where calls of one kind may differ in it."""
    return tuple([None if a is None else (a.stride(), a.dtype, a.data_ptr() % 16) for a in tensors])
