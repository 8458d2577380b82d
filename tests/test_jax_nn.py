"""JAX's own attention as the peer of ours: a grid of calls against it, and what of ours it is given on a GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import budget
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import built  # which imports the libraries, and sets XLA's flags before JAX starts

import clearhead as ch
from clearhead.core.problem import pose
from clearhead.kernels import cudnn
from clearhead.kernels.vendor import vendor

NUMBERS = np.random.default_rng(3)
B, D = 2, 8
LENGTHS = jnp.asarray([7, 18])
# what our option is called in JAX
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({"mask": ch.causal(align="start")}, {"is_causal": True}),
    "lengths": ({"mask": ch.lengths(LENGTHS)}, {"key_value_seq_lengths": LENGTHS.astype(jnp.int32)}),
    "window": ({"mask": ch.window(4, 2, align="start")}, {"local_window_size": (4, 2)}),
    "window back": ({"mask": ch.window(3, align="start")}, {"is_causal": True, "local_window_size": (3, 0)}),
    "scale": ({"scale": 0.2}, {"scale": 0.2}),
}


def arrays(heads: int, key_heads: int, queries: int, keys: int, dtype: Any) -> tuple[jax.Array, ...]:
    shapes = [(B, heads, queries, D), (B, key_heads, keys, D), (B, key_heads, keys, D), (B, heads, queries, D)]
    return tuple(jnp.asarray(NUMBERS.standard_normal(shape), dtype) for shape in shapes)


def theirs(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """JAX's own, whose heads come after positions."""
    turned = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    return jnp.swapaxes(jax.nn.dot_product_attention(*turned, **options), 1, 2)


GRID = list(product(OPTIONS, [(4, 4), (4, 2), (4, 1)], [(18, 18), (11, 18)], ["float32", "bfloat16"]))


@built
@pytest.mark.parametrize(("name", "heads", "lengths", "dtype"), GRID, ids=str)
def test_a_grid_against_jax(name: str, heads: tuple[int, int], lengths: tuple[int, int], dtype: str) -> None:
    ours, given = OPTIONS[name]
    *qkv, dout = arrays(*heads, *lengths, dtype)
    if name == "window" and (theirs(*qkv, **given) == theirs(*qkv)).all():
        pytest.skip(f"JAX {jax.__version__} leaves out a window that is not causal")

    @jax.jit
    def both(qkv: Any, dout: Any) -> Any:
        mine, back = jax.vjp(lambda *a: ch.attention(*a, **ours, kernel="compiled"), *qkv)
        output, pull = jax.vjp(lambda *a: theirs(*a, **given), *qkv)
        return (mine, *back(dout)), (output, *pull(dout))

    allowed, most = budget.given(*qkv, dout, **ours), max(lengths)
    for what, got, expected in zip(("output", "dq", "dk", "dv"), *both(qkv, dout), strict=True):
        assert got.dtype == expected.dtype
        budget.check(got, allowed[what], most, what)
        budget.check(expected, allowed[what], most, f"JAX's own {what}")
    np.testing.assert_array_equal(ch.attention(*qkv, **ours, kernel="compiled"), both(qkv, dout)[0][0])


# what cuDNN is given: by JAX's function in XLA's steps, which means the same where there is no GPU
TAKEN: dict[str, Any] = {
    "full": {},
    "causal": {"mask": ch.causal()},
    "window": {"mask": ch.window(5)},
    "windows": {"mask": ch.window(5) & ch.window(9) & ch.causal()},
    "lengths": {"mask": ch.lengths([3, 18])},
    "no length": {"mask": ch.lengths([0, 18])},
    "lengths and causal": {"mask": ch.lengths([30, 7]) & ch.causal()},
    "one length": {"mask": ch.lengths(5)},
    "scale": {"scale": 0.3},
    "bias": {"bias": jnp.asarray(NUMBERS.standard_normal((4, 18, 18)), jnp.bfloat16)},
}


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("name", TAKEN)
def test_what_cudnn_is_given_means_the_same(name: str, key_heads: int) -> None:
    q, k, v, dout = arrays(4, key_heads, 18, 18, jnp.bfloat16)
    options = TAKEN[name]
    if name == "lengths":  # what is hidden may hold anything
        k, v = k.at[0, :, 3:].set(jnp.nan), v.at[0, :, 3:].set(jnp.inf)
    problem = pose(q, k, v, **options)
    assert cudnn.unfit(problem) is None
    found = [cudnn.run(problem, "xla").observed.output, *vars(cudnn.gradients(problem, dout, "xla")).values()][:4]
    allowed = budget.given(q, k, v, dout, **options)
    for what, got in zip(("output", "dq", "dk", "dv"), found, strict=True):
        budget.check(got, allowed[what], 18, what)
    traced = jax.jit(lambda n: cudnn.run(pose(q, k, v, mask=ch.lengths(n)), "xla").observed.output)
    if name == "lengths":
        np.testing.assert_array_equal(traced(jnp.asarray([3, 18])), found[0])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "wide": ({}, "it takes float16 and bfloat16, not float32"),
    "softcap": ({"softcap": 3.0}, "it is for problems without softcap"),
    "scale": ({"scale": -1.0}, "scale -1.0 is not above 0"),
    "offset": (
        {"mask": ch.causal(offset=3)},
        "its causal masks and windows are for as many queries as keys, the first at the first key",
    ),
    "both sides": ({"mask": ch.window(2, 1)}, "it takes causal(), window(back) and lengths(), not window(2, 1)"),
    "either": (
        {"mask": ch.causal() | ch.prefix(3)},
        "it takes causal(), window(back) and lengths(), not causal() | prefix(3)",
    ),
    "alibi": ({"bias": ch.alibi(4)}, "it takes biases that are arrays, not alibi(4)"),
    "precise bias": (
        {"bias": jnp.zeros((18, 18), jnp.float32)},
        "it takes biases of bfloat16 as q is, not float32",
    ),
    "features": ({}, "8 and 5 features are not alike, at most 256 and a multiple of 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cudnn_is_not_given(name: str) -> None:
    options, said = REFUSED[name]
    q, k, v, _ = arrays(4, 4, 18, 18, jnp.float32 if name == "wide" else jnp.bfloat16)
    v = v[..., :5] if name == "features" else v
    assert cudnn.unfit(pose(q, k, v, **options)) == said


def test_numbers_that_are_traced_in_32_bits_meet_those_beyond_them() -> None:
    q, k, v, _ = arrays(4, 4, 18, 18, jnp.bfloat16)
    said = []

    @jax.jit
    def call(lengths: Any, offsets: Any) -> Any:
        masks = ch.lengths(lengths) & ch.causal(offset=offsets), ch.lengths(lengths) & ch.lengths(offsets)
        said.extend(cudnn.unfit(pose(q, k, v, mask=mask & ch.causal())) for mask in masks)
        return lengths

    with (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(False):
        call(jnp.asarray([3, 4]), jnp.asarray([0, 5]))
    assert said == ["its causal masks and windows start at one key for all batch rows", None]


def test_without_a_gpu_it_is_refused_in_words() -> None:
    q, k, v, _ = arrays(4, 4, 18, 18, jnp.bfloat16)
    problem = pose(q, k, v)
    assert vendor.rejects(problem) == "it takes JAX arrays on a GPU, not on cpu"
    assert jax.jit(lambda q: len(vendor.rejects(pose(q, k, v))))(q) == len("it takes JAX arrays on a GPU, not on cpu")
    # why JAX has no cuDNN is asked of JAX itself
    assert str(cudnn.no_cudnn()).startswith("JAX has no cuDNN here: ")
