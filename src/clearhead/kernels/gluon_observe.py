"""Launching Hopper's second look (`hopper_observe.py`): what each key received, a pooled map, the largest weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from clearhead.grid import bins as bins_of
from clearhead.kernels.gluon import described
from clearhead.kernels.hopper_observe import by_key, lay_out
from clearhead.observe import Map


@dataclass(frozen=True)
class LookCut:
    """How the work is cut up: `rows` keys a consumer, 16 for each of its warps; `columns` queries a tile."""

    columns: int = 128
    stages: int = 3
    consumers: int = 4
    rows: int = 64
    registers: int = 112


@dataclass(frozen=True)
class Look:
    """What is wanted, as far as it changes the code."""

    width: int
    upper: bool  # query i sees no key after i + upper
    lower: bool  # query i sees no key before i + lower
    softcap: bool
    received: bool
    map: bool
    pooled: bool  # the keys of a warp are in one cell of the map
    top: int = 0


def received_and_map(
    q: torch.Tensor,
    k: torch.Tensor,
    peak: torch.Tensor,
    total: torch.Tensor,
    scale: float,
    causal_offset: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    received: int | None = None,
    map: tuple[int, int] | None = None,
    cut: LookCut | None = None,
) -> tuple[torch.Tensor | None, Map | None]:
    """What each key received of the last `received` queries (B, H, S), and the weights pooled into (rows, columns).

    q (B, H, T, D) and k (B, Hk, S, D) as `gluon.forward` takes them; a weight is e^(score − peak) / total.
    """
    if received is not None and map is not None and received < q.shape[2]:
        options = (q, k, peak, total, scale, causal_offset, window, softcap)
        found, _ = received_and_map(*options, received=received, cut=cut)
        return found, received_and_map(*options, map=map, cut=cut)[1]
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    count, cells = (min(map[0], queries), min(map[1], keys)) if map else (1, 1)
    got = torch.empty((batch, heads, keys), dtype=torch.float32, device=q.device) if received is not None else None
    if not q.shape[:3].numel() or not keys:
        nothing = torch.zeros((batch, heads, count, cells), dtype=torch.float32, device=q.device)
        return None if got is None else got.zero_(), Map(nothing, nothing.clone()) if map else None
    cut = cut or (LookCut(64, 3, 2, 64, 240) if width == 256 else LookCut(64 if -(-queries // count) <= 64 else 128))
    each = -(-(-(-queries // count)) // cut.columns)
    pooled = bool(map) and keys % (cells * 16) == 0
    units = keys // 16 if pooled else keys
    shape = (batch, heads, count, units) if map else (0,)
    sums, tops = (torch.zeros(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    shifts = torch.empty(batch * heads * count * each * cut.columns, dtype=torch.float32, device=q.device)
    upper = causal_offset or 0
    form = Look(
        width, causal_offset is not None, window is not None, softcap is not None, got is not None, bool(map), pooled
    )
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        skipped = queries - (queries if received is None else received)
        lay_out[(count * each, batch * heads)](
            peak.contiguous(), total.contiguous(), shifts, queries, skipped, count, each, cut.columns, num_warps=1
        )
        by_key[(-(-keys // (cut.rows * cut.consumers)), heads, batch)](
            described(q, queries, cut.columns),
            described(k, keys, cut.rows),
            numbers(shifts, cut.columns),
            sums if got is None else got, sums, tops, queries, keys, heads // k.shape[1], upper, upper - (window or 0),
            count, each, scale, softcap or 1.0, (scale if softcap is None else 1.0) * math.log2(math.e),
            form, cut, num_warps=cut.rows // 16,
        )  # fmt: skip
    return got, pool(sums, tops, queries, keys, cells) if map else None


def numbers(array: torch.Tensor, columns: int) -> Any:
    """A descriptor of numbers for each query, read by tiles."""
    layout = gl.NVMMASharedLayout.get_default_for([columns], gl.float32)
    return TensorDescriptor(array, [array.numel()], [1], [columns], layout)


def pool(sums: torch.Tensor, tops: torch.Tensor, queries: int, keys: int, cells: int) -> Map:
    """Strips (…, bins, units) become cells: the mean and the largest."""
    count, units = sums.shape[-2:]
    across = bins_of(units, cells)
    most = max(len(part) for part in across)
    if most * cells == units:
        total, largest = (x.unflatten(-1, (cells, most)) for x in (sums, tops))
    else:
        place = torch.tensor([part.start for part in across], device=sums.device)[:, None] + torch.arange(
            most, device=sums.device
        )
        inside = place < torch.tensor([part.stop for part in across], device=sums.device)[:, None]
        place = torch.where(inside, place, 0)
        total, largest = (torch.where(inside, x[..., place], 0.0) for x in (sums, tops))
    rows = torch.tensor([len(part) for part in bins_of(queries, count)], device=sums.device, dtype=torch.float32)
    columns = torch.tensor([len(part) for part in bins_of(keys, cells)], device=sums.device, dtype=torch.float32)
    if queries % count == 0 and keys % cells == 0:
        return Map(total.sum(-1) / ((queries // count) * (keys // cells)), largest.amax(-1))
    return Map(total.sum(-1) / (rows[:, None] * columns), largest.amax(-1))
