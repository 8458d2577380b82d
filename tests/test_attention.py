"""The calls: gradients that flow, dropout that is the same everywhere, plans, refusals, and what import brings."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conformance import built

import clearhead as ch
from clearhead.kernels.choose import SMALL
from clearhead.kernels.tiled import tiled

RNG = np.random.default_rng(5)
kernels = pytest.mark.parametrize("kernel", ["dense", "tiled", pytest.param("compiled", marks=built)])


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.tensor(RNG.standard_normal(shape), dtype=dtype, requires_grad=True) for shape in shapes]


@kernels
@pytest.mark.parametrize("mask", [None, ch.causal(), ch.lengths([3, 0])], ids=repr)
def test_pytorch_gradients_flow(kernel: str, mask: ch.Mask | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "rows", 3)
    monkeypatch.setattr(tiled, "columns", 2)
    q, k, v = tensors((2, 2, 4, 2), (2, 1, 5, 2), (2, 1, 5, 1))  # few, as each number is changed twice
    (sinks,) = tensors((2,))

    dropout = None if kernel == "compiled" else (0.2, 3)

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        *qkv, sinks = inputs
        return ch.attention(*qkv, mask=mask, sinks=sinks, softcap=2.0, dropout=dropout, kernel=kernel)

    # number by number: `fast_mode`, along one random direction, does not notice a gradient a hundredth too large
    assert torch.autograd.gradcheck(call, (q, k, v, sinks))


def test_a_bias_that_learns_gets_its_gradient_from_the_kernel_that_has_one() -> None:
    q, k, v = tensors((3, 5, 4), (3, 7, 4), (3, 7, 4))
    (table,) = tensors((32, 3))

    def call(table: torch.Tensor) -> torch.Tensor:
        return ch.attention(q, k, v, bias=ch.relative_bias(table))

    assert torch.autograd.gradcheck(call, (table,))
    plan = ch.plan(q, k, v, bias=ch.relative_bias(table))
    assert plan.kernel == "dense"
    assert plan.others["tiled"] == "refused: it gives no gradient for a bias; `dense` does"


@kernels
def test_no_gradient_is_kept_where_none_is_wanted(kernel: str) -> None:
    q, k, v = tensors((3, 5, 4), (3, 7, 4), (3, 7, 4))
    with torch.no_grad():
        assert not ch.attention(q, k, v, kernel=kernel).requires_grad
    assert ch.attention(q, k, v, kernel=kernel).requires_grad
    seen = ch.observe(q, k, v, kernel=kernel, received=True)
    assert seen.output.requires_grad


def test_writing_to_an_input_before_backward_is_noticed() -> None:
    q, k, v = tensors((3, 5, 4), (3, 7, 4), (3, 7, 4))
    keys = k * 1.0
    output = ch.attention(q, keys, v, kernel="tiled")
    keys.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(("kernel", "run"), [("dense", lambda function: function), ("tiled", jax.jit)])
def test_jax_differentiates(kernel: str, run: Callable[..., Any]) -> None:
    arrays = [jnp.asarray(RNG.standard_normal(shape)) for shape in ((3, 5, 4), (3, 7, 4), (3, 7, 6))]
    dout = jnp.asarray(RNG.standard_normal((3, 5, 6)))
    mask = ch.causal(offset=-1)  # the first query sees nothing

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return (ch.attention(q, k, v, mask=mask, kernel=kernel) * dout).sum()

    def mine(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return ch.gradients(q, k, v, dout, mask=mask, kernel=kernel)

    found = run(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
    for got, theirs in zip(run(mine)(*arrays), found, strict=True):
        np.testing.assert_allclose(got, theirs, atol=1e-12)


def test_jax_traces_lengths_and_offsets() -> None:
    arrays = [jnp.asarray(RNG.standard_normal((2, 3, 5, 4))) for _ in range(3)]

    @jax.jit
    def call(n: jax.Array, offset: jax.Array) -> jax.Array:
        return ch.attention(*arrays, mask=ch.lengths(n) & ch.causal(offset=offset))

    n, offset = jnp.array([2, 5]), jnp.array([1, 0])
    want = ch.attention(*arrays, mask=ch.lengths(np.array(n)) & ch.causal(offset=np.array(offset)))
    np.testing.assert_allclose(call(n, offset), want, atol=1e-12)


def test_dropout_drops_the_same_weights_everywhere() -> None:
    q, k = RNG.standard_normal((2, 3, 11, 4))
    v = np.broadcast_to(np.eye(11), (3, 11, 11))  # the output is then the dropped weights
    calls = {
        (kernel, make): np.asarray(ch.attention(*map(make, (q, k, v)), dropout=(0.4, 99), kernel=kernel))
        for kernel in ("dense", "tiled")
        for make in (np.asarray, torch.tensor, jnp.asarray)
    }
    first = next(iter(calls.values()))
    assert 0.25 < (first == 0).mean() < 0.55
    for other in calls.values():
        np.testing.assert_array_equal(other == 0, first == 0)
        np.testing.assert_allclose(other, first, atol=1e-12)
    assert not np.array_equal(first == 0, ch.attention(q, k, v, dropout=(0.4, 98)) == 0)
    kept = ch.attention(q, k, v)
    np.testing.assert_allclose(first[first != 0], kept[first != 0] / 0.6)


def test_dropout_of_zero_is_none_and_the_mean_is_right() -> None:
    q, k, v = RNG.standard_normal((3, 5, 4))
    none, zero = (ch.attention(q, k, v, dropout=dropout, kernel="dense") for dropout in (None, (0.0, 1)))
    np.testing.assert_array_equal(none, zero)
    mean = np.mean([ch.attention(q, k, v, dropout=ch.Dropout(0.3, seed)) for seed in range(3000)], axis=0)
    np.testing.assert_allclose(mean, ch.attention(q, k, v), atol=0.06)


def test_observed_indexes_converts_and_prints() -> None:
    q, k, v = (torch.tensor(RNG.standard_normal((2, 3, 11, 4))) for _ in range(3))
    seen = ch.observe(q, k, v, top=2, received=True, map=(3, 4), queries=[0, -1], weights=True)
    one = seen[1, 2]
    assert one.output.shape == (11, 4)
    assert one.top is not None
    assert one.top.indices.shape == (11, 2)
    assert torch.equal(one.weights, seen.weights[1, 2])
    assert seen[..., 0].lse.shape == (2, 11)
    assert seen[0].map.mean.shape == (3, 3, 4)
    assert list(seen.queries.indices) == [0, 10]
    with pytest.raises(IndexError, match="3 indices for 2 leading axes"):
        seen[0, 0, 0]
    as_numpy = seen.numpy()
    assert isinstance(as_numpy.received, np.ndarray)
    assert isinstance(as_numpy.top.weights, np.ndarray)
    text = repr(seen)
    assert text.startswith("Observed (2, 3) heads × 11 queries over 11 keys, 4 features, by ")
    assert len(text.splitlines()) == 9
    plain = ch.observe(q, k, v)
    assert plain.weights is None
    assert plain.top is None
    assert len(repr(plain).splitlines()) == 4


def test_choice_follows_size_and_is_explained() -> None:
    # the compiled kernel leaves other libraries to the others
    small, large, keys = (array_api_strict.zeros((1, n, 4)) for n in (16, 1 + SMALL // 1024, 1024))
    assert ch.plan(small, small, small).kernel == "dense"
    assert ch.observe(small, small, small).kernel == "dense"
    plan = ch.plan(large, keys, keys)
    assert plan.kernel == "tiled"
    scores = (1 + SMALL // 1024) * 1024
    assert plan.others["dense"] == f"able, but 'tiled' is preferred: {scores:,} scores are more than {SMALL:,}"
    assert plan.others["compiled"].startswith("refused: ")
    asked = ch.plan(small, small, small, kernel="tiled").others
    assert asked == dict.fromkeys(("compiled", "vendor", "hopper", "triton", "dense"), "'tiled' was asked for")


def test_plan_counts() -> None:
    q = np.broadcast_to(np.float32(0), (2, 8, 4096, 64))
    plan = ch.plan(q, q, q)
    assert plan.pairs == plan.all_pairs == 2 * 8 * 4096**2
    assert plan.flops == 4 * 64 * plan.pairs
    assert plan.matrix_bytes == 4 * plan.pairs
    assert plan.bytes_moved == 4 * 4 * q.size
    causal = ch.plan(q, q, q, mask=ch.causal())
    assert causal.pairs == 2 * 8 * 256**2 * (16 * 17 // 2)  # tiles of 256 on and below the diagonal
    long = np.broadcast_to(np.float32(0), (1, 1_000_000, 64))
    narrow = ch.plan(long, long, long, mask=ch.window(127))
    assert narrow.pairs < 3 * 256 * 1_000_000
    assert "never built" in str(narrow)
    assert "3.638 TiB" in str(narrow)


def test_importing_brings_numpy_and_nothing_heavy() -> None:
    program = """
