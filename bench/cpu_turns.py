"""Calls timed by turns on a CPU: what disturbs one disturbs all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

Calls = dict[str, Callable[[], object]]


def measure(calls: Calls, least: int = 5, seconds: float = 2.0) -> dict[str, float]:
    """Median seconds of each, taken in turn: what disturbs one disturbs all."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    while min(map(len, times.values())) < least or time.perf_counter() - start < seconds:
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - before)
        if min(map(len, times.values())) >= 200:
            break
    return {name: statistics.median(runs) for name, runs in times.items()}
