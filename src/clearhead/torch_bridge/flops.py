"""What the operators cost, told to PyTorch's `FlopCounterMode`: as it counts its own attention, masks left out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from clearhead.core.grid import broadcast


def products(operator: Any, shapes: tuple[Any, ...]) -> tuple[int, int]:
    """Multiply-adds of one product over features of queries, and of one over those of values."""
    names = [argument.name for argument in operator.default._schema.arguments]
    q, k, v = (shapes[names.index(name)] for name in ("q", "k", "v"))
    pairs = q[-2] * k[-2]
    for size in broadcast(q[:-2], (*k[:-3], 1), (*v[:-3], 1)):  # key heads are shared
        pairs *= size
    return pairs * q[-1], pairs * v[-1]


def forward(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
    """q kᵀ and weights v."""
    queries, values = products(torch.ops.clearhead.attention, shapes)
    return 2 * (queries + values)


def backward(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
    """Scores once more, dq and dk; dweights and dv."""
    queries, values = products(torch.ops.clearhead.attention_backward, shapes)
    return 2 * (3 * queries + 2 * values)


def register() -> None:
    """Tell PyTorch, and the counters that are open now: they took their formulas when they were made."""
    formulas = {torch.ops.clearhead.attention: forward, torch.ops.clearhead.attention_backward: backward}
    for operator, formula in formulas.items():
        flop_counter.register_flop_formula(operator)(formula)
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):
            counter.flop_registry.update({op: flop_counter.flop_registry[op] for op in formulas})