import sys, time, numpy
start = time.process_time()  # what it takes, whatever else the machine is doing
import clearhead
print(time.process_time() - start)
print([name for name in ("torch", "jax", "matplotlib", "rich", "typer", "scipy") if name in sys.modules])
"""
    took = []
    while len(took) < 5 and min(took, default=1.0) >= 0.15:  # the best of some: other processes may have the cores
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds, heavy, *_ = done.stdout.split("\n")
        assert heavy == "[]"
        took.append(float(seconds))
    assert min(took) < 0.15


# The whole matrix would take 67 MB. Both lengths at once would take three minutes, and at most what each takes alone:
# half of the 64 MB is for each.
@pytest.mark.parametrize(("queries", "keys"), [(512, 32768), (32768, 512)])
def test_observing_32768_positions_takes_64_megabytes(queries: int, keys: int) -> None:
    q, k, v = (RNG.standard_normal((n, 64), dtype=np.float32) for n in (queries, keys, keys))
    tracemalloc.start()
    seen = ch.observe(q, k, v, kernel="tiled", top=8, received=True, map=(64, 64), queries=[0, -1])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    kept = [
        seen.output,
        seen.lse,
        seen.max_score,
        seen.entropy,
        seen.received,
        *seen.top,
        *seen.map,
        seen.queries.weights,
    ]
    beyond = peak - sum(array.nbytes for array in kept)
    assert beyond <= 32e6, f"{beyond / 1e6:.1f} MB beyond inputs and results"
    row = np.exp(q[-1].astype(float) @ k.T.astype(float) / 8)
    np.testing.assert_allclose(seen.queries.weights[1], row / row.sum(), rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(5, 4), (3, 7, 2), (2, 3, 5, 11)])
def test_small_calls_take_the_short_way_and_give_the_same(shape: tuple[int, ...], dtype: str) -> None:
    q, k, v = (RNG.standard_normal(shape).astype(dtype) for _ in range(3))
    short = ch.attention(q, k, v)
    assert ch.plan(q, k, v).kernel == "dense"
    assert short.dtype == q.dtype
    np.testing.assert_allclose(short, ch.attention(q, k, v, kernel="dense"), rtol=0, atol=8 * np.finfo(dtype).eps)
    assert ch.attention(q[..., :0, :], k, v).shape == (*shape[:-2], 0, shape[-1])
    assert (ch.attention(q, k[..., :0, :], v[..., :0, :]) == 0).all()  # no keys: not for the short way
