"""Which pairs a node of a mask allows, all of them at once, by the steps of a library, where there is no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.core.arrays import Array
from clearhead.core.grid import Grid
from clearhead.core.lowered import NodeKind


def evaluated(
    kind: int, constant: int, fields: Sequence[Any], array: Array, parts: Sequence[Array], grid: Grid, xp: Any
) -> Array:
    """Which pairs a node allows, (…, queries, keys) by the steps of a library, for whoever has no kernel for it.

    `fields` are its numbers and rows in order, with all batch axes in front or whole numbers, and `parts` the answers
    of the nodes that it is made of.
    """
    i, j = np.arange(grid.queries)[:, None], np.arange(grid.keys)

    def number(value: Any) -> Any:
        # what is beyond any distance is no number of 32 bits
        return min(max(value, -(2**31) + 1), 2**31 - 1) if isinstance(value, int) else value[..., None, None, None]

    match NodeKind(kind):
        case NodeKind.BAND:
            return xp.asarray((j - i >= number(fields[0])) & (j - i <= number(fields[1])))
        case NodeKind.BEFORE:
            return xp.asarray(j[None, :] < number(fields[0]))
        case NodeKind.DOCUMENTS:
            return fields[0][..., None, :, None] == fields[1][..., None, None, :]
        case NodeKind.FLAGS:
            return fields[0][..., None, :, None] | fields[1][..., None, None, :]
        case NodeKind.BLOCKS:
            down, across = (-(-n // constant) for n in (grid.queries, grid.keys))
            table = xp.asarray(fields[0])
            table = table.reshape(*table.shape[:-1], -1, down * across)  # one for all heads, or one for each
            return table[..., i // constant * across + j // constant]
        case NodeKind.ARRAY:
            return xp.asarray(array)
        case NodeKind.AND:
            return parts[0] & parts[1]
        case NodeKind.OR:
            return parts[0] | parts[1]
        case NodeKind.NOT:
            return ~parts[0]
