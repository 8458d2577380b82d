"""trace(): every arithmetic step for one query, as a value that is text, Markdown, HTML, LaTeX, JSON or a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Never

import numpy as np

from clearhead.core.arrays import AnyArray, dtype_name
from clearhead.core.errors import ArgumentError
from clearhead.core.foreign import ATTENTION, closed, refuse_others
from clearhead.core.mask import Mask
from clearhead.core.once import once
from clearhead.core.positions import Bias
from clearhead.core.problem import Problem, pose
from clearhead.core.temperature import tempered
from clearhead.core.trees import tree
from clearhead.explain.angles import Angles, angles_of
from clearhead.explain.render.page import Page, given_vector
from clearhead.explain.render.paged import SCREENFUL, Paged
from clearhead.explain.row import Row, row_of
from clearhead.explain.tell import Telling, told
from clearhead.explain.tokens import names_for, position_of
from clearhead.explain.walk import Cell, Operation, cell, walk


@tree
@dataclass(frozen=True, eq=False, repr=False)
class Trace(Paged):
    """One query of one call, step by step. Print it, or ask for `markdown()`, `html()`, `latex()` or `json()`.

    `row` holds every number. `query` is its position, `at` its batch row and head; `tokens` name the keys.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4))
    >>> steps = ch.trace(q, k, v, query=3, head=1, mask=ch.causal())
    >>> steps.query, steps.row.weights.round(2).tolist()
    (3, [0.46, 0.46, 0.07, 0.01, 0.0, 0.0, 0.0])
    >>> steps.why(5)
    'causal() lets position 3 see keys up to 3'
    """

    problem: Problem
    query: int
    at: tuple[int, ...]
    query_token: str
    tokens: tuple[str, ...]
    row: Row

    @once
    def label(self) -> str:
        """The query as it is called in sentences."""
        return f'"{self.query_token}" (query {self.query})' if self.query_token else f"query {self.query}"

    @once
    def angles(self) -> Angles:
        """The dot products as geometry, |q| |k| cos θ: lengths, cosines and degrees for every key; it prints itself.

        >>> import clearhead as ch
        >>> from clearhead.textbook import EXAMPLES
        >>> example = EXAMPLES["it_animal"]
        >>> ch.trace(example.q, example.k, example.v, query=0, tokens=example.tokens).angles
        q · k = |q| |k| cos θ
        <BLANKLINE>
                     |q|      |k|    cos θ     q · k       θ
        animal    3.1623 × 3.1623 × 1.0000 = 10.0000    0.0°
        street    3.1623 × 4.1231 × 0.5369 =  7.0000   57.5°
        because   3.1623 × 1.5811 × 1.0000 =  5.0000    0.0°
        """
        return angles_of(self.row, self.tokens, SCREENFUL)

    def page(self, keys: int = SCREENFUL) -> Page:
        """The steps with at most `keys` keys: the largest weights and the edges of the mask."""
        if isinstance(keys, bool) or not isinstance(keys, int | np.integer) or keys < 1:
            raise ArgumentError("keys", f"is {keys!r}, expected a whole number of at least 1")
        problem, grid = self.problem, self.problem.grid
        where = []
        if grid.batch:
            where.append(f"batch row {', '.join(map(str, self.at[:-1]))}")
        if grid.heads > 1:
            where.append(f"head {self.at[-1]} of {grid.heads}")
        sizes = f"{grid.keys:,} {'key' if grid.keys == 1 else 'keys'} of {self.row.features} features"
        telling = Telling(
            f"Attention of {self.label}",
            (
                " · ".join([sizes, *where, f"computed in {dtype_name(self.row.q)}"]),
                f"q = {given_vector(self.row.q)}",
            ),
            self.tokens,
            None if problem.mask is None else repr(problem.mask),
            None if problem.bias is None else repr(problem.bias),
            self.why,
        )
        return told(self.row, telling, int(keys))

    def why(self, key: int) -> str:
        """Why the query may, or may not, attend to a key: the mask's own words."""
        mask = self.problem.mask
        return "there is no mask" if mask is None else mask.reason(self.query, key, self.problem.grid, self.at)

    def cell(self, key: int | str) -> Cell:
        """One query–key pair with the whole computation; the key by position or token.

        >>> import clearhead as ch
        >>> from clearhead.textbook import EXAMPLES
        >>> example = EXAMPLES["cat_sat"]
        >>> print(ch.trace(example.q, example.k, example.v, query="cat", tokens=example.tokens).cell("sat"))
        cat → sat
          q · k = 0·1 + 2·1 + 0·0 + 1·0 = 2.0000
          × scale = 2.0000 × 0.5000 = 1.0000
          e^(score − largest) = e^(1.0000 − 1.5) = 0.6065
          weight = 0.6065 / 2.4840 = 0.2442
          adds 0.2442 × [0, 0, 1, 0] = [0.0000, 0.0000, 0.2442, 0.0000] to the output
        """
        at = position_of("key", key, self.tokens)
        reason = None if self.row.may(at) else self.why(at)
        return cell(self.row, at, self.query_token or f"query {self.query}", self.tokens[at], reason)

    def walk(self) -> Iterator[Operation]:
        """Every multiply-add, exponential and division as a numbered step with one sentence, for teaching.

        >>> import numpy as np, clearhead as ch
        >>> one = ch.trace(np.array([[1.0, 0.0]]), np.eye(2), np.array([[1.0], [3.0]]), query=0, scale=1.0)
        >>> for operation in list(one.walk())[:3]:
        ...     print(operation)
        1. key 0, feature 1: 0.0000 + 1·1 = 1.0000.
        2. key 0, feature 2: 1.0000 + 0·0 = 1.0000.
        3. key 0: the dot product 1.0000 × scale 1.0000 = 1.0000.
        """
        hidden = [] if self.row.allowed is None else np.flatnonzero(~self.row.allowed).tolist()
        return walk(self.row, self.tokens, {j: self.why(j) for j in hidden})

    def __repr__(self) -> str:
        return f"Trace of {self.label} over {self.row.keys:,} keys; print it to see the steps"

    def json(self) -> str:
        """Every number of every key as JSON, exactly; what is not finite is a string, what is absent is left out."""
        found: dict[str, Any] = {
            "query": self.query,
            "query_token": self.query_token,
            "at": list(self.at),
            "tokens": list(self.tokens),
            "mask": None if self.problem.mask is None else repr(self.problem.mask),
        }
        found |= {field.name: getattr(self.row, field.name) for field in fields(self.row)}
        found |= {"q_norm": self.angles.query, "k_norms": self.angles.keys, "cosines": self.angles.cosines}
        found["contributions"] = np.array([self.row.contribution(j) for j in range(self.row.keys)])
        return json.dumps({name: jsonable(value) for name, value in found.items() if value is not None})


