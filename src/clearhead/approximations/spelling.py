"""A method spelled as in Python, read without ever running it: a name, numbers, words, True and False, no more."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from clearhead.approximations.block_selection import topk_blocks
from clearhead.approximations.clustering import clusters
from clearhead.approximations.favor import performer
from clearhead.approximations.linear_transformer import linear
from clearhead.approximations.low_rank import linformer
from clearhead.approximations.method import Method
from clearhead.approximations.nystromformer import nystrom
from clearhead.approximations.reformer import lsh
from clearhead.core.errors import ArgumentError

METHODS: dict[str, Callable[..., Method]] = {
    one.__name__: one for one in (linear, performer, linformer, nystrom, lsh, clusters, topk_blocks)
}
LONGEST = 200


def read_method(text: str, argument: str = "method") -> Method:
    """The method that a text spells.

    >>> read_method("performer(256, seed=3)"), read_method("linear")
    (performer(256, seed=3), linear())
    """
    if text in METHODS:
        text = f"{text}()"
    expected = f"expected {', '.join(f'{name}(…)' for name in METHODS)} with numbers and words"
    try:
        tree = ast.parse(text.strip() if len(text) <= LONGEST else "", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ArgumentError(argument, f"is {text[:60]!r}, {expected}") from None
    match tree:
        case ast.Call(func=ast.Name(id=name), args=values, keywords=named) if name in METHODS:
            try:
                words = {str(word.arg): _value(word.value, argument) for word in named}
                return METHODS[name](*(_value(value, argument) for value in values), **words)
            except TypeError as mistake:  # called with other arguments than it has
                raise ArgumentError(argument, f"is {text[:60]!r}: {mistake}") from None
    raise ArgumentError(argument, f"is {text[:60]!r}, {expected}")


def _value(node: ast.expr, argument: str) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
    raise ArgumentError(argument, f"has {ast.unparse(node)[:60]!r}, expected numbers and words")
