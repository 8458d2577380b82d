"""The tutorial in PyTorch: as the lesson, output before weights, but a hidden score becomes −1e9.

|                      | here                                | `clearhead.attention`             |
| -------------------- | ----------------------------------- | --------------------------------- |
| axes                 | (…, S, d)                           | (…, heads, N, d)                  |
| results              | (output, weights)                   | output; `observe` has the weights |
| scale                | √d, divided by                      | 1/√d, multiplied                  |
| True or 1 in a mask  | may attend                          | may attend                        |
| an array as a mask   | bool, or 1 and 0                    | bool                              |
| a hidden score       | −1e9                                | takes no part                     |
| a query without keys | 0; the text: the mean of all values | 0                                 |

`CONVENTION` converts there and back: `CONVENTION.mask_to_clearhead(mask)`, `CONVENTION.ordered(output, weights)`.

>>> import torch
>>> from clearhead.textbook import EXAMPLES
>>> example = EXAMPLES["it_animal"]
>>> Q, K, V = (torch.tensor(array) for array in (example.q, example.k, example.v))
>>> attention = ScaledDotProductAttention(d_k=2)
>>> output, weights = attention(Q, K, V)
>>> output.numpy().round(2), weights.numpy().round(2)
(array([[1.78, 1.37]]), array([[0.87, 0.1 , 0.03]]))

exp(−1e9) is exactly 0, so −1e9 and −inf give the same weights wherever some key is left. A query whose keys are all
hidden has only scores of −1e9, which are equal: it attends to all of them alike, padding included. Here it has weights
0, output 0 and gradients 0, as everywhere in clearhead: a query that may attend to nothing learns nothing.

>>> torch.softmax(torch.full((4,), -1e9), dim=-1)
tensor([0.2500, 0.2500, 0.2500, 0.2500])
>>> attention(Q, K, V, mask=torch.zeros(1, 3))[1]
tensor([[0., 0., 0.]], dtype=torch.float64)

In half precision −1e9 is no number: float16 ends at 65,504, and PyTorch refuses to write it. Here nothing is written.
"""

from __future__ import annotations

from clearhead.textbook import lesson
from clearhead.textbook.conventions import CONVENTIONS

CONVENTION = CONVENTIONS["tutorial"]


class ScaledDotProductAttention(lesson.ScaledDotProductAttention):
    """softmax(Q Kᵀ / √d_k) V as a module without parameters.

    >>> import torch
    >>> Q = torch.randn(2, 8, 5, 64)
    >>> output, weights = ScaledDotProductAttention(64)(Q, Q, Q, mask=torch.tril(torch.ones(5, 5)))
    >>> output.shape, weights.shape
    (torch.Size([2, 8, 5, 64]), torch.Size([2, 8, 5, 5]))
    """

    convention = CONVENTION
