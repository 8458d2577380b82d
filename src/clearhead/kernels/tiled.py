"""Online softmax on any array library: O(n) memory, and readable.

Attention over all keys is merged from attention over tiles of them (`core/partial.py`). What was attended to needs the
final log-sum-exp of each row, so it is read off in a second look at the scores. Gradients recompute the weights in the
same way. Tiles in which nobody may attend are never computed.
"""

from __future__ import annotations

import math
from typing import Any

from clearhead.core.arrays import Array
from clearhead.core.formula import Gradients, allowed_only, mix, share_of
from clearhead.core.grid import blocks
from clearhead.core.observations import OBSERVATIONS, Observed
from clearhead.core.partial import Sums
from clearhead.core.problem import Problem
from clearhead.kernels.collect import Gathered, Sizes
from clearhead.kernels.contract import Ran
from clearhead.kernels.slab import Slab, Tile, slabs


class Tiled:
    """Attention by tiles of `rows` queries × `columns` keys."""

    name = "tiled"

    def __init__(self, rows: int = 512, columns: int = 512) -> None:
        self.rows, self.columns = rows, columns

    def rejects(self, problem: Problem) -> str | None:
        """It takes every problem but one that wants the gradient of a bias."""
        if "bias" in problem.differentiable:
            return "it gives no gradient for a bias; `dense` does"
        return None

    def run(self, problem: Problem) -> Ran:
        """Output, log-sum-exp, and all that is wanted, a slab at a time."""
        fields = assembled(problem, [self.run_slab(slab) for slab in slabs(problem)])
        peak, total = fields.pop("peak"), fields.pop("total")
        unrounded = fields["output"] if problem.keeps_unrounded else None
        fields["output"] = problem.library.xp.astype(fields["output"], problem.q.dtype)
        return Ran(Observed(kernel=self.name, **fields), peak, total, unrounded)

    def run_slab(self, slab: Slab) -> dict[str, Any]:
        """The fields of `Observed` for one slab, and the peak and total of each row."""
        want = slab.problem.want
        whole = (*slab.problem.grid.batch, slab.problem.grid.heads)
        sizes = Sizes(
            slab.library, slab.q.dtype, slab.lead, slab.queries, slab.keys, values=slab.v, whole=whole, cut=slab.cut
        )
        gathered = None if want is None else Gathered(want, sizes)
        done = []
        for rows in blocks(slab.queries, self.rows) if slab.queries else [range(0)]:
            sums = nothing(sizes, len(rows), slab.v.shape[-1], want is not None)
            for columns in blocks(slab.keys, self.columns):
                tile = slab.tile(rows, columns)
                if tile is not None:
                    sums = sums + attend(slab, tile, rows, columns)
            peak, total = (sums.peak, sums.total) if slab.sinks is None else sums.with_sink(slab.sinks)
            divided = sums.divided(slab.sinks)
            if gathered is not None:
                gathered.begin_rows(rows, divided.output)
                self.look_again(slab, rows, peak, total, gathered)
            done.append({**vars(divided), "peak": peak, "total": total})
        fields = joined(slab, done)
        return fields if gathered is None else {**fields, **gathered.results()}

    def look_again(self, slab: Slab, rows: range, peak: Array, total: Array, gathered: Gathered) -> None:
        """Show the weights of some rows, now that their denominators are known."""
        for columns in blocks(slab.keys, self.columns) if gathered.collectors and rows else ():
            tile = slab.tile(rows, columns)
            if tile is not None:
                gathered.see(weigh(slab, tile, peak, total), rows, columns)
        gathered.end_rows(rows)

    def gradients(
        self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
    ) -> Gradients:
        """dq, dk and dv, the weights recomputed by tile."""
        xp = problem.library.xp
        dlse = xp.zeros_like(peak) if dlse is None else dlse
        parts = [
            self.gradients_slab(slab, *map(slab.cut, (dout, output, *(a[..., None] for a in (peak, total, dlse)))))
            for slab in slabs(problem)
        ]
        whole = []
        for place, like in enumerate((problem.q, problem.k, problem.v)):
            gradient = xp.stack([part[place] for part in parts]) if len(parts) > 1 else parts[0][place]
            lead = (*problem.grid.batch, like.shape[-3])
            gradient = xp.reshape(gradient, (*lead, *like.shape[-2:]))
            for axis, size in enumerate(like.shape[:-3]):
                if size != lead[axis]:
                    gradient = xp.sum(gradient, axis=axis, keepdims=True)
            whole.append(xp.astype(gradient, like.dtype))
        dsinks = None
        if problem.sinks is not None:
            dsinks = xp.stack([part[3] for part in parts]) if len(parts) > 1 else parts[0][3]
            dsinks = xp.sum(xp.reshape(dsinks, (math.prod(problem.grid.batch), problem.grid.heads)), axis=0)
        dq, dk, dv = whole
        return Gradients(dq, dk, dv, None, dsinks)

    def gradients_slab(
        self, slab: Slab, dout: Array, output: Array, peak: Array, total: Array, dlse: Array
    ) -> tuple[Array, ...]:
        """dq (…, group, T, D), dk (…, S, D), dv (…, S, Dv), dsinks (…, group) of one slab."""
        xp, library, problem = slab.xp, slab.library, slab.problem
        dout, output = library.computing(dout), library.computing(output)
        peak, total, dlse = peak[..., 0], total[..., 0], dlse[..., 0]
        dead = peak == -xp.inf
        # rows that attend to nothing take no part, whatever their gradient holds
        dout = xp.where(dead[..., None], 0.0, dout)
        # (…, T); of a row that attends to a sink alone the output is 0, and its gradient may still hold anything
        spread = xp.sum(xp.where(output == 0, 0.0, dout) * output, axis=-1) - xp.where(dead, 0.0, dlse)
        down = list(blocks(slab.queries, self.rows))
        across = list(blocks(slab.keys, self.columns))
        lead = slab.lead[:-1]
        zeros = library.zeros
        dq = [zeros((*slab.lead, 0, slab.q.shape[-1]), slab.q.dtype)]
        dk = [zeros((*lead, len(columns), slab.k.shape[-1]), slab.q.dtype) for columns in across]
        dv = [zeros((*lead, len(columns), slab.v.shape[-1]), slab.q.dtype) for columns in across]
        for rows in down:
            here = slice(rows.start, rows.stop)
            row_dout, row_spread = dout[..., here, :], spread[..., here]
            row_peak, row_total = peak[..., here], total[..., here]
            row_dq = zeros((*slab.lead, len(rows), slab.q.shape[-1]), slab.q.dtype)
            for place, columns in enumerate(across):
                tile = slab.tile(rows, columns)
                if tile is None:
                    continue
                weights = weigh(slab, tile, row_peak, row_total)
                tile_dout = row_dout if tile.asked is None else xp.where(tile.asked, row_dout, 0.0)
                kept = slab.dropped(weights, rows, columns)
                turned = None
                if tile.mask is not None:
                    turned = xp.matrix_transpose(xp.broadcast_to(tile.mask, weights.shape))
                dweights = slab.dropped(tile_dout @ xp.matrix_transpose(tile.v), rows, columns)
                dscores = weights * (dweights - row_spread[..., None])
                if problem.softcap is not None:
                    raw = problem.scale * (tile.q @ xp.matrix_transpose(tile.k))
                    dscores = dscores * (1.0 - xp.tanh(raw / problem.softcap) ** 2)
                dscores = allowed_only(tile.mask, dscores)
                row_dq = row_dq + problem.scale * mix(dscores, tile.k, tile.mask)
                # query heads that share keys add up
                tile_dk = mix(xp.matrix_transpose(dscores), tile.q, turned)
                tile_dv = mix(xp.matrix_transpose(kept), tile_dout, turned)
                dk[place] = dk[place] + xp.sum(problem.scale * tile_dk, axis=-3)
                dv[place] = dv[place] + xp.sum(tile_dv, axis=-3)
            dq.append(row_dq)
        dsinks = spread[..., 0:0]
        if slab.sinks is not None:
            share = share_of(slab.sinks, xp.where(dead, 0.0, peak)) / xp.where(dead, 1.0, total)
            dsinks = -xp.sum(share * spread, axis=-1)
        none_k = [zeros((*lead, 0, slab.k.shape[-1]), slab.q.dtype)]
        none_v = [zeros((*lead, 0, slab.v.shape[-1]), slab.q.dtype)]
        return (
            xp.concat(dq, axis=-2),
            xp.concat(none_k + dk, axis=-2),
            xp.concat(none_v + dv, axis=-2),
            dsinks,
        )


