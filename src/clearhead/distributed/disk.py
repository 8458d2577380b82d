"""Arrays that stay on disk: .npy files, members of .npz files and of .safetensors files, read a stretch at a time.

Stretches are read into memory that is at hand, not mapped, and past the system's cache where it lets one: what was
read is kept nowhere else, so that keys of any size take no more memory than the stretches that are worked on.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.distributed.direct import ALIGNED, SMALLEST, Room, opened

TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class DiskArray:
    """An array (…, positions, features) that lies in a file from a certain byte on, row after row."""

    def __init__(self, path: Path, start: int, shape: tuple[int, ...], dtype: Any, name: str = "") -> None:
        self.path, self.start, self.shape, self.dtype = path, start, tuple(shape), np.dtype(dtype)
        self.name = f"{path}{f': {name}' if name else ''}"
        self.ndim = len(self.shape)
        self.past, self.direct = True, -1  # whether it can be read past the cache, and the file to do so
        if self.ndim < 2:
            raise ArgumentError("source", f"{self.name} has shape {self.shape}, expected (…, positions, features)")
        needed = start + math.prod(self.shape) * self.dtype.itemsize
        try:
            size = path.stat().st_size
            self.file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # Windows has text files
        except OSError as error:
            raise ArgumentError("source", f"cannot read {self.name}: {error.strerror}") from None
        if size < needed:
            self.__del__()
            raise ArgumentError("source", f"{self.name} is cut short: {size:,} of {needed:,} bytes")

    def __del__(self) -> None:
        for name in ("file", "direct"):
            file = getattr(self, name, -1)
            setattr(self, name, -1)
            if file >= 0:
                os.close(file)

    def read(self, low: int, high: int, out: np.ndarray | None = None) -> np.ndarray:
        """Positions low … high of every head, into memory that is at hand if any is given."""
        *lead, _, features = self.shape
        if out is None:
            out = np.empty((*lead, high - low, features), self.dtype)
        # one array of bytes for each head: NumPy lends no memory of types that it does not know itself
        flat = out.reshape(math.prod(lead), -1).view(np.uint8)
        for number, start in enumerate(self.starts(low)):
            self.fill(memoryview(flat[number]), start)
        return out

    def room(self, step: int) -> Room | None:
        """Memory for `step` positions that is read into past the cache; None where that is not to be had."""
        *lead, positions, features = self.shape
        row = features * self.dtype.itemsize
        if step * row < SMALLEST or not math.prod(lead):
            return None
        with _moving:
            if self.past and self.direct < 0:
                self.direct = opened(self.path)
                # by now another file may have that name
                self.past = self.direct >= 0 and os.path.sameopenfile(self.direct, self.file)
        return Room(math.prod(lead), step * row, positions * row) if self.past else None

    def read_past(self, low: int, high: int, room: Room) -> np.ndarray:
        """Positions low … high of every head, past the cache."""
        *lead, _, features = self.shape
        row, starts, askew = features * self.dtype.itemsize, self.starts(low), self.start % self.dtype.itemsize
        for into, start, needed in room.parts(starts, (high - low) * row):
            self.fill_past(into, start, needed)
            if askew:  # members of a .npz file begin anywhere, and numbers in memory do not
                behind = needed - (high - low) * row
                into[behind - askew : needed - askew] = into[behind:needed]
        apart = [room.apart * math.prod(lead[axis + 1 :]) for axis in range(len(lead))]
        return np.ndarray(
            (*lead, high - low, features), self.dtype, room.memory, room.first(starts) - askew,
            (*apart, row, self.dtype.itemsize),
        )  # fmt: skip

    def fill_past(self, into: memoryview, start: int, needed: int) -> None:
        """The first `needed` bytes from a place on; the file may end behind them."""
        done, count = 0, ALIGNED
        try:
            # what is no multiple is the file's end
            while self.past and done < needed and count and not count % ALIGNED:
                count = os.preadv(self.direct, [into[done:]], start + done)
                done += count
        except OSError as error:
            # some file systems open files so, and then read none
            if error.errno != errno.EINVAL:
                raise ArgumentError("source", f"cannot read {self.name}: {error.strerror}") from None
            self.past = False
        if done < needed:
            self.fill(into[done:needed], start + done)

    def starts(self, low: int) -> list[int]:
        """Where a position of each head lies in the file."""
        *lead, positions, features = self.shape
        row = features * self.dtype.itemsize
        return [self.start + (number * positions + low) * row for number in range(math.prod(lead))]

    def expect(self, low: int, high: int) -> None:
        """Tell the system that these positions come next, so that it begins to read them."""
        if high > low and hasattr(os, "posix_fadvise"):
            size = (high - low) * self.shape[-1] * self.dtype.itemsize
            for start in self.starts(low):
                os.posix_fadvise(self.file, start, size, os.POSIX_FADV_WILLNEED)

    def fill(self, into: memoryview, start: int) -> None:
        """Bytes from a place in the file on, all of them."""
        done = 0
        while done < len(into):
            try:
                count = _read_at(self.file, into[done:], start + done)
            except OSError as error:
                raise ArgumentError("source", f"cannot read {self.name}: {error.strerror}") from None
            if not count:
                raise ArgumentError(
                    "source", f"{self.name} ends at byte {start + done:,}, {len(into) - done:,} too early"
                )
            done += count
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file, start, len(into), os.POSIX_FADV_DONTNEED)

    def __getitem__(self, index: Any) -> np.ndarray:
        """`array[..., low:high, :]`."""
        between = index[-2] if isinstance(index, tuple) and len(index) == 3 and index[0] is ... else None
        if not isinstance(between, slice) or index[-1] != slice(None) or between.step not in (None, 1):
            raise ArgumentError("source", f"{self.name} is read by stretches of positions, array[..., low:high, :]")
        low, high, _ = between.indices(self.shape[-2])
        return self.read(low, max(low, high))

    def __repr__(self) -> str:
        return f"DiskArray({self.name}, {self.shape}, {self.dtype})"


_moving = threading.Lock()


def _read_at(file: int, into: memoryview, start: int) -> int:
    """How many bytes could be read; where a file has but one place (Windows), it is moved by one thread at a time."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [into], start)
    with _moving:
        os.lseek(file, start, os.SEEK_SET)
        data = os.read(file, min(len(into), 1 << 24))
    into[: len(data)] = data
    return len(data)


