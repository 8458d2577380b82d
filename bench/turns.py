"""Calls timed by turns on a GPU, so that what slows the machine down for a while slows down all of them.

A GPU at its power limit gives a call that follows a light one a higher clock, worth several percent. So the order goes
round, forwards and backwards, and each call is warmed up by itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

from triton.testing import do_bench

Call = Callable[[], object]


def milliseconds(call: Call, warmup: int = 20, rep: int = 60) -> float:
    """The median of one call."""
    return float(do_bench(call, warmup=warmup, rep=rep, return_mode="median"))


def tried(name: str, call: Call, warmup: int = 20, rep: int = 60) -> float:
    """Milliseconds, or NaN with the reason where a peer does not take it."""
    try:
        return milliseconds(call, warmup, rep)
    except Exception as error:
        print(f"  ({name}: {type(error).__name__}: {str(error).splitlines()[0][:110]})", flush=True)
        return math.nan


def together(calls: Mapping[str, Call], rounds: int = 6, warmup: int = 20, rep: int = 30) -> dict[str, float]:
    """Milliseconds of each, the median over the rounds; NaN with the reason where one does not take it."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        first = turn // 2 % len(names)
        order = names[first:] + names[:first]
        for name in reversed(order) if turn % 2 else order:
            if not any(map(math.isnan, times[name])):
                times[name].append(tried(name, calls[name], warmup, rep))
    return {name: statistics.median(taken) for name, taken in times.items()}
