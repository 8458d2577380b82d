"""Masks that let each query see one run of keys, said so: the first key of each query, and the one after the last."""

from __future__ import annotations

import numpy as np

from clearhead.core.grid import Grid, by_batch
from clearhead.core.mask import Both, Either, Mask, Not
from clearhead.core.masks import Band, Before, Documents
from clearhead.kernels.gpu.masks import flat

Runs = tuple[np.ndarray, np.ndarray]  # starts and stops, (1 or batch, queries) each; a query sees keys start … stop − 1


def runs(mask: Mask | None, grid: Grid) -> Runs | None:
    """The run of keys that each query sees, start ≥ stop where it sees nothing; None where keys are not in one run."""
    if mask is None:
        return np.zeros((1, grid.queries), np.int64), np.full((1, grid.queries), grid.keys)
    if isinstance(mask, Band):
        place = np.arange(grid.queries) + np.reshape(flat(mask.alignment.offset(grid), grid), (-1, 1))
        start = np.zeros_like(place) if mask.back is None else np.clip(place - mask.back, 0, grid.keys)
        stop = np.full_like(place, grid.keys) if mask.ahead is None else np.clip(place + mask.ahead + 1, 0, grid.keys)
        return start, stop
    if isinstance(mask, Before):
        count = np.reshape(flat(by_batch(mask.name, mask.count, grid), grid), (-1, 1))
        stop = np.clip(count, 0, grid.keys) + np.zeros(grid.queries, np.int64)
        return np.zeros_like(stop), stop
    if isinstance(mask, Documents):
        return _of_documents(*mask.ids(grid), grid)
    if isinstance(mask, Not):
        inner = runs(mask.mask, grid)
        return None if inner is None else _outside(*inner, grid.keys)
    if isinstance(mask, Both | Either):
        left, right = runs(mask.left, grid), runs(mask.right, grid)
        if left is None or right is None:
            return None
        if isinstance(mask, Both):
            return np.maximum(left[0], right[0]), np.minimum(left[1], right[1])
        return _either(left, right)
    return None


def _of_documents(queries: object, keys: object, grid: Grid) -> Runs | None:
    """Each id must be in one run of keys, as ids are that grow along the sequence."""
    if not (isinstance(queries, np.ndarray) and isinstance(keys, np.ndarray) and keys.size and queries.size):
        return None
    if queries.ndim > 1 or keys.ndim > 1:
        queries, keys = (np.broadcast_to(a, (*grid.batch, a.shape[-1])) for a in (queries, keys))
    queries, keys = queries.reshape(-1, grid.queries), keys.reshape(-1, grid.keys)
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
    start = place[found] % grid.keys
    stop = np.where(ids[found] == wanted, start + length[found], 0)  # an id that no key has
    return tuple(np.repeat(a, repeated).reshape(queries.shape) for a in (start, stop))  # type: ignore[return-value]  # of two


def _lengths(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs of one id: where each starts, how long it is, and the id."""
    ids = ids.reshape(-1)
    place = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])
    return place, np.diff(place, append=ids.size), ids[place]


def _outside(start: np.ndarray, stop: np.ndarray, keys: int) -> Runs | None:
    """All other keys, where they are one run."""
    start = np.where(start >= stop, keys, start)
    stop = np.where(start >= stop, keys, stop)
    if ((start > 0) & (stop < keys)).any():
        return None
    return np.where(start > 0, 0, stop), np.where(start > 0, start, keys)


def _either(left: Runs, right: Runs) -> Runs | None:
    """Keys of one or the other, where they are one run."""
    (a, b), (c, d) = np.broadcast_arrays(*left), np.broadcast_arrays(*right)
    first, second = a >= b, c >= d  # nothing
    if (~first & ~second & ((a > d) | (c > b))).any():
        return None
    return np.where(first, c, np.where(second, a, np.minimum(a, c))), np.where(
        first, d, np.where(second, b, np.maximum(b, d))
    )
