"""Masks that let each query see one range of keys, said so: each query's first key, and the one after its last."""

from __future__ import annotations

import numpy as np

from clearhead.core.grid import Grid
from clearhead.core.mask import Mask
from clearhead.core.ranges import KeyRanges


def key_ranges(mask: Mask | None, grid: Grid) -> KeyRanges | None:
    """The range of keys that each query sees, start ≥ stop where it sees nothing; None where there is more than one."""
    if mask is None:
        return np.zeros((1, grid.queries), np.int64), np.full((1, grid.queries), grid.keys)
    return mask.lower(grid).ranges(grid)
