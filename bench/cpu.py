"""The compiled kernel against its peers on this CPU: ratios, interleaved in one run, and the machine's own limits.

    python bench/cpu.py [SECTION ...] [--quick] [--calls] [--masks] [--sets] [--json FILE]

Every ratio is the median time of the peer divided by ours, above 1 where we are faster. Peers run as users run them,
with all threads, on contiguous float32 tensors of batch 1 and 8 heads.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import platform
import statistics
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from cpu_calls import decoding, eager, observing, precisions, scaling, short, training
from cpu_sets import half_by_set
from cpu_turns import Calls, measure
from sparse_masks import on_cpu
from torch.nn.functional import scaled_dot_product_attention

import clearhead as ch

SECTIONS_OF_CALLS = (short, training, decoding, precisions, observing, scaling)
HEADS = 8
SMALL_CALLS = 50


def tensors(queries: int, keys: int, width: int, grad: bool = False) -> list[torch.Tensor]:
    shapes = (1, HEADS, queries, width), (1, HEADS, keys, width), (1, HEADS, keys, width)
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def numpy_formula(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


class Report:
    """Rows printed as they come, and kept for the JSON."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(self, what: str, peer: str, ratio: float, target: str, **more: object) -> None:
        self.rows.append({"what": what, "peer": peer, "ratio": ratio, "target": target, **more})
        notes = "  ".join(f"{name} {value}" for name, value in more.items())
        print(f"  {what:<34} {peer:<22} {ratio:6.2f}   {target:<9} {notes}", flush=True)

    def title(self, text: str) -> None:
        print(f"\n{text}", flush=True)


def forward(report: Report, lengths: tuple[int, ...]) -> None:
    report.title("forward against PyTorch's SDPA (geometric mean ≥ 1.4, worst ≥ 1.12)")
    ratios = []
    matrix = torch.randn(1536, 1536)
    for n in lengths:
        for width in (64, 128):
            for causal in (False, True):
                q, k, v = tensors(n, n, width)
                mask = ch.causal() if causal else None
                times = measure(
                    {
                        "ours": lambda: ch.attention(q, k, v, mask=mask),
                        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal),
                    }
                )
                # not by turns with the others: it leaves nothing of theirs in the caches
                times |= measure({"sgemm": lambda: matrix @ matrix}, least=10, seconds=0.2)
                flops = 4 * HEADS * n * n * width * (0.5 if causal else 1.0)
                share = flops / times["ours"] / (2 * 1536**3 / times["sgemm"])
                ratios.append(times["sdpa"] / times["ours"])
                target = "sgemm≥92%" if (n, width, causal) == (4096, 128, False) else ""
                name = f"N {n:>5}  D {width:>3}  {'causal' if causal else 'full'}"
                report.add(name, "SDPA", ratios[-1], target, ms=round(times["ours"] * 1e3, 2), of_sgemm=f"{share:.0%}")
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    report.add("geometric mean", "SDPA", mean, "≥ 1.40")
    report.add("worst", "SDPA", min(ratios), "≥ 1.12")


def others(report: Report) -> None:
    report.title("forward against what gives weights, and against NumPy (N 1024, D 64)")
    q, k, v = tensors(1024, 1024, 64)
    arrays = [a.numpy() for a in (q, k, v)]
    times = measure(
        {
            "ours": lambda: ch.attention(q, k, v, kernel="compiled"),
            "eager": lambda: eager(q, k, v),
            "numpy": lambda: numpy_formula(*arrays),
        }
    )
    report.add("attention", "PyTorch eager", times["eager"] / times["ours"], "")
    report.add("attention", "NumPy formula", times["numpy"] / times["ours"], "")


def masks(report: Report) -> None:
    report.title("masks")
    n, back = 16384, 1024
    q, k, v = tensors(n, n, 64)
    place = torch.arange(n)
    dense = (place[None] <= place[:, None]) & (place[None] >= place[:, None] - back)
    calls: Calls = {
        "ours": lambda: ch.attention(q, k, v, mask=ch.window(back), kernel="compiled"),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, attn_mask=dense),
    }
    flex = flex_window(back, q, k, v)
    if flex is not None:
        calls["flex"] = flex
    times = measure(calls, least=3)
    report.add(f"window({back}) at N {n}", "SDPA, same mask", times["sdpa"] / times["ours"], "≥ 6.00")
    if flex is not None:
        report.add(f"window({back}) at N {n}", "FlexAttention", times["flex"] / times["ours"], "")
    q, k, v = tensors(4096, 4096, 64)
    some = torch.rand(4096, 4096) < 0.5
    times = measure(
        {
            "ours": lambda: ch.attention(q, k, v, mask=some, kernel="compiled"),
            "sdpa": lambda: scaled_dot_product_attention(q, k, v, attn_mask=some),
        }
    )
    report.add("boolean array at N 4096", "SDPA", times["sdpa"] / times["ours"], "≥ 1.20")


