"""MultiHeadAttention: self- and cross-attention, with as many key heads as wanted, in PyTorch's own parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.approximations.method import Method
from clearhead.core.errors import ArgumentError
from clearhead.core.foreign import closed, refuse_others
from clearhead.core.mask import Mask
from clearhead.core.positions import Alibi, Bias, Relative, Rotary, alibi, relative_bias
from clearhead.nn.attend import FORWARD, LAYER, attend, check_method, grouped, probability, size, what_to_observe
from clearhead.nn.cache import KVCache, all_or_nothing
from clearhead.nn.cached import begun, held_by, with_policy
from clearhead.nn.places import Held, hidden_keys, query_places, visible
from clearhead.nn.rotation import Turn


class MultiHeadAttention(nn.Module):
    """Multi-head attention: project, attend in heads, project back.

    >>> from clearhead import rotary
    >>> attend = MultiHeadAttention(64, 8, kv_heads=2, positions=rotary(), causal=True)
    >>> attend(torch.randn(3, 10, 64)).shape                   # batch, positions, features
    torch.Size([3, 10, 64])

    - kv_heads: heads of keys and values; `num_heads` of them unless given, fewer are grouped queries, 1 is multi-query.
    - head_dim: features of a head; embed_dim / num_heads unless given.
    - kdim, vdim: features of what keys and values are made from, where they differ from embed_dim.
    - bias: whether the projections have one. dropout: of the weights, while training.
    - positions: `rotary(…)`, "alibi" or `alibi(num_heads)`, "relative" or `relative_bias(table)`, whose table learns.
    - qk_norm: RMSNorm of queries and keys by head, before rotary.
    - causal: each position sees those up to itself. window: and at most so many before itself, which is how
      `clearhead.window` and `KVCache(window=…)` count as well.
    - softcap, scale, kernel: as in `clearhead.attention`.
    - method: an approximation in its place, such as `performer(256)`; what it cannot honour is refused.

    The state dict is that of `torch.nn.MultiheadAttention`, and with the same seed so are the first weights.
    """

    in_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None
    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None
    relative_table: nn.Parameter | None

    @closed
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        positions: Rotary | Bias | str | None = None,
        qk_norm: bool = False,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        kernel: str | None = None,
        method: Method | None = None,
        device: Any = None,
        dtype: Any = None,
        **others: Never,
    ) -> None:
        super().__init__()
        if others:
            refuse_others("MultiHeadAttention", others, LAYER)
        self.embed_dim, self.num_heads = size("embed_dim", embed_dim), size("num_heads", num_heads)
        self.kv_heads = grouped(kv_heads, num_heads)
        if head_dim is None and embed_dim % num_heads:
            raise ArgumentError("num_heads", f"is {num_heads}, expected a number that divides embed_dim, {embed_dim}")
        self.head_dim = size("head_dim", embed_dim // num_heads if head_dim is None else head_dim)
        self.kdim = embed_dim if kdim is None else size("kdim", kdim)
        self.vdim = embed_dim if vdim is None else size("vdim", vdim)
        self.dropout = probability("dropout", dropout)
        self.causal = causal
        self.window = None if window is None else size("window", window, least=0)
        self.softcap, self.scale, self.kernel = softcap, scale, kernel
        self.method = method
        if method is not None:
            others_given = {"softcap": softcap, "kernel": kernel, "window": window, "dropout": dropout or None}
            check_method(method, others_given, positions, causal)
        made = {"device": device, "dtype": dtype}
        self.widths = (num_heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        # not whether there is such a parameter: parametrizations and pruning keep it elsewhere and compute the weight
        self.joined = self.kdim == self.vdim == embed_dim
        if self.joined:
            self.in_proj_weight = nn.Parameter(torch.empty(sum(self.widths), embed_dim, **made))
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(self.widths[0], embed_dim, **made))
            self.k_proj_weight = nn.Parameter(torch.empty(self.widths[1], self.kdim, **made))
            self.v_proj_weight = nn.Parameter(torch.empty(self.widths[2], self.vdim, **made))
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(sum(self.widths), **made)) if bias else None)
        self.out_proj = nn.Linear(self.widths[0], embed_dim, bias=bias, **made)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **made) if qk_norm else None
        self._take_positions(positions, made)
        self.reset_parameters()

    def _take_positions(self, positions: Rotary | Bias | str | None, made: dict[str, Any]) -> None:
        self.rotary = Turn(positions, self.head_dim) if isinstance(positions, Rotary) else None
        self.alibi: Alibi | None = None
        self.relative: tuple[bool, int] | None = None
        self.register_parameter("relative_table", None)
        if isinstance(positions, Alibi) or positions == "alibi":
            value = alibi(self.num_heads) if positions == "alibi" else positions
            assert isinstance(value, Alibi)
            if value.slopes.size != self.num_heads:
                raise ArgumentError("positions", f"are alibi({value.slopes.size}), expected alibi({self.num_heads})")
            self.alibi = value
        elif isinstance(positions, Relative):
            table = torch.as_tensor(positions.table)
            if table.shape[1] != self.num_heads:
                raise ArgumentError("positions", f"have a table for {table.shape[1]} heads, expected {self.num_heads}")
            self.relative_table = nn.Parameter(table.detach().clone().to(**made))
            self.relative = (positions.bidirectional, positions.max_distance)
        elif positions == "relative":
            self.relative_table = nn.Parameter(torch.zeros(32, self.num_heads, **made))
            self.relative = (not self.causal, 128)
        elif positions is not None and self.rotary is None:
            raise ArgumentError(
                "positions", f"is {positions!r}, expected rotary(…), alibi(…), relative_bias(…), 'alibi' or 'relative'"
            )

    def reset_parameters(self) -> None:
        """Weights as `torch.nn.MultiheadAttention` draws them, in its order."""
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if name in self._parameters:
                nn.init.xavier_uniform_(getattr(self, name))
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("bias_k", "bias_v"):
            if state.get(prefix + name) is not None:
                raise ArgumentError(
                    "state_dict", f"has {prefix + name}: a learned key and value (add_bias_kv) is not supported here"
                )
        super()._load_from_state_dict(state, prefix, *args)

    @closed
    @all_or_nothing
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        lengths: Any = None,
        key_padding_mask: Tensor | None = None,
        cache: KVCache | None = None,
        observe: Mapping[str, Any] | None = None,
        return_weights: bool = False,
        **others: Never,
    ) -> Any:
        """Attend from query (batch, T, embed_dim) to itself or to key and value (batch, S, …); no batch is fine too.

        - key alone is used for values as well.
        - mask: as in `clearhead.attention`, **True where a query may attend**; it joins `causal` and `window`. With a
          cache its keys are the tokens so far, these ones included. An array (batch, S) is `padding(array)`, never a
          mask by itself.
        - lengths: how many positions of each row are real; the rest is padding, at the end.
        - key_padding_mask (batch, S): **True where a key is padding**, as PyTorch means this name.
        - cache: a `KVCache` that holds the tokens before these ones, to which they are added. Self-attention only, and
          causal. With a ring, a mask has to be None.
        - observe: what to observe, such as `{"top": 5, "received": True}`; the result is then (output, `Observed`).
        - return_weights: the result is then (output, weights), the weights (batch, num_heads, T, S) of each head before
          dropout, without gradients; they take T·S numbers a head. Not with a ring, whose keys do not lie in order, and
          not in what `torch.compile` or `torch.export` trace.

        **The result is one tensor unless `observe` or `return_weights` asks for a pair.** With neither,
        `output, weights = attend(x)`, as `torch.nn.MultiheadAttention` is called, takes a batch of two apart, and there
        is nothing by which a tensor could tell.
        """
        if others:
            refuse_others("MultiHeadAttention.forward", others, FORWARD)
        wanted = what_to_observe(observe, return_weights)
        unpadded = None if key_padding_mask is None else hidden_keys(key_padding_mask)
        if return_weights and cache is not None and (cache.window is not None or cache.keep is not None):
            raise ArgumentError(
                "return_weights",
                "is given together with a ring, whose keys do not lie in order: observe={'weights': True} is by slot",
            )
        flat = query.ndim == 2
        self._check(query, key, value)
        if flat:
            query = query[None]
            key, value = (None if t is None else t[None] for t in (key, value))
        q, k, v = self.project(query, key, value)
        queries = q.shape[-2]
        if self.rotary is not None:
            places = query_places(begun(cache), queries, q)
            q = self.rotary(q, places)
            k = self.rotary(k, places if key is None else torch.arange(k.shape[-2], device=k.device))
        looks_back = key is None and (self.causal or self.window is not None)
        hidden, alone = unpadded if mask is None else mask, self.method is None
        held = held_by(cache, k, v, lengths, hidden, looks_back, tells=alone, splits=alone)
        held = held._replace(group=self.num_heads // self.kv_heads)
        output, seen = attend(
            q,
            held.k,
            held.v,
            mask=visible(
                held, queries, self.num_heads, mask, lengths, cache is not None, self.causal, self.window, unpadded
            ),
            bias=self._bias(held, queries),
            scale=self.scale,
            softcap=self.softcap,
            kernel=self.kernel,
            dropout=self.dropout if self.training else 0.0,
            observe=wanted if cache is None else with_policy(cache, wanted),
            method=self.method,
            split=held.split,
        )
        if cache is not None:
            cache.settle(seen)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        output = output[0] if flat else output
        if return_weights and seen is not None and seen.weights is not None:
            return output, seen.weights[0] if flat else seen.weights
        return output if observe is None else (output, seen)

    def _check(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        if value is not None and key is None:
            raise ArgumentError("value", "is given without key")
        if key is None and self.kdim != self.embed_dim:
            raise ArgumentError("key", f"is not given, expected one of kdim, {self.kdim} features")
        if value is None and self.vdim != (self.embed_dim if key is None else self.kdim):
            raise ArgumentError("value", f"is not given, expected one of vdim, {self.vdim} features")
        given = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        rank = 2 if query.ndim == 2 else 3
        for name, tensor, width in given:
            if tensor is not None and (tensor.ndim != rank or tensor.shape[-1] != width):
                expected = f"({'batch, ' if rank == 3 else ''}positions, {width})"
                raise ArgumentError(name, f"has shape {tuple(tensor.shape)}, expected {expected}")

    def project(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (batch, heads, T, head_dim), keys and values (batch, kv_heads, S, head_dim), normed if so wanted."""
        widths, bias = list(self.widths), self.in_proj_bias
        parts: Any
        if key is None and self.joined:
            parts = torch.split(F.linear(query, self.in_proj_weight, bias), widths, dim=-1)
        else:
            key = query if key is None else key
            inputs = (query, key, key if value is None else value)
            weights: Any
            if self.joined:
                weights = torch.split(self.in_proj_weight, widths)
            else:
                weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases: Any = (None,) * 3 if bias is None else torch.split(bias, widths)
            parts = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _bias(self, held: Held, queries: int) -> Any:
        if self.alibi is not None:
            return held.bias(self.alibi, queries)
        if self.relative is not None:
            both, most = self.relative
            assert self.relative_table is not None
            value = relative_bias(self.relative_table, bidirectional=both, max_distance=most)
            assert isinstance(value, Relative)
            return held.bias(value, queries)
        return None

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, {self.num_heads}"]
        if self.kv_heads != self.num_heads:
            parts.append(f"kv_heads={self.kv_heads}")
        if self.head_dim * self.num_heads != self.embed_dim:
            parts.append(f"head_dim={self.head_dim}")
        parts += [f"{name}={getattr(self, name)}" for name in ("kdim", "vdim") if getattr(self, name) != self.embed_dim]
        if self.in_proj_bias is None:
            parts.append("bias=False")
        if self.dropout:
            parts.append(f"dropout={self.dropout}")
        if self.alibi is not None or self.relative is not None:
            parts.append("positions='alibi'" if self.alibi is not None else "positions='relative'")
        if self.causal:
            parts.append("causal=True")
        options = {name: getattr(self, name) for name in ("window", "softcap", "scale", "kernel", "method")}
        parts += [f"{name}={value!r}" for name, value in options.items() if value is not None]
        return ", ".join(parts)
