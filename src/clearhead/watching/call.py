"""One attention call of a model: who made it, when, and what was attended to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from clearhead.calls import gradients, observe
from clearhead.core.arrays import Array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Mask, as_mask
from clearhead.core.observations import Observed, Shows
from clearhead.explain.tokens import names_for, position_of
from clearhead.explain.tracing import Trace, trace
from clearhead.watching.given import Given
from clearhead.watching.share import attended, share_in, share_of
from clearhead.watching.top_tokens import Token, top_tokens

# what attention from one sequence to another is called
CROSS = re.compile(r"(?i)cross|enc_?dec|encoder_attn|encoder_attention")
Names = tuple[str, ...]
NEEDS = "want={'weights': True} or want={'keep': True} when watching keeps what it takes"


@dataclass(frozen=True, eq=False)
class Call(Shows):
    """One attention call of a model: who made it, when, and what was attended to.

    The fields of `observed` can be asked of the call itself: `call.entropy`, `call.received`, `call.top`. Its output is
    kept where `want` has output=True, and else has no features. `heads` says which heads were kept, None for all.
    `queries_named` and `keys_named` are the tokens of each batch row, where they are known. `counted` is how many of
    the last queries `received` counts, None for all.

    >>> import torch, clearhead as ch
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> with ch.watch(model) as seen:
    ...     output = model(torch.zeros(1, 7, 16))
    >>> call = seen[0]
    >>> call.name, call.step, call.received.shape
    ('self_attn', 0, torch.Size([1, 2, 7]))
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

    def row_blocks(self, size: int = 128) -> Iterator[np.ndarray]:
        """Exact weights of all queries, `size` of them at a time: (…, heads, size, keys), never the whole matrix."""
        for start in range(0, self.shape[-2], size):
            stop = min(start + size, self.shape[-2])
            if self.weights is not None:
                yield to_numpy(self.weights)[..., start:stop, :]
                continue
            kept = self._kept()
            q, options = kept.block(start, stop)
            yield to_numpy(observe(q, kept.k, kept.k[..., :1], **options, weights=True).weights)

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

    def weight_on(self, pairs: Mask | Array) -> np.ndarray:
        """How much of its weight each query gives the keys that a mask names, (…, heads, queries), in O(n) memory.

        `call.weight_on(ch.window(1))` is the weight on a token and the one before it.
        """
        mask = as_mask("pairs", pairs)
        if self.weights is not None:
            return share_in(to_numpy(self.weights), mask)
        return share_of(self._kept(), mask)

    def attended(self) -> np.ndarray:
        """Which keys any query of any head gives any weight, (…, keys): padding gets none."""
        received = self.received if self.counted is None else None
        if received is None and self.weights is None:
            return attended(self._kept())
        every = to_numpy(self.weights).sum(-2) if received is None else to_numpy(received)
        return (every.max(-2) if every.ndim > 1 else every) > 0

    def live(self) -> np.ndarray:
        """Which queries are no padding, (…, heads, queries): of a sequence on itself, those that are attended to."""
        live = np.isfinite(to_numpy(self.lse))
        if self.shape[-2] == self.keys:
            live &= self.attended()[..., None, :] if live.ndim > 1 else self.attended()
        return live

    def names(self, batch: int = 0) -> tuple[Names, Names]:
        """What the queries and the keys of a batch row are called: their tokens, or their positions."""
        rows = math.prod(self.shape[:-3])
        if isinstance(batch, bool) or not isinstance(batch, int | np.integer) or not 0 <= batch < max(rows, 1):
            raise ArgumentError("batch", f"is {batch!r}, expected 0 to {rows - 1}")
        named = [None if rows is None else rows[batch % len(rows)] for rows in (self.queries_named, self.keys_named)]
        return (
            names_for("tokens", named[0], self.shape[-2], "queries"),
            names_for("tokens", named[1], self.keys, "keys"),
        )

    def top_tokens(self, query: int | str, *, count: int = 5, head: int | None = None, batch: int = 0) -> list[Token]:
        """The tokens that a query looks at most, by name; by the mean of all heads unless one is given.

        >>> import torch, clearhead as ch
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        >>> with ch.watch(model, want={"keep": True}, tokens=["the", "bank", "closed"]) as seen:
        ...     output = model(torch.zeros(1, 3, 16))
        >>> seen[0].top_tokens("bank", count=2)
        ['the' at 0: 0.333, 'bank' at 1: 0.333]
        """
        queries, keys = self.names(batch)
        place = position_of("query", query, queries)
        rows = of_batch(self.rows([place]), batch)[:, 0].astype(np.float64)  # (heads, keys)
        return top_tokens(rows.mean(0) if head is None else rows[self.place_of(head)], keys, count)

    def trace(self, query: int | str, *, head: int | None = None, batch: int = 0) -> Trace:
        """Every arithmetic step of one query of this call, with the tokens it was watched with; see `clearhead.trace`.

        >>> import torch, clearhead as ch
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        >>> with ch.watch(model, want={"keep": True}, tokens=["the", "bank", "closed"]) as seen:
        ...     output = model(torch.randn(1, 3, 16))
        >>> seen[0].trace(query="bank", head=1)
        Trace of "bank" (query 1) over 3 keys; print it to see the steps
        """
        kept = self.kept
        if kept is None or (self.keys and not kept.v.shape[-1]):
            raise ArgumentError(
                "want",
                f"did not keep the queries, keys and values of {self.name!r}: watch(model, want={{'keep': True}}) does",
            )
        queries, keys = self.names(batch)
        lead = self.shape[:-2]
        rows = [int(i) for i in np.unravel_index(batch, lead[:-1])] if lead else []
        at = (*rows, 0 if head is None else self.place_of(head)) if lead else ()
        return trace(
            *(to_numpy(a) for a in (kept.q, kept.k, kept.v)),
            query=query,
            tokens=None if self.keys_named is None else keys,
            query_tokens=None if self.queries_named is None else queries,
            head=at or None,
            **replace(kept, mask=_bare(kept.mask), bias=_bare(kept.bias), sinks=_bare(kept.sinks)).options,
        )

    def place_of(self, head: int) -> int:
        """Where a head lies among those that were kept."""
        there = self.heads or range(self.shape[-3] if len(self.shape) > 2 else 1)
        if isinstance(head, bool) or head not in there:
            known = f"0 to {len(there) - 1}" if self.heads is None else ", ".join(map(str, there))
            raise ArgumentError("head", f"is {head!r}, expected one of {known}")
        return list(there).index(head)

    def _kept(self) -> Given:
        if self.kept is None:
            raise ArgumentError("want", f"kept neither weights nor queries and keys of {self.name!r}: {NEEDS}")
        return self.kept

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.shape))
        return f"Call({self.name!r}, layer {self.layer}, step {self.step}, {shape}, by {self.kernel!r})"


def _bare(array: Array | None) -> np.ndarray | None:
    return None if array is None else to_numpy(array)


@lru_cache(maxsize=4096)
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
