"""What was seen of a model: calls in order, by name, by layer and by step. It needs no PyTorch to be looked at."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from clearhead.calls import gradients, observe
from clearhead.core.arrays import Array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Map, Observed, Rows, Top
from clearhead.watching.given import Given

if TYPE_CHECKING:
    from clearhead.watching.summary import Summary
    from clearhead.watching.words import Matrix

Names = tuple[str, ...]
NEEDS = "want={'weights': True} or want={'keep': True} when watching keeps what it takes"


@dataclass(frozen=True, eq=False)
class Call:
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

    @property
    def lse(self) -> Array:
        """Log-sum-exp of the scores of each query."""
        return self.observed.lse

    @property
    def max_score(self) -> Array:
        """The largest score of each query."""
        return self.observed.max_score

    @property
    def entropy(self) -> Array:
        """−Σ w ln w of each query, in nats."""
        return self.observed.entropy

    @property
    def top(self) -> Top | None:
        """The largest weights of each query."""
        return self.observed.top

    @property
    def received(self) -> Array | None:
        """The attention that each key received."""
        return self.observed.received

    @property
    def map(self) -> Map | None:
        """The matrix, pooled."""
        return self.observed.map

    @property
    def queries(self) -> Rows | None:
        """The exact weights of some queries."""
        return self.observed.queries

    @property
    def weights(self) -> Array | None:
        """The whole matrix, where it was wanted."""
        return self.observed.weights

    @property
    def kernel(self) -> str:
        """The kernel that observed it."""
        return self.observed.kernel

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


@dataclass(eq=False)
class Seen(Sequence[Call]):
    """What `watch` saw: calls in the order they were made.

    `seen[0]` is the first call, `seen["encoder.layer.3.attention.self"]` the call of that module. `seen.layer(3)`,
    `seen.step(0)` and `seen.named("decoder.*")` are the calls of a layer, of a step and of some modules, as another
    `Seen`. `missed` says by name what attends and could not be seen, and why.
    """

    calls: list[Call] = field(default_factory=list)
    missed: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    @overload
    def __getitem__(self, which: int | str) -> Call: ...
    @overload
    def __getitem__(self, which: slice) -> Seen: ...
    def __getitem__(self, which: int | str | slice) -> Call | Seen:
        if isinstance(which, slice):
            return self._part(self.calls[which])
        if not isinstance(which, str):
            return self.calls[which]
        found = [call for call in self.calls if call.name == which]
        if not found:
            known = ", ".join(self.names[:6]) + (", …" if len(self.names) > 6 else "")
            raise KeyError(f"{which!r} made no call that was seen; these did: {known or 'none'}")
        if len(found) > 1:
            steps = f"steps {found[0].step} to {found[-1].step}: say seen.step(n)[{which!r}], or"
            if found[0].step == found[-1].step:
                steps = f"step {found[0].step}:"
            raise KeyError(f"{which!r} made {len(found)} calls, in {steps} seen.named({which!r})[i]")
        return found[0]

    @property
    def names(self) -> list[str]:
        """The modules that made calls, in the order of their first."""
        return list(dict.fromkeys(call.name for call in self.calls))

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers that made calls."""
        return sorted({call.layer for call in self.calls})

    @property
    def steps(self) -> int:
        """How many steps there were: calls of the model, one for each token that it generates."""
        return max((call.step for call in self.calls), default=-1) + 1

    def layer(self, number: int) -> Seen:
        """The calls of one layer; −1 is the last. A layer's number is the first one in its module's name."""
        which = _one_of("layer", number, self.layers)
        return self._part([call for call in self.calls if call.layer == which])

    def step(self, number: int) -> Seen:
        """The calls of one step; −1 is the last. A step is one call of the model."""
        which = _one_of("step", number, sorted({call.step for call in self.calls}))
        return self._part([call for call in self.calls if call.step == which])

    def named(self, pattern: str) -> Seen:
        """The calls of modules with this name; * stands for anything."""
        from fnmatch import fnmatchcase

        return self._part([call for call in self.calls if fnmatchcase(call.name, pattern)])

    def summary(self) -> Summary:
        """Entropy, share on the first token, mean distance and largest logit, by layer and head, as a table."""
        from clearhead.watching.summary import summary

        return summary(self)

    def matrix(
        self, *, heads: str | int = "mean", layers: str | int = "mean", batch: int = 0, words: bool = False
    ) -> Matrix:
        """The weights of one sequence as one array with names: heads and layers each, averaged, or the largest."""
        from clearhead.watching.words import matrix

        return matrix(self, heads=heads, layers=layers, batch=batch, words=words)

    def rollout(self, query: int | Sequence[int] | None = None, *, residual: float = 0.5) -> np.ndarray:
        """Attention followed through all layers down to the input, (…, queries, positions); Abnar and Zuidema 2020."""
        from clearhead.watching.rollout import rollout

        return rollout(self, query, residual=residual)

    def flow(self, query: int, *, batch: int = 0, residual: float = 0.5) -> np.ndarray:
        """The largest flow from a query to each input through all layers, (positions,); Abnar and Zuidema 2020."""
        from clearhead.watching.flow import flow

        return flow(self, query, batch=batch, residual=residual)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one .safetensors file, of which the header says in JSON what belongs to what."""
        from clearhead.watching.files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Seen:
        """What `save` wrote, in NumPy arrays."""
        from clearhead.watching.files import load

        return load(path)

    def _part(self, calls: list[Call]) -> Seen:
        return Seen(calls, self.missed)

    def __repr__(self) -> str:
        modules, steps = len(self.names), self.steps
        lines = [f"Seen: {len(self)} calls by {modules} modules in {steps} {'step' if steps == 1 else 'steps'}"]
        lines += [f"  {call!r}" for call in self.calls[:6]] + (["  …"] if len(self) > 6 else [])
        lines += [f"  missed {name or 'the model'}: {why}" for name, why in self.missed.items()]
        return "\n".join(lines)


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


def _one_of(what: str, number: Any, there: list[int]) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise ArgumentError(what, f"is {number!r}, expected a whole number")
    if number < 0 and len(there) >= -number:
        return there[number]
    if number not in there:
        known = f"{there[0]} to {there[-1]}" if there else "none"
        raise ArgumentError(what, f"is {number}, and the calls that were seen have {known}")
    return int(number)
