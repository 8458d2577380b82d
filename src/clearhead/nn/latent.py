"""LatentAttention: keys and values made from a small latent, which is all that a cache holds (DeepSeek-V2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Never

import torch
from torch import Tensor, nn

from clearhead.core.errors import ArgumentError
from clearhead.core.foreign import closed, refuse_others
from clearhead.core.positions import Rotary, rotary
from clearhead.nn.attend import OBSERVED, attend, check_sequence, probability, size
from clearhead.nn.cache import KVCache, all_or_nothing
from clearhead.nn.cached import begun, held_by
from clearhead.nn.places import hidden_keys, query_places, visible
from clearhead.nn.rotation import Turn


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434).

    >>> attend = LatentAttention(64, 8, kv_rank=32, head_dim=16, rotary_dim=8)
    >>> cache = KVCache()
    >>> with torch.no_grad():
    ...     attend(torch.randn(3, 10, 64), cache=cache).shape
    torch.Size([3, 10, 64])
    >>> cache.k.shape[-1] + cache.v.shape[-1]            # numbers a token, where 8 heads of 16 + 16 would be 256
    40

    For a position x, with heads h:

        c = norm(x W_dkv)            the latent, `kv_rank` numbers
        r = turn(x W_kr)             `rotary_dim` numbers, shared by the heads: the part of a key that knows its place
        k_h = [c W_uk_h, r]          v_h = c W_uv_h
        q_h = [x W_q_h, turn(…)]     or from a latent of its own, norm(x W_dq), of `q_rank` numbers

    A cache holds [c, r] alone. Because q_h · (c W_uk_h) is (q_h W_uk_hᵀ) · c, and Σ w (c W_uv_h) is (Σ w c) W_uv_h, a
    few queries can attend to the latents themselves, as one key head that all query heads share, and no key or value is
    ever made: the projections are absorbed. `absorb` chooses; None takes what costs fewer multiplications.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_rank: int,
        q_rank: int | None = None,
        head_dim: int | None = None,
        rotary_dim: int = 64,
        value_dim: int | None = None,
        positions: Rotary | None = None,
        dropout: float = 0.0,
        causal: bool = True,
        window: int | None = None,
        absorb: bool | None = None,
        kernel: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = size("embed_dim", embed_dim), size("num_heads", num_heads)
        if head_dim is None and embed_dim % num_heads:
            raise ArgumentError("num_heads", f"is {num_heads}, expected a number that divides embed_dim, {embed_dim}")
        self.head_dim = size("head_dim", embed_dim // num_heads if head_dim is None else head_dim)
        self.value_dim = size("value_dim", self.head_dim if value_dim is None else value_dim)
        self.kv_rank, self.rotary_dim = size("kv_rank", kv_rank), size("rotary_dim", rotary_dim)
        self.q_rank = None if q_rank is None else size("q_rank", q_rank)
        self.dropout, self.causal, self.absorb, self.kernel = probability("dropout", dropout), causal, absorb, kernel
        self.window = None if window is None else size("window", window, least=0)
        self.scale = 1.0 / math.sqrt(self.head_dim + rotary_dim)
        made = {"device": device, "dtype": dtype}
        self.turn = Turn(rotary() if positions is None else positions, rotary_dim)
        queries = num_heads * (self.head_dim + rotary_dim)
        self.q_down = None if self.q_rank is None else nn.Linear(embed_dim, self.q_rank, bias=False, **made)
        self.q_norm = None if self.q_rank is None else nn.RMSNorm(self.q_rank, eps=1e-6, **made)
        self.q_up = nn.Linear(embed_dim if self.q_rank is None else self.q_rank, queries, bias=False, **made)
        self.kv_down = nn.Linear(embed_dim, kv_rank + rotary_dim, bias=False, **made)
        self.kv_norm = nn.RMSNorm(kv_rank, eps=1e-6, **made)
        self.kv_up = nn.Linear(kv_rank, num_heads * (self.head_dim + self.value_dim), bias=False, **made)
        self.out_proj = nn.Linear(num_heads * self.value_dim, embed_dim, bias=False, **made)

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
        """x (batch, T, embed_dim); the arguments are those of `MultiHeadAttention`."""
        if others:
            refuse_others("LatentAttention.forward", others, OBSERVED)
        unpadded = None if key_padding_mask is None else hidden_keys(key_padding_mask)
        check_sequence(x, self.embed_dim)
        queries = x.shape[1]
        places = query_places(begun(cache), queries, x)
        q = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q = self.q_up(q).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (batch, heads, T, …)
        plain, turned = q[..., : self.head_dim], self.turn(q[..., self.head_dim :], places)
        down = self.kv_down(x)[:, None]  # (batch, 1, T, …): one head
        latent = self.kv_norm(down[..., : self.kv_rank])
        held = torch.cat([latent, self.turn(down[..., self.kv_rank :], places)], dim=-1)
        looks_back = self.causal or self.window is not None
        kept = held_by(cache, held, held[..., :0], lengths, unpadded if mask is None else mask, looks_back)
        # once, and not for keys and values apart: a parametrization may cost much, or draw
        up = self.up() if self.absorbs(queries, cache) else None
        q, k, v = self.made(plain, turned, kept.k) if up is None else self.absorbed(plain, turned, kept.k, up[0])
        output, seen = attend(
            q,
            k,
            v,
            mask=visible(
                kept, queries, self.num_heads, mask, lengths, cache is not None, self.causal, self.window, unpadded
            ),
            scale=self.scale,
            kernel=self.kernel,
            dropout=self.dropout if self.training else 0.0,
            observe=observe,
        )
        if up is not None:
            output = output @ up[1].mT  # Σ w c, (batch, heads, T, kv_rank), becomes Σ w v
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        return output if observe is None else (output, seen)

    def up(self) -> tuple[Tensor, Tensor]:
        """W_uk (heads, head_dim, kv_rank) and W_uv (heads, value_dim, kv_rank)."""
        if self._weight_alone():
            weight = self.kv_up.weight
        else:  # what it does to each unit vector: hooks may change it, and another module may stand in its place
            like = self.kv_norm.weight
            still = self.kv_up(like.new_zeros(1, self.kv_rank))
            if still.any():
                raise ArgumentError(
                    "absorb",
                    f"is True, and kv_up is a {type(self.kv_up).__name__} that adds to what it projects, expected None",
                )
            weight = self.kv_up(torch.eye(self.kv_rank, dtype=like.dtype, device=like.device)).mT
        both = weight.reshape(self.num_heads, -1, self.kv_rank)
        return both[:, : self.head_dim], both[:, self.head_dim :]

    def _weight_alone(self) -> bool:
        """Does the weight of kv_up say all, computed or not? Hooks on it run only when it is called."""
        up: Any = self.kv_up
        linear = isinstance(up, nn.Linear) and type(up).forward is nn.Linear.forward and up.bias is None
        hooks = (*up._forward_pre_hooks.values(), *up._forward_hooks.values())
        return linear and all(getattr(hook, "only_looks", False) for hook in hooks)

    def absorbs(self, queries: int, cache: KVCache | None) -> bool:
        """Do so few queries attend to the latents themselves?"""
        if self.absorb is not None:
            return self.absorb
        return cache is not None and self._weight_alone() and self.cheaper(queries)

    def made(self, plain: Tensor, turned: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, all of them made."""
        latent, shared = held[..., : self.kv_rank], held[..., self.kv_rank :]
        kv = self.kv_up(latent[:, 0]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = torch.cat([kv[..., : self.head_dim], shared.expand(-1, self.num_heads, -1, -1)], dim=-1)
        return torch.cat([plain, turned], dim=-1), k, kv[..., self.head_dim :]

    def absorbed(self, plain: Tensor, turned: Tensor, held: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries that attend to the latents themselves, which are keys and values of one shared head."""
        return torch.cat([plain @ up, turned], dim=-1), held, held[..., : self.kv_rank]

    def cheaper(self, queries: int) -> bool:
        """True where so few queries cost fewer multiplications than making all keys and values.

        For each key and head that is made: kv_rank · (head_dim + value_dim) to make it and head_dim + rotary_dim +
        value_dim for each query; absorbed: 2 · kv_rank + rotary_dim for each query.
        """
        wide = self.head_dim + self.value_dim
        return queries * (2 * self.kv_rank - wide) < self.kv_rank * wide

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, {self.num_heads}, kv_rank={self.kv_rank}", f"head_dim={self.head_dim}"]
        parts += [f"rotary_dim={self.rotary_dim}", f"value_dim={self.value_dim}"]
        options = {name: getattr(self, name) for name in ("q_rank", "window", "absorb", "kernel")}
        return ", ".join(parts + [f"{name}={value!r}" for name, value in options.items() if value is not None])
