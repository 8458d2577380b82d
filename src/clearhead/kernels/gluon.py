"""Launching Hopper's attention kernel (`hopper.py`): what it takes, how the work is cut up, what it gives."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
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
    apart: bool = False  # the output has a place of its own in shared memory, so that the next queries come early
    persistent: bool = False  # as many programs as there are processors, each with several blocks of queries


# by head_dim, what 64k registers and 227 KB of shared memory hold
CUTS = {
    64: Cut(consumers=3, registers=160, overlap=False),
    128: Cut(stages=3, turns=False),
    256: Cut(columns=64),
}
# the same where a block of queries sees few keys, and its beginning and its end would take much of its time
SHORT = {
    64: replace(CUTS[64], apart=True, persistent=True),
    128: Cut(apart=True, persistent=True),
    256: replace(CUTS[256], persistent=True),
}
FEW = 4096  # keys


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


class Spans(NamedTuple):
    """The keys that each query sees, where that differs in other ways than by its place: one run of keys for each."""

    edges: torch.Tensor  # (1 or B, T, 2): the first key and the one after the last, from `start` on
    table: torch.Tensor  # (blocks of all batch rows, 8): first query, batch row, and tiles as `block_of` gives them
    cut: Cut
    start: int  # keys before it, and from `stop` on, are seen by no query
    stop: int
    hidden: torch.Tensor | None  # (1 or B, 1, stop − start, 1), True for keys between that no query sees


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
        cut = CUTS[width] if window is None else preferred(width, min(window + 1, keys))
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


def preferred(width: int, keys: int) -> Cut:
    """The cut for a head_dim and the number of keys that a query sees."""
    return (SHORT if keys <= FEW else CUTS)[width]


def spans_of(
    starts: np.ndarray, stops: np.ndarray, keys: int, width: int, on: torch.device, cut: Cut | None = None
) -> Spans:
    """Runs of keys on the device. Starts and stops are (1 or B, T); where start ≥ stop, a query sees nothing."""
    none = starts >= stops
    cut = cut or preferred(width, int(np.where(none, 0, stops - starts).sum()) // max(none.size, 1))
    start = int(np.min(np.where(none, keys, starts), initial=keys))
    stop = int(np.max(np.where(none, 0, stops), initial=0))
    size = max(stop - start, 0)
    # a query that sees nothing starts after all keys, and lets no tile be full
    starts, stops = np.where(none, size, starts - start), np.where(none, 0, stops - start)
    place = (size + 1) * np.arange(len(starts))[:, None]
    begun, ended = (np.bincount((a + place).ravel(), minlength=place.size * (size + 1)) for a in (starts, stops))
    seen = np.cumsum((begun - ended).reshape(len(starts), -1), axis=-1)  # by how many queries, less those that see none
    hidden = seen[:, :size] + none.sum(-1, keepdims=True) == 0
    edges = np.stack([starts, stops], axis=-1).astype(np.int32)
    return Spans(
        torch.from_numpy(edges).to(on),
        torch.from_numpy(blocks_of(starts, stops, size, cut)).to(on),
        cut,
        start,
        stop,
        torch.from_numpy(hidden[:, None, :, None]).to(on) if hidden.any() else None,
    )


def blocks_of(starts: np.ndarray, stops: np.ndarray, keys: int, cut: Cut) -> np.ndarray:
    """The table of `Spans`, blocks with the most tiles first: so the last ones to start are short."""
    rows, columns = cut.rows * cut.consumers, cut.columns
    pad = ((0, 0), (0, -starts.shape[-1] % rows))
    starts, stops = (np.pad(a, pad, mode="edge").reshape(len(a), -1, rows) for a in (starts, stops))
    base = np.minimum(starts.min(-1), keys - 1)
    end = np.maximum(-(-(stops.max(-1) - base) // columns), 1)
    low = np.clip(-(-(starts.max(-1) - base) // columns), 0, end - 1)
    high = np.clip((stops.min(-1) - base) // columns, low, end - 1)
    batch, block = np.indices(base.shape)
    table = np.stack([block * rows, batch, base, low, high, end, end, end], axis=-1).reshape(-1, 8).astype(np.int32)
    return table[np.argsort(-table[:, 5], kind="stable")]


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
