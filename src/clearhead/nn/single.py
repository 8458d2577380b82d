"""ScaledDotProductAttention: the formula as a module, with dropout that follows training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Mask
from clearhead.core.positions import Bias
from clearhead.nn.attend import attend, probability, size


class ScaledDotProductAttention(nn.Module):
    """softmax(q kᵀ / √d_k) v.

    >>> import torch
    >>> attend = ScaledDotProductAttention(64, dropout=0.1)
    >>> q, k, v = torch.randn(3, 2, 8, 5, 64)
    >>> attend(q, k, v).shape
    torch.Size([2, 8, 5, 64])
    """

    def __init__(self, d_k: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.d_k, self.dropout = size("d_k", d_k), probability("dropout", dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        observe: Mapping[str, Any] | None = None,
    ) -> Any:
        """Arguments are those of `clearhead.attention`; with `observe` the result is (output, `Observed`)."""
        if query.shape[-1] != self.d_k:
            raise ArgumentError("query", f"has {query.shape[-1]} features, expected d_k, {self.d_k}")
        dropout = self.dropout if self.training else 0.0
        scale = 1.0 / math.sqrt(self.d_k)
        output, seen = attend(query, key, value, mask=mask, bias=bias, scale=scale, dropout=dropout, observe=observe)
        return output if observe is None else (output, seen)

    def extra_repr(self) -> str:
        return f"{self.d_k}, dropout={self.dropout}" if self.dropout else f"{self.d_k}"