def attend(slab: Slab, tile: Tile, rows: range, columns: range) -> Sums:
    """Attention over the keys of one tile alone, not yet divided by the row sums."""
    xp = slab.xp
    peak = xp.max(tile.scores, axis=-1)  # (…, t)
    shifted = tile.scores
    shifted -= xp.where(peak == -xp.inf, 0.0, peak)[..., None]
    weighted = None
    if slab.problem.want is None:
        exponentials = slab.library.exp_over(shifted)  # (…, t, s)
    else:
        exponentials = xp.exp(shifted)
        # a masked key has 0 · −inf, which is 0 here
        weighted = xp.sum(exponentials * xp.where(exponentials == 0, 0.0, shifted), axis=-1)
    values = mix(slab.dropped(exponentials, rows, columns), tile.v, tile.mask)
    return Sums(peak, xp.sum(exponentials, axis=-1), values, weighted)


def weigh(slab: Slab, tile: Tile, peak: Array, total: Array) -> Array:
    """The weights of a tile, from the denominators of its rows over all keys."""
    xp = slab.xp
    shifted = tile.scores - xp.where(peak == -xp.inf, 0.0, peak)[..., None]
    weights = slab.library.exp_over(shifted)
    weights *= (1.0 / xp.where(total == 0, 1.0, total))[..., None]
    return allowed_only(tile.mask, weights)


