"""A small call as a whole: inputs, scores, weights, output and the attention map, side by side where there is room."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from rich.console import RenderableType
from rich.rule import Rule
from rich.text import Text

from clearhead.cli.tables import bars, block, heat_map, matrix, number, side_by_side
from clearhead.explain.render.page import figure, given, summed
from clearhead.explain.render.terminal import visible
from clearhead.explain.row import Row, row_of
from clearhead.explain.tracing import Trace

# A whole call is shown up to this many queries and keys
SMALL = 16
# As many features as a table shows, of those that there are
FEATURES = 8
# Every head's map is drawn up to this many
HEADS = 8


@dataclass(frozen=True, eq=False)
class Steps:
    """Every number of one head: matrices are queries × keys, `peak` and `total` have one number for each query."""

    rows: tuple[Row, ...]
    q: np.ndarray
    allowed: np.ndarray
    raw: np.ndarray
    scaled: np.ndarray
    capped: np.ndarray | None
    scores: np.ndarray
    peak: np.ndarray
    exponentials: np.ndarray
    total: np.ndarray
    weights: np.ndarray
    output: np.ndarray

    @classmethod
    def of(cls, shown: Trace, at: tuple[int, ...]) -> Steps:
        """The steps of every query of one head, each as `trace` has it."""
        rows = tuple(row_of(shown.problem, i, at) for i in range(shown.problem.grid.queries))
        one = rows[0]
        allowed = [np.ones(one.keys, bool) if row.allowed is None else row.allowed for row in rows]
        return cls(
            rows,
            q=np.stack([row.q for row in rows]),
            allowed=np.stack(allowed),
            raw=np.stack([row.dots for row in rows]),
            scaled=np.stack([row.scaled for row in rows]),
            capped=None if one.capped is None else np.stack([row.capped for row in rows if row.capped is not None]),
            scores=np.stack([row.scores for row in rows]),
            peak=np.array([row.max_score for row in rows]),
            exponentials=np.stack([row.exponentials for row in rows]),
            total=np.array([row.total for row in rows]),
            weights=np.stack([row.weights for row in rows]),
            output=np.stack([row.output for row in rows]),
        )

    @property
    def one(self) -> Row:
        """Any row: keys, values, scale and softcap are the same in all."""
        return self.rows[0]

    @property
    def usual(self) -> bool:
        """True where the scale is 1/√d_k."""
        return self.one.scale == 1.0 / math.sqrt(self.one.features)

    @property
    def masked(self) -> bool:
        """True where some query may not attend to some key."""
        return not self.allowed.all()

    @property
    def inside(self) -> str:
        """What the softmax is taken of."""
        inner = "Q Kᵀ / √d_k" if self.usual else f"Q Kᵀ × {given(self.one.scale)}"
        if self.one.softcap is not None:
            cap = f"{self.one.softcap:g}"
            inner = f"{cap} tanh({inner} / {cap})"
        return f"{inner} + mask" if self.masked else inner


@dataclass(frozen=True, eq=False)
class Overview:
    """One head of a small call on a page: what positions are called, which query is marked, and the room there is."""

    name: str
    about: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    shown: Trace
    coloured: bool
    width: int

    @property
    def at(self) -> int:
        """The query that is marked."""
        return self.shown.query

    def page(self) -> Iterable[RenderableType]:
        """All of it."""
        steps, grid = Steps.of(self.shown, self.shown.at), self.shown.problem.grid
        queries, keys = steps.raw.shape
        sizes = f"{queries} {'query' if queries == 1 else 'queries'} × {keys} {'key' if keys == 1 else 'keys'}"
        yield Rule(Text(visible(self.name), style="bold"), style="dim")
        if self.about:
            yield Text(self.about)
        yield Text(f"{sizes}, d_k = {steps.one.features} features each")
        if grid.heads > 1:
            yield Text(f"head {self.shown.at[-1]} of {grid.heads}; --head shows another")
        yield ""
        yield Text(f"Attention(Q, K, V) = softmax({steps.inside}) V", style="bold cyan")
        yield ""
        yield side_by_side(
            [
                self._inputs("Q", "what each query looks for", self.queries, steps.q, self.at),
                self._inputs("K", "what each key offers", self.keys, steps.one.k),
                self._inputs("V", "what each key passes on", self.keys, steps.one.v),
            ]
        )
        yield Rule(style="dim")
        worked = [
            self._raw,
            self._scaled,
            *([] if steps.capped is None else [self._capped]),
            self._softmax,
            self._output,
        ]
        blocks = [make(steps, f"Step {count}") for count, make in enumerate(worked, 1)]
        yield side_by_side([*blocks, self._map(steps), self._bars(steps)])
        if 1 < grid.heads <= HEADS:
            yield Rule(style="dim")
            yield side_by_side([self._head(i, steps) for i in range(grid.heads)])

    def _raw(self, steps: Steps, count: str) -> RenderableType:
        key = _worked_key(steps, self.at)
        q, k = steps.q[self.at], steps.one.k[key]
        products = summed([f"{_factor(a)}·{_factor(b)}" for a, b in zip(q, k, strict=True)], FEATURES)
        names = f"{visible(self.queries[self.at])} · {visible(self.keys[key])}"
        worked = f"{names} = {products} = {given(steps.raw[self.at, key])}"
        return block(f"{count}  Raw scores", "Q Kᵀ", self._square(steps.raw), self.width, worked)

    def _scaled(self, steps: Steps, count: str) -> RenderableType:
        key = _worked_key(steps, self.at)
        # hidden already, where no step comes between
        after = steps.scores if steps.capped is None else steps.scaled
        by = f"/ √{steps.one.features}" if steps.usual else f"× {given(steps.one.scale)}"
        worked = f"{given(steps.raw[self.at, key])} {by} = {figure(steps.scaled[self.at, key])}"
        formula = f"Q Kᵀ × {'1/√d_k' if steps.usual else 'scale'}, here {steps.one.scale:.4g}"
        return block(
            f"{count}  Scaled scores", formula, self._square(after), self.width, worked + _hidden(steps, after)
        )

    def _capped(self, steps: Steps, count: str) -> RenderableType:
        key, cap = _worked_key(steps, self.at), f"{steps.one.softcap:g}"
        before, after = steps.scaled[self.at, key], steps.scores[self.at, key]
        worked = f"{cap} · tanh({figure(before)} / {cap}) = {figure(after)}{_hidden(steps, steps.scores)}"
        formula = f"{cap} · tanh(score / {cap})"
        return block(f"{count}  Softcap", formula, self._square(steps.scores), self.width, worked)

    def _softmax(self, steps: Steps, count: str) -> RenderableType:
        at, key = self.at, _worked_key(steps, self.at)
        exponent = f"e^({figure(steps.scores[at, key])} − {figure(steps.peak[at])})"
        quotient = (
            f"{figure(steps.exponentials[at, key])} / {figure(steps.total[at])} = {figure(steps.weights[at, key])}"
        )
        parts = [
            Text("largest score of the row, and e^(score − largest)", style="dim"),
            *self._square(steps.exponentials, ("max", steps.peak)),
            Text("\nsum of that row, and e^(…) / sum: the weights", style="dim"),
            *self._square(steps.weights, ("sum", steps.total)),
        ]
        return block(f"{count}  Weights", "softmax of each row", parts, self.width, f"{exponent} / sum = {quotient}")

    def _output(self, steps: Steps, count: str) -> RenderableType:
        pairs = zip(steps.weights[self.at], steps.one.v[:, 0], strict=True)
        terms = " + ".join(f"{figure(w)}·{_factor(v)}" for w, v in pairs)
        worked = f"{visible(self.queries[self.at])}, feature 1 = {terms} = {figure(steps.output[self.at, 0])}"
        cells = [[number(x) for x in row] for row in steps.output]
        table = self._features(self.queries, cells, self.at)
        return block(f"{count}  Output", "weights · V", table, self.width, worked)

    def _map(self, steps: Steps) -> RenderableType:
        drawn = heat_map(self.queries, self.keys, steps.weights, steps.allowed, self.coloured, self.width, self.at)
        return block("Attention map", "queries on rows, keys on columns", drawn, self.width)

    def _head(self, head: int, steps: Steps) -> RenderableType:
        other = Steps.of(self.shown, (*self.shown.at[:-1], head))
        drawn = heat_map(self.queries, self.keys, other.weights, other.allowed, self.coloured, self.width, self.at)
        return block(f"Head {head}", "its attention map", drawn, self.width)

    def _bars(self, steps: Steps) -> RenderableType:
        drawn = bars(self.keys, steps.weights[self.at].tolist(), steps.allowed[self.at].tolist(), self.width)
        title = f'What "{visible(self.queries[self.at])}" attends to'
        return block(title, "its row of weights", [drawn], self.width)

    def _square(self, numbers: np.ndarray, first: tuple[str, np.ndarray] | None = None) -> list[RenderableType]:
        """Queries × keys, with one more column of a number for each query before them if given."""
        headings, cells = list(self.keys), [[number(x) for x in row] for row in numbers]
        if first is not None:
            name, column = first
            headings = [name, *headings]
            cells = [[Text(figure(x), style="yellow"), *row] for x, row in zip(column, cells, strict=True)]
        return matrix(self.queries, headings, cells, self.width, self.at)

    def _inputs(
        self, title: str, words: str, names: tuple[str, ...], numbers: np.ndarray, at: int | None = None
    ) -> RenderableType:
        cells = [[Text(given(x)) for x in row] for row in numbers]
        return block(title, words, self._features(names, cells, at), self.width)

    def _features(self, names: tuple[str, ...], cells: list[list[Text]], at: int | None) -> list[RenderableType]:
        """Positions × features, the first few where there are many."""
        count = len(cells[0])
        headings = [str(i + 1) for i in range(count)]
        if count > FEATURES:
            headings = [*headings[:FEATURES], f"… {count - FEATURES:,} more"]
            cells = [[*row[:FEATURES], Text("…")] for row in cells]
        return matrix(names, headings, cells, self.width, at)


def _worked_key(steps: Steps, at: int) -> int:
    """The key whose arithmetic is shown: the second largest, since the largest is always e^0 in the softmax."""
    order = np.argsort(-steps.weights[at], stable=True)
    second = order[min(1, len(order) - 1)]
    return int(second if steps.allowed[at, second] else order[0])


def _hidden(steps: Steps, after: np.ndarray) -> str:
    return "; −∞ where a query may not attend" if steps.masked and after is steps.scores else ""


def _factor(value: float) -> str:
    return given(value) if value >= 0 else f"({given(value)})"
