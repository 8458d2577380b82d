"""Masks that let each query see one range of keys, said so: each query's first key, and the one after its last."""

from __future__ import annotations

import numpy as np

from clearhead.core.grid import Grid
from clearhead.core.lowered import Node
from clearhead.core.mask import Mask
from clearhead.core.ranges import FAR, KeyRanges

LOOKS = 64  # queries that are asked first: most masks that show one of them several ranges need not be asked for all


def key_ranges(mask: Mask | Node | None, grid: Grid) -> KeyRanges | None:
    """The range of keys that each query sees, start ≥ stop where it sees nothing; None where there is more than one."""
    if max(grid.queries, grid.keys) >= FAR:
        return None
    if mask is None:
        return np.zeros((1, grid.queries), np.int32), np.full((1, grid.queries), grid.keys, np.int32)
    root = mask if isinstance(mask, Node) else mask.lower(grid)
    few = np.arange(0, grid.queries, max(1, grid.queries // LOOKS), dtype=np.int32)
    if root.parts and root.ranges(few, grid.keys) is None:
        return None
    return root.ranges(np.arange(grid.queries, dtype=np.int32), grid.keys)
