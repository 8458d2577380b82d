"""How large the blocks of each kernel are, and how many warps and stages it has."""

from __future__ import annotations

from typing import NamedTuple


class Blocks(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of its pipeline."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


def forward_blocks(dtype: str, padded: int, padded_width: int, queries: int) -> Blocks:
    """For the forward kernel."""
    wide = max(padded, padded_width)
    if dtype == "float32":
        blocks = Blocks(64, 32, 4, 2) if wide <= 128 else Blocks(32, 32, 4, 1)
    elif wide <= 64:
        blocks = Blocks(128, 128, 8, 3)
    elif wide <= 128:
        blocks = Blocks(128, 128, 8, 2)
    else:
        blocks = Blocks(128, 64, 8, 2)
    return smaller(blocks, queries)


def smaller(blocks: Blocks, queries: int) -> Blocks:
    """Fewer rows where there are few queries."""
    rows = blocks.rows
    while rows > 16 and rows // 2 >= queries:
        rows //= 2
    return blocks._replace(rows=rows, warps=4 if rows < 128 else blocks.warps)


def by_key_blocks(dtype: str, padded: int, padded_width: int, bin: int) -> Blocks:
    """For the second look by keys; `bin` is how many queries are pooled together."""
    if dtype == "float32":
        blocks = Blocks(32, 64, 4, 1)
    else:
        blocks = Blocks(64, 128, 8, 3) if padded <= 128 else Blocks(64, 128, 8, 2)
    rows = blocks.rows
    while rows > 16 and rows // 2 >= bin:
        rows //= 2
    return blocks._replace(rows=rows)


def top_blocks(dtype: str, padded: int, padded_width: int, queries: int) -> Blocks:
    """For the largest weights of each query."""
    if dtype == "float32":
        return smaller(Blocks(32, 64, 4, 1), queries)
    return smaller(Blocks(64, 128, 4, 2), queries)


def keys_blocks(dtype: str, padded: int, padded_width: int, queries: int) -> Blocks:
    """For the gradients of keys and values."""
    wide = max(padded, padded_width)
    if dtype == "float32":
        return Blocks(16 if wide > 64 else 32, 32, 4, 1)
    return Blocks(64, 128, 8, 2) if wide <= 128 else Blocks(32, 64, 8, 1)


def queries_blocks(dtype: str, padded: int, padded_width: int, queries: int) -> Blocks:
    """For the gradients of queries."""
    wide = max(padded, padded_width)
    if dtype == "float32":
        return smaller(Blocks(32, 16 if wide > 64 else 32, 4, 1), queries)
    return smaller(Blocks(128, 64, 8, 2) if wide <= 128 else Blocks(64, 32, 8, 1), queries)


def decode_blocks(dtype: str, padded: int, padded_width: int, rows: int) -> Blocks:
    """For few queries over split keys."""
    down = 16
    while down < rows:
        down *= 2
    if dtype == "float32":
        return Blocks(down, 32, 4, 1)
    return Blocks(down, 64, 4, 3 if max(padded, padded_width) <= 128 else 2)
