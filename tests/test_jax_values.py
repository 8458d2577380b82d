"""JAX and clearhead's values: masks as static and as traced arguments, pytrees, and scale and seed that are traced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from budget import Expected, check, given, hold

import clearhead as ch

Q, K, V = (jnp.asarray(a, jnp.float32) for a in np.random.default_rng(0).standard_normal((3, 2, 3, 5, 4)))
NUMBERS = tuple(map(np.asarray, (Q, K, V)))  # the same by NumPy, which has no steps to compile
WIDE = tuple(a.astype(jnp.float64) for a in (Q, K, V))
EPS = float(np.finfo(np.float32).eps)
LOWER = np.tri(5, dtype=bool)
MASKS = {
    "causal": lambda: ch.causal() & ch.window(3),
    "lengths": lambda: ch.lengths(np.array([3, 5])),
    "documents": lambda: ch.documents([0, 0, 1, 1, 1]),
    "array": lambda: ch.where(LOWER.copy()) | ch.global_tokens([2]),
    "padding": lambda: ~ch.padding(jnp.asarray([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])),
    "offsets": lambda: ch.window(1, 1, offset=[0, 1]),
    "random": lambda: ch.random_blocks(2, count=1, seed=1),
}


@pytest.mark.parametrize("static", [True, False], ids=["static", "traced"])
@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_a_mask_made_anew_is_not_compiled_anew(make, static: bool) -> None:
    compilations = []

    def run(q, mask):
        compilations.append(mask)
        return ch.attention(q, K, V, mask=mask)

    compiled = jax.jit(run, static_argnames="mask") if static else jax.jit(run)
    allowed = given(Q, K, V, mask=make())
    for _ in range(5):
        hold({"output": compiled(Q, mask=make())}, allowed, 5)
    assert len(compilations) == 1
    compiled(Q, mask=ch.prefix(2))
    assert len(compilations) == 2


def test_a_static_mask_keeps_the_numbers_that_it_was_compiled_with() -> None:
    array = LOWER.copy()
    compiled = jax.jit(lambda q, mask: ch.attention(q, K, V, mask=mask), static_argnames="mask")
    mask = ch.where(array)
    before = compiled(Q, mask=mask)
    array[:] = True
    np.testing.assert_array_equal(compiled(Q, mask=mask), before)
    hold({"output": compiled(Q, mask=ch.where(array))}, given(Q, K, V), 5)


def test_arrays_of_a_mask_change_without_compiling() -> None:
    compilations = []

    @jax.jit
    def run(mask):
        compilations.append(mask)
        return ch.attention(Q, K, V, mask=mask & ch.causal())

    for counts in ([3, 5], [1, 2], [5, 4]):
        hold({"output": run(ch.lengths(counts))}, given(Q, K, V, mask=ch.lengths(counts) & ch.causal()), 5)
    assert len(compilations) == 1
    arrays = np.random.default_rng(1).random((2, 5, 5)) < 0.6
    mapped = jax.jit(jax.vmap(lambda q, k, v, mask: ch.attention(q, k, v, mask=mask)))(Q, K, V, ch.where(arrays))
    hold({"output": mapped}, given(Q, K, V, mask=arrays[:, None]), 5)
    with (
        (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(False),
        pytest.raises(ch.ArgumentError, match="which JAX would cut to 32 bits: make it a static argument"),
    ):
        run(ch.lengths(2**40))


def test_what_is_observed_comes_out_of_jit() -> None:
    wanted = {"top": 2, "received": True, "map": (2, 2), "queries": [1], "weights": True}
    inside = jax.jit(lambda q: ch.observe(q, K, V, mask=ch.causal(), **wanted))(Q)
    outside = ch.observe(*NUMBERS, mask=ch.causal(), kernel=inside.kernel, **wanted)
    assert isinstance(inside, ch.Observed)
    names = ("output", "lse", "max_score", "entropy", "received", "weights")
    allowed = given(Q, K, V, mask=ch.causal())
    hold({name: getattr(inside, name) for name in names}, allowed, 5)
    rows = [part[..., 1:2, :] for part in allowed["weights"][:2]]
    check(inside.queries.weights, allowed["weights"]._replace(exact=rows[0], plain=rows[1]), 5, "queries")
    np.testing.assert_array_equal(inside.top.indices, outside.top.indices)
    for got, expected in zip(inside.map, outside.map, strict=True):  # of nine weights at most
        np.testing.assert_allclose(got, expected, rtol=9 * float(np.finfo(np.float32).eps))
    assert repr(inside).splitlines()[0] == repr(outside).splitlines()[0]
    parts = [jax.jit(ch.observe)(Q, K[:, :, some], V[:, :, some]).partial for some in (slice(2), slice(2, 5))]
    merged = jax.jit(ch.merge)(*parts)
    assert isinstance(merged, ch.Partial)
    hold({"output": merged.output}, given(Q, K, V), 5)


def test_a_trace_and_a_bias_are_trees_too() -> None:
    q, k, v = (a[0] for a in NUMBERS)
    trace = ch.trace(q, k, v, query=3, head=1, mask=ch.causal(), bias=ch.alibi(3), tokens=list("abcde"))
    leaves, structure = jax.tree.flatten(trace)
    again = jax.tree.unflatten(structure, leaves)
    assert str(again) == str(trace)
    assert str(jax.jit(lambda whole: whole)(trace)) == str(trace)
    bias = ch.relative_bias(jnp.zeros((8, 3)))
    found = jax.jit(jax.grad(lambda bias: (ch.attention(Q, K, V, bias=bias) * V).sum()))(bias)
    assert type(found) is type(bias)
    assert float(jnp.abs(found.table).max()) > 0


@pytest.mark.parametrize(("kernel", "mask"), [("dense", None), ("tiled", ch.causal()), ("dense", ch.lengths([3, 5]))])
def test_a_traced_scale_is_compiled_once_and_differentiated(kernel: str, mask) -> None:
    compilations = []

    def total(scale, q):
        compilations.append(scale)
        k, v, dout = (a.astype(q.dtype) for a in (K, V, Q))
        return (ch.attention(q, k, v, scale=scale, mask=mask, kernel=kernel) * dout).sum()

    # both are sums of as many terms as there are numbers in q, which may cancel; Σ q · dq is the slope times the scale
    def room(scale, q):
        output, pull = jax.vjp(lambda q: ch.attention(q, *WIDE[1:], scale=scale, mask=mask, kernel="dense"), q)
        return float(abs(output * q).sum()), float(abs(pull(q)[0] * q).sum() / scale)

    compiled, slope, q = jax.jit(total), jax.jit(jax.grad(total)), WIDE[0]
    for scale in (0.1, 0.5, 2.0, jnp.bfloat16(0.5), 1):
        exact, plain = (
            (ch.attention(*arrays, scale=float(scale), mask=mask) * arrays[0]).sum() for arrays in (WIDE, NUMBERS)
        )
        allowed = Expected(np.asarray(exact), np.asarray(plain), EPS, room(float(scale), q)[0])
        check(compiled(scale, Q), allowed, Q.size, "total")
    compilations.clear()
    for scale in (0.3, 0.7):
        compiled(scale, Q)
        got = slope(scale, Q)
        exact = np.asarray(jax.grad(total)(scale, q))
        check(got, Expected(exact, exact, EPS, room(scale, q)[1]), Q.size, "slope")
    assert len(compilations) == 3  # of the slope, and twice of what is exact; the sum was compiled for a float before
    half = jax.jit(lambda scale: ch.attention(*(a.astype(jnp.bfloat16) for a in (Q, K, V)), scale=scale))(0.5)
    assert half.dtype == jnp.bfloat16


def test_a_traced_scale_that_is_no_number_is_refused() -> None:
    with pytest.raises(ch.ArgumentError, match=r"scale: is traced, float32 of shape \(2,\) beside q of jax"):
        jax.jit(lambda scale: ch.attention(Q, K, V, scale=scale))(jnp.ones(2, jnp.float32))
    with pytest.raises(ch.ArgumentError, match="beside q of numpy, expected one real number beside arrays of JAX"):
        jax.jit(lambda scale: ch.attention(*NUMBERS, scale=scale))(1.0)


@pytest.mark.parametrize("kernel", ["dense", "tiled"])
def test_a_traced_seed_drops_what_the_number_drops(kernel: str) -> None:
    compilations = []

    @jax.jit
    def run(seed):
        compilations.append(seed)
        options = {"dropout": (0.5, seed), "kernel": kernel, "mask": ch.causal()}
        return ch.attention(Q, K, V, **options), ch.gradients(Q, K, V, Q, **options)

    for seed in (0, 7, 2**31 - 1):
        output, gradients = run(seed)
        allowed = given(Q, K, V, Q, dropout=(0.5, seed), mask=ch.causal())
        hold({"output": output, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}, allowed, 5)
    assert len(compilations) == 1
    # numbers of JAX, of 32 and 64 bits, with and without a sign, mean what PyTorch's mean
    dropped = jax.jit(lambda seed: ch.attention(Q, K, V, dropout=(0.5, seed), kernel=kernel))
    for seed, number in ((jnp.uint32(2**32 - 1), 2**32 - 1), (jnp.int32(-2), 2**64 - 2), (2**40 + 5, 2**40 + 5)):
        expected = ch.attention(*NUMBERS, dropout=(0.5, number), kernel=kernel)
        hold({"output": dropped(seed)}, given(Q, K, V, dropout=(0.5, number)), 5)
        np.testing.assert_array_equal(ch.attention(*NUMBERS, dropout=(0.5, jnp.asarray(seed)), kernel=kernel), expected)


def test_jax_is_told_when_it_comes_later() -> None:
    program = """
