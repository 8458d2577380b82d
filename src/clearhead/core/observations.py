"""What can be observed of attention, and the value that holds it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import numpy as np

from clearhead.core import asking
from clearhead.core.arrays import Array, ArrayT, made, to_numpy
from clearhead.core.grid import Grid
from clearhead.core.indices import indices
from clearhead.core.once import once
from clearhead.core.partial import Partial
from clearhead.core.trees import tree


class Top(NamedTuple, Generic[ArrayT]):
    """The largest weights of each query, (…, T, k) in descending order; index −1 where there is no weight left."""

    indices: Array
    weights: ArrayT


class Map(NamedTuple, Generic[ArrayT]):
    """The weights pooled into blocks of queries × keys: the mean and the largest of each block, (…, rows, columns)."""

    mean: ArrayT
    max: ArrayT


class Rows(NamedTuple, Generic[ArrayT]):
    """The exact weights of some queries: their indices, and (…, len(indices), S)."""

    indices: Array
    weights: ArrayT


@dataclass(frozen=True)
class Want:
    """What a caller asked to observe, checked; `queries` in absolute positions, `received` and its like as how many."""

    top: int | None = None
    received: int | asking.QueryWeights | None = None
    received_max: int | None = None
    removal: int | None = None
    map: tuple[int, int] | None = None
    queries: tuple[int, ...] | None = None
    weights: bool = False

    @once
    def names(self) -> tuple[str, ...]:
        """What is wanted that needs the weights themselves, and so a second look at the scores."""
        wanted = vars(self)
        # by identity: of no queries the last 0 are wanted, which is also a number
        return tuple([name for name in OBSERVATIONS if (value := wanted.get(name)) is not None and value is not False])

    def unknown_to(self, kernel: Collection[str]) -> str | None:
        """Why a kernel that observes those names cannot give this; None where it can."""
        for name in self.names:
            if name not in kernel:
                return f"it does not observe {name}; `tiled` does"
        return None


def want(grid: Grid, **asked: Any) -> Want:
    """The keywords of `observe`, checked against the sizes of the call."""
    wanted = {}
    for name, value in asked.items():
        one = OBSERVATIONS[name]
        if value is not one.absent and (checked := one.checked(value, grid)) is not None:
            wanted[name] = checked
    # the names are at hand: to find them once more would take as long as all the rest
    return made(Want, **wanted, names=tuple(wanted))


@tree
@dataclass(frozen=True, eq=False, repr=False)
class Observed(Generic[ArrayT]):
    """What one call gave and what it attended to. What was not asked for is None.

    Shapes follow the output (…, H, T, Dv). All but the output are in at least float32, and speak of the weights before
    dropout. Indexing picks batch rows and heads: `observed[0, 2]`.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4))
    >>> seen = ch.observe(q, k, v, received=True)
    >>> seen.entropy.shape, seen.received.shape, seen.top
    ((2, 7), (2, 7), None)
    >>> seen[1].output.shape
    (7, 4)
    """

    output: ArrayT
    lse: ArrayT
    max_score: ArrayT
    entropy: ArrayT
    kernel: str
    top: Top[ArrayT] | None = None
    received: ArrayT | None = None
    map: Map[ArrayT] | None = None
    queries: Rows[ArrayT] | None = None
    weights: ArrayT | None = None
    share: ArrayT | None = None  # of the keys in all weights, where a sink has the rest; for `partial`
    received_max: ArrayT | None = None
    removal: ArrayT | None = None

    @property
    def partial(self) -> Partial[ArrayT]:
        """This call as a part that merges with others over other keys; see `merge`."""
        return Partial(self.output, self.lse, self.max_score, self.entropy, self.share)

    def numpy(self) -> Observed[np.ndarray]:
        """The same with every array in NumPy."""
        return self.each(to_numpy)

    def each(self, function: Callable[[Any], Any]) -> Observed[Any]:
        """The same with `function` applied to every array that has the call's leading axes."""
        own = dict(vars(self))
        for name, value in own.items():
            if value is not None and name != "kernel":
                own[name] = changed(name, value, function)
        return made(Observed, **own)

    def __getitem__(self, index: Any) -> Observed[ArrayT]:
        chosen = indices(index if isinstance(index, tuple) else (index,), self.lse)
        return self.each(lambda array: array[(*chosen, ...)])

    def __repr__(self) -> str:
        *lead, length, width = self.output.shape
        found = {name: value for name in OBSERVATIONS if (value := getattr(self, name)) is not None}
        keys = [OBSERVATIONS[name].keys(value) for name, value in found.items()]
        over = next((f" over {count} keys" for count in keys if count is not None), "")
        lines = [f"Observed {tuple(lead)} heads × {length} queries{over}, {width} features, by {self.kernel!r}"]
        lines += [_line(name, to_numpy(getattr(self, name))) for name in ("lse", "max_score", "entropy")]
        # a number for each query, then a number for each key, then what has more axes
        lines += [OBSERVATIONS[name].line(found[name]) for name in sorted(found, key=lambda n: OBSERVATIONS[n].rank)]
        return "\n".join(lines)


class Shows:
    """What has an `observed`, and shows its fields as its own."""

    observed: Observed

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
    def received_max(self) -> Array | None:
        """The largest weight that each key received."""
        return self.observed.received_max

    @property
    def removal(self) -> Array | None:
        """How much outputs would change without each key."""
        return self.observed.removal

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


