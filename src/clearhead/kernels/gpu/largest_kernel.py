"""The largest numbers of three tensors, in one launch: blocks of rows each, which the host makes one of when it reads.

Signs are left out. What is compared are the bits of a float32 as a whole number, which have the order of the numbers:
infinities come above all that is finite, and NaN above them, so that none is lost.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def block_of(array, found, strides, sizes, block, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The largest number in a block of rows of (batch, heads, positions, features)."""
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    position = row % sizes[2]
    head = (row // sizes[2]) % sizes[1]
    batch = row // (sizes[2] * sizes[1])
    first = batch * strides[0] + head * strides[1] + position * strides[2]
    there = (batch < sizes[0])[:, None] & (column < sizes[3])[None, :]
    numbers = tl.load(array + first[:, None] + (column * strides[3])[None, :], mask=there, other=0.0)
    bits = numbers.to(tl.float32).to(tl.int32, bitcast=True) & MAGNITUDE
    tl.store(found, tl.max(tl.max(bits, 1), 0))


@triton.jit
def largest(
    q, k, v, found, q_strides, k_strides, v_strides, q_sizes, k_sizes, v_sizes, of_q, of_k,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Programs 0 to of_q are those of q, the next of_k those of k, and the rest those of v."""
    program = tl.program_id(0)
    place = found + program
    if program < of_q:
        block_of(q, place, q_strides, q_sizes, program, ROWS, WIDTH)
    elif program < of_q + of_k:
        block_of(k, place, k_strides, k_sizes, program - of_q, ROWS, WIDTH)
    else:
        block_of(v, place, v_strides, v_sizes, program - of_q - of_k, ROWS, WIDTH)
