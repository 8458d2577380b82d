"""What was attended to, over keys that came in parts: the largest weights and chosen rows out of the first pass, the
attention received, maps and whole matrices in a second look, by each row's denominator over all keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from clearhead.core.arrays import Array
from clearhead.core.observations import Top
from clearhead.distributed.pieces import BY_KEY, Work
from clearhead.kernels.collect import COLLECTORS, ByKey, Pooled, Removal, Sizes
from clearhead.kernels.compiled import compiled
from clearhead.kernels.tally import Ended


def largest(work: Work, candidates: list[tuple[Array, Array]], rows: int, count: int) -> Top:
    """The `count` largest of some weights (…, T, n) and the keys they belong to, filled up with index −1.

    NaN counts as the largest, and a row that holds any has no other.
    """
    xp, library = work.xp, work.library
    missing = library.zeros((*work.lead, rows, count), work.dtype)
    places = library.asarray(np.full((*work.lead, rows, count), -1, dtype=np.int64))
    weights = xp.concat([weights for _, weights in candidates] + [missing], axis=-1)
    indices = xp.concat([xp.astype(indices, places.dtype) for indices, _ in candidates] + [places], axis=-1)
    weights, order = library.largest(weights, count)
    indices = xp.take_along_axis(indices, order, axis=-1)
    weights = xp.where(xp.any(xp.isnan(weights), axis=-1, keepdims=True), xp.nan, weights)
    return Top(xp.where(weights > 0, indices, -1), weights)


def top_of(work: Work, ended: Ended, count: int) -> Top:
    """The largest weights of each query, from the largest of each part."""
    found = []
    for number, run, here in work.queries():
        end = work.of_run(ended, here)
        candidates = [
            (top.indices, top.weights * end.share(work.xp, peak, total, work.unit)[..., None])
            for top, peak, total in work.tops[number]
        ]
        found.append(largest(work, candidates, len(run), count))
    if not found:
        return largest(work, [], 0, count)
    return Top(*(work.xp.concat([part[place] for part in found], axis=-2) for place in (0, 1)))


def rows_of(work: Work, ended: Ended, chosen: tuple[int, ...]) -> Array:
    """The weights (…, chosen, S) of the chosen queries that are here, zeros for those that are not."""
    whole = work.library.zeros((*work.lead, len(chosen), work.whole.grid.keys), work.dtype)
    for number, run, here in work.queries():
        end = work.of_run(ended, here)
        mine = [place for place, i in enumerate(chosen) if i in run]
        local = [chosen[place] - run.start for place in mine]
        for columns, weights, peak, total in work.rows[number]:
            share = end.share(work.xp, peak, total, work.unit)
            for order, (place, i) in enumerate(zip(mine, local, strict=True)):
                row = weights[..., order, :]
                # a weight that the mask hides is 0, also in a row that is NaN by another part
                row = work.xp.where(row == 0, 0.0, row * share[..., i, None])
                whole = written(whole, (..., place, slice(columns.start, columns.stop)), row)
    return whole


def written(array: Array, where: Any, part: Array) -> Array:
    """An array with a part of it written: JAX's are never changed, and come back anew."""
    if hasattr(array, "at"):
        return array.at[where].set(part)
    array[where] = part
    return array


class RemovalOfParts(Removal):
    """How much outputs would change without each key, where no more values are at hand than those of a tile."""

    values: Array

    def values_of(self, columns: range) -> Array:
        return self.values


class Look:
    """The second look: what each key got (…, S) and sums of a map (…, rows, columns) from the queries here."""

    def __init__(self, work: Work, ended: Ended) -> None:
        self.work, self.ended = work, ended
        want, grid = work.whole.want, work.whole.grid
        assert want is not None
        self.want = want
        heads = (work.key_heads, len(work.whole.heads) // work.key_heads if work.key_heads else 1)
        lead = (*grid.batch, *heads)
        some = work.whole.heads
        sizes = Sizes(
            work.library, work.dtype, lead, grid.queries, grid.keys, whole=(*grid.batch, grid.heads),
            cut=lambda array: work.xp.reshape(array[..., some.start : some.stop, :, :], (*lead, *array.shape[-2:])),
        )  # fmt: skip
        self.sizes = sizes
        collectors: dict[str, Any] = {**COLLECTORS, "removal": RemovalOfParts}
        self.by_key: dict[str, ByKey] = {
            name: collectors[name](sizes, getattr(want, name)) for name in BY_KEY if getattr(want, name) is not None
        }
        self.map = None if want.map is None else Pooled(sizes, want.map)
        count = sum(map(len, work.runs))
        self.weights = None
        if want.weights:
            self.weights = work.library.zeros((*work.lead, count, grid.keys), work.dtype)

    def see(self, columns: range, k: Array, v: Array) -> None:
        """Some keys once more."""
        if self.work.kernel is compiled:
            self.see_at_once(columns, k, v)
            return
        for seen in self.work.tiles(columns, k, v, self.ended):
            for collector in self.by_key.values():
                if isinstance(collector, RemovalOfParts):
                    collector.values = seen.slab.v[..., seen.columns.start : seen.columns.stop, :]
                    collector.begin_rows(seen.queries, seen.slab.cut(self.ended.output[..., seen.lies, :]))
                collector.see(seen.weights, seen.queries, seen.keys)
            if self.map is not None:
                self.map.see(seen.weights, seen.queries, seen.keys)
            if self.weights is not None:
                where = (..., seen.lies, slice(seen.keys.start, seen.keys.stop))
                self.weights = written(self.weights, where, self.shaped(seen.weights, 2))

    def see_at_once(self, columns: range, k: Array, v: Array) -> None:
        """The same by a kernel that weighs and sums whole pieces."""
        xp, lead = self.work.xp, self.sizes.lead
        for here, found in self.work.weighed(columns, k, v, self.ended):
            for name, collector in self.by_key.items():
                if name in found:
                    collector.add(xp.reshape(found[name], (*lead, len(columns))), columns)
            if self.map is not None:
                total, most = (xp.reshape(part, (*lead, *part.shape[-2:])) for part in found["map"])
                self.map.total, self.map.most = self.map.total + total, xp.maximum(self.map.most, most)
            if self.weights is not None:
                self.weights[..., here, columns.start : columns.stop] = found["weights"]

    def shaped(self, array: Array, trailing: int) -> Array:
        """With the leading axes (*batch, heads)."""
        return self.work.xp.reshape(array, (*self.work.lead, *array.shape[array.ndim - trailing :]))

    def sums(self) -> dict[str, Any]:
        """What these queries add: what each key got, by name, and `map` as (sums, largest)."""
        found: dict[str, Any] = {name: self.shaped(one.result(), 1) for name, one in self.by_key.items()}
        if self.map is not None:
            found["map"] = (self.shaped(self.map.total, 2), self.shaped(self.map.most, 2))
        return found
