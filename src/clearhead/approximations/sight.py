"""What a mask lets queries see, in the two terms that approximations know: which keys there are, and causality."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clearhead.core.arrays import Array
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Alignment, Grid
from clearhead.core.mask import Both, Either, Mask, Not, Where
from clearhead.core.masks import Before, causal_alignment
from clearhead.core.problem import Problem


class Sight(NamedTuple):
    """`keys` (…, S) is True for keys that are there, None where all are; `first` the key position of query 0.

    Where `first` is None every query sees all of them, else each sees those up to its own position.
    """

    keys: Array | None = None
    first: int | None = None

    def reach(self, queries: int, keys: int) -> int:
        """How many of the keys any query sees, counted from the first."""
        return keys if self.first is None else min(max(self.first + queries, 0), keys)


def sight(problem: Problem, method: object, *, causal: str | None = None) -> Sight:
    """The mask of a call in these terms; what cannot be said in them is refused, and `causal` says why that is."""
    found = Sight()
    for part in parts(problem.mask):
        if by_key(part, problem.grid):
            keys = keys_of(part, problem)
            found = found._replace(keys=keys if found.keys is None else found.keys & keys)
            continue
        alignment = causal_alignment(part)
        if alignment is None:
            raise ArgumentError(
                "mask",
                f"{part!r} cannot be honoured by {method!r}: it tells queries apart by more than what comes before"
                " them; causal(), lengths(…) and padding(…) can be, and attention(…) takes every mask",
            )
        if causal is not None:
            raise ArgumentError("mask", f"{part!r} cannot be honoured by {method!r}: {causal}")
        first = start(part, alignment, problem.grid)
        found = found._replace(first=first if found.first is None else min(found.first, first))
    return found


def parts(mask: Mask | None) -> list[Mask]:
    """The masks that `&` joins."""
    if mask is None:
        return []
    return [*parts(mask.left), *parts(mask.right)] if isinstance(mask, Both) else [mask]


def by_key(mask: Mask, grid: Grid) -> bool:
    """True for a mask that says the same to every query."""
    if isinstance(mask, Not):
        return by_key(mask.mask, grid)
    if isinstance(mask, Both | Either):
        return by_key(mask.left, grid) and by_key(mask.right, grid)
    if isinstance(mask, Where):
        return mask.array.shape[-2] == 1 or grid.queries == 1
    return isinstance(mask, Before)


def keys_of(mask: Mask, problem: Problem) -> Array:
    """What such a mask says of each key: (…, S)."""
    grid = problem.grid
    tile = mask.tile(range(1), range(grid.keys), grid)
    if isinstance(tile, bool):
        tile = np.full((1, grid.keys), tile)
    array = problem.library.asarray(tile)[..., 0, :]
    return problem.library.xp.broadcast_to(array, (*array.shape[:-1], grid.keys))


def start(mask: Mask, alignment: Alignment, grid: Grid) -> int:
    """The key position of the first query, the same for all batch rows."""
    if alignment.given is None:
        return alignment.aligned(grid)
    offset = alignment.offset(grid)
    if not isinstance(offset, np.ndarray):
        raise ArgumentError("mask", f"{mask!r} has an offset that is traced, expected a number")
    if offset.size and offset.min() != offset.max():
        raise ArgumentError("mask", f"{mask!r} starts batch rows at different positions, expected one for all")
    return int(offset.reshape(-1)[0]) if offset.size else 0
