"""PyTorch's own `scaled_dot_product_attention`, name for name, by this library's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.calls import attention
from clearhead.core.admit import admit
from clearhead.core.array_masks import is_mirrored, of_pytorch, where
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import broadcast, fits
from clearhead.core.mask import Mask, as_mask
from clearhead.core.masks import causal
from clearhead.nn.attend import draw

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: the same arguments, with the same meaning.

    >>> q, k, v = torch.randn(3, 2, 8, 5, 64, generator=torch.Generator().manual_seed(0))
    >>> mine = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(mine, theirs, atol=1e-5)
    True

    - query (…, T, E), key (…, S, E), value (…, S, Ev); leading axes broadcast. With `enable_gqa` the axis before
      positions is heads, and each head of keys and of values serves several heads of queries.
    - attn_mask: boolean, **True where a query may attend**, or a floating-point one that is added to the scores; it
      broadcasts to (…, T, S). A floating-point one that requires a gradient receives it.
    - is_causal aligns the first query with the first key. With a mask it is refused, as PyTorch refuses it.
    - dropout_p is always applied, as there: pass `dropout_p=p if self.training else 0.0`. The weights that are dropped
      follow `torch.manual_seed`, and are others than PyTorch's.
    - A query that may attend to nothing gives 0, with gradients of 0. PyTorch gives the same since 2.5, and gave NaN
      before.

    What PyTorch refuses with a RuntimeError is refused here with an `ArgumentError`, a ValueError, in one sentence.
    """
    query, key, value = shaped(query, key, value, enable_gqa)
    if not 0.0 <= dropout_p <= 1.0:
        raise ArgumentError("dropout_p", f"is {dropout_p!r}, expected a number from 0 to 1")
    if is_causal and attn_mask is not None:
        raise ArgumentError("attn_mask", "is given together with is_causal=True, expected one of them")
    mask: Mask | Tensor | None = causal(align="start") if is_causal else None
    bias = None
    causes = of_pytorch("attn_mask", attn_mask, query, key)
    if isinstance(causes, Mask):
        mask = causes
    elif attn_mask is not None:
        attn_mask = admit("attn_mask", attn_mask)
        check_mask(attn_mask, query, key, value)
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
        if mask is not None and is_mirrored(as_mask("attn_mask", mask)):
            mask = where(mask)  # PyTorch takes it, and so it is meant here
    dropout = (dropout_p, draw()) if 0.0 < dropout_p < 1.0 else None
    output: Tensor = attention(query, key, value, mask=mask, bias=bias, scale=scale, dropout=dropout)
    return output * 0.0 if dropout_p == 1.0 else output


def check_mask(attn_mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse a mask of another kind or shape; under autocast both half precisions are fine: PyTorch converts them."""
    if not isinstance(attn_mask, Tensor):
        raise ArgumentError("attn_mask", f"is a {type(attn_mask).__name__}, expected a tensor")
    taken = [torch.bool, torch.float32, query.dtype]
    kind = query.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        taken += [torch.float16, torch.bfloat16]
    if attn_mask.dtype not in taken:
        raise ArgumentError(
            "attn_mask", f"has dtype {attn_mask.dtype}, expected torch.bool, torch.float32 or {query.dtype} as query"
        )
    try:
        batch = broadcast(*(t.shape[:-3] for t in (query, key, value)))
    except ValueError:
        return  # said of the tensors themselves
    heads = query.shape[-3] if query.ndim > 2 else 1
    full = (*batch, heads, query.shape[-2], key.shape[-2])
    if not fits(attn_mask.shape, full):
        raise ArgumentError("attn_mask", f"has shape {tuple(attn_mask.shape)}, which does not broadcast to {full}")


def shaped(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with heads as `attention` takes them: PyTorch's broadcast where it groups by itself."""
    query, key, value = admit("query", query), admit("key", key), admit("value", value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.ndim < 2:
            what = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"type {type(tensor).__name__}"
            raise ArgumentError(name, f"has {what}, expected a tensor (…, positions, features)")
    if query.ndim == key.ndim == value.ndim == 2:
        return query, key, value
    query, key, value = (t[None] if t.ndim == 2 else t for t in (query, key, value))
    heads, key_heads, value_heads = (t.shape[-3] for t in (query, key, value))
    if not grouped:
        if len({heads, key_heads, value_heads} - {1}) > 1:
            raise ArgumentError(
                "key, value",
                f"have {key_heads} and {value_heads} heads where query has {heads}, expected equal numbers, or"
                " enable_gqa=True",
            )
        most = max(heads, key_heads, value_heads)
        query = query if heads == most else query.expand(*query.shape[:-3], most, *query.shape[-2:])
    if key_heads != value_heads:  # one key head serves several value heads or the other way round
        most = query.shape[-3]
        if most % key_heads or most % value_heads:
            raise ArgumentError(
                "key, value", f"have {key_heads} and {value_heads} heads, expected numbers that divide query's {most}"
            )
        key, value = (t.repeat_interleave(most // t.shape[-3], dim=-3) for t in (key, value))
    return query, key, value
