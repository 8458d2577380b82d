"""The lesson in PyTorch: `ScaledDotProductAttention(d_k)`, output before weights, and what is 0 in a mask is hidden.

|                      | here              | `clearhead.attention`             |
| -------------------- | ----------------- | --------------------------------- |
| axes                 | (…, S, d)         | (…, heads, N, d)                  |
| results              | (output, weights) | output; `observe` has the weights |
| scale                | √d, divided by    | 1/√d, multiplied                  |
| True or 1 in a mask  | may attend        | may attend                        |
| an array as a mask   | bool, or 1 and 0  | bool                              |
| a hidden score       | −inf              | takes no part                     |
| a query without keys | 0; the text: NaN  | 0                                 |

`CONVENTION` converts there and back: `CONVENTION.mask_to_clearhead(mask)`, `CONVENTION.ordered(output, weights)`.

>>> import torch
>>> from clearhead.textbook import EXAMPLES
>>> example = EXAMPLES["cat_sat"]
>>> Q, K, V = (torch.tensor(array) for array in (example.q, example.k, example.v))
>>> attention = ScaledDotProductAttention(d_k=4)
>>> output, weights = attention(Q, K, V, mask=torch.tril(torch.ones(5, 5)))
>>> output.numpy().round(4)
array([[1.    , 0.    , 0.    , 0.    ],
       [0.8176, 0.1824, 0.    , 0.    ],
       [0.2327, 0.3837, 0.3837, 0.    ],
       [0.235 , 0.235 , 0.1425, 0.3875],
       [0.3108, 0.3108, 0.3108, 0.3108]])

A query whose keys are all hidden: the softmax of a row of −inf is 0/0, NaN, and so are the gradients of everything that
comes before it. Here such a query has weights 0, output 0 and gradients 0, so that padding cannot spoil a batch.

>>> attention(Q, K, V, mask=torch.zeros(5, 5))[0].sum()
tensor(0., dtype=torch.float64)
"""

from __future__ import annotations

from clearhead.core.mask import Mask
from clearhead.textbook.conventions import CONVENTIONS, Convention
from clearhead.textbook.faces import both, divisor, of_size, whole
from clearhead.textbook.torch_needed import Tensor, nn

CONVENTION = CONVENTIONS["lesson"]


class ScaledDotProductAttention(nn.Module):
    """softmax(Q Kᵀ / √d_k) V as a module without parameters.

    >>> import torch
    >>> Q, K, V = torch.randn(3, 2, 8, 5, 64)
    >>> output, weights = ScaledDotProductAttention(64)(Q, K, V)
    >>> output.shape, weights.shape
    (torch.Size([2, 8, 5, 64]), torch.Size([2, 8, 5, 5]))
    """

    convention: Convention = CONVENTION

    def __init__(self, d_k: int) -> None:
        super().__init__()
        self.d_k = whole("d_k", d_k, least=1)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Mask | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(output, weights) in the order of the text, and a mask as it means one; it broadcasts to the weights."""
        of_size("Q", Q, self.d_k)
        of_size("K", K, self.d_k)
        allowed = self.convention.mask_to_clearhead(mask)
        scale = self.convention.scale_to_clearhead(self._divisor())
        return self.convention.ordered(*both(Q, K, V, allowed, scale))

    def _divisor(self) -> float:
        return divisor(self.d_k)

    def extra_repr(self) -> str:
        return f"d_k={self.d_k}"
