"""The textbook classes: every published number, on every array library, and refusals in words."""

from __future__ import annotations

import math
from typing import Any

import array_api_strict
import jax.numpy
import numpy as np
import pytest
import torch
from texts import PUBLISHED, random, refused

import clearhead
from clearhead.core.arrays import to_numpy
from clearhead.explain.tokens import position_of
from clearhead.textbook import (
    EXAMPLES,
    MultiHeadAttention,
    ScaledDotProductAttention,
    attention_loops,
    create_causal_mask,
    create_padding_mask,
    scaled_dot_product_attention,
)

PLACES = {"cat_sat": 4, "it_animal": 2}

LIBRARIES = {
    "numpy": np.asarray,
    "torch": torch.tensor,
    "jax": jax.numpy.asarray,
    "array_api_strict": array_api_strict.asarray,
}


@pytest.fixture(params=LIBRARIES)
def convert(request: pytest.FixtureRequest) -> Any:
    return LIBRARIES[request.param]


@pytest.fixture(params=[name for name in LIBRARIES if name != "jax"])
def lightly(request: pytest.FixtureRequest) -> Any:
    """All but JAX, which compiles each step anew, and is held to steps and layers by the tests that `convert`."""
    return LIBRARIES[request.param]


def as_published(name: str, found: Any, published: Any) -> None:
    found = to_numpy(found) if hasattr(found, "shape") else np.asarray(found)
    assert found.shape == np.shape(published)
    # half a unit of the last published place, and what float32 (JAX's default) adds to it
    np.testing.assert_allclose(found, published, rtol=0, atol=0.5 * 10.0 ** -PLACES[name] + 1e-6)


def close(found: Any, exact: np.ndarray, plain: np.ndarray) -> None:
    """Within twice the error of the plain formula in the same precision, and one rounding of the result."""
    found = to_numpy(found)
    assert found.shape == exact.shape
    rounding = math.sqrt(exact.shape[-1]) * np.finfo(plain.dtype).eps * np.abs(exact).max()
    assert np.abs(found - exact).max() <= 2 * np.abs(plain - exact).max() + rounding


def same(found: Any, expected: Any) -> None:
    """Equal up to the order of sums: vector instructions start where memory is aligned."""
    found, expected = to_numpy(found), to_numpy(expected)
    assert found.dtype == expected.dtype
    rounding = math.sqrt(expected.shape[-1]) * np.finfo(expected.dtype).eps * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2 * rounding)


@pytest.mark.parametrize("name", PLACES)
def test_embedded_inputs_are_the_published_ones(name: str) -> None:
    example, published = EXAMPLES[name], PUBLISHED[name]
    assert list(example.tokens) == published["tokens"]
    assert list(example.query_tokens) == ([published["query_token"]] if name == "it_animal" else published["tokens"])
    for field in ("q", "k", "v"):
        array = getattr(example, field)
        assert array.dtype == np.float64
        assert array.tolist() == published[field]


@pytest.mark.parametrize("name", PLACES)
def test_every_step_is_as_published(name: str, convert: Any) -> None:
    example, published = EXAMPLES[name], PUBLISHED[name]
    q, k, v = map(convert, (example.q, example.k, example.v))
    attend = ScaledDotProductAttention(q.shape[-1])
    raw = attend.compute_scores(q, k)
    scaled = attend.scale_scores(raw)
    weights = attend.compute_weights(scaled)
    as_published(name, raw, published["raw_scores"])
    as_published(name, scaled, published["scaled_scores"])
    as_published(name, weights, published["weights"])
    as_published(name, attend.compute_output(weights, v), published["output"])
    for found in (attend(q, k, v), attend.forward(q, k, v), scaled_dot_product_attention(q, k, v)):
        as_published(name, found[0], published["output"])
        as_published(name, found[1], published["weights"])
    as_published(name, clearhead.attention(q, k, v), published["output"])


