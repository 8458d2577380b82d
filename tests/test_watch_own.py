"""watch and clearhead's own layers: calls of `clearhead.attention` are seen as any other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import nn

LAYERS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window, grouped, rotary": {"kv_heads": 2, "positions": ch.rotary(), "window": 5, "causal": True},
    "alibi": {"positions": "alibi", "causal": True},
    "relative": {"positions": "relative"},
    "softcap": {"softcap": 3.0},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_ours_are_seen(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.MultiHeadAttention(32, 4, **LAYERS[name]).eval()
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        with ch.watch(layer, want={"weights": True}) as seen:
            watched = layer(x)
        output, observed = layer(x, observe={"weights": True})
    assert seen.missed == {}
    np.testing.assert_allclose(watched, output, rtol=0, atol=1e-6)
    np.testing.assert_allclose(seen[0].weights, observed.weights, rtol=0, atol=1e-6)


@torch.no_grad()
def test_what_was_kept_gives_the_rows() -> None:
    layer = nn.MultiHeadAttention(32, 4, window=3, causal=True).eval()
    x = torch.randn(1, 9, 32)
    with ch.watch(layer, heads=[1, 3], want={"keep": True}) as seen:
        layer(x)
    assert seen[0].heads == (1, 3)
    rows = seen[0].rows([0, 8])
    _, observed = layer(x, observe={"weights": True})
    np.testing.assert_allclose(rows, observed.weights[:, [1, 3]][:, :, [0, 8]], rtol=0, atol=1e-6)


def test_generation_is_seen_step_by_step() -> None:
    model = nn.GPT(nn.GPTConfig(vocabulary=65, context=64, layers=3, heads=4, width=32)).eval()
    plain = model.generate(torch.tensor([1, 2, 3]), 4, seed=0)
    with ch.watch(model) as seen:
        watched = model.generate(torch.tensor([1, 2, 3]), 4, seed=0)
    assert torch.equal(plain, watched)
    assert [call.keys for call in seen.named("blocks.1.attention")] == [3, 4, 5, 6]
    assert seen.missed == {}


def test_gradients_and_dropout_are_the_call_s_own() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, dropout: Any) -> torch.Tensor:
            return ch.attention(x, x, x, mask=ch.causal() & ch.lengths([5]), dropout=dropout)

    model, x = Model(), torch.randn(1, 2, 7, 8, requires_grad=True)
    for dropout in (None, (0.5, 3)):
        expected = model(x, dropout)
        (wanted,) = torch.autograd.grad(expected.sum(), x)
        with ch.watch(model) as seen:
            found = model(x, dropout)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert torch.equal(found, expected)
        assert torch.equal(gradient, wanted)
        assert len(seen) == 1
        assert float(seen[0].received[0, 0, 5:].sum()) == 0


def test_a_call_that_is_refused_is_refused_while_watched() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ch.attention(x, x, x, softcap=-1.0)

    model = Model()
    with pytest.raises(ch.ArgumentError, match="softcap"), ch.watch(model):
        model(torch.zeros(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_leaves_what_pytorch_leaves(dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    model, x = Model(), torch.randn(1, 2, 5, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with ch.watch(model) as seen:
            watched = model(x)
    assert len(seen) == 1
    assert watched.dtype == plain.dtype
