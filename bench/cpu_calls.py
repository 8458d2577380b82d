"""Short calls, decoding, other precisions, observing and many threads: sections of `bench/cpu.py`."""

from __future__ import annotations

import math
import statistics
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from cpu_turns import measure
from torch.nn.functional import scaled_dot_product_attention

import clearhead as ch

if TYPE_CHECKING:
    from cpu import Report

PATIENCE = 60.0  # seconds that a call of a peer may take: PyTorch's bfloat16 takes minutes on some CPUs
SHORT = {(1, 1, 5, 4): 0.5, (1, 8, 32, 64): 0.8, (1, 12, 128, 64): 1.0, (32, 12, 64, 64): 1.0}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers of any dtype."""
    return torch.randn(shape).to(dtype)


def short(report: Report) -> None:
    """Calls of which checking and threads are a part."""
    report.title("short calls against SDPA, chosen by itself")
    for shape, least in SHORT.items():
        q, k, v = (randn(*shape) for _ in range(3))
        arrays = [x.numpy() for x in (q, k, v)]
        times = measure(
            {
                "sdpa": lambda: scaled_dot_product_attention(q, k, v),
                "tensors": lambda: ch.attention(q, k, v),
                "causal": lambda: ch.attention(q, k, v, mask=ch.causal()),
            }
        )
        alone = measure({"arrays": lambda: ch.attention(*arrays)})["arrays"]  # threads of its own: not by turns
        micros = {name: round(times[name] * 1e6, 1) for name in ("sdpa", "tensors", "causal")}
        report.add(str(shape), "SDPA", times["sdpa"] / times["tensors"], f"≥ {least:.2f}", **micros)
        report.add(f"{shape}, NumPy arrays, alone", "SDPA", times["sdpa"] / alone, "")


def decoding(report: Report) -> None:
    """One query over cached keys."""
    report.title("decoding, D 64: one query against SDPA, and half precision by float32's time")
    for keys in (1024, 4096, 32768):
        for heads, key_heads in ((8, 8), (32, 8), (32, 4), (32, 1)):
            cached = {}
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                q = randn(1, heads, 1, 64, dtype=dtype)
                k, v = (randn(1, key_heads, keys, 64, dtype=dtype) for _ in range(2))
                cached[dtype] = q, k, v
                times = measure(
                    {
                        "sdpa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=heads != key_heads),
                        "ours": lambda: ch.attention(q, k, v),
                    }
                )
                name = f"{keys} keys, heads {heads}:{key_heads}, {str(dtype)[6:]}"
                more = {"µs": round(times["ours"] * 1e6)}
                report.add(name, "SDPA", times["sdpa"] / times["ours"], "≥ 1.00", **more)
            # by turns with one another: what SDPA leaves in the caches differs by precision
            times = measure({str(dtype)[6:]: partial(ch.attention, *cached[dtype]) for dtype in cached})
            for dtype in ("bfloat16", "float16"):
                name = f"{keys} keys, heads {heads}:{key_heads}, {dtype}"
                report.add(name, "time by float32's", times[dtype] / times["float32"], "≤ 0.70")
    by_layers(report)


def by_layers(report: Report, layers: int = 24) -> None:
    """The same as a model does it: between two calls of a layer all others have been through the caches."""
    report.title(f"decoding, D 64: half precision by float32's time, {layers} layers in turn")
    for keys in (1024, 4096):
        for heads, key_heads in ((8, 8), (32, 8)):
            calls = {}
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                q = randn(1, heads, 1, 64, dtype=dtype)
                cached = [[randn(1, key_heads, keys, 64, dtype=dtype) for _ in range(2)] for _ in range(layers)]
                turns = cycle([partial(ch.attention, q, k, v) for k, v in cached])
                calls[str(dtype)[6:]] = partial(lambda turns: next(turns)(), turns)
            times = measure(calls, least=2 * layers)
            for name in ("bfloat16", "float16"):
                what = f"{keys} keys, heads {heads}:{key_heads}, {name}"
                report.add(what, "time by float32's", times[name] / times["float32"], "")


def precisions(report: Report) -> None:
    """The other precisions, forward."""
    report.title("other precisions against SDPA, forward, full")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        for width in (64, 128):
            slow = 0.0
            for n in (1024, 4096):
                name = f"{str(dtype)[6:]}, N {n}, D {width}"
                if slow * (n / 1024) ** 2 > PATIENCE:
                    print(f"  {name}: SDPA would take {slow * (n / 1024) ** 2:.0f} s, and is not measured", flush=True)
                    continue
                q, k, v = (randn(1, 8, n, width, dtype=dtype) for _ in range(3))
                times = measure(
                    {
                        "sdpa": lambda: scaled_dot_product_attention(q, k, v),
                        "ours": lambda: ch.attention(q, k, v),
                    },
                    seconds=1.0,
                )
                slow = times["sdpa"]
                report.add(name, "SDPA", slow / times["ours"], "≥ 1.00", ms=round(times["ours"] * 1e3, 2))


def training(report: Report) -> None:
    """Forward and backward, as a model calls them."""
    report.title("forward + backward against SDPA's")
    ratios = []
    for n in (512, 1024, 2048):
        for width in (64, 128):
            for causal in (False, True):
                q, k, v = (randn(1, 8, n, width).requires_grad_() for _ in range(3))
                dout, mask = randn(1, 8, n, width), ch.causal() if causal else None
                times = measure(
                    {
                        "sdpa": lambda: torch.autograd.grad(
                            scaled_dot_product_attention(q, k, v, is_causal=causal), (q, k, v), dout
                        ),
                        "ours": lambda: torch.autograd.grad(ch.attention(q, k, v, mask=mask), (q, k, v), dout),
                    },
                    seconds=1.0,
                )
                ratios.append(times["sdpa"] / times["ours"])
                name = f"N {n:>5}  D {width:>3}  {'causal' if causal else 'full'}"
                report.add(name, "SDPA", ratios[-1], "≥ 1.00", ms=round(times["ours"] * 1e3, 2))
    report.add("geometric mean", "SDPA", math.exp(statistics.mean(map(math.log, ratios))), "≥ 1.20")


def observing(report: Report) -> None:
    """What observing adds."""
    report.title("observe(received=True, top=8, map=(64, 64)) by our attention's time")
    for n in (512, 1024, 4096):
        for causal in (False, True):
            q, k, v = (randn(1, 8, n, 64) for _ in range(3))
            mask = ch.causal() if causal else None
            times = measure(
                {
                    "plain": lambda: ch.attention(q, k, v, mask=mask),
                    "observe": lambda: ch.observe(q, k, v, mask=mask, received=True, top=8, map=(64, 64)),
                },
                seconds=1.0,
            )
            name = f"N {n}, {'causal' if causal else 'full'}"
            report.add(name, "our attention", times["observe"] / times["plain"], "≤ 1.80" if n >= 1024 else "")
    for causal, least in ((False, 2.5), (True, 4.0)):
        q, k, v = (randn(1, 8, 1024, 64) for _ in range(3))
        mask = ch.causal() if causal else None
        times = measure(
            {
                "eager": lambda: rows_by_eager(q, k, v, causal),
                "observe": lambda: ch.observe(q, k, v, mask=mask, received=True, top=8),
            },
            seconds=1.0,
        )
        name = f"observe, N 1024, {'causal' if causal else 'full'}"
        report.add(name, "eager, same results", times["eager"] / times["observe"], f"≥ {least:.2f}")


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """What people write to have the weights."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    weights = scores.softmax(-1)
    return weights @ v, weights


def rows_by_eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
    """Output, entropy, the eight largest and what keys received, from the matrix."""
    output, weights = eager(q, k, v, causal)
    return (output, torch.special.entr(weights).sum(-1), *weights.topk(8), weights.sum(-2))


def scaling(report: Report) -> None:
    """From one thread to all."""
    report.title("threads, N 4096, D 128")
    everything, first = torch.get_num_threads(), 0.0
    q, k, v = (randn(1, 8, 4096, 128) for _ in range(3))
    counts = sorted({1, 2, 4, 8, everything} & set(range(1, everything + 1)))
    try:
        for count in counts:
            torch.set_num_threads(count)
            seconds = measure({"ours": lambda: ch.attention(q, k, v)}, seconds=1.0)["ours"]
            first = first or seconds
            rate = round(4 * 8 * 4096**2 * 128 / seconds / 1e9)
            report.add(f"{count} threads", "one thread", first / seconds, "≥ 13.0" if count == 16 else "", GFLOPs=rate)
    finally:
        torch.set_num_threads(everything)
