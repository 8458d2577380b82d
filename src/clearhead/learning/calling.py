"""Somebody's solution, called: in the library that it speaks, quietly, in time; what came back is read as numbers."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core.arrays import is_array, to_numpy
from clearhead.doctor import speech
from clearhead.doctor.quiet import LIMIT, Late, quiet, told
from clearhead.doctor.subject import make
from clearhead.learning.exercise import Case, Function, Stream

Answer = tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class Trouble:
    """A call that gave nothing to compare: which mistake that is, and what was seen."""

    name: str
    seen: str


@dataclass(frozen=True, eq=False)
class Called:
    """What a call gave: several arrays to choose from, or a trouble; and which inputs it wrote to."""

    answer: Answer | Trouble
    written: tuple[str, ...] = ()


def libraries(function: Any) -> tuple[str, ...]:
    """The libraries to hand arrays over in: the one that its code names; else those that are there, NumPy first."""
    named = speech.spoken(function)
    return (named,) if named else tuple(name for name in speech.LIBRARIES if name in sys.modules)


def misfit(function: Any, asked: Function) -> Trouble | None:
    """What is wrong with the parameters, if anything."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in may have none
        return None
    try:
        signature.bind(*asked.takes)
    except TypeError as error:
        return Trouble("other-parameters", f"it is called as {asked.signature}, and {error}")
    return None


def called(function: Any, case: Case, library: str, asked: Function) -> Called:
    """Call it on one case, with fresh arrays."""
    given = {name: _handed(value, library) for name, value in case.items()}
    with quiet(library) as printed:
        try:
            result = function(*given.values())
        except KeyboardInterrupt:
            raise
        except Late:
            return Called(Trouble("took-too-long", f"it had not answered after {LIMIT} seconds"))
        except NotImplementedError as error:
            empty = not str(error)
            return Called(Trouble("not-written-yet", "it raised NotImplementedError") if empty else _raised(error))
        except BaseException as error:  # SystemExit and the like must not end whoever checks
            return Called(_raised(error, function))
        if result is None:
            words = printed.getvalue().strip()
            name = "prints-instead" if re.search(r"\d", words) else "returns-nothing"
            seen = "it returned None" + (f", and printed {words.splitlines()[0][:60]!r}" if words else "")
            return Called(Trouble(name, seen))
        try:
            answer = _read(result, asked)
        except Exception as error:  # what came back may itself fail when it is looked at
            answer = Trouble("wrong-type", f"it returned a {type(result).__name__} that cannot be read: {told(error)}")
    written = tuple(name for name, array in given.items() if is_array(array) and _changed(array, case[name], library))
    return Called(answer, written)


def _handed(value: Any, library: str) -> Any:
    if isinstance(value, Stream):
        return iter(value)
    if not isinstance(value, np.ndarray):
        return value
    # JAX has whole numbers of 32 bits
    kinds = {"f": "float32", "i": "int32" if library == "jax" else "int64"}
    return make(library, value, kinds.get(value.dtype.kind, str(value.dtype)))


def _changed(array: Any, before: np.ndarray, library: str) -> bool:
    fresh = to_numpy(_handed(before, library))
    return not np.array_equal(to_numpy(array), fresh, equal_nan=fresh.dtype.kind == "f")


def _raised(error: BaseException, function: Any = None) -> Trouble:
    """The error and, where the solution's own code shows in it, the line."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    place = f", in line {own[-1].lineno}: {own[-1].line}" if own and own[-1].line else ""
    return Trouble("raises", f"it raised {told(error)}{place[:160]}".replace("raised it called", "called"))


def _read(result: Any, asked: Function) -> Answer | Trouble:
    """Arrays of float64, booleans and whole numbers as they are; several where several came back."""
    several = isinstance(result, tuple | list) and any(is_array(part) for part in result)
    if asked.gives or isinstance(result, tuple) or several:
        if not isinstance(result, tuple | list):
            return Trouble("wrong-count", f"it returned one {type(result).__name__}, expected {_listed(asked.gives)}")
        if asked.gives and len(result) != len(asked.gives):
            return Trouble("wrong-count", f"it returned {len(result)} things, expected {_listed(asked.gives)}")
        parts = [_numbers(part) for part in result if asked.gives or part is not None]
    else:
        parts = [_numbers(result)]
    wrong = next((part for part in parts if isinstance(part, Trouble)), None)
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if wrong is not None and (asked.gives or not arrays):
        return wrong
    return tuple(arrays) if arrays else Trouble("wrong-type", "it returned nothing that holds numbers")


def _listed(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)})"


def _numbers(value: Any) -> np.ndarray | Trouble:
    """One array as NumPy has it."""
    if isinstance(value, str | bytes | dict | set) or callable(value):
        return Trouble("wrong-type", f"it returned a {type(value).__name__}")
    if isinstance(value, list | tuple):
        value = [to_numpy(part) if is_array(part) else part for part in value]
    try:
        array = to_numpy(value) if is_array(value) else np.asarray(value)
    except ValueError:
        return Trouble("wrong-type", "it returned lists of different lengths")
    if array.dtype.kind == "c":
        return Trouble("complex-numbers", f"it returned {array.dtype}")
    if array.dtype.kind not in "fbiu":
        return Trouble("wrong-type", f"it returned a {type(value).__name__}")
    return np.array(array, dtype=np.float64 if array.dtype.kind == "f" else array.dtype)
