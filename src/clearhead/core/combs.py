"""A mask as combs: keys that lie a step apart, between two limits. Their queries and keys as sequences of their own.

Under `dilated(8)` position 21 sees positions 5, 13 and 21, and whoever of these sees any sees these alone: of eight
sequences of every eighth position each is attended to by itself, causally, and no pair is left out. A band is a comb of
step 1, and `strided(8)` is a band and a comb beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from clearhead.core.grid import Alignment, Grid
from clearhead.core.mask import Both, Either, Mask
from clearhead.core.masks import keys_around
from clearhead.core.sparse_masks import Pattern

MOST = 16  # bands and combs that a mask is made of


class Comb(NamedTuple):
    """Query i sees keys j with low ≤ j − i ≤ high for which step divides j − i − phase."""

    step: int
    phase: int
    low: int
    high: int

    @property
    def empty(self) -> bool:
        """True where no key is between the limits."""
        return self.low > self.high


Combs = tuple[Comb, ...]


def teeth_of(mask: Mask) -> Callable[..., tuple[int, int | None, int | None, int] | None] | None:
    """Where a class of masks itself says it, what gives (step, steps back, steps ahead, position of query 0).

    No limit is None, and so is all of it where the position is not one number. A class that inherits it may mean more.
    """
    found: Any = vars(type(mask)).get("teeth")
    return cast(Callable[..., Any] | None, found)


def combed(mask: Mask) -> bool:
    """Is a mask made of bands and combs alone, and of few enough to be looked at?"""
    left = [mask]
    for _ in range(2 * MOST):
        if not left:
            return True
        one = left.pop()
        if isinstance(one, Both | Either):
            left += [one.left, one.right]
        elif isinstance(one, Pattern):
            left.append(one.meaning())
        elif teeth_of(one) is None:
            return False
    return False


def combs_of(mask: Mask, grid: Grid) -> Combs | None:
    """Combs of which no two have a pair in common, and which have all pairs of a mask; None where it is not made so.

    >>> from clearhead.core.masks import causal
    >>> from clearhead.core.sparse_masks import dilated, strided
    >>> combs_of(causal() & dilated(4, 2, 1), Grid((), 1, 20, 20))
    (Comb(step=4, phase=0, low=-8, high=0),)
    >>> combs_of(strided(4), Grid((), 1, 20, 20))
    (Comb(step=1, phase=0, low=-4, high=0), Comb(step=4, phase=0, low=-19, high=-5))
    """
    if isinstance(mask, Pattern):
        return combs_of(mask.meaning(), grid)
    if isinstance(mask, Both | Either):
        left, right = combs_of(mask.left, grid), combs_of(mask.right, grid)
        if left is None or right is None:
            return None
        return together(left, right) if isinstance(mask, Both) else either(left, right)
    own = teeth_of(mask)
    teeth = None if own is None else own(mask, grid)
    if teeth is None:
        return None
    step, back, ahead, place = teeth
    low = 1 - grid.queries if back is None else max(place - step * back, 1 - grid.queries)
    high = grid.keys - 1 if ahead is None else min(place + step * ahead, grid.keys - 1)
    return some(Comb(step, place % step, low, high))


def some(comb: Comb) -> Combs:
    """A comb, if it has keys at all."""
    return () if comb.empty else (comb,)


def together(left: Combs, right: Combs) -> Combs | None:
    """What both let through."""
    found: Combs = ()
    for one in left:
        for other in right:
            if one.step > 1 and other.step > 1 and one[:2] != other[:2]:
                return None
            step, phase = max(one[:2], other[:2])
            found += some(Comb(step, phase, max(one.low, other.low), min(one.high, other.high)))
    return found


def either(left: Combs, right: Combs) -> Combs | None:
    """What one of them lets through: of each the combs, less what the other has already."""
    found: list[Comb] = []
    for comb in sorted((*left, *right), key=lambda comb: comb.step > 1):  # bands first
        left_over = [comb]
        for known in found:
            if known.step > 1:  # two combs may have teeth in common, here and there
                return None
            left_over = [part for whole in left_over for part in outside(whole, known)]
        found += left_over
    return tuple(found)


def outside(comb: Comb, band: Comb) -> Combs:
    """What of a comb lies on either side of a band."""
    return some(comb._replace(high=min(comb.high, band.low - 1))) + some(
        comb._replace(low=max(comb.low, band.high + 1))
    )


@lru_cache(maxsize=256)
def pairs(comb: Comb, queries: int, keys: int) -> int:
    """How many pairs lie between the limits of a comb, those between its teeth counted."""
    row = np.arange(queries)
    last = np.minimum(row + comb.high, keys - 1)
    return int(np.maximum(last - np.maximum(row + comb.low, 0) + 1, 0).sum())


class Share(NamedTuple):
    """Sequences of one length that a comb falls into: those of the residues from `first` to before `stop`.

    Query i is at place (i + phase) // step of its sequence, key j at j // step; those of this share are the queries
    from place `start` on. `mask` says who sees whom, in places of these.
    """

    first: int
    stop: int
    start: int
    queries: int
    keys: int
    mask: Mask | None


@lru_cache(maxsize=256)
def shares(comb: Comb, queries: int, keys: int) -> tuple[Share, ...]:
    """All sequences of a comb that have queries, those of one length and one mask side by side.

    >>> [share[:5] for share in shares(Comb(4, 0, -8, 0), 10, 10)]
    [(0, 2, 0, 3, 3), (2, 4, 0, 2, 2)]
    """
    step, phase = comb.step, comb.phase
    # in places: step · (key's − query's) + phase is key − query
    low, high = -((phase - comb.low) // step), (comb.high - phase) // step
    found: list[Share] = []
    for residue in range(step):
        start = int(residue < phase)
        count = (queries - 1 + phase - residue) // step - start + 1
        length = (keys - 1 - residue) // step + 1
        sizes = (start, count, length)
        if found and found[-1][2:5] == sizes:
            found[-1] = found[-1]._replace(stop=residue + 1)
        elif count > 0:
            found.append(Share(residue, residue + 1, *sizes, band_of(low + start, high + start, count, length)))
    return tuple(found)


def band_of(low: int, high: int, queries: int, keys: int) -> Mask | None:
    """The band from `low` to `high` after a query's number; None where it holds all pairs.

    As causal masks and windows are written where they can be, for kernels that look for these.
    """
    back = None if low <= 1 - queries else high - low
    if high >= keys - 1:
        return None if back is None else keys_around(-low, None, Alignment("start"))
    return keys_around(back, 0, Alignment("end") if high == keys - queries else Alignment("start", np.asarray(high)))
