"""What a file of calls says, checked: its JSON may hold anything, and what is wrong is said in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from clearhead.core.observations import OBSERVATIONS, Observation, Observed
from clearhead.watching.call import Call
from clearhead.watching.given import Given

LARGEST = 2**62  # a number of positions or of calls that is still one
Read = Callable[[str], np.ndarray]


class Malformed(ValueError):
    """What is wrong, and where; `load` adds the file."""


def parsed(text: str | None, what: str) -> Any:
    """JSON as Python has it."""
    if text is None:
        raise Malformed(f"it has no {what}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"its {what} are no JSON that can be read: {str(error)[:120]}") from None


def calls_of(plain: Any, read: Read) -> list[Call]:
    """The calls, with the arrays that they name."""
    _expect(isinstance(plain, list), "calls", "a list")
    return [_call(one, f"call {number}", read) for number, one in enumerate(plain)]


def missed_of(plain: Any) -> dict[str, str]:
    """What was missed, and why, by name."""
    _expect(
        isinstance(plain, dict) and all(isinstance(why, str) for why in plain.values()), "missed", "names and words"
    )
    return dict(plain)


def _call(plain: Any, where: str, read: Read) -> Call:
    counts = dict.fromkeys(("index", "step", "layer", "keys"), _count)
    kinds = {"name": _text, "kind": _text, **counts, "observed": _observed}
    others = {"heads": _counts, "distance": _array, "kept": _kept, "counted": _count}
    values = _fields(plain, where, read, kinds, {**others, "queries_named": _names, "keys_named": _names})
    call = Call(**values)
    _check_shapes(call, where)
    return call


def _observed(plain: Any, where: str, read: Read) -> Observed:
    kinds = {**dict.fromkeys(("output", "lse", "max_score", "entropy"), _array), "kernel": _text}
    others = {name: _array if one.kind is None else _part(one.kind) for name, one in OBSERVATIONS.items()}
    return Observed(**_fields(plain, where, read, kinds, {**others, "share": _array}))


def _part(kind: Any) -> Callable[[Any, str, Read], Any]:
    def part(plain: Any, where: str, read: Read) -> Any:
        return kind(**_fields(plain, where, read, dict.fromkeys(kind._fields, _array), {}))

    return part


def _kept(plain: Any, where: str, read: Read) -> Given:
    kinds = dict.fromkeys(("q", "k", "v"), _array)
    others = {"causal": _flag, **dict.fromkeys(("mask", "bias", "sinks"), _array)}
    values = _fields(plain, where, read, kinds, {**others, "scale": _number, "softcap": _number})
    for name in ("q", "k", "v"):
        _expect(values[name].ndim >= 2, f"{where}.{name}", "an array of at least two axes")
    return Given(**values)


def _fields(plain: Any, where: str, read: Read, needed: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a value, each read by the function that belongs to it."""
    _expect(isinstance(plain, dict), where, "a value with fields")
    kinds = {**needed, **others}
    for name in plain:
        _expect(name in kinds, where, f"none but {', '.join(kinds)}, and there is {name[:40]!r}")
    for name in needed:
        _expect(name in plain, where, f"a field {name}")
    return {name: kinds[name](value, f"{where}.{name}", read) for name, value in plain.items()}


def _array(plain: Any, where: str, read: Read) -> np.ndarray:
    named = isinstance(plain, dict) and set(plain) == {"array"} and isinstance(plain["array"], str)
    _expect(named, where, "the name of an array")
    array = read(plain["array"])
    _expect(array.dtype.kind in "fiub", where, "an array of numbers")
    return array


def _text(plain: Any, where: str, read: Read) -> str:
    _expect(isinstance(plain, str), where, "text")
    return str(plain)


def _flag(plain: Any, where: str, read: Read) -> bool:
    _expect(isinstance(plain, bool), where, "true or false")
    return bool(plain)


def _number(plain: Any, where: str, read: Read) -> float:
    _expect(isinstance(plain, int | float) and not isinstance(plain, bool), where, "a number")
    _expect(abs(plain) < LARGEST, where, "a finite number")
    return float(plain)


