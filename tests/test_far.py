"""Positions and sizes at their limits: T5's buckets, offsets that are traced or far away, numbers beyond 64 bits."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from libraries import LIBRARIES, ArrayLibrary, numbers

import clearhead as ch
from clearhead.core.grid import Grid
from clearhead.core.positions import buckets, distances
from clearhead.nn.places import buckets as torch_buckets

B, H, T, S, D = 3, 2, 5, 11, 4
# more digits than Python prints
HUGE = pytest.param(10**5000, id="thousands of digits")


def arrays(make: Callable[[np.ndarray], Any] = lambda a: a, dtype: str = "float64") -> list[Any]:
    rng = np.random.default_rng(5)
    return [make(rng.standard_normal((B, H, n, D)).astype(dtype)) for n in (T, S, S)]


def table(count: int = 8) -> np.ndarray:
    return np.random.default_rng(6).standard_normal((count, H))


# T5's buckets


def published(distance: int, count: int, bidirectional: bool, most: int) -> int:
    """T5's rule for one distance, in the float32 of its checkpoints."""
    bucket = 0
    if bidirectional:
        count //= 2
        if distance > 0:
            bucket = count
        distance = abs(distance)
    else:
        distance = -min(distance, 0)
    exact = count // 2
    if distance < exact:
        return bucket + distance
    quotient = np.log(np.float32(distance) / np.float32(exact)) / np.float32(np.log(most / exact))
    return bucket + min(exact + int(quotient * np.float32(count - exact)), count - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("count", [4, 5, 6, 8, 13, 31, 32, 64])
def test_buckets_are_t5s_for_every_distance_that_has_a_meaning(count: int, bidirectional: bool) -> None:
    exact = count // (4 if bidirectional else 2)
    where = np.array([*range(-300, 301), -5000, 5000, -(10**8), 10**8])
    for most in (exact + 1, exact + 2, 2 * exact + 1, 20 + exact, 128, 1000, 2**31, 2**60 - 1):
        want = [published(int(distance), count, bidirectional, most) for distance in where]
        found = buckets(where, count, bidirectional=bidirectional, most=most)
        np.testing.assert_array_equal(found, want, err_msg=f"max_distance {most}")
        np.testing.assert_array_equal(torch_buckets(torch.from_numpy(where), count, bidirectional, most), want)
        assert found.min() >= 0
        assert found.max() < count


def test_buckets_are_those_of_transformers() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    theirs = T5Attention._relative_position_bucket
    where = torch.arange(-2000, 2001)
    for both in (True, False):
        for count, most in ((32, 128), (32, 20), (8, 12), (64, 1000)):
            want = theirs(where, bidirectional=both, num_buckets=count, max_distance=most)
            np.testing.assert_array_equal(buckets(where.numpy(), count, bidirectional=both, most=most), want)


@pytest.mark.parametrize("most", [8, 4, 1, 0, -3, 2**60, HUGE, 128.0, "128", True, None])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_a_largest_distance_without_a_meaning_is_refused(most: Any, bidirectional: bool) -> None:
    with pytest.raises(ch.ArgumentError, match=r"^max_distance: is .*, expected a whole number above 8 and") as no:
        ch.relative_bias(np.zeros((32 if bidirectional else 16, 3)), bidirectional=bidirectional, max_distance=most)
    assert "\n" not in str(no.value)


def test_every_largest_distance_with_a_meaning_is_taken() -> None:
    q, k, v = arrays()
    for count in (4, 5, 32):
        for most in (count // 4 + 1, np.int64(count), 2**60 - 1):
            bias = ch.relative_bias(np.zeros((count, H)), max_distance=most)
            np.testing.assert_allclose(ch.attention(q, k, v, bias=bias), ch.attention(q, k, v), rtol=1e-13)


# Offsets that JAX traces


WITH_OFFSET: dict[str, Callable[[Any], dict[str, Any]]] = {
    "causal": lambda offset: {"mask": ch.causal(offset=offset)},
    "window": lambda offset: {"mask": ch.window(3, 1, offset=offset)},
    "global tokens": lambda offset: {"mask": ch.global_tokens([0, 6], offset=offset)},
    "global tokens or causal": lambda offset: {"mask": ch.global_tokens([6], offset=offset) | ch.causal(offset=offset)},
    "alibi": lambda offset: {"bias": ch.alibi(H, offset=offset)},
    "relative": lambda offset: {"bias": ch.relative_bias(table(), max_distance=9, offset=offset)},
    "relative, one way": lambda offset: {
        "bias": ch.relative_bias(jnp.asarray(table()), bidirectional=False, max_distance=9, offset=offset)
    },
}
OFFSETS = {"scalar": 6, "by row": [6, 0, 4], "beyond": [100, -3, 6]}


# by both kernels in turn, so that each meets every kind and every offset
TURNS = [
    (kind, offset, ("dense", "tiled")[(i + j) % 2])
    for i, kind in enumerate(WITH_OFFSET)
    for j, offset in enumerate(OFFSETS)
]


@pytest.mark.parametrize(("kind", "offset", "kernel"), TURNS)
def test_offsets_that_jax_traces_mean_what_numbers_mean(kind: str, offset: str, kernel: str) -> None:
    q, k, v = arrays(jnp.asarray)
    where = jnp.asarray(OFFSETS[offset])

    def call(q: Any, k: Any, v: Any, where: Any) -> Any:
        return ch.attention(q, k, v, kernel=kernel, **WITH_OFFSET[kind](where))

    want = ch.attention(*arrays(), **WITH_OFFSET[kind](np.asarray(OFFSETS[offset])), kernel="dense")
    np.testing.assert_allclose(numbers(jax.jit(call)(q, k, v, where)), want, atol=1e-13)


def test_traced_offsets_without_a_sign_mean_the_same() -> None:
    q, k, v = arrays(jnp.asarray, "float32")

    def call(where: Any) -> Any:
        return ch.attention(q, k, v, bias=ch.alibi(H, offset=where), mask=ch.window(3, 1, offset=where))

    want = ch.attention(*arrays(), bias=ch.alibi(H, offset=[6, 0, 4]), mask=ch.window(3, 1, offset=[6, 0, 4]))
    for dtype in (jnp.uint8, jnp.uint32, jnp.uint64):
        found = jax.jit(call)(jnp.asarray([6, 0, 4], dtype))
        np.testing.assert_allclose(numbers(found), want, atol=1e-5)


@pytest.mark.parametrize("kind", WITH_OFFSET)
def test_traced_offsets_that_are_no_whole_numbers_or_do_not_fit_are_refused(kind: str) -> None:
    q, k, v = arrays(jnp.asarray)

    def call(where: Any) -> Any:
        return ch.attention(q, k, v, **WITH_OFFSET[kind](where))

    with pytest.raises(ch.ArgumentError, match="offset: has dtype float64, expected whole numbers"):
        jax.jit(call)(jnp.ones(()))
    with pytest.raises(ch.ArgumentError, match=r"offset: has shape \(2,\), expected one number or the batch shape"):
        jax.jit(call)(jnp.arange(2))


def test_global_tokens_may_be_traced() -> None:
    q, k, v = arrays(jnp.asarray)
    for kernel in ("dense", "tiled"):
        found = jax.jit(lambda at, kernel=kernel: ch.attention(q, k, v, mask=ch.global_tokens(at), kernel=kernel))(
            jnp.array([1, 7])
        )
        want = ch.attention(q, k, v, mask=ch.global_tokens([1, 7]), kernel=kernel)
        np.testing.assert_allclose(numbers(found), numbers(want), atol=1e-13)


def test_gradients_flow_under_traced_offsets() -> None:
    q, k, v = arrays(jnp.asarray)

    def loss(q: Any, where: Any) -> Any:
        return ch.attention(q, k, v, bias=ch.alibi(H, offset=where)).sum()

    found = jax.jit(jax.grad(loss))(q, jnp.array([3, 1, 9]))
    want = ch.gradients(*arrays(), np.ones((B, H, T, D)), bias=ch.alibi(H, offset=[3, 1, 9]))[0]
    np.testing.assert_allclose(numbers(found), want, atol=1e-13)


@pytest.mark.parametrize(("layout", "dtype"), [("half", "float32"), ("interleaved", "float64")])
def test_rotary_turns_by_offsets_that_jax_traces(layout: Any, dtype: str) -> None:
    turn, x = ch.rotary(layout=layout), arrays(dtype=dtype)[0]
    turned = jax.jit(lambda x, where: turn(x, offset=where))
    for where in (7, -300, 123_456_789, [0, 65_535, -(2**30)]):
        want = turn(x.astype(np.float64), offset=where)
        for width in (jnp.int32,) if dtype == "float32" else (jnp.int64,):
            found = turned(jnp.asarray(x), jnp.asarray(where, width))
            assert found.dtype == dtype
            # 10⁸ · ε is what an angle in float64 has lost itself
            np.testing.assert_allclose(numbers(found), want, atol=2e-6 if dtype == "float32" else 1e-6)
            if np.abs(where).max() < 1000:
                np.testing.assert_allclose(numbers(found), want, atol=2e-6 if dtype == "float32" else 1e-12)


# Offsets far away


FAR = {
    "one": 10**8,
    "negative": -(10**8),
    "by row": [10**8, 0, -(10**9)],
    "near one another": [10**8, 10**8 + 3, 10**8 + 40],
    "out of order, twice": [2**59, 7, 2**59],
}


def straight(kind: str, where: Any) -> np.ndarray:
    """The bias (B, H, T, S), by one number at a time."""
    offset = np.broadcast_to(np.asarray(where), (B,))
    slopes = [2.0 ** (-8 * (h + 1) / H) for h in range(H)]
    bias = np.empty((B, H, T, S))
    for b, h, i, j in np.ndindex(*bias.shape):
        distance = j - (i + int(offset[b]))
        if kind == "alibi":
            bias[b, h, i, j] = -slopes[h] * abs(distance)
        else:
            bias[b, h, i, j] = table()[published(distance, 8, kind == "relative", 9), h]
    return bias


def named(kind: str, where: Any, make: Callable[[np.ndarray], Any] = lambda a: a) -> Any:
    if kind == "alibi":
        return ch.alibi(H, offset=where)
    return ch.relative_bias(make(table()), bidirectional=kind == "relative", max_distance=9, offset=where)


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
@pytest.mark.parametrize("where", FAR)
@pytest.mark.parametrize("kind", ["alibi", "relative", "relative, one way"])
def test_offsets_far_away_are_exact_and_cost_nothing(library: ArrayLibrary, where: str, kind: str) -> None:
    kernels = {"strict": ("tiled", "dense"), "jax": ("dense",)}.get(library.name, ("compiled", "tiled", "dense"))
    bias = named(kind, FAR[where], library.make)
    # only differences of scores count, so the whole row may be moved back to where doubles have digits
    added = straight(kind, FAR[where])
    want = ch.attention(*arrays(), bias=added - added.max(-1, keepdims=True), kernel="dense")
    for kernel in kernels:
        tracemalloc.start()
        found = ch.attention(*arrays(library.make), bias=bias, kernel=kernel)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        far = np.abs(np.asarray(FAR[where], float)).max() if kind == "alibi" else 1.0
        np.testing.assert_allclose(numbers(found), want, atol=max(1e-12, 4e-16 * far), err_msg=kernel)
        assert used < 2**24


def test_the_distances_of_a_call_are_those_that_occur() -> None:
    rng = np.random.default_rng(8)
    for _ in range(200):
        grid = Grid((4,), 1, int(rng.integers(0, 9)), int(rng.integers(0, 9)))
        offset = rng.integers(-(10 ** rng.integers(1, 17)), 10 ** rng.integers(1, 17), 4)
        distance, centre, place = distances(offset, grid)
        assert distance.size <= 4 * (grid.queries + grid.keys + 1)
        for b, i, j in np.ndindex(4, grid.queries, grid.keys):
            assert distance[i + place[b] - j + centre] == j - i - offset[b]


# Numbers beyond what anything holds


@pytest.mark.parametrize("kernel", ["compiled", "tiled", "dense"])
@pytest.mark.parametrize("huge", [2**40, 2**61, 2**63 - 1, 2**63, 2**70, HUGE])
def test_a_window_longer_than_any_sequence_is_no_limit(kernel: str, huge: int) -> None:
    q, k, v = arrays()
    for mask, want in (
        (ch.window(huge), ch.causal()),
        (ch.window(huge, huge), None),
        (ch.window(0, huge), ~ch.causal() | ch.window(0)),
        (ch.random_blocks(huge, count=huge), None),
        (ch.window(huge, offset=2**59) if huge > 2**60 else ch.causal(offset=2**59), ch.causal(offset=2**59)),
    ):
        found = ch.attention(q, k, v, mask=mask, kernel=kernel)
        np.testing.assert_allclose(found, ch.attention(q, k, v, mask=want, kernel=kernel), atol=1e-13)
        assert mask.picture(T, S)
        assert "may" in mask.explain(0, 0)


BEYOND: dict[str, Callable[[Any], Any]] = {
    "lengths": ch.lengths,
    "prefix": ch.prefix,
    "documents": lambda n: ch.documents([n]),
    "indices": lambda n: ch.global_tokens([n]),
    "offset": lambda n: ch.causal(offset=n),
}


@pytest.mark.parametrize("argument", BEYOND)
@pytest.mark.parametrize("huge", [2**63, 2**70, -(2**70), HUGE, np.uint64(2**63)])
def test_numbers_beyond_64_bits_are_refused_in_one_sentence(argument: str, huge: Any) -> None:
    with pytest.raises(ch.ArgumentError, match=f"^{argument}: has .*, expected whole numbers below 2") as no:
        BEYOND[argument](huge)
    assert "\n" not in str(no.value)


OFFSET: dict[str, Callable[[Any], Any]] = {
    "causal": lambda n: ch.causal(offset=n),
    "window": lambda n: ch.window(2, offset=n),
    "global_tokens": lambda n: ch.global_tokens([0], offset=n),
    "alibi": lambda n: ch.alibi(H, offset=n),
    "relative_bias": lambda n: ch.relative_bias(table(), offset=n),
    "rotary": lambda n: ch.rotary()(np.ones((2, 3, 4)), offset=n),
}


@pytest.mark.parametrize("what", OFFSET)
@pytest.mark.parametrize("huge", [2**60, -(2**60), [0, 2**63 - 1]])
def test_offsets_that_would_overflow_are_refused_in_one_sentence(what: str, huge: Any) -> None:
    with pytest.raises(ch.ArgumentError, match=r"^offset: is .*, expected positions between -2\*\*60 and 2\*\*60"):
        OFFSET[what](huge)


def test_other_numbers_are_refused_in_one_sentence() -> None:
    x = np.ones((2, 3, 4))
    for text, mistake in {
        "seed: is 2305843009213693953, expected a whole number of at most 2": lambda: ch.random_blocks(
            2, count=1, seed=2**61 + 1
        ),
        "back: is a whole number of thousands of digits, expected a whole number of at": lambda: ch.window(-(10**5000)),
        "lengths: is [[1], [2, 3]], expected a whole number or an array of them": lambda: ch.lengths([[1], [2, 3]]),
        "scale: is a whole number of thousands of digits, expected a finite": lambda: ch.attention(
            x, x, x, scale=10**5000
        ),
        "softcap: is 1000000": lambda: ch.attention(x, x, x, softcap=10**400),
        "dropout: has seed a whole number of thousands of digits, expected": lambda: ch.attention(
            x, x, x, dropout=(0.1, 10**5000)
        ),
        "top: is 1180591620717411303424, expected a whole number of at least 1": lambda: ch.observe(x, x, x, top=2**70),
    }.items():
        with pytest.raises(ch.ArgumentError) as no:
            mistake()
        assert str(no.value).startswith(text)
        assert "\n" not in str(no.value)
