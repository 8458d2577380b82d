"""What tiles of a mask hold, found on the device: whether one is empty, mixed or full; the pairs of a mixed one."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from clearhead.kernels.gpu.device import allowed_by_program


class Only(NamedTuple):
    """A form with nothing but a mask."""

    program: tuple[tuple[int, ...], ...] | None


@triton.jit(do_not_specialize=["mask"])
def tile_states(states, mask, T, S, heads, PROGRAM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """0 for a tile in which nobody may attend, 2 where everybody may, 1 otherwise."""
    across, down, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    form: tl.constexpr = Only(PROGRAM)
    rows = (down * BM + tl.arange(0, BM))[:, None]
    columns = (across * BN + tl.arange(0, BN))[None, :]
    allowed = allowed_by_program(mask, rows, columns, number % heads, number // heads, T, S, form)
    some = tl.max(tl.max(allowed.to(tl.int32), 1), 0)
    every = tl.min(tl.min((allowed | (rows >= T)).to(tl.int32), 1), 0)
    place = (number.to(tl.int64) * tl.num_programs(1) + down) * tl.num_programs(0) + across
    tl.store(states + place, (some + every).to(tl.uint8))


@triton.jit(do_not_specialize=["mask", "T", "S", "blocks", "heads"])
def tile_bits(
    bits, entries, mask, T, S, blocks, heads,
    PROGRAM: tl.constexpr, TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of one mixed tile which pairs are allowed, 64 rows of it: a word for every fourth pair of columns of a row.

    That is how threads hold a tile of products on NVIDIA's matrix units: columns 2 n and 2 n + 1 of every eight, for
    one n. Bit 2 g + c of word n is column 8 g + 2 n + c. `TURNED`: rows are keys.
    """
    number = tl.program_id(0)
    row, tile = tl.load(entries + 2 * number), tl.load(entries + 2 * number + 1)
    block, head = row % blocks, row // blocks % heads
    batch = row // blocks // heads
    form: tl.constexpr = Only(PROGRAM)
    line = tl.program_id(1) * 64 + tl.arange(0, 64)
    down = (block * BM + line)[:, None]
    column = tl.arange(0, BN)
    across = (tile * BN + column)[None, :]
    if TURNED:
        allowed = allowed_by_program(mask, across, down, head, batch, T, S, form)
    else:
        allowed = allowed_by_program(mask, down, across, head, batch, T, S, form)
    found = allowed.to(tl.int32) << (column // 8 * 2 + column % 2)[None, :]
    words = tl.sum(tl.sum(tl.reshape(found, (64, BN // 8, 4, 2)), 3), 1)
    place = ((number + 2).to(tl.int64) * BM + line)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(bits + place, words)
