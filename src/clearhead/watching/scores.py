"""What kind of head it is: scores for heads that look at the token before, at the same token, or at what came after it.

Each is the mean share of a query's weight on a few keys that are known beforehand; `share.py` finds it in O(n) memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from clearhead.core.arrays import is_array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Mask
from clearhead.core.masks import causal, documents
from clearhead.explain.tokens import bar
from clearhead.watching.call import CROSS, Call
from clearhead.watching.places import start
from clearhead.watching.record import Record
from clearhead.watching.tables import columns, plain

SHOWN = 12


@dataclass(frozen=True)
class Score:
    """One head of one module, and its score from 0 to 1; None where no query was there to be scored."""

    name: str
    layer: int
    head: int
    score: float | None


@dataclass(frozen=True)
class Scores(Sequence[Score]):
    """One score for each head, in the order of layers. `best()` are the highest; `array` is (modules, heads)."""

    title: str
    lines: tuple[Score, ...]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, which: Any) -> Any:
        return self.lines[which]

    def best(self, count: int = SHOWN) -> list[Score]:
        """The heads that score highest, the highest first."""
        return sorted((line for line in self.lines if line.score is not None), key=lambda one: -(one.score or 0.0))[
            :count
        ]

    @property
    def array(self) -> np.ndarray:
        """The scores as (modules, heads), NaN where there is none."""
        names = list(dict.fromkeys(line.name for line in self.lines))
        rows = [[line for line in self.lines if line.name == name] for name in names]
        table = np.full((len(names), max(map(len, rows), default=0)), np.nan)
        for place, row in enumerate(rows):
            for at, line in enumerate(row):
                table[place, at] = np.nan if line.score is None else line.score
        return table

    def rows(self) -> list[dict[str, Any]]:
        """The scores as a list of dicts."""
        return [dict(vars(line)) for line in self.lines]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        best = self.best()
        yield Text(self.title, style="bold")
        if not best and self.lines:
            yield Text("no query has such a token")
            return
        table = columns("layer", "head", "score")
        table.add_column("", no_wrap=True)
        for line in best:
            score = line.score or 0.0
            table.add_row(str(line.layer), str(line.head), f"{score:.3f}", bar(score, 30))
        yield table
        if len(best) < len(self.lines):
            yield Text(f"the highest {len(best)} of {len(self.lines)} heads")

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__


def previous_token(seen: Record) -> Scores:
    """The weight that a query gives the token before it, averaged over queries that have one; padding is none."""

    def of(call: Call) -> tuple[Mask, np.ndarray]:
        at, real = _places(call), call.attended().reshape(-1, call.keys)
        return documents(np.arange(call.keys), at - 1), (at >= 1) & real[:, np.maximum(at - 1, 0)]

    return _scored(seen, "previous token: weight on the token before", of)


def first_token(seen: Record) -> Scores:
    """The weight that a query gives the first token, the first key that anything attends to.

    A sliding cache forgets: once a step attends to its last tokens alone, the first of those is what is looked at.
    """

    def of(call: Call) -> tuple[Mask, np.ndarray]:
        first = call.attended().argmax(-1)  # (…,)
        there = np.arange(call.keys) == np.reshape(first, (-1, 1))
        return documents(_rows(there, call), np.ones(call.shape[-2], int)), np.ones(call.shape[-2], bool)

    return _scored(seen, "first token: weight on the first token", of)


def duplicate_token(seen: Record, tokens: Any = None) -> Scores:
    """The weight that a query gives earlier tokens that are the same, averaged over queries that have one."""
    steps = len({call.step for call in seen})

    def of(call: Call) -> tuple[Mask, np.ndarray]:
        ids, queries = _ids(call, tokens, steps)
        return documents(_rows(ids, call), _rows(queries, call)) & _before(call), _again(ids, call)

    return _scored(seen, "duplicate token: weight on the same token earlier", of)


def induction(seen: Record, tokens: Any = None) -> Scores:
    """The weight that a query gives what came after the same token earlier, averaged over queries that have such."""
    steps = len({call.step for call in seen})

    def of(call: Call) -> tuple[Mask, np.ndarray]:
        ids, queries = _ids(call, tokens, steps)
        follows = np.concatenate([np.full((len(ids), 1), -1), ids[:, :-1]], axis=1)  # nothing stands before the first
        upto = causal(offset=start(call))
        return documents(_rows(follows, call), _rows(queries, call)) & upto, _again(ids, call)

    return _scored(seen, "induction: weight on what came after the same token earlier", of)


def _scored(seen: Record, title: str, of: Callable[[Call], tuple[Mask, np.ndarray]]) -> Scores:
    """Every head of every module: its shares over all the queries that count, batch rows and steps."""
    found: dict[str, dict[int, list[np.ndarray]]] = {}
    layers: dict[str, int] = {}
    for call in _on_itself(seen):
        pairs, counts = of(call)
        share = call.weight_on(pairs)  # (…, heads, queries)
        counts = np.broadcast_to(counts.reshape((-1, 1, counts.shape[-1])), (_batch(call), 1, call.shape[-2]))
        count = counts & call.live().reshape(_batch(call), -1, call.shape[-2])
        share = share.reshape(_batch(call), -1, call.shape[-2])
        layers.setdefault(call.name, call.layer)
        heads = found.setdefault(call.name, {})
        for place, head in enumerate(call.heads or range(share.shape[1])):
            heads.setdefault(head, []).append(share[:, place][count[:, place]])
    lines = [
        Score(name, layers[name], head, float(every.mean()) if (every := np.concatenate(parts)).size else None)
        for name, heads in found.items()
        for head, parts in heads.items()
    ]
    return Scores(title, tuple(lines))


def _on_itself(seen: Record) -> list[Call]:
    """The calls of a sequence on itself, with as many keys as queries or with earlier ones from a cache."""
    names = set(seen.names)

    def crosses(name: str) -> bool:
        beside = name.removesuffix("multihead_attn") + "self_attn"  # as `nn.TransformerDecoderLayer` calls the two
        return bool(CROSS.search(name)) or (name.endswith("multihead_attn") and beside in names)

    found = [call for call in seen if not crosses(call.name) and call.shape[-2] <= call.keys]
    if not found:
        raise ArgumentError("seen", "has no calls of a sequence on itself")
    return found


def _batch(call: Call) -> int:
    return int(np.prod(call.shape[:-3], dtype=int)) if len(call.shape) > 3 else 1


def _places(call: Call) -> np.ndarray:
    """Where queries stand among the keys."""
    return start(call) + np.arange(call.shape[-2])


def _before(call: Call) -> Mask:
    """The keys before a query."""
    return causal(offset=start(call) - 1)


def _ids(call: Call, tokens: Any, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens as whole numbers, equal where tokens are: of the keys (rows, keys) and of the queries (rows, queries)."""
    names: Any = call.keys_named if tokens is None else tokens
    if names is None:
        raise ArgumentError(
            "tokens", f"of {call.name!r} are not known: watch(model, tokens=…) takes a list or a tokenizer"
        )
    rows = to_numpy(names).tolist() if is_array(names) else list(names)
    rows = rows if rows and isinstance(rows[0], list | tuple) else [rows]
    longer = steps > 1 and tokens is not None  # a generated run: each step has the first of all tokens as keys
    if longer and all(len(row) >= call.keys for row in rows):
        rows = [row[: call.keys] for row in rows]
    if any(len(row) != call.keys for row in rows) or len(rows) not in (1, _batch(call)):
        raise ArgumentError(
            "tokens",
            f"has {len(rows)} rows of {len(rows[0])}, expected {'at least ' * longer}{call.keys} for each of "
            f"{_batch(call)} sequences",
        )
    numbers: dict[Any, int] = {}
    ids = np.array([[numbers.setdefault(token, len(numbers)) for token in row] for row in rows])
    real = call.attended().reshape(-1, call.keys)
    ids = np.broadcast_to(ids, (max(len(ids), len(real)), call.keys))
    ids = np.where(np.broadcast_to(real, ids.shape), ids, -2 - np.arange(call.keys))  # padding is the same as nothing
    return ids, ids[:, _places(call)]


def _again(ids: np.ndarray, call: Call) -> np.ndarray:
    """Which queries have an earlier token that is the same, (rows, queries)."""
    found = np.zeros(ids.shape, bool)
    for row, again in zip(ids, found, strict=True):
        again[:] = True
        again[np.unique(row, return_index=True)[1]] = False  # the first of each
    return found[:, _places(call)]


def _rows(ids: np.ndarray, call: Call) -> np.ndarray:
    """Ids as `documents` takes them: for all sequences, or one row for each."""
    ids = ids.astype(int)
    return ids[0] if len(ids) == 1 else ids.reshape(*call.shape[:-3], -1)
