"""Which blocks are fastest on this GPU, for each kernel: tried in a bounded time, printed as rows for the table.

    python bench/tune_gpu.py [kernel …] [--widths 64 128] [--options plain] [--seconds N] [--keep]

Kernels: forward listed by_key more_by_key top keys queries decode. `--keep` leaves the findings in the file that the
library reads.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from triton.testing import do_bench

import clearhead as ch
from clearhead.core.observations import want
from clearhead.core.problem import Problem, pose
from clearhead.kernels.gpu import second_look as look
from clearhead.kernels.gpu import tuning
from clearhead.kernels.gpu.call import Call, machine
from clearhead.kernels.gpu.tuning import Blocks
from clearhead.kernels.triton import launch

N, HEADS = 8192, 16

# (rows, columns, warps, stages), likely ones first: the time may end before the list does
CANDIDATES: dict[str, list[tuple[int, int, int, int]]] = {
    "forward": [
        (128, 128, 8, 2), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 2), (128, 128, 8, 3), (128, 64, 4, 2),
        (64, 64, 4, 3), (128, 32, 4, 4), (64, 128, 4, 3), (256, 64, 8, 2),
    ],
    "by_key": [
        (64, 128, 8, 3), (128, 128, 8, 2), (64, 128, 4, 3), (128, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 3),
        (64, 128, 4, 2), (64, 256, 8, 2), (32, 128, 4, 4), (128, 256, 8, 2),
    ],
    "more_by_key": [
        (64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (32, 128, 4, 3),
        (32, 128, 8, 4), (64, 256, 8, 2),
    ],
    "top": [(64, 128, 4, 2), (64, 64, 4, 2), (128, 128, 8, 2), (128, 64, 8, 2), (64, 256, 8, 2), (32, 128, 4, 2)],
    "keys": [
        (64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 2), (64, 128, 8, 1), (32, 128, 4, 2), (128, 64, 8, 1),
        (64, 64, 8, 2), (32, 64, 4, 2),
    ],
    "queries": [
        (128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 3), (64, 128, 8, 2), (128, 32, 8, 3), (128, 128, 8, 1),
        (64, 64, 4, 3), (64, 32, 4, 3),
    ],
    "decode": [(16, *rest) for rest in itertools.product((64, 128, 32), (4, 8), (3, 2, 4))],
}  # fmt: skip


# what the problems are that blocks are tried on
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"mask": ch.causal()},
    "alibi": {"bias": ch.alibi(HEADS)},
    "softcap": {"softcap": 30.0},
    "documents": {"mask": ch.documents(np.arange(N) // 1024)},
    "window": {"mask": ch.window(1024)},
}
given: dict[str, object] = {}


def problem(width: int, queries: int = N, keys: int = N) -> Problem:
    shapes = (1, HEADS, queries, width), (1, HEADS, keys, width), (1, HEADS, keys, width)
    arrays = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return pose(*arrays, **(given if queries == N else {}))


def timed(kernel: str, width: int) -> Callable[[], object]:
    """What is timed for a kernel: it alone, or with others that stay the same."""
    if kernel == "decode":
        few = problem(width, queries=1, keys=65536)
        return lambda: launch.forward(Call(few))  # anew each time: a call keeps the blocks it was first run with
    one = problem(width)
    if kernel in ("forward", "listed"):
        return lambda: launch.forward(Call(one))
    if kernel in ("by_key", "top"):
        asked: dict[str, object] = {"received": True, "map": (64, 64)} if kernel == "by_key" else {"top": 8}
        one = replace(one, want=want(one.grid, **asked))
        found = launch.forward(Call(one))
        return lambda: look.look_again(Call(one), one.want, found.peak, found.total)
    if kernel == "more_by_key":
        one = replace(one, want=want(one.grid, removal=True))
        found = launch.forward(Call(one))
        outputs = (found.unrounded, found.output)
        return lambda: look.look_again(Call(one), one.want, found.peak, found.total, outputs=outputs)
    ran = launch.run(one)
    dout = torch.randn_like(one.q)
    return lambda: launch.gradients(one, dout, ran.observed.output, ran.peak, ran.total)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("kernels", nargs="*", help=", ".join(CANDIDATES))
    parser.add_argument("--widths", nargs="+", type=int, default=[128, 64])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--options", default="plain", choices=list(OPTIONS))
    parser.add_argument("--keep", action="store_true", help="leave the findings where the library reads them")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune: PyTorch has no CUDA device here")
    given.update(OPTIONS[options.options])
    kernels = options.kernels or [*CANDIDATES, *(["listed"] if "mask" in given else [])]
    share = options.seconds / (len(kernels) * len(options.widths))
    found: dict[tuple[str, str, int], Blocks] = {}
    for width, kernel in itertools.product(options.widths, kernels):
        end, times = time.time() + share, {}
        tuning.FIXED.clear()
        call = timed(kernel, width)
        for candidate in CANDIDATES[kernel if kernel != "listed" else "forward"]:
            if times and time.time() > end:
                break
            tuning.FIXED[kernel] = Blocks(*candidate)
            try:
                times[candidate] = float(do_bench(call, warmup=10, rep=40, return_mode="median"))
                print(f"  {kernel:<8} D {width:>3} {candidate!s:<20} {times[candidate]:8.3f} ms", flush=True)
            except Exception as error:
                print(f"  {kernel:<8} D {width:>3} {candidate!s:<20} {type(error).__name__}", flush=True)
        if times:
            found[kernel, "half", width] = Blocks(*min(times, key=lambda c: times[c]))
    tuning.FIXED.clear()
    print("\nfor the table:")
    for (kernel, kind, width), blocks in found.items():
        print(f'    ("{kernel}", "{kind}", {width}): Blocks{tuple(blocks)},')
    if options.keep:
        print(f"left in {tuning.remember(machine(torch.device('cuda', 0))[1], found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
