"""Masks as the GPU kernels read them: a span of keys for each query where that says it all, else a small program."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from clearhead.core.arrays import Array, to_numpy
from clearhead.core.grid import Grid, by_batch
from clearhead.core.mask import Both, Either, Mask, Not, Where
from clearhead.core.masks import Band, Before, Documents, GlobalTokens, RandomBlocks
from clearhead.kernels.gpu import device
from clearhead.kernels.gpu.device import Lists, Span
from clearhead.kernels.gpu.tile_lists_kernel import tile_states
from clearhead.kernels.gpu.tuning import cdiv

FAR = 2**30  # no limit: more than any position, and twice that still fits 32 bits


@dataclass
class Prepared:
    """A mask on the device: a span, or a program with its arrays; and its tiles, once a kernel has asked for them."""

    span: Span
    span_by_row: bool = False
    program: tuple[tuple[int, ...], ...] | None = None
    arrays: tuple[Any, ...] = ()
    by_batch: bool = False
    by_head: bool = False
    lists: dict[Any, Any] = field(default_factory=dict)


def prepare(mask: Mask | None, grid: Grid, on: torch.device) -> Prepared:
    """What the kernels are given for a mask."""
    if mask is None:
        return _from_span((-FAR, FAR, grid.keys), grid, on)
    limits = as_span(mask, grid)
    if limits is not None:
        return _from_span(limits, grid, on)
    return _from_tree(mask, grid, on)


def as_span(mask: Mask, grid: Grid) -> tuple[Array, Array, Array] | None:
    """(low, high, count): query i sees keys i + low … i + high below count. None where that does not say it all."""
    if isinstance(mask, Band):
        given = mask.alignment.given is not None
        offset = flat(mask.alignment.offset(grid), grid) if given else mask.alignment.aligned(grid)
        low = -FAR if mask.back is None else larger(offset - mask.back, -FAR)
        return low, FAR if mask.ahead is None else smaller(offset + mask.ahead, FAR), grid.keys
    if isinstance(mask, Before):
        count = flat(by_batch(mask.name, mask.count, grid), grid)
        return -FAR, FAR, smaller(larger(count, 0), grid.keys)
    if isinstance(mask, Both):
        left, right = as_span(mask.left, grid), as_span(mask.right, grid)
        if left is not None and right is not None:
            return larger(left[0], right[0]), smaller(left[1], right[1]), smaller(left[2], right[2])
    return None


def larger(a: Array, b: Array) -> Array:
    """The larger ones; a number of two numbers, in a tenth of the time that NumPy takes."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


