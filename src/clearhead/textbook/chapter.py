"""The book's chapter in NumPy: `ScaledDotProductAttention(d_k)`, four steps, and an explanation that prints itself.

|         | here              | `clearhead.attention`             |
| ------- | ----------------- | --------------------------------- |
| axes    | (N, d)            | (…, heads, N, d)                  |
| results | (weights, output) | output; `observe` has the weights |
| scale   | √d, divided by    | 1/√d, multiplied                  |

`CONVENTION` converts there and back. The chapter has no masks; arrays with axes in front of (N, d) work here as well.

>>> from clearhead.textbook import EXAMPLES
>>> example = EXAMPLES["cat_sat"]
>>> attention = ScaledDotProductAttention(d_k=4)
>>> weights, output = attention.forward(example.q, example.k, example.v)
>>> weights.round(4)
array([[0.1095, 0.2976, 0.1805, 0.1805, 0.2318],
       [0.4026, 0.0898, 0.2442, 0.1481, 0.1153],
       [0.1519, 0.2505, 0.2505, 0.1519, 0.1951],
       [0.1903, 0.1903, 0.1154, 0.3137, 0.1903],
       [0.1892, 0.1892, 0.1892, 0.1892, 0.243 ]])
>>> output.round(4)
array([[0.2254, 0.4135, 0.2964, 0.2964],
       [0.4602, 0.1475, 0.3018, 0.2058],
       [0.2495, 0.3481, 0.3481, 0.2495],
       [0.2854, 0.2854, 0.2106, 0.4089],
       [0.3108, 0.3108, 0.3108, 0.3108]])
"""

from __future__ import annotations

from collections.abc import Sequence

from clearhead.core.arrays import Array, Library, require_array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.formula import softmax
from clearhead.explain.tokens import names_for, position_of
from clearhead.textbook.conventions import CONVENTIONS
from clearhead.textbook.faces import divisor, numbers, of_size, same_dtype, side_by_side, whole

CONVENTION = CONVENTIONS["chapter"]

# a weight of one is a bar of so many signs
WIDTH = 40


class ScaledDotProductAttention:
    """softmax(Q Kᵀ / √d_k) V, each step a method; `scale` is the √d_k that scores are divided by.

    `forward` goes through the methods, so a subclass that changes one of them, or another `scale`, changes the result:

    >>> from clearhead.textbook import EXAMPLES
    >>> example = EXAMPLES["cat_sat"]
    >>> attention = ScaledDotProductAttention(4)
    >>> attention.scale = 1.0  # the second exercise: no scaling
    >>> attention.forward(example.q, example.k, example.v)[0][0].round(4)
    array([0.0546, 0.4036, 0.1485, 0.1485, 0.2448])
    """

    def __init__(self, d_k: int) -> None:
        self.d_k = whole("d_k", d_k, least=1)
        self.scale = divisor(d_k)

    def _softmax(self, x: Array) -> Array:
        """Each row as weights that sum to one; shifted by its largest number, so that nothing overflows."""
        return softmax(numbers("x", x))[0]

    def compute_scores(self, Q: Array, K: Array) -> Array:
        """The raw products Q Kᵀ.

        >>> import numpy as np
        >>> ScaledDotProductAttention(2).compute_scores(np.array([[3, 1]]), np.array([[3, 1], [1, 4]]))
        array([[10.,  7.]])
        """
        of_size("Q", Q, self.d_k)
        of_size("K", K, self.d_k)
        Q, K = side_by_side(Q=Q, K=K)
        same_dtype(Q=Q, K=K)
        return Q @ Library.of(Q).xp.matrix_transpose(K)  # (…, N, N)

    def scale_scores(self, scores: Array) -> Array:
        """The products divided by `scale`."""
        require_array("scores", scores)
        return scores / self.scale

    def compute_weights(self, scaled_scores: Array) -> Array:
        """The softmax of each row."""
        return self._softmax(scaled_scores)

    def compute_output(self, weights: Array, V: Array) -> Array:
        """The average of the values by the weights."""
        require_array("weights", weights)
        V = numbers("V", V)
        if V.ndim < 2 or V.shape[-2] != weights.shape[-1]:
            raise ArgumentError("V", f"has shape {tuple(V.shape)}, expected {weights.shape[-1]} rows, one for each key")
        return weights @ V  # (…, N, d_v)

    def forward(self, Q: Array, K: Array, V: Array) -> tuple[Array, Array]:
        """(weights, output), in this order."""
        weights = self.compute_weights(self.scale_scores(self.compute_scores(Q, K)))
        return CONVENTION.ordered(self.compute_output(weights, V), weights)

    __call__ = forward

    def explain(self, Q: Array, K: Array, V: Array, tokens: Sequence[str], query_idx: int = 0) -> None:
        """Print every step for one token. Bars are cut off, not rounded: int(40 · weight) signs.

        >>> from clearhead.textbook import EXAMPLES
        >>> example = EXAMPLES["cat_sat"]
        >>> ScaledDotProductAttention(4).explain(example.q, example.k, example.v, example.tokens)
        Attention for 'The' (row 0)
        Q[0] = [1.0, 0.0, 1.0, 0.0]
        <BLANKLINE>
        Raw products Q[0] · K[j]
          The  0.0000
          cat  2.0000
          sat  1.0000
          on   1.0000
          mat  1.5000
        <BLANKLINE>
        Scaled scores: / sqrt(4) = / 2.0
          The  0.0000
          cat  1.0000
          sat  0.5000
          on   0.5000
          mat  0.7500
        <BLANKLINE>
        Weights
          The  0.1095 |####|
          cat  0.2976 |###########|
          sat  0.1805 |#######|
          on   0.1805 |#######|
          mat  0.2318 |#########|
        <BLANKLINE>
        Output = [0.2254, 0.4135, 0.2964, 0.2964]
        Sum of weights = 1.000000
        """
        for name, array in (("Q", Q), ("K", K), ("V", V)):
            require_array(name, array)
            if array.ndim != 2:
                raise ArgumentError(name, f"has shape {tuple(array.shape)}, expected (positions, features) of one head")
        names = names_for("tokens", tokens, K.shape[0], "keys")
        rows = names if Q.shape[0] == K.shape[0] else tuple(str(i) for i in range(Q.shape[0]))
        at = position_of("query_idx", query_idx, rows)
        raw = self.compute_scores(Q, K)
        scaled = self.scale_scores(raw)
        weights = self.compute_weights(scaled)
        output = self.compute_output(weights, V)
        query, products, scores, row, result = (
            to_numpy(array)[at].tolist() for array in (numbers("Q", Q), raw, scaled, weights, output)
        )
        width = max(map(len, names))
        print(f"Attention for {rows[at]!r} (row {at})")
        print(f"Q[{at}] = {query}")
        print(f"\nRaw products Q[{at}] · K[j]")
        _print_column(names, products, width)
        print(f"\nScaled scores: / sqrt({self.d_k}) = / {round(self.scale, 4)}")
        _print_column(names, scores, width)
        print("\nWeights")
        for name, weight in zip(names, row, strict=True):
            print(f"  {name:<{width}}  {weight:.4f} |{'#' * int(WIDTH * weight)}|")
        print(f"\nOutput = [{', '.join(f'{number:.4f}' for number in result)}]")
        print(f"Sum of weights = {sum(row):.6f}")


def _print_column(names: Sequence[str], column: Sequence[float], width: int) -> None:
    figures = [f"{number:.4f}" for number in column]
    wide = max(map(len, figures))
    for name, figure in zip(names, figures, strict=True):
        print(f"  {name:<{width}}  {figure:>{wide}}")
