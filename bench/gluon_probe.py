"""Hopper's attention kernel, cut up in several ways: is each right, and how fast, next to cuDNN.

    PYTHONPATH=src python bench/gluon_probe.py --seconds 120

A wrong barrier can hang the GPU, so that every cut is checked in a process of its own, which is killed when its time is
up. All of them compile and check at once; then those that were right are timed, one after another, in one process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

CUTS: dict[str, dict[str, Any]] = {
    "turns": {},
    "no turns": {"turns": False},
    "turns, 3 stages": {"stages": 3},
    "no turns, 3 stages": {"stages": 3, "turns": False},
    "turns, no overlap": {"overlap": False},
    "no turns, no overlap": {"turns": False, "overlap": False},
    "8 warps as one": {"rows": 128, "consumers": 1, "turns": False},
    "3 consumers": {"consumers": 3, "registers": 160},
    "3 consumers, no turns": {"consumers": 3, "registers": 160, "turns": False},
    "3 consumers, no overlap": {"consumers": 3, "registers": 160, "overlap": False},
    "64 columns": {"columns": 64, "stages": 4},
}

# batch, heads, heads of keys, queries, keys, causal offset, window, softcap, scale of the scores
CASES = (
    (1, 2, 2, 128, 128, None, None, None, 1),
    (2, 3, 3, 131, 257, None, None, None, 1),
    (1, 4, 2, 1000, 1000, 0, None, None, 1),
    (2, 4, 1, 77, 613, 536, None, None, 1),
    (1, 2, 2, 515, 300, -215, None, None, 1),
    (1, 2, 2, 300, 515, 7, None, None, 1),
    (1, 2, 2, 1, 1, 0, None, None, 1),
    (1, 2, 2, 390, 1023, None, None, None, 3000),
)
# the same, and whether the entropy is wanted: each of these is compiled anew
FORMS = (
    (1, 4, 2, 1000, 1000, 0, None, None, 1, True),
    (1, 2, 1, 900, 1100, 200, 130, None, 1, False),
    (1, 2, 2, 700, 500, 0, 5, None, 1, False),
    (1, 2, 2, 300, 515, 215, None, 5.0, 4, False),
)
SHAPES = ((128, None), (128, 0), (64, None), (64, 0))


def fits(name: str, width: int) -> bool:
    return width != 128 or not name.startswith("3 consumers")


def exact(q: Any, k: Any, v: Any, scale: float, offset: Any, window: Any, softcap: Any, dtype: Any) -> tuple[Any, ...]:
    """Output, log-sum-exp, largest score and entropy in float64; and the output with weights of this dtype."""
    import torch

    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if offset is not None:
        row = torch.arange(q.shape[2], device=q.device)[:, None] + offset
        column = torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(column > row, -math.inf)
        if window is not None:
            scores = scores.masked_fill(column < row - window, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    plain = (weights.to(dtype).float() @ v.float()).to(dtype).double()
    return weights @ v, scores.logsumexp(-1), scores.amax(-1), entropy, plain


def wrong(case: tuple[Any, ...], width: int, cut: Any, entropy: bool, seed: int) -> str | None:
    """What a case gets wrong, in words."""
    import torch

    from clearhead.kernels.hopper.forward import forward

    batch, heads, kv_heads, queries, keys, offset, window, softcap, size, name = case
    dtype = getattr(torch, name)
    make = torch.Generator("cuda").manual_seed(seed)

    def draw(h: int, n: int) -> torch.Tensor:
        return torch.randn((batch, n, h, width), generator=make, device="cuda").to(dtype).transpose(1, 2)

    q, k, v = draw(heads, queries), draw(kv_heads, keys), draw(kv_heads, keys)
    scale = size / math.sqrt(width)
    o, lse, top, spread, plain = exact(q, k, v, scale, offset, window, softcap, dtype)
    if offset is not None:  # keys that nobody sees may hold anything
        for hidden in (slice(max(queries + offset, 0), None), slice(0, max(offset - window, 0) if window else 0)):
            k[:, :, hidden] = math.nan
            v[:, :, hidden] = math.nan
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    runs = [forward(q, k, v, scale, offset, window, softcap, entropy, cut) for _ in range(3)]
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    output, peak, total, weighted = runs[0]
    if any(not torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0][:3], run[:3], strict=True)):
        return "runs differ"
    if not output.isfinite().all():
        return f"{(~output.isfinite()).sum().item()} of {output.numel()} outputs not finite"
    off = (output.double() - o).abs().max().item()
    allowed = 2 * (plain - o).abs().max().item() + math.sqrt(keys) * torch.finfo(dtype).eps * o.abs().max().item()
    if off > allowed:
        return f"output off by {off:.2e}, allowed {allowed:.2e}"
    some = top > -math.inf
    if not torch.equal(some, peak > -math.inf) or not torch.equal(some, total > 0):
        return "rows that see nothing"
    tell = {"peak": (peak, top), "lse": (peak + total.log(), lse)}
    if weighted is not None:
        tell["entropy"] = (total.log() - weighted / total, spread)
    for what, (mine, right) in tell.items():
        gap = (mine.double() - right)[some].abs()
        if some.any() and not (gap <= 2e-4 + 2e-6 * top[some].abs()).all():
            return f"{what} off by {gap.max().item():.2e}"
    return None


# what each process checks: every cut in bfloat16; what compiles anew for two of them only
PARTS = [(name, "bfloat16") for name in CUTS] + [
    ("turns", "float16"),
    ("turns", "forms"),
    ("3 consumers", "forms"),
    ("64 columns", "D=256"),
]


def check(name: str, part: str) -> list[str]:
    """What one cut gets wrong, over all cases."""
    from clearhead.kernels.hopper.schedule import CUTS as PREFERRED
    from clearhead.kernels.hopper.schedule import Cut

    problems = []
    for width in (256,) if part == "D=256" else (128, 64):
        if not fits(name, width):
            continue
        cut = PREFERRED[256] if width == 256 else Cut(**CUTS[name])
        for number, case in enumerate(FORMS if part == "forms" else CASES):
            kind = "float16" if part == "float16" else "bfloat16"
            found = wrong((*case[:9], kind), width, cut, part == "forms" and bool(case[-1]), seed=number + width)
            if found:
                problems.append(f"D={width} {case}: {found}")
        if part == "bfloat16" and races(width, cut):
            problems.append(f"D={width}, N=4096 causal: runs differ, or not what PyTorch gives")
    return problems


def races(width: int, cut: Any) -> bool:
    """Whether repeated runs differ at a size that fills the chip, or are not what PyTorch gives."""
    import torch

    from clearhead.kernels.hopper.forward import forward

    q, k, v = (torch.randn((2, 16, 4096, width), device="cuda", dtype=torch.bfloat16) for _ in range(3))
    runs = [forward(q, k, v, 0.1, 0, cut=cut).output for _ in range(10)]
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1)
    return any(not torch.equal(runs[0], run) for run in runs) or bool((runs[0] - right).abs().max() > 0.05)


def compiled() -> list[str]:
    """Registers, spilled bytes and shared memory of what was compiled."""
    from clearhead.kernels.hopper.forward_kernel import attend

    lines = []
    for caches in attend.device_caches.values():
        for kernel in caches[0].values():
            kernel._init_handles()
            lines.append(f"{kernel.n_regs} regs, {kernel.n_spills} spills, {kernel.metadata.shared} B")
    return sorted(set(lines))


def milliseconds(call: Callable[[], Any]) -> float:
    import triton

    return float(triton.testing.do_bench(call, warmup=20, rep=120, return_mode="median"))


def time_all(names: list[str]) -> None:
    """TFLOP/s of each cut at each shape, two rounds, a JSON line each."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from clearhead.kernels.hopper.forward import forward
    from clearhead.kernels.hopper.schedule import Cut

    def report(name: str, column: str, work: float, call: Callable[[], Any]) -> None:
        try:
            print(json.dumps([name, column, work / milliseconds(call) / 1e9]), flush=True)
        except Exception as error:
            print(json.dumps([name, column, None]), repr(error)[:300], flush=True)

    def cudnn(q: Any, k: Any, v: Any, causal: bool) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    n = 16384
    for _ in range(2):
        for width, offset in SHAPES:
            q, k, v = (torch.randn((1, 16, n, width), device="cuda", dtype=torch.bfloat16) for _ in range(3))
            work = 4 * 16 * n * n * width * (1 if offset is None else 0.5)
            column = f"D={width}" + ("" if offset is None else " causal")
            report("cuDNN", column, work, lambda: cudnn(q, k, v, offset is not None))
            for name in names:
                if fits(name, width):
                    cut = Cut(**CUTS[name])
                    report(name, column, work, lambda: forward(q, k, v, width**-0.5, offset, cut=cut))
            if offset == 0 and width == 128 and "turns" in names:
                options: dict[str, dict[str, Any]] = {
                    "window 1024": {"window": 1024},
                    "softcap": {"softcap": 30.0},
                    "entropy": {"entropy": True},
                }
                for name, option in options.items():
                    pairs = work if "window" not in option else 4 * 16 * n * 1025 * width
                    report(name, column, pairs, lambda: forward(q, k, v, width**-0.5, 0, **option))
    q, k, v = (torch.randn((2, 16, 4096, 128), device="cuda", dtype=torch.bfloat16) for _ in range(3))
    work = 4 * 32 * 4096 * 4096 * 128
    report("cuDNN", "(2, 4096)", work, lambda: cudnn(q, k, v, False))
    report("preferred", "(2, 4096)", work, lambda: forward(q, k, v, 128**-0.5))
    report("cuDNN", "(2, 4096) causal", work / 2, lambda: cudnn(q, k, v, True))
    report("preferred", "(2, 4096) causal", work / 2, lambda: forward(q, k, v, 128**-0.5, 0))
    q, k, v = (torch.randn((1, 16, n, 256), device="cuda", dtype=torch.bfloat16) for _ in range(3))
    report("preferred", "D=256 causal", 2 * 16 * n * n * 256, lambda: forward(q, k, v, 1 / 16, 0))


