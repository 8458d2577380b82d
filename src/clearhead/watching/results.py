"""Whether the result of a kernel of ours may stand where PyTorch's would, and how it then lies in memory."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.watching.given import Given
from clearhead.watching.recorder import Recorder


def trusted(given: Given, recorder: Recorder) -> bool:
    """Is our result PyTorch's? On a GPU that is taken to be so until something else is found: it would have to wait."""
    some = given.q.numel() and given.k.numel() and given.v.numel()
    if some and given.q.is_cuda and given.bias is None and not recorder.careful:
        recorder.doubt(given)
        return True
    return ordinary(given)


def ordinary(given: Given) -> bool:
    """Are numbers and scores finite? Where a hidden key is not, it spoils PyTorch's output and never ours."""
    features = given.q.shape[-1]
    scale = 1.0 / math.sqrt(max(features, 1)) if given.scale is None else abs(given.scale)
    q, k, v = (float(torch.linalg.vector_norm(t, math.inf)) if t.numel() else 0.0 for t in (given.q, given.k, given.v))
    if given.bias is not None and given.bias.numel() and not float(given.bias.max()) < math.inf:
        return False
    return q * k * features * scale < torch.finfo(torch.float32).max and math.isfinite(v)


def dual(tensor: Tensor) -> bool:
    """Does a tensor carry a tangent, of forward-mode differentiation?"""
    unpack: Any = forward_ad.unpack_dual
    return forward_ad._current_level >= 0 and unpack(tensor).tangent is not None


def laid_out(output: Tensor, q: Tensor) -> Tensor:
    """An output as PyTorch lays it out in memory, after the queries: models take a `view` of it that relies on this."""
    if output.shape != q.shape or q.stride(-1) != 1:
        return output
    strides = strides_like(tuple(q.shape), q.stride())
    if output.stride() == strides:
        return output
    return torch.empty_strided(output.shape, strides, dtype=output.dtype, device=output.device).copy_(output)


@lru_cache(maxsize=256)
def strides_like(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a new tensor that PyTorch makes after another."""
    found: tuple[int, ...] = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
    return found
