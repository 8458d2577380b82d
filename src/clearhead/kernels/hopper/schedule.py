"""How Hopper's forward cuts up the work: blocks of queries and tiles of keys, and which of them meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from clearhead.kernels.gpu.call import processors
from clearhead.kernels.gpu.masks import upload


@dataclass(frozen=True)
class TileConfig:
    """How the work is cut up: `rows` queries a consumer, 16 for each of its warps; `columns` keys a tile."""

    columns: int = 128
    stages: int = 2  # tiles of keys, and of values, that shared memory holds
    consumers: int = 2
    rows: int = 64
    registers: int = 240  # of each thread of a consumer
    overlap: bool = True
    turns: bool = True
    apart: bool = False  # the output has a place of its own in shared memory, so that the next queries come early
    persistent: bool = False  # as many programs as run at once, each with several blocks of queries
    limit: int = 0  # registers of a thread in the mean, so that several programs run on a processor; 0: all that it has
    seats: int = 1  # programs that run on a processor at once


# by head_dim, what 64k registers and 227 KB of shared memory hold
CONFIGS = {
    64: TileConfig(consumers=3, registers=160, overlap=False),
    128: TileConfig(stages=3, turns=False),
    256: TileConfig(columns=64),
}
# the same where queries see few keys, and a block's beginning and end would take much of its time
SHORT = CONFIGS | {
    64: TileConfig(stages=3, apart=True, persistent=True),
    128: TileConfig(apart=True, persistent=True),
}
# The same under lists of tiles, or where each query has a run of keys of its own. Small tiles hold less that is not
# seen, and programs with one consumer wait for each other least where several run on a processor. On an H200, 64
# features: of the time of SHORT Longformer 0.82, BigBird 0.51, block top-k 0.38, prefix + window 0.95, documents 0.93.
LISTED = SHORT | {64: TileConfig(64, 3, 1, turns=False, apart=True, persistent=True, limit=80, seats=3)}
# The same where many of those tiles are mixed. 128 features: 0.88, 0.59, 0.56; where few are, prefix and window, 1.08.
MIXED = LISTED | {128: TileConfig(64, 3, 1, turns=False, persistent=True, limit=128, seats=2)}
# The same where each query has a run of keys of its own, and is observed. Documents, 128 features: 0.95 of both looks.
OBSERVED = LISTED | {128: TileConfig(64, 2, 1, turns=False, apart=True, persistent=True, limit=128, seats=2)}
FEW = 2048  # keys that a query sees, in the mean
WAVES = 4  # blocks for each processor, of heads side by side
ROUNDS = 6  # blocks for each program, up to which it matters who has which


def preferred(head_dim: int, keys: int) -> TileConfig:
    """The config for a head_dim and the number of keys that a query sees, measured on an H200."""
    return (SHORT if keys <= FEW else CONFIGS)[head_dim]


def side_by_side(
    blocks: int, heads: int, device: torch.device, *, persistent: bool = False, waves: int | None = None
) -> int:
    """How many causal heads are worked on at a time, of each the blocks with the most to do first.

    With many, no long block starts late; with few, what they read stays in the cache, which holds that of some waves.
    Programs that take several blocks have even shares where all heads are sorted so, and about even ones of many
    heads one after the other.
    """
    at_once = processors(device)
    if persistent:
        return heads if blocks * heads <= ROUNDS * at_once else 1
    groups = max(1, heads // max(1, (waves or WAVES) * at_once // blocks))
    return -(-heads // groups)


class KeyRanges(NamedTuple):
    """The keys that each query sees, where that differs in other ways than by its place: one run of keys for each."""

    edges: torch.Tensor  # (1 or B, T, 2): the first key and the one after the last, from `start` on
    table: torch.Tensor  # (blocks of all batch rows, 8): first query, batch row, and tiles as `block_of` gives them
    config: TileConfig
    start: int  # keys before it, and from `stop` on, are seen by no query
    stop: int
    hidden: torch.Tensor | None  # (1 or B, 1, stop − start, 1), True for keys between that no query sees
    blind: torch.Tensor | None  # (1 or B, 1, T, 1), True for queries that see nothing


def key_ranges_of(
    starts: np.ndarray, stops: np.ndarray, keys: int, head_dim: int, on: torch.device,
    few: Mapping[int, TileConfig] | None = None,
) -> KeyRanges:  # fmt: skip
    """Runs of keys on the device. Starts and stops are (1 or B, T); where start ≥ stop, a query sees nothing.

    `few`: the configs where queries see few keys.
    """
    many = stops - starts
    none = many <= 0 if many.min(initial=1) <= 0 else None
    if none is not None:
        many = np.where(none, 0, many)
        starts, stops = np.where(none, keys, starts), np.where(none, 0, stops)
    config = ((few or LISTED) if int(many.sum(dtype=np.int64)) // max(many.size, 1) <= FEW else CONFIGS)[head_dim]
    start, stop = int(starts.min(initial=keys)), int(stops.max(initial=0))
    size = max(stop - start, 0)
    # a query that sees nothing starts after all keys, and lets no tile be full
    if start:
        starts, stops = np.minimum(starts - start, size), np.maximum(stops - start, 0)
    elif size < keys:
        starts = np.minimum(starts, size)
    hidden = unseen(starts, stops, size)
    edges = np.empty((*starts.shape, 2), np.int32)
    edges[..., 0], edges[..., 1] = starts, stops
    return KeyRanges(
        upload(edges, on),
        upload(blocks_of(starts, stops, size, config), on),
        config,
        start,
        stop,
        None if hidden is None else upload(hidden[:, None, :, None], on),
        None if none is None else upload(none[:, None, :, None], on),
    )


def unseen(starts: np.ndarray, stops: np.ndarray, size: int) -> np.ndarray | None:
    """Keys that no query sees, (1 or B, size); None where each is seen by some.

    >>> unseen(np.array([[4, 4, 0]]), np.array([[5, 6, 3]]), 6).astype(int).tolist()
    [[0, 0, 0, 1, 0, 0]]
    """
    found = np.zeros((len(starts), size), bool)
    for row, start, stop in zip(found, starts, stops, strict=True):
        if not start.size:
            row[:] = True
            continue
        first = np.append(
            0, np.flatnonzero(start[1:] != start[:-1]) + 1
        )  # of queries that start alike, one after another
        begin, end = start[first], np.maximum.reduceat(stop, first)
        if (begin[1:] < begin[:-1]).any():
            order = np.argsort(begin, kind="stable")
            begin, end = begin[order], end[order]
        reached = np.append(0, np.maximum.accumulate(end))  # before each start; what is between it and the start is not
        gaps = np.append(begin, size) - reached
        for place in np.flatnonzero(gaps > 0):
            row[reached[place] : reached[place] + gaps[place]] = True
    return found if found.any() else None


def blocks_of(starts: np.ndarray, stops: np.ndarray, keys: int, config: TileConfig) -> np.ndarray:
    """The table of `KeyRanges`, blocks with the most tiles first: so the last ones to start are short."""
    rows, columns = config.rows * config.consumers, config.columns
    if starts.shape[-1] % rows:
        pad = ((0, 0), (0, -starts.shape[-1] % rows))
        starts, stops = np.pad(starts, pad, mode="edge"), np.pad(stops, pad, mode="edge")
    starts, stops = starts.reshape(len(starts), -1, rows), stops.reshape(len(stops), -1, rows)
    base = np.minimum(starts.min(-1), keys - 1)
    end = np.maximum(-(-(stops.max(-1) - base) // columns), 1)
    low = np.clip(-(-(starts.max(-1) - base) // columns), 0, end - 1)
    high = np.clip((stops.min(-1) - base) // columns, low, end - 1)
    batch, block = np.indices(base.shape)
    table = np.stack([block * rows, batch, base, low, high, end, end, end], axis=-1).reshape(-1, 8).astype(np.int32)
    return table[np.argsort(-table[:, 5], kind="stable")]
