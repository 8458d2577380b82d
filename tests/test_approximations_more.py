"""Linformer, Nyström, LSH, the best blocks and clusters: their own formulas, in every library."""

from __future__ import annotations

import re
from typing import Any

import approximated
import jax
import numpy as np
import pytest
import torch
from budget import Expected, check
from libraries import LIBRARIES, ArrayLibrary, numbers

import clearhead as ch

LEARNED = tuple(np.random.default_rng(0).standard_normal((2, 7, 29)) / np.sqrt(7))
# name: the method, its formula from pairs, and what that is told
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "linformer": (ch.linformer(5), approximated.linformer, {"length": 5}),
    "linformer learned": (
        ch.linformer(projection=LEARNED), approximated.linformer, {"length": 7, "arrays": LEARNED},
    ),
    "nystrom": (ch.nystrom(4), approximated.nystrom, {"landmarks": 4}),
    "lsh": (ch.lsh(6, 3, seed=2), approximated.lsh, {"buckets": 6, "rounds": 3, "seed": 2}),
    "lsh with duplicates": (
        ch.lsh(6, 3, duplicates=True), approximated.lsh, {"buckets": 6, "rounds": 3, "duplicates": True},
    ),
    "topk_blocks": (ch.topk_blocks(2, block=4), approximated.topk_blocks, {"keep": 2, "block": 4}),
    "clusters": (ch.clusters(5), approximated.clusters, {"count": 5}),
}  # fmt: skip
CAUSAL = ("lsh", "lsh with duplicates", "topk_blocks")
# shapes of q, k and v, the mask, and where query 0 stands if it is causal
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], Any, int | None]] = {
    "full": (((3, 19, 5), (3, 23, 5), (3, 23, 7)), None, None),
    "lengths": (((2, 3, 19, 5), (2, 3, 23, 5), (2, 3, 23, 7)), ch.lengths([17, 0]), None),
    "by head": (((4, 11, 5), (2, 13, 5), (2, 13, 7)), ch.where(np.arange(52).reshape(4, 1, 13) % 3 > 0), None),
    "shared batch": (((5, 2, 11, 3), (1, 2, 13, 3), (1, 2, 13, 7)), None, None),
    "causal": (((2, 6, 29, 5), (2, 2, 29, 5), (2, 2, 29, 7)), ch.causal(), 0),
    "causal, more keys": (((3, 11, 5), (3, 29, 5), (3, 29, 7)), ch.causal(), 18),
    "causal at an offset": (((3, 19, 5), (3, 29, 5), (3, 29, 7)), ch.causal(offset=6), 6),
}
BOTH = [(method, case) for method in METHODS for case in CASES if method in CAUSAL or not case.startswith("causal")]


def drawn(case: str, dtype: str = "float64") -> tuple[list[np.ndarray], np.ndarray]:
    return approximated.drawn(case, *CASES[case][:2], dtype)


def expected(method: str, case: str, dtype: str) -> tuple[Expected, Expected]:
    _, formula, how = METHODS[method]
    if method == "topk_blocks":
        how = how | {"first": CASES[case][2]}
    return approximated.expected(formula, how, *drawn(case, dtype), dtype)


@pytest.mark.parametrize("library", [one for one in LIBRARIES if one.name != "jax"], ids=str)
@pytest.mark.parametrize(("method", "case"), BOTH)
def test_a_method_is_its_formula(method: str, case: str, library: ArrayLibrary) -> None:
    for dtype in library.dtypes if case == "full" else ("float32",):
        (q, k, v), _ = drawn(case, dtype)
        found = METHODS[method][0](*map(library.make, (q, k, v)), mask=CASES[case][1])
        assert library.owns(found)
        output, _ = expected(method, case, dtype)
        check(numbers(found), output, k.shape[-2], f"{method}, {case}, {dtype}")


