"""Stretches of a memory-mapped array: copied into memory at hand by who reads ahead, and not kept mapped behind it.

Left as it lies, a map is read by page faults of the threads that compute, and in the end all of it is in memory.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError


def is_mapped(array: Any) -> bool:
    """True for np.memmap whose file nobody changes through it, heads and rows one after the other."""
    return (
        isinstance(array, np.memmap)
        and array.mode == "r"
        and isinstance(getattr(array, "_mmap", None), mmap.mmap)
        and hasattr(mmap, "MADV_DONTNEED")
        and array.flags.c_contiguous
    )


class Mapped:
    """A map to be read in order, by stretches of positions."""

    def __init__(self, array: Any) -> None:
        self.array, self.map = array, array._mmap
        base = np.frombuffer(self.map, np.uint8)
        # where the array lies in what is mapped, of which it may be a part
        self.start = array.ctypes.data - base.ctypes.data
        # and where what is mapped begins in the file: at a page before the array's own place
        self.begins = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY

    def read(self, low: int, high: int, out: np.ndarray) -> np.ndarray:
        """Positions low … high of every head."""
        needed = self.begins + self.start + self.array.nbytes
        # who reads a page that a file no longer has is ended by the system
        if (size := self.map.size()) < needed:
            raise ArgumentError("source", f"{self.array.filename} is cut short: {size:,} of {needed:,} bytes")
        found = out[..., : high - low, :]
        np.copyto(found, self.array[..., low:high, :])
        self.forget(low, high)
        return found

    def forget(self, low: int, high: int) -> None:
        """Pages that lie wholly within the stretches are no longer this process's; the file still has them."""
        *lead, positions, features = self.array.shape
        row = features * self.array.itemsize
        for head in range(math.prod(lead)):
            begin, end = (self.start + (head * positions + place) * row for place in (low, high))
            begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                self.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
