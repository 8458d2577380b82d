"""One range of keys for each query: that of a band, of documents, and what is left of two of them, or outside one."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from clearhead.core.grid import Grid

# starts and stops, (1 or batch, queries) each; a query sees keys start … stop − 1
KeyRanges: TypeAlias = tuple[np.ndarray, np.ndarray]


def of_band(low: int | np.ndarray, high: int | np.ndarray, grid: Grid) -> KeyRanges:
    """Keys from `low` to `high` after the query's number."""
    query = np.arange(grid.queries)
    places = (query + np.reshape(limit, (-1, 1)) for limit in (low, np.add(high, 1)))
    start, stop = np.broadcast_arrays(*(np.clip(place, 0, grid.keys) for place in places))
    return start, stop


def of_count(count: int | np.ndarray, grid: Grid) -> KeyRanges:
    """The first keys."""
    stop = np.clip(np.reshape(count, (-1, 1)), 0, grid.keys) + np.zeros(grid.queries, np.int64)
    return np.zeros_like(stop), stop


def both(left: KeyRanges, right: KeyRanges) -> KeyRanges:
    """Keys of one and the other."""
    return np.maximum(left[0], right[0]), np.minimum(left[1], right[1])


def of_ids(queries: np.ndarray, keys: np.ndarray) -> KeyRanges | None:
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


def outside(start: np.ndarray, stop: np.ndarray, keys: int) -> KeyRanges | None:
    """All other keys, where they are one range."""
    start = np.where(start >= stop, keys, start)
    stop = np.where(start >= stop, keys, stop)
    if ((start > 0) & (stop < keys)).any():
        return None
    return np.where(start > 0, 0, stop), np.where(start > 0, start, keys)


def either(left: KeyRanges, right: KeyRanges) -> KeyRanges | None:
    """Keys of one or the other, where they are one range."""
    (a, b), (c, d) = np.broadcast_arrays(*left), np.broadcast_arrays(*right)
    first, second = a >= b, c >= d  # nothing
    if (~first & ~second & ((a > d) | (c > b))).any():
        return None
    return np.where(first, c, np.where(second, a, np.minimum(a, c))), np.where(
        first, d, np.where(second, b, np.maximum(b, d))
    )
