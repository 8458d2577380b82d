"""Masks that let each query see one range of keys, said so: each query's first key, and the one after its last."""

from __future__ import annotations

import numpy as np

from clearhead.core.grid import Grid
from clearhead.core.lowered import AndNode, BandNode, BeforeNode, DocumentsNode, Node, NotNode, OrNode
from clearhead.core.mask import Mask

# starts and stops, (1 or batch, queries) each; a query sees keys start … stop − 1
KeyRanges = tuple[np.ndarray, np.ndarray]


def key_ranges(mask: Mask | None, grid: Grid) -> KeyRanges | None:
    """The range of keys that each query sees, start ≥ stop where it sees nothing; None where there is more than one."""
    if mask is None:
        return np.zeros((1, grid.queries), np.int64), np.full((1, grid.queries), grid.keys)
    return _of_node(mask.lower(grid), grid)


def _of_node(node: Node, grid: Grid) -> KeyRanges | None:
    if isinstance(node, BandNode):
        query = np.arange(grid.queries)
        places = (query + np.reshape(limit, (-1, 1)) for limit in (node.low, np.add(node.high, 1)))
        start, stop = np.broadcast_arrays(*(np.clip(place, 0, grid.keys) for place in places))
        return start, stop
    if isinstance(node, BeforeNode):
        stop = np.clip(np.reshape(node.count, (-1, 1)), 0, grid.keys) + np.zeros(grid.queries, np.int64)
        return np.zeros_like(stop), stop
    if isinstance(node, DocumentsNode):
        return _of_documents(node.queries, node.keys)
    if isinstance(node, NotNode):
        inner = _of_node(node.inner, grid)
        return None if inner is None else _outside(*inner, grid.keys)
    if isinstance(node, AndNode | OrNode):
        left, right = _of_node(node.left, grid), _of_node(node.right, grid)
        if left is None or right is None:
            return None
        if isinstance(node, AndNode):
            return np.maximum(left[0], right[0]), np.minimum(left[1], right[1])
        return _either(left, right)
    return None


def _of_documents(queries: np.ndarray, keys: np.ndarray) -> KeyRanges | None:
    """Each id must be in one range of keys, as ids are that grow along the sequence."""
    if not (keys.size and queries.size):
        return None
    batch, count = max(len(queries), len(keys)), keys.shape[1]
    queries, keys = (np.broadcast_to(a, (batch, a.shape[1])) for a in (queries, keys))
    low, many = int(keys.min()), int(keys.max()) - int(keys.min()) + 1
    if many * len(keys) >= 2**62:
        return None
    row = np.arange(len(keys))[:, None]
    place, length, ids = _lengths(keys - low + row * many)  # an id of its own for each batch row
    order = np.argsort(ids)
    ids, place, length = ids[order], place[order], length[order]
    if (ids[1:] == ids[:-1]).any():
        return None
    known = (queries >= low) & (queries < low + many)
    _, repeated, wanted = _lengths(np.where(known, queries - low + row * many, -1 - row))
    found = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    start = place[found] % count
    stop = np.where(ids[found] == wanted, start + length[found], 0)  # an id that no key has
    return tuple(np.repeat(a, repeated).reshape(queries.shape) for a in (start, stop))  # type: ignore[return-value]  # of two


def _lengths(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranges of one id: where each starts, how long it is, and the id."""
    ids = ids.reshape(-1)
    place = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])
    return place, np.diff(place, append=ids.size), ids[place]


def _outside(start: np.ndarray, stop: np.ndarray, keys: int) -> KeyRanges | None:
    """All other keys, where they are one range."""
    start = np.where(start >= stop, keys, start)
    stop = np.where(start >= stop, keys, stop)
    if ((start > 0) & (stop < keys)).any():
        return None
    return np.where(start > 0, 0, stop), np.where(start > 0, start, keys)


def _either(left: KeyRanges, right: KeyRanges) -> KeyRanges | None:
    """Keys of one or the other, where they are one range."""
    (a, b), (c, d) = np.broadcast_arrays(*left), np.broadcast_arrays(*right)
    first, second = a >= b, c >= d  # nothing
    if (~first & ~second & ((a > d) | (c > b))).any():
        return None
    return np.where(first, c, np.where(second, a, np.minimum(a, c))), np.where(
        first, d, np.where(second, b, np.maximum(b, d))
    )
