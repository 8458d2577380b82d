"""Hopper's second look, cut up in several ways: is each right, and how fast, next to cuDNN's forward.

    PYTHONPATH=src python bench/gluon_look.py --seconds 120

Every cut is checked in a process of its own, as in `gluon_probe.py`; those that were right are timed in one process.
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
    "3 consumers": {},
    "by 32": {"stages": 4, "offered": 32},
    "3 stages, by 32": {"offered": 32},
}

# batch, heads, heads of keys, queries, keys, causal offset, window, softcap, scale of the scores, received, map
CASES = (
    (1, 2, 2, 512, 512, None, None, None, 1, True, (4, 4)),
    (2, 3, 3, 131, 257, None, None, None, 1, True, (7, 5)),
    (1, 4, 2, 1000, 1000, 0, None, None, 1, True, (9, 13)),
    (2, 4, 1, 77, 613, 536, None, None, 1, True, (64, 64)),
    (1, 2, 2, 515, 300, -215, None, None, 1, True, (3, 2)),
    (1, 2, 2, 300, 515, 7, None, None, 1, 40, (3, 2)),
    (1, 2, 2, 1, 1, 0, None, None, 1, True, (2, 2)),
    (1, 2, 2, 390, 1023, None, None, None, 3000, True, (2, 2)),
    (1, 2, 1, 2048, 2048, 0, None, None, 1, True, (8, 8)),
    (1, 2, 1, 900, 1100, 200, 130, None, 1, True, (5, 6)),
    (1, 2, 2, 700, 500, 0, 5, None, 1, 33, None),
    (1, 2, 2, 300, 515, 215, None, 5.0, 4, True, (3, 3)),
    (1, 2, 1, 300, 400, 0, None, None, 0, True, (4, 4)),
)

SHAPES = ((1, 16384, 128, None), (1, 16384, 128, 0), (1, 16384, 64, None), (2, 4096, 128, 0))


def exact(q: Any, k: Any, scale: float, offset: Any, window: Any, softcap: Any, dtype: Any) -> Any:
    """The weights in this dtype."""
    import torch

    scores = q.to(dtype) @ k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if offset is not None:
        row = torch.arange(q.shape[2], device=q.device)[:, None] + offset
        column = torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(column > row, -math.inf)
        if window is not None:
            scores = scores.masked_fill(column < row - window, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0)


def pooled(weights: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """The mean and the largest weight of each cell, cell by cell."""
    import torch

    from clearhead.core.grid import bins

    cells = [
        [weights[..., r.start : r.stop, c.start : c.stop] for c in bins(weights.shape[-1], shape[1])]
        for r in bins(weights.shape[-2], shape[0])
    ]
    mean = torch.stack([torch.stack([cell.mean((-1, -2)) for cell in row], -1) for row in cells], -2)
    most = torch.stack([torch.stack([cell.amax((-1, -2)) for cell in row], -1) for row in cells], -2)
    return mean, most


def wrong(case: tuple[Any, ...], width: int, dtype: Any, cut: Any, seed: int) -> str | None:
    """What a case gets wrong, in words."""
    import torch

    from clearhead.kernels.hopper.forward import forward
    from clearhead.kernels.hopper.second_look import look

    batch, heads, kv_heads, queries, keys, offset, window, softcap, size, received, map = case
    top = 8 if cut is None or cut.consumers < 4 else 0
    make = torch.Generator("cuda").manual_seed(seed)

    def draw(h: int, n: int) -> torch.Tensor:
        return torch.randn((batch, n, h, width), generator=make, device="cuda").to(dtype).transpose(1, 2)

    q, k = draw(heads, queries), draw(kv_heads, keys)
    scale = (size or 1) / math.sqrt(width)
    if not size:  # all weights the same: more candidates than a list holds
        q.zero_()
    if offset is not None:  # keys that nobody sees may hold anything; the reference must not
        for hidden in (slice(max(queries + offset, 0), None), slice(0, max(offset - window, 0) if window else 0)):
            k[:, :, hidden] = 0
    right = exact(q, k, scale, offset, window, softcap, torch.float64)
    plain = exact(q, k, scale, offset, window, softcap, torch.float32)
    if offset is not None:
        for hidden in (slice(max(queries + offset, 0), None), slice(0, max(offset - window, 0) if window else 0)):
            k[:, :, hidden] = math.nan
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    done = forward(q, k, k, scale, offset, window, softcap, top=top)
    count = queries if received is True else received
    options = (q, k, done, scale, offset, window, softcap, count, map, top, cut)
    runs = [look(*options) for _ in range(3)]
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    tell = {"received": (runs[0][0], right[..., -count:, :].sum(-2), plain[..., -count:, :].sum(-2))}
    if map:
        tell |= zip(("mean", "max"), zip(runs[0][1], pooled(right, map), pooled(plain, map), strict=True), strict=True)
        if any(not torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0][1], run[1], strict=True)):
            return "maps of several runs differ"
    if any(not torch.equal(runs[0][0], run[0]) for run in runs[1:]):
        return "runs differ"
    if top:
        indices, weights = runs[0][2]
        some = min(top, keys)
        missing = (0, top - some)
        one, other = (torch.nn.functional.pad(x.topk(some, -1).values, missing) for x in (right, plain))
        tell["top"] = (weights, one, other)
        if not torch.equal(indices < 0, weights == 0):
            return "top: indices where there is no weight, or none where there is"
        named = torch.nn.functional.pad(right, (0, 1)).gather(-1, indices.where(indices >= 0, keys))
        tell["weights of the keys named in top"] = (weights, named, other)
        ordered = indices.where(indices >= 0, -1 - torch.arange(top, device="cuda")).sort(-1).values
        if (ordered.diff(dim=-1) == 0).any() or (weights.diff(dim=-1) > 0).any():
            return "top: the same key twice, or weights that ascend"
        if any(not torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0][2], run[2], strict=True)):
            return "top differs from run to run"
    for what, (mine, one, other) in tell.items():
        if mine.shape != one.shape:
            return f"{what} has shape {tuple(mine.shape)}, not {tuple(one.shape)}"
        if not mine.isfinite().all():
            return f"{what}: {(~mine.isfinite()).sum().item()} of {mine.numel()} not finite"
        off = (mine.double() - one).abs().max().item()
        allowed = 2 * (other.double() - one).abs().max().item() + math.sqrt(keys) * 2**-23 * one.abs().max().item()
        if off > allowed:
            return f"{what} off by {off:.2e}, allowed {allowed:.2e}"
    return None


def check(name: str, part: str) -> list[str]:
    """What one cut gets wrong, over all cases."""
    import torch

    from clearhead.kernels.hopper.second_look import LookCut

    problems = []
    kind, _, third = part.partition("/")
    width = {"D=64": 64, "D=256": 256}.get(kind, 128)
    dtype = torch.bfloat16 if width == 128 else torch.float16
    cases = list(enumerate(CASES))
    for number, case in cases[:3] + cases[8:9] if kind == "some" else cases[int(third) :: 3]:
        found = wrong(case, width, dtype, LookCut(**CUTS[name]) if kind == "some" else None, seed=number + width)
        if found:
            problems.append(f"D={width} {case}: {found}")
    return problems


# what each process checks: some cases for every cut, and all of them, in three parts, for the preferred cuts
PARTS = [(name, "some") for name in CUTS] + [
    ("preferred", f"{kind}/{third}") for kind in ("D=128", "D=64", "D=256") for third in range(3)
]


def compiled() -> list[str]:
    """Registers, spilled bytes and shared memory of what was compiled."""
    from clearhead.kernels.hopper.weights_kernel import by_key

    lines = []
    for caches in by_key.device_caches.values():
        for kernel in caches[0].values():
            kernel._init_handles()
            lines.append(f"{kernel.n_regs} regs, {kernel.n_spills} spills, {kernel.metadata.shared} B")
    return sorted(set(lines))


def milliseconds(call: Callable[[], Any]) -> float:
    import triton

    return float(triton.testing.do_bench(call, warmup=20, rep=60, return_mode="median"))


def time_all(names: list[str]) -> None:
    """Milliseconds of each cut at each shape, two rounds, a JSON line each."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from clearhead.kernels.hopper.forward import forward
    from clearhead.kernels.hopper.second_look import LookCut, look

    def report(name: str, column: str, call: Callable[[], Any]) -> None:
        try:
            print(json.dumps([name, column, milliseconds(call)]), flush=True)
        except Exception as error:
            print(json.dumps([name, column, None]), repr(error)[:300], flush=True)

    def cudnn(q: Any, k: Any, v: Any, causal: bool) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    for _ in range(2):
        for batch, n, width, offset in SHAPES:
            q, k, v = (torch.randn((batch, 16, n, width), device="cuda", dtype=torch.bfloat16) for _ in range(3))
            column = f"{n} D={width}" + ("" if offset is None else " causal")
            scale = width**-0.5
            report("cuDNN's forward", column, lambda: cudnn(q, k, v, offset is not None))
            report("forward", column, lambda: forward(q, k, v, scale, offset))
            report("forward, entropy", column, lambda: forward(q, k, v, scale, offset, entropy=True))
            report("forward, entropy, top", column, lambda: forward(q, k, v, scale, offset, entropy=True, top=8))
            done = forward(q, k, v, scale, offset, top=8)
            options = (q, k, done, scale, offset)
            for name in names:
                cut = LookCut(**CUTS[name])
                report(name, column, lambda: look(*options, received=n, map=(64, 64), cut=cut))
            for name in names:
                if "4" not in name:
                    cut = LookCut(**CUTS[name])
                    report(name + ", top", column, lambda: look(*options, received=n, map=(64, 64), top=8, cut=cut))
            report("preferred", column, lambda: look(*options, received=n, map=(64, 64)))
            report("preferred, received only", column, lambda: look(*options, received=n))
            report("preferred, top", column, lambda: look(*options, received=n, map=(64, 64), top=8))
            if n == 16384 and width == 128:
                kernels_of(column, lambda: look(*options, received=n, map=(64, 64), top=8))


