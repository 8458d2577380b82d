"""JAX arrays lent to the GPU kernels by way of PyTorch: the same memory, the same numbers, and refusals in words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import budget
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import MARKS

import clearhead as ch
from clearhead.core.positions import Relative
from clearhead.core.problem import pose
from clearhead.kernels.gpu import borrowed
from clearhead.kernels.hopper import hopper
from clearhead.kernels.triton import triton

pytestmark = MARKS

NUMBERS = np.random.default_rng(9)
Q, K, V, DOUT = (jnp.asarray(NUMBERS.standard_normal((2, n, 17, 16)), jnp.float32) for n in (4, 2, 2, 4))
OPTIONS: dict[str, Any] = {
    "plain": {},
    "masked": {"mask": ch.causal() & ch.lengths([5, 17]), "softcap": 4.0},
    "biased": {"bias": jnp.asarray(NUMBERS.standard_normal((4, 17, 17)), jnp.float32), "scale": 0.3},
    "sinks": {"sinks": jnp.asarray([0.5, -1.0, 2.0, 0.0]), "mask": jnp.asarray(np.tri(17, dtype=bool))},
    "relative": {"bias": ch.relative_bias(jnp.asarray(NUMBERS.standard_normal((8, 4)), jnp.float32))},
}


def read(options: dict[str, Any]) -> dict[str, Any]:
    """The options with NumPy's arrays, for the definition."""
    given = dict(options)
    if isinstance(given.get("bias"), Relative):
        given["bias"] = replace(given["bias"], table=np.asarray(given["bias"].table))
    return given


@pytest.mark.parametrize("name", OPTIONS)
def test_lent_arrays_give_what_the_formula_gives(name: str) -> None:
    options = OPTIONS[name]
    asked = {"top": 2, "received": True}
    seen = ch.observe(Q, K, V, **options, **asked, kernel="triton")
    expected = ch.observe(Q, K, V, **options, **asked, kernel="dense")
    assert seen.kernel == "triton"
    for array in (seen.output, seen.lse, seen.entropy, seen.received, seen.top.weights, seen.top.indices):
        assert isinstance(array, jax.Array)
    allowed = budget.given(Q, K, V, DOUT, **read(options))
    found = {what: getattr(seen, what) for what in ("output", "lse", "max_score", "entropy", "received")}
    np.testing.assert_array_equal(seen.top.indices, expected.top.indices)
    learnt = ch.gradients(Q, K, V, DOUT, **options, kernel="triton")
    budget.hold(found | dict(zip(("dq", "dk", "dv"), learnt, strict=True)), allowed, 17)


def test_nothing_is_copied() -> None:
    lent = borrowed.lent(pose(Q, K, V))
    for tensor, array in zip((lent.q, lent.k, lent.v), (Q, K, V), strict=True):
        assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert borrowed.back(lent.q).unsafe_buffer_pointer() == Q.unsafe_buffer_pointer()
    half = borrowed.tensor(Q.astype(jnp.bfloat16))
    assert str(half.dtype) == "torch.bfloat16"
    assert borrowed.back(half).dtype == jnp.bfloat16


@pytest.mark.parametrize("kernel", [triton, hopper], ids=lambda kernel: kernel.name)
def test_what_is_traced_is_refused_in_words(kernel: Any) -> None:
    said = []
    jax.jit(lambda q: said.append(kernel.rejects(pose(q, K, V))))(Q)
    jax.grad(lambda q: said.append(kernel.rejects(pose(q, K, V))) or q.sum())(Q)
    assert set(said) == {"it is not called from programs that JAX compiles or differentiates; `tiled` is"}


def test_pytorch_is_not_imported_for_it() -> None:
    program = """
import sys, jax.numpy as jnp, clearhead as ch
x = jnp.ones((1, 4, 8))
said = ch.plan(x, x, x).others["triton"]
assert said == (
    "refused: it takes JAX arrays by way of PyTorch, which is not imported: `import torch` first"
), said
ch.attention(x, x, x)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
