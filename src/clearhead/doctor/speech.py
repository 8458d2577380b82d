"""Which array library somebody's code speaks: what it names, imports, or calls."""

from __future__ import annotations

import dis
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

LIBRARIES = ("numpy", "torch", "jax")


def spoken(function: Any) -> str | None:
    """The library that a function's code names; None where it names none."""
    root = (getattr(function, "__module__", None) or "").partition(".")[0]
    if root in LIBRARIES:
        return root
    target = function if isinstance(function, types.FunctionType) else getattr(function, "__func__", None)
    if target is None:
        target = getattr(function, "func", None) or type(function).__call__
    found = _roots(target, 3) & set(LIBRARIES)
    for library in ("jax", "torch", "numpy"):  # code for the first two often has a little NumPy beside it
        if library in found:
            return library
    return None


def libraries(named: str | None) -> tuple[str, ...]:
    """The libraries to try: the one its code names, then the others that are there."""
    there = [name for name in LIBRARIES if name in sys.modules]
    return tuple(dict.fromkeys([*([] if named is None else [named]), *there]))


def installed(name: str) -> bool:
    """True where a library could be imported."""
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _named(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """The globals that a function's code loads, and that of functions inside it; what it imports, by name."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield names.get(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant, names)


def _roots(function: Any, depth: int) -> set[str]:
    function = inspect.unwrap(function) if callable(function) else function
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or depth == 0:
        return set()
    found: set[str] = set()
    for value in (*_named(code, names), *_enclosed(function)):
        if isinstance(value, str):
            found.add(value.partition(".")[0])
        elif isinstance(value, types.ModuleType):
            found.add(value.__name__.partition(".")[0])
        elif callable(value):
            module = (getattr(value, "__module__", None) or "").partition(".")[0]
            found |= {module} if module in LIBRARIES else _roots(value, depth - 1)
    return found


def _enclosed(function: Any) -> Iterator[Any]:
    """What a function closes over, modules and functions among it."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(value, types.ModuleType) or callable(value):
            yield value
