"""What was observed leaves the GPU while the model runs on: into pinned memory, on a stream of its own, in loads.

    current stream:  … kernel that observes … and another ─┐                      the model's next kernels …
    copying stream:                                        └ wait ─ copies ─ event
    the caller:      goes on at once;                                   waits for the event when they are read

Small arrays wait for each other on the GPU, up to `LOAD` bytes, and go as one: a copy costs the host as much as a small
kernel, and a model makes hundreds. Three things make that right. The copying stream waits for what the streams that
computed have been given so far: nothing is copied before it is computed. The memory of a source goes to nobody else
before it has been copied, however soon Python lets go of it: small ones are held on to until the event, and large ones
are told of the copying stream (`record_stream`), which the allocator then waits for. And a target is read only after
the event.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, TypeVar, overload

import torch
from torch import Tensor

from clearhead.core.observations import Observed
from clearhead.watching.again import Pending
from clearhead.watching.given import Given

Kind = TypeVar("Kind")
# takes what arrays become on the host, when they leave, and may say what is to be done once their numbers are there
Takes = Callable[[list[Tensor]], Callable[[], None] | None]
LOAD = 16 * 2**20  # bytes that wait on a GPU, at most, before they leave
SMALL = 2 * 2**20  # bytes of an array that is put beside others before it is copied


# the address of a device's current stream, in a tenth of the time that the stream itself takes
stream_of: Callable[[int], Any] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: None)


def pinned(count: int, dtype: torch.dtype) -> Tensor:
    """Memory on the host that a GPU can write to by itself."""
    return torch.empty(count, dtype=dtype, pin_memory=True)


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


@dataclass
class Load:
    """Arrays of one GPU that leave together, in parcels: those of one owner each."""

    parcels: list[tuple[int, Takes]] = field(default_factory=list)  # how many arrays, and who takes them
    played: list[Pending] = field(default_factory=list)  # more of them, of calls that were played
    tensors: list[Tensor] = field(default_factory=list)
    streams: list[Any] = field(default_factory=list)  # by which they were computed
    known: set[Any] = field(default_factory=set)  # the same, by their addresses
    size: int = 0

    def add(self, tensors: Sequence[Tensor], takes: Takes, stream: Any) -> None:
        """One more parcel."""
        self.parcels.append((len(tensors), takes))
        self.tensors.extend(tensors)
        self.size += sum(map(size_of, tensors))
        self.by(stream)

    def by(self, stream: Any) -> None:
        """A stream that has computed some of it."""
        if stream not in self.streams:
            self.streams.append(stream)

    def complete(self) -> None:
        """What played calls have becomes parcels, too."""
        for one in self.played:
            tensors = one.parcel()
            self.parcels.append((len(tensors), one.arrived))
            self.tensors.extend(tensors)

    def copied(self, copying: Any) -> list[Tensor]:
        """The same numbers on the host, once the copying stream has come so far; whole numbers as 32 bits."""
        places: dict[torch.dtype, list[int]] = {}
        found = list(self.tensors)
        for place, tensor in enumerate(found):
            if size_of(tensor) <= SMALL:
                places.setdefault(tensor.dtype, []).append(place)
            else:
                tensor.record_stream(copying)
                found[place] = sent(tensor.reshape(-1)).view(tensor.shape)
        for small in places.values():
            rows = [found[place] if found[place].ndim == 1 else found[place].reshape(-1) for place in small]
            parts = torch.split(sent(torch.cat(rows)), [len(row) for row in rows])
            for place, part in zip(small, parts, strict=True):
                found[place] = part if found[place].ndim == 1 else part.view(found[place].shape)
        return found


def sent(flat: Tensor) -> Tensor:
    """A row of numbers on its way to the host; whole numbers as 32 bits: positions in sequences fit."""
    if flat.dtype == torch.int64:
        flat = flat.to(torch.int32)
    target = pinned(flat.numel(), flat.dtype)
    target.copy_(flat, non_blocking=True)
    return target


class Leaving:
    """What is under way, of one watch."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: dict[Any, Any] = {}
        self.loads: dict[Any, Load] = {}  # of each device, not yet gone
        self.events: dict[Any, Any] = {}  # after the last copies of each device
        self.held: list[tuple[Any, list[Tensor]]] = []  # what is copied until an event
        self.finishing: list[Callable[[], None]] = []  # what is to be done once they are there

    def send(self, tensors: Sequence[Tensor], takes: Takes) -> None:
        """Take tensors of one GPU to the host; `takes` is given them as they leave, before their numbers are there."""
        device = tensors[0].device
        with self.lock:
            load = self.loads.setdefault(device, Load())
            load.add(tensors, takes, torch.cuda.current_stream(device))
            if load.size >= LOAD:
                self._leave(device)

    def send_played(self, pending: Pending) -> None:
        """The same of a call that was played: one of hundreds, for which all that can wait is done when they leave."""
        device = pending.arrays.device
        with self.lock:
            load = self.loads.get(device)
            if load is None:
                load = self.loads[device] = Load()
            load.played.append(pending)
            load.size += pending.kind.packed.size + (0 if pending.output is None else size_of(pending.output))
            stream = stream_of(device.index)
            if stream not in load.known:
                load.known.add(stream)
                load.by(torch.cuda.current_stream(device))
            if load.size >= LOAD:
                self._leave(device)

    def at_once(self, tensor: Any) -> Any:
        """One array on its way to the host, and all that was to go with it; one that is there as it is."""
        if not isinstance(tensor, Tensor) or not tensor.is_cuda:
            return tensor
        found: list[Tensor] = []
        with self.lock:
            self.send([tensor], found.extend)
            self.leave()
        return found[0]

    def leave(self) -> None:
        """Let all go that waits for more."""
        with self.lock:
            for device in list(self.loads):
                self._leave(device)

    def _leave(self, device: Any) -> None:
        load = self.loads.pop(device)
        load.complete()
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # PyTorch says nothing
        copying = self.streams[device]
        for stream in load.streams:
            copying.wait_stream(stream)
        with torch.cuda.stream(copying):
            found = iter(load.copied(copying))
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
        event.record(copying)
        self.events[device] = event
        self.held = [(until, small) for until, small in self.held if not until.query()]
        self.held.append((event, [tensor for tensor in load.tensors if size_of(tensor) <= SMALL]))
        for count, takes in load.parcels:
            finish = takes([next(found) for _ in range(count)])
            if finish is not None:
                self.finishing.append(finish)

    def wait(self) -> None:
        """Until all that was sent is there."""
        if not (self.loads or self.events or self.finishing):
            return
        with self.lock:  # whoever comes second waits here until all is done
            self.leave()
            while self.events:
                self.events.popitem()[1].synchronize()
            self.held = []
            while self.finishing:
                self.finishing.pop(0)()


