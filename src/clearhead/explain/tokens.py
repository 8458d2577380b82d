"""What positions are called: a token's name or its number, and a weight drawn as a bar."""

from __future__ import annotations

from collections.abc import Sequence
from unicodedata import combining, east_asian_width

import numpy as np

from clearhead.core.errors import ArgumentError


def bar(weight: float, width: int = 40) -> str:
    """A weight between 0 and 1 as a bar of blocks; `width` of them are a weight of one.

    >>> bar(0.25, width=8)
    '██'
    """
    return "█" * round(weight * width)


def padded(words: str, width: int) -> str:
    """Words with blanks after them up to so many cells; a Chinese, Japanese or Korean letter takes two.

    >>> padded("cat", 6) + "|", padded("河岸", 6) + "|"
    ('cat   |', '河岸  |')
    """
    return words + " " * (width - cells(words))


def cells(words: str) -> int:
    """How many cells of a terminal words take.

    >>> cells("cat"), cells("河岸")
    (3, 4)
    """
    if words.isascii():
        return len(words)
    return sum(0 if combining(sign) else 2 if east_asian_width(sign) in "WF" else 1 for sign in words)


def position_of(argument: str, token: int | str, tokens: Sequence[str]) -> int:
    """Where a token is, given its position (negative from the end) or its name.

    >>> position_of("token", "cat", ["The", "cat", "sat"]), position_of("token", -1, ["The", "cat", "sat"])
    (1, 2)
    """
    count = len(tokens)
    if isinstance(token, str):
        places = [i for i, name in enumerate(tokens) if name == token]
        if len(places) > 1:
            raise ArgumentError(argument, f"is {token!r}, which is at {places}: say which one by its position")
        if places:
            return places[0]
    elif isinstance(token, int | np.integer) and not isinstance(token, bool) and -count <= token < count:
        return int(token) % count
    named = ", ".join(tokens) if count <= 8 else ", ".join([*tokens[:7], "…"])
    raise ArgumentError(argument, f"is {token!r}, expected one of {named}, or a position from {-count} to {count - 1}")


def names_for(argument: str, tokens: Sequence[str] | None, count: int, kind: str, prefix: str = "") -> tuple[str, ...]:
    """One name for each position: the tokens given, checked, or the positions themselves.

    >>> names_for("tokens", None, 2, "keys"), names_for("tokens", None, 2, "keys", prefix="key ")
    (('0', '1'), ('key 0', 'key 1'))
    """
    if tokens is None:
        return tuple(f"{prefix}{i}" for i in range(count))
    if isinstance(tokens, str):
        raise ArgumentError(argument, f"is one string, expected a name for each of {count} {kind}")
    names = tuple(map(str, tokens))
    if len(names) != count:
        raise ArgumentError(argument, f"has {len(names)} names, expected one for each of {count} {kind}")
    return names
