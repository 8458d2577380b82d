"""A small call as a whole: inputs, scores, weights, output and the attention map, side by side where there is room."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.style import Style
from rich.table import Table
from rich.text import Text

from clearhead.calls import observe
from clearhead.core.mask import Mask
from clearhead.explain.render.page import given
from clearhead.explain.render.terminal import visible
from clearhead.explain.tokens import bar
from clearhead.textbook.examples import Example
from clearhead.textbook.names import ScaledDotProductAttention

# A whole call is shown up to this many queries, keys and features
SMALL = 8
# Narrower than this the tables would lose digits; a terminal that narrow wraps the lines instead.
NARROWEST = 56

MINUS_INFINITY = "−∞"
MARK = "▸"
SHADES = " ░▒▓█"

# Dark to light, the same order on every background; what lies between is interpolated
HEAT = ((36, 18, 74), (90, 30, 122), (166, 45, 110), (229, 92, 65), (252, 182, 60), (252, 250, 170))


@dataclass(frozen=True, eq=False)
class Steps:
    """Every number of one call: matrices are queries × keys, `peak` and `total` have one number for each query."""

    features: int
    scale: float
    allowed: np.ndarray
    raw: np.ndarray
    scaled: np.ndarray
    peak: np.ndarray
    exponentials: np.ndarray
    total: np.ndarray
    weights: np.ndarray
    output: np.ndarray

    @classmethod
    def of(cls, example: Example, mask: Mask | None) -> Steps:
        """The steps of an example, by the library."""
        attend = ScaledDotProductAttention(example.q.shape[-1])
        raw = attend.compute_scores(example.q, example.k)
        allowed = np.ones(raw.shape, bool) if mask is None else mask.dense(*raw.shape)[0]
        scaled = np.where(allowed, attend.scale_scores(raw), -np.inf)
        output, weights = attend(example.q, example.k, example.v, mask)
        peak = observe(example.q, example.k, example.v, mask=mask).max_score
        exponentials = np.exp(scaled - np.where(np.isfinite(peak), peak, 0.0)[:, None])
        total = exponentials.sum(-1)
        return cls(attend.d_k, attend.scale, allowed, raw, scaled, peak, exponentials, total, weights, output)

    @property
    def masked(self) -> bool:
        """True where some query may not attend to some key."""
        return not self.allowed.all()


def overview(example: Example, mask: Mask | None, at: int, coloured: bool) -> Iterable[RenderableType]:
    """The page for an example, with one query marked."""
    steps = Steps.of(example, mask)
    inner = "Q Kᵀ / √d_k + mask" if steps.masked else "Q Kᵀ / √d_k"
    queries, keys = steps.raw.shape
    sizes = f"{queries} {'query' if queries == 1 else 'queries'} × {keys} keys, d_k = {steps.features} features each"
    yield Rule(Text(visible(example.name), style="bold"), style="dim")
    yield Text(example.about)
    yield Text(sizes)
    yield ""
    yield Text(f"Attention(Q, K, V) = softmax({inner}) V", style="bold cyan")
    yield ""
    yield _side_by_side(
        [
            _block("Q", "what each query looks for", [_inputs(example.query_tokens, example.q, at)]),
            _block("K", "what each key offers", [_inputs(example.tokens, example.k)]),
            _block("V", "what each key passes on", [_inputs(example.tokens, example.v)]),
        ]
    )
    yield Rule(style="dim")
    yield _side_by_side(
        [
            _raw_scores(example, steps, at),
            _scaled_scores(example, steps, at),
            _softmax(example, steps, at),
            _output(example, steps, at),
            _map(example, steps, at, coloured),
            _bars(example, steps, at),
        ]
    )


def _raw_scores(example: Example, steps: Steps, at: int) -> RenderableType:
    key = _worked_key(steps, at)
    products = " + ".join(f"{_factor(a)}·{_factor(b)}" for a, b in zip(example.q[at], example.k[key], strict=True))
    names = f"{example.query_tokens[at]} · {example.tokens[key]}"
    table = _matrix(example, steps.raw, at)
    return _block("Step 1  Raw scores", "Q Kᵀ", [table], f"{names} = {products} = {steps.raw[at, key]:g}")


def _scaled_scores(example: Example, steps: Steps, at: int) -> RenderableType:
    key = _worked_key(steps, at)
    note = f"{steps.raw[at, key]:g} / √{steps.features} = {steps.scaled[at, key]:.4f}"
    if steps.masked:
        note += f"; {MINUS_INFINITY} where a query may not attend"
    return _block(
        "Step 2  Scaled scores", f"Q Kᵀ × 1/√d_k, here {steps.scale:.4g}", [_matrix(example, steps.scaled, at)], note
    )


def _softmax(example: Example, steps: Steps, at: int) -> RenderableType:
    key = _worked_key(steps, at)
    exponent = f"e^({steps.scaled[at, key]:.4f} − {steps.peak[at]:.4f})"
    quotient = f"{steps.exponentials[at, key]:.4f} / {steps.total[at]:.4f} = {steps.weights[at, key]:.4f}"
    parts = [
        Text("largest score of the row, and e^(score − largest)", style="dim"),
        _matrix(example, steps.exponentials, at, ("max", steps.peak)),
        Text("\nsum of that row, and e^(…) / sum: the weights", style="dim"),
        _matrix(example, steps.weights, at, ("sum", steps.total)),
    ]
    return _block("Step 3  Weights", "softmax of each row", parts, f"{exponent} / sum = {quotient}")


def _output(example: Example, steps: Steps, at: int) -> RenderableType:
    terms = [f"{w:.4f}·{_factor(v)}" for w, v in zip(steps.weights[at], example.v[:, 0], strict=True)]
    note = f"{example.query_tokens[at]}, feature 1 = {' + '.join(terms)} = {steps.output[at, 0]:.4f}"
    table = _table(_feature_names(steps.output))
    _fill(table, example.query_tokens, [[_number(x) for x in row] for row in steps.output], at)
    return _block("Step 4  Output", "weights · V", [table], note)


def _map(example: Example, steps: Steps, at: int, coloured: bool) -> RenderableType:
    largest = float(steps.weights.max())
    table = Table(box=None, padding=0, collapse_padding=True, pad_edge=False, header_style="bold")
    table.add_column()
    for token in example.tokens:
        table.add_column(Text(token), justify="center")
    rows = [
        [
            _cell(float(w), largest, coloured) if may else Text("   ·    ", style="dim")
            for w, may in zip(*row, strict=True)
        ]
        for row in zip(steps.weights, steps.allowed, strict=True)
    ]
    _fill(table, [f"{token}  " for token in example.query_tokens], rows, at)
    shares = np.linspace(0.0, 1.0, 17).tolist()
    strip = [Text("  ", style=_heat(share)) if coloured else Text(_shade(share) * 2) for share in shares]
    legend = Text.assemble("0 ", *strip, f" {largest:.4f}")
    return _block("Attention map", "queries on rows, keys on columns", [table, Text(), legend])


def _bars(example: Example, steps: Steps, at: int) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for token, weight, may in zip(example.tokens, steps.weights[at], steps.allowed[at], strict=True):
        shown = Text(bar(float(weight)), style="cyan") if may else Text("masked", style="dim")
        table.add_row(Text(token), _number(weight), shown)
    return _block(f'What "{example.query_tokens[at]}" attends to', "its row of weights", [table])


def _worked_key(steps: Steps, at: int) -> int:
    """The key whose arithmetic is shown: the second largest, since the largest is always e^0 in the softmax."""
    order = np.argsort(-steps.weights[at], stable=True)
    second = order[min(1, len(order) - 1)]
    return int(second if steps.allowed[at, second] else order[0])


def _block(title: str, formula: str, parts: list[RenderableType], worked: str | None = None) -> RenderableType:
    lines = [Text.assemble((title, "bold"), "  ", (formula, "cyan")), Text(), *parts]
    if worked is not None:
        # wrapped here: a block is as wide as its longest line, and blocks stand side by side
        lines += [Text(), *(Text(line, style="italic") for line in textwrap.wrap(worked, NARROWEST - 4))]
    return Group(*lines, Text())


def _side_by_side(blocks: list[RenderableType]) -> RenderableType:
    return Columns(blocks, padding=(0, 4))


def _matrix(
    example: Example, matrix: np.ndarray, at: int, first: tuple[str, np.ndarray] | None = None
) -> RenderableType:
    """Queries × keys, with one more column of a number for each query before them if given."""
    headings, rows = list(example.tokens), [[_number(x) for x in row] for row in matrix]
    if first is not None:
        name, column = first
        headings = [name, *headings]
        rows = [[Text(f"{x:.4f}", style="yellow"), *row] for x, row in zip(column, rows, strict=True)]
    table = _table(headings)
    _fill(table, example.query_tokens, rows, at)
    return table


def _inputs(tokens: Sequence[str], matrix: np.ndarray, at: int | None = None) -> RenderableType:
    table = _table(_feature_names(matrix))
    _fill(table, tokens, [[Text(given(x)) for x in row] for row in matrix], at)
    return table


def _feature_names(matrix: np.ndarray) -> list[str]:
    return [str(i + 1) for i in range(matrix.shape[-1])]


def _table(headings: Sequence[str]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        header_style="bold",
        border_style="dim",
    )
    table.add_column()
    for heading in headings:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table


def _fill(table: Table, names: Sequence[str], rows: Sequence[Sequence[Text]], at: int | None) -> None:
    """One row for each name; the chosen query is marked, with and without colour."""
    for i, (name, row) in enumerate(zip(names, rows, strict=True)):
        mark = MARK if i == at else " "
        table.add_row(Text(f"{mark} {name}"), *row, style="bold" if i == at else None)


def _number(value: float) -> Text:
    return Text(MINUS_INFINITY, style="dim") if value == -np.inf else Text(f"{value:.4f}")


def _factor(value: float) -> str:
    return given(value) if value >= 0 else f"({given(value)})"


def _cell(weight: float, largest: float, coloured: bool) -> Text:
    share = weight / largest if largest else 0.0
    return Text(f" {weight:.4f} ", style=_heat(share)) if coloured else Text(f"{_shade(share) * 2} {weight:.2f} ")


def _heat(share: float) -> Style:
    """The colour of a share between 0 and 1, and letters that can be read on it."""
    place = share * (len(HEAT) - 1)
    low = min(int(place), len(HEAT) - 2)
    red, green, blue = (round(a + (b - a) * (place - low)) for a, b in zip(HEAT[low], HEAT[low + 1], strict=True))
    # dark letters where the eye sees the colour as bright
    letters = "rgb(0,0,0)" if 0.3 * red + 0.59 * green + 0.11 * blue > 128 else "rgb(255,255,255)"
    return Style(color=letters, bgcolor=f"rgb({red},{green},{blue})")


def _shade(share: float) -> str:
    # rounded up, so that only a share of 0 is blank; the rounding first keeps 0.25 · 4 from being a little over 1
    return SHADES[math.ceil(round(share * (len(SHADES) - 1), 9))]
