"""Observed attention in programs that JAX compiles for a GPU: what is taken, and how its parts are put together.

The kernels are Pallas's (`pallas_kernel.py`), which XLA compiles by its own Triton: no PyTorch is needed. Keys that a
query sees are one span that moves with it: causal, windows, lengths, and one & another, traced or not.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clearhead.core import formula
from clearhead.core.arrays import Array, dtype_name, is_traced, jax_platform
from clearhead.core.asking import QueryWeights
from clearhead.core.errors import first_line
from clearhead.core.observations import Observed
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Ran

TYPES = ("float16", "bfloat16", "float32")
FEATURES = (16, 32, 64, 128)
MOST = 65535  # programs of a GPU along the second axis
TAKES = ("received",)
rounding: Any = jnp.finfo  # which has no types
ROWS = 128  # of the queries that the plain steps look at together


class Way(NamedTuple):
    """All of a call but its arrays."""

    heads: int
    group: int
    softcap: float | None
    received: bool
    interpret: bool = False


class Seen(NamedTuple):
    """What comes of it, (rows, …): a row for each head of each batch row; `received` None where it is not wanted."""

    output: Array
    lse: Array
    peak: Array
    total: Array
    entropy: Array
    received: Array | None


def rejects(problem: Problem) -> str | None:
    """Why a problem of JAX arrays is not for the kernels of `pallas_kernel.py`."""
    if jax_platform(problem.q) != "gpu":
        return f"it takes JAX arrays on a GPU, not on {jax_platform(problem.q)}"
    return unfit(problem) or unable(dtype_name(problem.q), problem.q.shape[-1], problem.softcap is not None)


def unfit(problem: Problem) -> str | None:
    """What of a problem is nothing for them, wherever it lies."""
    name, grid, features = dtype_name(problem.q), problem.grid, problem.q.shape[-1]
    if is_traced(problem.softcap):
        return "it takes no traced softcap"
    if problem.want is None or problem.differentiated:
        return "under jit it is for what is observed"
    others = [wanted for wanted in problem.want.names if wanted not in TAKES]
    if others:
        return f"under jit it observes {', '.join(TAKES)}, not {others[0]}"
    if name not in TYPES:
        return f"it takes {', '.join(TYPES)}, not {name}"
    for option in ("bias", "sinks", "dropout"):
        if getattr(problem, option) is not None:
            return f"under jit it is for problems without {option}"
    if features != problem.width or features not in FEATURES:
        return f"under jit {features} and {problem.width} features are not alike and one of {FEATURES}"
    if 0 in grid.shape:
        return "there is nothing to attend to"
    if math.prod(grid.batch) * grid.heads > MOST:
        return f"under jit it takes at most {MOST:,} heads of all batch rows"
    if problem.mask is not None and problem.mask.lower(grid).span(grid.keys) is None:
        return "under jit it takes causal(), window(), lengths(), and one & another"
    return None


@cache
def unable(dtype: str, features: int, capped: bool, interpret: bool = False) -> str | None:
    """Why JAX does not run the kernels here, or gives other numbers than the formula: tried once, with little."""
    try:
        from clearhead.kernels.triton import pallas_kernel  # needs a JAX that has Pallas for GPUs

        pallas_kernel.checked()
    except Exception as error:  # in JAX's words
        return f"JAX {jax.__version__} has no Pallas for it: {first_line(error)}"
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 80, features)).astype(jnp.dtype(dtype)) for _ in range(3))
    spans, ones = np.array([[-80, 0, 70]], np.int32), np.ones((2, 80), np.float32)
    way = Way(2, 1, 3.0 if capped else None, True, interpret)
    given = (q, k, v, np.float32(1 / math.sqrt(features)), spans, ones)
    try:  # programs that are compiled beforehand run at once, also where another one is being traced
        found, wanted = (
            jax.jit(partial(call, way)).lower(*given).compile()(*given) for call in (by_kernels, by_rows)
        )  # fmt: skip
    except Exception as error:  # whatever the compiler says
        return f"JAX's Triton does not compile it here: {first_line(error)}"
    for pair in zip(found, wanted, strict=True):
        got, expected = (np.asarray(array, np.float64) for array in pair)
        room = 2 * math.sqrt(80) * float(rounding(dtype).eps) * np.abs(expected).max()
        if not np.abs(got - expected).max() <= room:
            return "JAX's Triton gives other numbers here than the formula"
    return None


def run(problem: Problem, *, interpret: bool = False) -> Ran:
    """Output, log-sum-exp and what is wanted."""
    grid, want = problem.grid, problem.want
    assert want is not None
    wanted = "received" in want.names
    rows = (*grid.batch, grid.heads, grid.queries)
    q, k, v = (flat(array, grid.batch) for array in (problem.q, problem.k, problem.v))
    counts = jnp.broadcast_to(counted(problem), rows).reshape(-1, grid.queries).astype(jnp.float32)
    way = Way(grid.heads, problem.group, problem.softcap, wanted, interpret)
    seen = program(way, q, k, v, jnp.float32(problem.scale), spans_of(problem), counts)
    found: Any = [None if array is None else array.reshape(*rows[:-1], *array.shape[1:]) for array in seen]
    output, lse, peak, total, entropy, received = found
    more = {"received": received} if wanted else {}
    largest = jnp.where(total == total, peak, total)  # a maximum need not keep NaN, and a sum does
    observed = Observed(output=output, lse=lse, max_score=largest, entropy=entropy, kernel="triton", **more)
    return Ran(observed, peak, total)


def flat(array: Array, batch: tuple[int, ...]) -> Array:
    """(rows, positions, features), the heads of one batch row after those of the one before."""
    return jnp.broadcast_to(array, (*batch, *array.shape[-3:])).reshape(-1, *array.shape[-2:])


def counted(problem: Problem) -> Array:
    """How much each query counts in what keys received."""
    grid, asked = problem.grid, getattr(problem.want, "received", None)
    if isinstance(asked, QueryWeights):
        return asked.over(problem.library, jnp.float32, (*grid.batch, grid.heads, grid.queries))
    last = grid.queries if asked is None else int(asked)
    return np.arange(grid.queries) >= grid.queries - last


def spans_of(problem: Problem) -> Array:
    """(batch rows, 3): of query i the keys from i + low to i + high, below a count."""
    grid = problem.grid
    span: Any = (-grid.queries, grid.keys, grid.keys)
    if problem.mask is not None:
        span = problem.mask.lower(grid).span(grid.keys)
    low, high, count = span
    reach = grid.queries + grid.keys + 1  # what is farther away is as good as there
    limits = ((low, -reach, reach), (high, -reach, reach), (count, 0, grid.keys))
    found = []
    for number, least, most in limits:
        clip = np.clip if isinstance(number, int | np.ndarray) else jnp.clip  # before JAX cuts it to 32 bits
        found.append(jnp.broadcast_to(jnp.reshape(clip(number, least, most), -1), math.prod(grid.batch)))
    return jnp.stack(found, axis=-1).astype(jnp.int32)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend(way: Way, q: Array, k: Array, v: Array, scale: Array, spans: Array, counts: Array) -> Seen:
    """By the kernels; where something that may be seen is not finite, by plain steps, which know whom it spoils."""
    within = jnp.repeat(spans[:, 2], k.shape[0] // spans.shape[0])  # keys below it are seen, the others may be anything
    there = (jnp.arange(k.shape[1]) < within[:, None])[..., None]
    k, v = jnp.where(there, k, 0), jnp.where(there, v, 0)
    finite = jnp.isfinite(q).all() & jnp.isfinite(k).all() & jnp.isfinite(v).all()
    return jax.lax.cond(
        finite, partial(by_kernels, way), partial(by_rows, way), q, k, v, scale, spans, counts
    )  # fmt: skip


@attend.defjvp
def _(way: Way, primals: Any, tangents: Any) -> Any:
    """Derivatives through plain steps, a few queries at a time."""
    _, moved = jax.jvp(partial(by_rows, way), primals, tangents)
    return attend(way, *primals), moved


program = jax.jit(attend, static_argnums=0)


def by_kernels(way: Way, q: Array, k: Array, v: Array, scale: Array, spans: Array, counts: Array) -> Seen:
    """In two looks: sums over keys for each query, then over queries for each key."""
    from clearhead.kernels.triton import pallas_kernel  # as above

    output, peak, total, slant = pallas_kernel.first_look(way, q, k, v, scale, spans)
    lse = peak + jnp.log(total)
    entropy = jnp.where(total > 0, jnp.log(total) - slant / jnp.where(total > 0, total, 1.0), 0.0)
    received = None
    if way.received:
        received = pallas_kernel.second_look(way, q, k, scale, spans, counts, peak, total)
    return Seen(output, lse, peak, total, entropy, received)


def by_rows(way: Way, q: Array, k: Array, v: Array, scale: Array, spans: Array, counts: Array) -> Seen:
    """The formula on some queries after the others."""
    rows, queries, _ = q.shape
    keys = k.shape[1]
    low, high, count = (jnp.repeat(spans[:, n], way.heads)[:, None, None] for n in range(3))
    whole, also = (jnp.repeat(array, way.group, axis=0).astype(jnp.float32) for array in (k, v))
    some = min(ROWS, queries)
    blocks = -(-queries // some)
    j = jnp.arange(keys)

    @jax.checkpoint
    def look(place: Array) -> Any:
        i = place * some + jnp.arange(some)[:, None]
        part, much = (jnp.take(array, i[:, 0], axis=1, mode="clip") for array in (q, counts))
        seen = (j >= i + low) & (j <= i + high) & (j < count)
        answer = formula.attention(
            part.astype(jnp.float32), whole, also, scale=scale, softcap=way.softcap, mask=seen
        )  # fmt: skip
        much = jnp.where(i[:, 0] < queries, much, 0.0)
        return (answer.output, answer.lse, answer.max_score, answer.entropy), jnp.einsum(
            "rij,ri->rj", answer.weights, much, precision="highest"
        )

    found, received = jax.lax.map(look, jnp.arange(blocks))
    output, lse, peak, entropy = (
        jnp.moveaxis(array, 0, 1).reshape(rows, blocks * some, *array.shape[3:])[:, :queries] for array in found
    )
    total = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(jnp.where(lse == -jnp.inf, 0.0, lse - peak)))
    return Seen(output.astype(q.dtype), lse, peak, total, entropy, received.sum(0) if way.received else None)
