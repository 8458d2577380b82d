"""Compiles the portable GPU kernels for Hopper, on any machine, and names them; run by `test_triton_compiles.py`."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import clearhead as ch
from clearhead.core.problem import pose
from clearhead.kernels.gpu import call as calls
from clearhead.kernels.triton import launch

TYPES = {torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
CASES: tuple[tuple[int, dict[str, Any]], ...] = (
    (64, {"mask": ch.causal()}),
    (128, {"mask": ch.window(100, 20), "softcap": 3.0}),
)


def signature(value: Any) -> Any:
    """An argument as Triton's compiler knows it."""
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, tuple):
        parts = [signature(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if hasattr(value, "block_shape"):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    return {int: "i32", float: "fp32"}[type(value)]


class Compiles(calls.Launches):
    """Kernels are compiled and not launched."""

    def __call__(self, name: Any, kernel: Any, grid: Any, *args: Any, **given: Any) -> None:
        absent = {(i,): given.get(p.name) for i, p in enumerate(kernel.params) if i >= len(args) or args[i] is None}
        names = {p.name: "constexpr" if (i,) in absent else signature(args[i]) for i, p in enumerate(kernel.params)}
        source = ASTSource(fn=kernel, signature=names, constexprs=absent)
        options = {name: given[name] for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in given}
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert "cubin" in done.asm
        print(kernel.fn.__name__, flush=True)


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # now that kernels are imported: tensors on the CPU stand for others
    for width, options in CASES:
        q, k, v = (torch.randn(1, 2, n, width).half() for n in (300, 400, 400))
        call = calls.Call(pose(q, k, v, **options).to_be_differentiated())
        few = calls.Call(pose(q[:, :, :1], k, v, **options))
        call.launch = few.launch = Compiles()
        found = launch.forward(call)
        launch.repaired(call, found, torch.zeros(1, 2, 300, dtype=torch.int32))
        launch.two_passes(call, torch.zeros_like(q), found[-1], found[2], found[3], torch.zeros(1, 2, 300))
        launch.forward(few)


if __name__ == "__main__":
    main()
