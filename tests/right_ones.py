"""Attention written right, in many conventions: `check` must pass each of them with no false alarm."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from right_texts import TEXTS
from torch import nn

import clearhead as ch
import clearhead.nn
import clearhead.textbook


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    peak = scores.max(axis=axis, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(peak), peak, 0))
    total = weights.sum(axis=axis, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def swap(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def root(x: np.ndarray) -> Any:
    return x.dtype.type(math.sqrt(x.shape[-1]))


def numpy_bhtd(q, k, v, mask=None):
    scores = q @ swap(k) / root(q)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    return softmax(scores) @ v


def numpy_returns_weights_first(q, k, v, hidden=None, mask=None):
    """`mask`: True hides a key."""
    scores = q @ swap(k) / root(q)
    if mask is not None:
        scores = np.where(mask, q.dtype.type(-np.inf), scores)
    weights = softmax(scores)
    return weights, weights @ v


def numpy_two_axes(q, k, v):
    assert q.ndim == 2
    return softmax(q @ k.T / root(q)) @ v


def numpy_scale_split(q, k, v, mask=None, causal=False):
    """Scaled before the product, causal to the last key, an additive mask."""
    fourth = q.dtype.type(q.shape[-1] ** -0.25)
    scores = (q * fourth) @ swap(k * fourth)
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = np.where(np.tri(q.shape[-2], k.shape[-2], k.shape[-2] - q.shape[-2], dtype=bool), scores, -np.inf)
    return softmax(scores) @ v


def numpy_loops(q, k, v):
    """(batch, positions, features), one pair at a time."""
    output = np.zeros((*q.shape[:2], v.shape[-1]), q.dtype)
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            scores = np.array([q[b, i] @ key for key in k[b]]) / math.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            output[b, i] = (weights / weights.sum()) @ v[b]
    return output


def numpy_packed(q, k, v, num_heads):
    def split(x):
        return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)

    output = numpy_bhtd(split(q), split(k), split(v))
    return output.swapaxes(1, 2).reshape(*q.shape[:2], -1)


def torch_bthd(query, key, value, attn_mask=None):
    """(batch, positions, heads, features), as flash attention has it, with an additive mask."""
    scores = torch.einsum("bthd,bshd->bhts", query, key) / math.sqrt(query.shape[-1])
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.nan_to_num(scores.softmax(-1))
    return torch.einsum("bhts,bshd->bthd", weights, value), weights


def jax_btd(q, k, v, mask=None):
    """mask is 1 where a query may attend."""
    scores = jnp.einsum("btd,bsd->bts", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask == 0, jnp.finfo(q.dtype).min, scores)
    return jax.nn.softmax(scores, axis=-1) @ v


class TorchSelfAttention(nn.Module):
    """Heads, projections and causality of its own, as in many small language models."""

    def __init__(self, width: int = 12, heads: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head = heads
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        dropped = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class TorchMultiHead(nn.Module):
    """The same in the textbook's words, with a mask; each way of breaking it is a flag."""

    def __init__(self, broken: str = "", width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(width, width) for _ in range(4))
        self.num_heads, self.width, self.broken = heads, width, broken
        self.dropout = nn.Dropout(0.3)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        B, T, _ = x.shape
        if self.broken == "split":
            return x.reshape(B, self.num_heads, T, -1)
        return x.view(B, T, self.num_heads, -1).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        scale = math.sqrt(self.width if self.broken == "d_model" else q.shape[-1])
        scores = q @ k.transpose(-2, -1) / scale
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.nan_to_num(scores.softmax(-1))
        if self.broken == "dropout":
            weights = F.dropout(weights, 0.3)
        elif self.training:
            weights = self.dropout(weights)
        y = weights @ v
        B, _, T, _ = y.shape
        y = y.reshape(B, T, -1) if self.broken == "merge" else y.transpose(1, 2).reshape(B, T, -1)
        return self.W_o(y)


