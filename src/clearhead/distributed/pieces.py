"""The work of one rank: its queries against pieces of keys, one kernel call each, forward, backward and to look again.

Whoever brings the keys (another rank, a file, the host's memory) is none of its business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from clearhead.core.arrays import Array, Library, made, without_gradient
from clearhead.core.asking import QueryWeights
from clearhead.core.dropout import Dropout
from clearhead.core.errors import KernelRefused
from clearhead.core.grid import Grid, blocks
from clearhead.core.mask import Mask
from clearhead.core.observations import Top, Want
from clearhead.core.positions import Bias
from clearhead.core.problem import Problem
from clearhead.distributed.within import Piece, PlacedDropout, bias_of, mask_of
from clearhead.kernels.choose import named, preference
from clearhead.kernels.compiled import compiled
from clearhead.kernels.contract import Kernel, Place, Ran, rejects_gradients, unit_of
from clearhead.kernels.dense import dense
from clearhead.kernels.slab import Slab, Tile
from clearhead.kernels.tally import Ended, Tally
from clearhead.kernels.tiled import tiled, weigh
from clearhead.kernels.vendor import vendor

# what each key has a number of, and what needs the denominators of rows before it can be told
BY_KEY = ("received", "received_max", "removal")
SECOND = (*BY_KEY, "map", "weights")
# kernels that cannot be given a part of the keys, and why
UNFIT = {
    dense.name: "its gradients are those of the keys that it sees alone",
    vendor.name: "it rounds its output, and parts are added up in float32",
}
# queries and keys of a tile that is looked at again
TILE = 512


@dataclass(frozen=True, eq=False)
class Whole:
    """A call over all queries and keys: its sizes and options, without the arrays that lie elsewhere."""

    library: Library
    grid: Grid
    scale: float
    mask: Mask | None = None
    bias: Bias | None = None
    softcap: float | None = None
    sinks: Array | None = None
    dropout: Dropout | None = None
    want: Want | None = None
    kernel: str | None = None
    some_heads: range | None = None  # None is all of them
    short: bool = False  # runs of few queries, whose gradients are wanted

    @property
    def looks_again(self) -> bool:
        """True where something is observed that needs each row's denominator over all keys first."""
        return self.want is not None and any(name in SECOND for name in self.want.names)

    @property
    def heads(self) -> range:
        """The query heads that are worked on."""
        return range(self.grid.heads) if self.some_heads is None else self.some_heads

    def piece(self, rows: range, columns: range) -> Piece:
        """Some queries and keys of it."""
        return Piece(rows, columns, self.heads, self.grid)

    def problem(self, piece: Piece, q: Array, k: Array, v: Array, want: Want | None = None) -> Problem:
        """The arrays of a piece as a problem for a kernel; sinks belong to the whole."""
        return made(
            Problem,
            q=q,
            k=k,
            v=v,
            library=self.library,
            grid=piece.grid,
            scale=self.scale,
            mask=mask_of(self.mask, piece),
            bias=bias_of(self.bias, piece),
            softcap=self.softcap,
            dropout=PlacedDropout.of(self.dropout, piece),
            want=want,
            differentiated=True,  # for the output as it is before it is rounded
        )

    def empty(self, rows: range, columns: range) -> bool:
        """True where the mask decides that no pair of these is allowed."""
        return self.mask is not None and self.mask.decide(rows, columns, self.grid) is False


def pick(whole: Whole, problem: Problem) -> Kernel:
    """The kernel that runs every piece: the one asked for, or the fastest that gives each row's peak and total.

    What is looked at a second time is weighed by the kernel that ran, to the same rounding: `compiled`, or `tiled`.
    """
    if whole.kernel is not None:
        kernel = named(whole.kernel)
        reason = UNFIT.get(kernel.name) or kernel.rejects(problem)
        if problem.dropout is not None and kernel is not tiled:
            reason = "it drops weights by their place in one call; `tiled` does by that in the whole"
        if reason is not None:
            raise KernelRefused(whole.kernel, reason)
        return kernel
    # few queries go another way through `compiled` than their gradients do, where scores of 10⁴ are rounded otherwise
    if problem.dropout is not None or whole.short:
        return tiled
    if whole.looks_again:
        plain = problem.library.name in ("numpy", "torch")
        return compiled if plain and compiled.rejects(problem) is None else tiled
    able = (one for one in preference(problem) if rejects_gradients(one, problem) is None)
    return first_of(able, problem, refuses)


