"""What PyTorch's compiler follows into a method: a call checked by its shapes alone, and draws as an operator."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as standard
import numpy as np
import torch
from torch import Tensor

from clearhead.approximations.directions import directions
from clearhead.core.arrays import Library
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Grid, broadcast
from clearhead.core.mask import as_mask
from clearhead.core.problem import Problem, default_scale


def pose(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: Any) -> Problem:
    """The call as `core/problem.py` has it; the numbers of tensors are not there yet."""
    headless = q.ndim == 2
    if headless:
        q, k, v = q[None], k[None], v[None]
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or q.dtype != k.dtype or q.dtype != v.dtype:
        raise ArgumentError("q, k, v", "have features, positions or dtypes that do not fit one another")
    rank = max(q.ndim, k.ndim, v.ndim)
    q, k, v = (a.reshape((1,) * (rank - a.ndim) + tuple(a.shape)) if a.ndim < rank else a for a in (q, k, v))
    batch = broadcast(tuple(q.shape[:-3]), tuple(k.shape[:-3]), tuple(v.shape[:-3]))
    grid = Grid(batch, q.shape[-3], q.shape[-2], k.shape[-2])
    return Problem(
        q, k, v, Library("torch", standard, q.device), grid, default_scale(q) if scale is None else float(scale),
        mask=None if mask is None else as_mask("mask", mask), headless=headless,
    )  # fmt: skip


@torch.library.custom_op("clearhead::normal_directions", mutates_args=())
def normal_directions(like: Tensor, count: int, features: int, seed: int, orthogonal: bool, norms: str) -> Tensor:
    """The ω of a Performer beside a tensor, transposed: (features, count)."""
    omega = np.array(directions(count, features, seed, orthogonal, norms).T)
    return torch.from_numpy(omega).to(like.device, like.dtype)


@normal_directions.register_fake
def _(like: Tensor, count: int, features: int, seed: int, orthogonal: bool, norms: str) -> Tensor:
    return like.new_empty((features, count))
