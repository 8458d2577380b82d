"""The book's chapter in PyTorch: `ScaledDotProductAttention(d_k)`, weights before output, and True hides.

|                      | here              | `clearhead.attention`             |
| -------------------- | ----------------- | --------------------------------- |
| axes                 | (…, N, d)         | (…, heads, N, d)                  |
| results              | (weights, output) | output; `observe` has the weights |
| scale                | √d, divided by    | 1/√d, multiplied                  |
| True or 1 in a mask  | hides             | may attend                        |
| an array as a mask   | bool              | bool                              |
| a hidden score       | −inf              | takes no part                     |
| a query without keys | 0; the text: NaN  | 0                                 |

`CONVENTION` converts there and back: `CONVENTION.mask_to_clearhead(mask)`, `CONVENTION.ordered(output, weights)`.

>>> import torch
>>> from clearhead.textbook import EXAMPLES
>>> example = EXAMPLES["cat_sat"]
>>> Q, K, V = (torch.tensor(array) for array in (example.q, example.k, example.v))
>>> attention = ScaledDotProductAttention(d_k=4)
>>> weights, output = attention(Q, K, V, mask=torch.triu(torch.ones(5, 5), diagonal=1).bool())
>>> weights.numpy().round(4)
array([[1.    , 0.    , 0.    , 0.    , 0.    ],
       [0.8176, 0.1824, 0.    , 0.    , 0.    ],
       [0.2327, 0.3837, 0.3837, 0.    , 0.    ],
       [0.235 , 0.235 , 0.1425, 0.3875, 0.    ],
       [0.1892, 0.1892, 0.1892, 0.1892, 0.243 ]])

A query whose keys are all hidden: the softmax of a row of −inf is 0/0, NaN, and so are the gradients of everything that
comes before it. Here such a query has weights 0, output 0 and gradients 0, so that padding cannot spoil a batch.

>>> torch.softmax(torch.full((3,), -torch.inf), dim=-1)
tensor([nan, nan, nan])
>>> attention(Q, K, V, mask=torch.ones(5, 5, dtype=torch.bool))[0].sum()
tensor(0., dtype=torch.float64)
"""

from __future__ import annotations

from clearhead.textbook import lesson
from clearhead.textbook.conventions import CONVENTIONS
from clearhead.textbook.faces import divisor

CONVENTION = CONVENTIONS["chapter_torch"]


class ScaledDotProductAttention(lesson.ScaledDotProductAttention):
    """softmax(Q Kᵀ / √d_k) V as a module without parameters; `scale` is the √d_k that scores are divided by.

    >>> import torch
    >>> Q, K, V = torch.randn(3, 2, 8, 5, 64)
    >>> weights, output = ScaledDotProductAttention(64)(Q, K, V)
    >>> weights.shape, output.shape
    (torch.Size([2, 8, 5, 5]), torch.Size([2, 8, 5, 64]))
    """

    convention = CONVENTION

    def __init__(self, d_k: int) -> None:
        super().__init__(d_k)
        self.scale = divisor(d_k)

    def _divisor(self) -> float:
        return self.scale
