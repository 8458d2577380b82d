"""A row taken apart: one query–key pair as a whole, and every single operation as a numbered step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from clearhead.explain.render.page import factor, figure, given_vector, summed, vector
from clearhead.explain.row import Row


@dataclass(frozen=True, eq=False)
class Cell:
    """One query–key pair with the whole computation: from the products of features to what the value adds."""

    query: str
    key: str
    terms: np.ndarray
    dot: float
    score: float
    allowed: bool
    exponential: float
    weight: float
    contribution: np.ndarray
    lines: tuple[str, ...] = field(repr=False)

    def __str__(self) -> str:
        return "\n".join([f"{self.query} → {self.key}", *(f"  {line}" for line in self.lines)])


def cell(row: Row, key: int, query_name: str, key_name: str, reason: str | None) -> Cell:
    """The pair of the row's query and one key; `reason` says why it is masked, where it is."""
    with np.errstate(invalid="ignore", over="ignore"):
        terms = row.q * row.k[key]
    products = [f"{factor(a)}·{factor(b)}" for a, b in zip(row.q, row.k[key], strict=True)]
    lines = [
        f"q · k = {summed(products, 64) or '0'} = {figure(row.dots[key])}",
        f"× scale = {figure(row.dots[key])} × {figure(row.scale)} = {figure(row.scaled[key])}",
    ]
    before = row.scaled[key]
    if row.capped is not None and row.softcap is not None:
        cap = f"{row.softcap:g}"
        lines.append(f"softcap = {cap} · tanh({figure(before)} / {cap}) = {figure(row.capped[key])}")
        before = row.capped[key]
    if row.bias is not None:
        lines.append(f"+ bias = {figure(before)} + {factor(row.bias[key])} = {figure(before + row.bias[key])}")
    if not row.may(key):
        lines += [f"mask = −∞: {reason}", "weight = 0: its value adds nothing"]
    else:
        lines += [
            f"e^(score − largest) = e^({figure(row.scores[key])} − {factor(row.shift)})"
            f" = {figure(row.exponentials[key])}",
            f"weight = {figure(row.exponentials[key])} / {figure(row.total)} = {figure(row.weights[key])}",
        ]
        if row.kept is not None:
            lines.append(f"dropout = {_dropped(row, key)}")
        product = f"{figure(row.final[key])} × {given_vector(row.v[key])}"
        lines.append(f"adds {product} = {vector(row.contribution(key))} to the output")
    return Cell(
        query_name,
        key_name,
        terms,
        float(row.dots[key]),
        float(row.scores[key]),
        row.may(key),
        float(row.exponentials[key]),
        float(row.weights[key]),
        row.contribution(key),
        tuple(lines),
    )


def _dropped(row: Row, key: int) -> str:
    if not row.final[key]:
        return f"{figure(row.weights[key])} is dropped = 0"
    return f"{figure(row.weights[key])} × {row.rescale:g} = {figure(row.final[key])}"


@dataclass(frozen=True)
class Operation:
    """One operation: its number, what it is, one sentence with its numbers, and the number it gives."""

    number: int
    kind: str
    sentence: str
    value: float

    def __str__(self) -> str:
        return f"{self.number}. {self.sentence}"


def walk(row: Row, names: tuple[str, ...], reasons: dict[int, str]) -> Iterator[Operation]:
    """Every multiply-add, exponential and division of the row in order, and the few operations between them."""
    number = 0

    def step(kind: str, sentence: str, value: float) -> Operation:
        nonlocal number
        number += 1
        return Operation(number, kind, sentence, float(value))

    for j, name in enumerate(names):
        yield from _scored(row, j, name, reasons, step)
    seen = [j for j in range(row.keys) if row.may(j)]
    if not seen and row.sink is None:
        yield step("nothing", "The query may attend to no key: every weight is 0, and so is the output.", 0.0)
        return
    sink = "" if row.sink is None else f", the sink {figure(row.sink)} among them,"
    yield step("maximum", f"The largest score{sink} is {figure(row.shift)}.", row.shift)
    for j in seen:
        sentence = f"{names[j]}: e^({figure(row.scores[j])} − {factor(row.shift)}) = {figure(row.exponentials[j])}."
        yield step("exponential", sentence, row.exponentials[j])
    total = 0.0
    if row.sink is not None and row.sink_exponential is not None:
        total = row.sink_exponential
        sentence = f"The sink: e^({figure(row.sink)} − {factor(row.shift)}) = {figure(total)}, in the denominator only."
        yield step("exponential", sentence, total)
    for j in seen:
        before, total = total, total + float(row.exponentials[j])
        sentence = f"Denominator: {figure(before)} + {figure(row.exponentials[j])} = {figure(total)}."
        yield step("addition", sentence, total)
    for j in seen:
        sentence = f"{names[j]}: weight {figure(row.exponentials[j])} / {figure(row.total)} = {figure(row.weights[j])}."
        yield step("division", sentence, row.weights[j])
    if row.kept is not None:
        for j in seen:
            yield step("dropout", f"{names[j]}: {_dropped(row, j)}.", row.final[j])
    yield from _averaged(row, seen, names, step)


def _scored(row: Row, j: int, name: str, reasons: dict[int, str], step: object) -> Iterator[Operation]:
    assert callable(step)
    total = 0.0
    for c in range(row.features):
        before, total = total, total + float(row.q[c]) * float(row.k[j, c])
        sentence = f"{name}, feature {c + 1}: {figure(before)} + {factor(row.q[c])}·{factor(row.k[j, c])}"
        yield step("multiply-add", f"{sentence} = {figure(total)}.", total)
    sentence = f"{name}: the dot product {figure(row.dots[j])} × scale {figure(row.scale)} = {figure(row.scaled[j])}."
    yield step("scale", sentence, row.scaled[j])
    before = row.scaled[j]
    if row.capped is not None:
        sentence = f"{name}: {row.softcap:g} · tanh({figure(before)} / {row.softcap:g}) = {figure(row.capped[j])}."
        before = row.capped[j]
        yield step("softcap", sentence, before)
    if row.bias is not None:
        sentence = f"{name}: {figure(before)} + bias {factor(row.bias[j])} = {figure(before + row.bias[j])}."
        yield step("bias", sentence, before + row.bias[j])
    if not row.may(j):
        yield step("mask", f"{name}: −∞, because {reasons.get(j, 'the mask hides it')}.", -np.inf)


def _averaged(row: Row, seen: list[int], names: tuple[str, ...], step: object) -> Iterator[Operation]:
    assert callable(step)
    for c in range(row.v.shape[-1]):
        total = 0.0
        for j in seen:
            before, total = total, total + float(row.final[j]) * float(row.v[j, c])
            sentence = f"Output {c + 1}, {names[j]}: {figure(before)} + {figure(row.final[j])}·{factor(row.v[j, c])}"
            yield step("multiply-add", f"{sentence} = {figure(total)}.", total)
