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
