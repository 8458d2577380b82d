"""More attention with one mistake planted in each: causality inside, heads, blocks, fused projections, masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from right_ones import TorchSelfAttention, numpy_bhtd, root, softmax, swap
from torch import nn


def weighted(weigh, turn=swap):
    """Attention of NumPy whose weights, or whose transposed keys, are made in another way."""

    def function(q, k, v):
        return weigh(q @ turn(k) / root(q)) @ v

    return function


def fresh(scores: np.ndarray) -> np.ndarray:
    return np.exp(scores - scores.max(-1, keepdims=True))


def keepdims_forgotten(q, k, v):
    weights = np.exp(q @ k.T / root(q))
    return weights / weights.sum(-1) @ v


def cosine(q, k, v):
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    return numpy_bhtd(q, k, v)


def always_causal(hidden=None, fill=-np.inf, apply=None):
    """Causal without a flag: what is hidden, what it is filled with, or how the triangle is applied."""

    def function(q, k, v):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        ones = torch.ones(scores.shape[-2:])
        if apply is not None:
            return apply(scores, ones.tril()) @ v
        return scores.masked_fill(hidden(ones) == 1, fill).softmax(-1) @ v

    return function


class Block(TorchSelfAttention):
    """One matrix for all three, causal: `act` is how scores become weights, `part` how the matrix is split."""

    def __init__(self, act=None, part=None) -> None:
        super().__init__()
        self.act, self.part = act, part
        self.register_buffer("tril", torch.tril(torch.ones(64, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        joined = self.c_attn(x)
        if self.part is None:
            parts = joined.view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        else:
            parts = self.part(joined, B, T, self.n_head)
        q, k, v = parts
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        seen = self.tril[:T, :T]
        weights = scores.masked_fill(seen == 0, -math.inf).softmax(-1) if self.act is None else self.act(scores, seen)
        return self.c_proj((weights @ v).transpose(1, 2).reshape(B, T, C))


def ordered(*order):
    def part(joined, B, T, heads):
        parts = joined.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4)
        return [parts[i] for i in order]

    return part


def reshaped(joined, B, T, heads):
    return joined.reshape(3, B, heads, T, -1)


def packed_twice(q, k, v, num_heads):
    """The heads are moved to their place and back again: each position attends among its own heads."""

    def split(x):
        return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2).swapaxes(1, 2)

    return numpy_bhtd(split(q), split(k), split(v)).reshape(q.shape)


def packed_first(split_first, merge_first):
    def function(q, k, v, num_heads):
        def split(x):
            B, T, E = x.shape
            if split_first:
                return x.reshape(B, T, E // num_heads, num_heads).transpose(0, 3, 1, 2)
            return x.reshape(B, T, num_heads, -1).transpose(0, 2, 1, 3)

        output = numpy_bhtd(split(q), split(k), split(v))
        return output.transpose((0, 2, 3, 1) if merge_first else (0, 2, 1, 3)).reshape(q.shape)

    return function


def one_head_only(q, k, v, num_heads):
    B, T, E = q.shape
    parts = [x.reshape(B, -1, num_heads, E // num_heads).transpose(0, 2, 1, 3) for x in (q, k, v)]
    return np.sin(num_heads - 1) + numpy_bhtd(*parts).transpose(0, 2, 1, 3).reshape(B, T, E)


def grouped(q, k, v):
    groups = q.shape[1] // k.shape[1]
    return numpy_bhtd(q, np.tile(k, (1, groups, 1, 1)), np.tile(v, (1, groups, 1, 1)))


class Llama(nn.Module):
    """Grouped key heads behind Llama's names; `tiled` repeats them in the wrong order."""

    def __init__(self, tiled: bool = False, width: int = 32, heads: int = 8, key_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, key_heads, width // heads
        self.tiled = tiled
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, key_heads * self.head_dim, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask):
        B, T, _ = hidden_states.shape
        q, k, v = (
            layer(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (a.unsqueeze(1) for a in position_embeddings)
        q, k = (x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin for x in (q, k))
        groups = self.num_heads // self.num_key_value_heads
        if self.tiled:
            k, v = (x.repeat(1, groups, 1, 1) for x in (k, v))
        else:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = q @ k.mT / math.sqrt(self.head_dim) + attention_mask
        y = torch.nan_to_num(scores.softmax(-1)) @ v
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1)), None


