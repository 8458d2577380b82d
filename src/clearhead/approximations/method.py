"""A method as a value: something that stands in for attention, callable as attention is, and that knows its cost."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Never

from clearhead.approximations.sight import Sight, sight
from clearhead.core.array_masks import of_pytorch
from clearhead.core.arrays import AnyArray, Array, ArrayOf, ArrayT, is_torch
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.foreign import ATTENTION, closed, refuse_others
from clearhead.core.mask import Mask
from clearhead.core.problem import Problem, pose
from clearhead.core.temperature import tempered

EXACT_ONLY = "is for attention(…), which is exact: no approximation here has it"
OTHERS = ATTENTION | dict.fromkeys(("bias", "softcap", "sinks", "dropout", "kernel"), EXACT_ONLY)


@dataclass(frozen=True)
class Spent:
    """What one head costs on paper: floating-point operations, and numbers held beyond inputs and output."""

    flops: float
    held: float


class Method:
    """What every approximation is: call it as you call `attention`.

    A subclass says what it computes (`run`), the weights that this implies for some queries (`rows`, None where there
    are none), why it has no causal form (`acausal`, None where it has one), whether there are scores to scale
    (`scaled`) and what it costs (`spent`).

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4))
    >>> method = ch.performer(16)
    >>> isinstance(method, ch.Method), method(q, k, v, mask=ch.causal()).shape
    (True, (2, 7, 4))
    """

    source: ClassVar[str] = ""
    acausal: ClassVar[str | None] = None
    scaled: ClassVar[bool] = True

    @closed
    def __call__(
        self,
        q: ArrayOf[ArrayT],
        k: ArrayOf[ArrayT],
        v: ArrayOf[ArrayT],
        *,
        mask: Mask | AnyArray | None = None,
        scale: float | None = None,
        temperature: float | None = None,
        **others: Never,
    ) -> ArrayT:
        """The approximate output, shaped as `attention` gives it."""
        if others:
            refuse_others(type(self).__name__.lower(), others, OTHERS)
        if not self.scaled and (scale is not None or temperature is not None):
            name = "scale" if scale is not None else "temperature"
            raise ArgumentError(name, f"is given, and {self!r} has no scores to scale: multiply q with it")
        problem, seen = self.posed(q, k, v, mask, scale, temperature)
        return problem.restore(self.answer(problem, seen))

    def posed(
        self, q: Array, k: Array, v: Array, mask: Any, scale: Any = None, temperature: Any = None
    ) -> tuple[Problem, Sight]:
        """A call checked as `attention` checks it, and its mask in the terms that this method knows."""
        if temperature is not None:
            scale = tempered(temperature, scale, q)
        if is_torch(q):
            mask = of_pytorch("mask", mask, q, k)
        if is_compiled(q):
            from clearhead.approximations import compiling  # needs PyTorch, which is here now

            problem = compiling.pose(q, k, v, mask, scale)
        else:
            problem = pose(q, k, v, mask=mask, scale=scale)
        seen = sight(problem, self, causal=self.acausal)
        self.check(problem)
        return problem, seen

    def answer(self, problem: Problem, seen: Sight) -> Array:
        """The output with all leading axes, in the precision of the inputs."""
        grid, library = problem.grid, problem.library
        shape = (*grid.batch, grid.heads, grid.queries, problem.width)
        if 0 in (*grid.shape, problem.width):
            return library.zeros(shape, problem.q.dtype)
        output = library.xp.broadcast_to(self.run(problem, seen), shape)
        return library.xp.astype(output, problem.q.dtype, copy=False)

    def check(self, problem: Problem) -> None:
        """Refuse sizes that this method does not take."""

    def run(self, problem: Problem, seen: Sight) -> Array:
        """The output in the precision of sums, (*batch, heads, T, Dv) or what broadcasts to it."""
        raise NotImplementedError

    def rows(self, problem: Problem, seen: Sight, queries: Any) -> Array | None:
        """The weights that some queries have by this method, (*batch, heads, len(queries), S); None: it has none."""
        raise NotImplementedError

    def spent(self, length: int, features: int, width: int, causal: bool = False) -> Spent:
        """What one head of so many queries and keys costs on paper."""
        raise NotImplementedError


def exact(length: int, features: int, width: int, causal: bool = False) -> Spent:
    """What exact attention costs on paper: two products and five operations a score, by half where causal."""
    pairs = length * (length + 1) / 2 if causal else float(length * length)
    return Spent(pairs * (2 * features + 2 * width + 5), 3.0 * length)


def crossover(method: Method, features: int, width: int | None = None, *, causal: bool = False) -> int | None:
    """The least length from which on a method has fewer operations than exact attention; None: there is none.

    >>> from clearhead.approximations import linear, performer
    >>> crossover(linear(), 64), crossover(performer(256), 64)
    (66, 513)
    """
    width = features if width is None else width

    def cheaper(length: int) -> bool:
        return method.spent(length, features, width, causal).flops < exact(length, features, width, causal).flops

    above = 1
    while not cheaper(above):
        above *= 2
        if above > 2**40:
            return None
    below = above // 2  # there it is not cheaper yet, or it is 0
    while above - below > 1:
        middle = (above + below) // 2
        above, below = (middle, below) if cheaper(middle) else (above, middle)
    return above


def is_compiled(array: Array) -> bool:
    """True for a tensor that PyTorch's compiler is following."""
    return is_torch(array) and sys.modules["torch"].compiler.is_compiling()


def by_key_head(problem: Problem, seen: Sight) -> tuple[Array, Array, Array, Array | None]:
    """q (…, Hk, G, T, D), k and v (…, Hk, 1, S, …) in the precision of sums, and the keys that are there.

    Query heads that share a key head lie beside one another. Keys that are not there are zeros, whatever they held.
    """
    library, xp = problem.library, problem.library.xp
    q, k, v = map(library.computing, (problem.q, problem.k, problem.v))
    together = (problem.key_heads, problem.group)
    q = xp.reshape(q, (*q.shape[:-3], *together, *q.shape[-2:]))
    k, v = k[..., None, :, :], v[..., None, :, :]
    if seen.keys is None:
        return q, k, v, None
    keys = seen.keys
    if keys.ndim > 1:
        heads = keys.shape[-2]
        lead = together if heads != 1 else (1, 1)
        keys = xp.reshape(keys, (*keys.shape[:-2], *lead, keys.shape[-1]))
    k, v = (xp.where(keys[..., None], a, xp.zeros_like(a)) for a in (k, v))
    return q, k, v, keys


def by_query_head(problem: Problem, array: Array) -> Array:
    """(…, Hk, G, T, ·) back to (*batch, heads, T, ·)."""
    grid, xp = problem.grid, problem.library.xp
    lead = (*grid.batch, problem.key_heads, problem.group)
    array = xp.broadcast_to(array, (*lead, *array.shape[-2:]))
    return xp.reshape(array, (*grid.batch, grid.heads, *array.shape[-2:]))


def whole(argument: str, value: object, least: int = 1) -> int:
    """A whole number, checked."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(argument, f"is {shown(value)}, expected a whole number of at least {least}")
    return value
