"""How large the blocks of each kernel are, and how many warps and stages it has: a table, and what was measured here.

The table is for Hopper and for Ampere; `bench/tune_gpu.py` measures the machine it runs on, in a bounded time, and
leaves its findings in a file that is read from then on. No call ever measures anything, so the first is not slow.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Blocks(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of its pipeline."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


# (kernel, "half" or "float", features up to) → blocks; a kernel that is not named for a width uses the next above it
HOPPER: dict[tuple[str, str, int], Blocks] = {
    ("forward", "half", 64): Blocks(128, 128, 8, 3),
    ("forward", "half", 128): Blocks(128, 128, 8, 3),
    ("forward", "half", 256): Blocks(128, 64, 8, 2),
    ("forward", "float", 64): Blocks(64, 32, 4, 2),
    ("forward", "float", 128): Blocks(32, 32, 4, 2),
    ("forward", "float", 256): Blocks(32, 32, 8, 1),
    ("listed", "half", 64): Blocks(128, 64, 4, 3),
    ("listed", "half", 128): Blocks(128, 64, 4, 2),
    ("listed", "half", 256): Blocks(128, 64, 8, 2),
    ("listed", "float", 64): Blocks(64, 32, 4, 2),
    ("listed", "float", 128): Blocks(32, 32, 4, 2),
    ("listed", "float", 256): Blocks(32, 32, 8, 1),
    ("repair", "half", 128): Blocks(64, 64, 4, 1),  # seldom has anything to do, and should compile quickly
    ("repair", "half", 256): Blocks(64, 32, 4, 1),
    ("repair", "float", 256): Blocks(32, 32, 4, 1),
    ("by_key", "half", 128): Blocks(64, 128, 8, 3),
    ("by_key", "half", 256): Blocks(64, 128, 8, 2),
    ("by_key", "float", 256): Blocks(32, 64, 4, 1),
    ("more_by_key", "half", 128): Blocks(64, 128, 8, 3),
    ("more_by_key", "half", 256): Blocks(64, 64, 8, 2),
    ("more_by_key", "float", 256): Blocks(32, 32, 4, 1),
    ("top", "half", 256): Blocks(64, 128, 4, 2),
    ("top", "float", 256): Blocks(32, 64, 4, 1),
    ("keys", "half", 128): Blocks(64, 64, 4, 2),
    ("keys", "half", 256): Blocks(32, 64, 8, 1),
    ("keys", "float", 64): Blocks(32, 32, 4, 1),
    ("keys", "float", 256): Blocks(16, 32, 4, 1),
    ("queries", "half", 64): Blocks(64, 32, 4, 3),
    ("queries", "half", 128): Blocks(128, 64, 8, 3),
    ("queries", "half", 256): Blocks(64, 32, 8, 1),
    ("queries", "float", 64): Blocks(32, 32, 4, 1),
    ("queries", "float", 256): Blocks(32, 16, 4, 1),
    ("decode", "half", 128): Blocks(16, 128, 4, 2),
    ("decode", "half", 256): Blocks(16, 64, 4, 2),
    ("decode", "float", 256): Blocks(16, 32, 4, 1),
}

# less shared memory, and no products of whole warp groups
AMPERE: dict[tuple[str, str, int], Blocks] = HOPPER | {
    ("forward", "half", 64): Blocks(128, 64, 4, 3),
    ("forward", "half", 128): Blocks(128, 32, 4, 3),
    ("forward", "half", 256): Blocks(64, 32, 4, 2),
    ("listed", "half", 64): Blocks(128, 64, 4, 3),
    ("listed", "half", 128): Blocks(128, 32, 4, 3),
    ("listed", "half", 256): Blocks(64, 32, 4, 2),
    ("by_key", "half", 128): Blocks(32, 64, 4, 2),
    ("by_key", "half", 256): Blocks(32, 64, 4, 1),
    ("more_by_key", "half", 128): Blocks(32, 64, 4, 1),
    ("more_by_key", "half", 256): Blocks(32, 32, 4, 1),
    ("top", "half", 256): Blocks(32, 64, 4, 1),
    ("keys", "half", 128): Blocks(32, 64, 4, 2),
    ("keys", "half", 256): Blocks(16, 64, 4, 1),
    ("queries", "half", 64): Blocks(64, 32, 4, 2),
    ("queries", "half", 128): Blocks(64, 32, 4, 2),
    ("queries", "half", 256): Blocks(32, 32, 4, 1),
}

WIDTHS = (64, 128, 256)

# what is set here wins over table and file: how tests ask for tiny tiles, and how blocks are tried
FIXED: dict[str, Blocks] = {}

# how often `remember` has written
written = 0

# queries that share keys, up to which they are one block and `triton` splits the keys
FEW = 64


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉. Triton's own takes 3 µs, and a call has ten."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The next power of two from n on."""
    return 1 << max(n - 1, 0).bit_length()


def blocks(kernel: str, key: tuple[str, int, int], size: int, capability: tuple[int, int], device: str) -> Blocks:
    """The blocks of a kernel for (dtype, padded features, padded features of a value), for at most `size` rows."""
    kind = "float" if key[0] == "float32" else "half"
    found = FIXED.get(kernel) or listed(kernel, kind, max(key[1:]), capability, device)
    if kernel == "decode":
        return found._replace(rows=max(16, 1 << max(size - 1, 0).bit_length()))
    rows = found.rows
    while rows > 16 and rows // 2 >= size:
        rows //= 2
    return found._replace(rows=rows, warps=4 if rows < 64 else found.warps)


def pooling(units: int, cells: int) -> tuple[int, int]:
    """How many cells of a map a program makes of strips of `units`, and how many units of each it reads at once."""
    at_once = min(128, power_of_2(cdiv(units, cells)))
    return min(power_of_2(cells), 2048 // at_once), at_once


@cache
def listed(kernel: str, kind: str, wide: int, capability: tuple[int, int], device: str) -> Blocks:
    """The blocks of the table, or those that were measured."""
    table = {**(HOPPER if capability >= (9, 0) else AMPERE), **measured(device)}
    return next(table[kernel, kind, w] for w in WIDTHS if w >= wide and (kernel, kind, w) in table)


def less(blocks: Blocks) -> Blocks | None:
    """The next blocks to try where a kernel needs more shared memory than there is; None where nothing is left."""
    if blocks.stages > 1:
        return blocks._replace(stages=blocks.stages - 1)
    if blocks.columns > 16:
        return blocks._replace(columns=blocks.columns // 2)
    return blocks._replace(rows=blocks.rows // 2) if blocks.rows > 16 else None


def file() -> Path:
    """Where `bench/tune_gpu.py` leaves what it measured."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "clearhead" / "gpu.json"


@cache
def measured(device: str) -> dict[tuple[str, str, int], Blocks]:
    """What was measured on a device of this name; nothing where there is no file, or none that can be read."""
    try:
        entries = json.loads(file().read_text())[device]
        return {(e["kernel"], e["kind"], e["width"]): Blocks(*e["blocks"]) for e in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def remember(device: str, found: dict[tuple[str, str, int], Blocks]) -> Path:
    """Write what was measured, beside what is there of other devices."""
    path = file()
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    known[device] = [
        {"kernel": kernel, "kind": kind, "width": width, "blocks": list(some)}
        for (kernel, kind, width), some in found.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1))
    measured.cache_clear()
    listed.cache_clear()
    global written
    written += 1
    return path
