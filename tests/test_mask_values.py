"""Masks as values: out of arrays of 1 and 0, equal and hashed by what they say, padding as tokenizers give it."""

from __future__ import annotations

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core import array_masks

SIDE = 5
LOWER = np.tri(SIDE, dtype=bool)
UPPER = np.triu(np.ones((SIDE, SIDE), bool), 1)
Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 3, SIDE, 4)).astype(np.float32)
CAUSAL = ch.attention(Q, K, V, mask=ch.causal())
KERNELS = ("compiled", "tiled", "dense")
KINDS = {
    "bool": LOWER,
    "int64": LOWER.astype(np.int64),
    "uint8": LOWER.astype(np.uint8),
    "float32": LOWER.astype(np.float32),
    "torch int64": torch.tensor(LOWER).long(),
    "torch bfloat16": torch.tensor(LOWER).bfloat16(),
    "jax int32": jnp.asarray(LOWER.astype(np.int32)),
    "jax float32": jnp.asarray(LOWER.astype(np.float32)),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("array", KINDS.values(), ids=KINDS)
def test_zeros_and_ones_say_either(array, kernel: str) -> None:
    for mask in (ch.lets(array), ch.hides(1 - array if "bool" not in str(array.dtype) else ~array)):
        got = ch.attention(Q, K, V, mask=mask, kernel=kernel)
        np.testing.assert_array_equal(got, ch.attention(Q, K, V, mask=ch.where(LOWER), kernel=kernel))
        np.testing.assert_allclose(got, CAUSAL, atol=1e-6)


def test_a_triangle_that_is_upside_down_is_refused_and_nothing_else_is() -> None:
    for diagonal in (0, 1):
        upper = np.triu(np.ones((SIDE, SIDE), bool), diagonal)
        for mask in (upper, torch.tensor(upper), np.broadcast_to(upper, (2, 1, SIDE, SIDE))):
            with pytest.raises(ch.ArgumentError, match="mirror image of causal"):
                ch.attention(*map(torch.tensor, (Q, K, V)), mask=mask)
        for said in (ch.where(upper), ch.lets(upper), ch.hides(~upper)):
            assert np.isfinite(ch.attention(Q, K, V, mask=said)).all()
        # PyTorch's own function takes it as it is
        t = [torch.tensor(a) for a in (Q, K, V)]
        mine = ch.nn.functional.scaled_dot_product_attention(*t, attn_mask=torch.tensor(upper))
        theirs = torch.nn.functional.scaled_dot_product_attention(*t, attn_mask=torch.tensor(upper))
        torch.testing.assert_close(mine, theirs)
    other = UPPER.copy()
    other[3, 1] = True
    for mask in (LOWER, other, ~other, np.ones((SIDE, SIDE), bool), np.stack([UPPER, LOWER])[:, None]):
        ch.attention(Q, K, V, mask=mask)
    assert np.array_equal(ch.attention(Q, K, V, mask=ch.hides(UPPER)), ch.attention(Q, K, V, mask=LOWER))


def test_what_is_no_triangle_is_known_by_three_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_masks.np, "triu", lambda *_: pytest.fail("the whole array was compared"))
    for array in (LOWER, ~LOWER.T, np.ones((4096, 4096), bool), np.zeros((4096, 4096), bool), np.eye(7, dtype=bool)):
        assert not array_masks.is_mirrored(ch.where(array))


MADE_TWICE = {
    "causal": lambda: ch.causal(),
    "aligned": lambda: ch.window(3, 1, align="start"),
    "offsets": lambda: ch.causal(offset=[1, 2]),
    "lengths": lambda: ch.lengths(np.array([3, 1])),
    "documents": lambda: ch.documents([0, 0, 1], queries=[0]),
    "tokens": lambda: ch.global_tokens(range(3)),
    "random": lambda: ch.random_blocks(4, count=2, seed=3),
    "array": lambda: ch.where(LOWER.copy()),
    "padding": lambda: ch.padding(torch.ones(2, 3, dtype=torch.int64)),
    "composed": lambda: (ch.causal() & ~ch.lengths([3, 1])) | ch.prefix(2),
}


def test_masks_are_equal_where_they_are_made_alike() -> None:
    made = [make() for make in MADE_TWICE.values()]
    again = [make() for make in MADE_TWICE.values()]
    for i, left in enumerate(made):
        for j, right in enumerate(again):
            assert (left == right) is (i == j)
            assert (left != right) is (i != j)
        assert hash(left) == hash(again[i])
    assert len({*made, *again}) == len(made)
    assert ch.lengths([3, 1]) != ch.lengths([3, 2])
    assert ch.causal() != ch.causal(align="start")
    assert ch.where(LOWER) != ch.where(~LOWER)
    assert ch.causal() != 3
    assert ch.lengths(3) == ch.lengths(np.int32(3))


