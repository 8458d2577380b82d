"""What is wanted of the weights, asked of the kernels in `observe_kernel.py`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from clearhead.core.asking import QueryWeights
from clearhead.core.grid import blocks
from clearhead.core.observations import Map, Rows, Top, Want
from clearhead.kernels.collect import Gathered, Sizes
from clearhead.kernels.gpu import masks as spans
from clearhead.kernels.gpu.call import Call
from clearhead.kernels.gpu.device import Lists
from clearhead.kernels.gpu.keys_kernel import lengths_of_outputs, more_by_key
from clearhead.kernels.gpu.launcher import Launcher
from clearhead.kernels.gpu.observe_kernel import by_key, pool, relative_rows, rows_of_weights, top_keys
from clearhead.kernels.gpu.tuning import Blocks, cdiv, pooling, power_of_2

LAUNCHED = frozenset(
    {"top", "received", "received_max", "removal", "map"}
)  # which kernels give with no help by PyTorch
STRIPS = 2**26  # numbers of a map that is not yet pooled, at most, held at once
ROWS_AT_ONCE = 1024  # whose denominators one program tells
MOST_TOP = 64  # above this the largest are found by PyTorch in rows of weights


def launched(want: Want | None) -> bool:
    """True where kernels give all that is wanted, and it is of a kind: weights of queries are numbers of one call."""
    return want is None or (LAUNCHED.issuperset(want.names) and not isinstance(want.received, QueryWeights))


def denominators(
    launch: Launcher, peak: torch.Tensor, total: torch.Tensor, ratio: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(shift, inverse): a weight is 2^(score · factor − shift) · inverse, and finite where there is none.

    `ratio` is that of the factor, as rounded, to the scale, where totals are relative to peaks exactly: the product and
    the shift have to cancel, however large both are. Where it is None they are relative to peaks as shifted here.
    """
    shift, inverse = (launch.room(tuple(peak.shape), torch.float32, peak.device) for _ in range(2))
    exact = 1.0 if ratio is None else ratio
    most = float(np.float32(exact))  # kernels take numbers of 32 bits: the rest goes by itself
    if peak.numel():
        launch(
            ("denominators", ratio is None), relative_rows, (cdiv(peak.numel(), ROWS_AT_ONCE),),
            peak.contiguous(), total.contiguous(), shift, inverse, peak.numel(), most, exact - most,
            EXACT=ratio is not None, N=ROWS_AT_ONCE,
        )  # fmt: skip
    return shift, inverse


