"""Flax: our attention as its `attention_fn`, and what its models attended to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clearhead as ch

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx

from clearhead.integrations import flax as ours

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 12)), jnp.float32)
CAUSAL = nnx.make_causal_mask(jnp.ones((2, 7)))


class Decoder(nnx.Module):
    def __init__(self, attention_fn: Any = nnx.dot_product_attention) -> None:
        rngs = nnx.Rngs(0)
        some = [nnx.MultiHeadAttention(3, 12, decode=False, attention_fn=attention_fn, rngs=rngs) for _ in range(2)]
        self.layers = nnx.List(some)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x, mask=CAUSAL)
        return x


class Block(linen.Module):
    attention_fn: Any = linen.dot_product_attention

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return x + linen.MultiHeadDotProductAttention(3, attention_fn=self.attention_fn)(x, mask=CAUSAL)


class Linen(linen.Module):
    attention_fn: Any = linen.dot_product_attention

    @linen.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(2):
            x = Block(self.attention_fn)(x)
        return x


def test_as_attention_fn_it_gives_what_flax_gives() -> None:
    np.testing.assert_allclose(Decoder(ours.attention)(X), Decoder()(X), atol=2e-6)
    slopes = [nnx.jit(nnx.grad(lambda model: (model(X) ** 2).sum()))(Decoder(*own)) for own in ((), (ours.attention,))]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), *map(nnx.to_pure_dict, slopes))
    parameters = Linen().init(jax.random.key(0), X)
    expected = Linen().apply(parameters, X)
    np.testing.assert_allclose(jax.jit(Linen(ours.attention).apply)(parameters, X), expected, atol=2e-6)


# by Flax's own layers, too: weights are to be sown inside of nnx.capture, which older versions have not
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_dropout_and_sown_weights() -> None:
    q = X.reshape(2, 7, 3, 4)
    options = {"dropout_rng": jax.random.key(1), "dropout_rate": 0.5, "mask": CAUSAL}
    one, again = (ours.attention(q, q, q, **options) for _ in range(2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - ours.attention(q, q, q, mask=CAUSAL, deterministic=True)).max() > 0.1
    layer = nnx.MultiHeadAttention(3, 12, decode=False, attention_fn=ours.attention, rngs=nnx.Rngs(0))
    layer(X, mask=CAUSAL, sow_weights=True)
    (weights,) = nnx.pop(layer, nnx.Intermediate)["attention_weights"].get_value()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert not np.triu(weights[0, 0], 1).any()


@pytest.mark.parametrize("how", ["as it is", "under jit", "differentiated"])
def test_watched_models_of_nnx(how: str) -> None:
    model = Decoder()
    expected = model(X)
    run = {
        "as it is": lambda: model(X),
        "under jit": lambda: nnx.jit(lambda model, x: model(x))(model, X),
        "differentiated": lambda: nnx.value_and_grad(lambda m: (m(X) ** 2).sum())(model)[0],
    }[how]
    with ours.watch(model, want={"weights": True, "keep": True, "top": 2}, tokens=list("abcdefg")) as seen:
        got = [run(), run()]
    np.testing.assert_allclose(got[1], (expected**2).sum() if how == "differentiated" else expected, rtol=1e-5)
    assert [(call.name, call.step, call.layer) for call in seen] == [
        ("layers.0", 0, 0), ("layers.1", 0, 1), ("layers.0", 1, 0), ("layers.1", 1, 1),
    ]  # fmt: skip
    assert not seen.missed
    assert type(seen[0].weights) is np.ndarray
    np.testing.assert_allclose(seen[0].weights.sum(-1), 1, atol=1e-6)
    assert not np.triu(seen[1].weights[0, 0], 1).any()
    np.testing.assert_allclose(seen[0].rows([3]), seen[0].weights[..., [3], :], atol=1e-6)
    assert seen[0].queries_named == (tuple("abcdefg"),)
    assert isinstance(seen, ch.Seen)
    assert len(seen.step(0)) == 2
    assert all(layer.attention_fn is nnx.dot_product_attention for layer in model.layers)


def test_watched_models_of_linen(tmp_path: Any) -> None:
    model = Linen()
    parameters = model.init(jax.random.key(0), X)
    with ch.watch(model) as seen:
        expected = model.apply(parameters, X)
    assert [(call.name, call.layer) for call in seen] == [
        ("Block_0.MultiHeadDotProductAttention_0", 0), ("Block_1.MultiHeadDotProductAttention_0", 1),
    ]  # fmt: skip
    assert "Block_1" in str(seen)
    assert "entropy" in str(seen.summary())
    with ours.watch(model, layers=1, heads=[2, 0], want={"received": True}) as some:
        got = jax.jit(model.apply)(parameters, X)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert len(some) == 1
    np.testing.assert_allclose(some[0].received, seen[1].received[:, [2, 0]], atol=1e-5)
    some.save(tmp_path / "seen.safetensors")
    np.testing.assert_array_equal(ch.Seen.load(tmp_path / "seen.safetensors")[0].received, some[0].received)


def test_what_cannot_be_seen_is_said() -> None:
    def other(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return nnx.dot_product_attention(query, key, value, **options) * 2

    def same(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return nnx.dot_product_attention(query, key, value, **options)

    for own, said in ((other, "gives another output than the formula"), (same, None)):
        model = Decoder(own)
        with ours.watch(model) as seen:
            model(X)
        assert len(seen) == (0 if said else 2)
        assert all(said is not None and said in why for why in seen.missed.values())
    with ours.watch(model := Decoder()) as seen:
        pass
    assert seen.missed["layers.1"] == "MultiHeadAttention was not called while watch was open"
    with ours.watch(linen.Dense(3)) as seen:
        linen.Dense(3).init(jax.random.key(0), X)
    assert seen.missed[""].startswith("Dense called no MultiHeadAttention of Flax")
    with pytest.raises(ch.ArgumentError, match=r"model: is a int, expected a module of flax.nnx or flax.linen"):
        ours.watch(3)
    with pytest.raises(ch.ArgumentError, match="tokens: is a str, expected a list of tokens"):
        ours.watch(model, tokens="abc")
