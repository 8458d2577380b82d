"""Launching kernels and making room for what they write; `bypass.py` knows how to do it again in less time."""

from __future__ import annotations

from typing import Any

import torch
from triton import knobs

from clearhead.kernels.gpu import bypass
from clearhead.kernels.gpu.allocate import room
from clearhead.kernels.gpu.bypass import Ready


class Launcher:
    """The launches of calls that differ in nothing that a kernel is compiled for.

    Who keeps one of these promises that under one name there is always the same kernel, with arguments of the same
    types: numbers that fit the same type, are or are not 1, and divide by 16 or do not; tensors whose memory starts at
    a multiple of 16 bytes or does not. The first launch under a name makes no such promise, and is looked up among the
    kernels that others have launched.
    """

    def __init__(self) -> None:
        self.known: dict[Any, Ready] = {}

    def __call__(self, name: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch a kernel; `options` are what it is compiled for, by name, and come last in its signature."""
        ready = self.known.get(name)
        if ready is not None and not hooked():
            ready.launch(grid, args)
            return
        variants = bypass.variants_of(kernel, len(args)) if bypass.DIRECT and not hooked() else None
        if variants is None:
            kernel[grid](*args, **options)
            return
        self.known[name], launched = variants.find(grid, args, options)
        if not launched:
            self.known[name].launch(grid, args)

    def room(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, strides: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """An empty tensor without gaps, its axes in the order of the strides."""
        return room(shape, dtype, device, strides)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of zeros."""
        return self.room(shape, dtype, device).zero_()


def hooked() -> bool:
    """True where something, a profiler say, wants to hear of every launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def alike(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """What kernels are compiled for of tensors, where calls of one kind may differ in it."""
    return tuple([None if a is None else (a.stride(), a.dtype, a.data_ptr() % 16) for a in tensors])
