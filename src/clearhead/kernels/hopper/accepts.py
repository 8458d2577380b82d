"""Problems that Hopper's own kernels take (`forward.py`, `look.py`, `gradients.py`), put to them in their words."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch

from clearhead.core.observations import Want
from clearhead.kernels.gpu import tuning
from clearhead.kernels.gpu.call import Call, machine
from clearhead.kernels.gpu.device import ALIBI
from clearhead.kernels.gpu.key_ranges import runs
from clearhead.kernels.gpu.masks import FAR
from clearhead.kernels.gpu.tuning import cdiv
from clearhead.kernels.triton.forward_kernel import finish_rows

MOST = 2**28  # numbers of a map that is not yet pooled, at most
MOST_TOP = 16


class Terms(NamedTuple):
    """Query i sees no key after i + causal_offset, none before i + causal_offset − window, none from `keys` on.

    Or, where that does not say it, the run of keys in `spans`.
    """

    keys: int
    causal_offset: int | None
    window: int | None
    spans: Any = None
    alibi: Any = None


def terms(call: Call) -> Terms | None:
    """A problem in the terms of those kernels; None where they do not take it."""
    return call.once("terms", lambda: _terms(call)) if tuning.GLUON else None


def _terms(call: Call) -> Terms | None:
    problem, form, span = call.problem, call.form, call.mask.span
    if call.device.type != "cuda" or machine(call.device)[0][0] != 9 or not available():
        return None
    if problem.dropout is not None or call.sinks is not None:
        return None
    if problem.bias is not None and (form.bias != ALIBI.value or (not form.raw and problem.softcap is None)):
        return None
    from clearhead.kernels.hopper import forward as kernel

    if kernel.refuses(call.q, call.k, call.v, problem.scale) is not None:
        return None
    alibi = None if problem.bias is None else kernel.Alibi(call.scoring.bias, call.scoring.bias_offset)
    if form.program is not None or form.span_by_row or (span.low > -FAR and span.high >= FAR):
        spans = spans_of(call)
        return None if spans is None else Terms(call.grid.keys, None, None, spans, alibi)
    upper = None if span.high >= FAR else span.high
    window = None if upper is None or span.low <= -FAR else upper - span.low
    return Terms(span.limit, upper, window, None, alibi)


def spans_of(call: Call) -> Any:
    """The run of keys that each query sees, on the device, kept with the mask; None where keys are not in one run."""
    from clearhead.kernels.hopper import schedule as cuts

    width = call.q.shape[-1]
    if ("runs", width) not in call.mask.lists:
        found = runs(call.problem.mask, call.grid)
        kept = None if found is None else cuts.spans_of(*found, call.grid.keys, width, call.device)
        call.mask.lists["runs", width] = kept
    return call.mask.lists["runs", width]


@cache
def available() -> bool:
    """True where this Triton has what the kernels are written in."""
    try:
        from clearhead.kernels.hopper import second_look as look
    except ImportError:
        return False
    return look is not None


def forward(call: Call, given: Terms, entropy: bool) -> tuple[tuple[Any, ...], Any]:
    """(output, lse, peak, total, largest score, entropy, unrounded output), as `launch.forward` gives them.

    And which rows of the output are not finite, where that may be by a value that they do not see; else None.
    """
    from clearhead.kernels.hopper import forward as kernel

    looked = given.spans is None and given.alibi is None  # again, by those kernels
    k, v = call.k, call.v
    if given.keys < call.grid.keys:
        k, v = k[:, :, : given.keys], v[:, :, : given.keys]
    done = kernel.forward(
        call.q, k, v, call.problem.scale,
        causal_offset=given.causal_offset, window=given.window, softcap=call.problem.softcap, entropy=entropy,
        top=few_top(call.problem.want) if looked else 0, alibi=given.alibi, spans=given.spans, launch=call.launch,
        unrounded=call.problem.keeps_unrounded,
        marked=call.problem.mask is not None and call.form.program is None,
    )  # fmt: skip
    call.done = done if looked else None
    new = partial(call.launch.room, done.peak.shape, torch.float32, call.device)
    lse = new()
    largest, spread = (new() if entropy else None for _ in range(2))
    call.launch(
        ("finish", entropy), finish_rows, (cdiv(lse.numel(), 1024),),
        done.peak, done.total, done.weighted, lse, largest, spread, lse.numel(), ENTROPY=entropy, N=1024,
    )  # fmt: skip
    found: tuple[Any, ...] = (done.output, lse, done.peak, done.total, largest, spread, done.unrounded)
    if len(call.grid.batch) != 1:
        found = tuple(None if a is None else batched(call, a) for a in found)
    return found, done.odd


def batched(call: Call, array: torch.Tensor) -> torch.Tensor:
    """(batch, heads, …) as (*batch, heads, …)."""
    return array if len(call.grid.batch) == 1 else array.view(*call.grid.batch, *array.shape[1:])


def few_top(want: Want | None) -> int:
    """How many of the largest weights those kernels are asked for."""
    return want.top if want is not None and want.top is not None and want.top <= MOST_TOP else 0


def gradients(call: Call, dout: Any, output: Any, peak: Any, total: Any, dlse: Any) -> tuple[Any, Any, Any] | None:
    """dq, dk and dv by Hopper's own kernel; None where it does not take the problem.

    It adds up dq in no fixed order, so it is left out where PyTorch is told to be deterministic.
    """
    problem, form, span = call.problem, call.form, call.mask.span
    if not tuning.GLUON or call.device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return None
    if form.program is not None or form.span_by_row or problem.bias is not None or problem.dropout is not None:
        return None
    if call.sinks is not None or not available():
        return None
    from clearhead.kernels.hopper import backward as kernel

    if kernel.refuses(call.q, call.v) is not None:
        return None
    if output.shape[-1] != call.v.shape[-1]:  # values were given zeros as features, and so is what came of them
        output = torch.nn.functional.pad(output, (0, call.v.shape[-1] - output.shape[-1]))
    return kernel.gradients(
        call.q, call.k, call.v, dout, output, peak, total, problem.scale,
        None if span.high >= FAR else span.high, None if span.low <= -FAR else span.low, problem.softcap, span.limit,
        dlse=dlse, launch=call.launch,
    )  # fmt: skip


def look_again(call: Call, want: Want) -> dict[str, Any]:
    """What those kernels find of what is wanted, after their own forward; the rest is left to `look.py`."""
    if call.done is None:
        return {}
    given = terms(call)
    if given is None or given.keys != call.grid.keys or not call.grid.keys:
        return {}
    if want.map is not None and call.rows * min(want.map[0], call.grid.queries) * call.grid.keys > MOST:
        return {}
    top = few_top(want)
    if want.received is None and want.map is None and not top:
        return {}
    from clearhead.kernels.hopper import second_look as look

    seen = look.look(
        call.q, call.k, call.done, call.problem.scale, given.causal_offset, given.window, call.problem.softcap,
        received=want.received, map=want.map, top=top, launch=call.launch,
    )  # fmt: skip
    found: dict[str, Any] = {}
    if seen.received is not None:
        found["received"] = batched(call, seen.received)
    for name, several in (("map", seen.map), ("top", seen.top)):
        if several is not None:
            found[name] = type(several)(*(batched(call, a) for a in several))
    return found
