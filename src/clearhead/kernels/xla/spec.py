"""A call as a compiled program holds it: sizes, options and the mask's nodes as values; arrays are its operands.

`numbers` writes it out for `native/described.cpp`, which reads it in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.arrays import HALF
from clearhead.core.grid import Grid
from clearhead.core.observations import OBSERVATIONS, Want
from clearhead.core.once import once
from clearhead.kernels.prepared import worth

# kinds of a node's fields, as in native/described.cpp: a number that is known, or the next operand
NUMBER, NUMBERS, ROWS, TRUTHS = 0, 1, 2, 3
# kinds of a bias
NONE, BY_PAIR, BY_DISTANCE = 0, 1, 2


class NodeSpec(NamedTuple):
    """One node of a mask; `fields` are (NUMBER, value) or (kind,), whose numbers are an operand."""

    kind: int
    left: int
    right: int
    constant: int
    fields: tuple[tuple[int, ...], ...]
    array: bool


class Room(NamedTuple):
    """One result: its axes, its type, and what is there where nobody attends to anything."""

    shape: tuple[int, ...]
    dtype: Any
    fill: int = 0


@dataclass(frozen=True)
class Spec:
    """All of a call but its arrays. Operands are q, k, v, and what `roles` lists after them.

    An operand has the call's batch axes in front, whole or of size one, unless it is one for all batch rows: then its
    role is False.
    """

    grid: Grid
    key_heads: int
    features: int
    width: int
    dtype: str
    scale: float | None  # None: an operand
    softcap: float | None
    sinks: bool
    bias: tuple[int, ...]  # its kind; by distance also how many there are, and which of them is 0
    nodes: tuple[NodeSpec, ...]
    want: Want | None
    wide_positions: bool  # JAX has 64 bits
    unrounded: bool
    weighted: str | None = None  # the observation in which queries count as much as an operand says, the last of them
    lent: Any = None  # who runs it instead of the compiled kernel (`lending.py`), if somebody does

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch axes."""
        return self.grid.batch

    @once
    def roles(self) -> tuple[bool, ...]:
        """Of each operand, whether it has batch axes."""
        roles = [True] * 3 + [False] * (self.scale is None) + [False] * self.sinks
        roles += {NONE: [], BY_PAIR: [True], BY_DISTANCE: [False, True]}[self.bias[0]]
        for node in self.nodes:
            roles += [True] * (sum(kind != NUMBER for kind, *_ in node.fields) + node.array)
        return tuple(roles + [True] * (self.weighted is not None))

    @property
    def place_of_scale(self) -> int | None:
        """Which operand the scale is."""
        return 3 if self.scale is None else None

    @property
    def place_of_sinks(self) -> int | None:
        """Which operand the sinks are."""
        return 3 + (self.scale is None) if self.sinks else None

    @property
    def place_of_bias(self) -> int | None:
        """Which operand the bias array, or its numbers by distance, are."""
        return None if self.bias[0] == NONE else 3 + (self.scale is None) + self.sinks

    @property
    def precise(self) -> Any:
        """The type that sums are taken in."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    def over(self, size: int) -> Spec:
        """The same with one more batch axis in front."""
        return replace(self, grid=replace(self.grid, batch=(size, *self.batch)))

    def exactly(self) -> Spec:
        """The same, its output in the precision of its sums."""
        return replace(self, unrounded=True)

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes that every result begins with."""
        return (*self.batch, self.grid.heads)

    def rooms(self, dtype: Any) -> list[Room]:
        """The results of the forward pass, in order; `dtype` is that of q."""
        row = Room((*self.lead, self.grid.queries), self.precise)
        output = Room((*row.shape, self.width), self.precise if self.unrounded else dtype)
        found = [output, row, row, row]
        if self.want is not None:
            found += [row, row]
            for rooms in self.asked().values():
                found += rooms
        return found

    def asked(self) -> dict[str, list[Room]]:
        """The arrays of each observation that is wanted."""
        if self.want is None:
            return {}
        found = {}
        for name in self.want.names:
            one, wanted = OBSERVATIONS[name], getattr(self.want, name)
            sizes = {"queries": self.grid.queries, "keys": self.grid.keys}
            if one.sizes is not None:
                sizes.update(one.sizes(wanted, self.grid))
            places = np.dtype(np.int64 if self.wide_positions else np.int32)
            found[name] = [
                Room(
                    (*self.lead, *(sizes[axis] for axis in part.axes)),
                    self.precise if part.positions is None else places,
                    0 if part.positions is None else part.least,
                )
                for part in one.parts
                if part.led
            ]
        return found

    @property
    def work(self) -> int:
        """Multiply-adds of the forward pass, were every pair allowed."""
        grid = self.grid
        return math.prod(self.batch) * grid.heads * grid.queries * grid.keys * (self.features + self.width)

    @property
    def wanted_threads(self) -> int:
        """How many threads are worth it."""
        columns, item = self.features + self.width, 2 if self.dtype in HALF else self.precise.itemsize
        read = math.prod(self.batch) * self.key_heads * self.grid.keys * columns * item
        return max(worth(self.work, read), 1)

    def numbers(self, *, back: bool, with_lse: bool = False) -> tuple[int, ...]:
        """The call in whole numbers."""
        grid = self.grid
        found = [int(back), len(self.batch), *self.batch]
        found += [grid.heads, self.key_heads, grid.queries, grid.keys, self.features, self.width]
        found += [int(self.dtype == "float64"), int(self.unrounded), self.wanted_threads]
        found += [int(with_lse), int(self.scale is None)]
        found += [int(self.sinks), *self.bias, len(self.nodes)]
        for node in self.nodes:
            found += [node.kind, node.left, node.right, node.constant, len(node.fields)]
            found += [number for field in node.fields for number in field]
            found.append(int(node.array))
        found.append(0 if self.weighted is None else 1 + list(self.asked()).index(self.weighted))
        if not back:
            asked = self.asked()
            found += [int(self.want is not None), len(asked)]
            for name, rooms in asked.items():
                wanted = getattr(self.want, name)
                numbers = wanted if isinstance(wanted, tuple) else (int(wanted),)
                found += [len(name), *map(ord, name), len(numbers), *numbers, len(rooms)]
                found += [room.fill for room in rooms]
        return tuple(found)
