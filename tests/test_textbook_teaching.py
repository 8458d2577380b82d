"""What the textbook teaches with: examples, exercises, the page of slips, softmax, and additive attention."""

from __future__ import annotations

import decimal
import math
import warnings
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest
import torch
from texts import NUMBERS, SENTENCE, by_hand, near, published, random, refused, tensors

import clearhead
from clearhead import textbook
from clearhead.core.arrays import to_numpy
from clearhead.textbook import EXAMPLES, additive, additive_torch, algebra, exercises, slips

# Examples, exercises, slips


def test_examples_of_other_sizes() -> None:
    for name, sizes in (("two_by_three", (2, 3)), ("three_by_four", (3, 4))):
        example = EXAMPLES[name]
        weights = algebra.attend(example.q, example.k, example.v)[0]
        assert weights.shape == sizes == (len(example.query_tokens), len(example.tokens))
        near(weights, by_hand(example.q, example.k, example.v)[1])


def test_two_heads_of_the_shared_sentence() -> None:
    example = EXAMPLES["cat_sat_2_heads"]
    assert example.q.shape == example.k.shape == example.v.shape == (2, 5, 2)
    output, weights = textbook.scaled_dot_product_attention(example.q, example.k, example.v)
    for head in range(2):
        columns = slice(2 * head, 2 * head + 2)
        exact = by_hand(SENTENCE.q[:, columns], SENTENCE.k[:, columns], SENTENCE.v[:, columns])
        near(output[head], exact[0])
        near(weights[head], exact[1])


def test_exercises_by_hand() -> None:
    published(exercises.row("sat")[0], NUMBERS["weights"][2])
    published(exercises.row(2)[1], NUMBERS["output"][2])
    raw = np.exp(NUMBERS["raw_scores"][0])
    near(exercises.unscaled("The"), raw / raw.sum())
    assert exercises.not_largest(np.eye(3)) == {}
    own = math.exp(0.5) / (math.exp(0.5) + 3)
    near(np.diagonal(exercises.orthogonal(4)), [own] * 4)


def test_every_slip_of_the_texts_is_listed() -> None:
    right = {slip.right for slip in slips.slips()}
    facts = {".401 .401 .198", ".599", "1.28e15", "12.88e9", "51.5", "4.95", "7.07 4.95", ".03", "4 12 7 7 9 rounded"}
    assert right == facts
    assert "4 11 7 7 9" in slips.page()


# Softmax and additive attention


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor, strict.asarray], ids=["numpy", "torch", "strict"])
def test_softmax_and_its_jacobian_are_pytorchs(convert: Any) -> None:
    x = random(3, 2, 5).astype(np.float32)
    for axis in (-1, 0, 1):
        expected = torch.softmax(torch.tensor(x).double(), dim=axis)
        for shift in (True, False):
            found = to_numpy(textbook.softmax(convert(x), axis, shift=shift))
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-7)
    found = to_numpy(textbook.softmax_jacobian(convert(x[0, 0])))
    exact = torch.autograd.functional.jacobian(lambda y: y.softmax(-1), torch.tensor(x[0, 0]).double())
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-7)


def test_the_jacobian_keeps_its_digits_where_one_weight_is_nearly_one() -> None:
    x = np.array([60.0, 3.0, -20.0])
    with decimal.localcontext() as context:
        context.prec = 60
        raised = [decimal.Decimal(number).exp() for number in x.tolist()]
        p = [number / sum(raised) for number in raised]
        exact = [[float((a if i == j else 0) - a * b) for j, b in enumerate(p)] for i, a in enumerate(p)]
    np.testing.assert_allclose(textbook.softmax_jacobian(x), exact, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("dtype", "last"), [(np.float32, 88.0), (np.float64, 709.0)])
