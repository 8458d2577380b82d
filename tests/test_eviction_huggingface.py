"""Hugging Face models that generate with an EvictingCache: exact where nothing is dropped, right where something is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hf_models as hf
import pytest
import torch
from test_eviction import POLICIES

import clearhead as ch
from clearhead.integrations.huggingface import register
from clearhead.integrations.huggingface_cache import EvictingCache
from clearhead.nn.eviction import H2O, TOVA


def own(name: str) -> Any:
    register()
    model: Any = hf.build(name)
    model.set_attn_implementation("clearhead")
    return model


def generated(model: Any, cache: Any, **options: Any) -> torch.Tensor:
    return model.generate(hf.IDS, past_key_values=cache, max_new_tokens=8, do_sample=False, **options)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_that_has_room_for_all_generates_the_same(name: str, policy: str) -> None:
    model = own(name)
    roomy = type(POLICIES[policy])(**{**vars(POLICIES[policy]), "keep": 60})
    for padding in (None, hf.LEFT):
        found = generated(model, EvictingCache(roomy, model.config), attention_mask=padding)
        assert torch.equal(found, generated(model, None, attention_mask=padding))


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_after_dropping_are_those_of_attention_to_what_is_kept(policy: str) -> None:
    """By the model's own attention with a mask for each layer's head that hides what was dropped before."""
    model, kept = own("llama"), []
    cache = EvictingCache(POLICIES[policy], model.config)
    steps = [hf.IDS, *hf.IDS[:, :4].split(1, dim=1)]
    logits = []
    with torch.no_grad():
        for tokens in steps:
            kept.append([None if p is None else p.clone() for p in cache.positions])
            logits.append(model(tokens, past_key_values=cache).logits)
        expected = by_masks(model, steps, kept)
    torch.testing.assert_close(torch.cat(logits, 1), torch.cat(expected, 1), rtol=1e-4, atol=1e-4)
    assert all(p.shape[-1] == POLICIES[policy].keep for p in cache.positions) or not POLICIES[policy].decodes


def by_masks(model: Any, steps: list[torch.Tensor], kept: list[list[Any]]) -> list[torch.Tensor]:
    """Full runs over all tokens so far, in which each layer hides from the last queries what had been dropped."""
    places = [0]
    for tokens in steps:
        places.append(places[-1] + tokens.shape[1])
    whole = torch.cat(steps, 1)
    config, expected = model.config, []
    hidden = torch.zeros(
        2, config.num_hidden_layers, config.num_attention_heads, places[-1], places[-1], dtype=torch.bool
    )
    for step in range(1, len(steps)):
        for layer, positions in enumerate(kept[step]):
            seen = torch.zeros(2, config.num_key_value_heads, places[step], dtype=torch.bool).scatter(
                2, positions, True
            )
            seen = seen.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=1)
            hidden[:, layer, :, places[step] : places[step + 1], : places[step]] = ~seen[:, :, None]
    later = torch.ones(places[-1], places[-1], dtype=torch.bool).triu(1)
    for n, layer in enumerate(model.model.layers):
        layer.self_attn.allowed = ~(hidden[:, n] | later)

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        output = ch.attention(query, key, value, mask=module.allowed, scale=scaling, kernel="dense")
        return output.transpose(1, 2).contiguous(), None

    from transformers import AttentionInterface

    AttentionInterface.register("by-masks", attend)
    model.set_attn_implementation("by-masks")
    logits = model(whole, use_cache=False).logits
    for first, last in pairwise(places):
        expected.append(logits[:, first:last])
    return expected


@pytest.mark.parametrize("policy", POLICIES)
def test_padding_is_dropped_first_and_rows_are_each_their_own(policy: str) -> None:
    model = own("llama")
    cache, alone = (EvictingCache(POLICIES[policy], model.config) for _ in range(2))
    found = generated(model, cache, attention_mask=hf.LEFT)
    one = model.generate(hf.IDS[1:, 3:], past_key_values=alone, max_new_tokens=8, do_sample=False)
    assert torch.equal(found[1, 3:], one[0])
    for padded, plain in zip(cache.positions, alone.positions, strict=True):
        for held, wanted in zip(padded[1], plain[0], strict=True):
            assert torch.equal(held[held >= 0] - 3, wanted)


@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_a_prompt_that_is_padded_at_its_end_keeps_what_it_would_alone(policy: str) -> None:
    model = own("llama")
    cache, alone = (EvictingCache(POLICIES[policy], model.config) for _ in range(2))
    right = torch.ones_like(hf.IDS)
    right[1, -3:] = 0
    logits = model(hf.IDS, attention_mask=right, past_key_values=cache).logits
    expected = model(hf.IDS[1:, :-3], past_key_values=alone).logits
    torch.testing.assert_close(logits[1:, :-3], expected)
    for padded, plain in zip(cache.positions, alone.positions, strict=True):
        for held, wanted in zip(padded[1], plain[0], strict=True):
            assert torch.equal(held[held >= 0], wanted)


@torch.no_grad()
def test_a_mask_that_is_not_causal_is_refused_and_not_replaced() -> None:
    model = own("llama")
    cache, tokens = EvictingCache(TOVA(4), model.config), hf.IDS.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(len(hf.IDS), 1, -1, -1)
    for one in (causal | causal.mT, causal & (torch.arange(tokens) != 2)):
        changed = one.clone()
        changed[..., 2, 2] = True
        with pytest.raises(ch.ArgumentError, match="attention_mask: lets tokens see later ones, or hides earlier ones"):
            model(hf.IDS, attention_mask=changed, past_key_values=cache)
    model(hf.IDS, attention_mask=causal, past_key_values=cache)
    assert all(p.shape[-1] == 4 for p in cache.positions)


def test_beams_and_several_answers() -> None:
    model = own("llama")
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        roomy = generated(model, EvictingCache(TOVA(60), model.config), **options)
        assert torch.equal(roomy, generated(model, None, **options))
        assert generated(model, EvictingCache(TOVA(4), model.config), **options).shape == roomy.shape


def test_bad_input_in_one_sentence() -> None:
    model = own("llama")
    with pytest.raises(ch.ArgumentError, match="keep: is 4, expected a policy"):
        EvictingCache(4, model.config)
    with pytest.raises(ch.ArgumentError, match=r"config: is a LlamaForCausalLM, expected the model's, model.config"):
        EvictingCache(TOVA(4), model)
    cache = EvictingCache(TOVA(4), model.config)
    with torch.no_grad(), pytest.raises(ch.ArgumentError, match="output_attentions: is True together with"):
        model(hf.IDS, past_key_values=cache, output_attentions=True)
    model.set_attn_implementation("sdpa")
    cache = EvictingCache(TOVA(4), model.config)
    with torch.no_grad():
        model(hf.IDS, past_key_values=cache)
        with pytest.raises(ch.ArgumentError, match="past_key_values: is an EvictingCache"):
            model(hf.IDS, past_key_values=cache)


def test_a_run_that_is_refused_leaves_every_layer_as_it_was() -> None:
    model = own("llama")
    cache, other = (EvictingCache(H2O(5, recent=2), model.config) for _ in range(2))
    with torch.no_grad():
        for one in (cache, other):
            model(hf.IDS, past_key_values=one)
        before = [(one.seen, *one.kept.state) for one in cache.layers]
        more = {"past_key_values": cache, "output_attentions": True}
        with pytest.raises(ch.ArgumentError, match="output_attentions"):
            model(hf.IDS[:, :1], **more)

        def fails(*_: Any) -> None:
            raise MemoryError

        observe, cache.layers[-1]._observe = cache.layers[-1]._observe, fails
        with pytest.raises(MemoryError):
            model(hf.IDS[:, :1], past_key_values=cache)
        cache.layers[-1]._observe = observe
        for one, then in zip(cache.layers, before, strict=True):
            assert all(a is b or a == b for a, b in zip((one.seen, *one.kept.state), then, strict=True))
        found = [model(hf.IDS[:, :1], past_key_values=one).logits for one in (cache, other)]
    assert torch.equal(*found)
