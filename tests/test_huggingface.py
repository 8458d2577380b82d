"""Hugging Face models: attn_implementation="clearhead", and models that are watched as they are."""

from __future__ import annotations

import runpy
import sys
from functools import cache
from typing import Any

import hf_models as hf
import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache
from watched import held, left_behind

import clearhead as ch
from clearhead.integrations import huggingface

huggingface.register()
huggingface.register("clearhead-some", want={"top": 3, "received": True})


@cache
def model(name: str) -> nn.Module:
    return hf.build(name)


@cache
def by_eager(name: str) -> tuple[Any, Any]:
    """Outputs with weights, in float32 and in float64."""
    one = model(name)
    one.set_attn_implementation("eager")
    with torch.no_grad():
        with hf.in_full():
            exact = hf.precise(one)(**hf.doubles(hf.inputs(name)), output_attentions=True)
        return one(**hf.inputs(name), output_attentions=True), exact


def of_real(name: str, tensor: Tensor) -> Tensor:
    """Outputs (B, L, …) of the tokens that are no padding."""
    real = hf.real(name)
    return torch.where(real.reshape(*real.shape, *(1,) * (tensor.ndim - 2)), tensor, 0.0)


def rows_of_real(name: str, weights: Tensor) -> Tensor:
    """Weights (B, H, L, S) of the queries that are no padding."""
    real = hf.real(name)
    return torch.where(real[:, None, :, None], weights, 0.0)


@pytest.mark.parametrize("name", hf.MODELS)
@torch.no_grad()
def test_logits_and_weights_equal_eager(name):
    plain, exact = by_eager(name)
    one = model(name)
    one.set_attn_implementation("clearhead")
    got = one(**hf.inputs(name), output_attentions=True)
    bare = one(**hf.inputs(name))
    keys = 17
    for output in (got, bare):
        held(*(of_real(name, hf.result(o)) for o in (output, plain, exact)), keys, f"{name}: logits")
    compared = 0
    for kind in hf.KINDS:
        assert not getattr(bare, kind, None), "weights that nobody asked for"
        for mine, theirs, best in zip(*(getattr(o, kind, None) or () for o in (got, plain, exact)), strict=True):
            held(*(rows_of_real(name, w) for w in (mine, theirs, best)), keys, f"{name}: {kind}")
            compared += 1
    assert compared == {"t5": 6, "whisper": 6}.get(name, 2)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "t5"])
@torch.no_grad()
def test_a_want_gives_observations_in_the_place_of_weights(name):
    plain, exact = by_eager(name)
    one = model(name)
    one.set_attn_implementation("clearhead-some")
    got = one(**hf.inputs(name), output_attentions=True)
    for kind in hf.KINDS:
        for mine, theirs, best in zip(*(getattr(o, kind, None) or () for o in (got, plain, exact)), strict=True):
            assert isinstance(mine, ch.Observed)
            assert mine.weights is None
            top = [rows_of_real(name, w).topk(3, dim=-1).values for w in (theirs, best)]
            held(rows_of_real(name, mine.top.weights), *top, 17, f"{name}: {kind}")
            assert mine.received.shape == (*theirs.shape[:2], theirs.shape[-1])
            assert mine.output.shape[-1] == 0


DYNAMIC = ("llama", "mistral", "gemma2", "gpt2", "gpt_oss", "t5", "whisper")
STATIC = ("llama", "mistral", "gemma2", "gpt_oss", "whisper")
CACHES = [(name, None) for name in DYNAMIC] + [(name, "static") for name in STATIC]


