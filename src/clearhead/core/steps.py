"""Which tiles of a mask are empty, mixed or full, as a step function: few numbers, however many tiles there are.

Queries are cut into blocks and keys into tiles. All tiles are counted through, row after row: batch row, head, block of
queries, tile of keys. A step function says from which of them on which of three states holds, until the next one is
named. `&`, `|` and `~` are then the smaller, the larger and the opposite of two states, and cost what there are steps.

>>> cut = Cut(1, 1, 4, 6, 2, 2)                                   # 2 blocks of queries, 3 tiles of keys
>>> left = layered(cut, 1, 1, NOWHERE, (np.array([0, 1]), np.array([0, 0]), np.array([1, 2])))
>>> left.at.tolist(), left.state.tolist()
([0, 1, 3, 5], [2, 0, 2, 0])
>>> (~left).state.tolist()
[0, 2, 0, 2]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

NONE, SOME, ALL = 0, 1, 2  # what queries of a block may see of a tile of keys

# rows, first tiles and the tiles after the last of some runs; rows count through blocks of all heads and batch rows
Places: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
NOWHERE: Places = (np.zeros(0, np.int64),) * 3
_NUMBER, _EMPTY = np.zeros(1, np.int64), np.full(1, NONE, np.uint8)  # joined, where np.append is slow


@dataclass(frozen=True)
class Cut:
    """All pairs of one call in blocks of `rows` queries and tiles of `columns` keys; the last ones may be smaller."""

    batch: int  # all batch axes in one
    heads: int
    queries: int
    keys: int
    rows: int
    columns: int

    @property
    def blocks(self) -> int:
        """How many blocks of queries there are."""
        return -(-self.queries // self.rows)

    @property
    def tiles(self) -> int:
        """How many tiles of keys there are."""
        return -(-self.keys // self.columns)

    def block_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The first query of each block, and the last."""
        first = np.arange(self.blocks, dtype=np.int64) * self.rows
        return first, np.minimum(first + self.rows, self.queries) - 1

    def touched(self, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tiles in which any of the keys start … stop − 1 lie: the first, and the one after the last."""
        start, stop = self._within(start), self._within(stop)
        first = start // self.columns
        return first, np.where(start < stop, -(-stop // self.columns), first)

    def _within(self, keys: np.ndarray) -> np.ndarray:
        return np.minimum(np.maximum(keys, 0), self.keys)  # in a third of the time that NumPy takes to clip a few

    def filled(self, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tiles of which all keys are among start … stop − 1; the last tile ends with the keys."""
        start, stop = self._within(start), self._within(stop)
        first = -(-start // self.columns)
        after = np.where(stop == self.keys, self.tiles, stop // self.columns)
        return first, np.where(start < stop, np.maximum(after, first), first)


@dataclass(frozen=True, eq=False)
class Steps:
    """From tile `at[n]` on the state is `state[n]`; batch rows and heads are 1 where all of them are alike."""

    cut: Cut
    batch: int
    heads: int
    at: np.ndarray  # int64, ascending, the first one 0
    state: np.ndarray  # uint8

    @property
    def plane(self) -> int:
        """How many tiles one head has."""
        return self.cut.blocks * self.cut.tiles

    def __and__(self, other: Steps) -> Steps:
        return self._with(other, np.minimum)

    def __or__(self, other: Steps) -> Steps:
        return self._with(other, np.maximum)

    def __invert__(self) -> Steps:
        return Steps(self.cut, self.batch, self.heads, self.at, ALL - self.state)

    def _with(self, other: Steps, join: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Steps:
        batch, heads = max(self.batch, other.batch), max(self.heads, other.heads)
        one, two = self.spread(batch, heads), other.spread(batch, heads)
        at, mine, theirs = merged(one.at, two.at)
        return settle(self.cut, batch, heads, at, join(one.state[mine], two.state[theirs]))

    def of(self, tiles: np.ndarray) -> np.ndarray:
        """The states of some tiles."""
        return self.state[np.searchsorted(self.at, tiles, side="right") - 1]

    def spread(self, batch: int, heads: int) -> Steps:
        """The same for as many batch rows and heads as another has."""
        if (batch, heads) == (self.batch, self.heads):
            return self
        row, head = np.divmod(np.arange(batch * heads), heads)
        source = (row if self.batch > 1 else 0) * self.heads + (head if self.heads > 1 else 0)
        source = np.broadcast_to(source, batch * heads)
        low = np.searchsorted(self.at, source * self.plane, side="right") - 1
        high = np.searchsorted(self.at, (source + 1) * self.plane)
        which, place = ranges(low, high)
        at = np.maximum(self.at[place] - source[which] * self.plane, 0) + which * self.plane
        return settle(self.cut, batch, heads, at, self.state[place])

    def turned(self) -> Steps:
        """The same with blocks of keys down and tiles of queries across.

        In a column something changes where a block differs from the one above it, so it costs what blocks differ.
        """
        cut, tiles = self.cut, self.cut.tiles
        other = Cut(cut.batch, cut.heads, cut.keys, cut.queries, cut.columns, cut.rows)
        end = self.batch * self.heads * self.plane
        if not end:
            return Steps(other, self.batch, self.heads, self.at[:0], self.state[:0])
        tops = np.arange(self.batch * self.heads) * self.plane  # the first block of each head has nothing above it
        below = self.at[: np.searchsorted(self.at, end - tiles)] + tiles
        at, mine, above = merged(self.at, below)
        at, place, _ = merged(at, _distinct(np.sort(np.concatenate([tops, (tops + tiles)[tops + tiles < end]]))))
        here, over = self.state[mine[place]], self.state[np.maximum(above[place], 0)]
        differs = (here != over) | (at % self.plane < tiles)
        which, tile = ranges(at[differs], np.concatenate([at[1:], _NUMBER + end])[differs])
        row, column = np.divmod(tile, tiles)
        head, block = np.divmod(row, cut.blocks)
        line = head * tiles + column
        order = in_order(line, self.batch * self.heads * tiles)  # blocks ascend as it is
        place = line[order] * cut.blocks + block[order]
        return settle(other, self.batch, self.heads, place, here[differs][which[order]])


def settle(cut: Cut, batch: int, heads: int, at: np.ndarray, state: np.ndarray) -> Steps:
    """A step function of ascending places, those at which nothing changes left out."""
    keep = np.concatenate([_NUMBER, (state[1:] != state[:-1]).nonzero()[0] + 1])[: at.size]
    return Steps(cut, batch, heads, at[keep], state[keep])


def constant(cut: Cut, state: int) -> Steps:
    """One state everywhere."""
    return Steps(cut, 1, 1, np.zeros(1, np.int64), np.array([state], np.uint8))


def layered(cut: Cut, batch: int, heads: int, some: Places, every: Places, times: np.ndarray | None = None) -> Steps:
    """ALL where a row has tiles of `every`, of which any may meet, else SOME where it has of `some`; NONE elsewhere.

    `times`: ALL only where a tile is in `every` that often, a number for each row.
    """
    codes = []
    for layer, (row, start, stop) in enumerate((some, every)):
        held = start < stop
        if not held.all():
            row, start, stop = row[held], start[held], stop[held]
        row = row * cut.tiles
        codes += [(row + start) * 4 + (2 * layer + 1), (row + stop) * 4 + 2 * layer]
    code = np.sort(np.concatenate(codes), kind="stable")  # of a few ascending ones: they are merged
    places = code >> 2
    last = _ends(places)
    level = _DELTA[code & 3].cumsum()[last]  # how many runs of both layers hold from there on
    places = places[last]
    full = level >= _LAYER
    if times is not None:
        full &= level >> 32 == times[np.minimum(places // max(cut.tiles, 1), times.size - 1)]
    state = np.where(full, ALL, level & (_LAYER - 1) != 0).astype(np.uint8)
    if not (places.size and places[0] == 0):
        places, state = np.concatenate([_NUMBER, places]), np.concatenate([_EMPTY, state])
    if places[-1] == max(batch * heads * cut.blocks * cut.tiles, 1):
        places, state = places[:-1], state[:-1]
    return settle(cut, batch, heads, places, state)


_LAYER = 2**32  # how many runs hold: of the first layer below this, of the second above it
_DELTA = np.array([-1, 1, -_LAYER, _LAYER])


def by_block(cut: Cut, states: np.ndarray) -> Steps:
    """A state for each block of queries, whatever the key: (1 or batch, blocks)."""
    at = np.arange(states.size, dtype=np.int64) * cut.tiles
    return _some(cut, len(states), 1, at, states.reshape(-1))


def by_tile(cut: Cut, states: np.ndarray) -> Steps:
    """A state for each tile of keys, whatever the query: (1 or batch, tiles)."""
    batch, tiles = states.shape
    new = np.ones(states.shape, bool)
    np.not_equal(states[:, 1:], states[:, :-1], out=new[:, 1:])
    row, tile = np.nonzero(new)
    first = np.searchsorted(row, np.repeat(np.arange(batch), cut.blocks))
    after = np.searchsorted(row, np.repeat(np.arange(batch), cut.blocks), side="right")
    which, place = ranges(first, after)
    return _some(cut, batch, 1, which * tiles + tile[place], states[row[place], tile[place]])


def by_both(cut: Cut, states: np.ndarray) -> Steps:
    """A state for each tile: (1 or batch, 1 or heads, blocks, tiles)."""
    batch, heads, *_ = states.shape
    flat = states.reshape(-1)
    return _some(cut, batch, heads, np.arange(flat.size, dtype=np.int64), flat)


def _some(cut: Cut, batch: int, heads: int, at: np.ndarray, state: np.ndarray) -> Steps:
    """`settle`, where there may be nothing at all."""
    if not cut.blocks * cut.tiles or not at.size:
        return Steps(cut, batch, heads, np.zeros(1, np.int64), np.zeros(1, np.uint8))
    return settle(cut, batch, heads, at, state.astype(np.uint8))


def ranges(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers low … high − 1 of each pair, one after the other, and which pair each is of.

    >>> which, number = ranges(np.array([3, 7]), np.array([5, 8]))
    >>> which.tolist(), number.tolist()
    ([0, 0, 1], [3, 4, 7])
    """
    count = np.maximum(high - low, 0)
    which = np.arange(count.size).repeat(count)
    return which, np.arange(which.size) + (low - count.cumsum() + count)[which]


def merged(one: np.ndarray, two: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two ascending arrays of distinct numbers as one, and how far each had come there; −1 where it had not begun.

    >>> [part.tolist() for part in merged(np.array([0, 4, 7]), np.array([4, 5]))]
    [[0, 4, 5, 7], [0, 1, 1, 2], [-1, 0, 1, 1]]
    """
    code = np.sort(np.concatenate([one * 2, two * 2 + 1]), kind="stable")  # of two ascending ones: they are merged
    at = code >> 1
    last = _ends(at)
    theirs = (code & 1).cumsum()[last]
    return at[last], last - theirs, theirs - 1


def _ends(ascending: np.ndarray) -> np.ndarray:
    """The last place of each number."""
    change = (ascending[1:] != ascending[:-1]).nonzero()[0]
    return np.concatenate([change, _NUMBER + (ascending.size - 1)])[: ascending.size]


def in_order(numbers: np.ndarray, below: int) -> np.ndarray:
    """The places of numbers from 0 up to `below`, in their order, equal ones as they come."""
    return np.argsort(numbers.astype(np.uint16) if below <= 2**16 else numbers, kind="stable")  # 16 bits are counted


def _distinct(ascending: np.ndarray) -> np.ndarray:
    return ascending[_ends(ascending)]