def test_a_mask_that_was_hashed_keeps_its_numbers() -> None:
    array, counts = LOWER.copy(), np.array([3, 1])
    mask = ch.where(array) & ch.causal(offset=counts)
    array[0, 1] = True
    assert mask == ch.where(array) & ch.causal(offset=counts) != ch.where(LOWER) & ch.causal(offset=counts)
    known, written = {mask: "as it was"}, array.copy()
    array[:], counts[:] = False, 0
    assert known[mask] == "as it was"
    assert mask == ch.where(written) & ch.causal(offset=[3, 1])
    got = ch.attention(Q, K, V, mask=mask)
    assert np.array_equal(got, ch.attention(Q, K, V, mask=ch.where(written) & ch.causal(offset=[3, 1])))


def test_no_numbers_are_read_where_that_would_wait() -> None:
    tensor = torch.ones(3, 3, dtype=torch.bool, device="meta")
    mask, other = ch.where(tensor), ch.where(torch.ones(3, 3, dtype=torch.bool, device="meta"))
    assert mask == ch.where(tensor) != other
    assert hash(mask) == hash(ch.where(tensor))


class Odd(ch.Mask):
    """No dataclass: it may depend on anything."""


def test_a_mask_that_is_no_dataclass_is_equal_to_itself() -> None:
    odd = Odd()
    assert odd == odd != Odd()
    assert {odd: 1}[odd] == 1


LEFT = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
RIGHT = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
FORMS = {
    "list": list,
    "numpy": np.array,
    "numpy bool": lambda a: np.array(a, bool),
    "torch": torch.tensor,
    "torch bool": lambda a: torch.tensor(a).bool(),
    "jax": jnp.asarray,
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("real", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_padding_is_taken_as_a_tokenizer_gives_it(form, real, kernel: str) -> None:
    got = ch.attention(Q, K, V, mask=ch.padding(form(real)) & ch.causal(), kernel=kernel)
    for row, there in enumerate(real):
        chosen = np.flatnonzero(there)
        alone = ch.attention(*(a[row][:, chosen] for a in (Q, K, V)), mask=ch.causal(), kernel=kernel)
        np.testing.assert_allclose(got[row][:, chosen], alone, atol=2e-6)


def test_padding_is_compiled_and_exported() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, attention_mask):
            return ch.attention(q, k, v, mask=ch.causal() & ch.padding(attention_mask))

    tensors = [torch.tensor(a) for a in (Q, K, V)]
    left, right = torch.tensor(LEFT), torch.tensor(RIGHT)
    compiled = torch.compile(Layer(), fullgraph=True, backend="eager")
    exported = torch.export.export(Layer(), (*tensors, right)).module()
    for run in (compiled, exported):
        for real in (left, right):
            torch.testing.assert_close(run(*tensors, real), Layer()(*tensors, real))


def test_an_argument_that_is_only_refused_is_not_shown() -> None:
    for function in (ch.attention, ch.observe, ch.gradients, ch.nn.MultiHeadAttention.forward):
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            function(*(None,) * (4 if function is ch.gradients else 3), colour=1)
    with pytest.raises(TypeError):  # as an unknown argument is everywhere
        ch.attention(Q, K, V, is_causal=True)


def test_explaining_needs_no_sizes_where_the_mask_has_them() -> None:
    assert ch.where(LOWER).explain(1, 2).startswith("query 1 may not attend to key 2")
    assert (ch.where(np.ones((3, 5), bool)) & ch.causal()).explain(0, 3) == (
        "query 0 may not attend to key 3: causal() lets position 2 see keys up to 2"
    )
    assert (ch.window(2) | ch.global_tokens([20])).explain(7, 5).startswith("query 7 may attend to key 5: window(2)")


@pytest.mark.parametrize("real", [[[1], [0]], [0], [[1, 1], [1, 0]], [1, 1, 0, 1]])
def test_padding_is_not_stretched_over_keys(real: list) -> None:
    q = np.ones((2, 1, 3, 4))
    with pytest.raises(ch.ArgumentError, match=r"padding: has \d keys in a row, expected 3"):
        ch.attention(q, q, q, mask=ch.padding(real))
    with pytest.raises(ch.ArgumentError, match="expected 3"):
        ch.attention(q, q, q, mask=ch.causal() & ch.padding(real))


def test_an_array_says_how_many_keys_there_are() -> None:
    for mask, batch in ((ch.padding([1, 0, 1]), ()), (ch.padding([[1, 0, 1]]), (1,))):
        assert mask.explain(5, 1, batch=batch).startswith("query 5 may not attend to key 1")
