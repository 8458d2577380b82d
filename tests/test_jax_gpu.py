"""JAX on a GPU: cuDNN and the lent kernels held to the definition. Run where JAX has a GPU; elsewhere skipped."""

from __future__ import annotations

import sys
from typing import Any

import budget
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clearhead as ch
from clearhead.kernels import cudnn
from clearhead.kernels.gpu import borrowed
from clearhead.kernels.triton import in_xla

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX has no GPU here"),
]

N, D = 256, 64
NUMBERS = np.random.default_rng(0)
OPTIONS: dict[str, Any] = {
    "full": {},
    "causal": {"mask": ch.causal()},
    "window": {"mask": ch.window(40)},
    "lengths": {"mask": ch.lengths([100, 256])},
    "no length": {"mask": ch.lengths([0, 256])},
    "lengths and causal": {"mask": ch.lengths([100, 256]) & ch.causal()},
    "scale": {"scale": 0.3},
    "bias": {"bias": NUMBERS.standard_normal((4, N, N))},
}


def arrays(key_heads: int) -> tuple[Any, ...]:
    shapes = [(2, heads, N, D) for heads in (4, key_heads, key_heads, 4)]
    return tuple(jnp.asarray(NUMBERS.standard_normal(shape), jnp.bfloat16) for shape in shapes)


def options_of(name: str) -> dict[str, Any]:
    given = dict(OPTIONS[name])
    if "bias" in given:
        given["bias"] = jnp.asarray(given["bias"], jnp.bfloat16)
    return given


@pytest.mark.parametrize("key_heads", [4, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_cudnn_is_held_to_the_definition(name: str, key_heads: int) -> None:
    if cudnn.no_cudnn() is not None:
        pytest.skip(str(cudnn.no_cudnn()))
    q, k, v, dout = arrays(key_heads)
    options = options_of(name)
    assert ch.plan(q, k, v, **options).kernel == "vendor"

    def both(kernel: str) -> Any:
        output, pull = jax.vjp(lambda *a: ch.attention(*a, **options, kernel=kernel), q, k, v)
        return (output, *pull(dout))

    found = dict(zip(("output", "dq", "dk", "dv"), jax.jit(both, static_argnums=0)("vendor"), strict=True))
    budget.hold(found, budget.given(q, k, v, dout, **options), N)


@pytest.mark.parametrize("kernel", ["triton", "hopper"])
def test_kernels_of_ours_are_lent_the_arrays(kernel: str) -> None:
    pytest.importorskip("torch", reason="arrays are lent by way of PyTorch")
    q, k, v, _ = arrays(2)
    try:
        seen = ch.observe(q, k, v, mask=ch.causal(), top=3, received=True, kernel=kernel)
    except ch.KernelRefused as refusal:
        pytest.skip(str(refusal))
    assert next(iter(seen.output.devices())).platform == "gpu"
    found = {name: getattr(seen, name) for name in ("output", "lse", "entropy", "received")}
    budget.hold(found, budget.given(q, k, v, mask=ch.causal()), N)


MASKS: dict[str, Any] = {
    "full": None,
    "causal": ch.causal(),
    "documents": ch.documents(np.arange(N) // 64),
    "window and global": ch.window(40) | ch.prefix(8),
    "lengths": ch.lengths([100, 256]),
    "array": np.tri(N, dtype=bool),
}


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kernel", ["triton", "hopper"])
def test_programs_lend_their_arrays_to_our_kernels(kernel: str, name: str, key_heads: int) -> None:
    pytest.importorskip("torch", reason="arrays are lent by way of PyTorch")
    q, k, v, dout = arrays(key_heads)
    mask = MASKS[name]

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        seen = ch.observe(q, k, v, mask=mask, top=3, received=True, kernel=kernel)
        output, pull = jax.vjp(lambda *a: ch.attention(*a, mask=mask, kernel=kernel), q, k, v)
        return seen, output, pull(dout)

    try:
        seen, output, learnt = both(q, k, v)
    except ch.KernelRefused as refusal:
        pytest.skip(str(refusal))
    assert seen.kernel == kernel
    allowed = budget.given(q, k, v, dout, **({} if mask is None else {"mask": mask}))
    found = {what: getattr(seen, what) for what in ("output", "lse", "max_score", "entropy", "received")}
    budget.hold(found | dict(zip(("dq", "dk", "dv"), learnt, strict=True)), allowed, N)
    budget.hold({"output": output}, allowed, N)
    # in between and after, as other work of XLA's has its turn on the same stream
    again, _, slopes = jax.jit(lambda *a: both(*(2 * x / 2 for x in a)))(q, k, v)
    np.testing.assert_array_equal(again.top.indices, seen.top.indices)
    np.testing.assert_array_equal(again.output, seen.output)
    budget.hold(dict(zip(("dq", "dk", "dv"), slopes, strict=True)), allowed, N)


def test_what_jax_compiles_runs_and_says_by_what() -> None:
    q, k, v, _ = arrays(2)
    mask = ch.documents(np.arange(N) // 64)
    seen = jax.jit(lambda q: ch.observe(q, k, v, mask=mask, received=True))(q)
    assert seen.kernel in (("hopper", "triton") if "torch" in sys.modules else ("tiled", "dense"))
    output = jax.jit(lambda q: ch.attention(q, k, v, mask=mask))(q)
    allowed = budget.given(q, k, v, mask=mask)
    budget.hold({"output": seen.output, "received": seen.received}, allowed, N)
    budget.hold({"output": output}, allowed, N)


@pytest.mark.parametrize("mask", [None, ch.causal(), ch.window(40), ch.lengths([100, 256])], ids=str)
def test_what_is_observed_under_jit_is_pallas(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = arrays(2)
    if in_xla.unable("bfloat16", D, False) is not None:
        pytest.skip(str(in_xla.unable("bfloat16", D, False)))
    monkeypatch.setattr(borrowed, "refused", lambda problem, rejects: "there is no PyTorch")
    seen = jax.jit(lambda q: ch.observe(q, k, v, mask=mask, received=True))(q)
    assert seen.kernel == "triton"
    found = {name: getattr(seen, name) for name in ("output", "lse", "max_score", "entropy", "received")}
    budget.hold(found, budget.given(q, k, v, **({} if mask is None else {"mask": mask})), N)