@pytest.mark.parametrize(("name", "cache_kind"), CACHES)
@torch.no_grad()
def test_generating_with_caches_equals_eager(name, cache_kind):
    given = {key: value for key, value in hf.inputs(name).items() if key != "decoder_input_ids"}
    how = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    how |= {} if cache_kind is None else {"cache_implementation": cache_kind}
    one = model(name)
    one.set_attn_implementation("eager")
    plain = one.generate(**given, **how)
    with hf.in_full():
        exact = hf.precise(one).generate(**hf.doubles(given), **how)
    one.set_attn_implementation("clearhead")
    got = one.generate(**given, **how, output_attentions=True)
    assert torch.equal(got.sequences, plain.sequences)
    assert len(got.logits) == 6
    for step, logits in enumerate(zip(got.logits, plain.logits, exact.logits, strict=True)):
        held(*logits, 15, f"{name}: step {step}")
    steps = got.attentions if "attentions" in got else got.decoder_attentions
    assert len(steps) == 6
    sums = steps[-1][-1].sum(-1)
    if name != "gpt_oss":  # of which a sink takes some
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_training_drops_weights_and_gradients_flow():
    one = hf.build("llama").train()
    one.config.attention_dropout = 0.0
    one.set_attn_implementation("clearhead")
    eager = hf.build("llama").train()
    eager.set_attn_implementation("eager")
    for some in (one, eager):
        some(hf.IDS, labels=hf.IDS).loss.backward()
    with hf.in_full():
        exact = hf.precise(eager)
        exact.zero_grad()
        exact(hf.IDS, labels=hf.IDS).loss.backward()
    for parameters in zip(one.named_parameters(), eager.parameters(), exact.parameters(), strict=True):
        (name, mine), theirs, best = parameters
        held(mine.grad, theirs.grad, best.grad, 9, name)
    for layer in one.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(1)
    first = one(hf.IDS).logits
    torch.manual_seed(1)
    assert torch.equal(first, one(hf.IDS).logits), "dropped by PyTorch's own random numbers"
    assert not torch.equal(first, one(hf.IDS).logits)
    one.eval()
    assert torch.equal(one(hf.IDS).logits, one(hf.IDS).logits)


def test_gradients_flow_to_sinks_alone():
    one = hf.build("gpt_oss")
    one.set_attn_implementation("clearhead")
    sinks = [parameter for name, parameter in one.named_parameters() if "sinks" in name]
    one.requires_grad_(False)
    for parameter in sinks:
        parameter.requires_grad_(True)
    one(hf.IDS, output_attentions=True).logits.sum().backward()
    assert all(parameter.grad.any() for parameter in sinks)


WATCHED = {
    "llama": ["model.layers.0.self_attn", "model.layers.1.self_attn"],
    "gpt2": ["transformer.h.0.attn", "transformer.h.1.attn"],
    "bert": ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"],
    "vit": None,
    "t5": None,
    "whisper": None,
}


@pytest.mark.parametrize("name", WATCHED)
@torch.no_grad()
def test_models_on_sdpa_are_watched_as_they_are(name):
    plain, exact = by_eager(name)
    one = model(name)
    one.set_attn_implementation("sdpa")
    unwatched = one(**hf.inputs(name))
    before = left_behind(one)  # transformers keeps hooks of its own
    with ch.watch(one, want={"weights": True, "received": True, "distance": True}) as seen:
        got = one(**hf.inputs(name))
    held(*(of_real(name, hf.result(o)) for o in (got, unwatched, exact)), 17, name)
    assert seen.missed == {}
    assert WATCHED[name] in (None, seen.names)
    kinds = {kind: list(zip(*(getattr(o, kind, None) or () for o in (plain, exact)), strict=True)) for kind in hf.KINDS}
    assert len(seen) == sum(map(len, kinds.values()))
    for call in seen:
        crossing = "cross" in call.name or "EncDec" in call.name or "encoder_attn" in call.name
        decoding = "decoder" in call.name
        kind = "cross_attentions" if crossing else "decoder_attentions" if decoding else "encoder_attentions"
        weights = kinds[kind if name in ("t5", "whisper") else "attentions"].pop(0)
        held(*(rows_of_real(name, w) for w in (call.weights, *weights)), 17, call.name)
        assert (call.distance is None) == crossing
    assert left_behind(one) == before


