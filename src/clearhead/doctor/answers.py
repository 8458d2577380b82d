"""What came back from a call, read: which of several things is the output, and which the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.core.arrays import Library, dtype_name, is_array, to_numpy
from clearhead.doctor.probes import Probe
from clearhead.doctor.ways import Way


class Failed(Exception):
    """A call that raised, or gave something that is no answer; the words say which."""


class Hung(Failed):
    """A call that was given up, or that would not have been answered in time: no other is worth trying."""


@dataclass(frozen=True, eq=False)
class Got:
    """What a call gave, in the form's own axes and in float64."""

    output: np.ndarray
    weights: np.ndarray | None
    dtype: str
    written: tuple[str, ...]
    way: Way


def read(result: Any, way: Way, probe: Probe, written: tuple[str, ...]) -> Got:
    """The output and the weights, by their shapes; `Failed` where nothing has the shape of an output."""
    arrays = {
        i: part
        for i, part in enumerate(_parts(result))
        if is_array(part) and dtype_name(part).startswith(("float", "b"))
    }
    outputs, rows = {}, {}
    for i, array in arrays.items():
        if way.output is not None and i not in (way.output, way.weights):
            continue
        plain = to_numpy(array).astype(np.float64)
        taken, seen = way.form.take(plain, probe), way.form.take_weights(plain, probe)
        if taken is not None and taken.shape in way.form.shapes(probe):
            outputs[i] = taken
        if seen is not None and seen.shape[2:] == (probe.sizes.queries, probe.sizes.keys):
            rows[i] = seen
    index = way.output if way.output in outputs else _likeliest(outputs, rows)
    if index is None:
        shapes = ", ".join(str(tuple(array.shape)) for array in arrays.values()) or type(result).__name__
        raise Failed(f"it gave {shapes}, which is not the shape of an output")
    beside = [i for i in rows if i != index]
    # scores may be returned as well: of several, those whose rows sum to one are the weights
    likely = next((i for i in beside if _sums_to_one(rows[i])), beside[0] if beside else None)
    other = way.weights if way.output is not None else likely
    found = replace(way, output=index, weights=other)
    weights = None if other is None else rows.get(other)
    owner = Library.of(arrays[index]).name
    if owner != way.library:
        raise Failed(f"it gave a {owner} array for {way.library} arrays")
    return Got(outputs[index], weights, dtype_name(arrays[index]), written, found)


def _likeliest(outputs: dict[int, np.ndarray], rows: dict[int, np.ndarray]) -> int | None:
    """The first that cannot be weights: rows that are positive and sum to one, in a pair that has another."""
    for i, output in outputs.items():
        alike = i in rows and _sums_to_one(output)
        if not (alike and len(outputs) > 1):
            return i
    return next(iter(outputs), None)


def _sums_to_one(rows: np.ndarray) -> bool:
    return bool((rows >= 0).all() and np.allclose(rows.sum(-1), 1.0, atol=1e-3))


def _parts(result: Any) -> Iterator[Any]:
    """The things that were returned: of a tuple, a list, a dictionary, or an object whose fields they are."""
    if isinstance(result, tuple | list):
        yield from result
    elif isinstance(result, Mapping):
        yield from result.values()
    elif is_array(result) or not hasattr(result, "__dict__"):
        yield result
    else:
        yield from vars(result).values()
