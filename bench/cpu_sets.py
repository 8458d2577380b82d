"""Half precision by the name of each instruction set that this machine has: a section of `bench/cpu.py`.

What a set does with bfloat16 and float16, by the time that it takes for float32: below 1 where less is read, or where
half precision is multiplied as it is.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from cpu_turns import measure

import clearhead as ch
from clearhead.kernels.compiled import compiled, native

if TYPE_CHECKING:
    from cpu import Report

SETS = ("portable", "neon", "neon_fp16", "neon_bf16", "avx2", "avx512", "avx512_bf16", "amx")
# heads, heads of keys, queries, keys, features
CALLS = {
    "N 1024, D 64": (8, 8, 1024, 1024, 64),
    "N 1024, D 128": (8, 8, 1024, 1024, 128),
    "decoding over 4096 keys, D 64": (8, 8, 1, 4096, 64),
    "decoding over 4096 keys, D 128, heads 32:8": (32, 8, 1, 4096, 128),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def by(isa: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The compiled kernel for one instruction set."""
    chosen, compiled.isa = compiled.isa, isa
    try:
        return ch.attention(q, k, v, kernel="compiled")
    finally:
        compiled.isa = chosen


def half_by_set(report: Report) -> None:
    """The same calls in each precision, by turns."""
    report.title("half precision by float32's time, for each instruction set by name")
    for isa in (name for name in SETS if native is not None and native.has(name)):
        for what, (heads, key_heads, queries, keys, width) in CALLS.items():
            arrays = {}
            for dtype in DTYPES:
                q = torch.randn(1, heads, queries, width).to(dtype)
                k, v = (torch.randn(1, key_heads, keys, width).to(dtype) for _ in range(2))
                arrays[str(dtype)[6:]] = q, k, v
            times = measure({dtype: partial(by, isa, *given) for dtype, given in arrays.items()}, seconds=1.0)
            for dtype in ("bfloat16", "float16"):
                ms = round(times[dtype] * 1e3, 3)
                report.add(f"{isa}, {what}, {dtype}", "time by float32's", times[dtype] / times["float32"], "", ms=ms)