def refuses(kernel: Kernel, problem: Problem) -> str | None:
    """Why a kernel does not run a problem."""
    return kernel.rejects(problem)


def first_of(kernels: Iterable[Kernel], problem: Problem, why: Callable[[Kernel, Problem], str | None]) -> Kernel:
    """The first that can be given parts, and takes this one; `tiled` takes everything."""
    return next((one for one in kernels if one.name not in UNFIT and why(one, problem) is None), tiled)


class Seen(NamedTuple):
    """Weights of a tile: its queries and keys in the piece and in the whole call, and where its rows lie here."""

    slab: Slab
    tile: Tile
    rows: range
    columns: range
    queries: range
    keys: range
    lies: slice
    weights: Array


class Learner(Protocol):
    """Who wants the gradients of scores, such as a bias that is learned."""

    def see(self, work: Work, columns: range, k: Array, v: Array, dout: Array, ended: Ended, spread: Array) -> None:
        """Some keys, with what the gradients of their scores are made from."""


class Work:
    """The queries of one rank, run by run, and what they have found so far."""

    def __init__(self, whole: Whole, runs: tuple[range, ...], q: Array, key_heads: int, width: int) -> None:
        self.whole, self.runs, self.q = whole, runs, q
        self.width, self.key_heads = width, key_heads
        self.library, self.xp = whole.library, whole.library.xp
        self.lead = (*whole.grid.batch, len(whole.heads))
        self.dtype = self.library.computing(q[..., :0, :]).dtype
        self.kernel: Kernel | None = None
        self.tallies: list[Tally] = []
        self.tops: list[list[tuple[Top, Array, Array]]] = [[] for _ in runs]
        self.rows: list[list[tuple[range, Array, Array, Array]]] = [[] for _ in runs]
        self.learns: Learner | None = None

    def queries(self) -> Iterator[tuple[int, range, slice]]:
        """Each run: its number, its positions, and where it lies along the rank's own sequence axis."""
        start = 0
        for number, run in enumerate(self.runs):
            yield number, run, slice(start, start + len(run))
            start += len(run)

    def problems(
        self, columns: range, k: Array, v: Array, want: Want | None = None
    ) -> Iterator[tuple[int, slice, Problem]]:
        """The pieces that some keys make with the runs of queries, empty ones left out."""
        for number, rows, here in self.queries():
            if len(columns) and not self.whole.empty(rows, columns):
                wanted = want if want is None else self.own(want, rows)
                piece = self.whole.piece(rows, columns)
                yield number, here, self.whole.problem(piece, self.q[..., here, :], k, v, wanted)

    def own(self, want: Want, rows: range) -> Want:
        """What can be found in the first pass over a run: rows, largest weights, and the chosen queries among them."""
        chosen = tuple(i - rows.start for i in want.queries or () if i in rows)
        return Want(top=want.top, queries=chosen or None)

    def settle(self, problem: Problem | None, k: Array, v: Array) -> None:
        """One kernel for all pieces, and on every rank the same, so that peaks are in one unit."""
        if self.kernel is None:
            on_gpu = self.library.name == "torch" and self.q.device.type == "cuda"  # where all have scores for units
            if problem is None or not on_gpu:
                none = self.whole.piece(range(0), range(0))
                problem = self.whole.problem(none, self.q[..., :0, :], k[..., :0, :], v[..., :0, :])
            self.kernel = pick(self.whole, problem)
        if not self.tallies:
            observed = self.whole.want is not None
            unit = unit_of(self.kernel, self.whole)
            self.tallies = [
                Tally(self.library, self.lead, len(run), self.width, self.dtype, unit, observed) for run in self.runs
            ]

    def able(self, problem: Problem, why: Callable[[Kernel, Problem], str | None]) -> Kernel:
        """The kernel of all pieces, or for one that it refuses another whose peaks are scores as well."""
        assert self.kernel is not None
        if self.kernel is compiled or self.whole.kernel is not None or why(self.kernel, problem) is None:
            return self.kernel
        return first_of((one for one in preference(problem) if one is not compiled), problem, why)

    def attend(self, columns: range, k: Array, v: Array) -> None:
        """Some more keys: those of `columns`."""
        for number, _, problem in self.problems(columns, k, v, self.whole.want):
            self.settle(problem, k, v)
            ran = self.ran(problem)
            self.tallies[number].add(ran)
            if ran.observed.top is not None:
                top = ran.observed.top
                there = self.xp.where(top.indices < 0, -1, top.indices + columns.start)
                self.tops[number].append((Top(there, top.weights), ran.peak, ran.total))
            if ran.observed.queries is not None:
                self.rows[number].append((columns, ran.observed.queries.weights, ran.peak, ran.total))

    def ran(self, problem: Problem) -> Ran:
        """What a kernel finds in one piece."""
        kernel = self.able(problem, refuses)
        if kernel is compiled and self.whole.looks_again:
            want = self.whole.want
            return compiled.run(problem, again=True, removes=want is not None and want.removal is not None)
        return kernel.run(problem)

    def weighed(self, columns: range, k: Array, v: Array, ended: Ended) -> Iterator[tuple[slice, dict[str, Any]]]:
        """What `compiled` sees of each piece that is not empty, with the place of its rows here."""
        want, grid = self.whole.want, self.whole.grid
        assert want is not None
        for number, here, problem in self.problems(columns, k, v):
            run, end = self.runs[number], self.of_run(ended, here)
            by_key = {name: self.counted(getattr(want, name), run) for name in BY_KEY}
            some = Want(map=want.map, weights=want.weights, **by_key)
            if some.names:
                place = Place(grid.queries, grid.keys, run.start, columns.start)
                asking = made(Problem, **{**vars(problem), "want": some})
                yield here, compiled.look_again(asking, end.peak, end.total, end.output, place)

    def counted(self, asked: int | QueryWeights | None, run: range) -> Any:
        """How many of a run's last queries count, or how much each does; None where none counts."""
        if asked is None:
            return None
        if isinstance(asked, QueryWeights):
            return QueryWeights(self.query_weights(asked)[..., run.start : run.stop])
        last = min(run.stop - (self.whole.grid.queries - asked), len(run))
        return last if last > 0 else None

    def query_weights(self, asked: QueryWeights) -> Array:
        """How much each query of the whole call counts, (*lead, T)."""
        grid, heads = self.whole.grid, self.whole.heads
        array = asked.over(self.library, self.dtype, (*grid.batch, grid.heads, grid.queries))
        return array[..., heads.start : heads.stop, :]

    def sinks(self) -> Array | None:
        """The sinks (heads, 1) in the precision of sums."""
        if self.whole.sinks is None:
            return None
        heads = self.whole.heads
        return self.library.asarray(without_gradient(self.whole.sinks), self.dtype)[heads.start : heads.stop, None]

    def ended(self) -> Ended:
        """What the queries end with, runs side by side."""
        ends = [tally.ended(self.sinks()) for tally in self.tallies]
        if not ends:
            zero = self.library.zeros((*self.lead, 0), self.dtype)
            values = self.library.zeros((*self.lead, 0, self.width), self.dtype)
            some = None if self.whole.want is None else zero
            return Ended(values, zero, zero, zero, some, some)
        if len(ends) == 1:
            return ends[0]

        def whole(name: str, axis: int = -1) -> Any:
            parts = [getattr(end, name) for end in ends]
            return None if parts[0] is None else self.xp.concat(parts, axis=axis)

        return Ended(whole("output", -2), *map(whole, ("lse", "peak", "total", "largest", "entropy")))

    def of_run(self, ended: Ended, here: slice) -> Ended:
        """The part of one run."""
        rows = (
            None if a is None else a[..., here]
            for a in (ended.lse, ended.peak, ended.total, ended.largest, ended.entropy)
        )
        return Ended(ended.output[..., here, :], *rows)

    @property
    def unit(self) -> float:
        """What a peak is multiplied with to be a score."""
        return 1.0 if self.kernel is None else unit_of(self.kernel, self.whole)

    def gradients(
        self, columns: range, k: Array, v: Array, dout: Array, ended: Ended, dlse: Array | None, dq: Array
    ) -> tuple[Array, Array]:
        """What some keys add to dq, in place, and their own dk and dv so far, all in the precision of sums."""
        computing = self.library.computing
        grid = self.whole.grid
        dk = self.library.zeros((*grid.batch, *k.shape[-3:]), self.dtype)
        dv = self.library.zeros((*grid.batch, *v.shape[-3:]), self.dtype)
        wide = [computing(a) for a in (k, v)]
        for _, here, problem in self.problems(columns, *wide):
            self.settle(problem, k, v)
            assert self.kernel is not None
            q = self.library.xp.broadcast_to(computing(problem.q), (*grid.batch, *problem.q.shape[-3:]))
            k_all, v_all = (
                self.library.xp.broadcast_to(a, (*grid.batch, *a.shape[-3:])) for a in (problem.k, problem.v)
            )
            # parts in half precision would each be rounded; in full precision the sum is, once
            problem = made(Problem, **{**vars(problem), "q": q, "k": k_all, "v": v_all})
            end = self.of_run(ended, here)
            given = computing(dout[..., here, :])
            able = self.able(problem, rejects_gradients)
            found = able.gradients(
                problem, given, end.output, end.peak, end.total, None if dlse is None else dlse[..., here]
            )
            dq[..., here, :] += found.dq
            dk += found.dk
            dv += found.dv
        if self.learns is not None:
            self.learns.see(self, columns, k, v, dout, ended, self.spread(dout, ended, dlse))
        return dk, dv

    def sink_gradient(self, dout: Array, ended: Ended, dlse: Array | None) -> Array | None:
        """The gradient of the sinks (heads,) that these queries give: −share · (Σ dout · output − dlse)."""
        sinks = self.sinks()
        if sinks is None:
            return None
        xp = self.xp
        spread = self.spread(dout, ended, dlse)
        dead = ended.lse == -xp.inf
        share = xp.where(dead, 0.0, xp.exp(xp.where(dead, 0.0, sinks - xp.where(dead, 0.0, ended.lse))))
        by_head = xp.sum(-share * spread, axis=-1)
        return xp.sum(xp.reshape(by_head, (math.prod(self.lead[:-1]), self.lead[-1])), axis=0)

    def spread(self, dout: Array, ended: Ended, dlse: Array | None) -> Array:
        """What normalising takes back from each weight (…, T)."""
        xp = self.xp
        dead = ended.lse == -xp.inf
        wide = xp.where(dead[..., None], 0.0, self.library.computing(dout))
        spread = xp.sum(xp.where(ended.output == 0, 0.0, wide) * ended.output, axis=-1)
        return spread if dlse is None else spread - xp.where(dead, 0.0, dlse)

    def tiles(self, columns: range, k: Array, v: Array, ended: Ended) -> Iterator[Seen]:
        """The weights of each tile that is not empty."""
        for number, here, problem in self.problems(columns, k, v):
            slab, end = Slab(problem, ()), self.of_run(ended, here)
            peak, total = (slab.cut(a[..., None])[..., 0] for a in (end.peak * self.unit, end.total))
            for rows in blocks(problem.grid.queries, TILE):
                for some in blocks(len(columns), TILE):
                    tile = slab.tile(rows, some)
                    if tile is None:
                        continue
                    weights = weigh(slab, tile, peak[..., rows.start : rows.stop], total[..., rows.start : rows.stop])
                    first, lies = self.runs[number].start, slice(here.start + rows.start, here.start + rows.stop)
                    there = range(first + rows.start, first + rows.stop)
                    keys = range(columns.start + some.start, columns.start + some.stop)
                    yield Seen(slab, tile, rows, some, there, keys, lies, weights)
