"""Linformer: keys and values projected along the sequence to a fixed length, and attention over what is left.

    O = softmax(Q (E K)ᵀ · scale) (F V),        E and F (length, S)

Wang, Li, Khabsa, Fang and Ma 2020, "Linformer: Self-Attention with Linear Complexity", equation 7. In a model E and F
are learned; `projection` takes them, one array for both or a pair, for all heads or (heads, length, S), and cut where
there are fewer keys than they were made for, as published code does. A seed draws both with entries N(0, 1/length), as
the paper's theorem has it: without training that is no approximation of softmax, and `audit` says so. "mean" is the
paper's pooling (section 4): slot i is the mean of the i-th stretch of keys that are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from clearhead.approximations.method import Method, Spent, whole
from clearhead.approximations.pooling import Heads, side_by_side, softmax, stretches
from clearhead.approximations.sight import Sight
from clearhead.calls import attention
from clearhead.core.arrays import Array, is_array, require_floating
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.mask import Where
from clearhead.core.problem import Problem


@dataclass(frozen=True, eq=False)
class Linformer(Method):
    """Linformer as a value; `linformer(…)` makes one."""

    length: int = 256
    projection: Any = "mean"

    source: ClassVar[str] = "Wang et al. 2020"
    acausal: ClassVar[str | None] = (
        "it mixes keys of all positions into each slot, so a query would see what comes later"
    )

    def check(self, problem: Problem) -> None:
        for array in self.given:
            if array.shape[-1] < problem.grid.keys:
                raise ArgumentError(
                    "projection",
                    f"has shape {tuple(array.shape)}, expected at least {problem.grid.keys} columns, one a key",
                )
            if array.ndim == 3 and array.shape[0] not in (1, problem.grid.heads):
                raise ArgumentError("projection", f"is for {array.shape[0]} heads, expected {problem.grid.heads}")

    @property
    def given(self) -> tuple[Array, ...]:
        """The arrays for keys and for values, where they were given."""
        if isinstance(self.projection, str | int):
            return ()
        return self.projection if isinstance(self.projection, tuple) else (self.projection, self.projection)

    def projections(self, problem: Problem, heads: Heads) -> tuple[Array, Array, Array | None]:
        """E, F (…, length, S), zero for keys that are not there, and the slots that hold anything, (…, length)."""
        library, xp, count = problem.library, problem.library.xp, problem.grid.keys
        dtype = heads.k.dtype
        present = None if heads.keys is None else xp.astype(heads.keys, dtype)[..., None, :]  # (…, 1, S)
        if self.projection == "mean":
            table = stretches(library, count, self.length, dtype)
            table = table if present is None else table * present
            counts = xp.sum(table, axis=-1, keepdims=True)
            pooled = table / xp.where(counts == 0, xp.ones_like(counts), counts)
            return pooled, pooled, None if present is None else counts[..., 0] > 0
        if isinstance(self.projection, int):
            generator = np.random.default_rng([self.projection, self.length, count])
            drawn = generator.standard_normal((2, self.length, count), dtype=np.float32) / math.sqrt(self.length)
            arrays = [library.asarray(array, dtype) for array in drawn]
        else:
            arrays = [library.asarray(array, dtype)[..., :count] for array in self.given]
        e, f = arrays if present is None else (array * present for array in arrays)
        return e, f, None

    def run(self, problem: Problem, seen: Sight) -> Array:
        heads = side_by_side(problem, seen)
        e, f, slots = self.projections(problem, heads)
        mask = None if slots is None else Where(slots[..., None, :])
        return attention(heads.q, e @ heads.k, f @ heads.v, scale=problem.scale, mask=mask)

    def rows(self, problem: Problem, seen: Sight, queries: Any) -> Array | None:
        library, xp = problem.library, problem.library.xp
        heads = side_by_side(problem, seen)
        e, f, slots = self.projections(problem, heads)
        some = xp.take(heads.q, library.asarray(queries), axis=-2)
        scores = problem.scale * (some @ xp.matrix_transpose(e @ heads.k))
        return softmax(library, scores, None if slots is None else slots[..., None, :]) @ f

    def spent(self, length: int, features: int, width: int, causal: bool = False) -> Spent:
        slots = min(self.length, length)
        projecting = 0 if self.projection == "mean" else 2.0 * length * slots * (features + width)
        pooling = length * (features + width) if self.projection == "mean" else 0
        return Spent(
            projecting + pooling + length * slots * (2.0 * features + 2 * width + 5), slots * (features + width)
        )

    def __repr__(self) -> str:
        if isinstance(self.projection, str | int):
            return f"linformer({self.length}{'' if self.projection == 'mean' else f', projection={self.projection}'})"
        return f"linformer({self.length}, projection=array{tuple(self.given[0].shape)})"


def linformer(length: int | None = None, *, projection: Any = "mean") -> Linformer:
    """Linformer (Wang et al. 2020): attention over `length` slots that keys and values are projected to, in O(n).

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 300, 16))
    >>> learned = np.random.default_rng(1).standard_normal((2, 32, 512)) / 32**0.5
    >>> ch.approximate(q, k, v, ch.linformer(32, projection=tuple(learned))).shape
    (300, 16)

    projection: an array (length, at least S) or (heads, length, at least S), a pair of them for keys and values, a seed
    for random ones, or "mean", means over stretches of keys. It has no causal form. length is 256 unless given, or the
    array's.
    """
    if isinstance(projection, int) and not isinstance(projection, bool):
        whole("projection", projection, 0)
    elif projection != "mean" if isinstance(projection, str) else True:
        arrays = projection if isinstance(projection, tuple) else (projection,)
        if len(arrays) not in (1, 2) or not all(is_array(array) and array.ndim in (2, 3) for array in arrays):
            raise ArgumentError(
                "projection", f"is {shown(projection)[:60]}, expected 'mean', a seed, an array (length, keys) or a pair"
            )
        for array in arrays:
            require_floating("projection", array)
            if array.shape[-2] != arrays[0].shape[-2] or (length is not None and array.shape[-2] != length):
                raise ArgumentError("projection", f"has shape {tuple(array.shape)}, expected {length} rows, its length")
        length = int(arrays[0].shape[-2])
        projection = arrays if len(arrays) == 2 else arrays[0]
    return Linformer(whole("length", 256 if length is None else length), projection)
