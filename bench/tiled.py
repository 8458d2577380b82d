"""The tiled kernel in NumPy against the plain three-line formula: ratios, interleaved in one run.

python bench/tiled.py              # the ratio at 4,096 positions and eight heads, then the crossover with `dense`
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import clearhead as ch


def formula(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def arrays(heads: int, n: int, width: int = 64) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((heads, n, width), dtype=np.float32) for _ in range(3)]


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return times


def main() -> None:
    q, k, v = arrays(8, 4096)
    calls = {
        "formula": lambda: formula(q, k, v),
        "formula again": lambda: formula(q, k, v),  # its memory is warm now, which is the best it can do
        "tiled": lambda: ch.attention(q, k, v, kernel="tiled"),
        "tiled, causal": lambda: ch.attention(q, k, v, mask=ch.causal(), kernel="tiled"),
    }
    times = {name: statistics.median(runs) for name, runs in interleaved(calls, 5).items()}
    print("8 heads × 4,096 positions × 64 features, float32, medians of 5 interleaved runs")
    for name, best in times.items():
        print(f"  {name:<16} {best:6.3f} s   formula / this: {times['formula'] / best:.2f}")

    print("\nthe crossover: dense / tiled, one head and eight")
    for heads in (1, 8):
        for n in (64, 128, 256, 512, 1024, 2048):
            runs = interleaved(
                {name: partial(ch.attention, *arrays(heads, n), kernel=name) for name in ("dense", "tiled")},
                max(3, min(200, 2**22 // (heads * n * n))),
            )
            dense, tiled = (statistics.median(runs[name]) for name in ("dense", "tiled"))
            print(f"  {heads} × {n:>5}²  {heads * n * n:>12,} scores   {dense / tiled:5.2f}   {tiled * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
