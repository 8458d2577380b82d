"""One range of keys for each query: that of a band, of documents, and what is left of two of them, or outside one."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

# starts and stops, (1 or batch, queries) each; a query sees keys start … stop − 1
KeyRanges: TypeAlias = tuple[np.ndarray, np.ndarray]

FAR = 2**30  # no limit: more than any position that has a key, and twice that still fits 32 bits


def of_band(low: int | np.ndarray, high: int | np.ndarray, queries: np.ndarray, keys: int) -> KeyRanges:
    """Keys from `low` to `high` after the numbers of these queries, of 32 bits each."""

    def places(limit: int | np.ndarray) -> np.ndarray:
        if isinstance(limit, int) and abs(limit) >= FAR:
            return np.broadcast_to(np.int32(0 if limit < 0 else keys), (1, queries.size))
        found = queries + np.reshape(np.clip(limit, -FAR, FAR), (-1, 1)).astype(np.int32)
        return np.clip(found, 0, keys, out=found)

    start, stop = np.broadcast_arrays(places(low), places(high + 1))
    return start, stop


def of_count(count: int | np.ndarray, queries: np.ndarray, keys: int) -> KeyRanges:
    """The first keys."""
    stop = np.repeat(np.clip(np.reshape(count, (-1, 1)), 0, keys).astype(np.int32), queries.size, axis=1)
    return np.zeros_like(stop), stop


def both(left: KeyRanges, right: KeyRanges) -> KeyRanges:
    """Keys of one and the other."""
    return np.maximum(left[0], right[0]), np.minimum(left[1], right[1])


class Stretches(NamedTuple):
    """Stretches of one id: of which row, from where to where in it, and the id."""

    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    ids: np.ndarray


def stretches(ids: np.ndarray) -> Stretches:
    """The longest stretches of equal ids in each row, (rows, n)."""
    rows, length = ids.shape
    new = np.ones(ids.shape, bool)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=new[:, 1:])
    place = np.flatnonzero(new)
    row = place // length if rows > 1 else np.zeros_like(place)
    start = place - row * length
    stop = np.append(start[1:], 0)
    return Stretches(row, start, np.where(stop == 0, length, stop), ids[row, start])


def stretches_of_both(queries: np.ndarray, keys: np.ndarray) -> tuple[Stretches, Stretches]:
    """Those of queries and of keys, found once where they are one array."""
    batch = max(len(queries), len(keys))
    asked = stretches(np.broadcast_to(keys, (batch, keys.shape[1])))
    return asked if one_array(queries, keys) else stretches(np.broadcast_to(queries, (batch, queries.shape[1]))), asked


def one_array(one: np.ndarray, other: np.ndarray) -> bool:
    """Are these the same numbers in the same memory, as far as NumPy can tell? JAX's are when they are one object."""
    known = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return one is other or (known and one.__array_interface__ == other.__array_interface__)


class ByStretch(NamedTuple):
    """The one range of keys that each stretch of queries of one id sees."""

    asking: Stretches
    start: np.ndarray
    stop: np.ndarray

    def of(self, queries: np.ndarray, length: int) -> KeyRanges:
        """The ranges of these queries of the `length` that each row has."""
        rows = int(self.asking.row[-1]) + 1
        if queries.size == length:
            each = self.asking.stop - self.asking.start
            return np.repeat(self.start, each).reshape(rows, -1), np.repeat(self.stop, each).reshape(rows, -1)
        first = self.asking.row * length + self.asking.start
        some = np.searchsorted(first, np.arange(rows)[:, None] * length + queries, side="right") - 1
        return self.start[some], self.stop[some]


def of_ids(queries: np.ndarray, keys: np.ndarray) -> ByStretch | None:
    """Each id must be in one range of keys, as ids are that grow along the sequence; None where one is in several."""
    if not (keys.size and queries.size):
        return None
    asking, asked = stretches_of_both(queries, keys)
    low = int(asked.ids.min())
    many = int(asked.ids.max()) - low + 1
    if many * (int(asked.row[-1]) + 1) >= 2**62:
        return None
    known = asked.ids - low + asked.row * many  # an id of its own for each batch row
    order = np.argsort(known, kind="stable")
    known = known[order]
    if (known[1:] == known[:-1]).any():
        return None
    inside = (asking.ids >= low) & (asking.ids < low + many)
    wanted = np.where(inside, asking.ids - low + asking.row * many, -1)
    found = np.minimum(np.searchsorted(known, wanted), known.size - 1)
    place = order[found]
    stop = np.where(known[found] == wanted, asked.stop[place], 0)  # 0: an id that no key has
    return ByStretch(asking, asked.start[place].astype(np.int32), stop.astype(np.int32))


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
