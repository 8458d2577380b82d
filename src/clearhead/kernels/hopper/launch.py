"""Running Hopper's own kernels: forward, then what is wanted; and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from clearhead.core.arrays import Array
from clearhead.core.formula import Gradients
from clearhead.core.observations import Want
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Ran
from clearhead.kernels.gpu import run as shared_run
from clearhead.kernels.gpu.call import Call, Forward
from clearhead.kernels.gpu.masks import FAR
from clearhead.kernels.gpu.repair import lists_to_repair_by, repaired, room_to_tell
from clearhead.kernels.gpu.run import Looked, narrowed
from clearhead.kernels.gpu.second_look import look_again
from clearhead.kernels.hopper import backward, forward, schedule, second_look, tile_runs
from clearhead.kernels.hopper.accepts import ranges_of
from clearhead.kernels.hopper.mend import mended

MOST = 2**28  # numbers of a map that is not yet pooled, at most
MOST_TOP = 16
LOOKED = frozenset({"received", "map", "top"})  # what the second look of these kernels gives


class Seen(NamedTuple):
    """Query i sees no key after i + causal_offset, none before i + causal_offset − window, none from `keys` on.

    Or, where that does not say it, the keys in `ranges`, one for each query, or those in the tiles of `runs`.
    """

    keys: int
    causal_offset: int | None
    window: int | None
    ranges: Any = None
    runs: Any = None

    @property
    def listed(self) -> bool:
        """True where a place does not say which keys its query sees."""
        return self.ranges is not None or self.runs is not None


def run(problem: Problem) -> Ran:
    """Output and log-sum-exp, and what is wanted."""
    return shared_run.run("hopper", problem, forward_and_look)


def gradients(
    problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
) -> Gradients:
    """dq, dk and dv, in one pass over all pairs."""
    return shared_run.gradients("hopper", problem, one_pass, dout, output, peak, total, dlse)


def forward_and_look(call: Call) -> Looked:
    """Attention, by the kernel for it; then rows that are not finite, and what is wanted of the weights."""
    problem, want = call.problem, call.problem.want
    seen = call.once(("seen", want is not None), lambda: seen_by(call))
    # which the second look of these kernels takes
    plain = problem.bias is None and (seen.ranges is None or call.form.program is not None)
    again = plain and want is not None and not LOOKED.isdisjoint(want.names)
    sought = sought_by(call, want, seen) if again and want is not None else None
    # what all of it goes by, before any of it is launched, which copies would wait for
    masked = looked_at(call, seen.ranges) if sought is not None and seen.listed else None
    if seen.runs is not None:
        lists_to_repair_by(call)
    done = attended(call, seen, few_top(want) if plain else 0, again)
    rows = (done.output, done.lse, done.peak, done.total, done.largest, done.entropy, done.unrounded)
    found = Forward._make([*(None if array is None else batched(call, array) for array in rows), None])
    mending = None  # rows that are not finite, together with what else is seldom left to do
    if done.odd is not None and again and may_wait(call, found, want):
        told = room_to_tell(call)
        mending, found = partial(mended, call, found, done.odd, told), found._replace(told=told)
    elif done.odd is not None:
        found = repaired(call, found, done.odd)
    found = narrowed(call, found)
    more = {} if sought is None else looked(call, sought, seen, done, masked, mending)
    if mending is not None and done.odd is not None and "top" not in more:
        found = repaired(call, found, done.odd)
    outputs = (found.output if found.unrounded is None else found.unrounded, found.output)
    return Looked(found, look_again(call, want, found.peak, found.total, more, ratio_of(call), outputs))


def may_wait(call: Call, found: Forward, want: Want | None) -> bool:
    """May rows that are not finite be mended last? Not where outputs are read before, by who narrows or removes."""
    return (
        few_top(want) > 0 and found.output.shape[-1] == call.problem.width and "removal" not in (want or Want()).names
    )


def ratio_of(call: Call) -> float:
    """What scores are multiplied with before they are exponents of 2, by what makes them peaks, both as rounded."""
    factor = float(np.float32(call.scoring.factor))
    return factor / float(np.float32(call.scoring.scale)) if call.form.raw else factor


def seen_by(call: Call) -> Seen:
    """The mask in the terms of these kernels."""
    span, keys = call.mask.span, call.grid.keys
    if call.form.program is not None or call.form.span_by_row or (span.low > -FAR and span.high >= FAR):
        head_dim, known = call.q.shape[-1], call.mask.lists
        runs, ranges = ("runs", head_dim), ("ranges", head_dim, call.problem.want is not None)
        if runs not in known and ranges not in known:
            found = ranges_of(call.problem)
            if found is None:
                known[runs] = tile_runs.forward_runs(call.mask, call.problem.lowered, call.grid, head_dim, call.rows)
            else:
                starts, stops = found
                few = schedule.OBSERVED if call.problem.want is not None else schedule.LISTED
                known[ranges] = schedule.key_ranges_of(starts, stops, keys, head_dim, call.device, few=few)
        if runs in known:
            return Seen(keys, None, None, runs=known[runs])
        return Seen(keys, None, None, known[ranges])
    upper = None if span.high >= FAR else span.high
    return Seen(span.limit, upper, None if upper is None or span.low <= -FAR else upper - span.low)


def attended(call: Call, seen: Seen, top: int, looked: bool) -> forward.Done:
    """What the forward kernel gives; `looked`: a second look of these kernels follows."""
    problem, k, v = call.problem, call.k, call.v
    if seen.keys < call.grid.keys:
        k, v = k[:, :, : seen.keys], v[:, :, : seen.keys]
    alibi = None if problem.bias is None else forward.AlibiSlopes(call.scoring.bias, call.scoring.bias_offset)
    return forward.forward(
        call.q, k, v, problem.scale,
        causal_offset=seen.causal_offset, window=seen.window, softcap=problem.softcap,
        entropy=problem.want is not None, top=top, alibi=alibi, ranges=seen.ranges, runs=seen.runs,
        launch=call.launch,
        unrounded=problem.keeps_unrounded,
        marked=problem.mask is not None and (call.form.program is None or seen.runs is not None),
        looked=looked,
        as_queries=not (problem.differentiated or problem.keeps_unrounded),
    )  # fmt: skip


def batched(call: Call, array: torch.Tensor) -> torch.Tensor:
    """(batch, heads, …) as (*batch, heads, …)."""
    return array if len(call.grid.batch) == 1 else array.view(*call.grid.batch, *array.shape[1:])


def few_top(want: Want | None) -> int:
    """How many of the largest weights these kernels are asked for."""
    return want.top if want is not None and want.top is not None and want.top <= MOST_TOP else 0


class Sought(NamedTuple):
    """What these kernels find of what is wanted, as `second_look.look` takes it."""

    received: int | None
    map: tuple[int, int] | None
    top: int


def sought_by(call: Call, want: Want, seen: Seen) -> Sought | None:
    """That; None where it is nothing: the rest is left to the second look that all GPU kernels share."""
    if seen.keys != call.grid.keys:
        return None
    if want.map is not None and call.rows * min(want.map[0], call.grid.queries) * call.grid.keys > MOST:
        return None
    received = want.received if isinstance(want.received, int) else None  # with weights, by the shared one
    found = Sought(received, None if seen.listed else want.map, few_top(want))  # tiles of a list are of one bin
    return None if found == Sought(None, None, 0) else found


def looked(
    call: Call, sought: Sought, seen: Seen, done: forward.Done, masked: second_look.Masked | None, mending: Any
) -> dict[str, Any]:
    """What was sought, by its name."""
    found = second_look.look(
        call.q, call.k, done, call.problem.scale, seen.causal_offset, seen.window, call.problem.softcap,
        received=sought.received, map=sought.map, top=sought.top, masked=masked, launch=call.launch,
        searching=mending,
    )  # fmt: skip
    named: dict[str, Any] = {}
    if found.received is not None:
        named["received"] = batched(call, found.received)
    for name, several in (("map", found.map), ("top", found.top)):
        if several is not None:
            named[name] = type(several)(*(batched(call, a) for a in several))
    return named


def looked_at(call: Call, ranges: schedule.KeyRanges | None) -> second_look.Masked:
    """The mask as the second look goes by it."""
    head_dim = call.q.shape[-1]
    name = ("looked at", head_dim)
    if name not in call.mask.lists:
        config = second_look.LISTED[head_dim]
        call.mask.lists[name] = tile_runs.backward_runs(
            call.mask, call.problem.lowered, call.grid, config.rows * config.consumers, config.columns, call.rows,
            shared=True,
        )  # fmt: skip
    assert call.mask.program is not None
    return second_look.Masked(call.mask.lists[name], call.mask.program, call.mask.arrays, ranges)


def turned_runs(call: Call) -> tuple[tile_runs.TileRuns, torch.Tensor | None]:
    """For each block of keys the tiles of queries; and the queries that see nothing."""
    head_dim = call.q.shape[-1]
    name = ("turned", head_dim)
    if name not in call.mask.lists:
        columns, rows = backward.CONFIGS[head_dim].columns, call.q.shape[0] * call.k.shape[1]
        turned = tile_runs.backward_runs(call.mask, call.problem.lowered, call.grid, backward.KEYS, columns, rows)
        call.mask.lists[name] = (turned, blind(call))
    found: tuple[tile_runs.TileRuns, torch.Tensor | None] = call.mask.lists[name]
    return found


def blind(call: Call) -> torch.Tensor | None:
    """True for queries that see nothing, as the forward has found them: (1 or batch, 1 or heads, queries, 1)."""
    head_dim, known = call.q.shape[-1], call.mask.lists
    for observed in (False, True):
        if ("ranges", head_dim, observed) in known:
            ranges: schedule.KeyRanges = known["ranges", head_dim, observed]
            return ranges.blind
    runs: tile_runs.TileRuns | None = known.get(("runs", head_dim))
    if runs is None:  # the forward went by another kernel
        runs = tile_runs.forward_runs(call.mask, call.problem.lowered, call.grid, head_dim, call.rows)
    return runs.unseen


def one_pass(call: Call, dout: Any, output: Any, peak: Any, total: Any, dlse: Any) -> tuple[Any, Any, Any, None]:
    """dq, dk and dv; and no gradient of sinks, which these kernels do not have."""
    problem, span, runs, blind = call.problem, call.mask.span, None, None
    if call.form.program is not None:
        runs, blind = call.once("turned", lambda: turned_runs(call))
    if output.shape[-1] != call.v.shape[-1]:  # values were given zeros as features, and so is what came of them
        output = torch.nn.functional.pad(output, (0, call.v.shape[-1] - output.shape[-1]))
    dq, dk, dv = backward.gradients(
        call.q, call.k, call.v, dout, output, peak, total, problem.scale,
        None if span.high >= FAR else span.high, None if span.low <= -FAR else span.low, problem.softcap, span.limit,
        dlse=dlse, runs=runs, blind=blind, launch=call.launch,
    )  # fmt: skip
    return dq, dk, dv, None
