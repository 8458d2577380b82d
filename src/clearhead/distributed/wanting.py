"""What may be asked of attention that is put together from parts: what `observe` takes, checked as there."""

from __future__ import annotations

from typing import Any

from clearhead.core.grid import Grid
from clearhead.core.observations import Want, want
from clearhead.core.problem import Problem, refuse_removal


def wanted_of_parts(problem: Problem, grid: Grid, asked: dict[str, Any]) -> Want:
    """What is asked for of a call of that size, of which `problem` is a part."""
    found = want(grid, **asked)
    refuse_removal(problem.dropout, found)
    return found
