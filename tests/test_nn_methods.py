"""Layers over approximations: `method=` in MultiHeadAttention and GPT, trained, decoded and refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.nn import GPT, GPTConfig, KVCache, MultiHeadAttention


@pytest.mark.parametrize("method", [ch.linear(), ch.performer(16)], ids=repr)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_layer_is_its_method_between_projections(method: Any, kv_heads: int) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(32, 4, kv_heads=kv_heads, causal=True, method=method)
    x = torch.randn(2, 11, 32)
    q, k, v = layer.project(x, None, None)
    expected = layer.out_proj(method(q, k, v, mask=ch.causal()).transpose(1, 2).flatten(2))
    assert torch.equal(layer(x), expected)
    padded = layer(x, lengths=[11, 7])
    assert torch.allclose(padded[1, :7], layer(x[1:, :7])[0], atol=1e-5)
    assert f"method={method!r}" in repr(layer)
    assert layer.state_dict().keys() == MultiHeadAttention(32, 4, kv_heads=kv_heads).state_dict().keys()


@pytest.mark.parametrize("method", [ch.linear(), ch.performer(16), ch.topk_blocks(2, block=4)], ids=repr)
def test_a_cache_gives_the_same(method: Any) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 2, positions=ch.rotary(), causal=True, method=method).eval()
    x, cache = torch.randn(2, 12, 16), KVCache()
    with torch.no_grad():
        whole = layer(x)
        parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, 8), (8, 9), (9, 12))]
    if not isinstance(method, type(ch.topk_blocks(2))):  # whose blocks of queries begin where the call does
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
    assert torch.allclose(parts[0], whole[:, :8], atol=1e-5)


@pytest.mark.parametrize("method", [ch.linear(), ch.performer(32)], ids=repr)
def test_a_gpt_trains_with_it_and_generates(method: Any) -> None:
    """A sequence that repeats is learnt, and continued."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=7, context=32, layers=1, heads=2, width=32, dropout=0.1, method=method))
    tokens = torch.arange(24).remainder(6)[None].repeat(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 < losses[0]
    generated = model.generate(torch.arange(6), 6, temperature=0)
    assert generated.tolist() == [*range(6), *range(6)]
    assert torch.equal(generated, model.generate(torch.arange(6), 6, temperature=0, cache=False))


def test_without_causality_every_method_is_a_layer() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 24, 16, requires_grad=True)
    for method in (ch.linformer(8), ch.nystrom(6), ch.lsh(4), ch.clusters(5), ch.topk_blocks(2, block=8)):
        layer = MultiHeadAttention(16, 2, method=method)
        layer(x).square().sum().backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        assert all(p.grad is not None for p in layer.parameters())


def test_a_layer_compiles() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 2, causal=True, method=ch.performer(8))
    x = torch.randn(1, 40, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), layer(x), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "performer"}, "method: is 'performer', expected a method"),
        ({"method": ch.linear(), "softcap": 3.0}, "softcap: is given together with method=linear()"),
        ({"method": ch.linear(), "window": 3}, "window: is given together with method=linear()"),
        ({"method": ch.linear(), "dropout": 0.1}, "dropout: is given together with method=linear()"),
        ({"method": ch.linear(), "positions": "alibi"}, "positions: are added to scores, which linear() has not"),
        ({"method": ch.nystrom(4), "causal": True}, "causal: is True, and nystrom(4) has no causal form"),
    ],
)
def test_what_a_layer_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ch.ArgumentError, match=re.escape(words)):
        MultiHeadAttention(16, 2, **options)


def test_what_it_attends_to_is_not_observed() -> None:
    layer = MultiHeadAttention(16, 2, method=ch.linear())
    with pytest.raises(ch.ArgumentError, match=re.escape("observe: is given, and linear() is not observed")):
        layer(torch.randn(1, 4, 16), observe={"top": 1})
