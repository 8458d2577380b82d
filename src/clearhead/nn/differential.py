"""DifferentialAttention: the difference of two softmaxes, so that what both attend to cancels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Never

import torch
from torch import Tensor, nn

from clearhead.core.errors import ArgumentError
from clearhead.core.foreign import closed, refuse_others
from clearhead.core.positions import Rotary
from clearhead.nn.attend import OBSERVED, attend, check_sequence, grouped, probability, size
from clearhead.nn.cache import KVCache, all_or_nothing
from clearhead.nn.cached import begun, held_by
from clearhead.nn.places import hidden_keys, query_places, visible
from clearhead.nn.rotation import Turn


class DifferentialAttention(nn.Module):
    """Differential attention (Ye et al. 2024, arXiv 2410.05258).

        (softmax(q₁ k₁ᵀ / √d) − λ softmax(q₂ k₂ᵀ / √d)) v,   normed by head, times 1 − λ_init
        λ = exp(λ_q1 · λ_k1) − exp(λ_q2 · λ_k2) + λ_init,    λ_init = 0.8 − 0.6 exp(−0.3 (depth − 1))

    >>> attend = DifferentialAttention(64, 4, depth=1, causal=True)
    >>> attend(torch.randn(3, 10, 64)).shape
    torch.Size([3, 10, 64])

    A head has two queries and two keys of d = embed_dim / num_heads / 2 features and one value of 2d, so that it has as
    many weights as a common one with half as many heads. `depth` is the number of the layer, from 1. `lambda_init` is
    λ_init where it is to be another.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        depth: int = 1,
        lambda_init: float | None = None,
        kv_heads: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        positions: Rotary | None = None,
        causal: bool = False,
        window: int | None = None,
        kernel: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = size("embed_dim", embed_dim), size("num_heads", num_heads)
        if embed_dim % (2 * num_heads):
            raise ArgumentError(
                "num_heads", f"is {num_heads}, expected a number of which twice divides embed_dim, {embed_dim}"
            )
        self.kv_heads = grouped(kv_heads, num_heads)
        self.head_dim = embed_dim // num_heads // 2
        self.depth = size("depth", depth)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * (depth - 1)) if lambda_init is None else float(lambda_init)
        self.dropout, self.causal, self.kernel = probability("dropout", dropout), causal, kernel
        self.window = None if window is None else size("window", window, least=0)
        made = {"device": device, "dtype": dtype}
        keys = 2 * self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **made)
        self.k_proj = nn.Linear(embed_dim, keys, bias=bias, **made)
        self.v_proj = nn.Linear(embed_dim, keys, bias=bias, **made)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **made)
        self.lambda_q = nn.Parameter(torch.empty(2, self.head_dim, **made))
        self.lambda_k = nn.Parameter(torch.empty(2, self.head_dim, **made))
        self.norm = nn.RMSNorm(2 * self.head_dim, eps=1e-5, **made)
        self.turn = None if positions is None else Turn(positions, self.head_dim)
        for parameter in (self.lambda_q, self.lambda_k):
            nn.init.normal_(parameter, std=0.1)

    def difference(self) -> Tensor:
        """λ, which learns."""
        q: Tensor = self.lambda_q
        k: Tensor = self.lambda_k
        if q.dtype != torch.float64:
            q, k = q.float(), k.float()  # a difference of exponentials loses what half precision has
        first, second = (q * k).sum(-1).exp()
        return first - second + self.lambda_init

    @closed
    @all_or_nothing
    def forward(
        self,
        x: Tensor,
        *,
        mask: Any = None,
        lengths: Any = None,
        key_padding_mask: Tensor | None = None,
        cache: KVCache | None = None,
        observe: Mapping[str, Any] | None = None,
        **others: Never,
    ) -> Any:
        """x (batch, T, embed_dim); the arguments are those of `MultiHeadAttention`.

        With `observe` the result is (output, (`Observed`, `Observed`)): of the softmax that is added, and of the one
        that is taken away.
        """
        if others:
            refuse_others("DifferentialAttention.forward", others, OBSERVED)
        unpadded = None if key_padding_mask is None else hidden_keys(key_padding_mask)
        check_sequence(x, self.embed_dim)
        queries, d = x.shape[1], self.head_dim
        q, k, v = (
            project(x).unflatten(-1, (-1, 2 * d)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.turn is not None:
            places = query_places(begun(cache), queries, x)
            q, k = (torch.cat([self.turn(half, places) for half in (t[..., :d], t[..., d:])], dim=-1) for t in (q, k))
        kept = held_by(cache, k, v, lengths, unpadded if mask is None else mask, self.causal or self.window is not None)
        options: dict[str, Any] = {
            "mask": visible(
                kept, queries, self.num_heads, mask, lengths, cache is not None, self.causal, self.window, unpadded
            ),
            "kernel": self.kernel,
            "dropout": self.dropout if self.training else 0.0,
            "observe": observe,
        }
        added, first = attend(q[..., :d], kept.k[..., :d], kept.v, **options)
        taken, second = attend(q[..., d:], kept.k[..., d:], kept.v, **options)
        output = self.norm(added - self.difference().to(added.dtype) * taken) * (1.0 - self.lambda_init)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        return output if observe is None else (output, (first, second))

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, {self.num_heads}", f"depth={self.depth}", f"lambda_init={self.lambda_init:.4g}"]
        if self.kv_heads != self.num_heads:
            parts.append(f"kv_heads={self.kv_heads}")
        if self.dropout:
            parts.append(f"dropout={self.dropout}")
        if self.causal:
            parts.append("causal=True")
        options = {name: getattr(self, name) for name in ("window", "kernel")}
        return ", ".join(parts + [f"{name}={value!r}" for name, value in options.items() if value is not None])
