"""trace_layer(): one query through a whole multi-head layer, from x to q, k and v, heads, merging and w_o."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core.arrays import HALF, AnyArray, dtype_name, plain_numbers, require_array, require_floating
from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Mask
from clearhead.explain.render.page import Line, Page, Step, factor, figure, given_vector, summed, vector
from clearhead.explain.render.paged import SCREENFUL, Paged
from clearhead.explain.tell import scale_spelled, shown_keys
from clearhead.explain.tracing import Trace, jsonable, trace

# As many features as a line shows of a vector
FEATURES = 8


@dataclass(frozen=True, eq=False, repr=False)
class LayerTrace(Paged):
    """One query of a multi-head layer, step by step. Print it, or ask for `markdown()`, `html()`, `latex()`, `json()`.

    `x` is (T, E) with the positions added, `q` (T, heads · D), `k` and `v` (T, key heads · D); `heads` has the `Trace`
    of each head. `merged` is what the heads give for the query, and `output` what `w_o` makes of it.

    >>> import clearhead as ch
    >>> from clearhead.textbook.layers import LAYERS
    >>> bank = LAYERS["bank_river"]
    >>> steps = ch.trace_layer(**bank.arguments, query="bank", tokens=bank.tokens)
    >>> len(steps.heads), steps.heads[0].row.weights.round(3).tolist()
    (2, [0.011, 0.011, 0.011, 0.183, 0.022, 0.011, 0.752])
    """

    embedded: np.ndarray
    positions: np.ndarray | None
    x: np.ndarray
    w_q: np.ndarray
    w_o: np.ndarray | None
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    heads: tuple[Trace, ...]
    merged: np.ndarray
    output: np.ndarray

    @property
    def query(self) -> int:
        """The position of the query."""
        return self.heads[0].query

    @property
    def tokens(self) -> tuple[str, ...]:
        """What positions are called."""
        return self.heads[0].tokens

    def page(self, keys: int = SCREENFUL) -> Page:
        """The steps, with at most `keys` keys of each head and as many tokens of the inputs."""
        places = sorted({*range(min(len(self.tokens), keys)), self.query})
        steps = [self._input(places)]
        if self.positions is not None:
            steps.append(self._positions(places))
        steps += [self._queries(), self._projected("Keys", "k", self.k, places)]
        steps += [self._projected("Values", "v", self.v, places), self._split()]
        steps += [self._head(number, one, keys) for number, one in enumerate(self.heads)]
        steps.append(self._merge())
        if self.w_o is not None:
            steps.append(self._out(self.w_o))
        count = len(self.heads)
        shared = self.heads[0].problem.key_heads
        over = "" if shared == count else f", which share {shared} of keys and values"
        sizes = (
            f"{len(self.tokens):,} tokens of {self.x.shape[1]} features · {count} {'head' if count == 1 else 'heads'}"
        )
        ends = "" if self.w_o is None else " w_o"
        return Page(
            f"A layer's attention, for {self.heads[0].label}",
            (f"{sizes} of {self.heads[0].row.features} features each{over} · computed in {dtype_name(self.x)}",),
            f"output = merge(softmax(q Kᵀ × scale) V of each head){ends}, where q, k, v = split(x w_q, x w_k, x w_v)",
            r"\mathrm{output} = \mathrm{merge}_h\left(\mathrm{softmax}(q_h K_h^\top \cdot \mathrm{scale})\,V_h\right)"
            + ("" if self.w_o is None else r"\,W_o"),
            tuple(steps),
        )

    def _input(self, places: list[int]) -> Step:
        lines = [Line(self.tokens[i], given_vector(self.embedded[i], FEATURES)) for i in places]
        return Step("Input", "x, one vector for each token", r"x_i", tuple(lines), _more(self.tokens, places))

    def _positions(self, places: list[int]) -> Step:
        assert self.positions is not None
        lines = [
            Line(
                self.tokens[i],
                f"{given_vector(self.embedded[i], 4)} + {given_vector(self.positions[i], 4)}",
                given_vector(self.x[i], 4),
            )
            for i in places
        ]
        return Step("Positions", "x + a vector for each place", r"x_i = x_i + p_i", tuple(lines))

    def _queries(self) -> Step:
        at, w = self.x[self.query], self.w_q
        shown = range(min(w.shape[1], FEATURES))
        lines = [Line(f"q {c + 1}", _products(at, w[:, c]), figure(self.q[self.query, c])) for c in shown]
        says = f"q = {vector(self.q[self.query], FEATURES)}"
        return Step("Query", "x w_q, feature by feature", r"q = x\,W_q", tuple(lines), says)

    def _projected(self, title: str, letter: str, made: np.ndarray, places: list[int]) -> Step:
        lines = [Line(self.tokens[i], f"{given_vector(self.x[i], 4)} w_{letter}", vector(made[i], 4)) for i in places]
        return Step(title, f"x w_{letter}, for every token", rf"{letter}_i = x_i\,W_{letter}", tuple(lines))

    def _split(self) -> Step:
        size = self.heads[0].row.features
        lines = [
            Line(f"head {h}", f"features {h * size + 1} to {(h + 1) * size} of q", vector(one.row.q, FEATURES))
            for h, one in enumerate(self.heads)
        ]
        latex = r"q_h = q_{[h d,\,(h+1) d)}"
        return Step("Split", "each head takes its own share of the features", latex, tuple(lines))

    def _head(self, number: int, one: Trace, most: int) -> Step:
        row = one.row
        word, latex = scale_spelled(row)
        lines = []
        for j in shown_keys(row, most):
            if row.may(j):
                worked = f"{_products(row.q, row.k[j], 3)} = {figure(row.dots[j])}; softmax of {figure(row.scores[j])}"
                share = float(row.weights[j]) if np.isfinite(row.weights[j]) else 0.0
                lines.append(Line(self.tokens[j], worked, figure(row.weights[j]), share=share))
            else:
                lines.append(Line(self.tokens[j], "", figure(row.weights[j]), "masked", faint=True))
        says = f"the values, averaged by these weights: {vector(row.output, FEATURES)}"
        inner = rf"\mathrm{{softmax}}(q_{number} K_{number}^\top \cdot {latex})\,V_{number}"
        return Step(f"Head {number}", f"softmax(q Kᵀ × {word}) V", rf"o_{number} = {inner}", tuple(lines), says)

    def _merge(self) -> Step:
        lines = [Line(f"head {h}", "", vector(one.row.output, FEATURES)) for h, one in enumerate(self.heads)]
        latex = r"o = (o_0, \dots, o_{H-1})"
        says = vector(self.merged, FEATURES)
        return Step("Merge", "the heads' outputs, one after the other", latex, tuple(lines), says)

    def _out(self, w_o: np.ndarray) -> Step:
        shown = range(min(w_o.shape[1], FEATURES))
        lines = [
            Line(f"output {c + 1}", _products(self.merged, w_o[:, c], number=figure), figure(self.output[c]))
            for c in shown
        ]
        return Step("Output", "merged w_o", r"\mathrm{output} = o\,W_o", tuple(lines), vector(self.output, FEATURES))

    def __repr__(self) -> str:
        count = len(self.heads)
        return f"LayerTrace of {self.heads[0].label} in {count} {'head' if count == 1 else 'heads'}; print it to see it"

    def json(self) -> str:
        """Every number as JSON, exactly: the layer's own, and those of each head as its `Trace` has them."""
        names = ("embedded", "positions", "x", "q", "k", "v", "merged", "output")
        found = {name: jsonable(getattr(self, name)) for name in names if getattr(self, name) is not None}
        return json.dumps(
            {"query": self.query, "tokens": list(self.tokens), **found}
            | {"heads": [json.loads(one.json()) for one in self.heads]}
        )


