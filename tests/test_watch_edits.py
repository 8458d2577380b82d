"""Heads ablated and patched: what the model gives is what it gives with those outputs changed by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import hf_models as hf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watched import Gpt, Vit, ids, left_behind

import clearhead as ch
from clearhead.integrations.huggingface import register


@cache
def built(name: str) -> nn.Module:
    return hf.build(name)


def by_hand(model: nn.Module, projection: str, heads: list[int], count: int, new: Callable[[Tensor], Tensor]) -> Any:
    """A hook before the out projection, whose input is the heads side by side."""

    def change(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        parts = list(args[0].unflatten(-1, (count, -1)).unbind(-2))
        for head in heads:
            parts[head] = new(parts[head])
        return (torch.stack(parts, -2).flatten(-2), *args[1:])

    return model.get_submodule(projection).register_forward_pre_hook(change)


PROJECTIONS = {
    "llama": ("model.layers.1.self_attn", "model.layers.1.self_attn.o_proj"),
    "gpt2": ("transformer.h.1.attn", "transformer.h.1.attn.c_proj"),
    "gpt_oss": ("model.layers.1.self_attn", "model.layers.1.self_attn.o_proj"),
    "bert": ("encoder.layer.1.attention.self", "encoder.layer.1.attention.output.dense"),
}


WAYS = [(name, way) for name in PROJECTIONS for way in ("sdpa", "eager", "clearhead")]
WAYS.remove(("gpt_oss", "sdpa"))  # which has no place for its sinks


@pytest.mark.parametrize(("name", "way"), WAYS)
@torch.no_grad()
def test_ablation_is_what_a_hook_before_the_projection_does(name: str, way: str) -> None:
    register()
    model = built(name)
    model.set_attn_implementation(way)
    where, projection = PROJECTIONS[name]
    before = left_behind(model)
    for by in ("zero", "mean"):

        def new(mine: Tensor, by: str = by) -> Tensor:
            return torch.zeros_like(mine) if by == "zero" else mine.mean(1, keepdim=True).expand_as(mine)

        hook = by_hand(model, projection, [1, 3], 4, new)
        expected = hf.result(model(hf.IDS))
        hook.remove()
        if by == "zero":
            assert (hf.result(model(hf.IDS)) - expected).abs().max() > 1e-2, "and it matters"
        for layer in (1, where):
            with ch.ablate(model, layer=layer, head=[1, 3], by=by):
                got = hf.result(model(hf.IDS))
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert left_behind(model) == before


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_patching_all_heads_of_all_layers_gives_the_other_run_back_from_there(name: str) -> None:
    model = built(name)
    model.set_attn_implementation("eager")
    other = hf.IDS.flip(1)
    with ch.watch(model, want={"output": True}) as seen:
        model(hf.IDS)
    where, projection = PROJECTIONS[name]
    theirs = seen[where].observed.output  # (B, H, T, D)
    hook = by_hand(model, projection, [2], 4, lambda mine: theirs[:, 2])
    expected = hf.result(model(other))
    hook.remove()
    with ch.patch(model, seen, layer=1, head=2):
        got = hf.result(model(other))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    with ch.patch(model, seen, layer=1, head=2):
        same = hf.result(model(hf.IDS))
    torch.testing.assert_close(same, hf.result(model(hf.IDS)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_only_some_positions_are_changed() -> None:
    model = Gpt(layers=1).eval()
    plain = model(ids())
    with ch.ablate(model, layer=0, head=0, queries=[-1, 2]):
        got = model(ids())
    changed = (got - plain).abs().amax((0, 2)) > 1e-6
    assert changed.nonzero().ravel().tolist() == [2, 12]


@pytest.mark.parametrize("weights", [False, True])
@torch.no_grad()
def test_torchs_own_module_is_changed_and_keeps_its_weights(weights: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x = torch.randn(2, 5, 12)
    plain, its = module(x, x, x, average_attn_weights=False)
    q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in F.linear(x, module.in_proj_weight).chunk(3, -1))
    heads = F.scaled_dot_product_attention(q, k, v)
    heads[:, 1] = 0
    expected = module.out_proj(heads.transpose(1, 2).flatten(2))
    with ch.ablate(module, layer=0, head=1):
        got, given = module(x, x, x, need_weights=weights, average_attn_weights=False)
    torch.testing.assert_close(got, expected)
    assert (got - plain).abs().max() > 1e-3
    if weights:
        torch.testing.assert_close(given, its)


def test_gradients_flow_past_what_was_ablated() -> None:
    model = Gpt(layers=1)
    with ch.ablate(model, layer=0, head=[0, 1, 2]):
        model(ids()).sum().backward()
    grad = model.h[0].attn.c_attn.weight.grad
    assert grad is not None
    assert not grad.any(), "no head gives anything, whatever its queries, keys and values"
    assert model.wte.weight.grad.any()


@torch.no_grad()
def test_a_watch_inside_sees_what_the_later_layers_then_do() -> None:
    model = Gpt().eval()
    with ch.watch(model, want={"weights": True}) as plain:
        model(ids())
    with ch.ablate(model, layer=0, head=0), ch.watch(model, want={"weights": True}) as seen:
        model(ids())
    assert torch.equal(seen[0].weights, plain[0].weights)
    assert (seen[1].weights - plain[1].weights).abs().max() > 1e-5


@torch.no_grad()
def test_generation_is_patched_step_by_step() -> None:
    model = built("llama")
    model.set_attn_implementation("sdpa")
    with ch.watch(model, want={"output": True}) as seen:
        plain = model.generate(hf.IDS, max_new_tokens=3, do_sample=False)
    with ch.patch(model, seen, layer=[0, 1], head=[0, 1, 2, 3]):
        assert torch.equal(model.generate(hf.IDS, max_new_tokens=3, do_sample=False), plain)
    with (
        pytest.raises(ch.ArgumentError, match=r"seen: has no call 0 of 'model.layers.0.self_attn' in step 3"),
        ch.patch(model, seen, layer=0, head=1),
    ):
        model.generate(hf.IDS, max_new_tokens=5, do_sample=False)


@torch.no_grad()
def test_what_changes_nothing_or_cannot_be_changed_is_said() -> None:
    model = Gpt().eval()
    with (
        pytest.raises(ch.ArgumentError, match=r"layer: names no call that was made; calls were made by h.0.attn"),
        ch.ablate(model, layer=7, head=0),
    ):
        model(ids())
    with (
        pytest.raises(ch.ArgumentError, match="layer: Gpt was not called while watch was open"),
        ch.ablate(model, layer=0, head=0),
    ):
        pass
    with (
        pytest.raises(ch.ArgumentError, match=r"head: has 9, and 'h.0.attn' has 3 heads"),
        ch.ablate(model, layer=0, head=9),
    ):
        model(ids())
    with pytest.raises(ch.ArgumentError, match="by: is 'noise', expected 'zero' or 'mean'"):
        ch.ablate(model, layer=0, head=0, by="noise")
    with ch.watch(model, want={"top": 1}) as seen:
        model(ids())
    with (
        pytest.raises(ch.ArgumentError, match=r"seen: has no output of 'h.0.attn': watch\(model, want="),
        ch.patch(model, seen, layer=0, head=0),
    ):
        model(ids())
    with ch.watch(model, want={"output": True}) as seen:
        model(ids())
    with (
        pytest.raises(ch.ArgumentError, match=r"seen: has \(2, 13, 8\) for 'h.0.attn', and this run \(2, 6, 8\)"),
        ch.patch(model, seen, layer=0, head=0),
    ):
        model(ids(2, 6))
    with pytest.raises(ch.ArgumentError, match="seen: is a Gpt, expected what watch saw"):
        ch.patch(model, model, layer=0, head=0)
    assert left_behind(model) == []


@torch.no_grad()
def test_pictures_too() -> None:
    model = Vit().eval()
    images = torch.randn(1, 3, 8, 8)
    with ch.ablate(model, layer="blocks.*", head=[0, 1]):
        got = model(images)
    x = model.patch_embed(images).flatten(2).transpose(1, 2)
    x = torch.cat([model.cls_token, x], dim=1)
    expected = x + model.blocks[0]["attn"].proj.bias + model.blocks[1]["attn"].proj.bias
    torch.testing.assert_close(got, expected)


def test_the_mean_of_one_query_is_refused() -> None:
    model = Gpt().eval()
    with (
        torch.no_grad(),
        pytest.raises(ch.ArgumentError, match=r"by: is 'mean', and 'h.0.attn' has one query, whose mean is itself"),
        ch.ablate(model, layer=0, head=1, by="mean"),
    ):
        model(ids()[:, :1])
