"""The course module: attention in loops, masks of 1.0 and 0.0, and `MultiHeadAttention` with four projections.

|                      | here                                   | `clearhead.attention`             |
| -------------------- | -------------------------------------- | --------------------------------- |
| axes                 | (batch, n, d)                          | (…, heads, N, d)                  |
| results              | (output, weights)                      | output; `observe` has the weights |
| scale                | √d, divided by                         | 1/√d, multiplied                  |
| True or 1 in a mask  | may attend                             | may attend                        |
| an array as a mask   | 1.0 and 0.0; a third axis is the batch | bool                              |
| a hidden score       | −inf or −1e9                           | takes no part                     |
| a query without keys | 0; the text: NaN, or attends to all    | 0                                 |

`CONVENTION` converts masks and results there and back. The course's masks multiply: `create_causal_mask(n) *
create_padding_mask(lengths, n)` lets through what both let through.

>>> import numpy as np
>>> from clearhead.textbook import EXAMPLES
>>> example = EXAMPLES["cat_sat"]
>>> Q, K, V = (array[None] for array in (example.q, example.k, example.v))
>>> output, weights = scaled_dot_product_attention(Q, K, V, mask=create_causal_mask(5))
>>> weights[0].round(4)
array([[1.    , 0.    , 0.    , 0.    , 0.    ],
       [0.8176, 0.1824, 0.    , 0.    , 0.    ],
       [0.2327, 0.3837, 0.3837, 0.    , 0.    ],
       [0.235 , 0.235 , 0.1425, 0.3875, 0.    ],
       [0.1892, 0.1892, 0.1892, 0.1892, 0.243 ]])

A row that is hidden whole: with −inf its softmax is NaN. With −1e9 added, the scores keep their differences, or some of
them, and the query attends as if nothing were hidden. Here it has weights 0 and output 0.

>>> scores = np.array([1.0, 2.0, 3.0])
>>> with np.errstate(invalid="ignore"):
...     print(np.exp(scores - np.inf) / np.exp(scores - np.inf).sum())
[nan nan nan]
>>> hidden = scores - 1e9
>>> (np.exp(hidden - hidden.max()) / np.exp(hidden - hidden.max()).sum()).round(4)
array([0.09  , 0.2447, 0.6652])
>>> scaled_dot_product_attention(Q, K, V, mask=np.zeros((1, 5, 5)))[1].sum()
np.float64(0.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, Library, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Mask
from clearhead.core.problem import pose
from clearhead.measure.plans import plan
from clearhead.textbook.conventions import CONVENTIONS
from clearhead.textbook.faces import (
    allowed,
    both,
    embedded,
    for_pairs,
    heads_of,
    like_it,
    same_dtype,
    side_by_side,
    whole,
)
from clearhead.textbook.names import create_causal_mask as causal_pairs
from clearhead.textbook.names import create_padding_mask as real_keys

CONVENTION = CONVENTIONS["course"]


def scaled_dot_product_attention(Q: Array, K: Array, V: Array, mask: Mask | Array | None = None) -> tuple[Array, Array]:
    """(output, weights) of Q, K, V (batch, n, d); a mask is 1.0 where a query may attend.

    Masks are (n, n), (batch, n, n) or (batch, 1, 1, n), and products of them.

    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = rng.standard_normal((3, 2, 4, 8))
    >>> mask = create_causal_mask(4) * create_padding_mask([4, 2], 4)
    >>> output, weights = scaled_dot_product_attention(Q, K, V, mask)
    >>> output.shape, (weights[1] > 0).astype(int).tolist()
    ((2, 4, 8), [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]])
    """
    Q, K, V = side_by_side(Q=Q, K=K, V=V)
    pairs = for_pairs(CONVENTION.mask_to_clearhead(mask), batched=Q.ndim - 2)
    return CONVENTION.ordered(*both(Q, K, V, pairs, 1.0 / math.sqrt(Q.shape[-1])))


def scaled_dot_product_attention_loops(
    Q: Array, K: Array, V: Array, mask: Mask | Array | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The same in explicit loops over batch, query, key and feature: slow, and every multiplication can be seen.

    >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 4, 8))
    >>> fast, slow = scaled_dot_product_attention(Q, K, V), scaled_dot_product_attention_loops(Q, K, V)
    >>> bool(np.allclose(fast[0], slow[0], rtol=0, atol=1e-15)), slow[1].shape
    (True, (2, 4, 4))
    """
    Q, K, V = (to_numpy(array) for array in side_by_side(Q=Q, K=K, V=V))
    if Q.ndim != 3:
        raise ArgumentError("Q", f"has shape {Q.shape}, expected (batch, n, d)")
    batch, queries, features = Q.shape
    keys, width = V.shape[-2:]
    pairs = for_pairs(CONVENTION.mask_to_clearhead(mask), batched=1)
    pose(Q, K, V)  # refuses in words whatever does not fit
    may = np.full((batch, queries, keys), True) if pairs is None else allowed(pairs, Q, (batch, queries, keys))
    output, weights = np.zeros((batch, queries, width)), np.zeros((batch, queries, keys))
    for b in range(batch):
        for i in range(queries):
            scores = [-math.inf] * keys
            for j in range(keys):
                if may[b, i, j]:
                    dot = 0.0
                    for c in range(features):
                        dot += float(Q[b, i, c]) * float(K[b, j, c])
                    scores[j] = dot / math.sqrt(features)
            peak = max(scores, default=-math.inf)
            if peak == -math.inf:  # nothing may be attended to: zeros stay
                continue
            exponentials = [math.exp(score - peak) for score in scores]
            total = sum(exponentials)
            for j in range(keys):
                weights[b, i, j] = exponentials[j] / total
                if may[b, i, j]:  # padding may hold anything, and 0 · NaN is NaN
                    for c in range(width):
                        output[b, i, c] += weights[b, i, j] * float(V[b, j, c])
    return output.astype(Q.dtype), weights.astype(Q.dtype)