def trace_layer(
    x: AnyArray,
    w_q: AnyArray,
    w_k: AnyArray,
    w_v: AnyArray,
    w_o: AnyArray | None = None,
    *,
    heads: int,
    query: int | str,
    tokens: Sequence[str] | None = None,
    positions: AnyArray | None = None,
    mask: Mask | AnyArray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> LayerTrace:
    """Where q, k and v come from: one query through x w_q, x w_k, x w_v, its heads, merging and w_o.

        q, k, v = split(x w_q), split(x w_k), split(x w_v)          with positions: x + positions in place of x
        output  = merge(softmax(q kᵀ · scale) v) w_o

    >>> import clearhead as ch
    >>> from clearhead.textbook.layers import LAYERS
    >>> bank = LAYERS["bank_river"]
    >>> steps = ch.trace_layer(**bank.arguments, query="bank", tokens=bank.tokens)
    >>> print(steps)  # doctest: +ELLIPSIS
    A layer's attention, for "bank" (query 3)
    7 tokens of 4 features · 2 heads of 2 features each · computed in float64
    ...
    7. Head 0  softmax(q Kᵀ × 1/√2) V
       I      2·0 + 2·0 = 0.0000; softmax of 0.0000   = 0.0108
       saw    2·0 + 2·0 = 0.0000; softmax of 0.0000   = 0.0108
       the    2·0 + 2·0 = 0.0000; softmax of 0.0000   = 0.0108
       bank   2·1 + 2·1 = 4.0000; softmax of 2.8284   = 0.1828  ███████
       near   2·0.5 + 2·0 = 1.0000; softmax of 0.7071 = 0.0219  █
       the    2·0 + 2·0 = 0.0000; softmax of 0.0000   = 0.0108
       river  2·3 + 2·0 = 6.0000; softmax of 4.2426   = 0.7520  ██████████████████████████████
       the values, averaged by these weights: [2.4499, 0.1828]
    <BLANKLINE>
    ...

    `x` is (T, E), `w_q` (E, heads · D), `w_k` (E, key heads · D), `w_v` (E, key heads · Dv) and `w_o` (heads · Dv, …),
    as `x @ w` has them; a `torch.nn.Linear` holds the transpose. The other arguments are those of `trace`, and every
    head's own steps are in `heads`.
    """
    embedded = _matrix("x", x)
    added = None if positions is None else _matrix("positions", positions)
    if added is not None and added.shape != embedded.shape:
        raise ArgumentError("positions", f"has shape {added.shape}, expected {embedded.shape} as x")
    whole = embedded if added is None else embedded + added
    if isinstance(heads, bool) or not isinstance(heads, int | np.integer) or heads < 1:
        raise ArgumentError("heads", f"is {heads!r}, expected a whole number of at least 1")
    weights = {name: _matrix(name, w) for name, w in (("w_q", w_q), ("w_k", w_k), ("w_v", w_v))}
    for name, w in weights.items():
        if w.shape[0] != whole.shape[1]:
            raise ArgumentError(name, f"has shape {w.shape}, expected ({whole.shape[1]}, …): x has so many features")
    if weights["w_q"].shape[1] % heads:
        raise ArgumentError("heads", f"is {heads}, which does not divide the {weights['w_q'].shape[1]} columns of w_q")
    size = weights["w_q"].shape[1] // heads
    if not size or weights["w_k"].shape[1] % size:
        raise ArgumentError(
            "w_k", f"has {weights['w_k'].shape[1]} columns, expected a multiple of {size} as a head has"
        )
    shared = weights["w_k"].shape[1] // size
    if not shared or weights["w_v"].shape[1] % shared:
        raise ArgumentError("w_v", f"has {weights['w_v'].shape[1]} columns, expected a multiple of {shared} key heads")
    made = {name[-1]: whole @ w for name, w in weights.items()}
    q, k, v = (_split(made[letter], count) for letter, count in (("q", heads), ("k", shared), ("v", shared)))
    options: dict[str, Any] = {"mask": mask, "scale": scale, "softcap": softcap}
    traces = tuple(trace(q, k, v, query=query, tokens=tokens, head=h, **options) for h in range(heads))
    merged = np.concatenate([one.row.output for one in traces])
    last = None if w_o is None else _matrix("w_o", w_o)
    if last is not None and last.shape[0] != len(merged):
        raise ArgumentError(
            "w_o", f"has shape {last.shape}, expected ({len(merged)}, …): the heads give so many features"
        )
    output = merged if last is None else merged @ last
    return LayerTrace(
        embedded, added, whole, weights["w_q"], last, made["q"], made["k"], made["v"], traces, merged, output
    )


def _matrix(name: str, array: AnyArray) -> np.ndarray:
    """A two-dimensional array in NumPy, in the precision that sums are taken in."""
    require_array(name, array)
    require_floating(name, array)
    numbers = plain_numbers(name, array)
    if numbers.ndim != 2:
        raise ArgumentError(name, f"has shape {numbers.shape}, expected two axes: one layer, one batch row")
    return numbers.astype(np.float32) if dtype_name(numbers) in HALF else numbers


def _split(x: np.ndarray, heads: int) -> np.ndarray:
    return np.moveaxis(x.reshape(len(x), heads, -1), 1, 0)  # (heads, T, D)


def _products(left: np.ndarray, right: np.ndarray, most: int = 6, number: Any = None) -> str:
    first = factor if number is None else number
    return summed([f"{first(a)}·{factor(b)}" for a, b in zip(left, right, strict=True)], most)


def _more(tokens: Sequence[str], places: list[int]) -> str:
    gone = len(tokens) - len(places)
    return f"{gone:,} more tokens are not shown" if gone else ""