@torch.no_grad()
def test_generation_is_watched_step_by_step():
    one = model("llama")
    one.set_attn_implementation("sdpa")
    given = {"input_ids": hf.IDS, "attention_mask": hf.LEFT}
    for room in (None, 20):

        def cache_of(room: int | None = room) -> dict[str, Any]:
            return {} if room is None else {"past_key_values": StaticCache(config=one.config, max_cache_len=room)}

        plain = one.generate(**given, max_new_tokens=4, do_sample=False, **cache_of())
        with ch.watch(one, want={"weights": True, "distance": True, "received": True}) as seen:
            got = one.generate(**given, max_new_tokens=4, do_sample=False, **cache_of())
        assert torch.equal(plain, got)
        assert seen.steps == 4
        assert [call.shape[-2] for call in seen.layer(1)] == [9, 1, 1, 1]
        step = seen.step(3)["model.layers.0.self_attn"]
        assert step.shape[-1] == (room or 12), "a static cache has room to spare"
        weights = step.weights.double()
        far = (weights * (11 - torch.arange(step.shape[-1])).abs()).sum(-1)
        torch.testing.assert_close(step.distance.double(), far, rtol=1e-4, atol=1e-5)
        first = seen.step(3).summary().lines[0]
        assert first.first == pytest.approx(float((weights[0, 0, 0, 0] + weights[1, 0, 0, 3]) / 2), rel=1e-4)


class Numbers:
    def convert_ids_to_tokens(self, given: list[int]) -> list[str]:
        return [str(i) for i in given]


@torch.no_grad()
def test_keys_of_another_sequence_are_named_by_it():
    one = model("t5")
    one.set_attn_implementation("sdpa")
    ids, other = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 2, 3]])
    with ch.watch(one, tokens=Numbers()) as seen:
        one(input_ids=ids, decoder_input_ids=other)
    for call in seen:
        crossing = "EncDec" in call.name
        assert call.keys_named == (
            (("1", "2", "3"),) if "decoder" in call.name and not crossing else (("5", "6", "7"),)
        )
        assert call.queries_named == ((("1", "2", "3"),) if "decoder" in call.name else (("5", "6", "7"),))
        assert (call.distance is None) == crossing
    with ch.watch(one, tokens=Numbers()) as seen:
        one.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert {call.keys_named for call in seen if "EncDec" in call.name} == {(("5", "6", "7"),)}
    selves = [call for call in seen if "decoder.block.0.layer.0" in call.name]
    assert [len(call.keys_named[0]) for call in selves] == [1, 2, 3, 4]


@torch.no_grad()
def test_models_on_clearhead_are_watched_too():
    one = model("gpt_oss")
    one.set_attn_implementation("clearhead")
    plain = one(**hf.inputs("gpt_oss")).logits
    with ch.watch(one, want={"weights": True, "keep": True}) as seen:
        got = one(**hf.inputs("gpt_oss")).logits
    assert torch.equal(plain, got)
    assert seen.names == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert (seen[0].weights.sum(-1) < 1).all(), "a sink takes some"
    assert (seen.rollout(-1).sum(-1) < 1).all()


def test_names_and_wants_are_checked():
    for name in ("sdpa", "", 3):
        with pytest.raises(ch.ArgumentError, match="expected a name that transformers does not use itself"):
            huggingface.register(name)
    with pytest.raises(ch.ArgumentError, match="want: has 'tops', expected some of"):
        huggingface.register("other", want={"tops": 1})
    with pytest.raises(ch.ArgumentError, match="want: has an option of watch; here it takes those of observe"):
        huggingface.register("other", want={"keep": True})


def test_without_transformers_it_says_what_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError) as refusal:
        runpy.run_path(huggingface.__file__)
    assert str(refusal.value).endswith("pip install torch transformers")
