"""An index of batch rows and heads, meaning the same in every array library."""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.core.arrays import Array, Library, is_array, is_traced, to_numpy
from clearhead.core.errors import shown


def indices(index: tuple[Any, ...], rows: Array) -> list[Any]:
    """An index of the leading axes of `rows` (…, T), meaning the same in every library; one for each axis it names."""
    library, lead = Library.of(rows), tuple(rows.shape[:-1])
    given = [i if i is None or i is Ellipsis or isinstance(i, slice) else _places(i) for i in index]
    # by identity: == would ask an array for each of its numbers
    used = sum(0 if i is None or i is Ellipsis else _axes(i) for i in given)
    if used > len(lead):
        raise IndexError(
            f"{used} indices for {len(lead)} leading axes (batch and heads); positions are not indexed here"
        )
    if sum(1 for i in given if i is Ellipsis) > 1:
        raise IndexError("two … in one index, expected at most one")
    chosen: list[Any] = []
    axis = 0
    for i in given:
        if i is Ellipsis:
            chosen += [slice(None)] * (len(lead) - used)
            axis += len(lead) - used
        elif i is None:
            chosen.append(None)
        elif isinstance(i, slice):
            chosen.append(i)
            axis += 1
        else:
            sizes = lead[axis : axis + _axes(i)]
            if i.dtype == bool and i.shape != sizes:
                raise IndexError(f"a boolean index of shape {i.shape} for leading axes of shape {sizes}")
            outside = [] if i.dtype == bool else i[(i < -sizes[0]) | (i >= sizes[0])]
            if len(outside):  # JAX would take the nearest there is
                raise IndexError(
                    f"index {outside[0]} for an axis of {sizes[0]}: expected {-sizes[0]} to {sizes[0] - 1}"
                )
            places = np.nonzero(i) if i.dtype == bool else (i,)
            chosen += [int(one) if one.ndim == 0 else library.asarray(one) for one in places]
            axis += len(sizes)
    return chosen


def _places(index: Any) -> np.ndarray:
    """Positions along an axis, or a choice of them, as NumPy's whole numbers or booleans."""
    if is_traced(index):
        raise IndexError("a traced index, expected numbers")
    try:
        places = to_numpy(index) if is_array(index) else np.asarray(index)
    except ValueError:
        places = np.asarray("ragged")
    if places.size == 0 and not is_array(index):
        return places.astype(np.int64)
    if places.dtype.kind not in "iub" or (places.dtype.kind == "b" and not places.ndim):
        raise IndexError(
            f"{shown(index)} as an index, expected whole numbers, slices, booleans for each row or head, …"
        )
    return places if places.dtype.kind == "b" else places.astype(np.int64)


def _axes(index: Any) -> int:
    """How many axes an index names: booleans as many as they have."""
    return index.ndim if isinstance(index, np.ndarray) and index.dtype == bool else 1
