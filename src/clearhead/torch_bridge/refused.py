"""Derivatives that kernels do not give, in words."""

from __future__ import annotations

from typing import Any

from clearhead.core.errors import KernelRefused

NO_SECOND = "it gives no second derivatives; attention(…, kernel='dense') does"
NO_FORWARD = "it gives no forward-mode derivatives; attention(…, kernel='dense') does"
NO_SECOND_TRACED = "as an operator it gives no second derivatives; outside of torch.compile and dispatch modes it does"


def no_second(ctx: Any, *_: Any) -> tuple[Any, ...]:
    """What a second derivative is answered with."""
    raise KernelRefused(ctx.kernel or "clearhead::attention", NO_SECOND if ctx.kernel != "dense" else NO_SECOND_TRACED)