def on_disk(path: str | os.PathLike[str], name: str | None = None) -> DiskArray:
    """An array of a file, which is not read: a .npy file, or by its name one of a .npz or .safetensors file.

    Members of a .npz file are read where they lie, so it has to be one of `np.savez`, which does not compress.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/k.npy", np.zeros((2, 1000, 4), dtype=np.float32))
    ...     on_disk(f"{folder}/k.npy").shape
    (2, 1000, 4)
    """
    place = Path(path)
    try:
        with place.open("rb") as file:
            head = file.read(8)
            if head[:6] == b"\x93NUMPY":
                file.seek(0)
                return _numpy(place, file, 0, "")
    except OSError as error:
        raise ArgumentError("path", f"cannot read {place}: {error.strerror}") from None
    if name is None:
        raise ArgumentError("name", f"is not given, expected that of an array in {place}")
    return _of_npz(place, name) if head[:2] == b"PK" else _of_safetensors(place, name)


def _numpy(path: Path, file: Any, at: int, name: str) -> DiskArray:
    """An array in NumPy's format whose first byte is at `at`."""
    try:
        file.seek(at)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, SyntaxError, TypeError, EOFError) as error:
        raise ArgumentError("path", f"{path} {name} is no NumPy array: {error}") from None
    if fortran or dtype.hasobject:
        raise ArgumentError("path", f"{path} {name} is not row after row of numbers: np.ascontiguousarray saves it so")
    return DiskArray(path, file.tell(), shape, dtype, name)


def _of_npz(path: Path, name: str) -> DiskArray:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    except (zipfile.BadZipFile, OSError) as error:
        raise ArgumentError("path", f"cannot read {path}: {error}") from None
    if name not in infos:
        raise ArgumentError("name", f"is {name!r}, expected one of {', '.join(sorted(infos))} in {path}")
    info = infos[name]
    if info.compress_type != zipfile.ZIP_STORED:
        raise ArgumentError("path", f"{path}: {name} is compressed, expected what np.savez writes")
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
        names, extra = struct.unpack("<HH", header[26:30])
        return _numpy(path, file, info.header_offset + 30 + names + extra, name)


def _of_safetensors(path: Path, name: str) -> DiskArray:
    with path.open("rb") as file:
        raw = file.read(8)
        length = int.from_bytes(raw, "little")
        if len(raw) < 8 or length > min(path.stat().st_size, 100_000_000):
            raise ArgumentError("path", f"{path} is neither .npy, .npz nor .safetensors")
        try:
            entries = json.loads(file.read(length))
            entry = entries[name]
            dtype, shape, (start, _) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except KeyError:
            known = ", ".join(sorted(key for key in entries if key != "__metadata__"))
            raise ArgumentError("name", f"is {name!r}, expected one of {known} in {path}") from None
        except (ValueError, TypeError) as error:
            raise ArgumentError("path", f"{path} is no .safetensors file: {error}") from None
    if dtype not in TYPES:
        raise ArgumentError("name", f"{path}: {name} holds {dtype}, expected {', '.join(TYPES)}")
    if dtype == "BF16":
        import ml_dtypes  # which only bfloat16 in NumPy needs

        return DiskArray(path, 8 + length + start, shape, ml_dtypes.bfloat16, name)
    return DiskArray(path, 8 + length + start, shape, TYPES[dtype], name)
