"""Padding as `nn.TransformerEncoder` leaves it: what its fast path writes there, written there too.

PyTorch turns padded input into a nested tensor in evaluation, where the fast path is taken, and so gives zeros for
padded positions. With any `TorchFunctionMode` on it takes the other path, which computes numbers there that mean
nothing. A watched model gives what it gives unwatched.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.watching.mode import Mode, stack


def as_fast_path(encoder: nn.TransformerEncoder, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """The output with zeros, normalised as PyTorch does, in padded positions; None where it is right as it is."""
    if not isinstance(output, Tensor):
        return None
    call = inspect.signature(encoder.forward).bind(*args, **kwargs).arguments
    src, padding = call["src"], call.get("src_key_padding_mask")
    if padding is None or call.get("mask") is not None or not _nests(encoder, src):
        return None
    keep = (padding == 0) if padding.is_floating_point() else ~padding
    if getattr(encoder, "mask_check", True) and not torch._nested_tensor_from_mask_left_aligned(src, keep):
        return None
    blank = torch.zeros_like(output[:1, :1])
    if encoder.norm is not None:
        with torch.no_grad():
            blank = encoder.norm.forward(blank)
    return torch.where(keep[..., None], output, blank)


def _nests(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Would PyTorch, unwatched, have made a nested tensor of it?"""
    first: Any = encoder.layers[0]
    if not (torch.backends.mha.get_fastpath_enabled() and getattr(encoder, "use_nested_tensor", False)):
        return False
    if first.training or src.dim() != 3 or src.is_nested or torch.is_autocast_enabled():
        return False
    parameters = [src, *first.self_attn.parameters(), *first.norm1.parameters(), *first.norm2.parameters()]
    parameters += [*first.linear1.parameters(), *first.linear2.parameters()]
    if torch.overrides.has_torch_function(tuple(parameters)) and _others_see():
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in parameters))


def _others_see() -> bool:
    """Is a mode on that is not ours?"""
    return any(not isinstance(other, Mode) for other in stack())
