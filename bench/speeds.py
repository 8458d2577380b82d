"""How fast each way of computing a plain call is on this GPU, as the rows that `clearhead.kernels.speeds` ships.

    python bench/speeds.py [--json FILE] [--seconds N]

Whole calls in steady state, medians, the ways by turns: PyTorch's back ends as PyTorch calls them, our kernels as
`attention` does, the output alone and with gradients.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

import clearhead as ch
from clearhead.kernels.gpu.tuning import FEW
from clearhead.kernels.speeds import Sizes

BACK_ENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
LONGEST = 1.5e13  # FLOPs of a call, at most
ROUNDS = 3


def grid() -> Iterator[Sizes]:
    """Sizes that are measured, those that matter most first."""
    for n in (1024, 4096, 16384, 512, 2048, 8192, 256):
        for head_dim in (128, 64):
            for causal in (True, False):
                for rows in (16, 32, 64, 128):
                    for passes in ("forward", "training"):
                        yield Sizes(passes, causal, head_dim, head_dim, 1, rows, n, n)
    for keys in (1024, 8192, 65536):  # one token after the other
        for group, rows in ((1, 16), (4, 32), (4, 256)):
            yield Sizes("forward", False, 128, 128, group, rows, 1, keys)
    for causal in (True, False):
        for passes in ("forward", "training"):
            yield Sizes(passes, causal, 128, 128, 4, 32, 4096, 4096)
            yield Sizes(passes, causal, 256, 256, 1, 16, 4096, 4096)


def ways(sizes: Sizes) -> list[str]:
    """What is measured: the portable kernel only where it may be the fastest, or now and then."""
    if sizes.queries <= FEW:
        return [*BACK_ENDS, "triton"]
    return [*BACK_ENDS, "hopper", *(["triton"] if sizes.keys in (512, 4096) else [])]


def called(way: str, sizes: Sizes, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if way in BACK_ENDS:
        with sdpa_kernel(BACK_ENDS[way]):
            return scaled_dot_product_attention(q, k, v, is_causal=sizes.causal, enable_gqa=sizes.group > 1)
    return ch.attention(q, k, v, mask=ch.causal() if sizes.causal else None, kernel=way)


def trained(way: str, sizes: Sizes, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
    torch.autograd.grad(called(way, sizes, q, k, v), (q, k, v), dout)


def measured(sizes: Sizes) -> dict[str, float]:
    """TFLOP/s of each way that takes a call."""
    heads = min(sizes.rows, 32 if sizes.group > 1 else 16)
    batch = sizes.rows // heads
    learns = sizes.passes == "training"
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16, requires_grad=learns)
    q = new(batch, heads, sizes.queries, sizes.head_dim)
    k = new(batch, heads // sizes.group, sizes.keys, sizes.head_dim)
    v = new(batch, heads // sizes.group, sizes.keys, sizes.value_dim)
    calls: dict[str, Callable[[], object]] = {}
    dout = torch.randn_like(q)
    for way in ways(sizes):
        run = partial(trained, way, sizes, q, k, v, dout) if learns else partial(called, way, sizes, q, k, v)
        try:
            run()
        except Exception as error:
            print(f"  ({way}: {str(error).splitlines()[0][:100]})", flush=True)
            continue
        calls[way] = run
    times: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(ROUNDS):
        for way, run in calls.items():
            times[way].append(do_bench(run, warmup=5, rep=20, return_mode="median"))
    return {way: sizes.work / statistics.median(taken) / 1e9 for way, taken in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--seconds", type=float, default=500, help="sizes that would start later are left out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench: PyTorch has no CUDA device here")
    end, rows = time.time() + options.seconds, []
    versions = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    for sizes in grid():
        if time.time() > end:
            print("the time is up: the rest is left out")
            break
        if sizes.work > LONGEST or math.prod((sizes.rows, sizes.keys, sizes.head_dim)) > 2**31:
            continue
        rates = measured(sizes)
        shape = f"{sizes.rows} × {sizes.queries} × {sizes.keys}, D {sizes.head_dim}, group {sizes.group}"
        words = f"{sizes.passes} {'causal' if sizes.causal else 'full'} {shape}"
        print(f"{words:<60}" + "  ".join(f"{way} {rate:.1f}" for way, rate in rates.items()), flush=True)
        rows.append({**sizes._asdict(), "rates": {way: round(rate, 1) for way, rate in rates.items()}})
        if options.json:
            known = {"device": torch.cuda.get_device_name(), "versions": versions, "rows": rows}
            lines = ",\n".join("  " + json.dumps(row) for row in rows)
            head = ", ".join(f"{json.dumps(key)}: {json.dumps(known[key])}" for key in ("device", "versions"))
            options.json.write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