def blocks(forget, size=64):
    """A running maximum over blocks of keys; `forget` is what is left out."""

    def function(q, k, v):
        S = k.shape[-2]
        peak = np.full((*q.shape[:-1], 1), -np.inf, q.dtype)
        total, output = np.zeros_like(peak), np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        ends = range(0, S - S % size if forget == "tail" and size < S else S, size)
        for start in ends:
            part, values = k[..., start : start + size, :], v[..., start : start + size, :]
            if forget == "padding" and part.shape[-2] < size < S:
                fill = [(0, 0)] * (k.ndim - 2) + [(0, size - part.shape[-2]), (0, 0)]
                part, values = np.pad(part, fill), np.pad(values, fill)
            if forget == "overlap" and part.shape[-2] < size < S:
                part, values = k[..., -size:, :], v[..., -size:, :]
            scores = q @ swap(part) / root(q)
            risen = np.maximum(peak, scores.max(-1, keepdims=True))
            shrink = np.ones_like(peak) if forget == "rescaling" else np.exp(peak - risen)
            weights = np.exp(scores - risen)
            total, output = total * shrink + weights.sum(-1, keepdims=True), output * shrink + weights @ values
            peak = risen
        return output / total

    return function


def without_last_key(q, k, v):
    return numpy_bhtd(q, k[..., :-1, :], v[..., :-1, :]) if k.shape[-2] > 1 else numpy_bhtd(q, k, v)


def masked(apply):
    def function(q, k, v, mask=None):
        scores = q @ swap(k) / root(q)
        return (softmax(scores) if mask is None else apply(scores, mask)) @ v

    return function


