"""Problems that Hopper's own kernels take (`gluon.py` and its like), put to them in their words."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from clearhead.kernels.triton import tuning
from clearhead.kernels.triton.call import Call, machine
from clearhead.kernels.triton.forward import finish_rows
from clearhead.kernels.triton.spans import FAR
from clearhead.kernels.triton.tuning import cdiv
from clearhead.observe import Want

MOST = 2**28  # numbers of a map that is not yet pooled, at most
MOST_TOP = 16


class Terms(NamedTuple):
    """Query i sees no key after i + causal_offset, none before i + causal_offset − window, none from `keys` on."""

    keys: int
    causal_offset: int | None
    window: int | None


def terms(call: Call) -> Terms | None:
    """A problem in the terms of those kernels; None where they do not take it."""
    problem, form, span = call.problem, call.form, call.mask.span
    if not tuning.GLUON or call.device.type != "cuda" or machine(call.device)[0][0] != 9 or not available():
        return None
    if form.program is not None or form.span_by_row or problem.bias is not None or problem.dropout is not None:
        return None
    if call.sinks is not None or (span.low > -FAR and span.high >= FAR):
        return None
    from clearhead.kernels import gluon

    if gluon.refuses(call.q, call.k, call.v, problem.scale) is not None:
        return None
    upper = None if span.high >= FAR else span.high
    return Terms(span.limit, upper, None if upper is None or span.low <= -FAR else upper - span.low)


@cache
def available() -> bool:
    """True where this Triton has what the kernels are written in."""
    try:
        from clearhead.kernels import gluon_observe
    except ImportError:
        return False
    return gluon_observe is not None


def forward(call: Call, given: Terms, entropy: bool) -> tuple[Any, ...]:
    """(output, lse, peak, total, largest score, entropy), as `launch.forward` gives them."""
    from clearhead.kernels import gluon

    want = call.problem.want
    call.done = done = gluon.forward(
        call.q, call.k[:, :, : given.keys], call.v[:, :, : given.keys], call.problem.scale,
        causal_offset=given.causal_offset, window=given.window, softcap=call.problem.softcap, entropy=entropy,
        top=few_top(want),
    )  # fmt: skip
    queries = call.grid.queries
    peak, total = (a.reshape(call.rows, queries) for a in (done.peak, done.total))
    lse = call.empty(queries)
    spread = call.empty(queries) if entropy else None
    finish_rows[(cdiv(lse.numel(), 1024),)](
        peak, total, done.weighted, lse, spread, lse.numel(), ENTROPY=entropy, N=1024
    )
    output = done.output.reshape(call.rows, queries, call.form.width)
    return output, lse, peak, total, peak.clone() if entropy else None, spread


def few_top(want: Want | None) -> int:
    """How many of the largest weights those kernels are asked for."""
    return want.top if want is not None and want.top is not None and want.top <= MOST_TOP else 0


def gradients(call: Call, dout: Any, output: Any, peak: Any, total: Any) -> tuple[Any, Any, Any] | None:
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
    from clearhead.kernels import gluon_backward

    if gluon_backward.refuses(call.q, call.v) is not None:
        return None
    return gluon_backward.gradients(
        call.q, call.k, call.v, dout, output, peak, total, problem.scale,
        None if span.high >= FAR else span.high, None if span.low <= -FAR else span.low, problem.softcap, span.limit,
    )  # fmt: skip


def look_again(call: Call, want: Want) -> dict[str, Any]:
    """What those kernels find of what is wanted, after their own forward; the rest is left to `look.py`."""
    given = terms(call)
    if call.done is None or given is None or given.keys != call.grid.keys or not call.grid.keys:
        return {}
    if want.map is not None and call.rows * min(want.map[0], call.grid.queries) * call.grid.keys > MOST:
        return {}
    top = few_top(want)
    if want.received is None and want.map is None and not top:
        return {}
    from clearhead.kernels import gluon_observe

    seen = gluon_observe.look(
        call.q, call.k, call.done, call.problem.scale, given.causal_offset, given.window, call.problem.softcap,
        received=want.received, map=want.map, top=top,
    )  # fmt: skip
    found: dict[str, Any] = {}
    if seen.received is not None:
        found["received"] = seen.received.reshape(*call.grid.batch, *seen.received.shape[1:])
    for name, several in (("map", seen.map), ("top", seen.top)):
        if several is not None:
            found[name] = type(several)(*(a.reshape(*call.grid.batch, *a.shape[1:]) for a in several))
    return found