@pytest.mark.parametrize("mask", [clearhead.causal(), create_causal_mask(5)], ids=["value", "array"])
def test_causal_numbers_are_as_published(mask: Any, lightly: Any) -> None:
    example, published = EXAMPLES["cat_sat"], PUBLISHED["cat_sat"]
    q, k, v = map(lightly, (example.q, example.k, example.v))
    for call in (ScaledDotProductAttention(4), scaled_dot_product_attention):
        output, weights = call(q, k, v, mask=mask)
        as_published("cat_sat", output, published["causal_output"])
        as_published("cat_sat", weights, published["causal_weights"])
    as_published("cat_sat", clearhead.attention(q, k, v, mask=mask), published["causal_output"])


def test_row_sums_of_shifted_exponentials_are_as_published(convert: Any) -> None:
    example = EXAMPLES["cat_sat"]
    seen = clearhead.observe(*map(convert, (example.q, example.k, example.v))).numpy()
    as_published("cat_sat", np.exp(seen.lse - seen.max_score), PUBLISHED["cat_sat"]["exp_shifted_row_sums"])


@pytest.mark.parametrize("name", PLACES)
def test_loops_give_the_published_numbers(name: str) -> None:
    example, published = EXAMPLES[name], PUBLISHED[name]
    counted = attention_loops(example.q, example.k, example.v)
    as_published(name, counted.output, published["output"])
    as_published(name, counted.weights, published["weights"])


@pytest.mark.parametrize("row", range(5))
def test_matrix_sizes_are_as_published(row: int) -> None:
    table = PUBLISHED["complexity"]
    n = table["seq_len"][row]
    q = np.broadcast_to(np.float32(0.0), (n, 64))
    plan = clearhead.plan(q, q, q)
    assert plan.all_pairs == table["scores"][row]
    assert plan.matrix_bytes / 1024 == table["kilobytes"][row]


def test_gpt3_like_matrix_is_as_published() -> None:
    table = PUBLISHED["complexity"]["gpt3_like"]
    # no memory behind it: the plan reads sizes only
    q = np.broadcast_to(np.float32(0.0), (table["batch"], table["heads"], table["seq"], 128))
    plan = clearhead.plan(q, q, q)
    assert plan.all_pairs == table["values"]
    assert round(plan.matrix_bytes / 1e9, 1) == table["gigabytes_float32"]


@pytest.mark.parametrize(("n", "d"), [(3, 2), (7, 5), (13, 11)])
def test_loops_count_what_the_formula_counts(n: int, d: int) -> None:
    q, k, v = random(3, n, d)
    counted = attention_loops(q, k, v)
    assert counted.multiply_adds == 2 * n * n * d  # q kᵀ, and weights v
    assert counted.exponentials == counted.divisions == n * n
    assert clearhead.plan(q, k, v).flops == 2 * counted.multiply_adds


def test_multiply_adds_are_as_published() -> None:
    table = PUBLISHED["complexity"]["flops_per_head"]
    n, d = table["n"], table["d"]
    assert n * n * d == table["qk"] == table["av"]
    q = np.broadcast_to(np.float32(0.0), (n, d))
    assert clearhead.plan(q, q, q).flops == 2 * (table["qk"] + table["av"])


# The class of four steps


@pytest.mark.parametrize(
    "mask",
    [None, clearhead.window(2) & clearhead.lengths([11, 3]), create_padding_mask([13, 2], 13)],
    ids=["none", "value", "array"],
)
def test_class_is_attention(mask: Any, lightly: Any) -> None:
    # six query heads over three key heads, and more keys than queries
    q, k, v = (lightly(random(2, *shape)) for shape in ((6, 7, 4), (3, 13, 4), (3, 13, 5)))
    seen = clearhead.observe(q, k, v, mask=mask, weights=True)
    output, weights = ScaledDotProductAttention(4)(q, k, v, mask)
    assert type(output) is type(q)
    same(output, seen.output)
    same(weights, seen.weights)


def test_steps_compose_to_forward_under_a_mask(lightly: Any) -> None:
    q, k, v = map(lightly, random(3, 2, 5, 4))
    attend = ScaledDotProductAttention(4)
    mask = lightly(create_causal_mask(5))
    weights = attend.compute_weights(attend.scale_scores(attend.compute_scores(q, k)), mask)
    output, at_once = attend(q, k, v, mask)
    same(weights, at_once)
    same(attend.compute_output(weights, v), output)