def flex_window(back: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object] | None:
    """Compiled FlexAttention doing the same, where it works on this CPU."""
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def rule(b: object, h: object, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return (j <= i) & (j >= i - back)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            block_mask = create_block_mask(rule, None, None, q.shape[-2], k.shape[-2], device="cpu")
            compiled = torch.compile(flex_attention)
            compiled(q, k, v, block_mask=block_mask)
    except Exception as error:
        print(f"  FlexAttention does not work here: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
        return None
    return lambda: compiled(q, k, v, block_mask=block_mask)


def backward(report: Report, lengths: tuple[int, ...]) -> None:
    report.title("backward alone (geometric mean ≥ 1.4)")
    ratios = []
    for n in lengths:
        for width in (64, 128):
            for causal in (False, True):
                q, k, v = tensors(n, n, width, grad=True)
                mask = ch.causal() if causal else None
                ours = ch.attention(q, k, v, mask=mask, kernel="compiled")
                theirs = scaled_dot_product_attention(q, k, v, is_causal=causal)
                dout = torch.randn_like(ours)
                times = measure(
                    {
                        "ours": lambda: torch.autograd.grad(ours, (q, k, v), dout, retain_graph=True),
                        "sdpa": lambda: torch.autograd.grad(theirs, (q, k, v), dout, retain_graph=True),
                    },
                    least=3,
                )
                ratios.append(times["sdpa"] / times["ours"])
                name = f"N {n:>5}  D {width:>3}  {'causal' if causal else 'full'}"
                report.add(name, "SDPA's backward", ratios[-1], "", ms=round(times["ours"] * 1e3, 2))
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    report.add("geometric mean", "SDPA's backward", mean, "≥ 1.40")


def decode(report: Report) -> None:
    report.title("decoding: one query, 32,768 keys, D 64")
    q, k, v = tensors(1, 32768, 64)
    much = torch.randn(32 * 1024 * 1024)
    room = torch.empty_like(much)
    times = measure(
        {
            "ours": lambda: ch.attention(q, k, v, kernel="compiled"),
            "sdpa": lambda: scaled_dot_product_attention(q, k, v),
            "copy": lambda: room.copy_(much),
            "dot": lambda: much @ much,  # reads and does little else: how fast anything can be read here
        }
    )
    read = 2 * k.numel() * 4 / times["ours"]
    copied = 2 * much.numel() * 4 / times["copy"]
    report.add("decode", "SDPA", times["sdpa"] / times["ours"], "≥ 1.00", ms=round(times["ours"] * 1e3, 2))
    alone = much.numel() * 4 / times["dot"]
    report.add("bytes read a second", "copy, read + written", read / copied, "≥ 0.80", GB=round(read / 1e9, 1))
    report.add("bytes read a second", "copy, bytes copied", 2 * read / copied, "")
    report.add("bytes read a second", "a dot product", read / alone, "", GB=round(alone / 1e9, 1))


def observed_by_eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output, received, the eight largest and a 64 × 64 map, from the matrix."""
    output, weights = eager(q, k, v)
    blocks = weights.unflatten(-1, (64, -1)).unflatten(-3, (64, -1))
    return (output, weights.sum(-2), *weights.topk(8, dim=-1), blocks.mean((-1, -3)), blocks.amax((-1, -3)))


def observation(report: Report) -> None:
    report.title("observe(received=True, top=8, map=(64, 64)) at N 4096, D 64")
    q, k, v = tensors(4096, 4096, 64)
    wanted = {"received": True, "top": 8, "map": (64, 64)}
    times = measure(
        {
            "observe": lambda: ch.observe(q, k, v, kernel="compiled", **wanted),
            "plain": lambda: ch.attention(q, k, v, kernel="compiled"),
            "eager": lambda: observed_by_eager(q, k, v),
        }
    )
    report.add("time of observe", "our attention", times["observe"] / times["plain"], "≤ 1.80")
    report.add("observe", "eager, same results", times["eager"] / times["observe"], "≥ 4.00")
    arrays = [np.random.default_rng(0).standard_normal((1, HEADS, 16384, 64), dtype=np.float32) for _ in range(3)]
    tracemalloc.start()
    before = resident()
    seen = ch.observe(*arrays, kernel="compiled", **wanted)
    beyond = peak_resident() - before
    tracemalloc.stop()
    kept = [seen.output, seen.lse, seen.max_score, seen.entropy, seen.received, *seen.top, *seen.map]
    beyond -= sum(array.nbytes for array in kept)
    report.add("MB beyond results at N 16384", "", beyond / 1e6, "≤ 32.00")


def resident() -> int:
    """Bytes of memory in use now; the highest since then is `peak_resident`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier sections freed would go back meanwhile, and hide what is taken
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak_resident() -> int:
    return status("VmHWM")


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def small(report: Report) -> None:
    report.title("the 5 × 4 example, µs (at most 10 more than the fastest that gives the same)")
    from clearhead.textbook.examples import EXAMPLES

    example = EXAMPLES["cat_sat"]
    q, k, v = example.q, example.k, example.v
    tensors_ = [torch.tensor(a) for a in (q, k, v)]
    calls: Calls = {
        "chosen": lambda: ch.attention(q, k, v),
        "compiled": lambda: ch.attention(q, k, v, kernel="compiled"),
        "dense": lambda: ch.attention(q, k, v, kernel="dense"),
        "NumPy formula": lambda: numpy_formula(q, k, v),
        "SDPA": lambda: scaled_dot_product_attention(*[t[None, None] for t in tensors_]),
    }
    times = measure({name: repeated(call, SMALL_CALLS) for name, call in calls.items()}, seconds=1.0)
    fastest = min(seconds for name, seconds in times.items() if name != "chosen")
    for name, seconds in times.items():
        micros = seconds / SMALL_CALLS * 1e6
        report.add(f"{micros:8.1f} µs", name, seconds / times["chosen"], "")
    more = (times["chosen"] - fastest) / SMALL_CALLS * 1e6
    report.add("µs more than the fastest other", "", more, "≤ 10.00")


def repeated(call: Callable[[], object], count: int) -> Callable[[], None]:
    """Many calls in a row: one alone would be timed with the caches that the call before it left."""

    def run() -> None:
        for _ in range(count):
            call()

    return run


def at_length(report: Report, lengths: tuple[int, ...], quick: bool) -> None:
    """Long calls, and what they are compared with."""
    forward(report, lengths)
    others(report)
    if not quick:
        masks(report)
        on_cpu(report)
    backward(report, lengths)
    decode(report)
    if not quick:
        observation(report)
    small(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    calls = {section.__name__: section for section in SECTIONS_OF_CALLS}
    parser.add_argument("sections", nargs="*", help=f"only these of --calls: {', '.join(calls)}")
    parser.add_argument("--quick", action="store_true", help="short sequences only")
    parser.add_argument(
        "--calls", action="store_true", help="only short calls, training, decoding, precisions, observing, threads"
    )
    parser.add_argument("--masks", action="store_true", help="only sparse masks")
    parser.add_argument("--sets", action="store_true", help="only half precision, by the name of each instruction set")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    unknown = set(options.sections) - set(calls)
    if unknown:
        parser.error(f"unknown sections {', '.join(sorted(unknown))}; there are {', '.join(calls)}")
    plan = ch.plan(*[np.zeros((1, 8, 8), np.float32)] * 3)
    if "compiled" in plan.others and plan.others["compiled"].startswith("refused"):
        sys.exit(f"bench: compiled: {plan.others['compiled']}")
    lengths = (128, 512, 1024) if options.quick else (128, 512, 1024, 4096)
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, numpy {np.__version__}")
    report = Report()
    named = [calls[name] for name in options.sections]
    if not options.calls and not options.masks and not options.sets and not named:
        at_length(report, lengths, options.quick)
    for section in named or ((on_cpu,) if options.masks else (half_by_set,) if options.sets else SECTIONS_OF_CALLS):
        section(report)
    if options.json:
        options.json.write_text(
            json.dumps(
                {"machine": platform.machine(), "threads": torch.get_num_threads(), "rows": report.rows}, indent=1
            )
        )


if __name__ == "__main__":
    main()
