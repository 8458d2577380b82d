"""Launching Hopper's attention kernel (`forward_kernel.py`): how the work is cut up, and what it gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from clearhead.kernels.gpu.bypass import descriptor_of
from clearhead.kernels.gpu.call import processors
from clearhead.kernels.gpu.launcher import Launcher
from clearhead.kernels.hopper.forward_kernel import attend
from clearhead.kernels.hopper.schedule import KeyRanges, preferred, side_by_side
from clearhead.kernels.hopper.tile_runs import TileRuns

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True)
class ForwardForm:
    """What is computed, as far as it changes the code."""

    head_dim: int
    upper: bool  # query i sees no key after i + upper
    lower: bool  # query i sees no key before i + lower
    softcap: bool
    entropy: bool
    top: int = 0
    groups: int = 16
    ranges: bool = False  # each query has a first and a last key of its own
    alibi: bool = False
    offsets: bool = False  # each batch row has its own position of query 0
    unrounded: bool = False  # the output is given in float32 too
    marked: bool = False  # rows are marked in which it is not finite
    tiles: bool = False  # each block has a list of tiles
    looked: bool = False  # a second look follows


class AlibiSlopes(NamedTuple):
    """score − slope · |query + offset − key|: a slope for each head, in the unit of products (of scores if capped)."""

    slopes: torch.Tensor
    offset: Any  # a number, or a tensor of one for each batch row


class Done(NamedTuple):
    """Output (B, H, T, D) and for each row (B, H, T): the largest score, Σ e^x of x = score − peak, log-sum-exp, …"""

    output: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    lse: torch.Tensor
    largest: torch.Tensor | None = None  # the peak again, NaN where a score is
    entropy: torch.Tensor | None = None
    # for a second look: 0, thrice anything, and of each row a score (before scale, after softcap) that `top` keys reach
    levels: torch.Tensor | None = None
    unrounded: torch.Tensor | None = None  # the output in float32
    odd: torch.Tensor | None = None  # for each row: 1 where its output is not finite


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
    alibi: AlibiSlopes | None = None,
    ranges: KeyRanges | None = None,
    runs: TileRuns | None = None,
    launch: Launcher | None = None,
    unrounded: bool = False,
    marked: bool = False,
    looked: bool = False,
    as_queries: bool = False,
) -> Done:
    """Attention of q (B, H, T, D) over k and v (B, Hk, S, D), as `accepts.refusal` lets through.

    Query i sees no key after i + causal_offset, and none before i + causal_offset − window. A row that sees nothing has
    output 0, peak −inf and total 0. With `ranges` it sees those keys instead, and with `runs` what
    is in their tiles. Calls with one `launch` are of one kind. `looked`: the second look is told what it starts from.
    `as_queries`: the output lies as the queries do, heads between positions, where they have no gaps.
    """
    batch, heads, queries, head_dim = q.shape
    upper = causal_offset or 0
    # keys that nobody sees are left out: they may hold anything
    start = 0 if window is None else max(upper - window, 0)
    stop = k.shape[2] if causal_offset is None else min(k.shape[2], queries + upper)
    if ranges is not None:
        start, stop = ranges.start, ranges.stop
    if start:
        k, v = k[:, :, start:], v[:, :, start:]
    keys, upper = stop - start, upper - start
    if ranges is not None and ranges.hidden is not None:
        v = v[:, :, :keys].masked_fill(ranges.hidden, 0.0)
    if keys <= 0 or not q.shape[:3].numel():
        lowest = torch.full((batch, heads, queries), -math.inf, device=q.device)
        zero = torch.zeros_like(lowest)
        output = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        whole = output.float() if unrounded else None
        largest, entropies = (lowest.clone(), zero.clone()) if entropy else (None, None)
        levels = torch.zeros(4 + lowest.numel(), device=q.device) if looked else None
        return Done(output, lowest, zero, lowest.clone(), largest, entropies, levels, whole)
    launch = launch or Launcher()
    new = partial(launch.room, (batch, heads, queries), torch.float32, q.device)
    output = launch.room((batch, heads, queries, head_dim), q.dtype, q.device, strides_like(q) if as_queries else None)
    whole = launch.room(output.shape, torch.float32, q.device) if unrounded else None
    odd = launch.room(output.shape[:3], torch.int32, q.device) if marked else None
    peak, total, lse = new(), new(), new()
    rows = batch * heads * queries if top else 0
    levels = launch.room((4 + rows,), torch.float32, q.device) if looked else None
    largest, entropies = (new(), new()) if entropy else (None, None)
    if ranges is not None or runs is not None:
        config = (ranges or runs).config  # type: ignore[union-attr]  # one of them is there
    else:
        seen = keys if causal_offset is None else (max(upper, 0) + min(queries + upper, keys)) // 2
        config = preferred(head_dim, seen if window is None else min(window, seen))
    form = ForwardForm(
        head_dim=head_dim, upper=causal_offset is not None, lower=window is not None or ranges is not None,
        softcap=softcap is not None, entropy=entropy, top=top, groups=16 if top <= 8 else 32,
        ranges=ranges is not None, alibi=alibi is not None,
        offsets=alibi is not None and isinstance(alibi.offset, torch.Tensor), unrounded=unrounded, marked=marked,
        tiles=runs is not None, looked=looked,
    )  # fmt: skip
    blocks = -(-queries // (config.rows * config.consumers))
    jobs = blocks * heads * batch
    side = 1
    if causal_offset is not None and window is None:
        side = side_by_side(blocks, heads * batch, q.device, persistent=config.persistent)
    edges, table, several = (peak, peak, 0) if ranges is None else (ranges.edges, ranges.table, len(ranges.edges) > 1)
    numbers, bits = peak, peak
    if runs is not None:
        table, several, numbers, bits = runs.table, runs.each, runs.tiles, runs.bits
    slopes, offset = (peak, 0) if alibi is None else (alibi.slopes, alibi.offset - start if start else alibi.offset)
    launch(
        ("attend", entropy, top, unrounded, marked, looked), attend,
        (min(jobs, processors(q.device) * config.seats) if config.persistent else jobs,),
        described(q, queries, config.rows),
        described(k, keys, config.columns),
        described(v, keys, config.columns),
        described(output, queries, config.rows),
        peak, total, lse, peak if largest is None else largest, peak if entropies is None else entropies,
        peak if levels is None else levels,
        peak if whole is None else whole, peak if odd is None else odd,
        edges, table, numbers, bits, slopes, offset, queries, keys, heads, heads // k.shape[1],
        jobs, side, upper, upper - (window or 0), int(several),
        scale, softcap or 1.0, (scale if softcap is None else 1.0) * math.log2(math.e),
        form, config, num_warps=config.rows // 16, **({"maxnreg": config.limit} if config.limit else {}),
    )  # fmt: skip
    return Done(output, peak, total, lse, largest, entropies, levels, whole, odd)


def strides_like(q: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of an array that lies as q does, where that has its heads between positions and no gaps; else None."""
    batch, heads, queries, head_dim = q.shape
    between = (queries * heads * head_dim, head_dim, heads * head_dim, 1)
    if min(heads, queries) == 1 or q.stride()[1:] != between[1:] or (batch > 1 and q.stride(0) != between[0]):
        return None
    return between


