"""What each head does otherwise on one prompt than on another: how far its weights moved, and where to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from clearhead.core.errors import ArgumentError
from clearhead.watching.call import Call
from clearhead.watching.record import Record
from clearhead.watching.summary import Line, summary
from clearhead.watching.tables import columns, plain, shown

SHOWN = 12


@dataclass(frozen=True)
class Change:
    """One head on one prompt less the same head on another; None where it was not observed, or cannot be compared.

    - moved: the mean over queries of ½ Σ |w − w′|, the share of the weight that lies elsewhere; prompts of one length.
    - entropy, first, distance: the differences of the columns of `summary`.
    """

    name: str
    layer: int
    head: int
    moved: float | None
    entropy: float | None
    first: float | None
    distance: float | None


@dataclass(frozen=True)
class Difference:
    """One line for each head. `best()` are those that changed most. Printed, it is a table of them."""

    lines: tuple[Change, ...]

    def best(self, count: int = SHOWN) -> list[Change]:
        """The heads that changed most, the most first: by what moved, or by entropy where nothing else is known."""

        def much(line: Change) -> tuple[float, float]:
            return (-1.0 if line.moved is None else line.moved, abs(line.entropy or 0.0))

        return sorted(self.lines, key=much, reverse=True)[:count]

    def rows(self) -> list[dict[str, Any]]:
        """The table as a list of dicts."""
        return [dict(vars(line)) for line in self.lines]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        table = columns("layer", "head", "moved", "entropy", "on first", "distance")
        best = self.best()
        for line in best:
            numbers = (shown(line.moved, ".1%"), shown(line.entropy, "+.3f"), shown(line.first, "+.1%"))
            table.add_row(str(line.layer), str(line.head), *numbers, shown(line.distance, "+.2f"))
        yield table
        if len(best) < len(self.lines):
            yield Text(f"the {len(best)} that changed most of {len(self.lines)} heads")

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__


def difference(seen: Record, other: Record) -> Difference:
    """What each head does otherwise in `seen` than in `other`, which the same model made of another prompt.

    >>> import torch, clearhead as ch
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> prompts = torch.zeros(1, 5, 16), torch.ones(1, 5, 16)
    >>> with ch.watch(model, want={"keep": True, "received": True}) as one:
    ...     output = model(prompts[0])
    >>> with ch.watch(model, want={"keep": True, "received": True}) as two:
    ...     output = model(prompts[1])
    >>> [round(line.moved, 4) for line in (one - two).lines]
    [0.0, 0.0]

    How far weights moved is known of prompts of one length, where watching kept what it takes, want={"keep": True} or
    {"weights": True}. It takes n² time and O(n) memory.
    """
    lines, others = summary(seen).lines, summary(other).lines
    heads = [(line.name, line.head) for line in lines]
    if not heads or heads != [(line.name, line.head) for line in others]:
        raise ArgumentError("other", "was seen of other modules or heads, expected the same model on another prompt")
    moved: dict[tuple[str, int], list[np.ndarray]] = {}
    if len(seen) == len(other):
        for mine, theirs in zip(seen, other, strict=True):
            for head, much in _moved(mine, theirs).items():
                moved.setdefault((mine.name, head), []).append(much)
    return Difference(tuple(_change(one, two, moved) for one, two in zip(lines, others, strict=True)))


def _change(one: Line, two: Line, moved: dict[tuple[str, int], list[np.ndarray]]) -> Change:
    def less(field: str) -> float | None:
        a, b = getattr(one, field), getattr(two, field)
        return None if a is None or b is None else a - b

    much = moved.get((one.name, one.head))
    mean = None if not much else float(np.concatenate(much).mean())  # a step may have one query, and another many
    return Change(one.name, one.layer, one.head, mean, less("entropy"), less("first"), less("distance"))


def _moved(mine: Call, theirs: Call) -> dict[int, np.ndarray]:
    """The share of the weight of each head that lies elsewhere, for the queries that are alive in both."""
    known = all(call.weights is not None or call.kept is not None for call in (mine, theirs))
    if not known or mine.shape != theirs.shape or len(mine.shape) < 3 or mine.name != theirs.name:
        return {}
    blocks = zip(mine.row_blocks(), theirs.row_blocks(), strict=True)
    parts = [np.abs(a.astype(np.float64) - b).sum(-1) / 2 for a, b in blocks]  # (…, heads, some queries)
    apart = np.concatenate(parts, axis=-1).reshape(-1, *mine.shape[-3:-1])
    alive = (mine.live() & theirs.live()).reshape(apart.shape)
    found = {}
    for place, head in enumerate(mine.heads or range(apart.shape[1])):
        every = apart[:, place][alive[:, place]]
        if every.size:
            found[head] = every
    return found
