"""Arrays out of files, without pickle: .npy, .npz, .safetensors and JSON; what is wrong with one is said in words."""

from __future__ import annotations

import json
import sys
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from clearhead.errors import ArgumentError

NAMES = {"q": ("q", "Q", "query", "queries"), "k": ("k", "K", "key", "keys"), "v": ("v", "V", "value", "values")}
# What is read into memory at once; a file may say that it holds far more than it does
LARGEST = 2**32
LARGEST_TEXT = 2**27
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


def read_npy(option: str, path: Path) -> np.ndarray:
    """One array of a .npy file."""
    try:
        with path.open("rb") as file:
            return _array(option, str(path), file, path.stat().st_size)
    except OSError as error:
        raise ArgumentError(option, f"cannot read {path}: {error.strerror or error}") from None


def read_npz(option: str, path: Path) -> dict[str, Any]:
    """q, k and v of a .npz file, and its tokens where it has them."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            found: dict[str, Any] = {}
            for role, spellings in (*NAMES.items(), ("tokens", ("tokens",)), ("query_tokens", ("query_tokens",))):
                name = next((name for name in spellings if name in names), None)
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
        if needed > min(size, LARGEST) or any(length < 0 for length in shape):
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
        raise ArgumentError(option, "needs the package safetensors: pip install safetensors") from None
    if not path.is_file():
        raise ArgumentError(option, f"cannot read {path}: no such file")
    try:
        with safe_open(path, framework="numpy") as file:
            keys = set(file.keys())
            chosen = {role: next((s for s in spellings if s in keys), None) for role, spellings in NAMES.items()}
            found = {role: file.get_tensor(name) for role, name in chosen.items() if name is not None}
    except (SafetensorError, OSError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(option, f"cannot read {path}: {' '.join(str(error).split())[:120]}") from None
    return _whole(option, path, found)


def read_json(option: str, path: Path) -> dict[str, Any]:
    """{"q": …, "k": …, "v": …, "tokens": […]} as nested lists of numbers; "-" reads standard input."""
    try:
        raw = sys.stdin.buffer.read(LARGEST_TEXT + 1) if str(path) == "-" else _limited(option, path)
        if len(raw) > LARGEST_TEXT:
            raise ArgumentError(option, f"is longer than {LARGEST_TEXT:,} bytes")
        data = json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ArgumentError(option, f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ArgumentError(option, f"{path} is not UTF-8: byte {error.start}") from None
    except (json.JSONDecodeError, RecursionError) as error:
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
    with path.open("rb") as file:
        return file.read(LARGEST_TEXT + 1)


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