def spawn(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, os.path.abspath(__file__), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(process: subprocess.Popen[str], limit: float) -> str:
    """What a process said by then; it is killed if it is not done."""
    try:
        return process.communicate(timeout=max(limit - time.monotonic(), 1))[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0] + "\nkilled: out of time"


def check_all(limit: float) -> list[str]:
    """Check every cut at once; print what was found; the names of those that were right."""
    processes = [(name, part, spawn("--check", name, part)) for name, part in PARTS]
    good = []
    for name, part, process in processes:
        said = until(process, limit).strip()
        lines = said.splitlines()
        verdict = lines[-1] if lines and process.returncode == 0 else "FAILED"
        print(f"{name:<24} {part:<9} {verdict[:200]}")
        if verdict.startswith("right"):
            good += [name] if part == "bfloat16" else []
        else:
            print("    " + "\n    ".join(lines[-6:])[:900])
    return good


def show(said: str) -> None:
    """The table, from the lines of `time_all`."""
    table: dict[str, dict[str, list[float]]] = {}
    columns: list[str] = []
    for line in said.splitlines():
        if not line.startswith('["'):
            print(line[:300])
            continue
        name, column, rate = json.JSONDecoder().raw_decode(line)[0]
        columns += [column] if column not in columns else []
        table.setdefault(name, {}).setdefault(column, []).append(rate or math.nan)
    print("\nTFLOP/s, bf16, 16 heads, N = 16,384: median (and the spread of two rounds)")
    print(" " * 24 + "".join(f"{column:>18}" for column in columns))
    for name, row in table.items():
        cells = [
            f"{statistics.mean(row[c]):.0f} ±{(max(row[c]) - min(row[c])) / 2:.0f}" if c in row else "" for c in columns
        ]
        print(f"{name:<24}" + "".join(f"{cell:>18}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--check", nargs=2)
    parser.add_argument("--time", nargs="*")
    options = parser.parse_args()
    if options.check:
        try:
            problems = check(*options.check)
            print("\n".join(problems))
            print(("WRONG in " + str(len(problems)) if problems else "right") + "; " + " | ".join(compiled()))
        except Exception:
            traceback.print_exc(limit=-3)
            sys.exit(1)
    elif options.time is not None:
        time_all(options.time)
    else:
        start = time.monotonic()
        good = check_all(start + options.seconds * 0.6)
        print(f"checked in {time.monotonic() - start:.0f} s")
        show(until(spawn("--time", *good), start + options.seconds))
        print(f"{time.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    main()