def _count(plain: Any, where: str, read: Read) -> int:
    whole = isinstance(plain, int) and not isinstance(plain, bool)
    _expect(whole and 0 <= plain < LARGEST, where, "a whole number from 0")
    return int(plain)


def _counts(plain: Any, where: str, read: Read) -> tuple[int, ...]:
    _expect(isinstance(plain, list), where, "a list of whole numbers")
    return tuple(_count(one, where, read) for one in plain)


def _names(plain: Any, where: str, read: Read) -> tuple[tuple[str, ...], ...]:
    rows = isinstance(plain, list) and all(isinstance(row, list) for row in plain)
    _expect(rows and all(isinstance(name, str) for row in plain for name in row), where, "lists of names")
    return tuple(map(tuple, plain))


def _check_shapes(call: Call, where: str) -> None:
    """Arrays of one call must belong together: others would fail later, and elsewhere."""
    seen, lse = call.observed, call.observed.lse
    _expect(lse.ndim >= 1, f"{where}.observed.lse", "an array (…, heads, queries)")
    lead, queries, keys = lse.shape[:-1], lse.shape[-1], call.keys
    by_query = {"max_score": seen.max_score, "entropy": seen.entropy, "share": seen.share, "distance": call.distance}
    _expect_shape(f"{where}.output", seen.output, (*lse.shape, -1))
    for name, array in by_query.items():
        _expect_shape(f"{where}.{name}", array, lse.shape)
    for name, one in OBSERVATIONS.items():
        if getattr(seen, name) is not None:
            _check_observation(one, name, getattr(seen, name), where, lead, {"queries": queries, "keys": keys})
    if call.kept is not None:
        q, k = call.kept.q, call.kept.k  # of which the leading axes broadcast
        _expect_shape(f"{where}.kept.q", q, (*q.shape[:-2], queries, -1))
        _expect_shape(f"{where}.kept.k", k, (*k.shape[:-2], keys, q.shape[-1]))
        v = call.kept.v
        _expect_shape(f"{where}.kept.v", v, (*v.shape[:-2], keys, -1))
    for name, rows, length in (("queries_named", call.queries_named, queries), ("keys_named", call.keys_named, keys)):
        if rows is not None:
            named = (bool(rows) or 0 in lead) and all(len(row) == length for row in rows)
            _expect(named, f"{where}.{name}", f"{length} names for each row")
    if call.heads is not None:
        _expect(lse.ndim > 1 and len(call.heads) == lse.shape[-2], f"{where}.heads", "one for each head of its lse")


def _check_observation(
    one: Observation, name: str, value: Any, where: str, lead: tuple[int, ...], sizes: dict[str, int]
) -> None:
    """The arrays of an observation: axes of one name have one size, and positions lie inside."""
    own: dict[str, int] = {}
    for called, array, part in zip(one.names(name), one.arrays(value), one.parts, strict=True):
        known = {**own, **sizes}
        expected = (*(lead if part.led else ()), *(known.get(axis, -1) for axis in part.axes))
        _expect_shape(f"{where}.{called}", array, expected)
        own |= dict(zip(part.axes, array.shape[array.ndim - len(part.axes) :], strict=True))
        if part.positions is not None:
            most = sizes[part.positions]
            inside = array.dtype.kind in "iu" and bool(np.all((array >= part.least) & (array < most)))
            _expect(inside, f"{where}.{called}", f"positions below {most}")


def _expect_shape(where: str, array: Any, shape: tuple[int, ...]) -> None:
    """An array that is there has this shape, in which −1 is any size."""
    fits = array is None or array.ndim == len(shape)
    fits = fits and (array is None or all(n in (-1, m) for n, m in zip(shape, array.shape, strict=True)))
    _expect(fits, where, f"an array of shape {shape} beside its lse")


def _expect(right: bool, where: str, expected: str) -> None:
    if not right:
        raise Malformed(f"{where}: expected {expected}")
