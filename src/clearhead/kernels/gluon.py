"""Launching Hopper's attention kernel (`hopper.py`): what it takes, how the work is cut up, what it gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from clearhead.kernels.hopper import attend
from clearhead.kernels.hopper_cuts import CUTS, Cut, Spans, preferred

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


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
    spans: bool = False  # each query has a first and a last key of its own
    alibi: bool = False
    offsets: bool = False  # each batch row has its own position of query 0


class Alibi(NamedTuple):
    """score − slope · |query + offset − key|: a slope for each head, in the unit of products (of scores if capped)."""

    slopes: torch.Tensor
    offset: Any  # a number, or a tensor of one for each batch row


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
    alibi: Alibi | None = None,
    spans: Spans | None = None,
) -> Done:
    """Attention of q (B, H, T, D) over k and v (B, Hk, S, D), as `refuses` lets through.

    Query i sees no key after i + causal_offset, and none before i + causal_offset − window. A row that sees nothing has
    output 0, peak −inf and total 0. With `spans` it sees those keys instead.
    """
    batch, heads, queries, width = q.shape
    upper = causal_offset or 0
    # keys that nobody sees are left out: they may hold anything
    start = 0 if window is None else max(upper - window, 0)
    stop = k.shape[2] if causal_offset is None else min(k.shape[2], queries + upper)
    if spans is not None:
        start, stop = spans.start, spans.stop
    k, v, keys, upper = k[:, :, start:], v[:, :, start:], stop - start, upper - start
    if spans is not None and spans.hidden is not None:
        v = v[:, :, :keys].masked_fill(spans.hidden, 0.0)
    output = torch.empty((batch, heads, queries, width), dtype=q.dtype, device=q.device)
    peak, total, weighted, level = torch.empty((4, batch, heads, queries), dtype=torch.float32, device=q.device)
    if keys <= 0 or not peak.numel():
        level = level.fill_(-math.inf) if top else None
        return Done(output.zero_(), peak.fill_(-math.inf), total.zero_(), weighted.zero_() if entropy else None, level)
    if spans is not None:
        cut = spans.cut
    elif cut is None:
        seen = keys if causal_offset is None else (max(upper, 0) + min(queries + upper, keys)) // 2
        cut = preferred(width, seen if window is None else min(window, seen))
    groups = 16 if top <= 8 else 32
    form = Form(width, causal_offset is not None, window is not None or spans is not None, softcap is not None, entropy,
                top, groups, spans is not None, alibi is not None,
                alibi is not None and isinstance(alibi.offset, torch.Tensor))  # fmt: skip
    jobs = -(-queries // (cut.rows * cut.consumers)) * heads * batch
    edges, table, several = (peak, peak, 0) if spans is None else (spans.edges, spans.table, len(spans.edges) > 1)
    slopes, offset = (peak, 0) if alibi is None else (alibi.slopes, alibi.offset - start if start else alibi.offset)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # PyTorch gives it no types
        attend[(min(jobs, processors(q.device)) if cut.persistent else jobs,)](
            described(q, queries, cut.rows),
            described(k, keys, cut.columns),
            described(v, keys, cut.columns),
            described(output, queries, cut.rows),
            peak, total, weighted, level, edges, table, slopes, offset, queries, keys, heads, heads // k.shape[1],
            jobs, upper, upper - (window or 0), int(several),
            scale, softcap or 1.0, (scale if softcap is None else 1.0) * math.log2(math.e),
            form, cut, num_warps=cut.rows // 16,
        )  # fmt: skip
    return Done(output, peak, total, weighted if entropy else None, level if top else None)


@cache
def processors(on: torch.device) -> int:
    """How many programs of this size run side by side."""
    return torch.cuda.get_device_properties(on).multi_processor_count


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
