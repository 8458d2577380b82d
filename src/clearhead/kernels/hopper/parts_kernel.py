"""Adding up what several programs of Hopper's second look found for one block of keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from clearhead.kernels.hopper.jobs import head_and_row
from clearhead.kernels.hopper.pipeline import await_others, others_may_begin


@gluon.jit(do_not_specialize=["keys", "heads", "side"], do_not_specialize_on_alignment=["received", "parts", "added"])
def add_parts(received, parts, added, keys, heads, side, ROWS: gl.constexpr):
    """What several programs found for one block of keys of one head, added up in the order of their tiles."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    entry = added + 8 * (gl.program_id(0) // side)
    which = gl.program_id(0) % side
    head, batch = head_and_row(entry, which, heads)
    row = gl.arange(0, ROWS, layout)
    key = gl.load(entry) + row
    await_others()
    others_may_begin()
    place = received + (batch * heads + head).to(gl.int64) * keys + key
    total = gl.load(place, key < keys, 0.0)
    first = gl.load(entry + 3)
    for part in range(first, first + gl.load(entry + 4)):
        at = (part.to(gl.int64) * side + which) * ROWS + row  # type: ignore[attr-defined]  # a number of the GPU
        total += gl.load(parts + at)
    gl.store(place, total, key < keys)
