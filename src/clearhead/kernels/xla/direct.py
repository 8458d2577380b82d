"""A described call on JAX arrays that are there: read where they lie, with no program for XLA to compile."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from clearhead.core.arrays import Array, dtype_name
from clearhead.kernels.extension import TYPES, at, native
from clearhead.kernels.prepared import LONG_WORK, THREAD_WORK, main_thread
from clearhead.kernels.threads import threads
from clearhead.kernels.xla.spec import Room, Spec

# what XLA wants of memory that it takes over without a copy
ALIGNED = 64
# multiply-adds that take some hundredths of a second: what JAX would do meanwhile is not worth not being interrupted
PATIENCE = 2_000_000_000


def tries_patience(spec: Spec) -> bool:
    """True for a call that takes so long that somebody may want to interrupt it."""
    return spec.work > PATIENCE


def lie_here(arrays: Iterable[Array]) -> bool:
    """True where each array is NumPy's, or lies on one CPU device, row after row."""
    return all(isinstance(array, np.ndarray) or _lies_here(array) for array in arrays)


def _lies_here(array: Array) -> bool:
    devices = array.devices()
    if len(devices) != 1 or next(iter(devices)).platform != "cpu":
        return False
    # the name that JAX gives to it changed with 0.7
    kind = array.format.layout if hasattr(array, "format") else array.layout.device_local_layout
    order = kind.major_to_minor
    return tuple(order) == tuple(range(len(order)))


@lru_cache(maxsize=512)
def _written(spec: Spec, back: bool, with_lse: bool) -> np.ndarray:
    return np.array(spec.numbers(back=back, with_lse=with_lse), dtype=np.int64)


def room(one: Room) -> np.ndarray:
    """Memory for a result, which XLA can take over."""
    size = int(np.prod(one.shape)) * one.dtype.itemsize
    raw = np.empty(size + ALIGNED, np.uint8)
    start = -at(raw) % ALIGNED
    return raw[start : start + size].view(one.dtype).reshape(one.shape)


def place(array: Array) -> tuple[int, int, tuple[int, ...]]:
    """Where an array lies, its type and its sizes."""
    address = at(array) if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()
    return address, TYPES[dtype_name(array)], tuple(array.shape)


def run(spec: Spec, operands: Iterable[Array], rooms: list[Room], *, back: bool, with_lse: bool = False) -> list[Any]:
    """The results as JAX arrays, on the device of the queries."""
    given = [np.asarray(a, order="C") if isinstance(a, np.ndarray) else a.block_until_ready() for a in operands]
    results = [room(one) for one in rooms]
    numbers = _written(spec, back, with_lse)
    long = spec.wanted_threads > LONG_WORK // THREAD_WORK
    scale = 1.0 if spec.scale is None else spec.scale
    native.run_described(
        numbers, scale, spec.softcap or 0.0, list(map(place, given)), list(map(place, results)), threads("jax"),
        long and main_thread(),
    )  # fmt: skip
    device = next((next(iter(a.devices())) for a in given if not isinstance(a, np.ndarray)), None)
    return jax.device_put(results, device, may_alias=True)
