"""Approximations beside exact attention, causal: time forward and with gradients, and how far each is from exact.

    python bench/approximate.py [--device cuda] [--lengths 16384,65536] [--heads 16] [--threads 1] [--json FILE]

On a GPU it is there for bfloat16 and 16 heads, else for float32 and one head. Every ratio is of times measured in one
run, in turn: exact, then each method, and again. `outer` is the recurrence as it is written, a cumulative sum of all
outer products φ(k) vᵀ, which takes n · F · V numbers: it is left out where that is more than 8 GiB.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import clearhead as ch

MOST = 8 * 2**30


def outer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """Linear attention by a cumulative sum of outer products."""
    a, b = (torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0))).float() for x in (q, k))
    sums = (b.unsqueeze(-1) * v.float().unsqueeze(-2)).cumsum(-3)
    total = (a * b.cumsum(-2)).sum(-1, keepdim=True) + 1e-6
    return (torch.einsum("...nf,...nfv->...nv", a, sums) / total).to(q.dtype)


def seconds(call: Callable[[], Any], device: str, enough: float = 0.3) -> float:
    """The quickest of some calls, as many as there is time for."""
    best, spent = math.inf, 0.0
    while spent < enough:
        if on_gpu(device):
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if on_gpu(device):
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
    return best


def on_gpu(device: str) -> bool:
    return device == "cuda"


def with_gradients(call: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dout: torch.Tensor) -> Any:
    inputs = [one.detach().requires_grad_() for one in inputs]
    return torch.autograd.grad(call(*inputs, mask=ch.causal()), inputs, dout)


def measured(
    ways: dict[str, Callable[..., Any]], inputs: list[torch.Tensor], device: str, limit: float
) -> dict[str, Any]:
    """The quickest of some calls of each, in turn, forward and with gradients."""
    dout = torch.randn_like(inputs[2])
    found: dict[str, Any] = {name: {"forward": math.inf, "with_gradients": math.inf} for name in ways}
    for way in ways.values():  # what is compiled, imported or drawn once is not counted
        some = None if on_gpu(device) else 512  # a GPU's kernels are compiled for their lengths
        with_gradients(way, [one[..., :some, :] for one in inputs], dout[..., :some, :])
        with torch.no_grad():
            way(*(one[..., :some, :] for one in inputs), mask=ch.causal())
    ends = time.perf_counter() + limit
    while True:
        for name, way in ways.items():
            with torch.no_grad():
                took = seconds(partial(way, *inputs, mask=ch.causal()), device)
            both = seconds(partial(with_gradients, way, inputs, dout), device)
            found[name]["forward"] = min(found[name]["forward"], took)
            found[name]["with_gradients"] = min(found[name]["with_gradients"], both)
        if time.perf_counter() > ends:
            return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", default="16384,65536")
    parser.add_argument("--heads", type=int)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--methods", default="linear,performer(256)", help="with commas between")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each length")
    parser.add_argument("--threads", type=int, help="of PyTorch's and of the compiled kernel's; all unless given")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
        ch.set_threads(given.threads)
    from clearhead.approximations.spelling import read_method

    heads = given.heads or (16 if on_gpu(given.device) else 1)
    dtype = torch.bfloat16 if on_gpu(given.device) else torch.float32
    rows = []
    for length in map(int, given.lengths.split(",")):
        generator = torch.Generator(device=given.device).manual_seed(0)
        inputs = [
            torch.randn(1, heads, length, given.features, generator=generator, device=given.device).to(dtype)
            for _ in range(3)
        ]
        inputs[0], inputs[1] = inputs[0] / 2, inputs[1] / 2
        methods = {text: read_method(text) for text in given.methods.split(",")}
        ways: dict[str, Callable[..., Any]] = {"exact": ch.attention, **methods}
        if 4 * heads * length * given.features**2 <= MOST / 4:  # of which gradients keep several
            ways["outer"] = outer
        times = measured(ways, inputs, given.device, given.seconds)
        for name, took in times.items():
            row = {"method": name, "length": length, "heads": heads, "features": given.features, "dtype": str(dtype),
                   "device": torch.cuda.get_device_name() if on_gpu(given.device) else "cpu", **took}  # fmt: skip
            row |= {f"{way}_by_exact": times["exact"][way] / took[way] for way in ("forward", "with_gradients")}
            if name in methods:
                audit = ch.audit(methods[name], *inputs, mask=ch.causal(), queries=16)
                assert audit.charged is not None
                row |= {"error": audit.error, "crossover_on_paper": audit.charged.crossover}
            rows.append(row)
            error = f"  error {row['error']:.3f}" if "error" in row else ""
            print(
                f"{length:>7,} {name:<15} forward {1e3 * took['forward']:9.2f} ms (× {row['forward_by_exact']:6.2f})"
                f"  with gradients {1e3 * took['with_gradients']:9.2f} ms (× {row['with_gradients_by_exact']:6.2f})"
                f"{error}",
                flush=True,
            )
    if given.json is not None:
        given.json.write_text(
            json.dumps({"python": sys.version.split()[0], "torch": torch.__version__, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
