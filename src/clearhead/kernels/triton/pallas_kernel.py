"""Two looks at the scores in Pallas: sums over keys for each query, then what each key received."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from clearhead.core.arrays import Array

# queries and keys of a tile; a product's sides are at least 16
QUERIES, KEYS = 64, 64
shaped: Any = jax.ShapeDtypeStruct  # which has no types


class Options(Protocol):
    """What the kernels read of a `Way`."""

    @property
    def heads(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def interpret(self) -> bool: ...


def checked() -> None:
    """Ask for all that is called, so that a JAX without it says so before anything is compiled."""
    for name in ("load", "store", "dot", "CompilerParams"):
        getattr(plt, name)


def scores(way: Options, q: Array, k: Array, scale: Array) -> Array:
    """softcap(q kᵀ · scale), (queries, keys), in float32 to its last digit."""
    product = scale * lax.dot_general(
        q, k, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )  # fmt: skip
    return product if way.softcap is None else way.softcap * jnp.tanh(product / way.softcap)


def allowed(spans: Any, first: Array, start: Array) -> Array:
    """Which keys of a tile each query sees."""
    i = first + jnp.arange(QUERIES, dtype=jnp.int32)[:, None]
    j = start + jnp.arange(KEYS, dtype=jnp.int32)[None, :]
    return (j >= i + spans[0]) & (j <= i + spans[1]) & (j < spans[2])


def first_kernel(q_ref: Any, k_ref: Any, v_ref: Any, scale_ref: Any, spans_ref: Any, *out: Any, way: Options) -> None:
    """Of a block of queries: output, peak, Σ e, and Σ e · (score − peak), with e = exp(score − peak)."""
    first = pl.program_id(0) * QUERIES
    spans = spans_ref[0], spans_ref[1], spans_ref[2]
    scale, q = scale_ref[0], plt.load(q_ref)

    def step(place: Array, sums: Any) -> Any:
        mixed, peak, total, slant = sums
        start = place * KEYS
        k, v = plt.load(k_ref.at[pl.ds(start, KEYS), :]), plt.load(v_ref.at[pl.ds(start, KEYS), :])
        seen = allowed(spans, first, start)
        score = jnp.where(seen, scores(way, q, k, scale), -jnp.inf)
        higher = jnp.maximum(peak, score.max(axis=1))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)  # of a row that has seen nothing yet
        fall = jnp.where(peak == -jnp.inf, 0.0, peak - base)
        below = jnp.where(seen, score - base[:, None], 0.0)
        e = jnp.where(seen, jnp.exp(below), 0.0)
        shrunk = jnp.where(peak == -jnp.inf, 0.0, jnp.exp(fall))
        slant = shrunk * (slant + total * fall) + (e * below).sum(axis=1)
        total = shrunk * total + e.sum(axis=1)
        added = lax.dot_general(
            e.astype(v.dtype), v, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return shrunk[:, None] * mixed + added, higher, total, slant

    nothing = jnp.zeros(QUERIES, jnp.float32)
    sums = jnp.zeros((QUERIES, v_ref.shape[-1]), jnp.float32), nothing - jnp.inf, nothing, nothing
    low = jnp.maximum(first + spans[0], 0)
    high = jnp.minimum(first + QUERIES + spans[1], spans[2])  # the key after the last that one of them sees
    mixed, peak, total, slant = lax.fori_loop(
        lax.div(low, jnp.int32(KEYS)), lax.div(jnp.maximum(high, 0) + KEYS - 1, jnp.int32(KEYS)), step, sums
    )
    mixed = mixed / jnp.where(total > 0, total, 1.0)[:, None]
    for ref, array in zip(out, (mixed, peak, total, slant), strict=True):
        plt.store(ref, array.astype(ref.dtype))


def second_kernel(*refs: Any, way: Options) -> None:
    """Of a block of keys: the weights that queries gave to them, each times how much the query counts."""
    q_ref, k_ref, scale_ref, spans_ref, counts_ref, peak_ref, total_ref, out_ref = refs
    start = pl.program_id(0) * KEYS
    spans = spans_ref[0], spans_ref[1], spans_ref[2]
    scale, k = scale_ref[0], plt.load(k_ref)

    def step(place: Array, received: Array) -> Array:
        first = place * QUERIES
        here = pl.ds(first, QUERIES)
        counts, peak, total = (plt.load(ref.at[here]) for ref in (counts_ref, peak_ref, total_ref))
        seen = allowed(spans, first, start)
        # as in the first look, and not fused with what is subtracted: both have to round scores alike, however large
        score = jnp.where(seen, scores(way, plt.load(q_ref.at[here, :]), k, scale), -jnp.inf)
        base = jnp.where(peak == -jnp.inf, 0.0, peak)
        e = jnp.where(seen, jnp.exp(jnp.where(seen, score - base[:, None], 0.0)), 0.0)
        return received + (e * (counts / jnp.where(total > 0, total, 1.0))[:, None]).sum(axis=0)

    # query i sees key j where j − high ≤ i ≤ j − low
    low = jnp.clip(start - spans[1], 0, q_ref.shape[0])
    high = jnp.clip(start + KEYS - spans[0], 0, q_ref.shape[0])
    loop = lax.div(low, jnp.int32(QUERIES)), lax.div(high + QUERIES - 1, jnp.int32(QUERIES))
    plt.store(out_ref, lax.fori_loop(*loop, step, jnp.zeros(KEYS, jnp.float32)))


def padded(array: Array, to: int, axis: int = 1) -> Array:
    """With zeros after it, so that whole tiles are read."""
    more = -array.shape[axis] % to
    return jnp.pad(array, [(0, more if n == axis else 0) for n in range(array.ndim)]) if more else array


def call(kernel: Any, name: str, way: Options, **specs: Any) -> Any:
    """A kernel as a function of arrays."""
    features = specs.pop("features")
    return pl.pallas_call(
        partial(kernel, way=way), interpret=way.interpret, name=name,
        compiler_params=plt.CompilerParams(num_warps=4 if features <= 64 else 8, num_stages=2), **specs,
    )  # fmt: skip


def first_look(way: Options, q: Array, k: Array, v: Array, scale: Array, spans: Array) -> list[Array]:
    """(output, peak, total, slant) of each query."""
    rows, queries, features = q.shape
    q, k, v = padded(q, QUERIES), padded(k, KEYS), padded(v, KEYS)
    block = pl.BlockSpec((None, QUERIES, features), lambda i, r: (r, i, 0))
    every = pl.BlockSpec((None, k.shape[1], features), lambda i, r: (r // way.group, 0, 0))
    line = pl.BlockSpec((None, QUERIES), lambda i, r: (r, i))
    float32 = shaped((rows, q.shape[1]), jnp.float32)
    run = call(
        first_kernel, "clearhead_first_look", way, features=features, grid=(q.shape[1] // QUERIES, rows),
        in_specs=[block, every, every, *few(way)], out_specs=[block, line, line, line],
        out_shape=[shaped(q.shape, q.dtype), float32, float32, float32],
    )  # fmt: skip
    return [array[:, :queries] for array in run(q, k, v, scale[None], padded(spans, 4))]


def second_look(
    way: Options, q: Array, k: Array, scale: Array, spans: Array, counts: Array, peak: Array, total: Array
) -> Array:
    """What each key received."""
    rows, _, features = q.shape
    keys = k.shape[1]
    q, k = padded(q, QUERIES), padded(k, KEYS)
    counts, peak, total = (padded(array, QUERIES) for array in (counts, peak, total))
    every = pl.BlockSpec((None, q.shape[1], features), lambda j, r: (r, 0, 0))
    block = pl.BlockSpec((None, KEYS, features), lambda j, r: (r // way.group, j, 0))
    line = pl.BlockSpec((None, q.shape[1]), lambda j, r: (r, 0))
    run = call(
        second_kernel, "clearhead_second_look", way, features=features, grid=(k.shape[1] // KEYS, rows),
        in_specs=[every, block, *few(way), line, line, line],
        out_specs=pl.BlockSpec((None, KEYS), lambda j, r: (r, j)),
        out_shape=shaped((rows, k.shape[1]), jnp.float32),
    )  # fmt: skip
    return run(q, k, scale[None], padded(spans, 4), counts, peak, total)[:, :keys]


def few(way: Options) -> list[Any]:
    """The scale, and the span of the batch row that a head belongs to."""
    return [pl.BlockSpec((1,), lambda n, r: (0,)), pl.BlockSpec((None, 4), lambda n, r: (r // way.heads, 0))]
