"""Attention from its definition, a row at a time over exactly the keys that a query may see; no code of clearhead's.

    softmax(scale · q kᵀ  [softcap] [+ bias]) v  over the allowed keys, and the chain rule backwards

Everything is in one precision, `number`: float64 and longer are the truth, float32 is what an ordinary way of computing
it gives. A key that a query may not see is never touched, so whatever it holds cannot matter.

Beside each result stand its `size` and whether it is `spoiled`. The size is the same sum with the absolute value of
every term, each row's times 1 + the size of its scores: what one rounding of each step may move. A result is spoiled
where a number that is not finite goes into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Found = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Question:
    """One problem in full arrays: q (*batch, Hq, T, D), k, v with Hk heads; the rest (rows, Hq, T, S), or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray  # (*batch, Hq, T, Dv)
    dlse: np.ndarray  # (*batch, Hq, T)
    allowed: np.ndarray
    scale: float
    bias: np.ndarray | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None  # (Hq,)
    keep: np.ndarray | None = None
    rescale: float = 1.0
    by_steps: bool = False  # PyTorch differentiates each step: an output that is NaN spoils what is derived from it

    @property
    def batch(self) -> tuple[int, ...]:
        return np.broadcast_shapes(self.q.shape[:-3], self.k.shape[:-3], self.v.shape[:-3])


@dataclass(eq=False)
class Solved:
    """The results by name, the size of the terms of each, and where it is spoiled."""

    value: Found
    size: Found
    spoiled: Found


def own(at: tuple[int, ...], lead: tuple[int, ...]) -> tuple[int, ...]:
    """The batch row of an array with these leading axes that serves batch row `at` of all."""
    at = at[len(at) - len(lead) :]
    return tuple(0 if size == 1 else i for i, size in zip(at, lead, strict=True))


def solve(ask: Question, number: Any = np.float64) -> Solved:
    """Every result of a problem; query head h uses key head h // (Hq / Hk)."""
    with np.errstate(all="ignore"):
        return _solve(ask, number)


