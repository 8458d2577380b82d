"""What is wanted of every call that a model makes: the options of `observe`, and three of `watch`'s own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import Grid
from clearhead.core.observations import OBSERVATIONS, want

OBSERVED = tuple(OBSERVATIONS)
OWN = ("distance", "keep", "output")
ALWAYS = ("lse", "max_score", "entropy")  # which are observed in any case
# positions are checked against the length of each call, which is not known before it is made
LONGEST = 2**40


@dataclass(frozen=True)
class Wanted:
    """What to observe of each call, and what else to hold on to."""

    options: Mapping[str, Any]
    distance: bool = False
    keep: bool = False
    output: bool = False

    def for_length(self, queries: int) -> dict[str, Any]:
        """The options for a call with so many queries: positions that it does not have are left out."""
        return {name: OBSERVATIONS[name].within(asked, queries) for name, asked in self.options.items()}

    def counted(self, queries: int) -> int | None:
        """How many last queries `received` counts, of so many; None for all."""
        received: Any = self.options.get("received")
        return None if received is None or isinstance(received, bool) or received >= queries else int(received)


def wanted(given: Mapping[str, Any] | None) -> Wanted:
    """`want=` as it was given, checked; what a summary shows where nothing was said.

    >>> wanted(None).options, wanted(None).distance
    ({'received': True}, True)
    >>> wanted({"top": 8}).options, wanted({"top": 8}).distance
    ({'top': 8}, False)
    """
    if given is None:
        return Wanted({"received": True}, distance=True)
    if not isinstance(given, Mapping):
        raise ArgumentError(
            "want", f"is a {type(given).__name__}, expected a dict such as {{'top': 8, 'received': True}}"
        )
    unknown = [name for name in given if name not in OBSERVED + OWN + ALWAYS]
    if unknown:
        raise ArgumentError("want", f"has {unknown[0]!r}, expected some of {', '.join(OBSERVED + OWN)}")
    for name in OWN + ALWAYS:
        if not isinstance(given.get(name, False), bool):
            raise ArgumentError("want", f"has {name}={given[name]!r}, expected True or False")
    options = {name: given[name] for name in OBSERVED if given.get(name) is not None}
    if not isinstance(options.get("received", True), bool | int | np.integer):
        raise ArgumentError(
            "want", f"has received={shown(options['received'])}, expected True or a number: calls differ in length"
        )
    want(Grid((), 1, LONGEST, LONGEST), **options)
    return Wanted(options, *(bool(given.get(name, False)) for name in OWN))
