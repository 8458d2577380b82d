"""The worked examples that come with the library, as plain data: tokens and q, k, v; results are always computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from clearhead.core.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Example:
    """One small attention call: what its tokens are called, and q (T, D), k (S, D), v (S, Dv) in float64.

    `tokens` names the keys and values, `query_tokens` the queries; in self-attention they are the same.

    >>> example = EXAMPLES["cat_sat"]
    >>> example.tokens, example.q.shape
    (('The', 'cat', 'sat', 'on', 'mat'), (5, 4))
    """

    name: str
    about: str
    tokens: tuple[str, ...]
    query_tokens: tuple[str, ...]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    def in_heads(self, heads: int) -> Example:
        """The same columns dealt out to several heads: q (heads, T, D / heads), and so k and v.

        >>> EXAMPLES["cat_sat"].in_heads(2).q[1].tolist()
        [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]
        """
        q, k, v = (self._dealt(name, heads) for name in ("q", "k", "v"))
        return replace(self, name=f"{self.name}_{heads}_heads", about=f"{self.about}, in {heads} heads", q=q, k=k, v=v)

    def _dealt(self, name: str, heads: int) -> np.ndarray:
        columns: np.ndarray = getattr(self, name)
        if columns.ndim != 2 or not isinstance(heads, int) or heads < 1 or columns.shape[-1] % heads:
            raise ArgumentError(
                "heads", f"is {heads}, which does not divide the columns of {name}, of shape {columns.shape}"
            )
        return columns.reshape(len(columns), heads, -1).swapaxes(0, 1).copy()


_SENTENCE = ("The", "cat", "sat", "on", "mat")

EXAMPLES: dict[str, Example] = {
    example.name: example
    for example in (
        Example(
            name="cat_sat",
            about="five tokens that attend to one another",
            tokens=_SENTENCE,
            query_tokens=_SENTENCE,
            q=np.array(
                [
                    [1.0, 0.0, 1.0, 0.0],
                    [0.0, 2.0, 0.0, 1.0],
                    [1.0, 1.0, 1.0, 0.0],
                    [0.0, 0.0, 1.0, 1.0],
                    [1.0, 0.0, 0.0, 1.0],
                ]
            ),
            k=np.array(
                [
                    [0.0, 1.0, 0.0, 1.0],
                    [1.0, 0.0, 1.0, 0.0],
                    [1.0, 1.0, 0.0, 0.0],
                    [0.0, 0.0, 1.0, 1.0],
                    [1.0, 0.0, 0.5, 0.5],
                ]
            ),
            v=np.array(
                [
                    [1.0, 0.0, 0.0, 0.0],
                    [0.0, 1.0, 0.0, 0.0],
                    [0.0, 0.0, 1.0, 0.0],
                    [0.0, 0.0, 0.0, 1.0],
                    [0.5, 0.5, 0.5, 0.5],
                ]
            ),
        ),
        Example(
            name="it_animal",
            about='what does "it" refer to? one query over three keys',
            tokens=("animal", "street", "because"),
            query_tokens=("it",),
            q=np.array([[3.0, 1.0]]),
            k=np.array([[3.0, 1.0], [1.0, 4.0], [1.5, 0.5]]),
            v=np.array([[2.0, 1.5], [0.5, 0.3], [-0.5, 1.2]]),
        ),
        # the smallest numbers that give what the linear-algebra example prints: .401, .401, .198, and .599
        Example(
            name="two_by_three",
            about="two queries over three keys, as linear algebra has it",
            tokens=("k0", "k1", "k2"),
            query_tokens=("q0", "q1"),
            q=np.array([[1.0, 0.0], [0.0, 1.0]]),
            k=np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]),
            v=np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
        ),
        Example(
            name="three_by_four",
            about="three queries over four keys, four features each, values of two",
            tokens=("k0", "k1", "k2", "k3"),
            query_tokens=("q0", "q1", "q2"),
            q=np.array([[2.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 2.0], [1.0, 1.0, 0.0, -1.0]]),
            k=np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 2.0]]),
            v=np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -1.0]]),
        ),
    )
}

# the shared sentence in two heads of two features each, from the same four columns
EXAMPLES["cat_sat_2_heads"] = EXAMPLES["cat_sat"].in_heads(2)
