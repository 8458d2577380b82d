"""The classes and functions that texts publish, each in its own conventions: `check` must pass each of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class ChapterNumPy:
    """A book's chapter: √d_k kept as `scale`, one method a step, `forward` gives (weights, output)."""

    def __init__(self, d_k: int) -> None:
        self.d_k = d_k
        self.scale = np.sqrt(d_k)

    def _softmax(self, x: np.ndarray) -> np.ndarray:
        raised = np.exp(x - np.max(x, axis=-1, keepdims=True))
        return raised / np.sum(raised, axis=-1, keepdims=True)

    def compute_scores(self, Q: np.ndarray, K: np.ndarray) -> np.ndarray:
        return Q @ K.T

    def scale_scores(self, scores: np.ndarray) -> np.ndarray:
        return scores / self.scale

    def compute_weights(self, scaled: np.ndarray) -> np.ndarray:
        return self._softmax(scaled)

    def compute_output(self, weights: np.ndarray, V: np.ndarray) -> np.ndarray:
        return weights @ V

    def forward(self, Q: np.ndarray, K: np.ndarray, V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights = self.compute_weights(self.scale_scores(self.compute_scores(Q, K)))
        return weights, self.compute_output(weights, V)


class ChapterTorch(nn.Module):
    """The same as a module: only the root is kept, True hides, (weights, output)."""

    def __init__(self, d_k: int) -> None:
        super().__init__()
        self.scale = math.sqrt(d_k)

    def forward(self, Q, K, V, mask=None):
        scores = torch.matmul(Q, K.transpose(-2, -1)) / self.scale
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        return weights, torch.matmul(weights, V)


class Lesson(nn.Module):
    """A lesson's module: `mask == 0` hides, (output, weights); `fill` is −inf, or −1e9 as in a tutorial."""

    def __init__(self, d_k: int, fill: float = -math.inf) -> None:
        super().__init__()
        self.d_k, self.fill = d_k, fill

    def forward(self, Q, K, V, mask=None):
        scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, self.fill)
        weights = F.softmax(scores, dim=-1)
        return torch.matmul(weights, V), weights


def course_loops(Q, K, V, mask=None):
    """A course's function: (batch, n, d), one number after another; 1.0 lets through, (n, n) or (batch, n, n)."""
    batch, queries, features = Q.shape
    keys, width = K.shape[1], V.shape[2]
    output, weights = torch.zeros(batch, queries, width), torch.zeros(batch, queries, keys)
    for b in range(batch):
        for i in range(queries):
            for j in range(keys):
                weights[b, i, j] = torch.dot(Q[b, i], K[b, j]) / math.sqrt(features)
                if mask is not None and (mask[i, j] if mask.dim() == 2 else mask[b, i, j]) == 0:
                    weights[b, i, j] = -1e9
            weights[b, i] = torch.softmax(weights[b, i], dim=-1)
            output[b, i] = weights[b, i] @ V[b]
    return output.to(Q.dtype), weights.to(Q.dtype)


class CourseMultiHead(nn.Module):
    """A course's multi-head attention: four projections with biases, (output, weights (batch, heads, n, n))."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, query, key, value, mask=None):
        batch = query.size(0)
        q, k, v = (
            layer(x).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)
            for layer, x in zip((self.q_proj, self.k_proj, self.v_proj), (query, key, value), strict=True)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        output = (weights @ v).transpose(1, 2).contiguous().view(batch, -1, self.embed_dim)
        return self.out_proj(output), weights


class MultiheadAttention(CourseMultiHead):
    """The same spelled as the course has it once, for one input: the output alone, masks of (batch, 1, 1, n)."""

    def forward(self, x, mask=None):
        return super().forward(x, x, x, mask)[0]


class NumPyMultiHead:
    """Multi-head attention of NumPy: layers with a weight and a bias each."""

    class Linear:
        def __init__(self, width: int, seed: int) -> None:
            draw = np.random.default_rng(seed)
            self.weight = draw.standard_normal((width, width)) / math.sqrt(width)
            self.bias = draw.standard_normal(width)

        def __call__(self, x: np.ndarray) -> np.ndarray:
            return x @ self.weight.astype(x.dtype) + self.bias.astype(x.dtype)

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (self.Linear(embed_dim, i) for i in range(4))

    def forward(self, x: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        batch, length, width = x.shape
        q, k, v = (
            layer(x).reshape(batch, length, self.num_heads, -1).transpose(0, 2, 1, 3)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = np.where(mask == 0, -1e9, scores)
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        weights = (raised / raised.sum(-1, keepdims=True)).astype(x.dtype)
        return self.out_proj((weights @ v).transpose(0, 2, 1, 3).reshape(batch, length, width))


def linear_algebra(Q, K, V):
    """Plain expressions: A, O."""
    S = Q @ K.T / np.sqrt(K.shape[1])
    E = np.exp(S - S.max(axis=1, keepdims=True))
    A = E / E.sum(axis=1, keepdims=True)
    return A, A @ V


def linear_algebra_causal(Q, K, V):
    """The same with 1e9 taken from what is above the diagonal."""
    n = len(Q)
    S = Q @ K.T / np.sqrt(K.shape[1]) - 1e9 * np.triu(np.ones((n, n)), 1)
    E = np.exp(S - S.max(axis=1, keepdims=True))
    return E / E.sum(axis=1, keepdims=True) @ V


class Annotated(nn.Module):
    """Four projections in a list, and the heads called h."""

    def __init__(self, h: int, d_model: int) -> None:
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        query, key, value = (
            layer(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for layer, x in zip(self.linears, (query, key, value), strict=False)
        )
        x, _ = Lesson(self.d_k, -1e9)(query, key, value, mask)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k))


class Head(nn.Module):
    """A lecture's head: no bias, a triangle as a buffer, always causal."""

    def __init__(self, n_embd: int = 32, head_size: int = 8) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(n_embd, head_size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(64, 64)))

    def forward(self, x):
        _, T, _ = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ self.value(x)


class Heads(nn.Module):
    """A list of such heads, side by side."""

    def __init__(self, n_embd: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, n_embd // heads) for _ in range(heads)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


# what is published → what to check, and the hazards that come with it
TEXTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "chapter, NumPy, d_k 4": (ChapterNumPy(4), ()),
    "chapter, NumPy, d_k 13": (ChapterNumPy(13), ()),
    "chapter, PyTorch, d_k 4": (ChapterTorch(4), ("nan-for-fully-masked-rows",)),
    "chapter, PyTorch, d_k 7": (ChapterTorch(7), ("nan-for-fully-masked-rows",)),
    "lesson": (Lesson(8), ("nan-for-fully-masked-rows",)),
    "tutorial": (Lesson(64, -1e9), ("penalty-overflows-float16",)),
    "course, loops": (course_loops, ()),
    "course, multi-head": (CourseMultiHead(16, 4), ("nan-for-fully-masked-rows",)),
    "course, multi-head of one input": (MultiheadAttention(16, 4), ("nan-for-fully-masked-rows",)),
    "course, NumPy": (NumPyMultiHead(12, 3), ()),
    "linear algebra": (linear_algebra, ()),
    "linear algebra, causal": (linear_algebra_causal, ()),
    "annotated": (Annotated(4, 32), ("penalty-overflows-float16",)),
    "lecture, a head": (Head(), ()),
    "lecture, heads": (Heads(), ()),
}
