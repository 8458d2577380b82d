"""A row told in steps: which steps a call has, which keys matter, and each number in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from clearhead.explain.render.page import Line, Page, Step, factor, figure, given_vector, summed, vector
from clearhead.explain.row import Row

# A largest weight below this is spread thin: bars are then drawn relative to it
THIN = 0.1


@dataclass(frozen=True, eq=False)
class Telling:
    """What the words need besides the numbers: names, the printed mask and bias, and why a key is hidden."""

    title: str
    facts: tuple[str, ...]
    names: tuple[str, ...]
    mask: str | None
    bias: str | None
    why: Callable[[int], str]


def shown_keys(row: Row, most: int) -> list[int]:
    """The keys that matter, in order: all where they fit; else the largest weights and the edges of the mask."""
    if row.keys <= most:
        return list(range(row.keys))
    edges: list[int] = []
    if row.allowed is not None:
        changes = np.flatnonzero(np.diff(row.allowed.astype(np.int8)))
        # one key on either side of where the mask begins and ends for this query
        edges = [int(j) for place in (*changes[:1], *changes[-1:]) for j in (place, place + 1)]
    edges = list(dict.fromkeys(edges))[: most // 2]
    heaviest = np.argsort(-row.weights, stable=True)[:most].tolist()
    return sorted(list(dict.fromkeys([*edges, *heaviest]))[:most])


def told(row: Row, telling: Telling, most: int) -> Page:
    """The row as a page; steps that the call does not have do not appear."""
    keys = shown_keys(row, most)
    steps = [_dots(row, telling, keys), _scale(row, telling, keys)]
    if row.capped is not None:
        steps.append(_softcap(row, telling, keys))
    if row.bias is not None:
        steps.append(_bias(row, telling, keys))
    if row.allowed is not None:
        steps.append(_mask(row, telling, keys))
    live = [j for j in keys if row.may(j)]
    steps += [_largest(row, telling), _exponentials(row, telling, live), _denominator(row, live)]
    steps.append(_weights(row, telling, keys))
    if row.kept is not None:
        steps.append(_dropout(row, telling, live))
    steps += [_values(row, telling, live), _output(row)]
    inner, inner_latex = _inside(row)
    last = ("dropout(", ")", r"\operatorname{dropout}\left(", r"\right)") if row.kept is not None else ("", "", "", "")
    return Page(
        telling.title,
        (*telling.facts, *_left_out(row, keys)),
        f"output = {last[0]}softmax({inner}){last[1]} V",
        rf"\mathrm{{output}} = {last[2]}\mathrm{{softmax}}\left({inner_latex}\right){last[3]} V",
        tuple(steps),
    )


def _left_out(row: Row, keys: list[int]) -> tuple[str, ...]:
    gone = row.keys - len(keys)
    if not gone:
        return ()
    weight = float(row.weights.sum() - row.weights[keys].sum())
    return (f"{len(keys)} of {row.keys:,} keys shown; the {gone:,} left out have {figure(abs(weight))} of the weight",)


def scale_spelled(row: Row) -> tuple[str, str]:
    """The scale as text and as LaTeX: 1/√D where it is that."""
    if row.features and row.scale == 1.0 / math.sqrt(row.features):
        return f"1/√{row.features}", rf"\tfrac{{1}}{{\sqrt{{{row.features}}}}}"
    return f"{row.scale:.4g}", f"{row.scale:.4g}"


def _inside(row: Row) -> tuple[str, str]:
    word, latex = scale_spelled(row)
    inner, inner_latex = f"q Kᵀ × {word}", rf"q K^\top \cdot {latex}"
    if row.softcap is not None:
        cap = f"{row.softcap:g}"
        inner, inner_latex = f"{cap} tanh({inner} / {cap})", rf"{cap} \tanh\left({inner_latex} / {cap}\right)"
    if row.bias is not None:
        inner, inner_latex = f"{inner} + bias", rf"{inner_latex} + \mathrm{{bias}}"
    if row.allowed is not None:
        inner, inner_latex = f"{inner} + mask", rf"{inner_latex} + \mathrm{{mask}}"
    if row.sink is not None:
        inner, inner_latex = f"{inner} | sink", rf"{inner_latex} \mid \mathrm{{sink}}"
    return inner, inner_latex


def _dots(row: Row, telling: Telling, keys: list[int]) -> Step:
    lines = []
    for j in keys:
        products = [f"{factor(a)}·{factor(b)}" for a, b in zip(row.q, row.k[j], strict=True)]
        lines.append(Line(telling.names[j], summed(products) or "0", figure(row.dots[j])))
    return Step("Dot products", "q · k, feature by feature", r"s_j = \sum_c q_c\,k_{jc}", tuple(lines))


def _scale(row: Row, telling: Telling, keys: list[int]) -> Step:
    word, latex = scale_spelled(row)
    lines = [
        Line(telling.names[j], f"{figure(row.dots[j])} × {figure(row.scale)}", figure(row.scaled[j])) for j in keys
    ]
    return Step("Scale", f"× {word}", rf"s_j = s_j \cdot {latex}", tuple(lines))


def _softcap(row: Row, telling: Telling, keys: list[int]) -> Step:
    assert row.capped is not None
    cap = f"{row.softcap:g}"
    lines = [Line(telling.names[j], f"{cap}·tanh({figure(row.scaled[j])}/{cap})", figure(row.capped[j])) for j in keys]
    return Step("Softcap", f"{cap} · tanh(s / {cap})", rf"s_j = {cap}\,\tanh(s_j / {cap})", tuple(lines))


def _bias(row: Row, telling: Telling, keys: list[int]) -> Step:
    assert row.bias is not None
    before = row.scaled if row.capped is None else row.capped
    lines = [
        Line(telling.names[j], f"{figure(before[j])} + {factor(row.bias[j])}", figure(before[j] + row.bias[j]))
        for j in keys
    ]
    return Step("Bias", telling.bias or "", r"s_j = s_j + b_j", tuple(lines))


def _mask(row: Row, telling: Telling, keys: list[int]) -> Step:
    assert row.allowed is not None
    hidden = int(row.keys - row.allowed.sum())
    lines = [
        Line(telling.names[j], "", figure(row.scores[j]), "" if row.may(j) else telling.why(j), faint=not row.may(j))
        for j in keys
    ]
    return Step(
        "Mask",
        telling.mask or "",
        r"s_j = -\infty \ \text{where the query may not attend}",
        tuple(lines),
        f"{hidden:,} of {row.keys:,} keys are hidden from this query",
    )


def _largest(row: Row, telling: Telling) -> Step:
    latex = r"m = \max_j s_j" if row.sink is None else r"m = \max(\mathrm{sink}, \max_j s_j)"
    if row.max_score == -np.inf:
        says = "there is none: the query may attend to nothing"
    else:
        says = f"{figure(row.max_score)}, of {telling.names[int(np.argmax(row.scores))]}"
    if row.sink is not None:
        says += f"; the sink is {figure(row.sink)}"
    return Step("Largest score", "max", latex, (), says)


def _exponentials(row: Row, telling: Telling, live: list[int]) -> Step:
    lines = [
        Line(telling.names[j], f"e^({figure(row.scores[j])} − {factor_of(row.shift)})", figure(row.exponentials[j]))
        for j in live
    ]
    if row.sink is not None and row.sink_exponential is not None:
        lines.append(
            Line("sink", f"e^({figure(row.sink)} − {factor_of(row.shift)})", figure(row.sink_exponential), "no value")
        )
    return Step("Exponentials", "e^(score − largest)", r"e_j = e^{s_j - m}", tuple(lines))


def factor_of(value: float) -> str:
    """A computed number inside a difference: negative ones in brackets.

    >>> factor_of(-0.5)
    '(-0.5000)'
    """
    text = figure(value)
    return f"({text})" if text.startswith(("-", "−")) else text


def _denominator(row: Row, live: list[int]) -> Step:
    terms = [figure(row.exponentials[j]) for j in live]
    if row.sink_exponential is not None:
        terms.append(figure(row.sink_exponential))
    rest = (row.keys if row.allowed is None else int(row.allowed.sum())) - len(live)
    more = f" + … {rest:,} more" if rest else ""
    latex = r"z = \sum_j e_j" if row.sink is None else r"z = \sum_j e_j + e^{\mathrm{sink} - m}"
    return Step("Denominator", "the sum", latex, (), f"{' + '.join(terms) or '0'}{more} = {figure(row.total)}")


def _weights(row: Row, telling: Telling, keys: list[int]) -> Step:
    lines = []
    # where attention is spread thin, bars for weights of one would all be empty
    largest = max(row.weights.tolist(), default=0.0)
    largest = largest if 0.0 < largest < THIN else 1.0
    for j in keys:
        if row.may(j):
            worked = f"{figure(row.exponentials[j])} / {figure(row.total)}"
            share = _share(row.weights[j] / largest)
            lines.append(Line(telling.names[j], worked, figure(row.weights[j]), share=share))
        else:
            lines.append(Line(telling.names[j], "", figure(row.weights[j]), "masked", faint=True))
    says = f"they sum to {figure(row.weights.sum())}; entropy {figure(row.entropy)} nats, log-sum-exp {figure(row.lse)}"
    if largest != 1.0:
        says += f"; a full bar is {figure(largest)}, the largest"
    return Step("Weights", "e^(score − largest) / sum", r"w_j = e_j / z", tuple(lines), says)


def _share(weight: float) -> float:
    return float(weight) if math.isfinite(weight) else 0.0


def _dropout(row: Row, telling: Telling, live: list[int]) -> Step:
    lines = []
    for j in live:
        dropped = not row.final[j]
        worked = "dropped" if dropped else f"{figure(row.weights[j])} × {row.rescale:.4g}"
        lines.append(Line(telling.names[j], worked, figure(row.final[j]), faint=dropped))
    latex = rf"w_j = w_j \cdot {row.rescale:.4g} \ \text{{or}} \ 0"
    return Step("Dropout", f"kept weights × {row.rescale:.4g}", latex, tuple(lines))


def _values(row: Row, telling: Telling, live: list[int]) -> Step:
    lines = [
        Line(
            telling.names[j],
            f"{figure(row.final[j])} × {given_vector(row.v[j], 4)}",
            vector(row.contribution(j), 4),
        )
        for j in live
    ]
    return Step("Contributions", "weight × v", r"c_j = w_j\,v_j", tuple(lines))


def _output(row: Row) -> Step:
    return Step("Output", "the sum of the contributions", r"\mathrm{output} = \sum_j c_j", (), vector(row.output))
