"""Attention with one mistake planted in each: `check` must name it."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F
from planted_beside import BESIDE
from planted_more import MORE
from right_ones import (
    TorchMultiHead,
    TorchSelfAttention,
    numpy_bhtd,
    numpy_returns_weights_first,
    reversed_axes,
    root,
    softmax,
    swap,
)

# wrong ones: the name of each function is the name of the mistake, with underscores


def plain(scale=None, axis=-1, values="v", masked=None):
    """A NumPy function with one thing changed."""

    def function(q, k, v, mask=None):
        scores = q @ swap(k)
        scores = scores / root(q) if scale is None else scores * q.dtype.type(scale(q, k, v))
        if mask is not None:
            if masked is not None:
                return masked(scores, mask) @ v
            scores = np.where(mask, scores, -np.inf)
        return softmax(scores, axis) @ {"q": q, "k": k, "v": v}[values]

    return function


def softmax_over_everything(q, k, v):
    weights = np.exp(q @ swap(k) / root(q))
    return weights / weights.sum() @ v


def softmax_twice(q, k, v):
    return softmax(softmax(q @ swap(k) / root(q))) @ v


def no_softmax(q, k, v):
    return (q @ swap(k) / root(q)) @ v


def scale_after_softmax(q, k, v):
    return softmax(q @ swap(k)) / root(q) @ v


def values_as_keys(q, k, v):
    return softmax(q @ swap(v) / root(q)) @ v


def swapped(q, k, v):
    return softmax(k @ swap(q) / root(q)) @ v


def no_scale_and_wrong_axis(q, k, v):
    return softmax(q @ swap(k), -2) @ v


def documented_inverted(q, k, v, mask=None):
    """mask: True where a query may attend to a key."""
    scores = q @ swap(k) / root(q)
    return softmax(scores if mask is None else np.where(mask, -np.inf, scores)) @ v


def causal(diagonal=0, upper=False, corner=False, ignored=False):
    def function(q, k, v, causal=False):
        scores = q @ swap(k) / root(q)
        if causal and not ignored:
            T, S = scores.shape[-2:]
            seen = np.tri(T, S, diagonal + (0 if corner else S - T), dtype=bool)
            seen = swap(np.tri(S, T, dtype=bool)) if upper else seen
            scores = np.where(seen, scores, -np.inf)
        return softmax(scores) @ v

    return function


def no_maximum(q, k, v):
    weights = np.exp(q @ swap(k) / root(q))
    return weights / weights.sum(-1, keepdims=True) @ v


def one_maximum(q, k, v):
    scores = q @ swap(k) / root(q)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum(-1, keepdims=True) @ v


def nan_rows(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return F.softmax(scores, dim=-1) @ v


def weak_penalty(q, k, v, mask=None):
    scores = q @ swap(k) / root(q)
    return softmax(scores if mask is None else scores - 1000 * (1 - mask.astype(q.dtype))) @ v


def half_penalty(q, k, v, mask=None):
    scores = q @ swap(k) / root(q)
    if mask is not None:
        scores = scores + (1 - mask.astype(q.dtype)) * q.dtype.type(-1e9)
    return softmax(scores) @ v


def half_penalty_torch(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ v


def through_float32(q, k, v):
    return numpy_bhtd(*(a.astype(np.float32) for a in (q, k, v))).astype(q.dtype)


def through_float16(q, k, v):
    return numpy_bhtd(*(a.astype(np.float16) for a in (q, k, v))).astype(q.dtype)


def writes(q, k, v):
    q /= root(q)
    return softmax(q @ swap(k)) @ v


def always_drops(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)


_noise = np.random.default_rng(0)


def noisy(q, k, v):
    return numpy_bhtd(q, k, v) + _noise.random(dtype=np.float32)


def shows_other_weights(q, k, v, mask=None):
    scores = q @ swap(k) / root(q)
    return numpy_bhtd(q, k, v, mask), softmax(scores)


def packed(way):
    def function(q, k, v, num_heads):
        def split(x):
            if way == "split":
                return x.reshape(x.shape[0], num_heads, x.shape[1], -1)
            return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)

        output = numpy_bhtd(split(q), split(k), split(v))
        return (output if way == "merge" else output.swapaxes(1, 2)).reshape(*q.shape[:2], -1)

    return function


def off_by_something(q, k, v):
    return numpy_bhtd(q, k, v) + np.float32(0.1) * v.mean(-2, keepdims=True)


class CausalOffByOne(TorchSelfAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        hidden = torch.ones(T, T, dtype=torch.bool).triu(2)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, float("-inf"))
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


def after(penalty):
    return lambda scores, mask: np.where(mask, softmax(scores), scores.dtype.type(penalty))


@jax.jit  # one program for each shape, where each step would be one
def jax_no_scale(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2), axis=-1) @ v


# what is planted → (function, the names that check must give, what it is told)
WRONG: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "no scale": (plain(lambda q, k, v: 1), ("no-scale",), {}),
    "no scale, in jax": (jax_no_scale, ("no-scale",), {}),
    "scale √d_model": (plain(lambda q, k, v: (q.shape[1] * q.shape[-1]) ** -0.5), ("scale-d-model",), {}),
    "scale d_model": (plain(lambda q, k, v: 1 / (q.shape[1] * q.shape[-1])), ("scale-d-model-no-root",), {}),
    "scale D": (plain(lambda q, k, v: 1 / q.shape[-1]), ("scale-d",), {}),
    "scale √S": (plain(lambda q, k, v: k.shape[-2] ** -0.5), ("scale-keys",), {}),
    "scale √T": (plain(lambda q, k, v: q.shape[-2] ** -0.5), ("scale-queries",), {}),
    "scale √Dv": (plain(lambda q, k, v: v.shape[-1] ** -0.5), ("scale-dv",), {}),
    "scale √H": (plain(lambda q, k, v: q.shape[1] ** -0.5), ("scale-heads",), {}),
    "scale √D upside down": (plain(lambda q, k, v: q.shape[-1] ** 0.5), ("scale-inverted",), {}),
    "scale 0.5": (plain(lambda q, k, v: 0.5), ("scale-other",), {}),
    "scale after the softmax": (scale_after_softmax, ("scale-after-softmax",), {}),
    "softmax over queries": (plain(axis=-2), ("softmax-over-queries",), {}),
    "softmax over heads": (plain(axis=1), ("softmax-over-heads",), {}),
    "softmax over the batch": (plain(axis=0), ("softmax-over-batch",), {}),
    "softmax over everything": (softmax_over_everything, ("softmax-over-everything", "no-maximum-subtracted"), {}),
    "softmax twice": (softmax_twice, ("softmax-twice",), {}),
    "no softmax": (no_softmax, ("no-softmax",), {}),
    "two mistakes": (no_scale_and_wrong_axis, ("no-scale", "softmax-over-queries"), {}),
    "keys as values": (plain(values="k"), ("keys-as-values",), {}),
    "queries as values": (plain(values="q"), ("queries-as-values",), {}),
    "values as keys": (values_as_keys, ("values-as-keys",), {}),
    "queries and keys swapped": (swapped, ("queries-and-keys-swapped",), {}),
    "split by reshape": (packed("split"), ("heads-split-without-transpose",), {}),
    "merged by reshape": (packed("merge"), ("heads-merged-without-transpose",), {}),
    "module split by reshape": (TorchMultiHead("split"), ("heads-split-without-transpose",), {}),
    "module merged by reshape": (TorchMultiHead("merge"), ("heads-merged-without-transpose",), {}),
    "module scaled by d_model": (TorchMultiHead("d_model"), ("scale-d-model",), {}),
    "masked without renormalising": (plain(masked=after(0)), ("mask-not-renormalised",), {}),
    "masked after with -1e9": (plain(masked=after(-1e9)), ("mask-after-softmax",), {}),
    "masked after with -inf": (plain(masked=after(-np.inf)), ("mask-after-softmax",), {}),
    "masked scores are 0": (plain(masked=lambda s, m: softmax(s * m)), ("mask-zeroes-scores",), {}),
    "masked by 10": (plain(masked=lambda s, m: softmax(np.where(m, s, s - 10))), ("mask-too-weak",), {}),
    "mask ignored": (plain(masked=lambda s, m: softmax(s)), ("mask-ignored",), {}),
    "mask transposed": (
        lambda q, k, v, mask=None: numpy_bhtd(q, k + 0 * q, v, None if mask is None else swap(mask)),
        ("mask-transposed",),
        {},
    ),
    "mask inverted, stated": (numpy_returns_weights_first, ("mask-inverted",), {"mask": "attend"}),
    "mask inverted, documented": (documented_inverted, ("mask-inverted",), {}),
    "causal without itself": (causal(-1), ("causal-excludes-itself",), {}),
    "causal with the next": (causal(1), ("causal-sees-the-next",), {}),
    "causal with the next, module": (CausalOffByOne(), ("causal-sees-the-next",), {}),
    "causal upside down": (causal(upper=True), ("causal-inverted",), {}),
    "causal ignored": (causal(ignored=True), ("causal-ignored",), {}),
    "causal in the other corner": (causal(corner=True), ("causal-other-corner",), {}),
    "causal in the other corner, stated": (causal(), ("causal-other-corner",), {"causal": "start"}),
    ".T": (reversed_axes, ("transpose-reverses-batch",), {"layout": "BHTD"}),
    ".T of three axes": (reversed_axes, ("transpose-reverses-batch",), {"layout": "BTD"}),
    "no maximum": (no_maximum, ("no-maximum-subtracted",), {}),
    "one maximum": (one_maximum, ("maximum-of-the-whole-matrix",), {}),
    "NaN rows": (nan_rows, ("nan-for-fully-masked-rows",), {}),
    "padding leaks": (weak_penalty, ("padding-leaks",), {}),
    "-1e9 in float16": (half_penalty, ("penalty-overflows-float16",), {}),
    "-1e9 in float16, torch": (half_penalty_torch, ("penalty-overflows-float16",), {}),
    "through float32": (through_float32, ("precision-lost",), {}),
    "through float16": (through_float16, ("precision-lost",), {}),
    "writes to q": (writes, ("inputs-written-to",), {}),
    "dropout always": (always_drops, ("dropout-in-evaluation",), {}),
    "dropout always, module": (TorchMultiHead("dropout"), ("dropout-in-evaluation",), {}),
    "noise": (noisy, ("nondeterministic",), {}),
    "other weights shown": (shows_other_weights, ("weights-not-those-used",), {}),
    "no mistake that has a name": (off_by_something, ("unknown",), {}),
    **MORE,
    **BESIDE,
}