def test_query_that_may_attend_to_nothing_has_zeros(convert: Any) -> None:
    q, k, v = map(convert, random(3, 5, 4))
    mask = create_causal_mask(5)
    mask[2] = False
    output, weights = ScaledDotProductAttention(4)(q, k, v, mask)
    assert not to_numpy(weights)[2].any()
    assert not to_numpy(output)[2].any()


def test_padding_may_be_nan(convert: Any) -> None:
    k = random(7, 4)
    k[5:] = np.nan
    q, k, v = map(convert, (random(3, 4, seed=1), k, k.copy()))
    output, weights = ScaledDotProductAttention(4)(q, k, v, clearhead.lengths(5))
    assert np.isfinite(to_numpy(output)).all()
    assert not to_numpy(weights)[:, 5:].any()


def test_half_precision_is_summed_in_float32() -> None:
    q, k, v = (torch.tensor(a, dtype=torch.bfloat16) for a in random(3, 2, 5, 4))
    output, weights = ScaledDotProductAttention(4)(q, k, v)
    assert (output.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(output, clearhead.attention(q, k, v))


def test_torch_gradients_flow() -> None:
    q, k, v = (torch.tensor(a, requires_grad=True) for a in random(3, 5, 4))
    ScaledDotProductAttention(4)(q, k, v, clearhead.causal())[0].sum().backward()
    expected = clearhead.gradients(*(a.detach() for a in (q, k, v, torch.ones_like(q))), mask=clearhead.causal())
    for array, gradient in zip((q, k, v), expected, strict=True):
        np.testing.assert_allclose(to_numpy(array.grad), to_numpy(gradient), rtol=0, atol=1e-13)


def test_explain_is_the_same_text_in_every_library(convert: Any) -> None:
    example = EXAMPLES["cat_sat"]
    attend = ScaledDotProductAttention(4)
    expected = attend.explain(example.q, example.k, example.v, "cat", example.tokens)
    assert attend.explain(*map(convert, (example.q, example.k, example.v)), 1, example.tokens) == expected


def test_explain_says_what_is_masked() -> None:
    example = EXAMPLES["cat_sat"]
    text = ScaledDotProductAttention(4).explain(
        example.q, example.k, example.v, -4, example.tokens, mask=clearhead.causal()
    )
    assert text.count("masked") == 3
    assert "The  0.8176  " + "█" * 33 in text
    assert "mat  0.0000\n" in text
    assert text.endswith("[0.8176, 0.1824, 0.0000, 0.0000]")


def test_explain_names_a_query_by_position_where_tokens_are_of_the_keys() -> None:
    example = EXAMPLES["it_animal"]
    text = ScaledDotProductAttention(2).explain(example.q, example.k, example.v, 0, example.tokens)
    assert text.startswith("Attention of query 0 over 3 keys, d_k = 2")
    assert "animal   10.0000\n   street    7.0000" in text
    assert "[1.7801, 1.3672]" in text


# Many heads


def projected(layer: MultiHeadAttention, query: Any, key: Any, value: Any, dtype: Any) -> tuple[Any, Any]:
    """Multi-head attention for one sequence in NumPy: a loop over heads, with slices in place of reshapes."""
    query, key, value, w_q, w_k, w_v, w_o = (
        a.astype(dtype) for a in (query, key, value, layer.w_q, layer.w_k, layer.w_v, layer.w_o)
    )
    outputs, weights = [], []
    for head in range(layer.num_heads):
        part = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
        scores = (query @ w_q[:, part]) @ (key @ w_k[:, part]).T / dtype(math.sqrt(layer.head_dim))
        exponentials = np.exp(scores - scores.max(-1, keepdims=True))
        weights.append(exponentials / exponentials.sum(-1, keepdims=True))
        outputs.append(weights[-1] @ (value @ w_v[:, part]))
    return np.concatenate(outputs, axis=-1) @ w_o, np.stack(weights)


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_multi_head_attention_is_its_definition(cross: bool, convert: Any) -> None:
    layer = MultiHeadAttention(21, 3, seed=5)
    shapes = [(2, 5, 21), (2, 7, 21), (2, 7, 21)] if cross else [(2, 5, 21)]
    given = [random(*shape, seed=i).astype(np.float32) for i, shape in enumerate(shapes)]
    output, weights = layer(*map(convert, given))
    assert (output.shape, weights.shape) == ((2, 5, 21), (2, 3, 5, 7 if cross else 5))
    for row in range(2):
        alone = [array[row] for array in (given if cross else given * 3)]
        exact, plain = (projected(layer, *alone, dtype) for dtype in (np.float64, np.float32))
        for found, i in ((output, 0), (weights, 1)):
            close(found[row, ...], exact[i], plain[i])
            close(layer(*map(convert, alone))[i], exact[i], plain[i])


def test_multi_head_attention_is_pytorchs() -> None:
    layer = MultiHeadAttention(21, 3, like=torch.zeros(1, dtype=torch.float64))
    theirs = torch.nn.MultiheadAttention(21, 3, bias=False, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(
        {"in_proj_weight": torch.cat([layer.w_q.T, layer.w_k.T, layer.w_v.T]), "out_proj.weight": layer.w_o.T}
    )
    query, key = torch.tensor(random(2, 5, 21)), torch.tensor(random(2, 7, 21, seed=1))
    padding = create_padding_mask([7, 4], 7)
    output, weights = layer(query, key, mask=padding)
    expected = theirs(query, key, key, key_padding_mask=torch.tensor(~padding[:, 0, 0]), average_attn_weights=False)
    np.testing.assert_allclose(to_numpy(output), to_numpy(expected[0]), rtol=0, atol=1e-13)
    np.testing.assert_allclose(to_numpy(weights), to_numpy(expected[1]), rtol=0, atol=1e-14)


def test_multi_head_masks(lightly: Any) -> None:
    layer = MultiHeadAttention(12, 2)
    x = lightly(random(2, 5, 12))
    by_value, by_array = (layer(x, mask=mask) for mask in (clearhead.causal(), create_causal_mask(5)))
    same(by_value[0], by_array[0])
    assert not np.triu(to_numpy(by_value[1]), 1).any()
    padded = layer(x, mask=create_padding_mask([5, 2], 5))[1]
    assert not to_numpy(padded)[1, :, :, 2:].any()


def test_projections_follow_their_seed_and_bound() -> None:
    first, again, other = (MultiHeadAttention(24, 4, seed=seed) for seed in (3, 3, 4))
    bound = math.sqrt(6 / 48)
    for name in ("w_q", "w_k", "w_v", "w_o"):
        matrix = getattr(first, name)
        assert matrix.shape == (24, 24)
        assert 0.9 * bound < np.abs(matrix).max() <= bound
        assert (matrix == getattr(again, name)).all()
        assert (matrix != getattr(other, name)).any()
    assert (first.w_q != first.w_k).any()


def test_projections_are_like_an_array(lightly: Any) -> None:
    like = lightly(np.zeros(2, dtype=np.float32))
    layer = MultiHeadAttention(6, 2, like=like)
    assert type(layer.w_q) is type(like)
    assert layer.w_o.dtype == like.dtype
    output, _ = layer(lightly(random(5, 6).astype(np.float32)))
    assert output.dtype == like.dtype


def test_projections_can_be_learned_in_pytorch() -> None:
    layer = MultiHeadAttention(6, 2, like=torch.zeros(1))
    parameters = [layer.w_q, layer.w_k, layer.w_v, layer.w_o]
    for parameter in parameters:
        parameter.requires_grad_()
    layer(torch.ones(2, 5, 6) * torch.arange(5.0)[:, None])[0].sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)


def test_heads_split_and_merge(convert: Any) -> None:
    layer = MultiHeadAttention(6, 3)
    x = random(2, 5, 6)
    split = layer.split_heads(convert(x))
    assert split.shape == (2, 3, 5, 2)
    for head in range(3):
        np.testing.assert_array_equal(to_numpy(split)[:, head], to_numpy(convert(x))[..., 2 * head : 2 * head + 2])
    np.testing.assert_array_equal(to_numpy(layer.merge_heads(split)), to_numpy(convert(x)))


def test_masks_are_writable_booleans_that_say_may_attend() -> None:
    causal, padding = create_causal_mask(4), create_padding_mask(torch.tensor([3, 0, 4]), 4)
    assert (causal == np.tril(np.ones((4, 4), bool))).all()
    assert padding[:, 0, 0].astype(int).tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    for mask, shape in ((causal, (4, 4)), (padding, (3, 1, 1, 4))):
        assert (mask.dtype, mask.shape, mask.flags.writeable) == (np.bool_, shape, True)


# Refusals

X = random(5, 6)
NUMBERS = np.ones((5, 6), dtype=np.int64)
ATTEND, LAYER = ScaledDotProductAttention(6), MultiHeadAttention(6, 2)
REFUSED = {
    "d_k: is 0, expected a whole number of at least 1": lambda: ScaledDotProductAttention(0),
    "d_k: is 2.0, expected a whole number": lambda: ScaledDotProductAttention(2.0),
    "q: has shape (5, 6), expected (…, positions, d_k = 4)": lambda: ScaledDotProductAttention(4)(X, X, X),
    "q: is a list": lambda: ATTEND([[1.0]], X, X),
    "v: has 4 positions": lambda: ATTEND(X, X, X[:4]),
    "v: has shape (4, 6), expected 5 positions": lambda: ATTEND.compute_output(X @ X.T, X[:4]),
    "mask: has dtype float64": lambda: ATTEND.compute_weights(X @ X.T, X @ X.T),
    "mask: has shape (4, 4)": lambda: ATTEND(X, X, X, create_causal_mask(4)),
    "mask: has shape (3, 3)": lambda: ATTEND.compute_weights(X @ X.T, create_causal_mask(3)),
    "scaled: has shape (6,)": lambda: ATTEND.compute_weights(X[0], clearhead.causal()),
    "scaled: has dtype int64": lambda: ATTEND.compute_weights(NUMBERS),
    "q: has shape (1, 5, 6), expected (positions, features)": lambda: ATTEND.explain(X[None], X[None], X[None], 0),
    "tokens: has 2 names, expected one for each of 5 keys": lambda: ATTEND.explain(X, X, X, 0, ["a", "b"]),
    "is 5, expected one of 0, 1, 2, 3, 4, or a position from -5 to 4": lambda: ATTEND.explain(X, X, X, 5),
    "token: is 'a', which is at [0, 2]": lambda: position_of("token", "a", ["a", "b", "a"]),
    "one of 0, 1, 2, 3, 4, 5, 6, …, or": lambda: position_of("token", "x", [str(i) for i in range(9)]),
    "num_heads: is 4, which does not divide embed_dim 6": lambda: MultiHeadAttention(6, 4),
    "seed: is -1": lambda: MultiHeadAttention(6, 2, seed=-1),
    "like: is a str": lambda: MultiHeadAttention(6, 2, like="torch"),
    "query: has shape (5, 4), expected (positions, 6) or (batch, positions, 6)": lambda: LAYER(X[:, :4]),
    "query: has dtype int64": lambda: LAYER(NUMBERS),
    "key: is torch of dtype float64, expected numpy of dtype float64": lambda: LAYER(X, torch.tensor(X)),
    "key: has shape (2, 5, 6), expected the batch of query, ()": lambda: LAYER(X, np.stack([X, X])),
    "value: has 4 positions, expected 5 as key has": lambda: LAYER(X, X, X[:4]),
    "max_length: is 2.5": lambda: create_padding_mask([1], 2.5),
    "lengths: has 5, expected 0 to max_length 4": lambda: create_padding_mask([3, 5], 4),
    "lengths: has shape ()": lambda: create_padding_mask(3, 4),
    "lengths: is [1.5], expected a whole number": lambda: create_padding_mask([1.5], 4),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(message: str) -> None:
    refused(message, REFUSED[message])
