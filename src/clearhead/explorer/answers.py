"""The page's only source of numbers: an address and its parameters in, JSON or one array out, for every host alike.

The live server asks here when the page does, and a saved file carries what was asked here before. Addresses are spelled
one way (`spelled`), so that the page finds in a file what it would have asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qsl, quote, urlsplit

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.explain.tracing import jsonable
from clearhead.explorer.given import given_scene
from clearhead.explorer.scene import Scene, finite

LONGEST = 64_000  # characters of an address: a few thousand edited cells

Params = Mapping[str, str]


class Subject(Protocol):
    """What is explored: a call, or a model, any layer of which is one."""

    def scene(self, params: Params) -> Scene:
        """The call that is looked at."""

    def facts(self, params: Params) -> dict[str, Any]:
        """What a page has to know besides the call."""


@dataclass(frozen=True)
class Answer:
    """What goes over the wire: its bytes, and whether they are JSON or an array."""

    body: bytes
    kind: str  # "json" or "array"


Answers = Callable[[Any, Params], Any]


class Routes:
    """What can be asked, by address, and of what kind of subject: of any, its call. A view's module adds its own."""

    def __init__(self) -> None:
        self.known: dict[str, dict[type | None, Answers]] = {}

    def __call__(self, path: str, of: type | None = None) -> Callable[[Answers], Answers]:
        def add(answers: Answers) -> Answers:
            kinds = self.known.setdefault(path, {})
            assert of not in kinds, path
            kinds[of] = answers
            return answers

        return add


route = Routes()
KEPT: list[Callable[[Subject], Iterable[str]]] = []


def keep(addresses: Callable[[Subject], Iterable[str]]) -> Callable[[Subject], Iterable[str]]:
    """A view's own addresses that a saved file holds, beside those of every call."""
    KEPT.append(addresses)
    return addresses


def answer(subject: Subject, address: str) -> Answer:
    """What the page asked for. Words that say what is wrong are an `ArgumentError`, as everywhere."""
    if len(address) > LONGEST:
        raise ArgumentError("address", f"has {len(address):,} characters, expected at most {LONGEST:,}")
    parts = urlsplit(address)
    if parts.path not in route.known:
        raise ArgumentError("address", f"is {parts.path[:60]!r}, which nothing answers to")
    params = dict(parse_qsl(parts.query, keep_blank_values=True))
    kinds = route.known[parts.path]
    example = given_scene(params["given"]) if params.get("given") else None
    mine = [one for one in kinds if one is not None and isinstance(subject, one)]
    kind = mine[0] if mine and not (example and None in kinds) else None
    if kind is None and None not in kinds:
        raise ArgumentError("address", f"{parts.path} is asked of a model, and this is one call")
    found = kinds[kind]((example or subject.scene(params)) if kind is None else subject, params)
    if parts.path == "/about":
        found |= {} if example else subject.facts(params)
    if isinstance(found, np.ndarray):
        return Answer(packed(found), "array")
    return Answer(json.dumps(jsonable(found), ensure_ascii=False, separators=(",", ":")).encode(), "json")


def packed(array: np.ndarray) -> bytes:
    """An array as it travels: the length of a header, the header in JSON, and the numbers, little-endian.

    >>> packed(np.array([[1, 2]], np.uint8))[4:-2].decode()
    '{"dtype":"u1","shape":[1,2]}'
    """
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    header = json.dumps({"dtype": little.dtype.str[1:], "shape": array.shape}, separators=(",", ":")).encode()
    header += b" " * (-(4 + len(header)) % 8)  # so that numbers begin where JavaScript can read them
    return len(header).to_bytes(4, "little") + header + little.tobytes()


def spelled(path: str, **params: Any) -> str:
    """An address as the page spells it: parameters in the order of their names, and none that say nothing.

    >>> spelled("/cell", query=1, key=2, mask=None)
    '/cell?key=2&query=1'
    """
    said = [(name, value) for name, value in sorted(params.items()) if value is not None and value != ""]
    query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in said)
    return f"{path}?{query}" if query else path


def whole(params: Params, name: str, count: int, default: int = 0) -> int:
    """A position that a parameter says, below `count`."""
    text = params.get(name, "")
    if not text:
        return default
    if not text.lstrip("-").isdigit() or len(text) > 9 or not -count <= int(text) < count:
        raise ArgumentError(name, f"is {text[:40]!r}, expected a whole number from 0 to {count - 1}")
    return int(text) % count


def number(params: Params, name: str, default: float | None = None) -> float | None:
    """A finite number that a parameter says."""
    text = params.get(name, "")
    if not text:
        return default
    return finite(name, text)
