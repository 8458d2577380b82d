"""Additive (Bahdanau) attention as a PyTorch module: W, U and v are learned."""

from __future__ import annotations

from clearhead.core.mask import Mask
from clearhead.textbook.additive import additive_attention
from clearhead.textbook.faces import whole
from clearhead.textbook.torch_needed import Tensor, nn


class AdditiveAttention(nn.Module):
    """softmax(v · tanh(W q + U k)) V, the attention of Bahdanau et al. 2015; True in a mask may attend.

    >>> import torch
    >>> attend = AdditiveAttention(query_dim=3, key_dim=4, hidden=6)
    >>> output, weights = attend(torch.randn(2, 5, 3), torch.randn(2, 7, 4), torch.randn(2, 7, 9))
    >>> output.shape, weights.shape, sorted(attend.state_dict())
    (torch.Size([2, 5, 9]), torch.Size([2, 5, 7]), ['U.weight', 'W.weight', 'v.weight'])
    """

    def __init__(self, query_dim: int, key_dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = whole("hidden", hidden, least=1)
        self.W = nn.Linear(whole("query_dim", query_dim, least=1), hidden, bias=False)
        self.U = nn.Linear(whole("key_dim", key_dim, least=1), hidden, bias=False)
        self.v = nn.Linear(hidden, 1, bias=False)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(output, weights) for query (…, T, query_dim), key (…, S, key_dim) and value (…, S, any)."""
        return additive_attention(query, key, value, self.W.weight, self.U.weight, self.v.weight[0], mask)
