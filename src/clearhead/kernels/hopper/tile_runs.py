"""Any mask for Hopper's kernels: for each block the tiles that are left, the mixed ones with their pairs as bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from clearhead.core.grid import Grid
from clearhead.core.lowered import Node
from clearhead.core.mask import Mask
from clearhead.kernels.gpu.device import Lists
from clearhead.kernels.gpu.masks import Prepared, capturing, done, listed, tiles, upload
from clearhead.kernels.gpu.tile_lists_kernel import tile_bits
from clearhead.kernels.hopper.schedule import CONFIGS, FEW, LISTED, MIXED, TileConfig

NOTHING, EVERYTHING = 0, 1  # the first two of the tiles that bits tell of
OFTEN = 1 / 3  # of the tiles, from which on many are mixed
UNEVEN = 3  # times the mean, from which on a block is long: programs with many blocks each would have unequal shares
LONG = 2  # times the mean, from which on a block's tiles are shared out among programs that add up what they find


class TileRuns(NamedTuple):
    """The tiles that each block looks at, blocks with the most first."""

    # (rows, 8): first position of the block; batch row and head, or −1 for all; where its tiles begin, how many are
    # mixed, how many there are, where the bits of the mixed ones begin, and 0, or n for a program that puts what it
    # finds aside, at place n − 1, to be added to what another one of the same block finds
    table: torch.Tensor
    tiles: torch.Tensor
    bits: torch.Tensor  # (2 + mixed tiles, positions of a block, 4), see `tile_bits`
    each: int  # heads of all batch rows for which one row of the table serves
    unseen: torch.Tensor | None  # (1 or B, 1 or heads, positions, 1): seen by nobody, or seeing nothing; None: none are
    config: Any = None
    # (rows, 8): block, batch row and head as above; the first place from which something is to be added, and how many
    added: torch.Tensor | None = None
    places: int = 0  # how many there are


def forward_runs(prepared: Prepared, mask: Mask | Node | None, grid: Grid, head_dim: int, heads: int) -> TileRuns:
    """For blocks of queries, tiles of keys; `heads` of all batch rows."""
    config = LISTED[head_dim]
    blocks, some, mixed = left(prepared, mask, grid, config)
    if mixed > OFTEN * some:
        config = MIXED[head_dim]
    elif some * config.columns > FEW * blocks:
        config = CONFIGS[head_dim]
    lists = on_host(prepared, mask, grid, config.rows * config.consumers, config.columns)
    each = lists.counts[:, 1:].sum(-1)
    if config.persistent and each.max(initial=0) > UNEVEN * each.mean():
        config = replace(config, persistent=False)
    config = replace(config, turns=False)  # measured: about a fiftieth of the time less
    # the first tile of a block is always masked
    return laid_out(prepared, grid, lists, config.rows * config.consumers, config.columns, heads, masked=1,
                    config=config)  # fmt: skip


def backward_runs(
    prepared: Prepared,
    mask: Mask | Node | None,
    grid: Grid,
    keys: int,
    queries: int,
    heads: int,
    *,
    shared: bool = False,
) -> TileRuns:
    """For blocks of `keys`, tiles of `queries`; `heads` of keys of all batch rows. `shared`: long lists are cut up."""
    lists = on_host(prepared, mask, grid, queries, keys, turned=True)
    return laid_out(prepared, grid, lists, keys, queries, heads, masked=0, shared=shared)


def left(prepared: Prepared, mask: Mask | Node | None, grid: Grid, config: TileConfig) -> tuple[int, int, int]:
    """How many blocks there are, how many tiles of all of them are left, and how many of those are mixed."""
    counts = on_host(prepared, mask, grid, config.rows * config.consumers, config.columns).counts
    _, mixed, full = counts.sum(0, dtype=np.int64).tolist()
    return len(counts), mixed + full, mixed


def on_host(
    prepared: Prepared, mask: Mask | Node | None, grid: Grid, rows: int, columns: int, *, turned: bool = False
) -> Lists:
    """The tiles and their counts on the host; tiles that an array was read for, on the device, are left there."""
    known = listed(prepared, mask, grid, rows, columns, turned)
    if known is not None:
        return known
    lists = tiles(prepared, mask, grid, rows, columns, turned=turned)
    return lists._replace(counts=lists.counts.reshape(-1, 3).cpu().numpy())


def laid_out(
    prepared: Prepared, grid: Grid, lists: Lists, down: int, across: int, heads: int, *,
    masked: int, config: TileConfig | None = None, shared: bool = False,
) -> TileRuns:  # fmt: skip
    """The table, the tiles and the bits; at least `masked` tiles of a block are taken as mixed ones."""
    start, mixed, full = np.ascontiguousarray(lists.counts.T, np.int32)
    on, row = prepared.span.rows.device, np.arange(start.size, dtype=np.int32)
    # the bits of all mixed tiles, in the order of blocks
    first = np.cumsum(mixed, dtype=np.int32) - mixed
    which = np.repeat(row, mixed)
    place = np.repeat(start - first, mixed) + np.arange(which.size, dtype=np.int32)
    first += 2
    flat = lists.tiles.reshape(-1)
    if isinstance(flat, torch.Tensor):
        entries = torch.stack([upload(which, on), flat[upload(place, on)].to(torch.int32)], -1)
        numbers = torch.cat([flat, flat.new_zeros(1)])
    else:
        both = np.empty((which.size, 2), np.int32)
        both[:, 0], both[:, 1] = which, flat[place]
        entries, numbers = upload(both, on), upload(np.append(flat, np.zeros(1, np.int32)), on)
    bits = torch.empty((2 + which.size, down, 4), dtype=torch.int32, device=on)
    bits[NOTHING], bits[EVERYTHING] = 0, -1
    turned = masked == 0
    if which.size:
        tile_bits[(which.size, down // 64)](
            bits, entries, prepared.arrays, grid.queries, grid.keys, lists.down, lists.mask_heads,
            PROGRAM=prepared.program, TURNED=turned, BM=down, BN=across, num_warps=4,
        )  # fmt: skip
    some = count = mixed + full
    if masked:
        first = np.where(mixed > 0, first, np.where(count > 0, EVERYTHING, NOTHING))
        mixed, count = np.maximum(mixed, 1), np.maximum(count, 1)
    number, block = np.divmod(row, lists.down)
    table = np.zeros((start.size, 8), np.int32)
    table[:, 0] = block * down
    table[:, 1] = number // lists.mask_heads if lists.by_batch else -1
    table[:, 2] = number % lists.mask_heads if lists.by_head else -1
    table[:, 3] = np.where(some > 0, start, len(flat))  # one tile that nobody looks at
    table[:, 4], table[:, 5], table[:, 6] = mixed, count, first
    table, added = shared_out(table) if shared else (table, table[:0])
    table = table[np.argsort(-table[:, 5], kind="stable")]
    certain = not turned and prepared.lists.get(("certain", down, across), False)
    unseen = None if certain else left_out(bits, which, full, lists, grid.keys if turned else grid.queries)
    runs = TileRuns(
        upload(table, on), numbers, bits, heads // max(1, len(row) // lists.down), unseen, config,
        upload(added, on) if len(added) else None, int(added[:, 4].sum()),
    )  # fmt: skip
    if not capturing(on):
        done(on)
    return runs


def shared_out(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of which none is much longer than others are on average, and what is to be added up of those that were cut.

    >>> table = np.array([[0, -1, -1, 0, 3, 12, 2, 0], *([[128 * n, -1, -1, 12, 1, 1, 5, 0] for n in range(1, 12)])])
    >>> table, added = shared_out(table)
    >>> table[:3, 3:].tolist(), len(table), added[:, [0, 3, 4]].tolist()
    ([[0, 3, 4, 2, 0], [4, 0, 4, 6, 1], [8, 0, 4, 10, 2]], 14, [[0, 0, 2]])
    """
    count, mixed = table[:, 5], table[:, 4]
    most = max(1, int(np.ceil(LONG * count.mean()))) if len(table) else 1
    parts = np.maximum(1, -(-count // most))
    row = np.repeat(np.arange(len(table)), parts)
    number = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin, end = (n * count[row] // parts[row] for n in (number, number + 1))  # as long as one another, but for one
    cut = table[row]
    cut[:, 3] += begin
    cut[:, 4] = np.clip(mixed[row] - begin, 0, end - begin)
    cut[:, 5] = end - begin
    cut[:, 6] += begin
    aside = number > 0
    cut[aside, 7] = 1 + np.arange(aside.sum())
    long = parts > 1
    added = table[long]
    added[:, 4] = parts[long] - 1
    added[:, 3] = np.cumsum(added[:, 4]) - added[:, 4]
    return cut, added


def left_out(bits: torch.Tensor, which: np.ndarray, full: np.ndarray, lists: Lists, length: int) -> torch.Tensor | None:
    """Positions of blocks that have no pair: they may hold anything, and nothing must come of it."""
    if full.all():
        return None
    found = (bits[2:] != 0).any(-1).to(torch.int32)
    counts = found.new_zeros((full.size, bits.shape[1])).index_add_(0, upload(which, bits.device), found)
    none = (counts == 0) & (upload(full, bits.device) == 0)[:, None]
    none = none.reshape(-1, lists.mask_heads, lists.down * bits.shape[1])[..., :length, None]
    return none if bool(none.any()) else None
