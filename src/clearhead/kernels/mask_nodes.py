"""A mask as the compiled extension reads it: the nodes of its tree, parts before wholes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.core.arrays import Array
from clearhead.core.lowered import Node
from clearhead.kernels.extension import native


def nodes_of(root: Node, lend: Callable[[Array], Any] | None = None) -> list[Any]:
    """The nodes of a tree; `lend` says where an array lies.

    Without it there are no arrays, and a table of which few are True is told by their places: so lists are made.
    """
    order: list[Any] = []
    _add(root, order, lend)
    return order


def _add(part: Node, order: list[Any], lend: Callable[[Array], Any] | None) -> int:
    """One node after its parts; its place comes back."""
    left, right, *_ = *(_add(one, order, lend) for one in part.parts), -1, -1
    node = native.MaskNode(part.kind, left, right, part.constant)
    for number in part.numbers:
        if isinstance(number, int):
            node.add_number(number)
        else:
            node.add_numbers(np.ascontiguousarray(number, dtype=np.int64), 1)
    few = part.places() if lend is None else None
    if few is not None:
        node.add_numbers(np.ascontiguousarray(few[0], dtype=np.int64), 0)
    for rows in part.rows() if few is None else ():
        each = 0 if len(rows) == 1 else rows.shape[1]
        if rows.dtype == bool:
            node.add_flags(np.ascontiguousarray(rows).view(np.uint8), each)
        else:
            node.add_numbers(np.ascontiguousarray(rows, dtype=np.int64), each)
    pairs = None if lend is None else part.array()
    if pairs is not None and lend is not None:
        node.array = lend(pairs)
    order.append(node)
    return len(order) - 1
