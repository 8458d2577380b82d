"""One attention call of a model: who made it, when, and what was attended to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.calls import gradients, observe
from clearhead.core.arrays import Array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed, Shows
from clearhead.watching.given import Given

Names = tuple[str, ...]
NEEDS = "want={'weights': True} or want={'keep': True} when watching keeps what it takes"


@dataclass(frozen=True, eq=False)
class Call(Shows):
    """One attention call of a model: who made it, when, and what was attended to.

    The fields of `observed` can be asked of the call itself: `call.entropy`, `call.received`, `call.top`. Its output is
    kept where `want` has output=True, and else has no features. `heads` says which heads were kept, None for all.
    `queries_named` and `keys_named` are the tokens of each batch row, where they are known. `counted` is how many of
    the last queries `received` counts, None for all.
    """

    name: str
    kind: str
    index: int
    step: int
    layer: int
    keys: int
    observed: Observed
    heads: tuple[int, ...] | None = None
    distance: Array | None = None
    kept: Given | None = None
    queries_named: tuple[Names, ...] | None = None
    keys_named: tuple[Names, ...] | None = None
    counted: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, queries, keys): the shape that the matrix of weights has or would have."""
        return (*self.observed.lse.shape, self.keys)

    def rows(self, queries: Sequence[int]) -> np.ndarray:
        """The exact weights of some queries, (…, heads, len(queries), keys), from what was kept."""
        count = self.shape[-2]
        places = [i % count for i in whole_numbers("queries", queries, count)]
        if self.weights is not None:
            return to_numpy(self.weights)[..., places, :]
        if self.queries is not None and set(places) <= set(np.asarray(self.queries.indices).tolist()):
            found = np.asarray(self.queries.indices).tolist()
            return to_numpy(self.queries.weights)[..., [found.index(i) for i in places], :]
        kept = self._kept()
        again = observe(kept.q, kept.k, kept.k[..., :1], **kept.options, queries=places)
        return to_numpy(again.queries.weights) if again.queries is not None else np.empty(0)

    def carried(self, back: np.ndarray) -> np.ndarray:
        """`back` (…, heads, r, queries) times the weights: what r mixtures of queries attend to, (…, heads, r, keys).

        A product of vectors and the matrix that is never built: the gradient of the values is that product.
        """
        if self.weights is not None:
            return back @ to_numpy(self.weights).astype(back.dtype)
        kept = self._kept()
        q, k = (to_numpy(a).astype(back.dtype) for a in (kept.q, kept.k))
        group = q.shape[-3] // k.shape[-3]
        k = np.repeat(k, group, axis=-3) if group > 1 else k  # the gradient of shared values would add up over heads
        k = np.broadcast_to(k, (*q.shape[:-2], *k.shape[-2:]))
        bare = replace(kept, mask=_bare(kept.mask), bias=_bare(kept.bias), sinks=_bare(kept.sinks))
        dout = np.ascontiguousarray(np.swapaxes(back, -1, -2))  # (…, heads, queries, r)
        values = np.zeros((*k.shape[:-1], dout.shape[-1]), back.dtype)
        return np.swapaxes(gradients(q, k, values, dout, **bare.options)[2], -1, -2)

    def _kept(self) -> Given:
        if self.kept is None:
            raise ArgumentError("want", f"kept neither weights nor queries and keys of {self.name!r}: {NEEDS}")
        return self.kept

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.shape))
        return f"Call({self.name!r}, layer {self.layer}, step {self.step}, {shape}, by {self.kernel!r})"


def _bare(array: Array | None) -> np.ndarray | None:
    return None if array is None else to_numpy(array)


def layer_of(name: str) -> int | None:
    """The number of a layer in a module's name: the first whole number between dots.

    >>> layer_of("encoder.layer.3.attention.self"), layer_of("attn")
    (3, None)
    """
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return None if found is None else int(found.group(1))


def of_batch(weights: np.ndarray, batch: int) -> np.ndarray:
    """The weights (heads, queries, keys) of one batch row of (…, heads, queries, keys), or of (queries, keys)."""
    rows = weights.reshape((-1, *((1,) * (3 - weights.ndim)), *weights.shape[-3:]))
    if isinstance(batch, bool) or not isinstance(batch, int | np.integer) or not 0 <= batch < len(rows):
        raise ArgumentError("batch", f"is {batch!r}, expected 0 to {len(rows) - 1}")
    return rows[batch]


def whole_numbers(argument: str, given: Any, count: int) -> list[int]:
    """Positions below `count`, negative from the end: one, or several; words that say so where they are no such."""
    chosen = given if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for one in chosen:
        if isinstance(one, bool) or not isinstance(one, int | np.integer) or not -count <= one < count:
            raise ArgumentError(argument, f"has {one!r}, expected positions from {-count} to {count - 1}")
    return [int(one) for one in chosen]