def jsonable(value: Any) -> Any:
    """A value of JSON, with numbers that JSON has no word for as strings: "nan", "inf", "-inf".

    >>> jsonable(np.array([1.5, -np.inf, np.nan]))
    [1.5, '-inf', 'nan']
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, dict):
        return {str(name): jsonable(item) for name, item in value.items()}
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value


@closed
def trace(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    query: int | str,
    tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    head: int | tuple[int, ...] | None = None,
    mask: Mask | AnyArray | None = None,
    bias: Bias | AnyArray | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    dropout: tuple[float, int] | None = None,
    **others: Never,
) -> Trace:
    """Every arithmetic step for one query of `attention` with the same arguments, by the formula itself.

    >>> import clearhead as ch
    >>> from clearhead.textbook import EXAMPLES
    >>> example = EXAMPLES["it_animal"]
    >>> steps = ch.trace(example.q, example.k, example.v, query="it", tokens=example.tokens, query_tokens=["it"])
    >>> print(steps)  # doctest: +ELLIPSIS
    Attention of "it" (query 0)
    3 keys of 2 features · computed in float64
    q = [3, 1]
    <BLANKLINE>
    1. Dot products  q · k, feature by feature
       animal   3·3 + 1·1     = 10.0000
       street   3·1 + 1·4     =  7.0000
       because  3·1.5 + 1·0.5 =  5.0000
    <BLANKLINE>
    ...
    <BLANKLINE>
    6. Weights  e^(score − largest) / sum
       animal   1.0000 / 1.1490 = 0.8703  ███████████████████████████████████
       street   0.1199 / 1.1490 = 0.1043  ████
       because  0.0291 / 1.1490 = 0.0254  █
       they sum to 1.0000; entropy 0.4499 nats, log-sum-exp 7.2100
    <BLANKLINE>
    ...
    <BLANKLINE>
    8. Output  the sum of the contributions
       [1.7801, 1.3672]

    `query` and the `tokens` that name keys may be positions or names; `query_tokens` name the queries, where they are
    not the same. `head` is a head's number, or (batch row, …, head) where there are batch axes; the first unless given.
    The other arguments are those of `attention`. A row needs only O(n) memory, so any length will do: past a screenful
    the largest weights and the edges of the mask are shown, and it is said what is left out.

    The steps are those of the definition, in the precision that `attention` computes in. A kernel adds in an order of
    its own, so that its output may differ from this one by the rounding of its sums: by a last digit, if at all.

    The result is one value: `print` it, `rich.print` it, let a notebook show it, or ask it for `markdown()`, `html()`,
    `latex()`, `json()`, one pair with `cell(key)`, or every single operation with `walk()`.
    """
    if others:
        refuse_others("trace", others, ATTENTION)
    if temperature is not None:
        scale = tempered(temperature, scale, q)
    problem = pose(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
    grid = problem.grid
    keys = names_for("tokens", tokens, grid.keys, "keys", prefix="key ")
    if query_tokens is None and tokens is not None and grid.queries == grid.keys:
        query_tokens = keys
    queries = names_for("query_tokens", query_tokens, grid.queries, "queries")
    place = position_of("query", query, queries)
    at = _place(head, (*grid.batch, grid.heads))
    token = "" if query_tokens is None else queries[place]
    return Trace(problem, place, at, token, keys, row_of(problem, place, at))


def _place(head: int | tuple[int, ...] | None, lead: tuple[int, ...]) -> tuple[int, ...]:
    """The batch row and head as an index for each leading axis; axes of size one need not be said."""
    if 0 in lead:
        raise ArgumentError("q", f"has leading axes {lead}: there is no head to look at")
    if head is None:
        return (0,) * len(lead)
    given = head if isinstance(head, tuple | list) else (head,)
    if not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in given):
        raise ArgumentError("head", f"is {head!r}, expected a head's number, or (batch row, …, head)")
    if len(given) == 1 and all(size == 1 for size in lead[:-1]):
        given = (*(0,) * (len(lead) - 1), given[0])
    if len(given) != len(lead):
        raise ArgumentError("head", f"is {head!r}, expected (batch row, …, head): an index for each of {lead}")
    outside = [(i, size) for i, size in zip(given, lead, strict=True) if not -size <= i < size]
    if outside:
        raise ArgumentError("head", f"has {outside[0][0]}, expected {-outside[0][1]} to {outside[0][1] - 1}")
    return tuple(int(i) % size for i, size in zip(given, lead, strict=True))
