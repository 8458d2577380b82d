"""Flax: our attention as its `attention_fn`, and what its models attended to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from budget import Expected, check
from jax.flatten_util import ravel_pytree

import clearhead as ch

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx

from clearhead.integrations import flax as ours

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 12)), jnp.float32)
CAUSAL = nnx.make_causal_mask(jnp.ones((2, 7)))
EPS = float(np.finfo(np.float32).eps)


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


def wide(tree: Any) -> Any:
    """The same numbers in float64."""
    return jax.tree.map(lambda a: a.astype(np.float64) if getattr(a, "dtype", None) == np.float32 else a, tree)


def widened(model: Any) -> Any:
    """The same module of nnx in float64."""
    structure, state = nnx.split(model)
    return nnx.merge(structure, wide(state))


def held(got: Any, plain: Any, exact: Any, terms: int = X.shape[1]) -> None:
    """Within the error that `budget.py` derives from what Flax gives in float32 and in float64."""
    assert (got.dtype, exact.dtype) == (np.float32, np.float64)
    check(got, Expected(*map(np.asarray, (exact, plain)), EPS), terms, "")


def total(model: Any) -> Any:
    x = X.astype(jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype)
    return (model(x) ** 2).sum()


def weights_of(layer: Any, x: Any) -> Any:
    """The weights that a layer of nnx sows."""
    layer(x, mask=CAUSAL, sow_weights=True)
    return nnx.pop(layer, nnx.Intermediate)["attention_weights"].get_value()[0]


def test_as_attention_fn_it_gives_what_flax_gives() -> None:
    exact = widened(Decoder())(wide(X))
    held(Decoder(ours.attention)(X), Decoder()(X), exact)
    # as one vector: the gradient of a key's bias is 0, what is left of terms that cancel and are as large as those of
    # the others; each is a sum over all positions
    models = (Decoder(ours.attention), Decoder(), widened(Decoder()))
    slopes = [ravel_pytree(nnx.to_pure_dict(nnx.jit(nnx.grad(total))(model)))[0] for model in models]
    held(*slopes, X.shape[0] * X.shape[1])
    parameters = Linen().init(jax.random.key(0), X)
    got = jax.jit(Linen(ours.attention).apply)(parameters, X)
    held(got, Linen().apply(parameters, X), Linen().apply(wide(parameters), wide(X)))


# by Flax's own layers, too: weights are to be sown inside of nnx.capture, which older versions have not
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_dropout_and_sown_weights() -> None:
    q = X.reshape(2, 7, 3, 4)
    options = {"dropout_rng": jax.random.key(1), "dropout_rate": 0.5, "mask": CAUSAL}
    one, again = (ours.attention(q, q, q, **options) for _ in range(2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - ours.attention(q, q, q, mask=CAUSAL, deterministic=True)).max() > 0.1
    mine, own = (Decoder(*given).layers[0] for given in ((ours.attention,), ()))
    weights = weights_of(mine, X)
    held(weights, weights_of(own, X), weights_of(widened(own), wide(X)))
    assert not np.triu(weights[0, 0], 1).any()


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("how", ["as it is", "under jit", "differentiated"])
def test_watched_models_of_nnx(how: str) -> None:
    model = Decoder()
    plain, exact = model(X), widened(model)(wide(X))
    run = {
        "as it is": lambda: model(X),
        "under jit": lambda: nnx.jit(lambda model, x: model(x))(model, X),
        "differentiated": lambda: nnx.value_and_grad(total)(model)[0],
    }[how]
    with ours.watch(model, want={"weights": True, "keep": True, "top": 2}, tokens=list("abcdefg")) as seen:
        got = [run(), run()]
    if how == "differentiated":
        held(got[1], (plain**2).sum(), (exact**2).sum(), X.size)
    else:
        held(got[1], plain, exact)
    assert [(call.name, call.step, call.layer) for call in seen] == [
        ("layers.0", 0, 0), ("layers.1", 0, 1), ("layers.0", 1, 0), ("layers.1", 1, 1),
    ]  # fmt: skip
    assert not seen.missed
    assert type(seen[0].weights) is np.ndarray
    plain, exact = weights_of(model.layers[0], X), weights_of(widened(model).layers[0], wide(X))
    held(seen[0].weights, plain, exact)
    held(seen[0].rows([3]), plain[..., [3], :], exact[..., [3], :])
    assert not np.triu(seen[1].weights[0, 0], 1).any()
    assert seen[0].queries_named == (tuple("abcdefg"),)
    assert isinstance(seen, ch.Seen)
    assert len(seen.step(0)) == 2
    assert all(layer.attention_fn is nnx.dot_product_attention for layer in model.layers)


def test_watched_models_of_linen(tmp_path: Any) -> None:
    model = Linen()
    parameters = model.init(jax.random.key(0), X)
    with ch.watch(model) as seen:
        plain = model.apply(parameters, X)
    with ch.watch(model) as in_full:
        exact = model.apply(wide(parameters), wide(X))
    assert [(call.name, call.layer) for call in seen] == [
        ("Block_0.MultiHeadDotProductAttention_0", 0), ("Block_1.MultiHeadDotProductAttention_0", 1),
    ]  # fmt: skip
    assert "Block_1" in str(seen)
    assert "entropy" in str(seen.summary())
    with ours.watch(model, layers=1, heads=[2, 0], want={"received": True}) as some:
        got = jax.jit(model.apply)(parameters, X)
    held(got, plain, exact)
    assert len(some) == 1
    held(some[0].received, *(of[1].received[:, [2, 0]] for of in (seen, in_full)))
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
