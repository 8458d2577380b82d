"""The formula on any array library: it builds the whole T×S matrix, and every PyTorch gradient flows through it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.core import formula
from clearhead.core.arrays import Array
from clearhead.core.formula import Gradients
from clearhead.core.observations import Observed
from clearhead.core.positions import Relative
from clearhead.core.problem import Problem
from clearhead.kernels.collect import Gathered, Sizes
from clearhead.kernels.contract import Ran

# Scores up to which NumPy's own steps are faster than any kernel's preparation (`make bench-cpu`).
SMALL_NUMPY = 4096


class Dense:
    """The formula as it is written."""

    name = "dense"

    def rejects(self, problem: Problem) -> str | None:
        """It takes every problem; whether the matrix fits into memory is the caller's to know."""
        return None

    def run(self, problem: Problem) -> Ran:
        """Output, log-sum-exp, and all that is wanted, from the full matrix."""
        q, k, v, options = self.arguments(problem)
        answer = formula.attention(q, k, v, **options)
        xp, grid = problem.library.xp, problem.grid
        lead = (*grid.batch, grid.heads)
        found: dict[str, Any] = {}
        if problem.want is not None:
            weights = xp.broadcast_to(answer.weights, grid.shape)
            sizes = Sizes(problem.library, weights.dtype, lead, grid.queries, grid.keys, values=v)
            gathered = Gathered(problem.want, sizes)
            gathered.begin_rows(range(grid.queries), answer.output)
            if grid.queries and grid.keys:
                gathered.see(weights, range(grid.queries), range(grid.keys))
            gathered.end_rows(range(grid.queries))
            found = gathered.results()
        output = xp.broadcast_to(answer.output, (*lead, grid.queries, problem.width))
        if problem.differentiable and "mask" in options:
            # it is 0 already: but so a query that sees nothing takes no part in gradients, whatever its own holds
            output = xp.where(xp.any(options["mask"], axis=-1)[..., None], output, 0.0)
        lse, peak, entropy = (
            xp.broadcast_to(a, (*lead, grid.queries)) for a in (answer.lse, answer.max_score, answer.entropy)
        )
        observed = Observed(xp.astype(output, problem.q.dtype), lse, peak, entropy, self.name, **found)
        unrounded = output if problem.keeps_unrounded else None
        return Ran(observed, lse, xp.ones_like(lse), unrounded)

    def at_once(self, q: Array, k: Array, v: Array, mask: Any, scale: Any) -> Array | None:
        """The formula for a small call of NumPy arrays with no options, in as few steps as NumPy takes.

        Checking such a call in full takes longer than computing it. Whatever is unusual is left to the full check.
        """
        if mask is not None or scale is not None:
            return None
        ndim, dtype, lead = q.ndim, q.dtype, q.shape[:-2]
        if not (2 <= ndim == k.ndim == v.ndim and dtype.char in "fd" and dtype == k.dtype == v.dtype):
            return None
        keys, features = k.shape[-2:]
        if not (
            lead == k.shape[:-2] and k.shape[:-1] == v.shape[:-1] and features == q.shape[-1] and features and keys
        ):
            return None
        if q.size * keys > SMALL_NUMPY * features:
            return None
        scores = q @ k.swapaxes(-1, -2)
        scores *= 1.0 / math.sqrt(features)
        scores -= np.maximum.reduce(scores, -1, keepdims=True)  # what .max and .sum call, without the way there
        np.exp(scores, scores)
        output: np.ndarray = scores @ v
        output /= np.add.reduce(scores, -1, keepdims=True)
        return output

    def gradients(
        self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
    ) -> Gradients:
        """The chain rule, on the full matrix."""
        q, k, v, options = self.arguments(problem)
        found = formula.gradients(q, k, v, problem.library.computing(dout), dlse=dlse, **options)
        xp = problem.library.xp

        def back(gradient: Array, like: Array) -> Array:
            if gradient.shape[-3] != like.shape[-3]:  # query heads that share a key head
                together = (like.shape[-3], problem.group)  # not −1: an empty axis leaves it open
                gradient = xp.reshape(gradient, (*gradient.shape[:-3], *together, *gradient.shape[-2:]))
                gradient = xp.sum(gradient, axis=-3)
            return xp.astype(summed_to(xp, gradient, tuple(like.shape)), like.dtype)

        dsinks = None
        if found.dsinks is not None:
            by_head = (math.prod(problem.grid.batch), problem.grid.heads)
            dsinks = xp.sum(xp.reshape(xp.sum(found.dsinks, axis=-1), by_head), axis=0)
        dbias = None if problem.bias is None else found.dbias
        return Gradients(back(found.dq, problem.q), back(found.dk, problem.k), back(found.dv, problem.v), dbias, dsinks)

    def arguments(self, problem: Problem) -> tuple[Array, Array, Array, dict[str, Any]]:
        """The problem in the formula's terms: whole masks and biases, a key head for each query head."""
        library, grid, xp = problem.library, problem.grid, problem.library.xp
        q, k, v = map(library.computing, (problem.q, problem.k, problem.v))
        if problem.group != 1:  # none where there are no query heads
            k, v = (xp.repeat(a, problem.group, axis=-3) for a in (k, v))
        rows, columns = range(grid.queries), range(grid.keys)
        options: dict[str, Any] = {"scale": problem.scale, "softcap": problem.softcap}
        if problem.mask is not None:
            tile = problem.mask.tile(rows, columns, grid)
            options["mask"] = library.asarray(
                np.full((grid.queries, grid.keys), tile) if isinstance(tile, bool) else tile
            )
        if problem.bias is not None:
            bias = problem.bias
            if isinstance(bias, Relative):  # so that a table's gradients are added up in this precision, too
                bias = replace(bias, table=library.asarray(bias.table, q.dtype))
            options["bias"] = library.asarray(bias.tile(rows, columns, grid), q.dtype)
        if problem.sinks is not None:
            options["sinks"] = library.asarray(problem.sinks, q.dtype)[:, None]
        if problem.dropout is not None:
            heads = np.arange(int(np.prod((*grid.batch, grid.heads)))).reshape((*grid.batch, grid.heads))
            options["keep"] = library.asarray(problem.dropout.keep(heads, rows, columns))
            options["rescale"] = problem.dropout.rescale
        return q, k, v, options


def summed_to(xp: Any, array: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes that were broadcast from `shape`."""
    axes = tuple(i for i, (have, want) in enumerate(zip(array.shape, shape, strict=True)) if have != want)
    return xp.sum(array, axis=axes, keepdims=True) if axes else array


dense = Dense()
