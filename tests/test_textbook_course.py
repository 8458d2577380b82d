"""The course's own code, run as written: attention in loops and at once, its masks, its heads, its table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from texts import PUBLISHED, by_hand, near, random, tensors

from clearhead.textbook import course, course_torch

SHAPES = ["n n", "batch n n", "batch 1 1 n", "product", "none"]


def mask_of(shape: str, module: Any) -> Any:
    """A mask of 1.0 and 0.0 for two rows of five tokens, as the course makes it or has it made; or none."""
    rows = np.random.default_rng(1).random((2, 5, 5)) < 0.5
    rows[:, :, 0] = True
    return {
        "n n": module.create_causal_mask(5),
        "batch n n": rows.astype(np.float64),
        "batch 1 1 n": module.create_padding_mask([5, 2], 5),
        "product": module.create_causal_mask(5) * module.create_padding_mask([5, 2], 5),
        "none": None,
    }[shape]


def test_the_course_as_written() -> None:
    batch, n, d = 2, 5, 8
    Q, K, V = random(3, batch, n, d)
    output, weights = course.scaled_dot_product_attention(Q, K, V)
    assert (output.shape, weights.shape) == ((batch, n, d), (batch, n, n))
    assert np.allclose(weights.sum(axis=-1), 1.0)
    causal = course.create_causal_mask(n)
    assert (causal == np.tril(np.ones((n, n)))).all()
    assert causal.dtype == np.float64
    _, weights = course.scaled_dot_product_attention(Q, K, V, mask=causal)
    assert not np.triu(weights, 1).any()
    padding = course.create_padding_mask([5, 3], max_length=5)
    assert padding.shape == (2, 1, 1, 5)
    assert padding[:, 0, 0].tolist() == [[1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("convert", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_course_masks_in_loops_and_at_once(shape: str, convert: Any) -> None:
    Q, K, V = random(3, 2, 5, 4)  # as many rows in the batch as heads below: a third axis is still the batch
    mask = mask_of(shape, course)
    allowed = (
        np.ones((2, 5, 5)) if mask is None else mask.reshape(mask.shape[0], *mask.shape[-2:]) if mask.ndim > 2 else mask
    )
    exact = by_hand(Q, K, V, np.broadcast_to(allowed == 1, (2, 5, 5)))
    given = None if mask is None else convert(mask)
    for call in (course.scaled_dot_product_attention, course.scaled_dot_product_attention_loops):
        output, weights = call(*map(convert, (Q, K, V)), given)
        near(output, exact[0])
        near(weights, exact[1])


def test_course_loops_have_zeros_where_nothing_may_be_attended_to_and_padding_may_be_nan() -> None:
    Q, K, V = random(3, 1, 3, 2)
    mask = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    K[0, 2] = V[0, 2] = np.nan
    for call in (course.scaled_dot_product_attention, course.scaled_dot_product_attention_loops):
        output, weights = call(*(a.astype(np.float32) for a in (Q, K, V)), mask)
        assert output.dtype == weights.dtype == np.float32
        assert np.isfinite(output).all()
        assert not output[0, 1].any()
        assert not weights[0, 1].any()


@pytest.mark.parametrize("spelling", ["MultiHeadAttention", "MultiheadAttention"])
@pytest.mark.parametrize("module", [course, course_torch], ids=["numpy", "torch"])
def test_the_courses_heads_as_written(module: Any, spelling: str) -> None:
    mha = getattr(module, spelling)(embed_dim=12, num_heads=2)
    parameters = list(mha.parameters())
    assert len(parameters) == 8
    assert mha.head_dim == 6
    assert [tuple(p.shape) for p in parameters] == [(12, 12), (12,)] * 4
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        assert getattr(mha, name).bias.shape == (12,)
    x = random(2, 5, 12).astype(np.float32)
    x = torch.tensor(x) if module is course_torch else x
    mask = module.create_causal_mask(5)
    alone = mha.forward(x, mask=mask)
    assert tuple(alone.shape) == (2, 5, 12)
    output, weights = mha(x, x, x, mask=mask)
    assert tuple(weights.shape) == (2, 2, 5, 5)
    for other in (output, mha(x, mask), mha.forward(x, mask), mha(x, mask=mask), mha(x, x, x, mask)[0]):
        assert bool((other == alone).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("module", [course, course_torch], ids=["numpy", "torch"])
def test_the_courses_heads_are_pytorchs(module: Any, shape: str) -> None:
    theirs = torch.nn.MultiheadAttention(12, 2, batch_first=True, dtype=torch.float64)
    torch.nn.init.normal_(theirs.in_proj_bias)
    torch.nn.init.normal_(theirs.out_proj.bias)
    mha = module.MultiHeadAttention(12, 2)
    weights, biases = theirs.in_proj_weight.detach().chunk(3), theirs.in_proj_bias.detach().chunk(3)
    if module is course_torch:
        state = {"out_proj.weight": theirs.out_proj.weight.detach(), "out_proj.bias": theirs.out_proj.bias.detach()}
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            state |= {f"{name}_proj.weight": weight, f"{name}_proj.bias": bias}
        mha.double().load_state_dict(state)
    else:
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            setattr(mha, f"{name}_proj", course.Linear(weight.numpy(), bias.numpy()))
        mha.out_proj = course.Linear(theirs.out_proj.weight.detach().numpy(), theirs.out_proj.bias.detach().numpy())
    query, key, value = random(2, 5, 12), random(2, 5, 12, seed=1), random(2, 5, 12, seed=2)
    mask = mask_of(shape, module)
    hidden = None
    if mask is not None:
        pairs = np.asarray(mask)
        pairs = pairs[:, 0] if pairs.ndim == 4 else pairs
        hidden = torch.tensor(np.broadcast_to(pairs, (2, 5, 5)) == 0).repeat_interleave(2, dim=0)
    expected = theirs(*tensors(query, key, value), attn_mask=hidden, average_attn_weights=False)
    given = tensors(query, key, value) if module is course_torch else [query, key, value]
    found = mha(*given, mask=torch.tensor(mask) if module is course_torch and shape == "batch n n" else mask)
    for ours, their in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(torch.as_tensor(ours).detach()), their.detach(), rtol=0, atol=1e-14)


def test_the_courses_module_learns() -> None:
    torch.manual_seed(0)
    mha = course_torch.MultiHeadAttention(8, 2)
    output, weights = mha(*torch.randn(3, 2, 5, 8), mask=course_torch.create_padding_mask([5, 0], 5))
    (output.sum() + (weights**2).sum()).backward()
    gradients = [parameter.grad for parameter in mha.parameters()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    assert mha.q_proj.weight.grad.any()


def test_the_courses_heads_attend_from_one_row_to_a_batch() -> None:
    query, key = random(1, 3, 12), random(2, 5, 12, seed=1)
    numpy, in_torch = course.MultiHeadAttention(12, 2), course_torch.MultiHeadAttention(12, 2).double()
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        getattr(numpy, name).weight, getattr(numpy, name).bias = (
            p.detach().numpy() for p in getattr(in_torch, name).parameters()
        )
    found, expected = numpy(query, key, key), in_torch(*tensors(query, key, key))
    for ours, theirs, shape in zip(found, expected, [(2, 3, 12), (2, 2, 3, 5)], strict=True):
        assert ours.shape == shape
        near(ours, theirs.detach())


def test_the_courses_memory_table() -> None:
    table = PUBLISHED["complexity"]
    heading, *rows = (line.split() for line in course.memory_table(table["seq_len"]).splitlines())
    assert heading == ["n", "entries", "KB", "growth"]
    for row, n, entries, size in zip(rows, table["seq_len"], table["scores"], table["kilobytes"], strict=True):
        assert row[:3] == [str(n), str(entries), str(size)]
    assert [row[3] for row in rows] == ["-", *["4.0x"] * 4]
