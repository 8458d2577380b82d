"""What was seen, in one .safetensors file: arrays by number, and in the header, in JSON, what belongs to what."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from clearhead.arrays import is_array, to_numpy
from clearhead.errors import ArgumentError
from clearhead.observe import Map, Observed, Rows, Top
from clearhead.watching.given import Given
from clearhead.watching.seen import Call, Seen

FORMAT = "clearhead.seen/1"
PARTS: dict[str, Any] = {"top": Top, "map": Map, "queries": Rows}


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError("files need safetensors: pip install 'clearhead[safetensors]'") from None
    return safetensors


def save(seen: Seen, path: str | os.PathLike[str]) -> None:
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
        elif isinstance(value, Top | Map | Rows):
            plain[name] = _plain(value._asdict(), place, arrays)
        elif is_array(value):
            arrays[place] = np.ascontiguousarray(to_numpy(value))
            plain[name] = {"array": place}
        else:
            plain[name] = value
    return plain


def load(path: str | os.PathLike[str]) -> Seen:
    """Read what `save` wrote; arrays are NumPy's."""
    safetensors = _safetensors()
    name = os.fspath(path)
    try:
        with safetensors.safe_open(name, "numpy") as file:
            about = file.metadata() or {}
            names = file.keys()
            arrays = {key: file.get_tensor(key) for key in names} if about.get("format") == FORMAT else None
    except (OSError, safetensors.SafetensorError) as error:
        raise ArgumentError("path", f"cannot read {name}: {error}") from None
    if arrays is None:
        raise ArgumentError("path", f"{name} was not written by Seen.save: its format is {about.get('format')!r}")
    calls = [_call(plain, arrays) for plain in json.loads(about["calls"])]
    return Seen(calls, json.loads(about["missed"]))


def _call(plain: dict[str, Any], arrays: dict[str, np.ndarray]) -> Call:
    values = {name: _value(value, arrays) for name, value in plain.items()}
    observed = dict(values["observed"])
    for name, kind in PARTS.items():
        if name in observed:
            observed[name] = kind(**observed[name])
    values["observed"] = Observed(**observed)
    if "kept" in values:
        values["kept"] = Given(**values["kept"])
    if "heads" in values:
        values["heads"] = tuple(values["heads"])
    for name in ("queries_named", "keys_named"):
        if name in values:
            values[name] = tuple(map(tuple, values[name]))
    return Call(**values)


def _value(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"array"}:
        return arrays[value["array"]]
    return {name: _value(inner, arrays) for name, inner in value.items()}