def kernels_of(column: str, call: Callable[[], Any]) -> None:
    """Print how long each kernel of a call took."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    took = {event.key: event.device_time_total / 1e3 for event in profile.key_averages()}
    print(column, {name[:40]: round(ms, 3) for name, ms in took.items() if ms > 0.004}, flush=True)


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
        lines = until(process, limit).strip().splitlines()
        verdict = lines[-1] if lines and process.returncode == 0 else "FAILED"
        print(f"{name:<26} {part:<9} {verdict[:200]}")
        if verdict.startswith("right"):
            good += [name] if part == "some" else []
        else:
            print("    " + "\n    ".join(lines[-8:])[:1200])
    return good


def show(said: str) -> None:
    """The table, from the lines of `time_all`."""
    table: dict[str, dict[str, list[float]]] = {}
    columns: list[str] = []
    for line in said.splitlines():
        if not line.startswith('["'):
            print(line[:300])
            continue
        name, column, took = json.JSONDecoder().raw_decode(line)[0]
        columns += [column] if column not in columns else []
        table.setdefault(name, {}).setdefault(column, []).append(took or math.nan)
    print("\nmilliseconds, bf16, 16 heads: mean of two rounds' medians, half their difference, times cuDNN's forward")
    print(" " * 26 + "".join(f"{column:>24}" for column in columns))
    for name, row in table.items():
        cells = []
        for c in columns:
            if c not in row:
                cells.append("")
                continue
            mean, base = statistics.mean(row[c]), statistics.mean(table["cuDNN's forward"][c])
            cells.append(f"{mean:.3f} ±{(max(row[c]) - min(row[c])) / 2:.3f} {mean / base:.2f}×")
        print(f"{name:<26}" + "".join(f"{cell:>24}" for cell in cells))


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
