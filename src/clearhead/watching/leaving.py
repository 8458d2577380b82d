"""What was observed leaves the GPU while the model runs on: into pinned memory, on a stream of its own.

    current stream:  … kernel that observes ─┐                      the model's next kernels …
    copying stream:                          └ wait ─ copies ─ event
    the caller:      goes on at once;                          waits for the event when the numbers are first read

Three things make that right. The copying stream waits for what the current stream has been given so far: nothing is
copied before it is computed. Each source is told of the copying stream (`record_stream`), so that its memory goes to
nobody else before it has been copied, however soon Python lets go of it. And a target is read only after the event.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex, TypeVar, overload

import torch
from torch import Tensor

from clearhead.core.observations import Observed
from clearhead.watching.given import Given

Kind = TypeVar("Kind")
ALIGNED = 16  # bytes, from which on an array of any kind of number may start


def pinned(size: int) -> Tensor:
    """Memory on the host that a GPU can write to by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Leaving:
    """Copies that are under way, of one watch."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.streams: dict[Any, Any] = {}
        self.events: dict[Any, Any] = {}  # after the last copies of each device
        self.arrived: list[Callable[[], None]] = []  # what is to be done once they are there

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same numbers on the host, once `wait` has been called; all of `tensors` are on one GPU."""
        device = tensors[0].device
        tensors = [tensor.contiguous() for tensor in tensors]
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
        room = pinned(max(size, 1))
        found = []
        with self.lock:  # so that the last event is after all copies, whichever thread asked for them
            copying = self.stream(device)
            copying.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(copying):
                for start, tensor in zip(starts, tensors, strict=True):
                    part = room[start : start + tensor.numel() * tensor.element_size()]
                    target = part.view(tensor.dtype).view(tensor.shape)
                    target.copy_(tensor, non_blocking=True)
                    tensor.record_stream(copying)
                    found.append(target)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # PyTorch says nothing of it
            event.record(copying)
            self.events[device] = event
        return found

    def stream(self, device: Any) -> Any:
        """The stream by which a device is left."""
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as above
        return self.streams[device]

    def off(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays as they are to be held: those on a GPU on their way to the host, others there at once.

        Whole numbers go as 32 bits, for positions in sequences fit, and come as they were once they are read.
        """
        away = [a for a in arrays if isinstance(a, Tensor) and a.is_cuda]
        if not away:
            return [a.cpu() if isinstance(a, Tensor) else a for a in arrays]
        hosted = iter(self.take([a.to(torch.int32) if a.dtype == torch.int64 else a for a in away]))
        return [(next(hosted) if a.is_cuda else a.cpu()) if isinstance(a, Tensor) else a for a in arrays]

    def wait(self) -> None:
        """Until all that was taken is there."""
        with self.lock:
            while self.events:
                self.events.popitem()[1].synchronize()
            arrived, self.arrived = self.arrived, []
        for finish in arrived:
            finish()


def widened(array: Any) -> Any:
    """Whole numbers of 32 bits as 64 again."""
    return array.long() if isinstance(array, Tensor) and array.dtype == torch.int32 else array


class Arriving(list[Kind]):
    """A list of what may be still on its way: whoever reads from it waits."""

    def __init__(self, leaving: Leaving) -> None:
        super().__init__()
        self.leaving = leaving

    def __iter__(self) -> Iterator[Kind]:
        self.leaving.wait()
        return super().__iter__()

    @overload
    def __getitem__(self, which: SupportsIndex) -> Kind: ...
    @overload
    def __getitem__(self, which: slice) -> list[Kind]: ...
    def __getitem__(self, which: Any) -> Any:
        self.leaving.wait()
        return super().__getitem__(which)

    def __reversed__(self) -> Iterator[Kind]:
        self.leaving.wait()
        return super().__reversed__()

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def on_its_way(leaving: Leaving, observed: Observed, distance: Any) -> tuple[Observed, Any]:
    """What was observed of a call, on its way to the host."""
    arrays: list[Any] = []

    def note(array: Any) -> Any:
        arrays.append(array)
        return array

    observed.each(note)
    *found, apart = leaving.off([*arrays, distance])
    places = dict(zip(map(id, arrays), found, strict=True))
    moved = observed.each(lambda array: places[id(array)])
    if any(one.dtype != other.dtype for one, other in zip(arrays, found, strict=True)):
        leaving.arrived.append(lambda: vars(moved).update(vars(moved.each(widened))))
    return moved, apart


def ask(leaving: Leaving, given: Given, odd: Callable[[], None]) -> None:
    """Call `odd` when what left is read, if numbers of a call on a GPU, or scores of them, are not finite."""
    norms = torch.stack(torch._foreach_norm([given.q, given.k, given.v], math.inf)).float()
    (found,) = leaving.take([norms])
    features = given.q.shape[-1]
    factor = features / math.sqrt(max(features, 1)) if given.scale is None else features * abs(given.scale)

    def told() -> None:
        q, k, v = found.tolist()
        if not (q * k * factor < torch.finfo(torch.float32).max and math.isfinite(v)):
            odd()

    leaving.arrived.append(told)