def test_unshifted_exponentials_overflow_where_they_do(dtype: Any, last: float) -> None:
    fine, over = np.array([last, 0], dtype), np.array([last + 1, 0], dtype)
    assert np.isfinite(textbook.exponentials(fine, shift=False)).all()
    assert np.isinf(textbook.exponentials(over, shift=False)[0])
    assert np.isnan(textbook.softmax(over, shift=False)[0])
    assert textbook.softmax(over).tolist()[0] == 1.0


@pytest.mark.parametrize("masked", [False, True])
def test_additive_attention_pair_by_pair(masked: bool) -> None:
    Q, K, V = random(2, 5, 3), random(2, 7, 4, seed=1), random(2, 7, 6, seed=2)
    attend = additive_torch.AdditiveAttention(3, 4, 8).double()
    W, U, v = (p.detach().numpy() for p in (attend.W.weight, attend.U.weight, attend.v.weight[0]))
    mask = np.random.default_rng(3).random((5, 7)) < 0.5 if masked else None
    if mask is not None:
        mask[:, 0], mask[1] = True, False
    output, weights = additive.additive_attention(Q, K, V, W, U, v, mask)
    for b in range(2):
        for i in range(5):
            allowed = [j for j in range(7) if mask is None or mask[i, j]]
            raised = {j: math.exp(v @ np.tanh(W @ Q[b, i] + U @ K[b, j])) for j in allowed}
            expected = np.array([raised.get(j, 0.0) / (sum(raised.values()) or 1.0) for j in range(7)])
            near(weights[b, i], expected)
            near(output[b, i], expected @ V[b])
    query = torch.tensor(Q, requires_grad=True)
    found = attend(query, *tensors(K, V), None if mask is None else torch.tensor(mask))
    near(found[0].detach(), output)
    found[0].sum().backward()
    assert torch.isfinite(query.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in attend.parameters())


X = random(5, 6)
REFUSED = {
    "axis: is 2": lambda: textbook.softmax(X, axis=2),
    "W: has shape (3, 5), expected (3, 6)": lambda: additive.additive_scores(
        X, X, np.ones((3, 5)), np.ones((3, 6)), np.ones(3)
    ),
    "W: is numpy of dtype float32, expected numpy of dtype float64 as Q": lambda: additive.additive_scores(
        X, X, np.ones((3, 6), np.float32), np.ones((3, 6)), np.ones(3)
    ),
    "v: is torch of dtype float64, expected numpy of dtype float64 as Q": lambda: additive.additive_scores(
        X, X, np.ones((3, 6)), np.ones((3, 6)), torch.ones(3).double()
    ),
    "V: is torch of dtype float64, expected numpy of dtype float64 as Q": lambda: additive.additive_attention(
        X, X, torch.tensor(X), np.ones((3, 6)), np.ones((3, 6)), np.ones(3)
    ),
    "heads: is 3, which does not divide": lambda: SENTENCE.in_heads(3),
    "heads: is 2.0": lambda: SENTENCE.in_heads(2.0),
    "heads: is 2, which does not divide the columns of q, of shape (2, 5, 2)": lambda: EXAMPLES[
        "cat_sat_2_heads"
    ].in_heads(2),
    "d_k: is 6, expected a multiple": lambda: exercises.unscaled("The", 6),
    "sigma: is 0": lambda: exercises.factor(0, 4),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(message: str) -> None:
    refused(message, REFUSED[message])


def test_softmax_of_what_is_not_finite_is_quiet_and_takes_axes_of_numpy() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bad in (np.inf, np.nan):
            for shift in (True, False):
                textbook.exponentials(np.array([bad, 1.0]), shift=shift)
                textbook.softmax(np.array([bad, 1.0]), shift=shift)
    near(textbook.softmax(X, axis=np.int64(0)), textbook.softmax(X, axis=0))


def test_a_mask_value_is_converted_at_a_size() -> None:
    got = textbook.convert_mask(clearhead.causal(), "course", "chapter_torch", queries=3, keys=3)
    np.testing.assert_array_equal(got, ~np.tri(3, dtype=bool))