def widened(array: Any) -> Any:
    """Whole numbers of 32 bits as 64 again."""
    return array.long() if isinstance(array, Tensor) and array.dtype == torch.int32 else array


class Arriving(list[Kind]):
    """A list of what may be still on its way: whoever reads from it waits."""

    def __init__(self, leaving: Leaving) -> None:
        super().__init__()
        self.leaving = leaving
        self.settled = 0  # so many of them are what they are to be

    def settle(self) -> None:
        """Wait until all is there, and make of it what it is to be."""
        self.leaving.wait()
        while self.settled < len(self):
            one: Any = super().__getitem__(self.settled)
            if isinstance(one, Pending):
                made: Any = one.call()
                super().__setitem__(self.settled, made)
            self.settled += 1

    def __iter__(self) -> Iterator[Kind]:
        self.settle()
        return super().__iter__()

    @overload
    def __getitem__(self, which: SupportsIndex) -> Kind: ...
    @overload
    def __getitem__(self, which: slice) -> list[Kind]: ...
    def __getitem__(self, which: Any) -> Any:
        self.settle()
        return super().__getitem__(which)

    def __reversed__(self) -> Iterator[Kind]:
        self.settle()
        return super().__reversed__()

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def on_its_way(leaving: Leaving, value: Observed) -> Observed:
    """What was observed of a call, on its way to the host: its arrays are exchanged in it when they leave."""
    arrays: list[Any] = []

    def note(array: Any) -> Any:
        arrays.append(array)
        return array

    mine = value.each(note)
    narrow = any(array.dtype == torch.int64 for array in arrays)

    def takes(found: list[Tensor]) -> Callable[[], None] | None:
        hosted = iter(found)
        become(mine, mine.each(lambda array: next(hosted)))  # in the same order
        return (lambda: become(mine, mine.each(widened))) if narrow else None

    leaving.send(arrays, takes)
    return mine


def become(one: Any, other: Any) -> None:
    """One value becomes what another is. Nobody has read it before."""
    vars(one).update(vars(other))


class Doubted:
    """Tells a watch of a module that was given numbers which are not finite; what leaves does not keep it alive."""

    def __init__(self, recorder: Any) -> None:
        self.recorder, self.missed = weakref.ref(recorder), recorder.seen.missed

    def __call__(self, name: str) -> None:
        recorder = self.recorder()
        why = "its numbers are not finite, and the model went on with clearhead's result of them"
        if recorder is not None:
            recorder.careful = True
            recorder.refused.setdefault(name, why)  # who closes the watch says it again
        self.missed.setdefault(name, why)


def ask(leaving: Leaving, given: Given, odd: Callable[[], None]) -> None:
    """Call `odd` when what left is read, if numbers of a call on a GPU, or scores of them, are not finite."""
    features = given.q.shape[-1]
    factor = features / math.sqrt(max(features, 1)) if given.scale is None else features * abs(given.scale)

    def takes(norms: list[Tensor]) -> Callable[[], None]:
        def told() -> None:
            q, k, v = (float(norm) for norm in norms)
            if not (q * k * factor < torch.finfo(torch.float32).max and math.isfinite(v)):
                odd()

        return told

    leaving.send(torch._foreach_norm([given.q, given.k, given.v], math.inf), takes)
