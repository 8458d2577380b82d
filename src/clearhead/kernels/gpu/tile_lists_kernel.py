"""Which tiles of a mask are empty, mixed or full, found on the device by looking at every pair once."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from clearhead.kernels.gpu.device import allowed_by_program


class Only(NamedTuple):
    """A form with nothing but a mask."""

    program: tuple[tuple[int, ...], ...]


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
