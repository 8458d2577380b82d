"""Where keys come from that are never all here: chunks of an iterator, or stretches of anything that has slices.

The next chunk is read, and sent to where the queries are, by a thread of its own while the last one is worked on.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, Library, dtype_name, is_array, is_torch
from clearhead.core.errors import ArgumentError, first_line, shown
from clearhead.distributed.disk import DiskArray, on_disk
from clearhead.distributed.mapped import Mapped, is_mapped
from clearhead.distributed.shuttle import Shuttle

# bytes of keys and values in a chunk, unless said otherwise: what fits caches, and for a GPU what hides its launches
CHUNK, CHUNK_ON_GPU = 32 * 2**20, 128 * 2**20
# chunks of a file that are in memory at a time: one is worked on, one waits, one is read, and one is to spare
ROOMS = 4

Pair = tuple[Array, Array]


class Source:
    """Keys and values in chunks: how many there are if that is known, and each with the position of its first key."""

    def __init__(self, keys: int | None, again: bool, start: Callable[[], Iterator[tuple[int, Pair]]]) -> None:
        self.keys, self.again, self.start = keys, again, start


def source_of(given: Any, keys: int | None, chunk: int | None, bytes_each: int = CHUNK) -> Source:
    """What a caller gives for keys: (k, v) that have slices, a list of such pairs, or chunks.

    Of what has slices `chunk` positions are taken at a time, or as many as `bytes_each` are.
    """
    for name, value, least in (("keys", keys, 0), ("chunk", chunk, 1)):
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and not (whole and value >= least):
            raise ArgumentError(name, f"is {shown(value)}, expected a whole number of at least {least}, or None")
    if isinstance(given, tuple | list):
        pairs = [given] if isinstance(given, tuple) and _is_pair(given) else given
        if not pairs or not all(map(_is_pair, pairs)):
            raise ArgumentError(
                "source", "is not (k, v) nor a list of such pairs, expected in each what has a shape and slices"
            )
        found = _stretches([tuple(map(_opened, pair)) for pair in pairs], chunk, bytes_each)
        if keys is not None and keys != found.keys:
            raise ArgumentError("keys", f"is {keys:,}, and source has {found.keys:,}")
        return found
    if callable(given) or (isinstance(given, Iterable) and not _sliced(given) and not isinstance(given, str)):
        return Source(keys, callable(given), lambda: _chunks(given() if callable(given) else given))
    raise ArgumentError(
        "source", f"is a {type(given).__name__}, expected (k, v), a list of such pairs, or chunks (k, v) one by one"
    )


def _is_pair(pair: Any) -> bool:
    """True for (k, v) of what can be read by stretches."""
    return isinstance(pair, tuple | list) and len(pair) == 2 and all(_sliced(a) or _is_path(a) for a in pair)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _opened(part: Any) -> Any:
    """What can be read by stretches; of a path the array that lies there."""
    return on_disk(part) if _is_path(part) else part


def _sliced(value: Any) -> bool:
    """True for what says its shape and gives stretches: arrays, files, zarr, h5py."""
    return hasattr(value, "shape") and hasattr(value, "__getitem__") and len(value.shape) >= 2


def _stretches(pairs: list[Any], chunk: int | None, bytes_each: int) -> Source:
    for number, (k, v) in enumerate(pairs):
        if k.shape[-2] != v.shape[-2]:
            raise ArgumentError("source", f"has {k.shape[-2]} keys and {v.shape[-2]} values in pair {number}")
    total = sum(int(k.shape[-2]) for k, _ in pairs)

    def start() -> Iterator[tuple[int, Pair]]:
        first = 0
        for k, v in pairs:
            length = int(k.shape[-2])
            step = chunk or max(1, bytes_each // max(1, _row_bytes(k) + _row_bytes(v)))
            keys, values = (_reader(part, step) for part in (k, v))
            # both at once: a disk is never left waiting
            with ThreadPoolExecutor(1, "clearhead-values") as beside:
                for low in range(0, max(length, 1), step):  # of no keys, too, one learns what they are like
                    high = min(low + step, length)
                    other = beside.submit(values, low, high)
                    yield first + low, (keys(low, high), other.result())
            first += length

    return Source(total, True, start)


def _reader(array: Any, step: int) -> Callable[[int, int], Any]:
    """How stretches are read: of a file into the same memory in turn, past the cache or the next one announced."""
    step = min(step, array.shape[-2])
    shape = (*array.shape[:-2], step, array.shape[-1])
    if is_mapped(array):
        mapped, copies = Mapped(array), itertools.cycle([np.empty(shape, array.dtype) for _ in range(ROOMS)])
        return lambda low, high: mapped.read(low, high, next(copies))
    if not isinstance(array, DiskArray):
        return partial(_slice, array)
    places = [place for place in (array.room(step) for _ in range(ROOMS)) if place is not None]
    if places:
        aligned = itertools.cycle(places)
        return lambda low, high: array.read_past(low, high, next(aligned))
    rooms = itertools.cycle([np.empty(shape, array.dtype) for _ in range(ROOMS)])

    def read(low: int, high: int) -> np.ndarray:
        array.expect(high, min(high + step, array.shape[-2]))
        return array.read(low, high, next(rooms) if high - low == step else None)

    return read


def _slice(array: Any, low: int, high: int) -> Any:
    """Positions low … high of anything that has slices; what goes wrong there is said with what it is."""
    try:
        return array[..., low:high, :]
    except Exception as error:
        raise ArgumentError(
            "source", f"cannot read {_name(array)} at {low:,} to {high:,}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _name(array: Any) -> str:
    """What says where an array lies: h5py's and zarr's know that, and others may."""
    where = getattr(array, "filename", None) or getattr(getattr(array, "file", None), "filename", None)
    where = where or getattr(array, "store_path", None) or getattr(array, "store", None)
    name = getattr(array, "name", None) or getattr(array, "path", None)
    parts = [str(part) for part in (where, name) if part is not None and not callable(part)]
    return ": ".join(parts) or f"a {type(array).__name__} of shape {tuple(array.shape)}"


def _row_bytes(array: Any) -> int:
    """What one position takes; of what does not say its type, at most."""
    try:
        size = array.element_size() if is_torch(array) else np.dtype(array.dtype).itemsize
    except (AttributeError, TypeError):
        size = 8
    return int(np.prod([*array.shape[:-2], array.shape[-1]])) * size


def _chunks(given: Iterable[Any]) -> Iterator[tuple[int, Pair]]:
    first = 0
    for number, pair in enumerate(given):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_sliced, pair))):
            raise ArgumentError("source", f"gives a {type(pair).__name__} as chunk {number}, expected (k, v)")
        k, v = pair
        if k.shape[-2] != v.shape[-2]:
            raise ArgumentError("source", f"gives {k.shape[-2]} keys and {v.shape[-2]} values in chunk {number}")
        yield first, (k, v)
        first += int(k.shape[-2])


def like(q: Array, part: Any) -> Array:
    """A chunk in the library and on the device of the queries; its numbers stay what they are."""
    library = Library.of(q)
    if not is_array(part):
        part = np.asarray(part)
    if isinstance(part, np.ndarray) and library.name == "torch":
        torch = __import__("torch")
        if dtype_name(part) == "bfloat16":
            part = torch.from_numpy(part.view(np.uint16)).view(torch.bfloat16)
        else:
            part = torch.from_numpy(part if part.flags.writeable else part.copy())
    elif isinstance(part, np.ndarray) and library.name == "jax":
        # a copy: the memory that files are read into is used again
        part = __import__("jax").numpy.array(part, copy=True)
    return part


class Ahead:
    """Chunks, the next one read while the last is worked on; what goes wrong there is raised here."""

    def __init__(self, source: Source, q: Array, there: bool) -> None:
        self.q, self.there = q, there
        self.shuttle: Shuttle | None = None
        self.found: queue.Queue[Any] = queue.Queue(maxsize=1)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.read, args=(source,), name="clearhead-chunks", daemon=True)

    def read(self, source: Source) -> None:
        """All chunks, in a thread of its own."""
        try:
            for first, pair in source.start():
                self.put((first, *self.moved(tuple(like(self.q, part) for part in pair))))
                if self.stopped.is_set():
                    return
            self.put(None)
        except BaseException as error:  # whatever it is belongs to who asked
            self.put(error)

    def moved(self, pair: tuple[Any, ...]) -> tuple[Any, ...]:
        """To the device of the queries, with the place that it has there."""
        if self.there or not is_torch(pair[0]) or pair[0].device == self.q.device:
            return (*pair, None)
        if not self.q.is_cuda:
            return (*(part.to(self.q.device) for part in pair), None)
        if self.shuttle is None:
            self.shuttle = Shuttle(self.q.device)
        return self.shuttle.bring(pair)

    def put(self, what: Any) -> None:
        while not self.stopped.is_set():
            try:
                self.found.put(what, timeout=0.1)
                return
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[tuple[int, Array, Array]]:
        self.thread.start()
        try:
            while True:
                found = self.found.get()
                if found is None:
                    return
                if isinstance(found, ArgumentError):
                    raise found
                if isinstance(found, OSError | ValueError | RuntimeError):
                    raise ArgumentError(
                        "source", f"cannot be read: {type(found).__name__}: {first_line(found)}"
                    ) from found
                if isinstance(found, BaseException):
                    raise found
                first, k, v, berth = found
                if berth is not None and self.shuttle is not None:
                    self.shuttle.take(berth)
                yield first, k, v
                if berth is not None and self.shuttle is not None:
                    self.shuttle.leave(berth)
        finally:
            self.stopped.set()
            self.thread.join()


__all__ = ["Ahead", "DiskArray", "Source", "source_of"]
