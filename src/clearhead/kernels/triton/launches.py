"""Launching a kernel again: what Triton finds out at a kernel's first launch is not found out at every other one."""

from __future__ import annotations

from typing import Any

import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

# how a compiled kernel is launched is no promise of Triton's: other versions are asked the ordinary way, every time
DIRECT = triton.__version__.startswith("3.6.")


class Launches:
    """The launches of calls that differ in nothing that a kernel is compiled for.

    Triton looks at every argument of every launch to find the kernel that was compiled for such arguments, which takes
    it longer than a short kernel runs. Who keeps one of these promises that under one name there is always the same
    kernel, with arguments of the same types: numbers that fit the same type, are or are not 1, and divide by 16 or do
    not; tensors whose memory starts at a multiple of 16 bytes or does not.
    """

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, name: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch a kernel; `options` are what it is compiled for, by name, and come last in its signature."""
        known = self.known.get(name)
        if known is None or hooked():
            self.learn(name, kernel, kernel[grid](*args, **options), len(args))
            return
        run, function, metadata, stream, device, compiled_for = known
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream(device), function, metadata, None, None, None, *args, *compiled_for)

    def learn(self, name: Any, kernel: Any, compiled: Any, given: int) -> None:
        """Keep what a launch found; nothing where kernels are interpreted, or another Triton launches them."""
        if not DIRECT or not isinstance(compiled, CompiledKernel):
            return
        rest = kernel.params[given:]
        if all(parameter.is_constexpr for parameter in rest):
            active = driver.active
            # what a kernel is compiled for has a place among its arguments, but is not looked at
            self.known[name] = (
                compiled.run, compiled.function, compiled.packed_metadata,
                active.get_current_stream, active.get_current_device(), (None,) * len(rest),
            )  # fmt: skip


def hooked() -> bool:
    """True where something, a profiler say, wants to hear of every launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def described(kind: type, base: Any, **fields: Any) -> Any:
    """A tensor descriptor of one of Triton's classes, as its constructor makes it but for the checks, 5 µs each.

    The caller has made them: an address and strides of whole 16 bytes, a last stride of 1, no axis of size 0.
    """
    descriptor: Any = object.__new__(kind)
    descriptor.__dict__.update(base=base, padding="zero", **fields)
    return descriptor
