"""What linear attention and the Performer share: weights that are products of features, φ(q) · φ(k).

    o_i = Σ_j (φ(q_i) · φ(k_j)) v_j / (Σ_j φ(q_i) · φ(k_j) + ε)

The sums over keys are taken once for all queries, so it costs O(n); a causal one goes by chunks (`prefix_sums.py`), and
decoding keeps the sums alone.
"""

from __future__ import annotations

from typing import Any

from clearhead.approximations.method import Method, Spent, by_key_head, by_query_head, is_compiled
from clearhead.approximations.prefix_sums import State, chunk, total, up_to, with_ones
from clearhead.approximations.sight import Sight
from clearhead.core.arrays import Array, Library
from clearhead.core.errors import ArgumentError
from clearhead.core.problem import Problem
from clearhead.kernels.gpu.available import unable


class Factorised(Method):
    """A method that says what the features of queries and of keys are; the rest is the same for all."""

    @property
    def added(self) -> float:
        """ε: what is added to each denominator."""
        return 0.0

    @property
    def divides(self) -> bool:
        """Whether sums are divided by the sum of weights, as softmax does."""
        return True

    @property
    def fused(self) -> str | None:
        """φ by the name that the GPU kernels have it by; None where features are handed to them."""
        return None

    def query_features(self, library: Library, q: Array, scale: Any) -> Array:
        """φ(q), (…, T, F); a factor of its own for each query cancels."""
        raise NotImplementedError

    def key_features(
        self, library: Library, k: Array, keys: Array | None, scale: Any, peak: Array | None = None
    ) -> tuple[Array, Array | None]:
        """φ(k), (…, S, F), zero for keys that are not there; and the exponent by which all are scaled down, if any."""
        raise NotImplementedError

    def width(self, features: int) -> int:
        """F, for so many features of a head."""
        raise NotImplementedError

    def making(self, features: int) -> float:
        """Operations that one φ takes."""
        raise NotImplementedError

    def run(self, problem: Problem, seen: Sight) -> Array:
        if seen.first == 0 and problem.library.name == "torch":
            output = by_gpu_kernel(self, problem, seen)
            if output is not None:
                return output
        q, k, v, keys = self._seen(problem, seen)
        library = problem.library
        a = self.query_features(library, q, problem.scale)
        b, _ = self.key_features(library, k, keys, problem.scale)
        v = with_ones(library, v)
        if seen.first is None:
            return by_query_head(problem, self.divided(library, a @ total(library, b, v)))
        return by_query_head(problem, self.divided(library, causal(library, a, b, v, seen.first)))

    def _seen(self, problem: Problem, seen: Sight) -> tuple[Array, Array, Array, Array | None]:
        """The arrays of a call without the keys that no query reaches."""
        reach = seen.reach(problem.grid.queries, problem.grid.keys)
        q, k, v, keys = by_key_head(problem, seen)
        return q, k[..., :reach, :], v[..., :reach, :], None if keys is None else keys[..., :reach]

    def divided(self, library: Library, found: Array) -> Array:
        """Sums by their denominator, which is the last column; 0 where nothing was summed."""
        xp, sums, weight = library.xp, found[..., :-1], found[..., -1:]
        if not self.divides:
            return sums
        weight = weight + self.added
        return xp.where(weight == 0, xp.zeros_like(sums), sums / xp.where(weight == 0, xp.ones_like(weight), weight))

    def rows(self, problem: Problem, seen: Sight, queries: Any) -> Array | None:
        if not self.divides:
            return None
        q, k, _, keys = self._seen(problem, seen)
        library, xp = problem.library, problem.library.xp
        places = library.asarray(queries)
        a = self.query_features(library, xp.take(q, places, axis=-2), problem.scale)
        b, _ = self.key_features(library, k, keys, problem.scale)
        weights = a @ xp.matrix_transpose(b)  # (…, rows, reach)
        if seen.first is not None:
            reached = xp.arange(weights.shape[-1], device=library.device) <= places[:, None] + seen.first
            weights = xp.where(reached, weights, xp.zeros_like(weights))
        shape = (*weights.shape[:-1], problem.grid.keys - weights.shape[-1])
        weights = xp.concat([weights, library.zeros(shape, weights.dtype)], axis=-1)
        below = xp.sum(weights, axis=-1, keepdims=True) + self.added
        weights = xp.where(below == 0, xp.zeros_like(weights), weights / xp.where(below == 0, 1.0, below))
        return by_query_head(problem, weights)

    def step(self, q: Array, k: Array, v: Array, state: State | None = None, **options: Any) -> tuple[Array, State]:
        """Go on decoding: the output of these tokens, each seeing those up to itself and all before, and the new state.

        q, k and v have as many positions each, one or several; it is what the causal call gives for them, whatever
        parts the sequence comes in. Options are `scale` and `temperature`, the same in every step.
        """
        if options.keys() - {"scale", "temperature"}:
            raise ArgumentError(next(iter(options.keys() - {"scale", "temperature"})), "is no argument of step")
        if not self.scaled and options:
            raise ArgumentError(next(iter(options)), f"is given, and {self!r} has no scores to scale")
        problem, seen = self.posed(q, k, v, None, **options)
        grid, library = problem.grid, problem.library
        if grid.queries != grid.keys:
            raise ArgumentError("k", f"has {grid.keys} positions, expected {grid.queries} as q has: one step's tokens")
        q, k, v, _ = by_key_head(problem, seen)
        a = self.query_features(library, q, problem.scale)
        b, peak = self.key_features(library, k, None, problem.scale, None if state is None else state.peak)
        v = with_ones(library, v)
        lead = (*grid.batch, problem.key_heads, 1)
        if state is None:
            before = library.zeros((*lead, b.shape[-1], v.shape[-1]), v.dtype)
        else:
            before = state.sums
            if peak is not None:  # a larger exponent has come: what was summed is scaled down as the rest is
                before = before * library.xp.exp(state.peak - peak)
        found, after = up_to(library, a, b, v, before)
        output = by_query_head(problem, self.divided(library, found))
        return problem.restore(library.xp.astype(output, problem.q.dtype)), State(after, peak)

    def spent(self, length: int, features: int, width: int, causal: bool = False) -> Spent:
        of, out = self.width(features), width + 1
        flops = length * (2 * self.making(features) + 4 * of * out)
        if not causal:
            return Spent(flops, 2.0 * length * of + of * out)
        size = chunk(of, out)
        return Spent(flops + 2.0 * length * size * (of + out), length * (2.0 * of + size + of * out / size))


