"""ScaledDotProductAttention: the formula as a module, with dropout that follows training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Never

from torch import Tensor, nn

from clearhead.core.arrays import is_array
from clearhead.core.errors import ArgumentError
from clearhead.core.foreign import closed, refuse_others
from clearhead.core.mask import Mask
from clearhead.core.positions import Bias
from clearhead.nn.attend import FORWARD, attend, probability, size, what_to_observe
from clearhead.nn.places import of_rows, without_heads

# what the layers with projections answer otherwise: this one has neither causal= nor a cache
HERE = {name: words for name, words in FORWARD.items() if not name.startswith("past_")} | {
    "is_causal": "give mask=causal()",
    "causal": "give mask=causal()",
    "key_padding_mask": "give mask=padding(~key_padding_mask), for True hides there",
}


class ScaledDotProductAttention(nn.Module):
    """softmax(q kᵀ / √d_k) v.

    >>> import torch
    >>> attend = ScaledDotProductAttention(64, dropout=0.1)
    >>> q, k, v = torch.randn(3, 2, 8, 5, 64)
    >>> attend(q, k, v).shape
    torch.Size([2, 8, 5, 64])
    >>> output, weights = attend(q, k, v, return_weights=True)
    >>> weights.shape
    torch.Size([2, 8, 5, 5])

    **The result is one tensor unless `return_weights` or `observe` asks for a pair**: with neither,
    `output, weights = …` takes a batch of two apart.
    """

    def __init__(self, d_k: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.d_k, self.dropout = size("d_k", d_k), probability("dropout", dropout)

    @closed
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        observe: Mapping[str, Any] | None = None,
        return_weights: bool = False,
        **others: Never,
    ) -> Any:
        """Arguments are those of `clearhead.attention`; with `observe` the result is (output, `Observed`).

        With `return_weights` it is (output, weights), the weights (…, T, S) before dropout and without gradients; not
        in what `torch.compile` or `torch.export` trace. An array (batch, S) is `padding(array)`, never a mask itself.
        """
        if others:
            refuse_others("ScaledDotProductAttention.forward", others, HERE)
        wanted = what_to_observe(observe, return_weights)
        if query.shape[-1] != self.d_k:
            raise ArgumentError("query", f"has {query.shape[-1]} features, expected d_k, {self.d_k}")
        dropout = self.dropout if self.training else 0.0
        scale = 1.0 / math.sqrt(self.d_k)
        if mask is not None and not isinstance(mask, Mask) and is_array(mask) and query.ndim > 2:
            heads = query.shape[-3] if query.ndim > 3 else 1
            mask = of_rows(mask, query.shape[0], heads, query.shape[-2], key.shape[-2])
        if isinstance(mask, Mask) and query.ndim == 3:
            mask = without_heads(mask)
        output, seen = attend(query, key, value, mask=mask, bias=bias, scale=scale, dropout=dropout, observe=wanted)
        if return_weights and seen is not None:
            return output, seen.weights
        return output if observe is None else (output, seen)

    def extra_repr(self) -> str:
        return f"{self.d_k}, dropout={self.dropout}" if self.dropout else f"{self.d_k}"