def reversed_axes(q, k, v):
    return softmax(q @ k.T / root(q)) @ v


class TorchInterleaved(nn.Module):
    """One matrix for queries, keys and values, head by head."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, self.num_heads, -1).transpose(1, 2).chunk(3, dim=-1)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


def torch_eager(query, key, value, attention_mask=None, scaling=None):
    """Heads first in, positions first out, softmax in float32: as in Transformers."""
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.nan_to_num(F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)))
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), weights


def numpy_merged(q, k, v, mask):
    """Merged heads come back, and the mask has no default."""
    output = numpy_bhtd(q, k, v, mask)
    return output.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1)


def numpy_values_first(v, k, q):
    """The same in another order of arguments."""
    return numpy_bhtd(q, k, v)


def numpy_keyword_only(*, query, key, value, mask=None):
    return numpy_bhtd(query, key, value, mask)


def numpy_of_anything(*args, **kwargs):
    return numpy_bhtd(*args, **kwargs)


def numpy_without_names(a, b, c):
    """Keys, values, queries: the names do not say which is which."""
    return numpy_bhtd(c, a, b)


def torch_imported_inside(q, k, v):
    import torch.nn.functional as functional

    return functional.scaled_dot_product_attention(q, k, v)


def torch_always_causal(q, k, v):
    """As many keys as one likes: the first query is aligned with the first key."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def numpy_always_causal(q, k, v):
    scores = q @ swap(k) / root(q)
    T, S = scores.shape[-2:]
    return softmax(np.where(np.tri(T, S, S - T, dtype=bool), scores, -np.inf)) @ v


def torch_grouped(q, k, v):
    groups = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def numpy_in_blocks(q, k, v):
    """Blocks of 16 keys, each rescaled to the largest score so far."""
    peak = np.full((*q.shape[:-1], 1), -np.inf, q.dtype)
    total, output = np.zeros_like(peak), np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    for start in range(0, k.shape[-2], 16):
        scores = q @ swap(k[..., start : start + 16, :]) / root(q)
        risen = np.maximum(peak, scores.max(-1, keepdims=True))
        shrink, weights = np.exp(peak - risen), np.exp(scores - risen)
        total = total * shrink + weights.sum(-1, keepdims=True)
        output, peak = output * shrink + weights @ v[..., start : start + 16, :], risen
    return output / total


def numpy_projected(x, W_q, W_k, W_v):
    """The projections are handed over."""
    return numpy_bhtd(x @ W_q, x @ W_k, x @ W_v)


def numpy_alone(x):
    """Self-attention without projections."""
    return numpy_bhtd(x, x, x)


def numpy_dictionary(q, k, v):
    weights = softmax(q @ swap(k) / root(q))
    return {"weights": weights, "output": weights @ v}


def numpy_reads_the_command_line(q, k, v):
    import argparse

    argparse.ArgumentParser().parse_args()
    return numpy_bhtd(q, k, v)


