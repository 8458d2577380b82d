"""Arrays out of files, without pickle: .npy, .npz, .safetensors and JSON; what is wrong with one is said in words."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.core.installing import brings

NAMES = {"q": ("q", "Q", "query", "queries"), "k": ("k", "K", "key", "keys"), "v": ("v", "V", "value", "values")}
# What is read into memory unless CLEARHEAD_MAX_BYTES says otherwise: a few megabytes of zeros unpack to gigabytes
MOST_BYTES = 2**30
# A number takes up to so many times the room that its digits take
PER_CHARACTER = 8
# Bytes of a number, by safetensors' names of its types
WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4}
# What NumPy lets through while it reads a damaged header: the header is a Python literal, parsed as one
UNREADABLE = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    EOFError,
    OverflowError,
    RecursionError,
    UnicodeError,
)


def most_bytes() -> int:
    """How many bytes are read into memory at most."""
    given = os.environ.get("CLEARHEAD_MAX_BYTES")
    if given is None:
        return MOST_BYTES
    if not re.fullmatch(r"[0-9]{1,18}", given):
        raise ArgumentError("CLEARHEAD_MAX_BYTES", f"is {given[:60]!r}, expected a number of bytes")
    return int(given)


def within(option: str, name: str, size: int, most: int) -> None:
    """Refuse what is larger than may be read, before any of it is."""
    if size > most:
        raise ArgumentError(
            option, f"{name} holds {size:,} bytes, expected at most {most:,}; CLEARHEAD_MAX_BYTES may say more"
        )


def read_npy(option: str, paths: Sequence[Path]) -> dict[str, Any]:
    """q, k and v of three .npy files."""
    try:
        sizes = [path.stat().st_size for path in paths]
        within(option, ", ".join(map(str, paths)), sum(sizes), most_bytes())
        found = {}
        for role, path, size in zip(NAMES, paths, sizes, strict=True):
            with path.open("rb") as file:
                found[role] = _array(option, str(path), file, size)
        return found
    except OSError as error:
        raise ArgumentError(option, f"cannot read {error.filename}: {error.strerror or error}") from None


def read_npz(option: str, path: Path) -> dict[str, Any]:
    """q, k and v of a .npz file, and its tokens where it has them."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            roles = {**NAMES, "tokens": ("tokens",), "query_tokens": ("query_tokens",)}
            chosen = {role: next((s for s in spellings if s in names), None) for role, spellings in roles.items()}
            within(option, f"{path} unpacked", sum(names[n].file_size for n in chosen.values() if n), most_bytes())
            found: dict[str, Any] = {}
            for role, name in chosen.items():
                if name is not None:
                    with archive.open(names[name]) as member:
                        found[role] = _array(option, f"{path}: {name}", member, names[name].file_size)
    except OSError as error:
        raise ArgumentError(option, f"cannot read {path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(option, f"cannot read {path}: {error}") from None
    return _whole(option, path, found)


def _array(option: str, name: str, file: IO[bytes], size: int) -> np.ndarray:
    """One array in NumPy's format, after a look at what it says it holds."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        count = 1
        for length in shape:
            count *= length
        needed = count * dtype.itemsize
        if dtype.hasobject:
            raise ArgumentError(option, f"{name} holds Python objects, which are not read")
        if needed > size or any(length < 0 for length in shape):
            raise ArgumentError(option, f"{name} says it holds {needed:,} bytes of shape {shape}, and has {size:,}")
        data = file.read(needed)
        if len(data) != needed:
            raise ArgumentError(option, f"{name} is cut short: {len(data):,} of {needed:,} bytes")
        array = np.frombuffer(data, dtype=dtype, count=count)
        return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)
    except ArgumentError:
        raise
    except UNREADABLE as error:
        raise ArgumentError(option, f"{name} is no NumPy array: {' '.join(str(error).split())[:120]}") from None


def read_safetensors(option: str, path: Path) -> dict[str, Any]:
    """q, k and v of a .safetensors file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ArgumentError(option, f"needs the package safetensors: {brings('safetensors')}") from None
    if not path.is_file():
        raise ArgumentError(option, f"cannot read {path}: no such file")
    try:
        with safe_open(path, framework="numpy") as file:
            keys = set(file.keys())
            chosen = {role: next((s for s in spellings if s in keys), None) for role, spellings in NAMES.items()}
            parts = {role: file.get_slice(name) for role, name in chosen.items() if name is not None}
            sizes = [math.prod(part.get_shape()) * WIDTHS.get(part.get_dtype(), 8) for part in parts.values()]
            within(option, f"{path}: q, k, v", sum(sizes), most_bytes())
            found = {role: file.get_tensor(name) for role, name in chosen.items() if name is not None}
    except ArgumentError:
        raise
    except (SafetensorError, OSError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(option, f"cannot read {path}: {' '.join(str(error).split())[:120]}") from None
    return _whole(option, path, found)


def read_json(option: str, path: Path) -> dict[str, Any]:
    """{"q": …, "k": …, "v": …, "tokens": […]} as nested lists of numbers; "-" reads standard input."""

    def integer(text: str) -> int | float:
        if len(text) < 19:
            return int(text)
        if not math.isfinite(float(text)):
            raise ArgumentError(option, f"{path} has a number of {len(text):,} digits, expected float64's at most 309")
        return float(text)

    try:
        data = json.loads(_limited(option, path).decode("utf-8"), parse_int=integer)
    except OSError as error:
        raise ArgumentError(option, f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ArgumentError(option, f"{path} is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ArgumentError(option, f"{path} is nested too deeply, expected lists of lists of numbers") from None
    except json.JSONDecodeError as error:
        raise ArgumentError(option, f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ArgumentError(option, f"{path} holds a {type(data).__name__}, expected an object with q, k and v")
    found: dict[str, Any] = {name: data[name] for name in ("tokens", "query_tokens") if name in data}
    for role, spellings in NAMES.items():
        name = next((name for name in spellings if name in data), None)
        if name is not None:
            found[role] = _numbers(option, f"{path}: {name}", data[name])
    return _whole(option, path, found)


def _numbers(option: str, name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, RecursionError):
        array = np.asarray(None)
    if array.dtype.kind not in "iuf":
        raise ArgumentError(option, f"{name} is no array of numbers, expected nested lists of equal length")
    return array.astype(np.float64)


def _limited(option: str, path: Path) -> bytes:
    """The bytes of a text; "-" is standard input."""
    most = most_bytes() // PER_CHARACTER
    if str(path) == "-":
        raw = sys.stdin.buffer.read(most + 1)
        if len(raw) > most:
            raise ArgumentError(option, f"is longer than {most:,} bytes, an eighth of what CLEARHEAD_MAX_BYTES may say")
        return raw
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        raw = b"" if size > most else file.read(most + 1)  # a pipe has no size, and may go on for ever
    if max(size, len(raw)) > most:
        raise ArgumentError(
            option, f"{path} has {max(size, len(raw)):,} bytes of text, expected at most {most:,},"
            " an eighth of what CLEARHEAD_MAX_BYTES may say"
        )  # fmt: skip
    return raw


def _whole(option: str, path: Path, found: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in NAMES if name not in found]
    if missing:
        raise ArgumentError(option, f"{path} has no {', '.join(missing)}, expected arrays called q, k and v")
    return found


def read_tokens(option: str, text: str) -> list[str]:
    """Token names: "@file" has one on each line; else they are separated by commas, or by blanks without any."""
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            raw = _limited(option, path)
            return raw.decode("utf-8").splitlines()
        except OSError as error:
            raise ArgumentError(option, f"cannot read {path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise ArgumentError(option, f"{path} is not UTF-8: byte {error.start}") from None
    return [part.strip() for part in text.split(",")] if "," in text else text.split()
