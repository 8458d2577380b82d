"""TransformerBlock: attention and a feed-forward part, each added to what came in, with the norm before or after."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.core.errors import ArgumentError
from clearhead.nn.attend import probability, size
from clearhead.nn.cache import KVCache, all_or_nothing
from clearhead.nn.multihead import MultiHeadAttention

Activation = Literal["gelu", "swiglu"]


class FeedForward(nn.Module):
    """Each position by itself: down(gelu(up(x))), or, with "swiglu", down(silu(gate(x)) · up(x)).

    `hidden` is 4 · dim unless given; for SwiGLU two thirds of that, so that it has as many weights, in multiples of 8.
    """

    def __init__(
        self, dim: int, hidden: int | None = None, activation: Activation = "gelu", bias: bool = True, **made: Any
    ) -> None:
        super().__init__()
        if activation not in ("gelu", "swiglu"):
            raise ArgumentError("activation", f"is {activation!r}, expected 'gelu' or 'swiglu'")
        if hidden is None:
            hidden = 4 * dim if activation == "gelu" else -(-8 * dim // 24) * 8
        size("hidden", hidden)
        self.activation = activation
        self.gate = nn.Linear(dim, hidden, bias=bias, **made) if activation == "swiglu" else None
        self.up = nn.Linear(dim, hidden, bias=bias, **made)
        self.down = nn.Linear(hidden, dim, bias=bias, **made)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, dim)."""
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        output: Tensor = self.down(inner)
        return output


class TransformerBlock(nn.Module):
    """One layer of a Transformer.

    >>> import torch
    >>> from clearhead import rotary
    >>> block = TransformerBlock(64, 8, kv_heads=2, positions=rotary(), causal=True, activation="swiglu")
    >>> block(torch.randn(3, 10, 64)).shape
    torch.Size([3, 10, 64])

    - norm: "pre", x + f(norm(x)), or "post", norm(x + f(x)). rms: RMSNorm in place of LayerNorm.
    - hidden, activation: those of the feed-forward part, "gelu" or "swiglu".
    - dropout: of what is added to the stream, while training; that of the weights is `attention_dropout`.
    - attention: a module of your own, `LatentAttention` or `DifferentialAttention`; unless given, `MultiHeadAttention`
      with the other options.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        norm: Literal["pre", "post"] = "pre",
        rms: bool = False,
        hidden: int | None = None,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        attention: nn.Module | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ArgumentError("norm", f"is {norm!r}, expected 'pre' or 'post'")
        own = [*options, *(["attention_dropout"] if attention_dropout else [])]
        if attention is not None and own:
            raise ArgumentError("attention", f"is given together with {', '.join(own)}, which it has its own of")
        made = {"device": device, "dtype": dtype}
        if attention is None:
            attention = MultiHeadAttention(dim, num_heads, bias=bias, dropout=attention_dropout, **options, **made)
        self.norm, self.dropout = norm, probability("dropout", dropout)
        self.attention = attention
        self.feed_forward = FeedForward(dim, hidden, activation, bias, **made)
        self.norm1, self.norm2 = (
            nn.RMSNorm(dim, eps=1e-5, **made) if rms else nn.LayerNorm(dim, bias=bias, **made) for _ in range(2)
        )

    @all_or_nothing
    def forward(self, x: Tensor, *, mask: Any = None, lengths: Any = None, cache: KVCache | None = None) -> Tensor:
        """x (batch, positions, dim); mask, lengths and cache are those of the attention module."""
        how = {"mask": mask, "lengths": lengths, "cache": cache}
        if self.norm == "pre":
            x = x + self._dropped(self.attention(self.norm1(x), **how))
            return x + self._dropped(self.feed_forward(self.norm2(x)))
        x = self.norm1(x + self._dropped(self.attention(x, **how)))
        output: Tensor = self.norm2(x + self._dropped(self.feed_forward(x)))
        return output

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def extra_repr(self) -> str:
        return f"norm={self.norm!r}" + (f", dropout={self.dropout}" if self.dropout else "")