class TorchLlama(nn.Module):
    """Grouped key heads, rotary angles and a mask that have to be given."""

    def __init__(self, width: int = 32, heads: int = 8, key_heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, key_heads, width // heads
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = (nn.Linear(width, key_heads * self.head_dim) for _ in range(2))

    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        B, T, _ = hidden_states.shape
        q, k, v = (
            layer(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (a.unsqueeze(1) for a in position_embeddings)
        half = self.head_dim // 2
        q, k = (x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin for x in (q, k))
        k, v = (x.repeat_interleave(self.num_heads // self.num_key_value_heads, dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim) + attention_mask
        weights = torch.nan_to_num(F.softmax(scores, dim=-1))
        return self.o_proj((weights @ v).transpose(1, 2).reshape(B, T, -1)), weights


def torch_required_dropout(query, key, value, mask, dropout):
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    if dropout is not None:
        weights = dropout(weights)
    return weights @ value, weights


def torch_required_probability(q, k, v, dropout):
    return F.dropout((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1), dropout) @ v


def numpy_three_results(Q, K, V):
    scores = Q @ K.T / root(Q)
    weights = softmax(scores)
    return scores, weights, weights @ V


class TorchHolder(nn.Module):
    """PyTorch's own module, one level down."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x, x, x)[0]


class TorchRotary(nn.Module):
    """Rotary positions inside, of neighbours or of halves, causal or not."""

    def __init__(self, neighbours: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.num_heads, self.neighbours, self.causal = 4, neighbours, causal
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        T, D = x.shape[-2:]
        angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
        if self.neighbours:
            return torch.view_as_real(
                torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
            ).flatten(-2)
        one, other = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (p(x).view(B, T, 4, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.turned(q), self.turned(k)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.causal:
            scores = scores.masked_fill(torch.ones(T, T).triu(1) == 1, -math.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


RIGHT = {
    "numpy (B, H, T, D), True attends": numpy_bhtd,
    "numpy, (weights, output), True hides": numpy_returns_weights_first,
    "numpy (T, D)": numpy_two_axes,
    "numpy (T, D), with .T": reversed_axes,
    "numpy, additive mask, causal to the end": numpy_scale_split,
    "numpy (B, T, D) in loops": numpy_loops,
    "numpy (B, T, H·D), heads given": numpy_packed,
    "torch (B, T, H, D), additive, (output, weights)": torch_bthd,
    "torch's own function": F.scaled_dot_product_attention,
    "torch's own module, batch first": nn.MultiheadAttention(12, 3, batch_first=True),
    "torch's own module, batch second, training": nn.MultiheadAttention(12, 3, dropout=0.2).train(),
    "torch causal self-attention": TorchSelfAttention(),
    "torch multi-head": TorchMultiHead(),
    "torch self-attention, one matrix head by head": TorchInterleaved(),
    "torch, other axes out than in": torch_eager,
    "numpy, heads merged on the way out": numpy_merged,
    "jax (B, T, D), 1 attends": jax_btd,
    "jax's own function": jax.nn.dot_product_attention,
    "numpy, f(v, k, q)": numpy_values_first,
    "numpy, names that say nothing": numpy_without_names,
    "numpy, keywords only": numpy_keyword_only,
    "numpy, *args": numpy_of_anything,
    "numpy, always causal, to the last key": numpy_always_causal,
    "numpy, in blocks": numpy_in_blocks,
    "numpy, projections handed over": numpy_projected,
    "numpy, of one input": numpy_alone,
    "numpy, a dictionary": numpy_dictionary,
    "numpy, reads the command line": numpy_reads_the_command_line,
    "torch, imported inside": torch_imported_inside,
    "torch, always causal, to the first key": torch_always_causal,
    "torch, grouped heads": torch_grouped,
    "torch, Llama's names": TorchLlama(),
    "torch, a dropout layer has to be given": torch_required_dropout,
    "torch, a probability of dropout has to be given": torch_required_probability,
    "torch, a module that holds PyTorch's own": TorchHolder(),
    "torch, rotary positions of halves": TorchRotary(),
    "torch, rotary positions of neighbours": TorchRotary(neighbours=True, causal=False),
    "numpy, (scores, weights, output)": numpy_three_results,
    "clearhead's attention": ch.attention,
    "clearhead's textbook class": ch.textbook.ScaledDotProductAttention(4),
    "clearhead's textbook heads": ch.textbook.MultiHeadAttention(12, 3),
    "clearhead's layer": ch.nn.ScaledDotProductAttention(4),
    "clearhead's heads": ch.nn.MultiHeadAttention(32, 4),
    "clearhead's grouped heads": ch.nn.MultiHeadAttention(32, 4, kv_heads=2, causal=True),
    **{f"published: {name}": thing for name, (thing, _) in TEXTS.items()},
}
# Right as long as nobody asks for more: what `check` tells of them without calling them wrong
HAZARDS = {f"published: {name}": hazards for name, (_, hazards) in TEXTS.items()}
