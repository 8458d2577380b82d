"""How many True each tile of a boolean array holds: the array is read once, and not again while it stays as it is."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, Library, is_torch, to_numpy

# sums of arrays that are alive, by identity: (the array, its version, {(rows, columns): sums})
_known: dict[int, tuple[weakref.ref[Any], int, dict[tuple[int, int], np.ndarray]]] = {}
BYTES = 255  # rows whose ones can be added up in bytes


def block_sums(array: Array, rows: int, columns: int) -> np.ndarray:
    """The number of True in each tile of an array (…, T, S): (…, blocks of T, tiles of S), axes of size 1 kept.

    >>> block_sums(np.tri(4, 6, dtype=bool), 2, 3).tolist()
    [[3, 0], [6, 1]]
    """
    version = version_of(array)
    if version is None:
        return _sums(array, rows, columns)
    found = _known.get(id(array))
    if found is None or found[0]() is not array or found[1] != version:
        key = id(array)
        try:
            alive = weakref.ref(array, lambda _: _known.pop(key, None))
        except TypeError:  # of which nobody can tell when it is gone
            return _sums(array, rows, columns)
        found = _known[key] = (alive, version, {})
    sums = found[2]
    if (rows, columns) not in sums:
        sums[rows, columns] = _sums(array, rows, columns)
    return sums[rows, columns]


def version_of(array: Array) -> int | None:
    """A number that changes whenever somebody writes to the array; None where nobody counts.

    PyTorch counts, except under inference mode; JAX's arrays never change. NumPy does not count, and arrays that are
    read-only may be views of ones that are not.
    """
    if is_torch(array):
        return None if array.is_inference() else int(array._version)
    jax = sys.modules.get("jax")
    return 0 if jax is not None and isinstance(array, jax.Array) else None


def _sums(array: Array, rows: int, columns: int) -> np.ndarray:
    if array.ndim < 2:
        array = array[(None,) * (2 - array.ndim) + (...,)]
    down, across = min(rows, max(array.shape[-2], 1)), min(columns, max(array.shape[-1], 1))
    if isinstance(array, np.ndarray) or (is_torch(array) and array.device.type == "cpu"):
        return _in_memory(to_numpy(array), down, across)
    return _elsewhere(array, down, across)


def _in_memory(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Bytes are added up eight at a time, as long as no sum leaves its byte; only then are rows of bytes summed."""
    *lead, down, across = array.shape
    blocks, tiles = -(-down // rows), -(-across // columns)
    found = np.zeros((*lead, blocks, tiles), np.int64)
    if not array.size:
        return found
    starts = np.arange(0, across, columns)
    for block in range(blocks):
        for first in range(block * rows, min((block + 1) * rows, down), BYTES):
            some = array[..., first : min(first + BYTES, (block + 1) * rows), :]
            found[..., block, :] += np.add.reduceat(_column_sums(some), starts, axis=-1, dtype=np.int64)
    return found


def _column_sums(rows: np.ndarray) -> np.ndarray:
    """The number of True in each column of at most 255 rows, as bytes."""
    across = rows.shape[-1]
    if rows.strides[-1] != 1 or across % 8:
        return rows.view(np.uint8).sum(axis=-2, dtype=np.uint8)
    return rows.view(np.uint64).sum(axis=-2, dtype=np.uint64).view(np.uint8)


def _elsewhere(array: Array, rows: int, columns: int) -> np.ndarray:
    """The same where the array lies, on an accelerator or in another library: only the sums come back."""
    xp = Library.of(array).xp
    *lead, down, across = array.shape
    blocks, tiles = -(-down // rows), -(-across // columns)
    found = np.zeros((*lead, blocks, tiles), np.int64)
    whole_down, whole_across = down // rows * rows, across // columns * columns
    for top, bottom, high in ((0, whole_down, rows), (whole_down, down, down - whole_down)):
        for left, right, wide in ((0, whole_across, columns), (whole_across, across, across - whole_across)):
            if top == bottom or left == right:
                continue
            part = xp.astype(array[..., top:bottom, left:right], xp.int32)
            part = xp.reshape(part, (*lead, (bottom - top) // high, high, (right - left) // wide, wide))
            sums = to_numpy(xp.sum(xp.sum(part, axis=-1), axis=-2))
            first, start = top // rows, left // columns
            found[..., first : first + sums.shape[-2], start : start + sums.shape[-1]] = sums
    return found
