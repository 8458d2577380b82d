"""PyTorch's fused attention, one back end at a time: forward with log-sum-exp, and gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from clearhead.core.arrays import Array


@cache
def aten(name: str) -> Any:
    """An operation of PyTorch's."""
    return getattr(sys.modules["torch"].ops.aten, f"_scaled_dot_product_{name}")


def cudnn(q: Array, k: Array, v: Array, causal: bool, scale: float, lse: bool = True) -> tuple[Array, Array]:
    """(output, log-sum-exp as it comes, or nothing in particular where it is not wanted)."""
    found = aten("cudnn_attention")(q, k, v, None, lse, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def flash(q: Array, k: Array, v: Array, causal: bool, scale: float, lse: bool = True) -> tuple[Array, Array]:
    """(output, log-sum-exp as it comes)."""
    found = aten("flash_attention")(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def efficient(q: Array, k: Array, v: Array, causal: bool, scale: float, lse: bool = True) -> tuple[Array, Array]:
    """(output, log-sum-exp as it comes)."""
    found = aten("efficient_attention")(q, k, v, None, lse, 0.0, causal, scale=scale)
    return found[0], found[1]


def one_a_query(lse: Array, q: Array) -> Array:
    """Log-sum-exps as back ends give them, (batch, heads, queries): some have an axis more, some are padded."""
    lse = lse[..., 0] if lse.ndim == 4 else lse
    return lse if lse.shape[-1] == q.shape[-2] else lse[..., : q.shape[-2]]


def cudnn_backward(
    dout: Array, q: Array, k: Array, v: Array, output: Array, lse: Array, causal: bool, scale: float
) -> tuple[Array, ...]:
    """(dq, dk, dv)."""
    seed = sys.modules["torch"].zeros((), dtype=sys.modules["torch"].int64, device=q.device)
    sizes = (None, None, q.shape[-2], k.shape[-2])
    found = aten("cudnn_attention_backward")(
        dout, q, k, v, output, lse[..., None], seed, seed, None, *sizes, 0.0, causal, scale=scale
    )
    return tuple(found)


def flash_backward(
    dout: Array, q: Array, k: Array, v: Array, output: Array, lse: Array, causal: bool, scale: float
) -> tuple[Array, ...]:
    """(dq, dk, dv)."""
    seed = sys.modules["torch"].zeros((), dtype=sys.modules["torch"].int64, device=q.device)
    sizes = (None, None, q.shape[-2], k.shape[-2])
    found = aten("flash_attention_backward")(dout, q, k, v, output, lse, *sizes, 0.0, causal, seed, seed, scale=scale)
    return tuple(found)


def efficient_backward(
    dout: Array, q: Array, k: Array, v: Array, output: Array, lse: Array, causal: bool, scale: float
) -> tuple[Array, ...]:
    """(dq, dk, dv). Its log-sum-exp is padded to whole blocks of 32.

    It reads output as (batch, positions, heads, features) in memory, whatever its strides say.
    """
    torch = sys.modules["torch"]
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    dq, dk, dv, _ = aten("efficient_attention_backward")(
        dout, q, k, v, None, output, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, dk, dv


FORWARD: dict[str, Callable[..., tuple[Array, Array]]] = {"cudnn": cudnn, "flash": flash, "efficient": efficient}
BACKWARD: dict[str, Callable[..., tuple[Array, ...]]] = {
    "cudnn": cudnn_backward,
    "flash": flash_backward,
    "efficient": efficient_backward,
}
