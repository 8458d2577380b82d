"""The linear-algebra example: A = softmax(Q Kᵀ / √d_k) and O = A V as plain expressions, 1 in a mask hides.

|                      | here                                | `clearhead.attention`             |
| -------------------- | ----------------------------------- | --------------------------------- |
| axes                 | (n, d)                              | (…, heads, N, d)                  |
| results              | (A, O)                              | output; `observe` has the weights |
| scale                | √d, divided by                      | 1/√d, multiplied                  |
| True or 1 in a mask  | hides                               | may attend                        |
| an array as a mask   | bool, or 1 and 0                    | bool                              |
| a hidden score       | −inf or −1e9                        | takes no part                     |
| a query without keys | 0; the text: NaN, or attends to all | 0                                 |

`CONVENTION` converts masks and results there and back.

>>> import numpy as np
>>> from clearhead.textbook import EXAMPLES
>>> example = EXAMPLES["two_by_three"]
>>> A, O = attend(example.q, example.k, example.v)
>>> A[0].round(3), O[0].round(3)
(array([0.401, 0.401, 0.198]), array([0.599, 0.599]))
>>> example = EXAMPLES["cat_sat"]
>>> A, O = attend(example.q, example.k, example.v, mask=np.triu(np.ones((5, 5)), 1))
>>> A[1:3].round(4)
array([[0.8176, 0.1824, 0.    , 0.    , 0.    ],
       [0.2327, 0.3837, 0.3837, 0.    , 0.    ]])

A hidden score is −inf, or 1e9 is taken from it. Both give exactly 0 where some key is left. A query without keys is NaN
by the first; by the second all its scores are as far down, and it attends as if nothing were hidden: in float64 nearly
so, in float32, whose numbers near 1e9 are 64 apart, to all keys alike. Here it has a row of zeros in A and in O.

>>> from clearhead.textbook import softmax
>>> attend(example.q, example.k, example.v)[0][1].round(4)
array([0.4026, 0.0898, 0.2442, 0.1481, 0.1153])
>>> pushed = example.q @ example.k.T / 2 - 1e9 * np.ones((5, 5))
>>> softmax(pushed)[1].round(4), softmax(pushed.astype(np.float32))[1]
(array([0.4026, 0.0898, 0.2442, 0.1481, 0.1153]), array([0.2, 0.2, 0.2, 0.2, 0.2], dtype=float32))
>>> attend(example.q, example.k, example.v, mask=np.ones((5, 5)))[0].sum()
np.float64(0.0)
"""

from __future__ import annotations

import math

from clearhead.core.arrays import Array
from clearhead.core.mask import Mask
from clearhead.textbook.conventions import CONVENTIONS
from clearhead.textbook.faces import both, side_by_side

CONVENTION = CONVENTIONS["algebra"]


def attend(Q: Array, K: Array, V: Array, mask: Mask | Array | None = None) -> tuple[Array, Array]:
    """(A, O): the weights (n_q, n_k) and the output (n_q, d_v), of Q (n_q, d_k), K (n_k, d_k), V (n_k, d_v).

    A mask is True or 1 where a key is hidden, as `np.triu(np.ones((n, n)), 1)` is.

    >>> import numpy as np
    >>> A, O = attend(np.eye(2), np.eye(2), np.array([[1.0], [3.0]]))
    >>> A.round(4), O.round(4)
    (array([[0.6698, 0.3302],
           [0.3302, 0.6698]]), array([[1.6605],
           [2.3395]]))
    """
    Q, K, V = side_by_side(Q=Q, K=K, V=V)
    return CONVENTION.ordered(*both(Q, K, V, CONVENTION.mask_to_clearhead(mask), 1.0 / math.sqrt(Q.shape[-1])))
