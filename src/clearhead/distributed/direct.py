"""Memory that stretches of a file are read into past the system's cache, which costs a tenth of the processor's time.

The system then wants places in the file, places in memory and lengths to be multiples of ALIGNED. So a stretch is read
from a little before it to a little behind it, and lies in memory as it does in the file, but for whole multiples.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ALIGNED = 4096
# bytes of one head's stretch below which the system's own reading ahead is worth more
SMALLEST = 16 * ALIGNED


def opened(path: Path) -> int:
    """A file to be read past the cache; −1 where this system or this file knows no such thing."""
    if not (hasattr(os, "O_DIRECT") and hasattr(os, "preadv")):
        return -1
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return -1


class Room:
    """Memory for a stretch of each head: `most` bytes each, which in the file lie `apart` bytes from one another."""

    def __init__(self, heads: int, most: int, apart: int) -> None:
        # the same remainder as in the file, and a margin on either side of each stretch
        self.apart = most + 2 * ALIGNED + (apart - most) % ALIGNED
        memory = np.empty(heads * self.apart + 3 * ALIGNED, np.uint8)
        self.memory = memory[-memory.ctypes.data % ALIGNED :]

    def parts(self, starts: list[int], length: int) -> Iterator[tuple[memoryview, int, int]]:
        """For the stretch of each head: memory to fill, from which place in the file on, and how much of it matters."""
        for number, start in enumerate(starts):
            before = start % ALIGNED
            there = self.first(starts) + number * self.apart - before
            whole = -(-(before + length) // ALIGNED) * ALIGNED
            yield self.memory.data[there : there + whole], start - before, before + length

    def first(self, starts: list[int]) -> int:
        """Where the first stretch begins in this memory."""
        return starts[0] % ALIGNED if starts else 0
