"""Calls timed by turns on a CPU: what disturbs one disturbs all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

Calls = dict[str, Callable[[], object]]


LONG = 3.0  # seconds of a call that is not taken again: what disturbs is then little


def measure(calls: Calls, least: int = 5, seconds: float = 2.0) -> dict[str, float]:
    """Median seconds of each, taken in turn: what disturbs one disturbs all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    long = {}
    for name, call in calls.items():
        call()  # the first of its kind may take seconds, whatever the others do
        before = time.perf_counter()
        call()
        if time.perf_counter() - before > LONG:
            long[name] = [time.perf_counter() - before] * least
    start = time.perf_counter()
    times |= long
    while min(map(len, times.values())) < least or time.perf_counter() - start < seconds:
        for name, call in calls.items():
            if name in long:
                continue
            before = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - before)
        if min((len(runs) for name, runs in times.items() if name not in long), default=200) >= 200:
            break
    return {name: statistics.median(runs) for name, runs in times.items()}