import importlib.util, sys
import numpy as np, clearhead as ch
early = ch.causal(offset=[1, 2])
assert importlib.util.find_spec("jax") is not None and "jax" not in sys.modules  # as libraries ask whether it is there
import jax  # and nothing of ours is called after it
assert len(jax.tree.leaves(early)) == 1
assert jax.jit(lambda mask: mask.alignment.given.sum())(early) == 3
assert not [one for one in sys.meta_path if type(one).__module__.startswith("clearhead")]
assert jax.__spec__.name == "jax" and jax.__file__ is not None
seen = ch.observe(*np.ones((3, 2, 4)))
assert len(jax.tree.leaves(seen)) == 4, jax.tree.leaves(seen)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_an_import_of_jax_that_fails_may_be_tried_again(tmp_path: Path) -> None:
    """Nothing of the import is ours: it fails as it would, and another finds JAX."""
    (tmp_path / "jax.py").write_text("raise RuntimeError('broken')")
    program = f"""
import sys
import clearhead as ch
early = ch.causal(offset=[1, 2])
sys.path.insert(0, {str(tmp_path)!r})
try:
    import jax
except RuntimeError as error:
    assert str(error) == "broken"
else:
    raise AssertionError("it is broken")
sys.path.remove({str(tmp_path)!r})
import importlib
importlib.invalidate_caches()
import jax
ch.causal()  # which tells it
assert len(jax.tree.leaves(early)) == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_nan_of_either_sign_is_above_all_weights(sign: float) -> None:
    """x86 computes negative ones, which XLA sorts below everything."""
    from clearhead.core.arrays import Library

    values = jnp.asarray([[0.5, np.copysign(np.nan, sign), 0.25], [0.125, 0.5, 0.375]], jnp.float32)
    largest, places = Library.of(values).largest(values, 2)
    assert np.isnan(largest[0, 0])
    np.testing.assert_array_equal(largest[1], [0.5, 0.375])
    np.testing.assert_array_equal(places, [[1, 0], [1, 2]])
