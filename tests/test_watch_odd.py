"""watch: calls, choices and models that are out of the ordinary."""

from __future__ import annotations

import copy
import io
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from watched import CausalSelfAttention, Gpt, ids, left_behind

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


class AttentionInSteps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).exp() @ x


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
            self.layers = nn.ModuleList([CausalSelfAttention(24, 3), AttentionScale(), AttentionInSteps()])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](self.layers[1](self.layers[0](x)))

    model = AttentionModel()
    with ch.watch(model) as seen:
        model(torch.randn(1, 5, 24))
    assert seen.names == ["layers.0"]
    assert list(seen.missed) == ["layers.2"], "and not the one that only has its name"


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


@torch.no_grad()
def test_a_model_that_calls_itself_is_one_step():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = CausalSelfAttention(24, 3), CausalSelfAttention(24, 3)

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            x = self.first(x)
            if again:
                x = self(x, again=False)
            x = x + F.scaled_dot_product_attention(x, x, x)
            return self.last(x)

    model = Twice()
    with ch.watch(model) as seen:
        model(torch.randn(1, 5, 24))
        model(torch.randn(1, 5, 24))
    assert [call.name for call in seen.step(0)] == ["first", "first", "", "last", "", "last"]
    assert [call.step for call in seen] == [0] * 6 + [1] * 6
    assert not left_behind(model)


def test_parts_that_a_model_runs_on_threads_belong_to_its_step():
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Gpt(layers=1), Gpt(layers=1)])

        def forward(self, given: Tensor) -> Tensor:
            threads = [threading.Thread(target=torch.no_grad()(part), args=(given,)) for part in self.parts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return given

    model = Parallel()
    with ch.watch(model) as seen:
        model(ids())
        model(ids())
    assert sorted((call.step, call.name) for call in seen) == [
        (0, "parts.0.h.0.attn"), (0, "parts.1.h.0.attn"), (1, "parts.0.h.0.attn"), (1, "parts.1.h.0.attn"),
    ]  # fmt: skip


@torch.no_grad()
def test_a_watched_model_can_be_copied_and_the_copy_is_not_watched():
    model = Gpt(layers=1)
    file = io.BytesIO()
    with ch.watch(model) as seen:
        other = copy.deepcopy(model)
        torch.save(model, file)
        assert torch.equal(other(ids()), copy.deepcopy(other)(ids()))
        assert not len(seen)
        model(ids())
    assert len(seen) == 1
    file.seek(0)
    torch.load(file, weights_only=False)(ids())
    assert len(seen) == 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_missed_by_name():
    from torch.nn.attention.flex_attention import flex_attention

    class Mixer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return flex_attention(x, x, x)

    model = nn.Sequential(Mixer(), AttentionScale())
    with ch.watch(model) as seen:
        model(torch.randn(1, 2, 5, 16))
    assert "flex_attention, a kernel of its own" in seen.missed["0"]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own, in make_dual
def test_tangents_are_pytorchs_own():
    q, k, tangent = torch.randn(3, 1, 2, 5, 8)
    model = Direct()
    with forward_ad.dual_level(), ch.watch(model), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        dual = forward_ad.make_dual(q, tangent)
        plain = forward_ad.unpack_dual(F.scaled_dot_product_attention(dual, k, k)).tangent
        got = forward_ad.unpack_dual(model(dual, k, k)).tangent
    assert torch.equal(got, plain)


@torch.no_grad()
def test_float_masks_are_kept_once_too():
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for _ in range(2):
                x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            return x

    model = Masked()
    with ch.watch(model, want={"keep": True}) as seen:
        model(torch.randn(1, 2, 9, 8), torch.randn(9, 9))
        model(torch.randn(1, 2, 9, 8), torch.randn(9, 9))
    kept = [call.kept.bias for call in seen]
    assert kept[0] is kept[1]
    assert kept[2] is kept[3]
    assert not torch.equal(kept[0], kept[2])


@torch.no_grad()
def test_a_call_without_heads_has_none_to_choose():
    model = Direct()
    with ch.watch(model, heads=0) as seen:
        model(*torch.randn(3, 5, 8))
    assert seen.missed == {"": "observing it failed: heads: has 0, and the call has no heads"}
