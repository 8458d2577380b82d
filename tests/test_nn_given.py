"""What people hand to the layers: padding, masks by batch row, PyTorch's arguments, and pairs that they expect back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.nn import (
    DifferentialAttention,
    KVCache,
    LatentAttention,
    MultiHeadAttention,
    ScaledDotProductAttention,
    TransformerBlock,
)

BATCH, HEADS, N, WIDTH = 3, 2, 5, 8
X = torch.randn(BATCH, N, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
HIDDEN = torch.tensor([[False] * 5, [False, False, False, True, True], [True, False, False, False, True]])


def layer(**options) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(WIDTH, HEADS, **options).double().eval()


def test_key_padding_mask_is_pytorchs() -> None:
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64).eval()
    mine = layer()
    mine.load_state_dict(theirs.state_dict())
    output, weights = theirs(X, X, X, key_padding_mask=HIDDEN, average_attn_weights=False)
    got, seen = mine(X, key_padding_mask=HIDDEN, return_weights=True)
    torch.testing.assert_close(got, output)
    torch.testing.assert_close(seen, weights)
    torch.testing.assert_close(mine(X, mask=ch.padding(~HIDDEN)), output)
    torch.testing.assert_close(mine(X, mask=ch.padding((~HIDDEN).long())), output)
    torch.testing.assert_close(mine(X[0], key_padding_mask=HIDDEN[1]), mine(X[:1], key_padding_mask=HIDDEN[1:2])[0])
    both = mine(X, mask=ch.causal(), key_padding_mask=HIDDEN)
    torch.testing.assert_close(both, mine(X, mask=ch.causal() & ch.padding(~HIDDEN)))
    decoding = layer(causal=True)
    with torch.no_grad():
        cache = KVCache()
        parts = [decoding(X[:, i : i + 1], cache=cache, key_padding_mask=HIDDEN[:, : i + 1]) for i in range(N)]
        torch.testing.assert_close(torch.cat(parts, 1), decoding(X, key_padding_mask=HIDDEN))


def test_a_pair_is_asked_for() -> None:
    attend, single = layer(dropout=0.5), ScaledDotProductAttention(WIDTH)
    q = X[:, None]
    for module, given in ((attend, (X[:2],)), (single, (q, q, q))):
        one = module(*given)
        assert isinstance(one, torch.Tensor)
        output, weights = module(*given, return_weights=True)
        torch.testing.assert_close(output, one)
        _, seen = module(*given, observe={"weights": True})
        torch.testing.assert_close(weights, seen.weights)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert "return_weights" in str(module.forward.__doc__)
        with pytest.raises(ch.ArgumentError, match="return_weights: is given together with observe"):
            module(*given, observe={"weights": True}, return_weights=True)
    output, weights = attend(X[0], return_weights=True)
    assert output.shape == (N, WIDTH)
    assert weights.shape == (HEADS, N, N)
    # a batch of two still comes apart, which is said where it is called; PyTorch's tensors cannot tell
    assert len(attend(X[:2])) == 2


LAYERS = {
    "multi-head": lambda: layer(),
    "latent": lambda: LatentAttention(WIDTH, HEADS, kv_rank=4, head_dim=4, causal=False).double(),
    "differential": lambda: DifferentialAttention(WIDTH, HEADS, causal=False).double(),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_rows_of_a_batch_are_never_taken_for_queries(make) -> None:
    attend = make()
    real = torch.rand(N, N, generator=torch.Generator().manual_seed(1)) < 0.7
    real[:, 0] = True
    square = torch.randn(N, N, WIDTH, dtype=torch.float64)
    with pytest.raises(ch.ArgumentError) as refusal:
        attend(square, mask=real)
    assert str(refusal.value) == (
        "mask: has shape (5, 5), one row for each of 5 batch rows or for each of 5 queries: give padding(mask) for the"
        " first, mask[None] for the second"
    )
    by_row, by_query = attend(square, mask=ch.padding(real)), attend(square, mask=real[None])
    torch.testing.assert_close(by_row[1], attend(square[1:2], mask=real[1][None])[0])
    torch.testing.assert_close(by_query, attend(square, mask=ch.where(real)))
    assert not torch.allclose(by_row, by_query)
    with pytest.raises(ch.ArgumentError) as refusal:
        attend(X, mask=real[:BATCH])
    assert str(refusal.value) == (
        "mask: has shape (3, 5), one row for each of 3 batch rows, expected one for each of 5 queries: padding(mask)"
        " means the first"
    )
    torch.testing.assert_close(attend(X, mask=real), attend(X, mask=ch.where(real)))  # nothing else it could be


def test_batch_rows_are_never_taken_for_heads() -> None:
    attend, real = layer(), torch.ones(HEADS, N, N, dtype=torch.bool).tril()
    with pytest.raises(ch.ArgumentError, match=r"2 batch rows or for each of 2 heads: give mask\[:, None\]"):
        attend(X[:HEADS], mask=real)
    torch.testing.assert_close(attend(X[:HEADS], mask=real[:, None]), attend(X[:HEADS], mask=ch.causal()))
    with pytest.raises(ch.ArgumentError, match=r"expected an axis for heads after it: give mask\[:, None\]"):
        attend(X, mask=real[:1].expand(BATCH, -1, -1))
    single, q = ScaledDotProductAttention(WIDTH), torch.randn(N, HEADS, N, WIDTH)
    with pytest.raises(ch.ArgumentError, match="5 batch rows or for each of 5 queries"):
        single(q, q, q, mask=real[0])


def test_an_upside_down_triangle_is_refused_by_layers_too() -> None:
    with pytest.raises(ch.ArgumentError, match="mirror image of causal"):
        layer()(X, mask=torch.triu(torch.ones(N, N), 1).bool())


FOREIGN = {
    "is_causal: is no argument of MultiHeadAttention.forward: give causal=True where the layer is made, or"
    " mask=causal()": lambda: layer()(X, is_causal=True),
    "attn_mask: is no argument of MultiHeadAttention.forward: give mask=, True where a query may attend": (
        lambda: layer()(X, attn_mask=None)
    ),
    "need_weights: is no argument of MultiHeadAttention.forward: give return_weights=True": (
        lambda: layer()(X, X, X, need_weights=False)
    ),
    "need_weights: is no argument of ScaledDotProductAttention.forward: give return_weights=True": (
        lambda: ScaledDotProductAttention(WIDTH)(X, X, X, need_weights=True)
    ),
    "batch_first: is no argument of MultiHeadAttention: leave it out, for batch always comes first": (
        lambda: layer(batch_first=True)
    ),
    "key_padding_mask: is float32, expected bool, True where a key is padding; mask=padding(…) has 1 for tokens": (
        lambda: layer()(X, key_padding_mask=torch.zeros(BATCH, N))
    ),
    "key_padding_mask: has shape (3, 1, 5), expected (batch, keys)": (
        lambda: layer()(X, key_padding_mask=HIDDEN[:, None])
    ),
    "return_weights: is 1, expected True or False": lambda: layer()(X, return_weights=1),
}


@pytest.mark.parametrize(("text", "mistake"), FOREIGN.items(), ids=list(range(len(FOREIGN))))
def test_arguments_of_other_layers_are_answered(text: str, mistake) -> None:
    with pytest.raises(ch.ArgumentError) as refusal:
        mistake()
    assert str(refusal.value) == text


@pytest.mark.parametrize("window", [0, 1, 4, 9])
@pytest.mark.parametrize("prompt", [1, 3, 8])
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_window_means_the_same_in_a_layer_and_in_its_cache(window: int, prompt: int, sinks: int) -> None:
    length = 13
    x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    attend = layer(window=window, positions=ch.rotary())
    with torch.no_grad():
        cache = KVCache(window=window, sinks=sinks)
        parts = [attend(x[:, :prompt], cache=cache)]
        parts += [attend(x[:, i : i + 1], cache=cache) for i in range(prompt, length)]
        whole = attend(x)
        torch.testing.assert_close(torch.cat(parts, 1), whole)
        # and as the mask of that name
        torch.testing.assert_close(whole, layer(positions=ch.rotary())(x, mask=ch.window(window)))


def test_global_tokens_to_come_are_none_yet() -> None:
    attend, mask = layer(causal=True), ch.window(1) | ch.global_tokens([3])
    with torch.no_grad():
        cache = KVCache()
        parts = [attend(X[:, i : i + 1], cache=cache, mask=mask) for i in range(N)]
        torch.testing.assert_close(torch.cat(parts, 1), attend(X, mask=mask))
    assert np.array_equal((ch.causal() & mask).dense(N)[0][3], [1, 1, 1, 1, 0])


def test_padding_speaks_of_every_key() -> None:
    decoding = layer(causal=True)
    with torch.no_grad():
        for wrong in (HIDDEN[:, :1], HIDDEN[:, : N - 1], HIDDEN[:2], HIDDEN[0, :1]):
            cache = KVCache()
            decoding(X[:, : N - 1], cache=cache, key_padding_mask=HIDDEN[:, : N - 1])
            shape = tuple(wrong.shape)
            with pytest.raises(ch.ArgumentError, match="key_padding_mask: has shape") as refused:
                decoding(X[:, N - 1 :], cache=cache, key_padding_mask=wrong)
            assert f"has shape {shape}, expected {(BATCH, N)[-len(shape) :]}" in str(refused.value)
            last = decoding(
                X[:, N - 1 :], cache=cache, key_padding_mask=HIDDEN
            )  # which what is refused has not changed
            torch.testing.assert_close(last, decoding(X, key_padding_mask=HIDDEN)[:, N - 1 :])
        one = layer()(X, key_padding_mask=HIDDEN[1:2])  # one row for all of them is a row for each
        torch.testing.assert_close(one, layer()(X, key_padding_mask=HIDDEN[1:2].expand(BATCH, -1)))


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_rows_of_a_batch_are_no_rows_of_queries(kind) -> None:
    single, q = ScaledDotProductAttention(WIDTH), X[:, None, :3]
    for keys, said in ((X[:, None], "padding"), (X[:, None, :3], "padding")):
        with pytest.raises(ch.ArgumentError, match=said):
            single(q, keys, keys, mask=kind([[True] * keys.shape[-2]] * BATCH))


def test_advice_of_the_layer_without_projections_can_be_taken() -> None:
    single = ScaledDotProductAttention(WIDTH)
    for name, words in (
        ("is_causal", r"give mask=causal\(\)$"),
        ("causal", r"give mask=causal\(\)$"),
        ("key_padding_mask", r"give mask=padding\(~key_padding_mask\)"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            single(X, X, X, **{name: HIDDEN})
    with pytest.raises(TypeError, match="past_key_value"):
        single(X, X, X, past_key_value=None)
    three = X[:, :3]
    with pytest.raises(ch.ArgumentError, match="padding"):
        single(three, three, three, mask=~HIDDEN[:, :3])
    real = ch.padding(~HIDDEN)
    for mask in (real, ch.causal() & real, ~(~real | ~ch.causal())):
        by_heads = single(X[:, None], X[:, None], X[:, None], mask=mask)[:, 0]
        torch.testing.assert_close(single(X, X, X, mask=mask), by_heads)


def test_a_ring_gives_no_weights_out_of_order() -> None:
    decoding = layer(causal=True)
    with torch.no_grad():
        cache = KVCache(window=2)
        decoding(X[:, :3], cache=cache)
        with pytest.raises(ch.ArgumentError, match="return_weights: is given together with a ring"):
            decoding(X[:, 3:4], cache=cache, return_weights=True)
        _, weights = decoding(X, cache=KVCache(), return_weights=True)
        torch.testing.assert_close(weights, decoding(X, return_weights=True)[1])


OTHERS = {
    "latent": lambda: LatentAttention(WIDTH, HEADS, kv_rank=4, causal=True),
    "differential": lambda: DifferentialAttention(WIDTH, HEADS, causal=True),
    "block": lambda: TransformerBlock(WIDTH, HEADS, causal=True),
    "latent block": lambda: TransformerBlock(
        WIDTH, HEADS, attention=LatentAttention(WIDTH, HEADS, kv_rank=4, causal=True)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_layer_takes_key_padding_mask(name: str) -> None:
    torch.manual_seed(0)
    module = OTHERS[name]().double().eval()
    with torch.no_grad():
        whole = module(X, key_padding_mask=HIDDEN)
        torch.testing.assert_close(whole, module(X, mask=ch.padding(~HIDDEN)))
        cache = KVCache()
        parts = [module(X[:, i : i + 1], cache=cache, key_padding_mask=HIDDEN[:, : i + 1]) for i in range(N)]
        torch.testing.assert_close(torch.cat(parts, 1), whole)
        with pytest.raises(ch.ArgumentError, match="key_padding_mask: has shape"):
            module(X, key_padding_mask=HIDDEN[:, :1])
    with pytest.raises(ch.ArgumentError, match="attn_mask: is no argument of"):
        module(X, attn_mask=HIDDEN)
    with pytest.raises(TypeError, match="'foo'"):
        module(X, foo=1)
