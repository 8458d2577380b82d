"""What is explored: the arrays of one call, its tokens and its options; and the same with cells edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from clearhead.core.arrays import AnyArray, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Lengths
from clearhead.core.mask import Mask
from clearhead.core.problem import pose
from clearhead.core.spelling import read_mask
from clearhead.explain.tokens import names_for
from clearhead.explain.tracing import Trace, trace

MOST_EDITS = 2000  # cells that are edited at once


@dataclass(frozen=True, eq=False)
class Scene(Lengths):
    """One call, with a name for each position.

    `q`, `k` and `v` have a head axis before positions and features; batch axes are taken one row at a time.
    """

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    tokens: tuple[str, ...]
    query_tokens: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        """How many query heads there are."""
        return int(self.q.shape[-3])

    def scene(self, params: Mapping[str, str]) -> Scene:
        """Itself: a call is explored as it is."""
        return self

    def facts(self, params: Mapping[str, str]) -> dict[str, Any]:
        """Nothing beyond the call."""
        return {}

    def trace(self, query: int, head: int = 0) -> Trace:
        """Every step of one query of one head."""
        names: dict[str, Any] = {"tokens": self.tokens, "query_tokens": self.query_tokens}
        return trace(self.q, self.k, self.v, query=query, head=head, **names, **self.options)

    def edited(self, params: Mapping[str, str]) -> Scene:
        """The same with what the page says: edited cells, another mask, scale or softcap.

        `edits` are `array.head.row.column.value`, one after the other, with semicolons between them. Where nothing is
        said it is the same scene, by which what was computed of it is found again.
        """
        if not any(params.get(name) for name in ("edits", "mask", "scale", "softcap")):
            return self
        arrays = {name: getattr(self, name) for name in ("q", "k", "v")}
        text = params.get("edits", "")
        cells = text.split(";") if text else []
        if len(cells) > MOST_EDITS:
            raise ArgumentError("edits", f"are {len(cells):,} cells, expected at most {MOST_EDITS:,}")
        for one in cells:
            name, place, value = _edit(one, arrays)
            if arrays[name] is getattr(self, name):
                arrays[name] = arrays[name].copy()
            arrays[name][place] = value
        options = dict(self.options)
        if params.get("mask"):
            options["mask"] = None if params["mask"] == "none" else read_mask(params["mask"], "mask")
        for name in ("scale", "softcap"):
            if params.get(name):
                options[name] = finite(name, params[name])
        options = {name: value for name, value in options.items() if value is not None}
        changed = replace(self, **arrays, options=options)
        pose(changed.q, changed.k, changed.v, **options)  # refuses in words what does not fit
        return changed

    @property
    def mask(self) -> Mask | None:
        """The mask of the call, if it has one."""
        mask = self.options.get("mask")
        return mask if isinstance(mask, Mask) or mask is None else None


def scene_of(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    name: str = "call",
    tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    **options: Any,
) -> Scene:
    """The scene of a call's arrays, checked as the call itself is; of several batch rows the first."""
    problem = pose(q, k, v, **options)
    arrays = [np.asarray(to_numpy(a), dtype=np.float64) for a in (problem.q, problem.k, problem.v)]
    if not all(a.size for a in arrays):
        raise ArgumentError("q, k, v", "have no numbers: there is nothing to explore")
    q3, k3, v3 = (a.reshape(-1, *a.shape[-3:])[0] for a in arrays)
    keys = names_for("tokens", tokens, k3.shape[-2], "keys")
    if query_tokens is None and q3.shape[-2] == k3.shape[-2]:
        query_tokens = keys
    queries = names_for("query_tokens", query_tokens, q3.shape[-2], "queries")
    given = {name: value for name, value in options.items() if value is not None}
    return Scene(name, q3, k3, v3, keys, queries, given)


def _edit(text: str, arrays: Mapping[str, np.ndarray]) -> tuple[str, tuple[int, int, int], float]:
    parts = text.split(".", 4)
    if len(parts) == 5 and parts[0] in arrays and all(p.isdigit() and len(p) < 10 for p in parts[1:4]):
        place = (int(parts[1]), int(parts[2]), int(parts[3]))
        if all(i < size for i, size in zip(place, arrays[parts[0]].shape, strict=True)):
            return parts[0], place, finite("edits", parts[4])
    raise ArgumentError("edits", f"have {text[:60]!r}, expected array.head.row.column.value within q, k and v")


def finite(name: str, text: str) -> float:
    """The number that a text says, unless it is none or not finite."""
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not np.isfinite(found):
        raise ArgumentError(name, f"is {text[:40]!r}, expected a number")
    return found
