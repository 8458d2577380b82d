"""A table of what was seen, by layer and head: entropy, share on the first token, mean distance, largest logit."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from clearhead.core.arrays import to_numpy
from clearhead.watching.call import Call
from clearhead.watching.record import Record
from clearhead.watching.tables import columns, plain, shown


@dataclass(frozen=True)
class Line:
    """One head of one module, over all its queries, batch rows and steps; None where it was not observed.

    - entropy: the mean of −Σ w ln w over queries, in nats.
    - first: the mean weight on the first token, the first key that anything attends to.
    - distance: the mean of Σ w·|i − j|, in positions.
    - largest: the largest logit, the score before the softmax, of all its queries; not a weight.
    """

    name: str
    layer: int
    head: int
    entropy: float | None
    first: float | None
    distance: float | None
    largest: float | None


@dataclass(frozen=True)
class Summary:
    """The table: one line for each head. Printed, it fits the terminal; `str` gives it in 80 columns."""

    lines: tuple[Line, ...]
    missed: dict[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """The table as a list of dicts."""
        return [{field.name: getattr(line, field.name) for field in fields(Line)} for line in self.lines]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        if not self.lines:
            yield "nothing was seen"
        if self.lines:
            yield _table(self.lines, options.max_width)
        for name, why in self.missed.items():
            yield Text(f"missed {name or 'the model'}: {why}")

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__


def _table(lines: Sequence[Line], width: int) -> Table:
    narrow = width < 90
    logit = "largest logit" if width >= 56 else "logit"
    table = columns("layer" if narrow else "module", "head", "entropy", "on first", "distance", logit)
    if not narrow:
        table.columns[0].justify = "left"
    before = None
    for line in lines:
        who = Text(str(line.layer) if narrow else line.name)  # a name is no markup, whatever brackets it has
        table.add_row(
            who if line.name != before else "",
            str(line.head),
            shown(line.entropy, ".3f"),
            shown(line.first, ".1%"),
            shown(line.distance, ".2f"),
            shown(line.largest, ".2f"),
        )
        before = line.name
    return table


def summary(seen: Record) -> Summary:
    """Every head of every module that was seen.

    Queries that may attend to nothing are left out. So are padded positions, where they can be told: positions of a
    sequence on itself that no query attends to.
    """
    by_name: dict[str, list[Call]] = {}
    for call in seen:
        by_name.setdefault(call.name, []).append(call)
    lines: list[Line] = []
    for name, calls in by_name.items():
        counts = [call.shape[-3] if len(call.shape) > 2 else 1 for call in calls]
        heads = calls[0].heads or range(max(counts))
        for place, head in enumerate(heads):  # a module may make calls with different numbers of heads
            having = [call for call, count in zip(calls, counts, strict=True) if place < count]
            lines.append(Line(name, calls[0].layer, head, *_columns(having, place)))
    return Summary(tuple(lines), dict(seen.missed))


def line_of(call: Call, place: int, batch: int) -> Line:
    """One head of one call, by its place among those kept, over the queries of one batch row."""
    head = call.heads[place] if call.heads else place
    return Line(call.name, call.layer, head, *_columns([call], place, slice(batch, batch + 1)))


def _columns(calls: list[Call], head: int, rows: slice = slice(None)) -> tuple[float | None, ...]:
    entropy, distance, first, largest = [], [], [], []
    for call in calls:
        lse = _of_head(call.lse, head)[rows]  # (batch, queries)
        live = np.isfinite(lse)
        received = None if call.received is None else _of_head(call.received, head)[rows]
        if received is not None and call.counted is None and call.shape[-2] == call.keys:
            live &= received > 0
        entropy.append(np.where(live, _of_head(call.entropy, head)[rows], np.nan).ravel())
        largest.append(np.where(live, _of_head(call.max_score, head)[rows], np.nan).ravel())
        if call.distance is not None:
            distance.append(np.where(live, _of_head(call.distance, head)[rows], np.nan).ravel())
        if received is not None:
            # of the queries that attend to anything, padded ones included: `received` does not tell them apart
            count = np.isfinite(lse[:, -(call.counted or lse.shape[-1]) :]).sum(-1)
            place = (received > 0).argmax(-1)
            share = np.take_along_axis(received, place[:, None], -1)[:, 0] / np.maximum(count, 1)
            first.append(np.where(count > 0, share, np.nan))
    return _mean(entropy), _mean(first), _mean(distance), _most(largest)


def _of_head(array: Any, head: int) -> np.ndarray:
    """One head of an array (…, heads, n), batch rows in one axis, in float64."""
    numbers = to_numpy(array).astype(np.float64)
    numbers = numbers.reshape((-1, *numbers.shape[-2:])) if numbers.ndim > 1 else numbers[None, None]
    return numbers[:, head]


def _mean(parts: list[np.ndarray]) -> float | None:
    numbers = np.concatenate(parts) if parts else np.array([])
    return float(np.nanmean(numbers)) if np.isfinite(numbers).any() else None


def _most(parts: list[np.ndarray]) -> float | None:
    numbers = np.concatenate(parts) if parts else np.array([])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(np.nanmax(numbers)) if np.isfinite(numbers).any() else None
