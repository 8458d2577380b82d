"""What is true of attention whatever the numbers are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.kernels.tiled import tiled

KERNELS = ["dense", "tiled"]


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    patch = pytest.MonkeyPatch()
    patch.setattr(tiled, "rows", 4)
    patch.setattr(tiled, "columns", 6)
    yield
    patch.undo()


@st.composite
def problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    heads, queries, keys = draw(st.integers(1, 3)), draw(st.integers(1, 11)), draw(st.integers(1, 17))
    features, width = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    size = draw(st.sampled_from([0.01, 1.0, 30.0]))
    q = size * rng.standard_normal((heads, queries, features))
    k, v = rng.standard_normal((heads, keys, features)), rng.standard_normal((heads, keys, width))
    mask = draw(st.sampled_from([None, ch.causal(), ch.window(2, 1), "random"]))
    if isinstance(mask, str):
        mask = rng.random((heads, queries, keys)) < 0.6
    return q, k, v, mask, rng


kernels = pytest.mark.parametrize("kernel", KERNELS)


@kernels
@given(problems())
def test_rows_sum_to_one_or_to_nothing(kernel: str, problem) -> None:
    q, k, v, mask, _ = problem
    seen = ch.observe(q, k, v, mask=mask, weights=True, received=True, kernel=kernel)
    sums = seen.weights.sum(-1)
    alive = seen.lse > -np.inf
    np.testing.assert_allclose(sums[alive], 1.0, rtol=1e-12)
    assert (sums[~alive] == 0).all()
    assert (seen.weights >= 0).all()
    np.testing.assert_allclose(seen.received.sum(-1), alive.sum(-1), rtol=1e-12)


@kernels
@given(problems())
def test_the_output_lies_among_the_values(kernel: str, problem) -> None:
    q, k, v, mask, _ = problem
    seen = ch.observe(q, k, v, mask=mask, kernel=kernel)
    low, high = v.min(-2, keepdims=True), v.max(-2, keepdims=True)
    slack = 1e-12 * (1 + np.abs(v).max())
    alive = (seen.lse > -np.inf)[..., None]
    assert ((seen.output >= low - slack) & (seen.output <= high + slack) | ~alive).all()
    assert (seen.output == 0)[~np.broadcast_to(alive, seen.output.shape)].all()
    assert (seen.entropy <= np.log(k.shape[-2]) + 1e-12).all()
    assert (seen.entropy >= -1e-12).all()


@kernels
@given(problems())
def test_the_order_of_keys_does_not_matter(kernel: str, problem) -> None:
    q, k, v, mask, rng = problem
    order = rng.permutation(k.shape[-2])
    whole = ch.where(np.ones((1, 1), bool)) if mask is None else mask
    grid = {"heads": q.shape[0]}
    dense = (whole if isinstance(whole, ch.Mask) else ch.where(whole)).dense(q.shape[-2], k.shape[-2], **grid)
    one = ch.attention(q, k, v, mask=dense, kernel=kernel)
    two = ch.attention(q, k[:, order], v[:, order], mask=dense[..., order], kernel=kernel)
    np.testing.assert_allclose(one, two, atol=1e-12)


@kernels
@given(problems())
def test_permuting_queries_permutes_rows(kernel: str, problem) -> None:
    q, k, v, _, rng = problem
    order = rng.permutation(q.shape[-2])
    one = ch.attention(q, k, v, kernel=kernel)
    np.testing.assert_allclose(one[:, order], ch.attention(q[:, order], k, v, kernel=kernel), atol=1e-12)


@kernels
@given(problems(), st.data())
def test_merging_any_split_in_any_order_is_the_whole(kernel: str, problem, data) -> None:
    q, k, v, _, rng = problem
    count = k.shape[-2]
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    pieces = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    parts = [ch.observe(q, k[:, piece], v[:, piece], kernel=kernel).partial for piece in pieces]
    merged = ch.merge(*(parts[i] for i in rng.permutation(len(parts))))
    whole = ch.observe(q, k, v, kernel=kernel)
    np.testing.assert_allclose(merged.output, whole.output, atol=1e-11)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=1e-11)
    np.testing.assert_allclose(merged.entropy, whole.entropy, atol=1e-10)
    np.testing.assert_allclose(merged.max_score, whole.max_score, rtol=1e-12, atol=1e-12)


@kernels
@given(problems(), st.floats(-50, 50))
def test_a_constant_added_to_a_row_of_scores_changes_nothing(kernel: str, problem, constant: float) -> None:
    q, k, v, mask, rng = problem
    shift = constant * rng.standard_normal((q.shape[0], q.shape[1], 1))
    one = ch.observe(q, k, v, mask=mask, kernel=kernel)
    two = ch.observe(q, k, v, mask=mask, bias=shift, kernel=kernel)
    np.testing.assert_allclose(one.output, two.output, atol=1e-11)
    np.testing.assert_allclose(one.entropy, two.entropy, atol=1e-10)


@kernels
@given(problems())
def test_inputs_are_never_written_to(kernel: str, problem) -> None:
    q, k, v, mask, rng = problem
    bias, dout = rng.standard_normal((q.shape[1], k.shape[1])), rng.standard_normal((*q.shape[:2], v.shape[2]))
    arrays = [q, k, v, bias, dout, *([mask] if isinstance(mask, np.ndarray) else [])]
    before = [array.copy() for array in arrays]
    ch.observe(q, k, v, mask=mask, bias=bias, softcap=3.0, top=2, received=True, map=(2, 2), kernel=kernel)
    ch.gradients(q, k, v, dout, mask=mask, bias=bias, kernel=kernel)
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy)
