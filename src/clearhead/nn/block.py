"""TransformerBlock: attention and a feed-forward part, each added to what came in, the norm before, after or none."""

from __future__ import annotations

from typing import Any, Literal, Never

import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.core.errors import ArgumentError
from clearhead.core.foreign import closed, refuse_others
from clearhead.nn.attend import FORWARD, probability, size
from clearhead.nn.cache import KVCache, all_or_nothing
from clearhead.nn.multihead import MultiHeadAttention

Activation = Literal["gelu", "relu", "swiglu"]
# a block gives no weights
BLOCK = {name: words for name, words in FORWARD.items() if "return_weights" not in words}


class FeedForward(nn.Module):
    """Each position by itself: down(gelu(up(x))), or relu in its place, or, with "swiglu", down(silu(gate(x)) · up(x)).

    `hidden` is 4 · dim unless given; for SwiGLU two thirds of that, so that it has as many weights, in multiples of 8.

    >>> import torch
    >>> FeedForward(64, activation="swiglu")(torch.zeros(3, 10, 64)).shape
    torch.Size([3, 10, 64])
    """

    def __init__(
        self, dim: int, hidden: int | None = None, activation: Activation = "gelu", bias: bool = True, **made: Any
    ) -> None:
        super().__init__()
        if activation not in ("gelu", "relu", "swiglu"):
            raise ArgumentError("activation", f"is {activation!r}, expected 'gelu', 'relu' or 'swiglu'")
        if hidden is None:
            hidden = -(-8 * dim // 24) * 8 if activation == "swiglu" else 4 * dim
        size("hidden", hidden)
        self.activation = activation
        self.gate = nn.Linear(dim, hidden, bias=bias, **made) if activation == "swiglu" else None
        self.up = nn.Linear(dim, hidden, bias=bias, **made)
        self.down = nn.Linear(hidden, dim, bias=bias, **made)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, dim)."""
        if self.gate is not None:
            inner = F.silu(self.gate(x)) * self.up(x)
        else:
            inner = F.relu(self.up(x)) if self.activation == "relu" else F.gelu(self.up(x))
        output: Tensor = self.down(inner)
        return output


class TransformerBlock(nn.Module):
    """One layer of a Transformer.

    >>> import torch
    >>> from clearhead import rotary
    >>> block = TransformerBlock(64, 8, kv_heads=2, positions=rotary(), causal=True, activation="swiglu")
    >>> block(torch.randn(3, 10, 64)).shape
    torch.Size([3, 10, 64])

    As introductions write it, x + attention(x), then x + W₂ relu(W₁ x):

    >>> plain = TransformerBlock(64, 8, norm=None, activation="relu")
    >>> x = torch.randn(3, 10, 64)
    >>> middle = x + plain.attention(x)
    >>> torch.equal(plain(x), middle + plain.feed_forward.down(plain.feed_forward.up(middle).relu()))
    True

    - norm: "pre", x + f(norm(x)); "post", norm(x + f(x)); or None, x + f(x). rms: RMSNorm in place of LayerNorm.
    - hidden, activation: those of the feed-forward part, "gelu", "relu" or "swiglu".
    - dropout: of what is added to the stream, while training; that of the weights is `attention_dropout`.
    - attention: a module of your own, `LatentAttention` or `DifferentialAttention`; unless given, `MultiHeadAttention`
      with the other options.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        norm: Literal["pre", "post"] | None = "pre",
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
        if norm not in ("pre", "post", None):
            raise ArgumentError("norm", f"is {norm!r}, expected 'pre', 'post' or None")
        if norm is None and rms:
            raise ArgumentError("rms", "is True, and norm is None: there is no norm to be one")
        own = [*options, *(["attention_dropout"] if attention_dropout else [])]
        if attention is not None and own:
            raise ArgumentError("attention", f"is given together with {', '.join(own)}, which it has its own of")
        made = {"device": device, "dtype": dtype}
        if attention is None:
            attention = MultiHeadAttention(dim, num_heads, bias=bias, dropout=attention_dropout, **options, **made)
        self.norm, self.dropout = norm, probability("dropout", dropout)
        self.attention = attention
        self.feed_forward = FeedForward(dim, hidden, activation, bias, **made)
        self.norm1, self.norm2 = (_norm(norm, rms, dim, bias, made) for _ in range(2))

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
        **others: Never,
    ) -> Tensor:
        """x (batch, positions, dim); mask, lengths, key_padding_mask and cache are those of the attention module."""
        if others:
            refuse_others("TransformerBlock.forward", others, BLOCK)
        how = {"mask": mask, "lengths": lengths, "cache": cache}
        if key_padding_mask is not None:  # which a module of one's own need not know
            how["key_padding_mask"] = key_padding_mask
        if self.norm != "post":  # without a norm, norm1 and norm2 hand on what they are given
            x = x + self._dropped(self.attention(self.norm1(x), **how))
            return x + self._dropped(self.feed_forward(self.norm2(x)))
        x = self.norm1(x + self._dropped(self.attention(x, **how)))
        output: Tensor = self.norm2(x + self._dropped(self.feed_forward(x)))
        return output

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def extra_repr(self) -> str:
        return f"norm={self.norm!r}" + (f", dropout={self.dropout}" if self.dropout else "")


def _norm(norm: str | None, rms: bool, dim: int, bias: bool, made: dict[str, Any]) -> nn.Module:
    if norm is None:
        return nn.Identity()
    return nn.RMSNorm(dim, eps=1e-5, **made) if rms else nn.LayerNorm(dim, bias=bias, **made)
