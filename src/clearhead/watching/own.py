"""Reading a call of `clearhead.attention` itself, as the modules of `clearhead.nn` make it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.grid import Grid
from clearhead.core.mask import Both, Mask, Where
from clearhead.core.masks import Band
from clearhead.core.positions import Added, Bias
from clearhead.core.problem import pose
from clearhead.watching.given import Given


def over_ranks(function: Any) -> bool:
    """True for our attention over many ranks, of which each has all queries and keys, or a part."""
    return getattr(function, "__module__", None) in ("clearhead.distributed.shared", "clearhead.distributed.entry")


def read(q: Tensor, k: Tensor, v: Tensor, *, dropout: Any = None, kernel: str | None = None, **options: Any) -> Given:
    """A call in the terms of `observe`, with masks and biases as arrays.

    Causality stays what it is. Another mask value is asked for all pairs at once, a byte for each.
    """
    if "placement" in options:
        raise ValueError("it is split over ranks, none of which has all keys: clearhead.distributed.observe(…) sees it")
    options = {name: value for name, value in options.items() if name not in ("mesh", "timeout")}
    problem = pose(q, k, v, **options)
    causal, mask = _hidden(problem.mask, problem.grid, q.device)
    return Given(
        q,
        k,
        v,
        causal=causal,
        mask=mask,
        bias=None if problem.bias is None else _added(problem.bias, problem.grid, q),
        scale=problem.scale,
        softcap=problem.softcap,
        sinks=problem.sinks,
    )


def _hidden(mask: Mask | None, grid: Grid, device: Any) -> tuple[bool, Tensor | None]:
    """Is the first query aligned with the first key, and what else is allowed; None for everything."""
    if mask is None:
        return False, None
    if isinstance(mask, Band) and mask.back is None and mask.ahead == 0:
        offset = mask.alignment.offset(grid)
        if not np.any(np.asarray(offset)):
            return True, None
    if isinstance(mask, Both):
        (first, left), (second, right) = (_hidden(part, grid, device) for part in (mask.left, mask.right))
        both = right if left is None else left if right is None else left & right
        return first or second, both
    if isinstance(mask, Where):
        return False, torch.as_tensor(mask.array, device=device)
    tile = mask.tile(range(grid.queries), range(grid.keys), grid)
    if isinstance(tile, bool):
        return False, None if tile else torch.zeros(grid.queries, grid.keys, dtype=torch.bool, device=device)
    return False, torch.as_tensor(tile, device=device)


def _added(bias: Bias, grid: Grid, q: Tensor) -> Tensor:
    tile = bias.array if isinstance(bias, Added) else bias.tile(range(grid.queries), range(grid.keys), grid)
    return torch.as_tensor(tile, device=q.device).to(q.dtype)
