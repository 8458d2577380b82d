"""The worked examples that come with the library, as plain data: tokens and q, k, v; results are always computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
    )
}
