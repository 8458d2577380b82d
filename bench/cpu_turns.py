"""Calls timed by turns on a CPU: what disturbs one disturbs all.

Which call comes after which is drawn anew in every round. A call right after one that keeps all cores busy is slower
than after one that waits for memory: on 16 cores, with one fixed order, a sparse mask that always came after the
unmasked call took 5 % more than in the mean, and the unmasked one, always after PyTorch's masked call, 5 % less.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

Calls = dict[str, Callable[[], object]]


LONG = 3.0  # seconds of a call that is not taken again: what disturbs is then little


def measure(calls: Calls, least: int = 5, seconds: float = 2.0) -> dict[str, float]:
    """Median seconds of each, taken in turn, in an order that is drawn for each round."""
    draw = random.Random(0)
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
        for name in draw.sample(list(calls), len(calls)):
            if name in long:
                continue
            before = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - before)
        if min((len(runs) for name, runs in times.items() if name not in long), default=200) >= 200:
            break
    return {name: statistics.median(runs) for name, runs in times.items()}