class Part(NamedTuple):
    """One array of an observation: its axes after (…, heads), and what its numbers are positions of, if they are.

    "queries" and "keys" are axes of the call, any other name is an axis of the observation's own. Where `least` is −1,
    that stands for no position. An array that is not `led` has no leading axes: it says what was asked for.
    """

    axes: tuple[str, ...]
    positions: str | None = None
    least: int = 0
    led: bool = True


def _as_it_is(asked: Any, queries: int) -> Any:
    return asked


@dataclass(frozen=True)
class Observation:
    """One thing that can be observed of the weights: all that others than the kernels have to know of it.

    `checked` makes of what was asked for what `Want` holds. `line` is its line in what `Observed` prints. `kind` holds
    several arrays, of which `parts` speaks in order, and `sizes` gives those of its own axes. `within` is what is asked
    of a call with so many queries, where it was asked for calls of any length.
    """

    checked: Callable[[Any, Grid], Any]
    line: Callable[[Any], str]
    parts: tuple[Part, ...]
    kind: Any = None
    sizes: Callable[[Any, Grid], dict[str, int]] | None = None
    within: Callable[[Any, int], Any] = _as_it_is
    absent: Any = None  # what is given where it is not asked for

    def arrays(self, value: Any) -> tuple[Array, ...]:
        """Its arrays, in the order of `parts`."""
        return (value,) if self.kind is None else tuple(value)

    def of(self, arrays: Sequence[Array]) -> Any:
        """The value that those arrays make up."""
        return arrays[0] if self.kind is None else self.kind(*arrays)

    def names(self, name: str) -> list[str]:
        """What its arrays are called, under its own name."""
        return [name] if self.kind is None else [f"{name}.{part}" for part in self.kind._fields]

    def keys(self, value: Any) -> int | None:
        """How many keys the call had, if its arrays say so."""
        sizes = [a.shape[-1] for a, part in zip(self.arrays(value), self.parts, strict=True) if part.axes[-1] == "keys"]
        return sizes[0] if sizes else None

    @property
    def rank(self) -> int:
        """The most axes that an array of it has after the leading ones."""
        return max(len(part.axes) for part in self.parts)


def changed(name: str, value: Any, function: Callable[[Array], Array]) -> Any:
    """A field of `Observed` with `function` applied to every array that has the call's leading axes."""
    one = OBSERVATIONS.get(name)
    if one is None or one.kind is None:
        return function(value)
    return one.kind(*[function(a) if part.led else a for a, part in zip(value, one.parts, strict=True)])


def _line(name: str, values: np.ndarray) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return f"  {name:<10} none finite of {values.size}"
    line = f"  {name:<10} {finite.min():.4g} … {finite.mean():.4g} … {finite.max():.4g}"
    gone = values.size - finite.size
    return line + (f"   ({gone} not finite)" if gone else "")


def _favourite(received: np.ndarray) -> str:
    by_key = received.sum(axis=tuple(range(received.ndim - 1)))
    return f"   most by key {int(by_key.argmax())}" if by_key.size else ""


def _by(sizes: Any) -> str:
    return " × ".join(map(str, sizes))


# by the keyword of `observe`, which is also the field of `Want` and of `Observed`; in this order they are checked
OBSERVATIONS: dict[str, Observation] = {
    "top": Observation(
        asking.checked_top,
        lambda top: (
            _line("top", to_numpy(top.weights)[..., 0]) + f"   largest of {top.weights.shape[-1]} for each query"
        ),
        (Part(("queries", "count"), "keys", -1), Part(("queries", "count"))),
        kind=Top,
        sizes=lambda top, grid: {"count": top},
    ),
    "received": Observation(
        asking.last_queries("received", weighted=True),
        lambda received: _line("received", to_numpy(received)) + _favourite(to_numpy(received)),
        (Part(("keys",)),),
    ),
    "received_max": Observation(
        asking.last_queries("received_max"),
        lambda largest: _line("received_max", to_numpy(largest)),
        (Part(("keys",)),),
    ),
    "removal": Observation(
        asking.last_queries("removal"),
        lambda removal: _line("removal", to_numpy(removal)) + _favourite(to_numpy(removal)),
        (Part(("keys",)),),
    ),
    "map": Observation(
        asking.checked_map,
        lambda pooled: _line("map", to_numpy(pooled.mean)) + f"   {_by(pooled.mean.shape[-2:])}",
        (Part(("rows", "columns")), Part(("rows", "columns"))),
        kind=Map,
        sizes=lambda most, grid: {"rows": min(most[0], grid.queries), "columns": min(most[1], grid.keys)},
    ),
    "queries": Observation(
        asking.checked_queries,
        lambda queries: f"  queries    rows {np.asarray(queries.indices).tolist()[:6]}",
        (Part(("chosen",), "queries", led=False), Part(("chosen", "keys"))),
        kind=Rows,
        sizes=lambda queries, grid: {"chosen": len(queries)},
        within=asking.those_there,
    ),
    "weights": Observation(
        asking.checked_weights,
        lambda weights: f"  weights    {_by(weights.shape)}",
        (Part(("queries", "keys")),),
        absent=False,
    ),
}
