"""A mask spelled as in Python, read without ever running it: names, numbers, lists, & | ~ and brackets, no more."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

from clearhead.core import masks, sparse_masks
from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Mask

# every function there that makes a mask, but of an array, which nobody types
MASKS: dict[str, Callable[..., Mask]] = {
    name: make
    for module in (masks, sparse_masks)
    for name, make in vars(module).items()
    if isinstance(make, FunctionType)
    and make.__module__ == module.__name__
    and make.__annotations__["return"] == "Mask"
    and "Array" not in make.__annotations__.values()
}
# Longer and deeper than any mask that somebody types, and far from where Python ends
LONGEST = 2000
DEEPEST = 200
LARGEST = 2**40


def read_mask(text: str, argument: str = "mask") -> Mask:
    """The mask that a text spells.

    >>> read_mask("causal() & window(128)")
    causal() & window(128)
    >>> read_mask("~window(2, 2) | global_tokens(range(4))")
    ~window(2, 2) | global_tokens([0, 1, 2, 3])
    """
    if len(text) > LONGEST:
        raise ArgumentError(argument, f"has {len(text):,} characters, expected at most {LONGEST:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python warns of such things as 1()
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError, Warning):
        raise ArgumentError(argument, f"is {_cut(text)}, which is no mask: expected {_expected()}") from None
    deep = _depth(tree.body)
    if deep > DEEPEST:
        raise ArgumentError(argument, f"is nested {deep} deep, expected at most {DEEPEST}")
    try:
        return _mask(tree.body, argument)
    except TypeError as mistake:  # a mask function called with other arguments than it has
        raise ArgumentError(argument, f"is {_cut(text)}: {mistake}") from None


def _depth(tree: ast.expr) -> int:
    """How many expressions are around the innermost one, itself included; counted without recursion."""
    deepest, left = 0, [(tree, 1)]
    while left:
        node, depth = left.pop()
        deepest = max(deepest, depth)
        left += [(child, depth + 1) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return deepest


def _mask(node: ast.expr, argument: str) -> Mask:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left, argument) & _mask(right, argument)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left, argument) | _mask(right, argument)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand, argument)
        case ast.Call(func=ast.Name(id=name), args=values, keywords=named) if name in MASKS:
            keywords = {_keyword(word, argument): _value(word.value, argument) for word in named}
            return MASKS[name](*(_value(value, argument) for value in values), **keywords)
    raise ArgumentError(argument, f"has {_cut(ast.unparse(node))}, expected {_expected()}")


def _keyword(word: ast.keyword, argument: str) -> str:
    if word.arg is None:
        raise ArgumentError(argument, "has **, expected named arguments")
    return word.arg


def _value(node: ast.expr, argument: str) -> Any:
    match node:
        case ast.Constant(value=bool() | None):
            pass
        case ast.Constant(value=int() as number) if abs(number) < LARGEST:
            return number
        case ast.Constant(value=str() as word):
            return word
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)) if abs(number) < LARGEST:
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, argument) for item in items]
        case ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[]) if 1 <= len(bounds) <= 3:
            return _range([_value(bound, argument) for bound in bounds], argument)
    raise ArgumentError(
        argument, f"has {_cut(ast.unparse(node))}, expected a whole number below 2**40, a list of them, or a range"
    )


def _range(bounds: list[Any], argument: str) -> list[int]:
    if not all(isinstance(bound, int) for bound in bounds) or bounds[2:] == [0]:
        raise ArgumentError(argument, f"has range{tuple(bounds)}, expected whole numbers and a step that is not 0")
    found = range(*bounds)
    if len(found) > 2**20:
        raise ArgumentError(argument, f"has a range of {len(found):,} numbers, expected at most {2**20:,}")
    return list(found)


def _expected() -> str:
    return f"{', '.join(f'{name}(…)' for name in MASKS)} with & | ~"


def _cut(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}…")
