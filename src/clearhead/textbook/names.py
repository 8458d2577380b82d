"""The names that courses ask for with clearhead's own meaning: True may attend, output before weights.

A text's code that means something else by them runs as written with the module of that text: `chapter.py`,
`chapter_torch.py`, `lesson.py`, `tutorial.py`, `course.py`, `course_torch.py`, `algebra.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from clearhead.calls import observe
from clearhead.core.arrays import Array, Library, require_array, require_floating, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.formula import attention_loops as attention_loops
from clearhead.core.formula import blank, softmax
from clearhead.core.grid import whole_numbers
from clearhead.core.mask import Mask
from clearhead.core.masks import causal
from clearhead.core.masks import lengths as first_keys
from clearhead.core.problem import pose
from clearhead.explain.tokens import bar, position_of
from clearhead.textbook.faces import allowed, embedded, heads_of, like_it, same_dtype, whole


class ScaledDotProductAttention:
    """softmax(q kᵀ / √d_k) v in four steps, each a method: scores, scaled scores, weights, output.

    >>> from clearhead.textbook import EXAMPLES
    >>> example = EXAMPLES["cat_sat"]
    >>> attend = ScaledDotProductAttention(d_k=4)
    >>> raw = attend.compute_scores(example.q, example.k)
    >>> scaled = attend.scale_scores(raw)
    >>> weights = attend.compute_weights(scaled)
    >>> raw[1].tolist(), scaled[1].tolist(), weights[1].round(4).tolist()
    ([3.0, 0.0, 2.0, 1.0, 0.5], [1.5, 0.0, 1.0, 0.5, 0.25], [0.4026, 0.0898, 0.2442, 0.1481, 0.1153])
    >>> attend.compute_output(weights, example.v)[1].round(4).tolist()
    [0.4602, 0.1475, 0.3018, 0.2058]

    q is (…, T, d_k), k (…, S, d_k), v (…, S, d_v), arrays of any library. A mask is a boolean array that broadcasts to
    the scores, **True where a query may attend**, or a mask value such as `clearhead.causal()`.
    """

    def __init__(self, d_k: int) -> None:
        self.d_k = whole("d_k", d_k, least=1)
        self.scale = 1.0 / math.sqrt(self.d_k)

    def compute_scores(self, q: Array, k: Array) -> Array:
        """Step 1, the raw scores q kᵀ: how well each query matches each key.

        >>> ScaledDotProductAttention(2).compute_scores(np.array([[3.0, 1.0]]), np.array([[3.0, 1.0], [1.0, 4.0]]))
        array([[10.,  7.]])
        """
        for name, array in (("q", q), ("k", k)):
            require_array(name, array)
            if array.ndim < 2 or array.shape[-1] != self.d_k:
                raise ArgumentError(name, f"has shape {tuple(array.shape)}, expected (…, positions, d_k = {self.d_k})")
        return q @ Library.of(q).xp.matrix_transpose(k)  # (…, T, S)

    def scale_scores(self, scores: Array) -> Array:
        """Step 2, the scores divided by √d_k, so that their spread does not grow with the number of features.

        >>> ScaledDotProductAttention(4).scale_scores(np.array([[3.0, 0.0]]))
        array([[1.5, 0. ]])
        """
        require_array("scores", scores)
        return self.scale * scores

    def compute_weights(self, scaled: Array, mask: Mask | Array | None = None) -> Array:
        """Step 3, the softmax of each row: weights that sum to one, and 0 where the mask does not let a query attend.

        >>> ScaledDotProductAttention(4).compute_weights(np.zeros((2, 2)), mask=create_causal_mask(2))
        array([[1. , 0. ],
               [0.5, 0.5]])
        """
        require_array("scaled", scaled)
        require_floating("scaled", scaled)
        if mask is not None:
            scaled = Library.of(scaled).xp.where(allowed(mask, scaled, tuple(scaled.shape)), scaled, -math.inf)
        return softmax(scaled)[0]

    def compute_output(self, weights: Array, v: Array) -> Array:
        """Step 4, the average of the values by those weights.

        >>> ScaledDotProductAttention(4).compute_output(np.array([[0.5, 0.5]]), np.array([[1.0], [3.0]]))
        array([[2.]])
        """
        require_array("weights", weights)
        require_array("v", v)
        if v.ndim < 2 or v.shape[-2] != weights.shape[-1]:
            raise ArgumentError("v", f"has shape {tuple(v.shape)}, expected {weights.shape[-1]} positions as the keys")
        return weights @ v  # (…, T, d_v)

    def forward(self, q: Array, k: Array, v: Array, mask: Mask | Array | None = None) -> tuple[Array, Array]:
        """All four steps: the output (…, T, d_v) and the weights (…, T, S).

        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
        >>> output, weights = ScaledDotProductAttention(4).forward(q, k, v, mask=create_causal_mask(5))
        >>> output.shape, weights.shape
        ((2, 5, 4), (2, 5, 5))

        float16 and bfloat16 are summed in float32, and so are their weights; the output has the dtype of q.
        """
        problem = pose(q, k, v, mask=mask)  # refuses in words whatever does not fit
        xp, dtype = problem.library.xp, q.dtype
        q, k, v = map(problem.library.computing, (q, k, v))
        if problem.group > 1:  # query heads that share a key head
            k, v = (xp.repeat(array, problem.group, axis=-3) for array in (k, v))
        if mask is not None:
            mask = allowed(mask, q, problem.grid.shape[1:] if problem.headless else problem.grid.shape)
            # padding may hold anything, NaN too, and 0 · NaN is NaN
            q, k, v = blank(mask, q, k, v)
        weights = self.compute_weights(self.scale_scores(self.compute_scores(q, k)), mask)
        return xp.astype(self.compute_output(weights, v), dtype), weights

    __call__ = forward

    def explain(
        self,
        q: Array,
        k: Array,
        v: Array,
        token: int | str,
        tokens: Sequence[str] | None = None,
        mask: Mask | Array | None = None,
    ) -> str:
        """The four steps for one token, a position or a name of `tokens`, as plain text.

        >>> from clearhead.textbook import EXAMPLES
        >>> example = EXAMPLES["cat_sat"]
        >>> attend = ScaledDotProductAttention(d_k=4)
        >>> print(attend.explain(example.q, example.k, example.v, "cat", example.tokens))
        Attention of "cat" (query 1) over 5 keys, d_k = 4
        <BLANKLINE>
        1. Raw scores: q · k for each key
           The  3.0000
           cat  0.0000
           sat  2.0000
           on   1.0000
           mat  0.5000
        <BLANKLINE>
        2. Scaled scores: each divided by √d_k = 2.0000
           The  1.5000
           cat  0.0000
           sat  1.0000
           on   0.5000
           mat  0.2500
        <BLANKLINE>
        3. Weights: the softmax of the scaled scores; they sum to 1.0000
           The  0.4026  ████████████████
           cat  0.0898  ████
           sat  0.2442  ██████████
           on   0.1481  ██████
           mat  0.1153  █████
        <BLANKLINE>
        4. Output: the values v, averaged by the weights
           [0.4602, 0.1475, 0.3018, 0.2058]

        It is for one head: q, k and v have two axes. `tokens` names the keys, and the queries where they are as many.
        """
        for name, array in (("q", q), ("k", k), ("v", v)):
            require_array(name, array)
            if array.ndim != 2:
                raise ArgumentError(name, f"has shape {tuple(array.shape)}, expected (positions, features) of one head")
        output, weights = self.forward(q, k, v, mask)
        queries, keys = weights.shape
        names = [str(i) for i in range(keys)] if tokens is None else [str(name) for name in tokens]
        if len(names) != keys:
            raise ArgumentError("tokens", f"has {len(names)} names, expected one for each of {keys} keys")
        at = position_of("token", token, names if queries == keys else [str(i) for i in range(queries)])
        label = f'"{names[at]}" (query {at})' if tokens is not None and queries == keys else f"query {at}"
        raw = self.compute_scores(q, k)
        scores, scaled, row, result = (
            to_numpy(array)[at].tolist() for array in (raw, self.scale_scores(raw), weights, output)
        )
        seen = [True] * keys if mask is None else to_numpy(allowed(mask, q, (queries, keys)))[at].tolist()
        masked = ["" if may else "  masked" for may in seen]
        bars = [f"  {bar(weight)}".rstrip() for weight in row]
        return "\n".join(
            [
                f"Attention of {label} over {keys} keys, d_k = {self.d_k}",
                *_step("1. Raw scores: q · k for each key", names, scores),
                *_step(f"2. Scaled scores: each divided by √d_k = {math.sqrt(self.d_k):.4f}", names, scaled, masked),
                *_step(f"3. Weights: the softmax of the scaled scores; they sum to {sum(row):.4f}", names, row, bars),
                "",
                "4. Output: the values v, averaged by the weights",
                f"   [{', '.join(f'{number:.4f}' for number in result)}]",
            ]
        )


def scaled_dot_product_attention(q: Array, k: Array, v: Array, mask: Mask | Array | None = None) -> tuple[Array, Array]:
    """softmax(q kᵀ / √d_k) v, as (output, weights); the arguments are those of `clearhead.observe`.

    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    >>> output, weights = scaled_dot_product_attention(q, k, v, mask=create_causal_mask(5))
    >>> output.shape, weights.shape
    ((2, 5, 4), (2, 5, 5))
    """
    seen = observe(q, k, v, mask=mask, weights=True)
    return seen.output, seen.weights


class MultiHeadAttention:
    """Several attentions side by side, each on its own share of the features, between learned projections.

        q, k, v = split_heads(query w_q), split_heads(key w_k), split_heads(value w_v)
        output  = merge_heads(softmax(q kᵀ / √head_dim) v) w_o

    >>> attend = MultiHeadAttention(embed_dim=16, num_heads=4)
    >>> output, weights = attend(np.random.default_rng(1).standard_normal((3, 5, 16)))
    >>> output.shape, weights.shape
    ((3, 5, 16), (3, 4, 5, 5))

    The projections w_q, w_k, w_v, w_o are (embed_dim, embed_dim), without bias, Xavier-uniform from a generator seeded
    by `seed`. They are NumPy float64 and follow the input into its library, dtype and device when called; with `like`,
    they are arrays as that one from the start.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, seed: int = 0, like: Array | None = None) -> None:
        self.embed_dim, self.num_heads, self.head_dim = heads_of(embed_dim, num_heads)
        # Xavier: variance 2 / (rows + columns), which for a uniform draw is this bound
        bound = math.sqrt(6.0 / (2 * self.embed_dim))
        drawn = np.random.default_rng(whole("seed", seed)).uniform(-bound, bound, (4, self.embed_dim, self.embed_dim))
        if like is not None:
            require_array("like", like)
            require_floating("like", like)
        self.w_q, self.w_k, self.w_v, self.w_o = (w if like is None else like_it(w, like) for w in drawn)

    def split_heads(self, x: Array) -> Array:
        """(…, T, embed_dim) → (…, heads, T, head_dim): head h has the features from h · head_dim on.

        >>> MultiHeadAttention(6, 2).split_heads(np.array([[0, 1, 2, 3, 4, 5]])).tolist()
        [[[0, 1, 2]], [[3, 4, 5]]]
        """
        xp = Library.of(x).xp
        return xp.moveaxis(xp.reshape(x, (*x.shape[:-1], self.num_heads, self.head_dim)), -2, -3)

    def merge_heads(self, x: Array) -> Array:
        """(…, heads, T, head_dim) → (…, T, embed_dim): the way back from `split_heads`.

        >>> MultiHeadAttention(6, 2).merge_heads(np.array([[[0, 1, 2]], [[3, 4, 5]]])).tolist()
        [[0, 1, 2, 3, 4, 5]]
        """
        xp = Library.of(x).xp
        return xp.reshape(xp.moveaxis(x, -3, -2), (*x.shape[:-3], x.shape[-2], self.embed_dim))

    def forward(
        self, query: Array, key: Array | None = None, value: Array | None = None, mask: Mask | Array | None = None
    ) -> tuple[Array, Array]:
        """The output (…, T, embed_dim) and the weights (…, heads, T, S), for inputs (T, E) or (batch, T, E).

        >>> decoder, encoder = np.zeros((5, 16)), np.zeros((7, 16))
        >>> output, weights = MultiHeadAttention(16, 4).forward(decoder, encoder)
        >>> output.shape, weights.shape
        ((5, 16), (4, 5, 7))

        Without a key it is self-attention; without a value, the key is the value. A mask broadcasts to
        (…, heads, T, S) and is True where a query may attend.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check(query, key, value)
        library, dtype = Library.of(query), query.dtype
        query, key, value = map(library.computing, (query, key, value))
        w_q, w_k, w_v, w_o = (like_it(w, query) for w in (self.w_q, self.w_k, self.w_v, self.w_o))
        q = self.split_heads(query @ w_q)  # (…, heads, T, head_dim)
        k = self.split_heads(key @ w_k)  # (…, heads, S, head_dim)
        v = self.split_heads(value @ w_v)  # (…, heads, S, head_dim)
        heads, weights = scaled_dot_product_attention(q, k, v, mask)
        return library.xp.astype(self.merge_heads(heads) @ w_o, dtype), weights

    __call__ = forward

    def _check(self, query: Array, key: Array, value: Array) -> None:
        for name, array in (("query", query), ("key", key), ("value", value)):
            size = self.embed_dim
            embedded(name, array, size, f"(positions, {size}) or (batch, positions, {size})")
            if array.shape[:-2] != query.shape[:-2]:
                raise ArgumentError(
                    name, f"has shape {tuple(array.shape)}, expected the batch of query, {tuple(query.shape[:-2])}"
                )
            same_dtype(**{"query": query, name: array})
        if value.shape[-2] != key.shape[-2]:
            raise ArgumentError("value", f"has {value.shape[-2]} positions, expected {key.shape[-2]} as key has")


def create_causal_mask(n: int) -> np.ndarray:
    """A boolean (n, n) array, True where a query may attend: the keys up to its own position.

    >>> create_causal_mask(3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    return np.array(causal().dense(whole("n", n))[0])


def create_padding_mask(lengths: Sequence[int] | Array, max_length: int) -> np.ndarray:
    """A boolean (batch, 1, 1, max_length) array, True for the real tokens of each row: the first `lengths[row]`.

    >>> create_padding_mask([3, 1], 4)[:, 0, 0].astype(int)
    array([[1, 1, 1, 0],
           [1, 0, 0, 0]])
    """
    size, counts = whole("max_length", max_length), whole_numbers("lengths", lengths)
    if counts.ndim != 1:
        raise ArgumentError("lengths", f"has shape {tuple(counts.shape)}, expected one number for each batch row")
    outside = [count for count in counts.tolist() if not 0 <= count <= size]
    if outside:
        raise ArgumentError("lengths", f"has {outside[0]}, expected 0 to max_length {size}")
    return np.array(first_keys(counts).dense(1, size, batch=(len(counts),)))


def _step(heading: str, names: list[str], numbers: list[float], notes: list[str] | None = None) -> list[str]:
    width = max(map(len, names), default=0)
    figures = [f"{number:.4f}" for number in numbers]
    column = max(map(len, figures), default=0)
    notes = [""] * len(names) if notes is None else notes
    lines = zip(names, figures, notes, strict=True)
    return ["", heading, *(f"   {name:<{width}}  {figure:>{column}}{note}" for name, figure, note in lines)]