def described(array: torch.Tensor, length: int, rows: int) -> Any:
    """A descriptor of the first `length` rows of each head, read and written by blocks of `rows`."""
    fields = fields_of(array.shape, array.stride(), length, rows, array.dtype)
    if not fields or array.data_ptr() % 16:
        array = array.clone(memory_format=torch.contiguous_format)
        fields = fields_of(array.shape, array.stride(), length, rows, array.dtype)
    return descriptor_of(TensorDescriptor, array, **fields)


@lru_cache(maxsize=256)
def fields_of(
    shape: tuple[int, ...], strides: tuple[int, ...], length: int, rows: int, dtype: torch.dtype
) -> dict[str, Any]:
    """A descriptor, but for the address; empty where the copy engine cannot step by these strides."""
    batch, heads, _, head_dim = shape
    # of an axis with one entry the stride does not matter, but the engine wants one that it could step by
    steps = [stride if size > 1 else head_dim for size, stride in zip(shape[:-1], strides[:-1], strict=True)]
    if strides[-1] != 1 or any(step <= 0 or step % 8 for step in steps):
        return {}
    block = [1, 1, rows, head_dim]
    return {
        "shape": [batch, heads, length, head_dim],
        "strides": [*steps, 1],
        "block_shape": block,
        "layout": layout_of(rows, head_dim, dtype),
    }


@cache
def layout_of(rows: int, head_dim: int, dtype: torch.dtype) -> Any:
    """How a block lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, head_dim], DTYPES[dtype])
