"""Attention over keys that come in parts: sums that grow part by part, in the precision of sums.

Each row has a peak in the unit of the kernel that ran: `compiled` keeps products that are not scaled yet, the others
scores. Parts are moved to a common peak before the unit is applied, so that scores of 10⁴ lose no digits.
"""

from __future__ import annotations

from typing import Any

from clearhead.core.arrays import Array, Library
from clearhead.core.formula import share_of
from clearhead.core.partial import Sums
from clearhead.kernels.contract import Ran


class Tally:
    """Sums of some queries over the keys so far: peak, total (…, T), values (…, T, Dv), and what is observed of rows.

    `weighted` is Σ e·(score − peak) in nats, and `largest` the largest score, both None where nothing is observed.
    """

    def __init__(
        self, library: Library, lead: tuple[int, ...], rows: int, width: int, dtype: Any, unit: float, observed: bool
    ) -> None:
        self.library, self.xp, self.unit = library, library.xp, unit
        zero = library.zeros((*lead, rows), dtype)
        self.peak, self.total = zero - self.xp.inf, zero
        self.values = library.zeros((*lead, rows, width), dtype)
        self.weighted = zero if observed else None
        self.largest = self.peak if observed else None

    def add(self, ran: Ran) -> None:
        """What a kernel found over some more keys."""
        total, entropy = ran.total, ran.observed.entropy
        weighted = None
        if self.weighted is not None and entropy is not None:
            # entropy = ln total − weighted / total
            some = total != 0
            weighted = self.xp.where(some, total * (self.xp.log(self.xp.where(some, total, 1.0)) - entropy), 0.0)
        values = self.library.computing(ran.precise) * total[..., None]
        self.merge(ran.peak, total, values, weighted, ran.observed.max_score)

    def merge(
        self, peak: Array, total: Array, values: Array, weighted: Array | None = None, largest: Array | None = None
    ) -> None:
        """Sums over some more keys, relative to a peak of their own."""
        xp = self.xp
        top = xp.maximum(self.peak, peak)
        # a query that saw nothing yet has a peak of −inf: shift by 0, so that −inf − −inf never happens
        shift = xp.where(top == -xp.inf, 0.0, top)
        mine, theirs = self._apart(self.peak, shift), self._apart(peak, shift)
        old, new = xp.exp(mine), xp.exp(theirs)
        if self.weighted is not None and weighted is not None:
            self.weighted = old * (self.weighted + self.total * xp.where(old == 0, 0.0, mine)) + new * (
                weighted + total * xp.where(new == 0, 0.0, theirs)
            )
        if self.largest is not None and largest is not None:
            self.largest = xp.maximum(self.largest, largest)
        self.values = self.values * old[..., None] + values * new[..., None]
        self.total = self.total * old + total * new
        self.peak = top

    def _apart(self, peak: Array, shift: Array) -> Array:
        """peak − shift in nats; of infinite peaks no distance."""
        xp = self.xp
        infinite = peak == xp.inf
        return xp.where(infinite, 0.0, xp.where(infinite, 0.0, peak) - shift) * self.unit

    def ended(self, sinks: Array | None) -> Ended:
        """The answer for these queries; a sink (heads, 1) joins the denominator."""
        xp = self.xp
        nats = Sums(self.peak * self.unit, self.total, self.values, self.weighted)
        whole = nats.divided(sinks)
        peak, total = self.peak, self.total
        if sinks is not None:
            logit = sinks / self.unit
            peak = xp.maximum(self.peak, logit)
            shift = xp.where(peak == -xp.inf, 0.0, peak)
            total = self.total * xp.exp((self.peak - shift) * self.unit) + share_of(sinks, shift * self.unit)
        return Ended(whole.output, whole.lse, peak, total, self.largest, whole.entropy)


class Ended:
    """What some queries end with: output unrounded, log-sum-exp, and the denominators in the kernel's unit."""

    def __init__(
        self, output: Array, lse: Array, peak: Array, total: Array, largest: Array | None, entropy: Array | None
    ) -> None:
        self.output, self.lse, self.peak, self.total = output, lse, peak, total
        self.largest, self.entropy = largest, entropy

    def share(self, xp: Any, peak: Array, total: Array, unit: float) -> Array:
        """What a weight relative to a part of the keys, with that peak and total, is multiplied with."""
        none = (peak == -xp.inf) | (self.total == 0)
        apart = xp.where(none, 0.0, peak) - xp.where(none, 0.0, self.peak)
        return xp.where(none, 0.0, total * xp.exp(apart * unit) / xp.where(self.total == 0, 1.0, self.total))