def by_gpu_kernel(method: Factorised, problem: Problem, seen: Sight) -> Array | None:
    """The causal sums by the kernels in Triton, where there is a GPU and they take the call; else None."""
    grid = problem.grid
    if grid.queries != grid.keys or is_compiled(problem.q) or unable(problem.q.device) is not None:
        return None
    from clearhead.kernels.triton import linear_launch  # needs Triton, which is here

    library, xp = problem.library, problem.library.xp
    fused = method.fused if seen.keys is None else None
    if fused is not None:
        a, b, v = problem.q, problem.k, problem.v
    else:
        q, k, v, keys = by_key_head(problem, seen)
        if keys is not None and keys.ndim > 1 and keys.shape[-2] != 1:  # keys that differ by query head
            return None
        a = method.query_features(library, q, problem.scale)
        b, _ = method.key_features(library, k, keys, problem.scale)
        a = xp.reshape(a, (*a.shape[:-4], grid.heads, *a.shape[-2:]))
        b, v = b[..., 0, :, :], v[..., 0, :, :]
    a, b, v = (
        xp.reshape(xp.broadcast_to(array, (*grid.batch, *array.shape[-3:])), (-1, *array.shape[-2:]))
        for array in (a, b, v)
    )
    if linear_launch.rejects(a, b, v) is not None:
        return None
    output = linear_launch.chunked(
        a, b, v, feature=fused, eps=method.added, normalized=method.divides, dtype=problem.q.dtype
    )
    return xp.reshape(output, (*grid.batch, grid.heads, *output.shape[-2:]))


def causal(library: Library, a: Array, b: Array, v: Array, first: int) -> Array:
    """Σ_j (a_i · b_j) v_j over keys j ≤ i + first, (…, T, W)."""
    queries, ahead = a.shape[-2], max(first, 0)
    before = total(library, b[..., :ahead, :], v[..., :ahead, :])
    b, v = (aligned(library, array[..., ahead:, :], queries, max(-first, 0)) for array in (b, v))
    return up_to(library, a, b, v, before)[0]


def aligned(library: Library, array: Array, length: int, late: int) -> Array:
    """(…, n, ·) as (…, length, ·): zeros for `late` positions first, and zeros at the end where there are fewer."""
    *lead, count, width = array.shape
    late = min(late, length)
    parts = [library.zeros((*lead, late, width), array.dtype)] if late else []
    parts.append(array[..., : length - late, :])
    missing = length - late - min(count, length - late)
    if missing:
        parts.append(library.zeros((*lead, missing, width), array.dtype))
    return parts[0] if len(parts) == 1 else library.xp.concat(parts, axis=-2)
