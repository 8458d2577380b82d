"""Observations gathered from weights, tile by tile: one definition for the kernels that have no faster one.

A kernel shows each collector every tile of weights that is not empty, rows outermost, and asks for the result at the
end. Nothing is written in place, so that arrays that cannot be written to (JAX) work the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, Library
from clearhead.core.asking import QueryWeights
from clearhead.core.formula import removal
from clearhead.core.grid import bins
from clearhead.core.observations import Map, Rows, Top, Want


class Sizes:
    """What every collector needs to know: library and dtype, leading axes, and the number of queries and keys.

    `values` (…, S, Dv) broadcast to the leading axes. `cut` takes these from an array of (*batch, heads, T, 1), where
    not all of it is worked on; `whole` are then the leading axes of the whole.
    """

    def __init__(
        self,
        library: Library,
        dtype: Any,
        lead: tuple[int, ...],
        queries: int,
        keys: int,
        values: Array = None,
        whole: tuple[int, ...] | None = None,
        cut: Callable[[Array], Array] | None = None,
    ) -> None:
        self.library, self.dtype, self.lead = library, dtype, lead
        self.queries, self.keys = queries, keys
        self.values, self.whole, self.cut = values, lead if whole is None else whole, cut

    def zeros(self, *shape: int) -> Array:
        """Zeros with the leading axes in front."""
        return self.library.zeros((*self.lead, *shape), self.dtype)

    def by_query(self, given: QueryWeights) -> Array:
        """A number for each query, (*lead, T)."""
        array = given.over(self.library, self.dtype, (*self.whole, self.queries))
        return array if self.cut is None else self.cut(array[..., None])[..., 0]


class Collector:
    """Sees weights (…, rows, columns) tile by tile, then gives a result."""

    def __init__(self, sizes: Sizes, wanted: Any) -> None:
        self.sizes, self.xp = sizes, sizes.library.xp

    def begin_rows(self, rows: range, output: Array) -> None:
        """Tiles of these rows come next, whose output before dropout is (…, rows, Dv)."""

    def see(self, weights: Array, rows: range, columns: range) -> None:
        """One tile of weights. Tiles that hold only zeros may be left out."""
        raise NotImplementedError

    def end_rows(self, rows: range) -> None:
        """No more tiles come for these rows."""

    def result(self) -> Any:
        """What was gathered, with the leading axes in front."""
        raise NotImplementedError


class ByKey(Collector):
    """One number for each key, put together from the last `count` queries."""

    def __init__(self, sizes: Sizes, count: int) -> None:
        super().__init__(sizes, count)
        self.first = sizes.queries - count
        self.found: dict[range, Array] = {}

    def see(self, weights: Array, rows: range, columns: range) -> None:
        if rows.stop <= self.first:
            return
        skipped = max(self.first - rows.start, 0)
        self.add(self.of(weights[..., skipped:, :], range(rows.start + skipped, rows.stop), columns), columns)

    def add(self, here: Array, columns: range) -> None:
        """The numbers of some keys, which some queries gave."""
        self.found[columns] = self.both(self.found[columns], here) if columns in self.found else here

    def of(self, weights: Array, rows: range, columns: range) -> Array:
        """The numbers of a tile, (…, columns)."""
        raise NotImplementedError

    def both(self, one: Array, other: Array) -> Array:
        """Those of two tiles of the same keys."""
        return self.added(self.xp, one, other)

    @staticmethod
    def added(xp: Any, one: Array, other: Array) -> Array:
        """What keys got of some pairs and of others."""
        return other + one

    def result(self) -> Array:
        return side_by_side(self.sizes, self.found, ())


class Received(ByKey):
    """How much attention each key received, summed over queries, each of which may have a weight."""

    def __init__(self, sizes: Sizes, counted: int | QueryWeights) -> None:
        super().__init__(sizes, sizes.queries if isinstance(counted, QueryWeights) else counted)
        # (…, T, 1)
        self.by_query = sizes.by_query(counted)[..., None] if isinstance(counted, QueryWeights) else None

    def of(self, weights: Array, rows: range, columns: range) -> Array:
        if self.by_query is not None:
            some = self.by_query[..., rows.start : rows.stop, :]
            # 0 · NaN is NaN, and whoever does not count spoils nothing
            weights = self.xp.where(some == 0, 0.0, weights * some)
        return self.xp.sum(weights, axis=-2)


class ReceivedMax(ByKey):
    """The largest weight that each key received."""

    def of(self, weights: Array, rows: range, columns: range) -> Array:
        return self.xp.max(weights, axis=-2)

    @staticmethod
    def added(xp: Any, one: Array, other: Array) -> Array:
        return xp.maximum(one, other)


class Removal(ByKey):
    """How much outputs would change without each key, squared and summed over queries."""

    def begin_rows(self, rows: range, output: Array) -> None:
        self.output, self.begun = output, rows.start

    def of(self, weights: Array, rows: range, columns: range) -> Array:
        output = self.output[..., rows.start - self.begun : rows.stop - self.begun, :]
        return self.xp.sum(removal(weights, self.values_of(columns), output), axis=-2)

    def values_of(self, columns: range) -> Array:
        """The values of a tile."""
        return self.sizes.values[..., columns.start : columns.stop, :]


class TopKeys(Collector):
    """The `count` largest weights of each query and the keys they belong to."""

    def __init__(self, sizes: Sizes, count: int) -> None:
        super().__init__(sizes, count)
        self.count = count
        self.best: tuple[Array, Array] | None = None
        self.rows: list[tuple[Array, Array]] = []

    def see(self, weights: Array, rows: range, columns: range) -> None:
        some = min(self.count, len(columns))
        values, places = self.sizes.library.largest(weights, some)
        places = places + columns.start
        if self.best is not None:
            values = self.xp.concat([self.best[0], values], axis=-1)
            places = self.xp.concat([self.best[1], self.xp.astype(places, self.best[1].dtype)], axis=-1)
            values, order = self.sizes.library.largest(values, min(self.count, values.shape[-1]))
            places = self.xp.take_along_axis(places, order, axis=-1)
        self.best = (values, places)

    def end_rows(self, rows: range) -> None:
        xp, library = self.xp, self.sizes.library
        found = 0 if self.best is None else self.best[0].shape[-1]
        values, places = [], []
        if self.best is not None:
            values, places = [self.best[0]], [self.best[1]]
        if found < self.count:
            missing = (*self.sizes.lead, len(rows), self.count - found)
            values.append(library.zeros(missing, self.sizes.dtype))
            places.append(library.zeros(missing, places[0].dtype if places else library.asarray(np.arange(1)).dtype))
        weights, indices = xp.concat(values, axis=-1), xp.concat(places, axis=-1)
        # NaN counts as the largest, and a row that holds any has no other
        weights = xp.where(xp.any(xp.isnan(weights), axis=-1, keepdims=True), xp.nan, weights)
        self.rows.append((weights, xp.where(weights > 0, indices, -1)))
        self.best = None

    def result(self) -> Top:
        if not self.rows:
            self.end_rows(range(0))
        return Top(*(self.xp.concat([row[i] for row in self.rows], axis=-2) for i in (1, 0)))


class Pooled(Collector):
    """The mean and the largest weight of each block of a coarse map."""

    def __init__(self, sizes: Sizes, shape: tuple[int, int]) -> None:
        super().__init__(sizes, shape)
        self.row_bins, self.column_bins = bins(sizes.queries, shape[0]), bins(sizes.keys, shape[1])
        self.shape = (len(self.row_bins), len(self.column_bins))
        self.total = self.most = sizes.zeros(*self.shape)

    def see(self, weights: Array, rows: range, columns: range) -> None:
        xp = self.xp
        across, down = list(meeting(self.column_bins, columns)), list(meeting(self.row_bins, rows))
        sums, tops = [], []
        for _, cells in down:  # rows first: what is left for the columns is small
            strip = weights[..., cells.start : cells.stop, :]
            by_key, top = xp.sum(strip, axis=-2), xp.max(strip, axis=-2)
            sums.append(xp.stack([xp.sum(by_key[..., c.start : c.stop], axis=-1) for _, c in across], axis=-1))
            tops.append(xp.stack([xp.max(top[..., c.start : c.stop], axis=-1) for _, c in across], axis=-1))
        corner = (down[0][0], across[0][0])
        self.total = self.total + self._placed(xp.stack(sums, axis=-2), corner)
        self.most = xp.maximum(self.most, self._placed(xp.stack(tops, axis=-2), corner))  # weights are never below 0

    def _placed(self, block: Array, corner: tuple[int, int]) -> Array:
        """The block at its place in a map of zeros."""
        for axis, start in ((-2, corner[0]), (-1, corner[1])):
            before, after = list(block.shape), list(block.shape)
            before[axis], after[axis] = start, self.shape[axis] - start - block.shape[axis]
            zeros = self.sizes.library.zeros
            block = self.xp.concat(
                [zeros(tuple(before), block.dtype), block, zeros(tuple(after), block.dtype)], axis=axis
            )
        return block

    def result(self) -> Map:
        cells = np.outer([len(r) for r in self.row_bins], [len(c) for c in self.column_bins])
        return Map(self.total / self.sizes.library.asarray(cells.reshape(self.shape), self.sizes.dtype), self.most)


class ExactRows(Collector):
    """The whole rows of some queries."""

    def __init__(self, sizes: Sizes, chosen: tuple[int, ...]) -> None:
        super().__init__(sizes, chosen)
        self.chosen = chosen
        self.rows: dict[int, dict[range, Array]] = {i: {} for i in chosen}

    def see(self, weights: Array, rows: range, columns: range) -> None:
        for i in self.rows:
            if i in rows:
                # a copy: a view would keep the whole tile alive
                self.rows[i][columns] = weights[..., i - rows.start, :] + 0.0

    def result(self) -> Rows:
        whole = {i: side_by_side(self.sizes, tiles, ()) for i, tiles in self.rows.items()}
        rows = self.sizes.zeros(0, self.sizes.keys)
        if self.chosen:
            rows = self.xp.stack([whole[i] for i in self.chosen], axis=-2)
        return Rows(np.asarray(self.chosen, dtype=np.int64), rows)


class Matrix(Collector):
    """All the weights: the T×S matrix that is built only for those who ask for it."""

    def __init__(self, sizes: Sizes, wanted: bool) -> None:
        super().__init__(sizes, wanted)
        self.tiles: dict[range, Array] = {}
        self.rows = [sizes.zeros(0, sizes.keys)]

    def see(self, weights: Array, rows: range, columns: range) -> None:
        self.tiles[columns] = weights

    def end_rows(self, rows: range) -> None:
        self.rows.append(side_by_side(self.sizes, self.tiles, (len(rows),)))
        self.tiles = {}

    def result(self) -> Array:
        return self.xp.concat(self.rows, axis=-2)


# by the names in `OBSERVATIONS`: each is made with the sizes of a call and with what `Want` holds under that name
COLLECTORS: dict[str, type[Collector]] = {
    "top": TopKeys,
    "received": Received,
    "received_max": ReceivedMax,
    "removal": Removal,
    "map": Pooled,
    "queries": ExactRows,
    "weights": Matrix,
}


class Gathered:
    """All that was wanted of one set of weights, or those of it that are named."""

    def __init__(self, want: Want, sizes: Sizes, names: Iterable[str] | None = None) -> None:
        chosen = want.names if names is None else names
        self.collectors = {name: COLLECTORS[name](sizes, getattr(want, name)) for name in chosen}

    def begin_rows(self, rows: range, output: Array) -> None:
        """Tell all what these rows give."""
        for collector in self.collectors.values():
            collector.begin_rows(rows, output)

    def see(self, weights: Array, rows: range, columns: range) -> None:
        """Show a tile to all."""
        for collector in self.collectors.values():
            collector.see(weights, rows, columns)

    def end_rows(self, rows: range) -> None:
        """Tell all that these rows are done."""
        for collector in self.collectors.values():
            collector.end_rows(rows)

    def results(self) -> dict[str, Any]:
        """The fields of `Observed` that were wanted."""
        return {name: collector.result() for name, collector in self.collectors.items()}


def meeting(ranges: list[range], part: range) -> Iterator[tuple[int, range]]:
    """The numbers of the ranges that meet `part`, each with the meeting place counted from the start of `part`."""
    for number, whole in enumerate(ranges):
        low, high = max(whole.start, part.start), min(whole.stop, part.stop)
        if low < high:
            yield number, range(low - part.start, high - part.start)


def side_by_side(sizes: Sizes, tiles: dict[range, Array], middle: tuple[int, ...]) -> Array:
    """Column tiles as one array of all keys, zeros where no tile was seen."""
    pieces, done = [], 0
    for columns in sorted(tiles, key=lambda c: c.start):
        if columns.start > done:
            pieces.append(sizes.zeros(*middle, columns.start - done))
        pieces.append(tiles[columns])
        done = columns.stop
    if done < sizes.keys or not pieces:
        pieces.append(sizes.zeros(*middle, sizes.keys - done))
    return sizes.library.xp.concat(pieces, axis=-1)
