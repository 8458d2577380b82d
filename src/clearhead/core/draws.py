"""Blocks of keys at random for each block of queries: distinct, all sets of them as likely, by a hash and not a state.

Each draw is a 64-bit hash of (seed, block of queries, number of the draw), so any rows can be asked for alone, and all
of them together take a few steps of NumPy and as much memory as there are blocks drawn. Of the hashes Floyd's rule
makes a set (Bentley and Floyd 1987): draw t is one of the first n − count + t + 1 blocks, and where that was drawn
before, the last of those. More than half are drawn as the others that are left out.

>>> drawn(3, range(2), key_blocks=6, count=2).tolist()
[[2, 5], [0, 5]]
>>> drawn(3, range(1, 2), key_blocks=6, count=2).tolist()
[[0, 5]]
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

KEPT = 2**16  # blocks, up to which what was drawn is kept: it is asked for again by each tile, and by each call
GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ by the golden ratio, by which the streams of splitmix64 go on


def drawn(seed: int, query_blocks: range, key_blocks: int, count: int) -> np.ndarray:
    """The blocks of keys that each of some blocks of queries sees, ascending: (query blocks, count or all of them)."""
    count = min(count, key_blocks)
    draw = _kept if len(query_blocks) * count <= KEPT else _drawn
    return draw(seed, query_blocks, key_blocks, count)


def _drawn(seed: int, query_blocks: range, key_blocks: int, count: int) -> np.ndarray:
    few = min(count, key_blocks - count)
    found = _sets(seed, query_blocks, key_blocks, few)
    if few < count:  # what was drawn is left out
        seen = np.ones((len(query_blocks), key_blocks), bool)
        seen[np.arange(len(seen))[:, None], found] = False
        found = np.nonzero(seen)[1].reshape(len(seen), count)
    found.flags.writeable = False
    return found


_kept = lru_cache(maxsize=64)(_drawn)


def _sets(seed: int, query_blocks: range, key_blocks: int, count: int) -> np.ndarray:
    """Sets of so many of the blocks, a row each."""
    rows = np.arange(query_blocks.start, query_blocks.stop, dtype=np.uint64)
    streams = hashed(rows ^ hashed(np.array([seed], np.uint64)))
    last = np.arange(key_blocks - count, key_blocks)  # up to which each draw goes
    numbers = hashed(streams[:, None] + np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN))
    drawn = (numbers % (last + 1).astype(np.uint64)).astype(np.int64)
    found = np.sort(drawn, axis=1)
    for row in np.nonzero((found[:, 1:] == found[:, :-1]).any(axis=1))[0]:  # few, where few of many are drawn
        chosen: set[int] = set()
        for block, instead in zip(drawn[row].tolist(), last.tolist(), strict=True):
            chosen.add(instead if block in chosen else block)
        found[row] = sorted(chosen)
    return found


def hashed(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit numbers, no two alike: splitmix64 (Steele, Lea and Flood 2014)."""
    x = x + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
