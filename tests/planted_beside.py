"""Attention with a mistake planted in what stands beside the formula: parts of modules, masks together with more."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from right_ones import TorchRotary, numpy_bhtd, root, softmax, swap
from torch import nn


def masked(apply, words=""):
    """A NumPy function that applies its mask in some way, and what it says of it."""

    def function(q, k, v, mask=None):
        scores = q @ swap(k) / root(q)
        return (softmax(scores) if mask is None else apply(scores, mask)) @ v

    function.__doc__ = words
    return function


def nan_softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Heads(nn.Module):
    """A right module, but for one thing."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong, self.num_heads = wrong, 4
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.wrong == "unsplit":
            return self.out_proj(F.scaled_dot_product_attention(q, k, v))
        q, k, v = (a.view(B, T, 4, -1).transpose(1, 2) for a in (q, k, v))
        output = F.scaled_dot_product_attention(q, k, v)
        merged = (output.flip(1) if self.wrong == "order" else output).transpose(1, 2).reshape(B, T, C)
        if self.wrong == "unprojected":
            return merged
        return self.out_proj(merged) + (x if self.wrong == "residual" else 0)


class PositionsFirst(nn.Module):
    """x: (batch, seq, dim)"""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(32, 4)  # and batch_first is False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x, x, x)[0]


class HoldsInverted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """attention_mask (batch, seq): 1 for tokens, 0 for padding."""
        return self.attn(hidden_states, hidden_states, hidden_states, key_padding_mask=attention_mask.bool())[0]


class RotaryUnscaled(TorchRotary):
    def turned(self, x: torch.Tensor) -> torch.Tensor:
        return super().turned(x) * 8**0.25  # of queries and of keys: √8 in all, which undoes the scale


def packed_unsplit(q, k, v, num_heads=4):
    return (q @ k.mT / math.sqrt(q.shape[-1] // num_heads)).softmax(-1) @ v


def causal_or_mask(q, k, v, mask=None, is_causal=False):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) @ v


def first_of_the_batch(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        shown = mask[0] if mask.dim() == 3 else mask
        scores = scores.masked_fill(~shown, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v


def bias_scaled(q, k, v, attn_bias=None):
    scores = q @ swap(k)
    return softmax((scores if attn_bias is None else scores + attn_bias) / root(q)) @ v


def lengths(hides):
    def function(q, k, v, valid_lens=None):
        scores = q @ swap(k) / root(q)
        if valid_lens is not None:
            scores = np.where(hides(np.arange(k.shape[-2]), valid_lens[:, None, None]), scores.dtype.type(-6e4), scores)
        return softmax(scores) @ v

    return function


def from_zero(q, k, v):
    peak, total, output = np.zeros((*q.shape[:-1], 1), q.dtype), 0, 0
    for start in range(0, k.shape[-2], 16):
        scores = q @ swap(k[..., start : start + 16, :]) / root(q)
        risen = np.maximum(peak, scores.max(-1, keepdims=True))
        fresh, shrink = np.exp(scores - risen), np.exp(peak - risen)
        total = total * shrink + fresh.sum(-1, keepdims=True)
        output = output * shrink + fresh @ v[..., start : start + 16, :]
        peak = risen
    return output / total


def loop_ahead(Q, K, V):
    rows = [softmax(Q[i] @ K[: i + 2].T / root(Q)) @ V[: i + 2] for i in range(len(Q))]
    return np.stack(rows).astype(Q.dtype)


def added_to_sdpa(q, k, v, mask=None):
    """mask: 1 lets through, 0 hides."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask.to(q.dtype))


def relu(q, k, v):
    weights = np.maximum(q @ swap(k), 0)
    return weights / weights.sum(-1, keepdims=True) @ v


BESIDE: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "heads never split": (packed_unsplit, ("heads-not-split",), {}),
    "heads never split, module": (Heads("unsplit"), ("heads-not-split",), {}),
    "heads joined in reverse": (Heads("order"), ("heads-in-reverse-order",), {}),
    "output never projected": (Heads("unprojected"), ("output-projection-forgotten",), {}),
    "residual inside, module": (Heads("residual"), ("residual-added",), {}),
    "residual inside": (lambda q, k, v: q + numpy_bhtd(q, k, v), ("residual-added",), {}),
    "relu": (relu, ("relu-in-place-of-softmax",), {}),
    "PyTorch's module without batch_first": (PositionsFirst(), ("batch-axis-transposed",), {}),
    "PyTorch's module, 1 for tokens": (HoldsInverted(), ("mask-inverted", "nan-for-fully-masked-rows"), {}),
    "no scale, rotary positions": (RotaryUnscaled(), ("no-scale",), {}),
    "causal lost beside a mask": (causal_or_mask, ("causal-ignored",), {}),
    "mask of the first row, by batch": (first_of_the_batch, ("mask-of-the-first-row",), {}),
    "filled with -100": (
        masked(lambda s, m: softmax(np.where(m, s, s.dtype.type(-100)))),
        ("mask-too-weak",),
        {},
    ),
    "filled with -1": (masked(lambda s, m: softmax(np.where(m, s, s.dtype.type(-1)))), ("mask-too-weak",), {}),
    "filled, then scaled": (
        masked(lambda s, m: softmax(np.where(m, s, s.dtype.type(-20 / math.sqrt(13))))),
        ("mask-too-weak",),
        {},
    ),
    "filled with +1e9": (
        masked(lambda s, m: softmax(np.where(m, s, s.dtype.type(1e9)))),
        ("mask-penalty-positive",),
        {"mask": "attend"},
    ),
    "times infinity": (masked(lambda s, m: nan_softmax(s + (1 - m) * -np.inf)), ("mask-times-infinity",), {}),
    "documented, and added": (added_to_sdpa, ("mask-added-as-number",), {}),
    "bias scaled": (bias_scaled, ("bias-scaled",), {}),
    "lengths off by one": (lengths(lambda at, real: at > real), ("lengths-off-by-one",), {}),
    "lengths inverted": (lengths(lambda at, real: at < real), ("mask-inverted",), {}),
    "maximum from zero": (from_zero, ("maximum-starts-at-zero",), {}),
    "causal with the next, in a loop": (loop_ahead, ("causal-sees-the-next",), {}),
}
