"""The definition itself, against things that are not this library: loops, PyTorch, differences, published numbers."""

from __future__ import annotations

import numpy as np
import pytest
import row_by_row
import torch

from clearhead.core import formula
from clearhead.core.formula import attention_loops

RNG = np.random.default_rng(7)
Q, K, V = RNG.standard_normal((19, 13)), RNG.standard_normal((23, 13)), RNG.standard_normal((23, 11))
MASK = RNG.random((19, 23)) < 0.6
MASK[5] = False
DOUT = RNG.standard_normal((19, 11))
DLSE = RNG.standard_normal(19)


@pytest.mark.parametrize("mask", [None, MASK], ids=["no mask", "mask"])
def test_formula_equals_loops(mask: np.ndarray | None) -> None:
    answer = formula.attention(Q, K, V, scale=13**-0.5, mask=mask)
    counted = attention_loops(Q, K, V, mask=mask)
    np.testing.assert_allclose(answer.output, counted.output, atol=1e-14)
    np.testing.assert_allclose(answer.weights, counted.weights, atol=1e-14)
    assert counted.multiply_adds == 19 * 23 * 13 + 19 * 23 * 11
    assert counted.exponentials == counted.divisions == 19 * 23


def test_formula_equals_pytorch() -> None:
    bias = RNG.standard_normal((19, 23))
    tensors = [torch.tensor(a) for a in (Q, K, V)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=torch.tensor(bias))
    np.testing.assert_allclose(formula.attention(Q, K, V, scale=13**-0.5, bias=bias).output, theirs, atol=1e-14)


def test_entropy_and_lse_follow_from_the_weights() -> None:
    answer = formula.attention(Q, K, V, scale=13**-0.5, mask=MASK)
    scores = np.where(MASK, Q @ K.T / np.sqrt(13), -np.inf)
    alive = np.arange(19) != 5
    np.testing.assert_allclose(answer.lse[alive], np.log(np.exp(scores[alive]).sum(-1)))
    assert answer.lse[5] == -np.inf
    some = answer.weights[alive]
    np.testing.assert_allclose(answer.entropy[alive], -(some * np.log(np.where(some, some, 1))).sum(-1))


OPTIONS = {
    "plain": {},
    "mask": {"mask": MASK},
    "softcap and bias": {"softcap": 0.9, "bias": RNG.standard_normal((19, 23))},
    "sinks": {"sinks": np.array([0.3]), "mask": MASK},
    "dropout": {"keep": RNG.random((19, 23)) < 0.7, "rescale": 1 / 0.7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_equal_differences(options: dict) -> None:
    found = formula.gradients(Q, K, V, DOUT, scale=0.4, **options, dlse=DLSE)

    def loss(q: np.ndarray, k: np.ndarray, v: np.ndarray, **changed: np.ndarray) -> float:
        answer = formula.attention(q, k, v, scale=0.4, **{**options, **changed})
        return float((answer.output * DOUT).sum() + (np.where(answer.lse == -np.inf, 0, answer.lse) * DLSE).sum())

    step = 1e-6
    for place, gradient in enumerate((found.dq, found.dk, found.dv)):
        for index in [(0, 0), (7, 3), (18, 10)]:
            arrays = [Q.copy(), K.copy(), V.copy()]
            arrays[place][index] += step
            up = loss(*arrays)
            arrays[place][index] -= 2 * step
            assert (up - loss(*arrays)) / (2 * step) == pytest.approx(gradient[index], abs=1e-7)
    if "sinks" in options:
        sink = options["sinks"]
        slope = (loss(Q, K, V, sinks=sink + step) - loss(Q, K, V, sinks=sink - step)) / (2 * step)
        assert slope == pytest.approx(found.dsinks.sum(), abs=1e-7)
    if "bias" in options:
        nudged = options["bias"].copy()
        nudged[3, 4] += step
        slope = (loss(Q, K, V, bias=nudged) - loss(Q, K, V)) / step
        assert slope == pytest.approx(found.dbias[3, 4], abs=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_formula_equals_the_definition_row_by_row(options: dict) -> None:
    exact = row_by_row.attend(Q, K, V, DOUT, scale=0.4, **options)
    found = {
        **vars(formula.attention(Q, K, V, scale=0.4, **options)),
        **vars(formula.gradients(Q, K, V, DOUT, scale=0.4, **options)),
    }
    for name in ("output", "weights", "lse", "max_score", "entropy", "dq", "dk", "dv"):
        np.testing.assert_allclose(found[name], exact[name], atol=1e-13, err_msg=name)
    if "sinks" in options:
        np.testing.assert_allclose(found["dsinks"], exact["dsinks"], atol=1e-13)
