"""attention() and observe() under JAX's `shard_map`, over an axis name: keys travel around the ring by `ppermute`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clearhead.core.array_masks import given_mask
from clearhead.core.arrays import Array, Library, made
from clearhead.core.asking import QueryWeights
from clearhead.core.errors import ArgumentError, KernelRefused
from clearhead.core.formula import removal
from clearhead.core.grid import Grid, bins, blocks
from clearhead.core.observations import Map, Observed, Rows, Top, Want
from clearhead.core.partial import keys_share
from clearhead.core.positions import as_bias
from clearhead.core.problem import Problem, pose
from clearhead.core.temperature import tempered
from clearhead.distributed.at_positions import DropoutAt, MaskAt, Places, bias_at
from clearhead.distributed.pieces import BY_KEY
from clearhead.distributed.placement import Placement
from clearhead.distributed.wanting import wanted_of_parts
from clearhead.kernels.choose import named
from clearhead.kernels.slab import Slab
from clearhead.kernels.tally import Ended, Tally
from clearhead.kernels.tiled import tiled, weigh

lax: Any = jax.lax
# queries and keys of a tile that is looked at again
TILE = 512


class Ring:
    """One device's part of a call: its queries, and keys that come around."""

    def __init__(self, given: dict[str, Any], asked: dict[str, Any] | None) -> None:
        axis = given["mesh"]
        try:
            self.world, self.rank = int(lax.psum(1, axis)), lax.axis_index(axis)
        except (NameError, TypeError, ValueError):
            raise ArgumentError(
                "mesh", f"is {axis!r}, expected the name of an axis of a shard_map around this call"
            ) from None
        self.axis = axis
        if given["way"] not in (None, "ring"):
            raise ArgumentError("way", f"is {given['way']!r}, expected 'ring' or None: under shard_map keys go around")
        if given["kernel"] is not None and named(given["kernel"]) is not tiled:
            raise KernelRefused(given["kernel"], "under shard_map positions are traced, which `tiled` alone takes")
        q, k, v = given["q"], given["k"], given["v"]
        scale = given["scale"]
        if given["temperature"] is not None:
            scale = tempered(given["temperature"], scale, q)
        options = {name: given[name] for name in ("softcap", "sinks", "dropout")}
        self.problem: Problem = pose(q, k, v, scale=scale, **options)
        problem = self.problem
        self.queries = self.placed("placement", given["placement"], problem.grid.queries)
        self.keys = self.placed("key_placement", given["key_placement"] or given["placement"], problem.grid.keys)
        grid = Grid(problem.grid.batch, problem.grid.heads, self.queries.n, self.keys.n)
        self.grid = grid
        mask = None if given["mask"] is None else given_mask("mask", given["mask"])
        self.bias = None if given["bias"] is None else as_bias(given["bias"])
        for one in (mask, self.bias):
            if one is not None:
                one.check(grid)
        self.node = None if mask is None else mask.lower(grid)
        self.want: Want | None = None
        if asked is not None:
            self.want = wanted_of_parts(problem, grid, asked)
        # who holds what, by rank: looked up by a rank that is known only when it runs
        self.tables = [
            jnp.asarray(np.stack([p.positions(r) for r in range(self.world)])) for p in (self.queries, self.keys)
        ]

    def placed(self, name: str, placement: Placement | None, here: int) -> Placement:
        """Who holds what; every device of a shard_map holds as many positions as the others."""
        found = Placement.contiguous(here * self.world, self.world) if placement is None else placement
        if found.world != self.world or set(found.lengths) != {here}:
            raise ArgumentError(name, f"is {found!r}, expected {here} positions on each of {self.world} devices")
        return found

    def turned(self, *arrays: Array) -> tuple[Array, ...]:
        """What every device has, one device on."""
        ways = [(rank, (rank + 1) % self.world) for rank in range(self.world)]
        return tuple(lax.ppermute(array, self.axis, ways) for array in arrays)

    def chunk(self, step: Array | int, k: Array, v: Array, wanted: Want | None) -> tuple[Problem, Array]:
        """The problem of the queries here with the keys that came at a step, and their positions."""
        problem, library = self.problem, self.problem.library
        positions = self.tables[1][(self.rank - step) % self.world]
        places = Places(self.tables[0][self.rank], positions, self.grid)
        own = Grid(self.grid.batch, self.grid.heads, problem.grid.queries, problem.grid.keys)
        q, k, v = (library.computing(a) for a in (problem.q, k, v))
        found = made(
            Problem, q=q, k=k, v=v, library=library, grid=own, scale=problem.scale, softcap=problem.softcap,
            mask=None if self.node is None else MaskAt(self.node, places), bias=bias_at(self.bias, places),
            dropout=DropoutAt.of(problem.dropout, places), want=wanted,
        )  # fmt: skip
        return found, positions

    def forward(self) -> Ended:
        """The answer for the queries here."""
        problem, grid = self.problem, self.grid
        k, v = problem.k, problem.v
        like = problem.library.computing(problem.q)
        lead = (*grid.batch, grid.heads)
        rows, width = problem.grid.queries, problem.width
        library = Library.of(like)
        self.tally = Tally(library, lead, rows, width, like.dtype, 1.0, self.want is not None)
        self.lead, self.dtype = lead, like.dtype
        self.tops: list[tuple[Array, Array, Array, Array]] = []
        first = None if self.want is None else Want(top=self.want.top)

        def attend(step: Array, k: Array, v: Array) -> Any:
            piece, positions = self.chunk(step, k, v, first)
            ran = tiled.run(piece)
            seen = ran.observed
            top = (
                None
                if seen.top is None
                else (jnp.where(seen.top.indices < 0, -1, positions[seen.top.indices]), seen.top.weights)
            )
            return (ran.precise, ran.peak, ran.total, seen.entropy, seen.max_score), top

        # weights are not kept for the gradients, but computed again
        again = jax.checkpoint(attend, static_argnums=())
        for step in range(self.world):
            ahead = self.turned(k, v) if step + 1 < self.world else (k, v)
            (output, peak, total, entropy, largest), top = again(jnp.asarray(step), k, v)
            weighted = None
            if self.want is not None:
                some = total != 0
                weighted = jnp.where(some, total * (jnp.log(jnp.where(some, total, 1.0)) - entropy), 0.0)
            self.tally.merge(peak, total, output * total[..., None], weighted, largest)
            if top is not None:
                self.tops.append((*top, peak, total))
            k, v = ahead
        sinks = None if problem.sinks is None else library.asarray(problem.sinks, like.dtype)[:, None]
        return self.tally.ended(sinks)

    def weights(self, step: int, k: Array, v: Array, ended: Ended) -> tuple[Array, Array, Array | None]:
        """The weights (…, heads, T, S) of the queries here with the keys of a step, and where those keys stand.

        And, if that is asked for, how much each output would change without each key, of the same shape.
        """
        piece, positions = self.chunk(step, k, v, None)
        slab = Slab(piece, ())
        peak, total = (slab.cut(a[..., None])[..., 0] for a in (ended.peak, ended.total))
        down = []
        for rows in blocks(piece.grid.queries, TILE):
            across = []
            for columns in blocks(piece.grid.keys, TILE):
                tile = slab.tile(rows, columns)
                assert tile is not None  # what is traced is never decided
                across.append(weigh(slab, tile, peak[..., rows.start : rows.stop], total[..., rows.start : rows.stop]))
            down.append(jnp.concatenate(across, axis=-1))
        whole = jnp.concatenate(down, axis=-2)
        shape = (*self.lead, *whole.shape[-2:])
        change = None
        if self.want is not None and self.want.removal is not None:
            change = removal(whole, slab.v, slab.cut(ended.output)).reshape(shape)
        return whole.reshape(shape), positions, change

    def by_key(self, weights: Array, change: Array | None) -> dict[str, Array]:
        """What the keys of a step got from the queries here, (…, S) by name."""
        asked, own, found = self.want, self.tables[0][self.rank], {}  # type: Want | None, Array, dict[str, Array]
        assert asked is not None

        def last(pairs: Array, count: int) -> Array:
            return jnp.where((own >= self.grid.queries - count)[:, None], pairs, 0.0)

        if isinstance(asked.received, QueryWeights):
            counts = asked.received.over(self.problem.library, self.dtype, (*self.lead, self.grid.queries))
            counts = jnp.take(counts, own, axis=-1)[..., None]  # (…, T, 1)
            found["received"] = jnp.sum(jnp.where(counts == 0, 0.0, weights * counts), axis=-2)
        elif asked.received is not None:
            found["received"] = jnp.sum(last(weights, asked.received), axis=-2)
        if asked.received_max is not None:
            found["received_max"] = jnp.max(last(weights, asked.received_max), axis=-2, initial=0.0)
        if asked.removal is not None:
            found["removal"] = jnp.sum(last(change, asked.removal), axis=-2)
        return found

    def observed(self, ended: Ended) -> dict[str, Any]:
        """What was asked for beyond each row's numbers."""
        asked, found = self.want, {}  # type: Want | None, dict[str, Any]
        assert asked is not None
        if asked.top is not None:
            found["top"] = self.top(ended, asked.top)
        if any(name != "top" for name in asked.names):
            found |= self.look(ended, asked)
        return found

    def top(self, ended: Ended, count: int) -> Top:
        """The largest weights of each query, from the largest of each step."""
        shares = [weights * ended.share(jnp, peak, total, 1.0)[..., None] for _, weights, peak, total in self.tops]
        weights = jnp.concatenate([*shares, jnp.zeros((*ended.lse.shape, count), self.dtype)], axis=-1)
        places = jnp.concatenate([indices for indices, *_ in self.tops], axis=-1)
        indices = jnp.concatenate([places, jnp.full((*ended.lse.shape, count), -1, places.dtype)], axis=-1)
        weights, order = lax.top_k(weights, count)
        weights = jnp.where(jnp.isnan(weights).any(-1, keepdims=True), jnp.nan, weights)
        return Top(jnp.where(weights > 0, jnp.take_along_axis(indices, order, axis=-1), -1), weights)

    def look(self, ended: Ended, asked: Want) -> dict[str, Any]:
        """All keys once more; what they got goes around with them, and comes home with the last step."""
        problem, grid = self.problem, self.grid
        k, v = problem.k, problem.v
        own = self.tables[0][self.rank]
        names = [name for name in BY_KEY if getattr(asked, name) is not None]
        got = {name: jnp.zeros((*self.lead, problem.grid.keys), self.dtype) for name in names}
        rows, columns = asked.map or (1, 1)
        rows, columns = max(min(rows, grid.queries), 1), max(min(columns, grid.keys), 1)
        total, most = jnp.zeros((2, *self.lead, rows, columns), self.dtype)
        matrix = jnp.zeros((*self.lead, problem.grid.queries, grid.keys), self.dtype)
        keep = asked.weights or asked.queries is not None
        for step in range(self.world):
            weights, positions, change = self.weights(step, k, v, ended)
            for name, more in self.by_key(weights, change).items():
                got[name] = jnp.maximum(got[name], more) if name == "received_max" else got[name] + more
            if asked.map is not None:
                down, across = own * rows // max(grid.queries, 1), positions * columns // max(grid.keys, 1)
                total = total.at[..., down[:, None], across].add(weights)
                most = most.at[..., down[:, None], across].max(weights)
            if keep:
                matrix = matrix.at[..., positions].set(weights)
            k, v, *around = self.turned(k, v, *got.values())
            got = dict(zip(names, around, strict=True))
        found: dict[str, Any] = dict(got)
        if asked.map is not None:
            cells = np.outer(
                [len(part) for part in bins(grid.queries, rows)], [len(part) for part in bins(grid.keys, columns)]
            )
            found["map"] = Map(lax.psum(total, self.axis) / cells, lax.pmax(most, self.axis))
        if asked.weights:
            found["weights"] = matrix
        if asked.queries is not None:
            chosen = jnp.asarray(asked.queries, dtype=own.dtype)
            mine = (own[None, :] == chosen[:, None]).astype(self.dtype)  # (chosen, T)
            rows_here = jnp.einsum("ct,...ts->...cs", mine, jnp.where(mine.any(0)[:, None], matrix, 0.0))
            found["queries"] = Rows(np.asarray(asked.queries, np.int64), lax.psum(rows_here, self.axis))
        return found


def attention_in_ring(given: dict[str, Any]) -> Array:
    """The output for the queries here."""
    ring = Ring(given, None)
    return ring.problem.restore(ring.forward().output.astype(ring.problem.q.dtype))


def observe_in_ring(given: dict[str, Any], asked: dict[str, Any]) -> Observed:
    """The output, and what was attended to."""
    ring = Ring(given, asked)
    ended = ring.forward()
    found = ring.observed(ended)
    output = ended.output.astype(ring.problem.q.dtype)
    if ring.problem.sinks is not None:
        found["share"] = keys_share(ring.problem.library, ring.problem.sinks, ended.lse)
    seen = Observed(output, ended.lse, ended.largest, ended.entropy, "tiled", **found)
    return seen.each(ring.problem.restore) if ring.problem.headless else seen
