"""Observed calls of the compiled kernel of a kind that was seen before: room for what is found, and the kernel."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.arrays import Array, dtype_name
from clearhead.core.asking import QueryWeights
from clearhead.core.observations import OBSERVATIONS, Observed
from clearhead.core.problem import Problem
from clearhead.kernels.extension import at
from clearhead.kernels.prepared import Effort, array_kind, tensor_kind


class Room(NamedTuple):
    """An array of an observation: its shape, whether it holds positions, and what it holds where nobody attends."""

    shape: tuple[int, ...]
    places: bool
    fill: int


@dataclass(frozen=True)
class ObservedAgain:
    """One kind: its native call, the shape of its output, and the arrays of each observation."""

    call: Any
    effort: Effort
    shape: tuple[int, ...]
    wide: bool  # float64
    rooms: tuple[tuple[str, tuple[Room, ...]], ...]

    def __call__(self, q: Array, k: Array, v: Array) -> Observed | None:
        """What is observed of arrays of this kind; None while another thread has the call."""
        library = "numpy" if isinstance(q, np.ndarray) else "torch"
        new = (Arrays if library == "numpy" else Tensors)(self.wide)
        output, rows = new.like(q, self.shape), new.rows((5, *self.shape[:-1]))
        lse, largest, entropy, *_ = new.apart(rows)  # what is left are each row's peak and total
        found = [(name, [new.room(room) for room in rooms]) for name, rooms in self.rooms]
        start, each = new.at(rows), rows.nbytes // 5
        places = [new.at(array) for array in (q, k, v, output)]
        places += [start + row * each for row in (0, 3, 4, 1, 2)]
        places += [new.at(array) for _, arrays in found for array in arrays]
        if not self.call.observe_again(places, *self.effort.settled(library)):
            return None
        more = {name: OBSERVATIONS[name].of(arrays) for name, arrays in found}
        return Observed(output=output, lse=lse, max_score=largest, entropy=entropy, kernel="compiled", **more)


class Arrays:
    """Room in NumPy."""

    def __init__(self, wide: bool) -> None:
        self.dtype = np.float64 if wide else np.float32

    def at(self, array: Any) -> int:
        """Where its numbers lie."""
        return at(array)

    def like(self, q: Array, shape: tuple[int, ...]) -> Any:
        """Room for an output, which has the dtype of the queries."""
        return np.empty(shape, q.dtype)

    def rows(self, shape: tuple[int, ...]) -> Any:
        """Room for numbers that are all written."""
        return np.empty(shape, self.dtype)

    def apart(self, rows: Any) -> Any:
        """An array along its first axis."""
        return rows

    def room(self, room: Room) -> Any:
        """Room for one array of an observation."""
        return np.full(room.shape, room.fill, np.int64) if room.places else np.zeros(room.shape, self.dtype)


class Tensors:
    """Room in PyTorch, on the CPU whatever its default device is."""

    def __init__(self, wide: bool) -> None:
        self.torch = sys.modules["torch"]
        self.dtype = self.torch.float64 if wide else self.torch.float32

    def at(self, tensor: Any) -> int:
        """Where its numbers lie."""
        return int(tensor.data_ptr())

    def like(self, q: Array, shape: tuple[int, ...]) -> Any:
        """Room for an output, which has the dtype of the queries."""
        return q.new_empty(shape)

    def rows(self, shape: tuple[int, ...]) -> Any:
        """Room for numbers that are all written."""
        return self.torch.empty(shape, dtype=self.dtype, device="cpu")

    def apart(self, rows: Any) -> Any:
        """A tensor along its first axis."""
        return rows.unbind(0)

    def room(self, room: Room) -> Any:
        """Room for one array of an observation."""
        if room.places:
            return self.torch.full(room.shape, room.fill, dtype=self.torch.int64, device="cpu")
        return self.torch.zeros(room.shape, dtype=self.dtype, device="cpu")


def observed_again_of(problem: Problem, call: Any, effort: Effort, observed: Observed) -> ObservedAgain | None:
    """How an observed call that has run may run again; None where more than arrays would have to be told."""
    want = problem.want
    if want is None or problem.keeps_unrounded or problem.headless or problem.differentiated:
        return None
    if problem.bias is not None or problem.sinks is not None:  # which lie in arrays of their own
        return None
    rooms = []
    for name in want.names:
        one = OBSERVATIONS[name]
        arrays = one.arrays(getattr(observed, name))
        if isinstance(getattr(want, name), QueryWeights) or not all(part.led for part in one.parts):
            return None
        if any(0 in array.shape for array in arrays):  # of which the native call was not told
            return None
        found = (
            Room(tuple(array.shape), part.positions is not None, part.least if part.positions is not None else 0)
            for array, part in zip(arrays, one.parts, strict=True)
        )
        rooms.append((name, tuple(found)))
    wide = dtype_name(observed.lse) == "float64"
    return ObservedAgain(call, effort, tuple(observed.output.shape), wide, tuple(rooms))


def as_given(problem: Problem, q: Array, k: Array, v: Array) -> bool:
    """Do a problem's arrays lie as those that were given, and not as copies of them in another order or dtype?"""
    kind = array_kind if type(q) is np.ndarray else tensor_kind
    return bool(kind(problem.q, problem.k, problem.v, None, None) == kind(q, k, v, None, None))
