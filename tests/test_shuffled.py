"""Shuffled weights: what is expected is the mean over every permutation there is, and what is drawn comes near it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch

RNG = np.random.default_rng(3)
Q, K, V = RNG.standard_normal((2, 3, 5)), RNG.standard_normal((2, 5, 5)), RNG.standard_normal((2, 5, 7))
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ch.causal()},
    "an array, sinks, softcap": {"mask": RNG.random((3, 5)) < 0.7, "sinks": np.array([0.3, -1.0]), "softcap": 2.0},
    "alibi": {"bias": ch.alibi(2), "scale": 0.4},
}


def every_shuffle(weights: np.ndarray, values: np.ndarray) -> float:
    """The root mean square over all permutations, one by one."""
    output = weights @ values
    moved = [
        np.sum((weights[list(order)] @ values - output) ** 2) for order in itertools.permutations(range(len(weights)))
    ]
    return float(np.sqrt(np.mean(moved)))


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_expected_is_the_mean_over_every_permutation(options: dict[str, Any]) -> None:
    found = ch.shuffle_weights(Q, K, V, shuffles=0, **options)
    seen = ch.observe(Q, K, V, weights=True, **options)
    mask = options.get("mask", ch.lengths(5))
    allowed = np.broadcast_to(mask if isinstance(mask, np.ndarray) else mask.dense(3, 5)[0], (3, 5))
    for head, query in np.ndindex(2, 3):
        weights, values = seen.weights[head, query][allowed[query]], V[head][allowed[query]]
        assert found.expected[head, query] == pytest.approx(every_shuffle(weights, values), rel=1e-9)
        equal = np.full(len(weights), weights.sum() / max(len(weights), 1))
        assert found.equal[head, query] == pytest.approx(np.linalg.norm((equal - weights) @ values), rel=1e-9)
        assert found.output[head, query] == pytest.approx(np.linalg.norm(seen.output[head, query]), rel=1e-9)
        assert found.keys[head, query] == len(weights)
    assert found.drawn is None


def test_what_is_drawn_comes_near_and_is_the_same_with_the_same_seed() -> None:
    found = ch.shuffle_weights(Q, K, V, shuffles=4000, seed=5)
    assert found.drawn is not None
    np.testing.assert_allclose(found.drawn, found.expected, rtol=0.06)
    again, other = ch.shuffle_weights(Q, K, V, shuffles=4000, seed=5), ch.shuffle_weights(Q, K, V, shuffles=4000)
    np.testing.assert_array_equal(found.drawn, again.drawn)
    assert other.drawn is not None
    assert not np.array_equal(found.drawn, other.drawn)
    assert found.matters
    assert "It matters which key gets which weight." in str(found)


@pytest.mark.parametrize(
    ("q", "v", "mask"),
    [
        (Q, np.ones((2, 5, 7)) / 3, None),
        (Q, np.tile(RNG.standard_normal((2, 1, 7)) * 1e9, (1, 5, 1)), None),
        (np.zeros_like(Q), V, None),
        (Q, V, ch.window(0)),
        (Q, V, ch.lengths(0)),
    ],
    ids=["equal values", "large equal values", "equal weights", "one key", "no key"],
)
def test_where_shuffling_changes_nothing(q: Any, v: Any, mask: Any) -> None:
    found = ch.shuffle_weights(q, K, v, mask=mask)
    # equal weights shuffled are the same weights
    assert not found.matters
    assert not found.moves.any()
    assert "does not matter" in str(found)


def test_what_a_query_does_not_see_takes_no_part() -> None:
    spoiled = V.copy()
    spoiled[:, 3:] = np.nan
    found, plain = (ch.shuffle_weights(Q, K, v, mask=ch.lengths(3)) for v in (spoiled, V))
    np.testing.assert_array_equal(found.expected, plain.expected)
    seen = ch.shuffle_weights(Q, K, spoiled)
    assert np.isnan(seen.expected).all()
    assert not seen.matters


def test_libraries_shapes_and_memory() -> None:
    base = ch.shuffle_weights(Q, K, V, shuffles=0).expected
    tensors = [torch.tensor(array, requires_grad=True) for array in (Q, K, V)]
    np.testing.assert_allclose(ch.shuffle_weights(*tensors, shuffles=0).expected, base, rtol=1e-12)
    one = ch.shuffle_weights(Q[0], K[0], V[0], shuffles=0)
    np.testing.assert_array_equal(one.expected, base[0])
    grouped = ch.shuffle_weights(np.stack([Q[0], Q[0]])[None], K[None, :1], V[None, :1], shuffles=0)
    np.testing.assert_allclose(grouped.expected, np.stack([base[0], base[0]])[None], rtol=1e-12)
    hot = ch.shuffle_weights(Q, K, V, temperature=1e6, shuffles=0)
    assert hot.share() < 1e-4 < one.share()


def test_refusals() -> None:
    for options, words in (
        ({"shuffles": -1}, "shuffles: is -1"),
        ({"seed": 1.5}, "seed: is 1.5"),
        ({"seed": -1}, "seed"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            ch.shuffle_weights(Q, K, V, **options)
    with pytest.raises(ch.ArgumentError, match="k: has 4 features"):
        ch.shuffle_weights(Q, K[..., :4], V)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_said_to_stay(bad: float) -> None:
    spoiled = ch.shuffle_weights(Q * bad, K, V)
    assert spoiled.matters is None
    assert "does not matter" not in str(spoiled)
    assert "cannot be told" in str(spoiled)
    some = Q.copy()
    some[0, 0] = np.nan
    found = ch.shuffle_weights(some, K, V)
    assert found.matters is True
    assert "Of 1 queries it cannot be told" in " ".join(str(found).split())