class Linear:
    """x Wᵀ + b: `weight` is (out, in) and `bias` (out,), as PyTorch has them.

    >>> import numpy as np
    >>> Linear(np.array([[1.0, 2.0]]), np.array([0.5]))(np.array([[3.0, 4.0]])).tolist()
    [[11.5]]
    """

    def __init__(self, weight: Array, bias: Array) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Array) -> Array:
        return x @ like_it(self.weight, x).T + like_it(self.bias, x)

    def parameters(self) -> list[Array]:
        """The weight and the bias."""
        return [self.weight, self.bias]


class MultiHeadAttention:
    """Attention in heads between `q_proj`, `k_proj`, `v_proj` and `out_proj`, each a weight and a bias.

    One array in gives the output; query, key and value give (output, weights (batch, heads, n, n)):

    >>> mha = MultiHeadAttention(embed_dim=16, num_heads=4)
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 16))
    >>> mha.forward(x, mask=create_causal_mask(5)).shape
    (2, 5, 16)
    >>> output, weights = mha(x, x, x, mask=create_padding_mask([5, 3], 5))
    >>> output.shape, weights.shape, mha.head_dim, len(mha.parameters())
    ((2, 5, 16), (2, 4, 5, 5), 4, 8)

    Weights are Xavier-uniform by `seed`, biases 0, NumPy float64; they follow the input into its library and dtype.
    `clearhead.textbook.course_torch` has the same as a PyTorch module, which learns.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, seed: int = 0) -> None:
        self.embed_dim, self.num_heads, self.head_dim = heads_of(embed_dim, num_heads)
        bound = math.sqrt(6.0 / (2 * self.embed_dim))
        rng = np.random.default_rng(whole("seed", seed))
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            Linear(rng.uniform(-bound, bound, (self.embed_dim, self.embed_dim)), np.zeros(self.embed_dim))
            for _ in range(4)
        )

    def parameters(self) -> list[Array]:
        """Eight arrays: the weight and bias of each projection."""
        layers = (self.q_proj, self.k_proj, self.v_proj, self.out_proj)
        return [parameter for layer in layers for parameter in layer.parameters()]

    def forward(self, query: Array, key: Array = None, value: Array = None, mask: Mask | Array | None = None) -> Any:
        """`forward(x, mask=None)` is the output; `forward(query, key, value, mask=None)` is (output, weights).

        A second array without a third is the mask: no text has a key without a value.
        """
        alone = value is None
        if alone:
            if key is not None and mask is not None:
                raise ArgumentError("value", "is not given, expected one where there are query, key and mask")
            query, key, value, mask = query, query, query, mask if key is None else key
        self._check(query, key, value)
        q, k, v = self._heads(self.q_proj(query)), self._heads(self.k_proj(key)), self._heads(self.v_proj(value))
        pairs = for_pairs(CONVENTION.mask_to_clearhead(mask), batched=q.ndim - 2)
        heads, weights = both(q, k, v, pairs, 1.0 / math.sqrt(self.head_dim))
        xp = Library.of(heads).xp
        merged = xp.moveaxis(heads, -3, -2)  # (batch, n, heads, head_dim)
        output = self.out_proj(xp.reshape(merged, (*merged.shape[:-2], self.embed_dim)))
        return output if alone else CONVENTION.ordered(output, weights)

    __call__ = forward

    def _heads(self, x: Array) -> Array:
        """(…, n, embed_dim) → (…, heads, n, head_dim)."""
        xp = Library.of(x).xp
        return xp.moveaxis(xp.reshape(x, (*x.shape[:-1], self.num_heads, self.head_dim)), -2, -3)

    def _check(self, query: Array, key: Array, value: Array) -> None:
        for name, array in (("query", query), ("key", key), ("value", value)):
            embedded(name, array, self.embed_dim, f"(batch, n, {self.embed_dim}) or (n, {self.embed_dim})")
        same_dtype(query=query, key=key, value=value)


# the same class, as the course spells it once
MultiheadAttention = MultiHeadAttention


def create_causal_mask(n: int) -> np.ndarray:
    """(n, n), 1.0 for the keys up to a query's own position and 0.0 after it.

    >>> create_causal_mask(3)
    array([[1., 0., 0.],
           [1., 1., 0.],
           [1., 1., 1.]])
    """
    return CONVENTION.mask_from_clearhead(causal_pairs(n))


def create_padding_mask(lengths: Sequence[int] | Array, max_length: int) -> np.ndarray:
    """(batch, 1, 1, max_length), 1.0 for the real tokens of each row and 0.0 for padding.

    >>> create_padding_mask([3, 1], 4)[:, 0, 0]
    array([[1., 1., 1., 0.],
           [1., 0., 0., 0.]])
    """
    return CONVENTION.mask_from_clearhead(real_keys(lengths, max_length))


def memory_table(lengths: Sequence[int] = (16, 32, 64, 128, 256)) -> str:
    """What the n × n weights of one head take in float32, and how that grows, as a table.

    >>> print(memory_table())
      n  entries   KB  growth
     16      256    1       -
     32     1024    4    4.0x
     64     4096   16    4.0x
    128    16384   64    4.0x
    256    65536  256    4.0x
    """
    rows, before = [("n", "entries", "KB", "growth")], 0
    for n in lengths:
        # no memory behind it: a plan reads sizes only
        x = np.broadcast_to(np.float32(0.0), (whole("lengths", n, least=1), 64))
        planned = plan(x, x, x)
        growth = f"{planned.matrix_bytes / before:.1f}x" if before else "-"
        rows.append((str(n), str(planned.all_pairs), f"{planned.matrix_bytes / 1024:g}", growth))
        before = planned.matrix_bytes
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
