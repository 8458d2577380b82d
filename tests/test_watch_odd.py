"""watch: calls, choices and models that are out of the ordinary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watched import CausalSelfAttention, Gpt, ids

import clearhead as ch


class Direct(nn.Module):
    """One call, with whatever it is given."""

    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_lies_in_memory_as_pytorch_lays_it(dtype):
    x = torch.randn(2, 6, 3 * 32).to(dtype)
    model = Direct()
    for part in (x[..., :32].contiguous(), x[..., :32]):  # of its own, and a part of queries, keys and values in one
        apart = part.unflatten(-1, (4, 8)).transpose(1, 2)
        for q in (apart, apart.contiguous(), apart.mT.contiguous().mT, apart[:, :, :1]):
            plain = model(q, apart, apart)
            with ch.watch(model):
                got = model(q, apart, apart)
            assert got.stride() == plain.stride()
    with ch.watch(model):
        assert model(apart, apart, apart).transpose(1, 2).view(2, 6, 32).shape == (2, 6, 32), "as many models do"


class AttentionScale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class ScaledAttention(CausalSelfAttention):
    """Attention with a helper that has attention in its name."""

    def __init__(self) -> None:
        super().__init__(24, 3)
        self.attn_scale = AttentionScale()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.attn_scale(x))


@torch.no_grad()
def test_a_helper_is_not_missed_where_attention_is_the_whole_model():
    model = ScaledAttention()
    with ch.watch(model) as seen:
        model(torch.randn(1, 5, 24))
    assert seen.names == [""]
    assert seen.missed == {}


@torch.no_grad()
def test_a_layer_is_missed_also_where_the_model_calls_itself_attention():
    class AttentionModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([CausalSelfAttention(24, 3), AttentionScale()])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    model = AttentionModel()
    with ch.watch(model) as seen:
        model(torch.randn(1, 5, 24))
    assert seen.names == ["layers.0"]
    assert list(seen.missed) == ["layers.1"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("layers", "unmet"), [(9, "9"), ("attn", "'attn'"), ([0, "h.7.*", 9], "'h.7.*', 9"), ([1, "h.0.*"], None)]
)
def test_layers_that_no_call_came_from_are_said(layers, unmet):
    model = Gpt(layers=2)
    with ch.watch(model, layers=layers) as seen:
        model(ids())
    calls = "calls were made by h.0.attn, h.1.attn"
    expected = {} if unmet is None else {"": f"layers has {unmet}, and no call was made there; {calls}"}
    assert seen.missed == expected


@torch.no_grad()
def test_numbers_of_other_libraries_choose_layers_and_heads():
    model = Gpt(layers=3)
    for layers, heads in ((np.arange(2), np.int64(1)), (torch.tensor([0, 1]), torch.tensor(1)), (range(2), [1])):
        with ch.watch(model, layers=layers, heads=heads) as seen:
            model(ids())
        assert seen.names == ["h.0.attn", "h.1.attn"]
        assert seen[0].heads == (1,)
    for options, words in (
        ({"layers": 1.5}, "layers: has 1.5, expected numbers from 0, or names of modules"),
        ({"layers": []}, "layers: is empty, expected at least one number or name"),
        ({"heads": 1.5}, "heads: has 1.5, expected numbers from 0"),
        ({"heads": "0"}, "heads: has '0', expected numbers from 0"),
    ):
        with pytest.raises(ch.ArgumentError) as error:
            ch.watch(model, **options)
        assert str(error.value) == words
