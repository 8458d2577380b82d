"""Attention as a Markov chain: products without the matrix are those with it; stationary, mixing, refused."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch


@pytest.fixture
def call() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k = np.random.default_rng(0).standard_normal((2, 2, 3, 23, 5))
    return q, k, ch.observe(q, k, k, weights=True).weights


def test_products_without_the_matrix(call: Any) -> None:
    q, k, weights = call
    generator = np.random.default_rng(1)
    x, p = generator.standard_normal((2, 3, 23, 7)), generator.dirichlet(np.ones(23), (2, 3))
    walk, table = ch.chain(q, k), ch.chain(weights)
    third = np.linalg.matrix_power(weights, 3)
    for one in (walk, table):
        np.testing.assert_allclose(one.ahead(x, 3), third @ x, atol=1e-13)
        np.testing.assert_allclose(one.back(p, 3), (p[..., None, :] @ third)[..., 0, :], atol=1e-13)
    np.testing.assert_allclose(ch.powers(walk, 3)[2], third, atol=1e-13)
    np.testing.assert_allclose(ch.powers(torch.tensor(weights), 3)[2], third, atol=1e-13)


def test_the_stationary_distribution_is_the_eigenvector(call: Any) -> None:
    q, k, weights = call
    found = ch.chain(q, k).stationary()
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-12)
    for at in np.ndindex(2, 3):
        values, vectors = np.linalg.eig(weights[at].T)
        vector = np.real(vectors[:, np.argmax(values.real)])
        np.testing.assert_allclose(found[at], vector / vector.sum(), atol=1e-10)


def test_mixing_time_is_its_definition(call: Any) -> None:
    q, k, weights = call
    settled = ch.chain(weights).stationary()
    for distance in (0.3, 0.05, 0.001):
        power, steps = np.broadcast_to(np.eye(23), weights.shape), 0
        while 0.5 * np.abs(power - settled[..., None, :]).sum(-1).max() > distance:
            power, steps = power @ weights, steps + 1
        assert ch.chain(q, k).mixing_time(distance) == steps
    assert ch.chain(np.array([[0.0, 1.0], [1.0, 0.0]])).mixing_time(most=50) is None  # it goes in circles
    assert ch.chain(q, k).mixing_time(starts=[3]) <= ch.chain(q, k).mixing_time()


def test_causal_attention_ends_at_the_first_token() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 12, 4))
    found = ch.chain(q, k, mask=ch.causal()).stationary()
    np.testing.assert_allclose(found, [1, *[0] * 11], atol=1e-9)


def test_memory_is_linear() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 4096, 8))
    walk = ch.chain(q, k)
    walk.back(np.full(4096, 1 / 4096))
    tracemalloc.start()
    walk.back(np.full(4096, 1 / 4096), 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 2**20  # the matrix has 128 MiB


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ch.chain(np.ones((2, 3))), "weights: have shape (2, 3), expected as many keys as queries"),
        (lambda: ch.chain(np.ones((2, 2))), "weights: are no chances"),
        (lambda: ch.chain(np.ones((2, 3)), np.ones((4, 3))), "k: has shape (4, 3), expected (2, 3)"),
        (lambda: ch.chain(np.eye(2), mask=ch.causal()), "mask: is given beside weights"),
        (lambda: ch.chain(np.ones((2, 3)), np.ones((2, 3)), sinks=np.ones(1)), "sinks: is given, and weights"),
        (lambda: ch.chain("weights"), "weights: is 'weights', expected an array"),
        (lambda: ch.powers(np.eye(2), 0), "count: is 0, expected a whole number"),
        (lambda: ch.chain(np.eye(2)).ahead(np.ones((3, 1))), "x: has shape (3, 1), expected 2 positions"),
        (lambda: ch.chain(np.eye(2)).mixing_time(2), "distance: is 2, expected a number between 0 and 1"),
        (lambda: ch.chain(np.eye(2)).mixing_time(starts=[5]), "starts: are [5], expected positions from 0 to 1"),
    ],
)
def test_what_is_no_chain_is_said(make: Any, words: str) -> None:
    with pytest.raises(ch.ArgumentError, match=re.escape(words)):
        make()


def test_weights_in_float32_have_a_stationary_distribution_too() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 8)).astype(np.float32)
    weights = ch.observe(q, k, v, weights=True).weights
    settled = ch.chain(weights).stationary()
    np.testing.assert_allclose(settled.sum(-1), 1.0, atol=1e-12)
    np.testing.assert_allclose(settled, ch.chain(q, k).stationary(), atol=1e-6)