def look_again(
    call: Call,
    want: Want | None,
    peak: torch.Tensor,
    total: torch.Tensor,
    found: dict[str, Any] | None = None,
    ratio: float | None = None,
    outputs: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """The fields of `Observed` that are wanted; `found` are those that a kernel has found by itself.

    `ratio` is what `denominators` takes, `outputs` the output in the precision of its sums, and as it is rounded.
    """
    found = {} if found is None else found
    if want is None or all(name in found for name in want.names):
        return found
    shift, inverse = denominators(call.launch, peak, total, ratio)
    received: Any = want.received
    if isinstance(received, QueryWeights):
        # a weight times what its query counts for is all that there is to it
        counts = received.over(
            call.problem.library, torch.float32, (*call.grid.batch, call.grid.heads, call.grid.queries)
        )
        emphasised = torch.where(counts == 0, 0.0, inverse * counts).contiguous()
        bare = torch.where(counts == 0, 0.0, shift)  # who does not count spoils nothing
        found |= received_and_map(call, None, call.grid.queries, bare, emphasised)
        received = None
    if (received is not None and "received" not in found) or (want.map is not None and "map" not in found):
        found |= received_and_map(call, want.map, None if "received" in found else received, shift, inverse)
    if want.received_max is not None or want.removal is not None:
        found |= more(call, want, shift, inverse, outputs)
    if want.top is not None and "top" not in found:
        found["top"] = top(call, want.top, shift, inverse)
    if want.weights:
        everything = np.arange(call.grid.queries)
        found["weights"] = call.shaped(rows(call, everything, shift, inverse))
    if want.queries is not None:
        chosen = np.asarray(want.queries, dtype=np.int64)
        found["queries"] = Rows(chosen, call.shaped(rows(call, chosen, shift, inverse)))
    rest = [name for name in want.names if name not in found]
    return found | gathered(call, want, rest, shift, inverse) if rest else found


def gathered(call: Call, want: Want, names: list[str], shift: torch.Tensor, inverse: torch.Tensor) -> dict[str, Any]:
    """What no kernel here gathers: rows of weights, some at a time, shown to the collectors in `kernels/collect.py`."""
    grid = call.grid
    lead = (*grid.batch, grid.heads)
    all_of_them = Gathered(want, Sizes(call.problem.library, torch.float32, lead, grid.queries, grid.keys), names)
    step = max(1, STRIPS // max(1, call.rows * grid.keys))
    for some in blocks(grid.queries, step) if grid.queries else [range(0)]:
        if some and grid.keys:
            weights = call.shaped(rows(call, np.asarray(some), shift, inverse))
            all_of_them.see(weights, some, range(grid.keys))
        all_of_them.end_rows(some)
    return all_of_them.results()


def more(
    call: Call,
    want: Want,
    shift: torch.Tensor,
    inverse: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor] | None,
) -> dict[str, Any]:
    """The largest weight that each key received, and what outputs would change by without it, in one pass by keys."""
    grid, nothing, width = call.grid, call.mask.span.rows, call.problem.width
    most = call.empty(grid.keys) if want.received_max is not None else None
    removal = call.empty(grid.keys) if want.removal is not None else None
    in_full = rounded = wholes = nothing
    if removal is not None and outputs is not None:
        in_full, rounded = (array.contiguous() for array in outputs)
        wholes = call.empty(grid.queries)
    padded = max(16, power_of_2(width))
    first = [grid.queries - (asked or 0) for asked in (want.received_max, want.removal)]

    def launch(blocks: Blocks) -> None:
        states, listed = observed_states(call, blocks)
        sharp = nothing
        if removal is not None:
            down = cdiv(grid.queries, blocks.rows)
            sharp = call.empty(down, dtype=torch.int32)
            call.launch(
                ("lengths_of_outputs", blocks.rows), lengths_of_outputs, (down * call.rows,),
                rounded, inverse, wholes, sharp, grid.queries, W=width, PADDED_W=padded, BM=blocks.rows,
            )  # fmt: skip
        call.launch(
            ("more_by_key", blocks, most is None, removal is None, *first), more_by_key,
            (cdiv(grid.keys, blocks.columns) * call.rows,),
            call.q, call.k, call.v, in_full, rounded, wholes, sharp, shift, inverse, most, removal,
            call.q.stride(), call.k.stride(), call.v.stride(),
            call.mask.span, states, call.mask.arrays, call.scoring, grid.queries, grid.keys, *first,
            MOST=most is not None, REMOVAL=removal is not None, LISTED=listed, W=width,
            PADDED_W=padded, BM=blocks.rows, BN=blocks.columns, form=call.form,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

    if call.rows and grid.keys and grid.queries:
        call.fitted("more_by_key", grid.queries, launch)
    else:
        for array in (most, removal):
            if array is not None:
                array.zero_()
    named = {"received_max": most, "removal": removal}
    return {name: call.shaped(array) for name, array in named.items() if array is not None}


def received_and_map(
    call: Call, map: tuple[int, int] | None, last: int | None, shift: torch.Tensor, inverse: torch.Tensor
) -> dict[str, Any]:
    """What each key received of the last queries, if any, and the pooled map, if wanted, in one pass by keys."""
    grid = call.grid
    bins, cells = (min(map[0], grid.queries), min(map[1], grid.keys)) if map else (1, 1)
    received = call.empty(grid.keys) if last is not None else None
    mean, most = (call.empty(bins, cells) if map else None for _ in range(2))
    counted = grid.queries - (last or 0)
    asked = 0 if received is None else 2 if counted and map else 1
    nothing = call.mask.span.rows
    zeros = partial(call.launch.zeros, dtype=torch.float32, device=call.device)

    def launch(blocks: Blocks) -> None:
        across = cdiv(grid.keys, blocks.columns)
        pooled = grid.keys % (cells * blocks.columns) == 0
        units = across if pooled else grid.keys
        at_once = max(1, STRIPS // (bins * units)) if map else call.rows
        each = cdiv(cdiv(grid.queries, bins), blocks.rows)
        states, listed = observed_states(call, blocks)
        for first in range(0, call.rows, at_once):
            some = min(at_once, call.rows - first)
            sums, tops = (zeros((some, bins, units)) if map else nothing for _ in range(2))
            call.launch(
                ("by_key", blocks, asked, map is not None, bins, cells, counted, first), by_key, (across * some,),
                call.q, call.k, shift, inverse, received, sums, tops, call.q.stride(), call.k.stride(),
                call.mask.span, states, call.mask.arrays, call.scoring, grid.queries, grid.keys, counted, bins, each,
                first, RECEIVED=asked, MAP=map is not None, POOLED=pooled, LISTED=listed,
                BM=blocks.rows, BN=blocks.columns, form=call.form, num_warps=blocks.warps, num_stages=blocks.stages,
            )  # fmt: skip
            if map:
                cells_at_once, units_at_once = pooling(units, cells)
                call.launch(
                    ("pool", units, bins, cells, first), pool, (some * bins, cdiv(cells, cells_at_once)),
                    sums, tops, mean, most, units, grid.queries, grid.keys, bins, cells, first,
                    EVEN=grid.queries % bins == 0 and grid.keys % cells == 0 and units % cells == 0,
                    CELLS=cells_at_once, BN=units_at_once,
                )  # fmt: skip

    if call.rows and grid.keys and grid.queries:
        call.fitted("by_key", -(-grid.queries // max(bins, 1)), launch)
    elif received is not None:
        received.zero_()
    found: dict[str, Any] = {}
    if received is not None:
        found["received"] = call.shaped(received)
    if mean is not None and most is not None:
        found["map"] = Map(call.shaped(mean), call.shaped(most))
    return found


def observed_states(call: Call, blocks: Blocks) -> tuple[Lists, int]:
    """Where the mask is no span: which tiles are empty or full, and how many queries each speaks of."""
    nothing = call.mask.span.rows
    if call.form.program is None:
        return Lists(nothing, nothing, 0, 0, 1, 1, 1), 0
    states = spans.state_map(call.mask, call.problem.lowered, call.grid, 128, blocks.columns)
    batch, heads, down, across = states.shape
    return Lists(states, nothing, int(batch > 1), int(heads > 1), heads, down, across), 128


def top(call: Call, count: int, shift: torch.Tensor, inverse: torch.Tensor) -> Top:
    """The largest weights of each query, in descending order."""
    grid = call.grid
    if count > MOST_TOP:
        return top_by_rows(call, count, shift, inverse)
    weights = call.empty(grid.queries, count)
    indices = call.empty(grid.queries, count, dtype=torch.int64)

    def launch(blocks: Blocks) -> None:
        call.launch(
            ("top", blocks, count), top_keys, (cdiv(grid.queries, blocks.rows) * call.rows,),
            call.q, call.k, shift, inverse, weights, indices, call.q.stride(), call.k.stride(), call.mask.span,
            call.lists(blocks), call.mask.arrays, call.scoring, grid.queries, grid.keys, count,
            K=max(2, power_of_2(count)), REVERSED=call.backwards,
            BM=blocks.rows, BN=blocks.columns, form=call.form, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

    if call.rows and grid.queries:
        call.fitted("top", grid.queries, launch)
    return Top(call.shaped(indices), call.shaped(weights))


def top_by_rows(call: Call, count: int, shift: torch.Tensor, inverse: torch.Tensor) -> Top:
    """The same for many: rows of weights, some at a time, and PyTorch's own selection."""
    grid = call.grid
    some = min(count, grid.keys)
    weights = torch.zeros((call.rows, grid.queries, count), device=call.device)
    indices = torch.full((call.rows, grid.queries, count), -1, device=call.device)
    step = max(1, STRIPS // max(1, call.rows * grid.keys))
    for first in range(0, grid.queries, step):
        chosen = np.arange(first, min(first + step, grid.queries))
        values, places = rows(call, chosen, shift, inverse).topk(some, dim=-1)
        values = torch.where(values.isnan().any(-1, keepdim=True), math.nan, values)  # which counts as the largest
        weights[:, chosen[0] : chosen[-1] + 1, :some] = values
        indices[:, chosen[0] : chosen[-1] + 1, :some] = torch.where(values > 0, places, -1)
    return Top(call.shaped(indices), call.shaped(weights))


def rows(call: Call, chosen: np.ndarray, shift: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """The exact weights of some queries, (batch · heads, len(chosen), keys)."""
    grid = call.grid
    weights = call.empty(len(chosen), grid.keys)
    blocks = Blocks(16 if len(chosen) <= 16 else 64, 64, 4, 1)
    programs = cdiv(len(chosen), blocks.rows) * cdiv(grid.keys, blocks.columns) * call.rows
    if programs:
        call.launch(
            ("rows", len(chosen)), rows_of_weights, (programs,),
            call.q, call.k, shift, inverse, spans.upload(chosen.astype(np.int32), call.device), weights,
            call.q.stride(), call.k.stride(), call.mask.span, call.mask.arrays, call.scoring,
            grid.queries, grid.keys, len(chosen),
            BM=blocks.rows, BN=blocks.columns, form=call.form, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return weights