def _solve(ask: Question, number: Any) -> Solved:
    q, k, v, dout, dlse = (a.astype(number) for a in (ask.q, ask.k, ask.v, ask.dout, ask.dlse))
    batch, heads, queries, keys, width = ask.batch, q.shape[-3], q.shape[-2], k.shape[-2], v.shape[-1]
    group = heads // k.shape[-3] if k.shape[-3] else 1
    rows = int(np.prod(batch))
    shapes = {
        "output": (rows, heads, queries, width),
        "weights": (rows, heads, queries, keys),
        "dbias": (rows, heads, queries, keys),
        **dict.fromkeys(("lse", "max_score", "entropy"), (rows, heads, queries)),
        "dq": q.shape,
        "dk": k.shape,
        "dv": v.shape,
        "dsinks": (heads,),
    }
    value, size = ({what: np.zeros(shape, number) for what, shape in shapes.items()} for _ in range(2))
    spoiled = {what: np.zeros(shape, bool) for what, shape in shapes.items()}
    for row, at in enumerate(np.ndindex(*batch)):
        for h in range(heads):
            of_query, of_key, of_value = (
                (*own(at, a.shape[:-3]), head) for a, head in ((q, h), (k, h // group), (v, h // group))
            )
            for i in range(queries):
                seen = np.flatnonzero(ask.allowed[row, h, i])
                one = Row(ask, (row, h, i), seen, q[of_query][i], k[of_key][seen], v[of_value][seen], number)
                one.forward()
                one.backward(dout[at][h, i], dlse[at][h, i])
                for what in ("output", "lse", "max_score", "entropy"):
                    value[what][row, h, i], size[what][row, h, i] = one.value[what], one.size[what]
                    spoiled[what][row, h, i] = one.spoiled[what]
                for what in ("weights", "dbias"):
                    value[what][row, h, i, seen], size[what][row, h, i, seen] = one.value[what], one.size[what]
                    spoiled[what][row, h, i, seen] = one.spoiled[what]
                places: dict[str, Any] = {"dq": (*of_query, i), "dk": (*of_key, seen), "dv": (*of_value, seen)}
                for what, place in (*places.items(), ("dsinks", h)):
                    value[what][place] += one.value[what]
                    size[what][place] += one.size[what]
                    spoiled[what][place] |= one.spoiled[what]
    return Solved(value, size, spoiled)


class Row:
    """One query, the keys it sees, and everything that follows from them."""

    def __init__(self, ask: Question, at: tuple[int, int, int], seen: np.ndarray, q: Any, k: Any, v: Any, number: Any):
        self.ask, self.q, self.k, self.v, self.number = ask, q, k, v, number
        _, head, _ = at
        self.bias = None if ask.bias is None else ask.bias[at][seen].astype(number)
        self.keep = None if ask.keep is None else ask.keep[at][seen]
        self.sink = None if ask.sinks is None else number(ask.sinks[head])
        self.value: Found = {}
        self.size: Found = {}
        self.spoiled: Found = {}
        self.empty = not seen.size

    def forward(self) -> None:
        """scores → scale → softcap → bias → softmax → dropout → values."""
        number, ask = self.number, self.ask
        self.scale = number(ask.scale)
        raw = self.k @ self.q * self.scale
        steep = np.abs(self.k) @ np.abs(self.q) * abs(self.scale)  # how large the terms of a score are
        self.slope = np.ones_like(raw)
        scores, unit = raw, 1 + (steep.max() if steep.size else number(0))
        if ask.softcap is not None:
            cap = number(ask.softcap)
            bent = np.tanh(raw / cap)
            scores, self.slope = cap * bent, 1 - bent * bent
            unit = unit * (1 + 1 / cap)  # the slope changes by up to 1 / cap with a score
        if self.bias is not None:
            scores = scores + self.bias
            finite = np.abs(self.bias[np.isfinite(self.bias)])
            unit = unit + (finite.max() if finite.size else 0)
        peak = scores.max() if scores.size else number(-np.inf)
        top = peak
        if self.sink is not None:
            top = max(peak, self.sink) if not np.isnan(peak) else peak
            unit = unit + (abs(self.sink) if np.isfinite(self.sink) else 0)
        shift = number(0) if top == -np.inf else top
        exponentials = np.exp(scores - shift)
        none_but_keys = exponentials.sum()
        # a sink of +inf takes everything
        infinite = self.sink is not None and self.sink == np.inf
        self.of_sink = number(infinite) if self.sink is None or infinite else np.exp(self.sink - shift)
        total = none_but_keys + self.of_sink
        lse = shift + np.log(total) if total != 0 else number(-np.inf)
        self.weights = exponentials / total if total != 0 else exponentials
        self.of_sink = self.of_sink / total if total != 0 else self.of_sink
        positive = self.weights != 0
        logs = np.log(self.weights[positive])
        self.kept = self.weights if self.keep is None else self.weights * number(ask.rescale) * self.keep
        self.unit = unit
        # dropped weights are left out, not multiplied with 0
        some = slice(None) if self.keep is None else self.keep
        self.value |= {
            "output": self.kept[some] @ self.v[some],
            "weights": self.weights,
            "lse": lse,
            "max_score": peak,
            "entropy": -(self.weights[positive] * logs).sum(),
        }
        self.size |= {
            "output": unit * (self.kept @ np.abs(self.v)),
            "weights": unit * self.weights,
            "lse": unit + (abs(lse) if np.isfinite(lse) else 0),
            "max_score": unit,
            "entropy": unit * (self.weights[positive] * (1 + np.abs(logs))).sum(),
        }
        score = not (np.isfinite(self.k).all() and np.isfinite(self.q).all()) if not self.empty else False
        if self.bias is not None:
            score = score or bool((np.isnan(self.bias) | (self.bias == np.inf)).any())
        self.by_score = np.bool_(score)
        by_value = ~np.isfinite(self.v).all(axis=0)
        self.by_value = by_value
        self.spoiled |= dict.fromkeys(("weights", "lse", "max_score", "entropy"), self.by_score)
        self.spoiled["output"] = self.by_score | by_value

    def backward(self, dout: np.ndarray, dlse: np.ndarray) -> None:
        """The chain rule through `forward`, of ⟨output, dout⟩ + lse · dlse."""
        number = self.number
        nothing = not (self.weights.any() or self.of_sink)
        by_dout = ~np.isfinite(dout)
        if self.empty:  # it takes no part, whatever its gradient holds
            dout, by_dout = np.zeros_like(dout), np.zeros_like(by_dout)
        dkept, large = self.v @ dout, np.abs(self.v) @ np.abs(dout)
        if self.keep is not None:
            dkept, large = (np.where(self.keep, a * number(self.ask.rescale), 0) for a in (dkept, large))
        delta, delta_size = self.weights @ dkept, self.weights @ large
        slack = number(0) if nothing else abs(dlse)
        dscores = self.weights * (dkept - delta + (number(0) if nothing else dlse))
        terms = self.unit * self.weights * (large + delta_size + slack)
        draw = dscores * self.slope * self.scale
        steep = terms * abs(self.scale)
        self.value |= {
            "dbias": dscores,
            "dq": draw @ self.k if not self.empty else np.zeros_like(self.q),
            "dk": np.outer(draw, self.q),
            "dv": np.outer(self.kept, dout),
            "dsinks": self.of_sink * ((number(0) if nothing else dlse) - delta),
        }
        self.size |= {
            "dbias": terms,
            "dq": steep @ np.abs(self.k) if not self.empty else np.zeros_like(self.q),
            "dk": np.outer(steep, np.abs(self.q)),
            "dv": self.unit * np.outer(self.kept, np.abs(dout)),
            "dsinks": self.unit * self.of_sink * (slack + delta_size),
        }
        any_of = self.by_score | self.by_value.any() | by_dout.any()
        self.spoiled |= dict.fromkeys(("dbias", "dq", "dk", "dsinks"), any_of)
        spoiled = self.by_score | by_dout | (self.by_value & self.ask.by_steps)
        self.spoiled["dv"] = np.broadcast_to(spoiled, (len(self.weights), len(dout)))


def pooled(weights: np.ndarray, rows: int, columns: int, by: Any) -> np.ndarray:
    """A map of the weights: query i is in row i·rows // T, key j in column j·columns // S."""
    *lead, queries, keys = weights.shape
    rows, columns = min(rows, queries), min(columns, keys)
    found = np.zeros((*lead, rows, columns), weights.dtype)
    for r in range(rows):
        mine = [i for i in range(queries) if i * rows // queries == r]
        for c in range(columns):
            theirs = [j for j in range(keys) if j * columns // keys == c]
            found[..., r, c] = by(weights[..., mine, :][..., theirs], axis=(-1, -2))
    return found


def observed(solved: Solved, want: dict[str, Any]) -> Solved:
    """What is observed, by its definition, from the weights; sizes and spoiled places alike."""
    weights, size, spoiled = (part["weights"] for part in (solved.value, solved.size, solved.spoiled))
    found = Solved({}, {}, {})
    parts = ((found.value, weights), (found.size, size))
    queries, keys = weights.shape[-2:]
    if want.get("weights"):
        for into, array in (*parts, (found.spoiled, spoiled)):
            into["weights"] = array
    if want.get("received"):
        count = queries if want["received"] is True else min(want["received"], queries)
        for into, array in parts:
            into["received"] = array[..., queries - count :, :].sum(-2)
        found.spoiled["received"] = spoiled[..., queries - count :, :].any(-2)
    if want.get("map"):
        for what, by in (("map_mean", np.mean), ("map_max", np.max)):
            for into, array in parts:
                into[what] = pooled(array, *want["map"], by)
            found.spoiled[what] = pooled(spoiled, *want["map"], np.any)
    if want.get("queries") is not None:
        for into, array in (*parts, (found.spoiled, spoiled)):
            into["queries"] = array[..., want["queries"], :]
    if want.get("top"):
        count = want["top"]
        short = np.zeros((*weights.shape[:-1], max(count - keys, 0)), weights.dtype)
        ordered = np.sort(np.where(spoiled, 0, weights), axis=-1)[..., ::-1][..., :count]
        found.value["top"] = np.concatenate([ordered, short], axis=-1)
        most = size.max(-1, initial=0, keepdims=True)
        found.size["top"] = np.broadcast_to(most, found.value["top"].shape)
        found.spoiled["top"] = np.broadcast_to(spoiled.any(-1, keepdims=True), found.value["top"].shape)
    return found
