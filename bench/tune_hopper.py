"""Hopper's kernels in tiles of other sizes: is each right by the tests' own cases and budget, and how fast.

    python bench/tune_hopper.py [forward|lists|look|backward …] [--head-dims 128 64] [--seconds 120]

Times are of full and causal calls; with `lists`, of a call under each of the sparse masks, forward and then observed.

A wrong barrier can hang the GPU, so every candidate is checked in a process of its own, which is ended when its time is
up; all of them compile and check at once. Those that were right are timed one after another, each in a new process too:
a call keeps the kernels that it was first made with.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

# fields of `TileConfig`, `LookConfig` and `BackwardConfig` that are tried; none: what is in use
CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {
    "forward": {
        "in use": {},
        "turns": {"turns": True},
        "no turns": {"turns": False},
        "turns, 3 stages": {"stages": 3, "turns": True},
        "no turns, 3 stages": {"stages": 3, "turns": False},
        "no overlap": {"overlap": False},
        "8 warps as one": {"rows": 128, "consumers": 1, "turns": False},
        "3 consumers": {"consumers": 3, "registers": 160},
        "3 consumers, no overlap": {"consumers": 3, "registers": 160, "overlap": False},
        "64 columns": {"columns": 64, "stages": 4},
    },
    "lists": {
        "in use": {},
        "as without lists": {"columns": 128, "stages": 2, "consumers": 2, "apart": True, "limit": 0, "seats": 1},
        "2 programs": {"columns": 64, "stages": 3, "consumers": 1, "apart": False, "limit": 128, "seats": 2},
        "2 programs, 2 stages": {"columns": 64, "stages": 2, "consumers": 1, "apart": True, "limit": 128, "seats": 2},
        "2 programs, 128 columns": {"columns": 128, "stages": 2, "consumers": 1, "limit": 128, "seats": 2},
    },
    "look": {
        "in use": {},
        "4 stages, by 32": {"stages": 4, "offered": 32},
        "3 stages, by 32": {"stages": 3, "offered": 32},
        "64 columns": {"columns": 64},
    },
    "backward": {"in use": {}, "1 wave": {"waves": 1}, "4 waves": {"waves": 4}},
}
CASES = ("none", "causal", "window", "softcap", "documents")
LENGTH, HEADS, LISTED_LENGTH = 16384, 16, 8192


def use(part: str, head_dim: int, changes: dict[str, Any]) -> None:
    """Let a part of the kernels use other tiles, in this process."""
    from dataclasses import replace

    from clearhead.kernels.hopper import backward, schedule, second_look

    if part == "forward":
        for table in (schedule.CONFIGS, schedule.SHORT):
            table[head_dim] = replace(table[head_dim], **changes)
    elif part == "lists":
        for table in (schedule.LISTED, schedule.MIXED, schedule.OBSERVED):
            table[head_dim] = replace(table[head_dim], **changes)
    elif part == "backward":
        backward.CONFIGS[head_dim] = replace(backward.CONFIGS[head_dim], **changes)
    else:
        preferred = second_look.preferred
        second_look.preferred = lambda *given: replace(preferred(*given), **changes)


def check(head_dim: int) -> None:
    """The tests' own cases, each by their own budget."""
    from on_gpu import longer

    for dtype in ("bfloat16", "float16"):
        for name in CASES:
            longer(dtype, head_dim, name, kernel="hopper")


def measure(part: str, head_dim: int) -> None:
    """Milliseconds, full and causal, or under each of the sparse masks."""
    import torch
    from sparse_masks import patterns
    from triton.testing import do_bench

    import clearhead as ch

    length = LISTED_LENGTH if part == "lists" else LENGTH
    q, k, v = (torch.randn((1, HEADS, length, head_dim), device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found = []
    if part == "lists":
        for mask, _ in patterns(length, "cuda", 64).values():
            for call in (ch.attention, partial(ch.observe, received=True, top=8)):
                under = partial(call, q, k, v, mask=mask, kernel="hopper")
                found.append(float(do_bench(under, warmup=20, rep=60, return_mode="median")))
        print(*found)
        return
    for mask in (None, ch.causal()):
        calls = {
            "forward": lambda mask=mask: ch.attention(q, k, v, mask=mask, kernel="hopper"),
            "look": lambda mask=mask: ch.observe(
                q, k, v, mask=mask, kernel="hopper", received=True, map=(64, 64), top=8
            ),
            "backward": lambda mask=mask: ch.gradients(q, k, v, q, mask=mask, kernel="hopper"),
        }
        found.append(float(do_bench(calls[part], warmup=20, rep=60, return_mode="median")))
    print(*found)


def spawn(what: str, part: str, name: str, head_dim: int) -> subprocess.Popen[str]:
    """This file in a process of its own."""
    command = [sys.executable, __file__, part, "--do", what, "--name", name, "--head-dims", str(head_dim)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(process: subprocess.Popen[str], end: float) -> tuple[bool, str]:
    """Whether a process was done in time and all was well; and what it said last."""
    try:
        said, wrong = process.communicate(timeout=max(end - time.time(), 1))
    except subprocess.TimeoutExpired:
        process.kill()
        return False, "took too long"
    return process.returncode == 0, (said if process.returncode == 0 else wrong).strip().splitlines()[-1:][0]


def compare(part: str, head_dim: int, seconds: float) -> None:
    """Check all candidates of a part at once, then time those that are right."""
    end = time.time() + seconds
    checks = {name: spawn("check", part, name, head_dim) for name in CANDIDATES[part]}
    for name, process in checks.items():
        right, said = until(process, end)
        times = ""
        if right:
            right, said = until(spawn("time", part, name, head_dim), time.time() + seconds)
        if right:
            times, said = " ".join(f"{float(each):8.3f}" for each in said.split()), "right"
        print(f"  {part:<8} D {head_dim:>3} {name:<26} {times} ms  {said[:90]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", default=list(CANDIDATES), help=", ".join(CANDIDATES))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[128, 64])
    parser.add_argument("--seconds", type=float, default=120, help="for checking the candidates of a part")
    parser.add_argument("--do", choices=["check", "time"], help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    given = parser.parse_args()
    for part in given.parts:
        for head_dim in given.head_dims:
            if given.do is None:
                compare(part, head_dim, given.seconds)
                continue
            use(part, head_dim, CANDIDATES[part][given.name])
            if given.do == "check":
                check(head_dim)
                print("right")
            else:
                measure(part, head_dim)
    return 0


if __name__ == "__main__":
    sys.exit(main())
