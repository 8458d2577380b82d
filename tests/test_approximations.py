"""Linear attention and the Performer: their own formulas, in every library; causal, decoded, refused, without bias."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import approximated
import jax
import numpy as np
import pytest
import torch
from budget import Expected, check, within
from libraries import LIBRARIES, ArrayLibrary, numbers

import clearhead as ch
from clearhead.approximations.directions import directions
from clearhead.approximations.prefix_sums import AT_ONCE
from clearhead.core.arrays import Library

# name: the method, its formula from pairs, and what that is told
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "linear": (ch.linear(), approximated.linear, {}),
    "linear relu": (ch.linear("relu", eps=0.1), approximated.linear, {"feature": "relu", "eps": 0.1}),
    "performer": (ch.performer(37), approximated.performer, {"features": 37}),
    "performer relu": (
        ch.performer(37, kind="relu", seed=3),
        approximated.performer,
        {"features": 37, "kind": "relu", "eps": 1e-3, "seed": 3},
    ),
    "performer plain": (
        ch.performer(23, orthogonal=False, eps=1e-4),
        approximated.performer,
        {"features": 23, "orthogonal": False, "eps": 1e-4},
    ),
}
# shapes of q, k and v, and the mask; sizes are primes, so that no two axes can be taken for one another
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], Any]] = {
    "full": (((3, 19, 5), (3, 23, 5), (3, 23, 7)), None),
    "causal": (((3, 149, 5), (3, 149, 5), (3, 149, 7)), ch.causal()),
    "causal, more keys": (((2, 19, 5), (2, 53, 5), (2, 53, 7)), ch.causal()),
    "causal, more queries": (((2, 53, 5), (2, 19, 5), (2, 19, 7)), ch.causal()),
    "causal from the start": (((2, 19, 5), (2, 53, 5), (2, 53, 7)), ch.causal(align="start")),
    "causal at an offset": (((2, 19, 5), (2, 53, 5), (2, 53, 7)), ch.causal(offset=7)),
    "before all keys": (((2, 19, 5), (2, 11, 5), (2, 11, 7)), ch.causal(offset=-13)),
    "grouped": (((2, 6, 19, 5), (2, 2, 19, 5), (2, 2, 19, 7)), ch.causal()),
    "lengths": (((2, 3, 19, 5), (2, 3, 23, 5), (2, 3, 23, 7)), ch.lengths([17, 0])),
    "padding, causal": (((2, 3, 19, 5), (2, 3, 19, 5), (2, 3, 19, 7)), ch.causal() & ch.padding(np.tri(2, 19, 16))),
    "by head": (((4, 11, 5), (2, 13, 5), (2, 13, 7)), ch.where(np.arange(52).reshape(4, 1, 13) % 3 > 0)),
    "shared batch": (((5, 2, 11, 3), (1, 2, 13, 3), (1, 2, 13, 7)), None),
}


def drawn(case: str, dtype: str = "float64") -> tuple[list[np.ndarray], np.ndarray]:
    return approximated.drawn(case, *CASES[case][:2], dtype)


def expected(method: str, case: str, dtype: str) -> tuple[Expected, Expected]:
    _, formula, how = METHODS[method]
    return approximated.expected(formula, how, *drawn(case, dtype), dtype)


# JAX compiles each shape anew: a few cases show that it is the same code
SOME = ("causal", "grouped", "lengths")
BY_LIBRARY = [
    (method, library) for method in METHODS for library in LIBRARIES
    if library.name != "jax" or method in ("linear", "performer")
]  # fmt: skip
ALL = [(*one, case) for one in BY_LIBRARY for case in CASES if one[1].name != "jax" or case in SOME]


@pytest.mark.parametrize(("method", "library", "case"), ALL, ids=str)
def test_a_method_is_its_formula(method: str, case: str, library: ArrayLibrary) -> None:
    for dtype in library.dtypes if case == "causal" else ("float32",):
        (q, k, v), _ = drawn(case, dtype)
        found = METHODS[method][0](*map(library.make, (q, k, v)), mask=CASES[case][1])
        assert library.owns(found)
        output, _ = expected(method, case, dtype)
        check(numbers(found), output, k.shape[-2], f"{method}, {case}, {dtype}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_implied_weights_are_the_formulas(method: str, case: str) -> None:
    (q, k, v), _ = drawn(case)
    value = METHODS[method][0]
    problem, seen = value.posed(q, k, v, CASES[case][1])
    places = np.array([0, 2, q.shape[-2] - 1])
    _, weights = expected(method, case, "float64")
    some = Expected(weights.exact[..., places, :], weights.plain[..., places, :], weights.eps)
    check(value.rows(problem, seen, places), some, k.shape[-2], f"{method}, {case}")


@pytest.mark.parametrize("case", ["full", "causal", "grouped", "padding, causal"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "performer plain"])  # no gradient of its peaks
def test_gradients_are_the_formulas(method: str, case: str) -> None:
    """By PyTorch and by JAX, against differences of the formula from pairs in extended precision."""
    (q, k, v), seen = drawn(case)
    value, formula, how = METHODS[method]
    mask = CASES[case][1]
    generator = np.random.default_rng(5)
    dout = generator.standard_normal((*q.shape[:-1], v.shape[-1]))
    tensors = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    value(*tensors, mask=mask).backward(torch.tensor(dout))
    found = [[numbers(tensor.grad)] for tensor in tensors]
    if case == "causal" and method in ("linear", "performer"):
        by_jax = jax.jit(jax.grad(lambda *a: (value(*a, mask=mask) * dout).sum(), (0, 1, 2)))(q, k, v)
        found = [[*one, numbers(other)] for one, other in zip(found, by_jax, strict=True)]

    def loss(*arrays: np.ndarray) -> Any:
        return (approximated.in_heads(formula, *arrays, seen, np.longdouble, **how)[0] * dout).sum()

    for place, gradients in enumerate(found):
        direction = generator.standard_normal(tensors[place].shape)
        step = np.longdouble(1e-6)
        ahead, behind = (
            loss(*(a + sign * step * direction if i == place else a for i, a in enumerate((q, k, v))))
            for sign in (1, -1)
        )
        slope = float((ahead - behind) / (2 * step))  # off by step² times the third derivative
        for gradient in gradients:
            assert abs((gradient * direction).sum() - slope) < 1e-8 * max(1.0, np.abs(gradient * direction).sum())


@pytest.mark.parametrize("method", METHODS)
def test_long_sequences_go_in_parts(method: str) -> None:
    """More positions than go through at once, not a multiple of any chunk."""
    length = AT_ONCE + 1031
    q, k, v = np.random.default_rng(1).standard_normal((3, 1, length, 3)).astype(np.float32)
    value, formula, how = METHODS[method]
    found = value(q, k, v, mask=ch.causal())
    rows = np.array([0, 5000, AT_ONCE - 1, AT_ONCE, length - 1])
    seen = np.arange(length) <= rows[:, None]
    exact, plain = (
        approximated.in_heads(formula, q[:, rows], k, v, seen[None], kind, **how)[0]
        for kind in (np.float64, np.float32)
    )
    check(found[:, rows], Expected(exact, plain, float(np.finfo(np.float32).eps)), length, method)


@pytest.mark.parametrize(("method", "library"), BY_LIBRARY, ids=str)
def test_decoding_is_the_causal_form(method: str, library: ArrayLibrary) -> None:
    """In parts of any size, the last one token at a time; a late key with the largest exponent changes nothing."""
    q, k, v = np.random.default_rng(2).standard_normal((3, 2, 4, 41, 5))
    k, v = k[:, :2], v[:, :2]
    k[:, :, 30] *= 3
    value = METHODS[method][0]
    whole = numbers(value(*map(library.make, (q, k, v)), mask=ch.causal()))
    state, parts = None, []
    for start, stop in ((0, 17), (17, 29), *((i, i + 1) for i in range(29, 41))):
        some = [library.make(a[..., start:stop, :]) for a in (q, k, v)]
        output, state = value.step(*some, state)
        parts.append(numbers(output))
    exact, plain = (np.concatenate(parts, axis=-2), whole)
    if value.__class__.__name__ == "Performer" and value.eps and value.kind == "softmax":
        # ε is added to features that were scaled down: by how much depends on the keys so far
        assert np.abs(exact - plain).max() < 1e-2
    else:
        check(exact, Expected(plain, plain, float(np.finfo(np.float64).eps)), 41, method)
    assert state is not None
    size = value.width(5)
    assert tuple(state.sums.shape) == (2, 2, 1, size, 6)


@pytest.mark.parametrize("method", ["linear", "performer"])
def test_compiled_and_jitted(method: str) -> None:
    q, k, v = np.random.default_rng(3).standard_normal((3, 2, 150, 8)).astype(np.float32)
    value = METHODS[method][0]
    plain = value(q, k, v, mask=ch.causal())
    compiled = torch.compile(lambda *a: value(*a, mask=ch.causal()), fullgraph=True, backend="aot_eager")
    tensors = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    found = compiled(*tensors)
    found.sum().backward()
    by_jax = jax.jit(lambda *a: value(*a, mask=ch.causal()))(q, k, v)
    step = jax.jit(value.step)
    _, state = step(q[:, :70], k[:, :70], v[:, :70])
    rest, _ = step(q[:, 70:], k[:, 70:], v[:, 70:], state)
    for what, one in (("compiled", found.detach().numpy()), ("jit", by_jax)):
        check(one, Expected(plain, plain, float(np.finfo(np.float32).eps)), 150, what)
    check(rest, Expected(plain[:, 70:], plain[:, 70:], float(np.finfo(np.float32).eps)), 150, "steps")


def test_memory_is_linear() -> None:
    """Twice the length takes twice the memory, and at 32,768 positions far less than a matrix of 4 GiB."""
    peaks = []
    for length in (16384, 32768):
        q, k, v = np.random.default_rng(0).standard_normal((3, 1, length, 16)).astype(np.float32)
        ch.approximate(q[:, :64], k[:, :64], v[:, :64], ch.performer(64), mask=ch.causal())
        tracemalloc.start()
        ch.approximate(q, k, v, ch.performer(64), mask=ch.causal())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2.2 * peaks[0]
    assert peaks[1] < 64 * 2**20


@pytest.mark.parametrize("features", [16, 64, 256])
@pytest.mark.parametrize("orthogonal", [True, False])
def test_random_features_have_no_bias(features: int, orthogonal: bool) -> None:
    """The mean over seeds of φ(q) · φ(k) is e^(q · k · scale), to within four standard errors, which fall as 1/√m."""
    q, k = np.random.default_rng(4).standard_normal((2, 5, 8)) / 2
    library, seeds, root = Library.of(q), 400, 8**-0.25
    estimates = []
    for seed in range(seeds):
        method = ch.performer(features, seed=seed, orthogonal=orthogonal)
        estimates.append(method.phi(library, q, root) @ method.phi(library, k, root).T)
    exact = np.exp(q @ k.T / np.sqrt(8))
    deviation = np.std(estimates, axis=0, ddof=1)
    off = np.abs(np.mean(estimates, axis=0) - exact)
    assert (off <= 4 * deviation / np.sqrt(seeds)).all()
    # of independent features the variance is known: (e^(|x + y|²) − 1) e^(2 x · y) / m, in the scaled x and y
    x, y = q * root, k * root
    both = ((x[:, None] + y[None]) ** 2).sum(-1)
    theory = np.sqrt((np.exp(both) - 1) * np.exp(2 * x @ y.T) / features)
    assert np.median(deviation / theory) < (1.0 if orthogonal else 1.25)
    if not orthogonal:
        assert np.median(deviation / theory) > 0.8


def test_the_error_falls_as_one_by_the_root_of_features() -> None:
    q, k, v = np.random.default_rng(6).standard_normal((3, 1, 64, 8))
    counts = [64, 256, 1024, 4096]
    errors = []
    for count in counts:
        some = [ch.audit(ch.performer(count, seed=seed), q / 2, k / 2, v).error for seed in range(12)]
        errors.append(np.sqrt(np.mean(np.square(some))))
    slope = np.polyfit(np.log(counts), np.log(errors), 1)[0]
    assert -0.58 < slope < -0.42


def test_mean_over_seeds_converges_to_exact() -> None:
    """Outputs, averaged above and below the line over seeds: sixteen times as many seeds are four times as near."""
    q, k, v = np.random.default_rng(7).standard_normal((3, 32, 8)) / 2
    exact = ch.attention(q, k, v)
    library, root = Library.of(q), 8**-0.25
    found = {}
    for seeds in (16, 256):
        total = np.zeros((32, 32))
        for seed in range(seeds):
            method = ch.performer(32, seed=1000 + seed)
            total += method.phi(library, q, root) @ method.phi(library, k, root).T
        found[seeds] = np.sqrt(((total @ v / total.sum(-1, keepdims=True) - exact) ** 2).mean())
    assert 2.5 < found[16] / found[256] < 6.4


def test_the_same_seed_everywhere() -> None:
    q, k, v = np.random.default_rng(8).standard_normal((3, 2, 31, 8))
    for method in (ch.performer(64, seed=5), ch.linear()):
        found = [numbers(method(*map(library.make, (q, k, v)))) for library in LIBRARIES]
        for one in found[1:]:
            np.testing.assert_allclose(one, found[0], rtol=0, atol=64 * np.finfo(np.float64).eps)
    assert not np.array_equal(ch.performer(64, seed=5)(q, k, v), ch.performer(64, seed=6)(q, k, v))
    assert np.array_equal(directions(64, 8, 5), directions(64, 8, 5))


def test_keys_that_nobody_sees_may_hold_anything() -> None:
    q, k, v = np.random.default_rng(9).standard_normal((3, 2, 20, 5))
    spoiled_k, spoiled_v = k.copy(), v.copy()
    spoiled_k[:, 13:], spoiled_v[:, 13:] = np.nan, np.inf
    for name, (method, _, _) in METHODS.items():
        for mask in (ch.lengths(13), ch.causal(offset=-7)):  # the last query sees key 12
            clean, found = method(q, k, v, mask=mask), method(q, spoiled_k, spoiled_v, mask=mask)
            assert np.array_equal(clean, found), name
            assert np.isfinite(found).all()
        blind = method(q, k, v, mask=ch.lengths(0))
        assert not blind.any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q: ch.approximate(q, q, q, ch.linear(), mask=ch.window(3)), "window(3) cannot be honoured by linear()"),
        (lambda q: ch.approximate(q, q, q, ch.linear(), mask=ch.where(np.tri(6) > 0)), "where(array(6, 6))"),
        (lambda q: ch.approximate(q, q, q, ch.linear(), mask=ch.causal() | ch.prefix(2)), "cannot be honoured"),
        (lambda q: ch.approximate(q, q, q, ch.linear(), mask=ch.documents([0, 0, 0, 1, 1, 1])), "documents"),
        (lambda q: ch.approximate(q, q, q, ch.linear(), scale=1.0), "scale: is given, and linear() has no scores"),
        (lambda q: ch.approximate(q, q, q, "performer"), "method: is 'performer', expected a method"),
        (lambda q: ch.approximate(q, q, q, ch.linear(), bias=ch.alibi(2)), "bias: is no argument of approximate"),
        (lambda q: ch.approximate(q, q, q, ch.linear(), layout="bhnd"), "layout: is 'bhnd', expected 'hnd' or 'nhd'"),
        (lambda q: ch.approximate(q, q, q, ch.linear(), audit=0), "audit: is 0, expected a whole number"),
        (lambda q: ch.linear("gelu"), "feature: is 'gelu', expected 'elu+1', 'relu' or a function"),
        (lambda q: ch.linear(lambda x: x.sum(-1))(q, q, q), "feature: gave (2, 1, 6) for (2, 1, 6, 4)"),
        (lambda q: ch.performer(0), "features: is 0, expected a whole number of at least 1"),
        (lambda q: ch.performer(8, kind="gelu"), "kind: is 'gelu'"),
        (lambda q: ch.performer(8, eps=2), "eps: is 2"),
        (lambda q: ch.linear().step(q, q[:, :2], q[:, :2]), "k: has 2 positions, expected 6"),
        (lambda q: ch.audit(3, q, q, q), "approximation: is 3, expected a method or a function"),
        (lambda q: ch.audit(lambda q, k, v: q[:, :1], q, q, q), "approximation: gave (2, 1, 4), expected"),
        (lambda q: ch.audit(ch.attention, q, q, q, lengths=[9]), "lengths: has 9, expected numbers from 1 to 6"),
        (lambda q: ch.audit(ch.attention, q[:, :0], q, q), "q, k, v: are empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(call: Any, words: str) -> None:
    q = np.random.default_rng(0).standard_normal((2, 6, 4))
    with pytest.raises(ch.ArgumentError, match=re.escape(words)):
        call(q)


def test_empty_arrays() -> None:
    for q, k in (((2, 0, 4), (2, 3, 4)), ((2, 3, 4), (2, 0, 4)), ((0, 3, 4), (0, 3, 4))):
        for method in (ch.linear(), ch.performer(8)):
            found = method(np.zeros(q), np.zeros(k), np.zeros(k), mask=ch.causal())
            assert found.shape == q
            assert not found.any()


def test_positions_before_heads() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 17, 4))
    plain = ch.approximate(q, k, v, ch.performer(32), mask=ch.causal())
    turned, found = ch.approximate(
        *(a.swapaxes(1, 2) for a in (q, k, v)), ch.performer(32), mask=ch.causal(), layout="nhd", audit=5
    )
    assert np.array_equal(turned.swapaxes(1, 2), plain)
    assert found.by_head.shape == (2, 3)


def test_a_function_of_ones_own_in_every_library() -> None:
    """Two features a number, by operators alone; and the Taylor series of the exponential, of another width."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 17, 4))

    def squared(x: Any) -> Any:
        return x * x

    exact, _ = approximated.in_heads(
        approximated.linear, q, k, v, np.ones((17, 17), bool), np.longdouble, feature=squared
    )
    for library in LIBRARIES:
        found = ch.linear(squared)(*map(library.make, (q, k, v)))
        np.testing.assert_allclose(numbers(found), exact.astype(float), atol=1e-13)
    doubled = ch.linear(lambda x: np.concatenate([np.exp(x), np.exp(-x)], axis=-1))
    assert doubled.width(4) == 8
    assert doubled(q, k, v).shape == (2, 17, 4)


def test_half_precision_of_pytorch() -> None:
    q, k, v = torch.randn(3, 2, 300, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found = ch.approximate(q, k, v, ch.performer(64), mask=ch.causal())
    assert found.dtype == torch.bfloat16
    exact = ch.approximate(q.double(), k.double(), v.double(), ch.performer(64), mask=ch.causal())
    plain = ch.approximate(q.float(), k.float(), v.float(), ch.performer(64), mask=ch.causal()).to(torch.bfloat16)
    within(found, exact, plain, 300)
