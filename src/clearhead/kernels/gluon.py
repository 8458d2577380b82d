"""Launching Hopper's attention kernel (`hopper.py`): what it takes, how the work is cut up, what it gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from clearhead.kernels.hopper import attend

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True)
class Cut:
    """How the work is cut up: `rows` queries a consumer, 16 for each of its warps; `columns` keys a tile."""

    columns: int = 128
    stages: int = 2  # tiles of keys, and of values, that shared memory holds
    consumers: int = 2
    rows: int = 64
    registers: int = 240  # of each thread of a consumer
    overlap: bool = True
    turns: bool = True


# by head_dim, what 64k registers and 227 KB of shared memory hold
CUTS = {
    64: Cut(consumers=3, registers=160, overlap=False),
    128: Cut(stages=3, turns=False),
    256: Cut(columns=64),
}


@dataclass(frozen=True)
class Form:
    """What is computed, as far as it changes the code."""

    width: int
    upper: bool  # query i sees no key after i + upper
    lower: bool  # query i sees no key before i + lower
    softcap: bool
    entropy: bool
    top: int = 0
    groups: int = 16


class Done(NamedTuple):
    """Output (B, H, T, D) and, for each row (B, H, T), the largest score and Σ e^x, Σ x e^x of x = score − peak."""

    output: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor | None
    level: torch.Tensor | None = None  # a score (before scale, after softcap) that at least `top` keys reach


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal_offset: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    entropy: bool = False,
    top: int = 0,
    cut: Cut | None = None,
) -> Done:
    """Attention of q (B, H, T, D) over k and v (B, Hk, S, D), as `refuses` lets through.

    Query i sees no key after i + causal_offset, and none before i + causal_offset − window. A row that sees nothing has
    output 0, peak −inf and total 0.
    """
    batch, heads, queries, width = q.shape
    upper = causal_offset or 0
    # keys that nobody sees are left out: they may hold anything
    start = 0 if window is None else max(upper - window, 0)
    stop = k.shape[2] if causal_offset is None else min(k.shape[2], queries + upper)
    k, v, keys, upper = k[:, :, start:], v[:, :, start:], stop - start, upper - start
    output = torch.empty((batch, heads, queries, width), dtype=q.dtype, device=q.device)
    peak, total, weighted, level = torch.empty((4, batch, heads, queries), dtype=torch.float32, device=q.device)
    if keys <= 0 or not peak.numel():
        level = level.fill_(-math.inf) if top else None
        return Done(output.zero_(), peak.fill_(-math.inf), total.zero_(), weighted.zero_() if entropy else None, level)
    cut = cut or CUTS[width]
    groups = 16 if top <= 8 else 32
    form = Form(width, causal_offset is not None, window is not None, softcap is not None, entropy, top, groups)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # PyTorch gives it no types
        attend[(-(-queries // (cut.rows * cut.consumers)), heads, batch)](
            described(q, queries, cut.rows),
            described(k, keys, cut.columns),
            described(v, keys, cut.columns),
            described(output, queries, cut.rows),
            peak, total, weighted, level, queries, keys, heads // k.shape[1], upper, upper - (window or 0),
            scale, softcap or 1.0, (scale if softcap is None else 1.0) * math.log2(math.e),
            form, cut, num_warps=cut.rows // 16,
        )  # fmt: skip
    return Done(output, peak, total, weighted if entropy else None, level if top else None)


def refuses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> str | None:
    """Why `forward` cannot compute this, in words."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        return "it is written for Hopper GPUs (compute capability 9.0)"
    if q.dtype not in DTYPES:
        return f"{q.dtype} is neither float16 nor bfloat16"
    if q.shape[-1] not in CUTS or v.shape[-1] != q.shape[-1]:
        return f"head_dim {q.shape[-1]} and value width {v.shape[-1]} are not one of 64, 128 and 256, both the same"
    if not scale > 0:
        return f"scale {scale} is not above 0"
    return None


def described(array: torch.Tensor, length: int, rows: int) -> Any:
    """A descriptor of the first `length` rows of each head, read and written by blocks of `rows`."""
    batch, heads, _, width = array.shape
    # of an axis with one entry the stride does not matter, but the copy engine wants one that it could step by
    strides = [stride if size > 1 else width for size, stride in zip(array.shape, array.stride(), strict=True)]
    if array.stride(-1) != 1 or array.data_ptr() % 16 or any(stride <= 0 or stride % 8 for stride in strides[:-1]):
        array = array.clone(memory_format=torch.contiguous_format)
        strides = list(array.stride())
    strides[-1] = 1
    block = [1, 1, rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[array.dtype])
    return TensorDescriptor(array, [batch, heads, length, width], strides, block, layout)