def padding_on_queries(q, k, v, key_padding_mask=None):
    """key_padding_mask: (batch, keys), True hides."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, :, None], -1e9)
    return scores.softmax(-1) @ v


def reads_memory(q, k, v):
    """The keys are read in the order in which they lie in memory."""
    flat = torch.as_strided(k, k.shape, torch.empty(k.shape).stride())
    return (q @ flat.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def attends_across_the_batch(q, k, v):
    """q, k, v: (batch, positions, features)"""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.bmm((torch.bmm(q, k.mT) / math.sqrt(q.shape[-1])).softmax(-1), v).transpose(0, 1)


def fixed(scale):
    """A class that was built for one number of features."""

    class Attention:
        def __init__(self, d_k: int) -> None:
            self.d_k = d_k

        def forward(self, q, k, v):
            weights = softmax(q @ swap(k) * q.dtype.type(scale(self.d_k)))
            return weights, weights @ v

    return Attention


MORE: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "no denominator": (weighted(np.exp), ("no-denominator",), {}),
    "no denominator, shifted": (weighted(fresh), ("no-denominator",), {}),
    "divided by the sum": (weighted(lambda s: s / s.sum(-1, keepdims=True)), ("normalised-by-sum",), {}),
    "divided by L1": (weighted(lambda s: s / np.abs(s).sum(-1, keepdims=True)), ("normalised-by-sum",), {}),
    "divided by the maximum": (weighted(lambda s: s / s.max(-1, keepdims=True)), ("normalised-by-maximum",), {}),
    "maximum of a column": (weighted(lambda s: softmax(s - s.max(-2, keepdims=True))), ("maximum-over-queries",), {}),
    "keepdims": (keepdims_forgotten, ("keepdims-forgotten",), {}),
    "logarithm": (weighted(lambda s: np.log(softmax(s))), ("logarithm-of-softmax",), {}),
    "one more": (
        weighted(lambda s: fresh(s) / (1 + fresh(s).sum(-1, keepdims=True))),
        ("one-added-to-the-denominator",),
        {},
    ),
    "argmax": (weighted(lambda s: (s == s.max(-1, keepdims=True)).astype(s.dtype)), ("only-the-largest",), {}),
    "sign": (weighted(lambda s: softmax(-s)), ("scores-negated",), {}),
    "cosine": (cosine, ("cosine-in-place-of-product",), {}),
    "queries with themselves": (lambda q, k, v: numpy_bhtd(q, q + 0 * k, v), ("queries-as-keys",), {}),
    "k and v swapped": (lambda q, k, v: numpy_bhtd(q, v, k), ("keys-and-values-swapped",), {}),
    "no transpose": (weighted(softmax, lambda k: k), ("keys-not-transposed",), {}),
    "reshaped": (
        weighted(softmax, lambda k: k.reshape(*k.shape[:-2], k.shape[-1], k.shape[-2])),
        ("keys-reshaped",),
        {},
    ),
    "weights transposed": (
        weighted(lambda s: swap(softmax(s)), lambda k: swap(k) + 0),
        ("weights-transposed",),
        {},
    ),
    "always causal, triu 0, -inf": (always_causal(lambda one: one.triu(0)), ("causal-excludes-itself",), {}),
    "always causal, triu 0, -1e9": (always_causal(lambda one: one.triu(0), -1e9), ("causal-excludes-itself",), {}),
    "always causal, inverted": (always_causal(lambda one: one.tril(0)), ("causal-inverted",), {}),
    "always causal, inverted, sees itself": (always_causal(lambda one: one.tril(-1)), ("causal-inverted",), {}),
    "always causal, zeroed": (always_causal(apply=lambda s, one: (s * one).softmax(-1)), ("mask-zeroes-scores",), {}),
    "always causal, after": (always_causal(apply=lambda s, one: s.softmax(-1) * one), ("mask-not-renormalised",), {}),
    "module, triu 0": (
        Block(lambda s, seen: s.masked_fill(torch.ones_like(s).triu(0) == 1, -math.inf).softmax(-1)),
        ("causal-excludes-itself",),
        {},
    ),
    "module, inverted": (
        Block(lambda s, seen: s.masked_fill(seen == 1, -math.inf).softmax(-1)),
        ("causal-inverted",),
        {},
    ),
    "module, mask after the softmax": (Block(lambda s, seen: s.softmax(-1) * seen), ("mask-not-renormalised",), {}),
    "module, zeroed": (Block(lambda s, seen: (s * seen).softmax(-1)), ("mask-zeroes-scores",), {}),
    "module, not causal": (Block(lambda s, seen: s.softmax(-1)), ("causal-ignored",), {}),
    "fused, k and v swapped": (Block(part=ordered(0, 2, 1)), ("keys-and-values-swapped",), {}),
    "fused, another order": (Block(part=ordered(2, 0, 1)), ("projections-in-another-order",), {}),
    "fused, reshaped": (Block(part=reshaped), ("heads-split-without-transpose",), {}),
    "packed, permuted twice": (packed_twice, ("attends-over-heads",), {}),
    "packed, features first in": (packed_first(True, False), ("heads-split-features-first",), {}),
    "packed, features first out": (packed_first(False, True), ("heads-merged-features-first",), {}),
    "packed, one head only": (one_head_only, ("wrong-with-several-heads",), {}),
    "groups tiled": (grouped, ("groups-in-the-wrong-order",), {}),
    "groups tiled, module": (Llama(tiled=True), ("groups-in-the-wrong-order",), {}),
    "blocks, not rescaled": (blocks("rescaling"), ("blocks-not-rescaled",), {}),
    "blocks of 128, not rescaled": (blocks("rescaling", 128), ("blocks-not-rescaled",), {}),
    "blocks, tail lost": (blocks("tail"), ("tail-lost",), {}),
    "blocks, padding counted": (blocks("padding"), ("padded-block-counted",), {}),
    "blocks, overlap": (blocks("overlap"), ("keys-counted-twice",), {}),
    "last key left out": (without_last_key, ("key-left-out",), {}),
    "boolean mask added": (masked(lambda s, m: softmax(s + m)), ("mask-added-as-number",), {"mask": "attend"}),
    "one minus the mask added": (
        masked(lambda s, m: softmax(s + (1 - m))),
        ("mask-added-as-number",),
        {"mask": "attend"},
    ),
    "one minus the mask added, unsaid": (
        masked(lambda s, m: softmax(s + (1 - m))),
        ("mask-added-as-number",),
        {},
    ),
    "mask of the first row": (
        masked(lambda s, m: softmax(np.where(m[:1], s, -np.inf)) if m.ndim == 4 else 1 / 0),
        ("mask-of-the-first-row",),
        {},
    ),
    "padding on queries": (padding_on_queries, ("padding-hides-queries",), {}),
    "memory order": (reads_memory, ("needs-contiguous-inputs",), {}),
    "across the batch": (attends_across_the_batch, ("batch-axis-transposed",), {}),
    "built for 4, no root": (fixed(lambda d: 1 / d)(4), ("scale-d",), {}),
    "built for 7, no scale": (fixed(lambda d: 1.0)(7), ("no-scale",), {"d": 7}),
}