def nothing(sizes: Sizes, rows: int, width: int, weighted: bool) -> Sums:
    """Attention over no keys: what adding up starts from."""
    zero = sizes.zeros(rows)
    return Sums(zero - sizes.library.xp.inf, zero, sizes.zeros(rows, width), zero if weighted else None)


def joined(slab: Slab, done: list[dict[str, Any]]) -> dict[str, Any]:
    """Row blocks as whole arrays."""

    def whole(name: str) -> Array:
        pieces = [block[name] for block in done]
        return None if pieces[0] is None else slab.xp.concat(pieces, axis=-2 if name == "output" else -1)

    return {name: whole(name) for name in done[0]}


def assembled(problem: Problem, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Slabs as arrays with the leading axes (*batch, heads)."""
    xp, grid = problem.library.xp, problem.grid

    def whole(pieces: list[Array], trailing: int) -> Array:
        array = xp.stack(pieces) if len(pieces) > 1 else pieces[0]
        return xp.reshape(array, (*grid.batch, grid.heads, *pieces[0].shape[pieces[0].ndim - trailing :]))

    fields: dict[str, Any] = {}
    for name, first in parts[0].items():
        pieces = [part[name] for part in parts]
        one = OBSERVATIONS.get(name)
        if first is None:
            fields[name] = None
        elif one is None:  # the output, or a number for each query
            fields[name] = whole(pieces, 2 if name == "output" else 1)
        else:
            arrays = zip(one.parts, *map(one.arrays, pieces), strict=True)
            fields[name] = one.of(
                [whole(list(some), len(part.axes)) if part.led else some[0] for part, *some in arrays]
            )
    return fields


tiled = Tiled()
