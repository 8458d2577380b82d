"""What may be asked of attention that is put together from parts: what `observe` takes, but for weights of queries."""

from __future__ import annotations

from typing import Any

from clearhead.core.asking import QueryWeights
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Grid
from clearhead.core.observations import Want, want


def wanted_of_parts(grid: Grid, asked: dict[str, Any]) -> tuple[Want, int]:
    """What is asked for, checked, and how many of the last queries `received` counts."""
    found = want(grid, **asked)
    if isinstance(found.received, QueryWeights):
        raise ArgumentError(
            "received", "is an array, expected True or a number of last queries: over parts none has a weight"
        )
    return found, found.received or 0
