"""What a call on a GPU costs beside the GPU's own time: launching, with and without the bypass; compiling, at first.

    python bench/gpu_launching.py

says as JSON how many microseconds Python takes for small calls; the sections of `bench/gpu.py` make rows of it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import clearhead as ch
from clearhead.kernels.hopper.accepts import unable

Call = Callable[[], object]
# our own kernels that run here, the one for this GPU first
OWN = ("hopper", "triton") if torch.cuda.is_available() and unable(torch.device("cuda", 0)) is None else ("triton",)


def small_calls() -> dict[str, Call]:
    """Calls that take the GPU less than they take Python, by name."""
    q, k, v = (torch.randn((1, 2, 256, 64), device="cuda", dtype=torch.bfloat16) for _ in range(3))
    one = q[:, :, :1]
    dout, mask = torch.randn_like(q), ch.causal()
    calls: dict[str, Call] = {}
    for kernel in OWN:
        calls[f"attention, {kernel}"] = partial(ch.attention, q, k, v, mask=mask, kernel=kernel)
        calls[f"observe, {kernel}"] = partial(ch.observe, q, k, v, mask=mask, kernel=kernel)
        seen = {"received": True, "map": (8, 8), "top": 2}
        calls[f"observe all, {kernel}"] = partial(ch.observe, q, k, v, mask=mask, kernel=kernel, **seen)
        calls[f"gradients, {kernel}"] = partial(ch.gradients, q, k, v, dout, mask=mask, kernel=kernel)
    calls["decode, triton"] = partial(ch.attention, one, k, v, kernel="triton")
    return calls


def host() -> None:
    """Microseconds that Python takes for each small call, the median of some rounds, as JSON."""
    found = {}
    for name, call in small_calls().items():
        for _ in range(20):
            call()
        rounds = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            rounds.append((time.perf_counter() - start) / 100 * 1e6)
        found[name] = statistics.median(rounds)
    print(json.dumps(found))


def launching(bench: Any) -> None:
    """What launching past Triton's own way saves: the same calls with CLEARHEAD_LAUNCH=plain, and without."""
    found: dict[str, dict[str, float]] = {}
    for way in ("plain", "direct"):
        ran = subprocess.run(
            [sys.executable, __file__],
            env={**os.environ, "CLEARHEAD_LAUNCH": way},
            capture_output=True,
            text=True,
            check=True,
        )
        found[way] = json.loads(ran.stdout.splitlines()[-1])
    for name, plain in found["plain"].items():
        bench.add(f"{name}: launched plainly", plain, "µs")
        bench.add(f"{name}: launched directly", found["direct"][name], "µs")


FIRST = {
    "attention": "ch.attention(q, k, v, mask=ch.causal(), kernel=kernel)",
    "observe": "ch.observe(q, k, v, mask=ch.causal(), kernel=kernel)",
    "observe all": "ch.observe(q, k, v, mask=ch.causal(), kernel=kernel, received=True, map=(64, 64), top=8)",
    "gradients": "ch.gradients(q, k, v, q, mask=ch.causal(), kernel=kernel)",
    "softcap": "ch.attention(q, k, v, softcap=30.0, kernel=kernel)",
    "window, observed": "ch.observe(q, k, v, mask=ch.window(100), kernel=kernel)",
}
FRESH = """
import sys, time, torch, clearhead as ch
kernel = sys.argv[1]
q, k, v = (torch.randn((1, 16, 4096, 128), device="cuda", dtype=torch.bfloat16) for _ in range(3))
ch.plan(q, k, v)  # imports what there is
import clearhead.kernels.triton.launch
torch.cuda.synchronize()
start = time.perf_counter()
{call}
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def compiling(bench: Any) -> None:
    """The first call of a kind in a new process, with nothing in Triton's cache: compiling, for the most part."""
    for kernel, (name, call) in ((kernel, item) for kernel in OWN for item in FIRST.items()):
        with tempfile.TemporaryDirectory() as folder:
            ran = subprocess.run(
                [sys.executable, "-c", FRESH.format(call=call), kernel],
                env={**os.environ, "TRITON_CACHE_DIR": folder},
                capture_output=True,
                text=True,
                check=True,
            )
        bench.at_most(f"{name}, {kernel}: the first call", float(ran.stdout.split()[-1]), "s", 3.0)


if __name__ == "__main__":
    host()
