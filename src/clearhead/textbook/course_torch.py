"""The course module in PyTorch: `MultiHeadAttention` as a module that learns, with masks of 1.0 and 0.0.

|                      | here                                   | `clearhead.attention`             |
| -------------------- | -------------------------------------- | --------------------------------- |
| axes                 | (batch, n, d)                          | (…, heads, N, d)                  |
| results              | (output, weights)                      | output; `observe` has the weights |
| scale                | √d, divided by                         | 1/√d, multiplied                  |
| True or 1 in a mask  | may attend                             | may attend                        |
| an array as a mask   | 1.0 and 0.0; a third axis is the batch | bool                              |
| a hidden score       | −inf or −1e9                           | takes no part                     |
| a query without keys | 0; the text: NaN, or attends to all    | 0                                 |

`CONVENTION` converts masks and results there and back. What it makes of a row that is hidden whole, and why, is said in
`clearhead.textbook.course`, which has the same without PyTorch.

>>> import torch
>>> mha = MultiHeadAttention(embed_dim=16, num_heads=4)
>>> x = torch.randn(2, 5, 16)
>>> mha.forward(x, mask=create_causal_mask(5)).shape
torch.Size([2, 5, 16])
>>> output, weights = mha(x, x, x, mask=create_causal_mask(5) * create_padding_mask([5, 3], 5))
>>> output.shape, weights.shape, len(list(mha.parameters()))
(torch.Size([2, 5, 16]), torch.Size([2, 4, 5, 5]), 8)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from clearhead.core.arrays import Array
from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Mask
from clearhead.textbook import course
from clearhead.textbook.conventions import CONVENTIONS
from clearhead.textbook.faces import both, for_pairs, heads_of
from clearhead.textbook.torch_needed import Tensor, from_numpy, nn

CONVENTION = CONVENTIONS["course_torch"]

# takes tensors as it takes arrays, and gradients flow through both of its results
scaled_dot_product_attention = course.scaled_dot_product_attention


class MultiHeadAttention(nn.Module):
    """Attention in heads between `q_proj`, `k_proj`, `v_proj` and `out_proj`, each an `nn.Linear` with bias.

    >>> sorted(MultiHeadAttention(8, 2).state_dict())[:4]
    ['k_proj.bias', 'k_proj.weight', 'out_proj.bias', 'out_proj.weight']
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = heads_of(embed_dim, num_heads)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, mask: Mask | Tensor | None = None
    ) -> Any:
        """`forward(x, mask=None)` is the output; `forward(query, key, value, mask=None)` is (output, weights).

        A second tensor without a third is the mask: no text has a key without a value.
        """
        alone = key is None or value is None
        if key is None or value is None:
            if value is not None or (key is not None and mask is not None):
                raise ArgumentError("key, value", "are not both given, expected x and a mask, or query, key and value")
            key, value, mask = query, query, mask if key is None else key
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.ndim not in (2, 3) or tensor.shape[-1] != self.embed_dim:
                raise ArgumentError(
                    name,
                    f"has shape {tuple(tensor.shape)}, expected (batch, n, {self.embed_dim}) or (n, {self.embed_dim})",
                )
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(-2, -3)  # (batch, heads, n, head_dim)
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        pairs = for_pairs(CONVENTION.mask_to_clearhead(mask), batched=q.ndim - 2)
        heads, weights = both(q, k, v, pairs, 1.0 / math.sqrt(self.head_dim))
        output = self.out_proj(heads.transpose(-2, -3).flatten(-2))  # (batch, n, embed_dim)
        return output if alone else CONVENTION.ordered(output, weights)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"


# the same class, as the course spells it once
MultiheadAttention = MultiHeadAttention


def create_causal_mask(n: int) -> Tensor:
    """(n, n), 1.0 for the keys up to a query's own position and 0.0 after it.

    >>> create_causal_mask(2)
    tensor([[1., 0.],
            [1., 1.]])
    """
    return from_numpy(course.create_causal_mask(n)).float()


def create_padding_mask(lengths: Sequence[int] | Array, max_length: int) -> Tensor:
    """(batch, 1, 1, max_length), 1.0 for the real tokens of each row and 0.0 for padding.

    >>> create_padding_mask([2, 1], 3)[:, 0, 0]
    tensor([[1., 1., 0.],
            [1., 0., 0.]])
    """
    return from_numpy(course.create_padding_mask(lengths, max_length)).float()
