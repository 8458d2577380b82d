"""How fast each way of computing a plain call is on this GPU, as the rows that `clearhead.kernels.speeds` ships.

    python bench/speeds.py [--json FILE] [--seconds N] [--keys N …] [--runs FILE FILE …]

Whole calls in steady state, medians, the ways by turns: PyTorch's back ends as PyTorch calls them, our kernels as
`attention` does, the output alone and with gradients. The table that ships is combined of several runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from turns import together

import clearhead as ch
from clearhead.kernels.gpu.tuning import FEW
from clearhead.kernels.speeds import Sizes, rows_of

BACK_ENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
LONGEST = 1.5e13  # FLOPs of a call, at most
ROUNDS = 4


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
    times = together(calls, ROUNDS, warmup=10, rep=20)
    return {way: sizes.work / ms / 1e9 for way, ms in times.items() if not math.isnan(ms)}


def combined(files: list[Path]) -> dict[str, object]:
    """Several runs as one, by medians: of a call that waits for Python no two runs say the same."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    rates: dict[Sizes, list[dict[str, float]]] = {}
    for run in runs:
        for sizes, known in rows_of(run["rows"]).items():
            rates.setdefault(sizes, []).append(dict(known))
    rows = []
    for sizes, some in rates.items():
        ways = [way for way in some[0] if all(way in one for one in some)]
        rows.append({**sizes._asdict(), "rates": {way: round(median(one[way] for one in some), 1) for way in ways}})
    return {**{key: runs[0][key] for key in ("device", "versions")}, "rows": rows}


def written(known: dict[str, object], file: Path) -> None:
    """The table, a row a line."""
    rows = known["rows"]
    assert isinstance(rows, list)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(known[key])}" for key in ("device", "versions"))
    file.write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--seconds", type=float, default=500, help="sizes that would start later are left out")
    parser.add_argument("--keys", type=int, nargs="+", help="only sizes of so many keys")
    parser.add_argument("--runs", type=Path, nargs="+", help="measure nothing: combine what these runs wrote")
    options = parser.parse_args()
    if options.runs:
        written(combined(options.runs), options.json)
        return 0
    if not torch.cuda.is_available():
        sys.exit("bench: PyTorch has no CUDA device here")
    end, rows = time.time() + options.seconds, []
    versions = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    for sizes in grid():
        if time.time() > end:
            print("the time is up: the rest is left out")
            break
        if options.keys and sizes.keys not in options.keys:
            continue
        if sizes.work > LONGEST or math.prod((sizes.rows, sizes.keys, sizes.head_dim)) > 2**31:
            continue
        rates = measured(sizes)
        shape = f"{sizes.rows} × {sizes.queries} × {sizes.keys}, D {sizes.head_dim}, group {sizes.group}"
        words = f"{sizes.passes} {'causal' if sizes.causal else 'full'} {shape}"
        print(f"{words:<60}" + "  ".join(f"{way} {rate:.1f}" for way, rate in rates.items()), flush=True)
        rows.append({**sizes._asdict(), "rates": {way: round(rate, 1) for way, rate in rates.items()}})
        if options.json:
            known = {"device": torch.cuda.get_device_name(), "versions": versions, "rows": rows}
            written(known, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
