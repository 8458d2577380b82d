"""Launching Hopper's gradient kernel (`backward_kernel.py`): how the work is cut up, and what it gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from clearhead.kernels.gpu.bypass import descriptor_of
from clearhead.kernels.gpu.launcher import Launcher, alike
from clearhead.kernels.hopper.backward_kernel import by_keys
from clearhead.kernels.hopper.forward import described
from clearhead.kernels.hopper.gradient_rows_kernel import finish, lay_out
from clearhead.kernels.hopper.schedule import side_by_side
from clearhead.kernels.hopper.tile_runs import TileRuns

KEYS = 128  # of a program
PIECE = 64  # rows and columns of a piece of dq


@dataclass(frozen=True)
class BackwardConfig:
    """How the work is cut up: `columns` queries a tile."""

    columns: int = 64
    stages: int = 2  # tiles of queries, and of the gradients of their outputs, that shared memory holds
    registers: int = 240  # of each thread of a consumer
    waves: int = 2  # blocks for each processor, of heads side by side, where some have more to do than others


# by head_dim, what 64k registers and 227 KB of shared memory hold; columns times head_dim is twice a piece
CONFIGS = {64: BackwardConfig(columns=128), 128: BackwardConfig()}


@dataclass(frozen=True)
class BackwardForm:
    """What is computed, as far as it changes the code."""

    head_dim: int
    upper: bool  # query i sees no key after i + upper
    lower: bool  # query i sees no key before i + lower
    softcap: bool
    grouped: bool  # several query heads share a key head
    tiles: bool = False  # each block of keys has a list of tiles of queries


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    output: torch.Tensor,
    peak: torch.Tensor,
    total: torch.Tensor,
    scale: float,
    upper: int | None = None,
    lower: int | None = None,
    softcap: float | None = None,
    keys: int | None = None,
    dlse: torch.Tensor | None = None,
    runs: TileRuns | None = None,
    blind: torch.Tensor | None = None,
    launch: Launcher | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of attention of q (B, H, T, D) over k and v (B, Hk, S, D), as `accepts` lets through.

    Query i sees no key after i + upper, none before i + lower, and none from `keys` on; or, with `runs`, what
    is in their tiles, and nothing where `blind`. `peak` and `total` are those
    of the forward, for each row the largest score and Σ e^(score − peak); `dout` and `output` are shaped as q, and
    `dlse`, if given, is the gradient of each row's log-sum-exp. Queries that see nothing and keys that nobody sees may
    hold anything and have gradient 0. The order in which dq is added up is not fixed: its last bits may differ from run
    to run.
    """
    batch, heads, length, head_dim = q.shape
    high, low = (2**30 if upper is None else upper), (-(2**30) if lower is None else lower)
    keys = k.shape[2] if keys is None else keys
    # only queries that see something and keys that somebody sees take part
    first, last = max(0, -high), min(length, keys - low)
    start, stop = max(0, first + low), min(keys, last + high)
    whole = (first, last, start, stop) == (0, length, 0, k.shape[2])
    if runs is not None and runs.unseen is not None:  # they may hold anything, and are multiplied with zeros
        k, v = k.masked_fill(runs.unseen, 0.0), v.masked_fill(runs.unseen, 0.0)
    if blind is not None:
        q, dout = q.masked_fill(blind, 0.0), dout.masked_fill(blind, 0.0)
    launch = launch or Launcher()
    new = launch.room if whole else launch.zeros
    dq, dk, dv = (new(a.shape, a.dtype, a.device) for a in (q, k, v))
    queries, keys = last - first, stop - start
    if low > high or queries <= 0 or keys <= 0 or not dq.numel() or not dk.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    config = CONFIGS[head_dim]
    tiles = -(-queries // config.columns)
    padded = tiles * config.columns
    shifts = launch.room((batch * heads * padded * 2,), torch.float32, q.device)
    dqs = launch.room((batch * heads * padded * head_dim,), torch.float32, q.device)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    k, v, dk_seen, dv_seen = (a[:, :, start:] if start else a for a in (k, v, dk, dv))
    q, given = (a[:, :, first:] if first else a for a in (q, dout))
    move = first - start
    blocks = -(-keys // KEYS)
    side = 1
    table, tile_numbers, bits = (shifts, shifts, shifts) if runs is None else (runs.table, runs.tiles, runs.bits)
    if runs is not None:
        side = runs.each
    elif upper is not None or lower is not None:
        side = side_by_side(blocks, batch * k.shape[1], q.device, waves=config.waves)
    form = BackwardForm(head_dim, upper is not None, lower is not None, softcap is not None, heads != k.shape[1],
                        runs is not None)  # fmt: skip
    launch(
        ("lay_out", alike(dout, output, peak, total, dlse)), lay_out, (padded // PIECE, heads, batch),
        dout, output, peak, total, peak if dlse is None else dlse, shifts, dqs, first, queries, length, padded,
        *dout.stride()[:3], head_dim, config.columns, dlse is not None, num_warps=4,
    )  # fmt: skip
    launch(
        "by_keys", by_keys, (blocks * batch * k.shape[1],),
        described(q, queries, config.columns), described(given, queries, config.columns),
        described(k, keys, KEYS // 2), described(v, keys, KEYS // 2),
        described(dk_seen, keys, KEYS // 2), described(dv_seen, keys, KEYS // 2), numbers(shifts, config.columns), dqs,
        table, tile_numbers, bits, queries, keys, k.shape[1], batch * k.shape[1], side, heads // k.shape[1],
        high + move if upper is not None else 0, low + move if lower is not None else 0, tiles,
        scale, softcap or 1.0, (scale if softcap is None else 1.0) * math.log2(math.e), form, config, num_warps=4,
    )  # fmt: skip
    launch(
        "finish", finish, (padded // PIECE, head_dim // PIECE, batch * heads),
        dqs, dq, first, queries, length, padded, scale, head_dim, num_warps=4,
    )  # fmt: skip
    return dq, dk, dv


def numbers(array: torch.Tensor, columns: int) -> Any:
    """A descriptor of numbers for each query, read by tiles."""
    return descriptor_of(
        TensorDescriptor, array, shape=[array.numel()], strides=[1], block_shape=[columns], layout=layout_of(columns)
    )


@cache
def layout_of(columns: int) -> Any:
    """How so many numbers lie in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([columns], gl.float32)
