"""What was seen, in one .safetensors file: arrays by number, and in the header, in JSON, what belongs to what."""

from __future__ import annotations

import functools
import json
import os
from typing import Any, TypeVar

import numpy as np

from clearhead.core.arrays import is_array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.installing import brings
from clearhead.core.observations import Observed
from clearhead.watching.given import Given
from clearhead.watching.reading import Malformed, calls_of, missed_of, parsed
from clearhead.watching.record import Record

FORMAT = "clearhead.seen/1"

Kind = TypeVar("Kind", bound=Record)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError(f"files need safetensors: {brings('safetensors')}") from None
    return safetensors


def save(seen: Record, path: str | os.PathLike[str]) -> None:
    """Write what was seen to one file."""
    safetensors = _safetensors()
    arrays: dict[str, np.ndarray] = {}
    calls = [_plain(vars(call), f"{number}", arrays) for number, call in enumerate(seen)]
    about = {"format": FORMAT, "calls": json.dumps(calls), "missed": json.dumps(seen.missed)}
    try:
        safetensors.numpy.save_file(arrays, os.fspath(path), metadata=about)
    except (OSError, safetensors.SafetensorError) as error:
        raise ArgumentError("path", f"cannot write {os.fspath(path)}: {error}") from None


def _plain(values: dict[str, Any], where: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Values as JSON can hold them; arrays go aside, and their name stays."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        place = f"{where}.{name}"
        if value is None:
            continue
        if isinstance(value, Observed | Given):
            plain[name] = _plain(vars(value), place, arrays)
        elif hasattr(value, "_asdict"):  # an observation of several arrays
            plain[name] = _plain(value._asdict(), place, arrays)
        elif is_array(value):
            arrays[place] = np.ascontiguousarray(to_numpy(value))
            plain[name] = {"array": place}
        else:
            plain[name] = value
    return plain


def load(path: str | os.PathLike[str], kind: type[Kind]) -> Kind:
    """Read what `save` wrote, as a record of that kind; arrays are NumPy's.

    Whatever else a file holds is refused in one sentence.
    """
    safetensors = _safetensors()
    name = os.fspath(path)
    try:
        with safetensors.safe_open(name, "numpy") as file:
            about, names = file.metadata() or {}, set(file.keys())
            if about.get("format") != FORMAT:
                raise ArgumentError(
                    "path", f"{name} was not written by Seen.save: its format is {about.get('format')!r}"
                )
            read = functools.cache(lambda key: _tensor(file, names, key))  # calls may share an array
            calls = calls_of(parsed(about.get("calls"), "calls"), read)
            return kind(calls, missed_of(parsed(about.get("missed"), "missed")))
    except (OSError, safetensors.SafetensorError) as error:
        raise ArgumentError("path", f"cannot read {name}: {error}") from None
    except Malformed as error:
        raise ArgumentError("path", f"{name} is not as Seen.save wrote it: {error}") from None


def _tensor(file: Any, names: set[str], key: str) -> np.ndarray:
    """One array; the file says how long it is, and no more is read than it holds."""
    if key not in names:
        raise Malformed(f"it has no array {key[:40]!r}")
    try:
        array: np.ndarray = file.get_tensor(key)
    except Exception as error:  # of a dtype that NumPy does not have
        raise Malformed(f"its array {key[:40]!r} cannot be read: {str(error)[:120]}") from None
    return array
