"""Compiles the GPU kernels for Hopper, on any machine, and names them; run by `test_triton_compiles.py`.

    python tests/compile_for_hopper.py [--times] [--together] [case …]

`--times` says what each stage of each kernel took, `--together` compiles the kernels of a call side by side.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import clearhead as ch
from clearhead.core.observations import want
from clearhead.core.problem import Problem, pose
from clearhead.kernels.gpu import call as calls
from clearhead.kernels.gpu.compiling import compile_together
from clearhead.kernels.gpu.packed import look_through
from clearhead.kernels.gpu.repair import repaired
from clearhead.kernels.hopper import launch as hopper
from clearhead.kernels.hopper import tile_runs
from clearhead.kernels.triton import launch as triton

NONE = {"top": None, "received": None, "map": None, "queries": None, "weights": False}
SOME = NONE | {"top": 3, "received": True, "map": (8, 16), "received_max": True, "removal": 5}
# head_dim, what is observed, the options of a call
CASES: dict[str, tuple[int, dict[str, Any] | None, dict[str, Any]]] = {
    "causal 16": (16, None, {"mask": ch.causal()}),
    "window and softcap 32": (32, None, {"mask": ch.window(100, 20), "softcap": 3.0}),
    "runs of tiles 32": (
        32,
        None,
        {"mask": (ch.window(60, 5) | ch.global_tokens([0])) & ch.blocks(torch.rand(2, 1, 13) < 0.7, 32)},
    ),
}
HOPPER: dict[str, tuple[int, dict[str, Any] | None, dict[str, Any]]] = {
    "hopper causal 128": (128, None, {"mask": ch.causal()}),
    "hopper causal 64, observed": (64, SOME, {"mask": ch.causal()}),
    "hopper causal 128, received and top": (128, NONE | {"received": True, "top": 8}, {"mask": ch.causal()}),
    "hopper window 128, entropy": (128, NONE, {"mask": ch.window(50, 3)}),
    "hopper softcap 128, observed": (128, SOME, {"softcap": 3.0}),
    "hopper full 256, observed": (256, SOME, {}),
    "hopper Longformer 64, observed": (64, SOME, {"mask": ch.window(50, 3) | ch.global_tokens([0, 200])}),
    "hopper Longformer 128, observed": (128, SOME, {"mask": ch.window(50, 3) | ch.global_tokens([0, 200])}),
    "hopper Longformer 64, last queries": (
        64,
        NONE | {"received": 100},
        {"mask": ch.window(50, 3) | ch.global_tokens([0, 200])},
    ),
    # all queries see the first keys and no others: their tiles are shared out among programs
    "hopper first keys 64, observed": (64, SOME, {"mask": ch.blocks(torch.arange(13).expand(10, 13) == 0, 32)}),
    "hopper Longformer 128": (128, None, {"mask": ch.window(50, 3) | ch.global_tokens([0, 200])}),
    "hopper documents 64, observed": (
        64,
        NONE | {"received": True, "top": 8},
        {"mask": ch.documents(torch.arange(400) // 130)},
    ),
    "hopper documents and ALiBi 128": (
        128,
        None,
        {"mask": ch.documents(torch.arange(400) // 130) & ch.causal(), "bias": ch.alibi(2)},
    ),
}


class Machine:
    """Stands for a driver with one Hopper GPU, on which nothing runs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiles(calls.Launcher):
    """Kernels are compiled and not launched."""

    def __call__(self, name: Any, kernel: Any, grid: Any, *args: Any, **given: Any) -> None:
        start = time.perf_counter()
        done = kernel.warmup(*args, grid=grid, **given)
        assert "cubin" in done.asm
        print(kernel.fn.__name__, *([f"{time.perf_counter() - start:.2f} s"] if TIMES else []), flush=True)


class Warmed:
    """A kernel that is launched without a launcher, while a mask is prepared: compiled and not launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return partial(Compiles(), "", self.kernel, grid)


TIMES = TOGETHER = False


def say(src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
    """What each stage of compiling a kernel took."""
    stages = {"ir": times.ir_initialization, **dict(times.lowering_stages)}
    print("   ", " ".join(f"{name} {took / 1e6:.2f}" for name, took in stages.items()), flush=True)


def portable(problem: Problem) -> None:
    call = calls.Call(problem)
    call.launch = Compiles()
    found = triton.forward(call)
    rows = found.lse.shape
    repaired(call, found, torch.zeros(rows, dtype=torch.int32))
    triton.two_passes(call, torch.zeros_like(problem.q), found.unrounded, found.peak, found.total, torch.zeros(rows))
    few = calls.Call(pose(problem.q[:, :, :1], problem.k, problem.v, mask=problem.mask, softcap=problem.softcap))
    few.launch = Compiles()
    triton.forward(few)
    look_through(problem.q, problem.k, problem.v, Compiles())


def own(problem: Problem) -> None:
    from clearhead.kernels.hopper.accepts import refusal, refusal_of_gradients

    assert refusal(problem) is None, refusal(problem)
    if not isinstance(tile_runs.tile_bits, Warmed):
        tile_runs.tile_bits = Warmed(tile_runs.tile_bits)
    call = calls.Call(problem)
    if TOGETHER:
        start = time.perf_counter()
        compile_together(call, lambda: hopper.forward_and_look(call))
        print(f"together {time.perf_counter() - start:.2f} s")
    call.launch = Compiles()
    found = hopper.forward_and_look(call).forward
    if refusal_of_gradients(problem) is None:
        hopper.one_pass(call, torch.zeros_like(problem.q), found.unrounded, found.peak, found.total, None)


def main() -> None:
    global TIMES, TOGETHER
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--together", action="store_true")
    given = parser.parse_args()
    TIMES, TOGETHER = given.times, given.together
    if TIMES:
        knobs.compilation.listener = say
    driver.set_active(Machine())
    os.environ["TRITON_INTERPRET"] = "1"  # now that kernels are imported: tensors on the CPU stand for others
    for name in list(HOPPER) if given.cases == ["hopper"] else given.cases:
        head_dim, wanted, options = (CASES | HOPPER)[name]
        q, k, v = (torch.randn(1, 2, n, head_dim).half() for n in (300, 400, 400))
        asked = None if wanted is None else lambda grid, wanted=wanted: want(grid, **wanted)
        problem = pose(q, k, v, **options, want=asked).to_be_differentiated()
        (portable if name in CASES else own)(problem)


if __name__ == "__main__":
    main()