def smaller(a: Array, b: Array) -> Array:
    """The smaller ones, in the same way."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def flat(values: np.ndarray, grid: Grid) -> Array:
    """One number, or one for each batch row in one axis."""
    if values.ndim == 0:
        return max(-FAR, min(int(values), FAR))
    return np.clip(np.broadcast_to(values[..., 0, 0, 0], grid.batch).reshape(-1), -FAR, FAR)


def _from_span(limits: tuple[Array, Array, Array], grid: Grid, on: torch.device) -> Prepared:
    low, high, count = limits
    if isinstance(low, int) and isinstance(high, int) and isinstance(count, int):
        nothing = _nothing(on)
        return Prepared(Span(low, high, count, nothing), arrays=(nothing,))
    rows = np.stack(np.broadcast_arrays(*limits), axis=-1).astype(np.int32)
    return Prepared(Span(-FAR, FAR, grid.keys, upload(rows, on)), span_by_row=True, arrays=(_nothing(on),))


@lru_cache(maxsize=8)
def _nothing(on: torch.device) -> torch.Tensor:
    """An array for arguments that are not used."""
    return torch.zeros(4, dtype=torch.int32, device=on)


def upload(array: np.ndarray, on: torch.device) -> torch.Tensor:
    """An array on the device."""
    return torch.from_numpy(np.array(array, order="C")).to(on)


def _from_tree(mask: Mask, grid: Grid, on: torch.device) -> Prepared:
    nodes: list[tuple[int, ...]] = []
    arrays: list[Any] = []
    prepared = Prepared(Span(-FAR, FAR, grid.keys, _nothing(on)))

    def add(part: Mask) -> None:
        if isinstance(part, Both | Either):
            add(part.left)
            add(part.right)
            nodes.append((device.AND.value if isinstance(part, Both) else device.OR.value, 0, 0))
        elif isinstance(part, Not):
            add(part.mask)
            nodes.append((device.NOT.value, 0, 0))
        else:
            kind, more, parts = leaf(part, grid, on)
            if kind == device.ARRAY.value:
                prepared.by_batch |= parts[0].shape[0] > 1
                prepared.by_head |= parts[0].shape[1] > 1
                strides = [0 if n == 1 else s for n, s in zip(parts[0].shape, parts[0].stride(), strict=True)]
                parts = [parts[0], *strides]
            elif kind != device.BLOCKS.value:
                prepared.by_batch |= bool(more)
            nodes.append((kind, len(arrays), more))
            arrays.extend(parts)

    add(mask)
    prepared.program, prepared.arrays = tuple(nodes), tuple(arrays)
    return prepared


def leaf(part: Mask, grid: Grid, on: torch.device) -> tuple[int, int, list[Any]]:
    """A mask without parts: its kind, 1 if it differs by batch row (or a block's size), and its arrays."""
    span = as_span(part, grid)
    if isinstance(part, Band) and span is not None:
        limits = np.stack(np.broadcast_arrays(span[0], span[1]), axis=-1).astype(np.int32)
        return device.BAND.value, int(limits.ndim > 1), [upload(limits, on)]
    if isinstance(part, Before) and span is not None:
        return device.BEFORE.value, int(np.ndim(span[2]) > 0), [upload(np.asarray(span[2], np.int32), on)]
    if isinstance(part, Documents):
        ids = part.ids(grid)
        _, numbered = np.unique(np.concatenate([a.reshape(-1) for a in ids]), return_inverse=True)  # fit 32 bits
        queries, keys = np.split(numbered.astype(np.int32).reshape(-1), [ids[0].size])
        queries, keys = queries.reshape(ids[0].shape), keys.reshape(ids[1].shape)
        by_row = queries.ndim > 1 or keys.ndim > 1
        if by_row:
            queries, keys = (np.broadcast_to(a, (*grid.batch, a.shape[-1])) for a in (queries, keys))
        return device.DOCUMENTS.value, int(by_row), [upload(queries, on), upload(keys, on)]
    if isinstance(part, GlobalTokens):
        offset = flat(part.alignment.offset(grid), grid)
        places = np.arange(grid.queries) + (offset if np.ndim(offset) == 0 else np.asarray(offset)[:, None])
        flags = [np.isin(a, part.indices).astype(np.uint8) for a in (places, np.arange(grid.keys))]
        return device.FLAGS.value, int(places.ndim > 1), [upload(a, on) for a in flags]
    if isinstance(part, RandomBlocks):
        table = part.table(range(grid.queries), grid)
        return device.BLOCKS.value, part.block, [upload(table.astype(np.uint8), on)]
    array = part.array if isinstance(part, Where) else part.tile(range(grid.queries), range(grid.keys), grid)
    return device.ARRAY.value, 0, [four_axes(np.full((1, 1), array) if isinstance(array, bool) else array, grid, on)]


def four_axes(array: Array, grid: Grid, on: torch.device) -> torch.Tensor:
    """An array that broadcasts to (*batch, heads, queries, keys), on the device, with one batch axis."""
    tensor = array.detach().to(on) if isinstance(array, torch.Tensor) else upload(to_numpy(array), on)
    rank = len(grid.batch) + 3
    tensor = tensor[(None,) * (rank - tensor.ndim) + (...,)]
    lead = tensor.shape[:-3]
    if all(size == 1 for size in lead):
        return tensor.reshape(1, *tensor.shape[-3:])
    return tensor.expand(*grid.batch, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])


def tiles(prepared: Prepared, grid: Grid, rows: int, columns: int, *, turned: bool = False) -> Lists:
    """For each block of queries the tiles of keys that are not empty; `turned`: for each block of keys, of queries."""
    assert prepared.program is not None
    key = (rows, columns, turned)
    if key not in prepared.lists:
        states = state_map(prepared, grid, rows, columns)
        if turned:
            states = states.transpose(-1, -2)
        # 1 is mixed, 2 full, 0 empty: mixed first, empty last
        order = torch.where(states == 0, 3, states.to(torch.int32))
        found = torch.sort(order, dim=-1, stable=True).indices.to(torch.int32).contiguous()
        counts = torch.stack([(states == 1).sum(-1), (states == 2).sum(-1)], dim=-1).to(torch.int32).contiguous()
        batch, heads, down, across = states.shape
        lists = Lists(found, counts, int(batch > 1), int(heads > 1), heads, down, across)
        if capturing(found.device):
            return lists
        done(found.device)
        prepared.lists[key] = lists
    return prepared.lists[key]


def state_map(prepared: Prepared, grid: Grid, rows: int, columns: int) -> torch.Tensor:
    """0 empty, 1 mixed, 2 full, for each tile: (batch or 1, heads or 1, blocks of queries, blocks of keys)."""
    key = (rows, columns)
    if key not in prepared.lists:
        batch = math.prod(grid.batch) if prepared.by_batch else 1
        heads = grid.heads if prepared.by_head else 1
        down, across = cdiv(grid.queries, rows), cdiv(grid.keys, columns)
        states = torch.empty((batch, heads, down, across), dtype=torch.uint8, device=prepared.span.rows.device)
        if states.numel():
            tile_states[(across, down, batch * heads)](
                states, prepared.arrays, grid.queries, grid.keys, heads, prepared.program, rows, columns
            )
        if capturing(states.device):
            return states
        done(states.device)
        prepared.lists[key] = states
    return prepared.lists[key]


def done(device: torch.device) -> None:
    """Wait for what was launched: it is kept, and the next call may run on another stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured: what is made then holds nothing before it is replayed, and is not kept."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