@pytest.mark.parametrize("method", ["linformer", "nystrom", "lsh", "topk_blocks", "clusters"])
def test_jax_jitted_and_differentiated(method: str) -> None:
    """The same numbers as NumPy's, and the gradients that PyTorch finds."""
    (q, k, v), _ = drawn("full")
    value = METHODS[method][0]
    found = jax.jit(value)(q, k, v)
    check(np.asarray(found), expected(method, "full", "float64")[0], 23, method)
    tensors = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    (value(*tensors) ** 2).sum().backward()
    by_jax = jax.grad(lambda *a: (value(*a) ** 2).sum(), (0, 1, 2))(q, k, v)
    for tensor, gradient in zip(tensors, by_jax, strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(numbers(gradient), numbers(tensor.grad), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("method", "case"), BOTH)
def test_implied_weights_are_the_formulas(method: str, case: str) -> None:
    (q, k, v), _ = drawn(case)
    value = METHODS[method][0]
    problem, seen = value.posed(q, k, v, CASES[case][1])
    places = np.array([0, 2, q.shape[-2] - 1])
    _, weights = expected(method, case, "float64")
    some = Expected(weights.exact[..., places, :], weights.plain[..., places, :], weights.eps)
    check(np.broadcast_to(value.rows(problem, seen, places), some.exact.shape), some, k.shape[-2], f"{method}, {case}")


@pytest.mark.parametrize(("method", "case"), [one for one in BOTH if one[1] in ("full", "by head", "causal")])
def test_gradients_are_the_formulas(method: str, case: str) -> None:
    """Along a random direction, against differences of the formula in extended precision."""
    (q, k, v), seen = drawn(case)
    value, formula, how = METHODS[method]
    if method == "topk_blocks":
        how = how | {"first": CASES[case][2]}
    generator = np.random.default_rng(5)
    dout = generator.standard_normal((*q.shape[:-1], v.shape[-1]))
    tensors = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    value(*tensors, mask=CASES[case][1]).backward(torch.tensor(dout))

    def loss(*arrays: np.ndarray) -> Any:
        return (approximated.in_heads(formula, *arrays, seen, np.longdouble, **how)[0] * dout).sum()

    for place, tensor in enumerate(tensors):
        direction, step = generator.standard_normal(tensor.shape), np.longdouble(1e-6)
        ahead, behind = (
            loss(*(a + sign * step * direction if i == place else a for i, a in enumerate((q, k, v))))
            for sign in (1, -1)
        )
        slope = float((ahead - behind) / (2 * step))
        gradient = numbers(tensor.grad)
        assert abs((gradient * direction).sum() - slope) < 1e-7 * max(1.0, np.abs(gradient * direction).sum())


def test_exact_where_nothing_is_left_out() -> None:
    """As many landmarks, slots, clusters or blocks as there are positions, or rounds that find every key."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 5))
    for method in (
        ch.linformer(16),
        ch.clusters(16),
        ch.topk_blocks(4, block=4),
        ch.lsh(2, 40),
        ch.nystrom(16, iterations=30),
    ):
        assert ch.audit(method, q, k, v).error < 1e-8, method


def test_seeds() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 60, 8))
    for one, other in (
        (ch.linformer(8, projection=1), ch.linformer(8, projection=2)),
        (ch.lsh(8, 1, seed=1), ch.lsh(8, 1, seed=2)),
        (ch.clusters(6, seed=1), ch.clusters(6, seed=2)),
    ):
        first = [numbers(one(*map(library.make, (q, k, v)))) for library in LIBRARIES]
        for again in first[1:]:
            np.testing.assert_allclose(again, first[0], rtol=0, atol=1e-13)
        assert not np.allclose(first[0], other(q, k, v))


def test_memory_of_blocks_is_bounded() -> None:
    """More blocks than are gathered at once give the same as a smaller call does for its part."""
    q, k, v = np.random.default_rng(1).standard_normal((3, 1, 4096, 64)).astype(np.float32)
    method = ch.topk_blocks(16, block=64)
    whole = method(q, k, v, mask=ch.causal())
    part = method(q[:, :1024], k[:, :1024], v[:, :1024], mask=ch.causal())
    np.testing.assert_allclose(whole[:, :1024], part, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q: ch.linformer(4)(q, q, q, mask=ch.causal()), "honoured by linformer(4): it mixes keys"),
        (lambda q: ch.nystrom(4)(q, q, q, mask=ch.causal()), "honoured by nystrom(4): its landmarks"),
        (lambda q: ch.clusters(4)(q, q, q, mask=ch.causal()), "honoured by clusters(4): the queries of a"),
        (lambda q: ch.topk_blocks(4)(q, q, q, mask=ch.window(2)), "window(2) cannot be honoured by topk_blocks(4)"),
        (lambda q: ch.lsh(5), "buckets: is 5, expected an even number"),
        (lambda q: ch.linformer(4, projection="max"), "projection: is 'max', expected 'mean', a seed, an array"),
        (lambda q: ch.linformer(4, projection=np.ones((3, 9))), "projection: has shape (3, 9), expected 4 rows"),
        (lambda q: ch.linformer(projection=np.ones((3, 5)))(q, q, q), "has shape (3, 5), expected at least 6"),
        (lambda q: ch.linformer(projection=np.ones((3, 2, 9)))(q, q, q), "projection: is for 3 heads, expected 2"),
        (lambda q: ch.nystrom(0), "landmarks: is 0"),
        (lambda q: ch.topk_blocks(0), "keep: is 0"),
        (lambda q: ch.clusters(True), "count: is True"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(call: Any, words: str) -> None:
    q = np.random.default_rng(0).standard_normal((2, 6, 4))
    with pytest.raises(ch.ArgumentError, match=re.escape(words)):
        call(q)
