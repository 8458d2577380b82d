"""What `test_distributed.py` lets several processes do with models: those of clearhead.nn and of Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_work import everyone, numbers

import clearhead as ch
import clearhead.distributed as chd


def models(rank: int, world: int) -> None:
    """A GPT on split sequences learns what one process learns; a Hugging Face model gives what it gives alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from clearhead.integrations.huggingface import register
    from clearhead.nn import GPT, GPTConfig, KVCache, MultiHeadAttention

    for positions in (ch.rotary(), "learned", "alibi"):
        torch.manual_seed(0)
        config = GPTConfig(vocabulary=31, context=64, layers=2, heads=4, kv_heads=2, width=32, positions=positions)
        alone, split = GPT(config, dtype=torch.float64), GPT(config, dtype=torch.float64)
        split.load_state_dict(alone.state_dict())
        tokens = torch.randint(31, (2, 42), generator=torch.Generator().manual_seed(1))
        loss = torch.nn.functional.cross_entropy(alone(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        placement = chd.place(ch.causal(), 41, world)
        with chd.parallel(placement=placement, timeout=30):
            here = chd.shard(tokens[:, :-1], placement, rank, axis=1)
            next_ones = chd.shard(tokens[:, 1:], placement, rank, axis=1)
            logits = split(here)
            part = torch.nn.functional.cross_entropy(logits.flatten(0, 1), next_ones.flatten(), reduction="sum") / (
                2 * 41
            )
            part.backward()
        dist.all_reduce(part := part.detach())
        torch.testing.assert_close(part, loss.detach())
        for (name, mine), whole in zip(split.named_parameters(), alone.parameters(), strict=True):
            dist.all_reduce(mine.grad)
            torch.testing.assert_close(mine.grad, whole.grad, msg=lambda m, name=name: f"{name}: {m}")

    prompt = tokens[:, :29]
    text = alone.generate(prompt, 9, temperature=0)
    caches = alone.caches(mesh=dist.group.WORLD)
    assert torch.equal(alone.generate(prompt, 9, temperature=0, cache=lambda: caches), text)
    assert len(caches[0]) == 37
    held = sum(everyone(torch.tensor([c.k.shape[2] for c in caches]), world)).tolist()
    assert max(held) < 37 + 64 * world  # each keeps its own, and room to grow
    with torch.no_grad(), pytest.raises(ch.ArgumentError, match="rows of one length"):
        alone(prompt, caches=alone.caches(mesh=dist.group.WORLD), lengths=[3, 29])
    small = KVCache(mesh=dist.group.WORLD, block=5)
    layer = MultiHeadAttention(16, 4, kv_heads=2, causal=True, positions=ch.rotary()).double()
    x = numbers((2, 23, 16), dtype=torch.float64)[0]
    plain = KVCache()
    with torch.no_grad():
        for low, high in ((0, 11), (11, 12), (12, 23)):
            given = {"mask": ch.window(9) | ch.global_tokens([0])}
            want = {"top": 2, "received": True, "received_max": True, "removal": True}
            expected, seen = layer(x[:, low:high], cache=plain, observe=want, **given)
            found, mine = layer(x[:, low:high], cache=small, observe=want, **given)
            torch.testing.assert_close(found, expected)
            assert torch.equal(mine.top.indices, seen.top.indices)
            for name in ("received", "received_max", "removal"):
                torch.testing.assert_close(getattr(mine, name), getattr(seen, name))
        for cache in (plain, small):
            cache.trim(17)
        torch.testing.assert_close(layer(x[:, 17:19], cache=small), layer(x[:, 17:19], cache=plain))

    register()
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=37, attn_implementation="clearhead")  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    tokens = torch.randint(1, 37, (2, 23), generator=torch.Generator().manual_seed(2))
    real = torch.ones_like(tokens)
    real[0, :9] = 0  # padding on the left
    given = {"input_ids": tokens, "attention_mask": real}
    with torch.no_grad():
        expected = model(**given).logits
        text = model.generate(**given, max_new_tokens=6, do_sample=False, pad_token_id=0)
    whole = model(**given, labels=tokens).loss
    whole.backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with chd.parallel(timeout=30):
        with torch.no_grad():
            torch.testing.assert_close(model(**given).logits[real.bool()], expected[real.bool()])
            assert torch.equal(model.generate(**given, max_new_tokens=6, do_sample=False, pad_token_id=0), text)
        model(**given, labels=tokens).loss.backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def split_caches(rank: int, world: int) -> None:
    """A Hugging Face model generates over a cache of which every rank holds a part: what it generates alone."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    from clearhead.integrations import huggingface_split
    from clearhead.integrations.huggingface import register
    from clearhead.integrations.huggingface_split import SplitCache, SplitLayer

    register()
    huggingface_split.BLOCK = 5  # so that every rank has some of a short text
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 37, "attn_implementation": "clearhead",
    }  # fmt: skip
    windows = Gemma3TextConfig(**sizes, sliding_window=7, layer_types=["sliding_attention", "full_attention"])
    tokens = torch.randint(1, 37, (2, 23), generator=torch.Generator().manual_seed(2))
    real = torch.ones_like(tokens)
    real[0, :9] = 0  # padding on the left
    given = {"input_ids": tokens, "attention_mask": real, "pad_token_id": 0, "do_sample": False}
    for kind, config in ((LlamaForCausalLM, LlamaConfig(**sizes)), (Gemma3ForCausalLM, windows)):
        torch.manual_seed(0)
        model: Any = kind(config).double().eval()
        for more in ({}, {"num_beams": 3}, {"prefill_chunk_size": 10}):
            expected = model.generate(**given, **more, max_new_tokens=9)
            cache = SplitCache(model.config, block=3)
            with chd.parallel(timeout=30):
                found = model.generate(**given, **more, max_new_tokens=9, past_key_values=cache)
            assert torch.equal(found, expected), (kind, more)
            assert cache.get_seq_length() == found.shape[1] - 1
            for layer in cache.layers:
                if isinstance(layer, SplitLayer):
                    assert held_by_all(layer, world) == found.shape[1] - 1
                    held = everyone(torch.tensor([layer.here[0].shape[2]]), world)
                    assert max(map(int, held)) - min(map(int, held)) <= 3
            if "prefill_chunk_size" in more:
                continue
            with chd.parallel(timeout=30):  # a cache that the model makes for itself
                own = model.generate(**given, **more, max_new_tokens=9, return_dict_in_generate=True)
            assert torch.equal(own.sequences, expected), (kind, more)
            assert [type(layer) for layer in own.past_key_values.layers] == [type(layer) for layer in cache.layers]
            assert held_by_all(own.past_key_values.layers[1], world) == found.shape[1] - 1
    assert isinstance(cache.layers[1], SplitLayer)
    assert not isinstance(cache.layers[0], SplitLayer)  # a window is kept whole

    model = LlamaForCausalLM(LlamaConfig(**sizes)).double().eval()
    inputs = {"input_ids": tokens, "attention_mask": real, "output_attentions": True}
    with torch.no_grad():
        whole, split = model(**inputs), model(**inputs, past_key_values=SplitCache(model.config, block=2))
    for one, other in zip(whole.attentions, split.attentions, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(whole.logits[real.bool()], split.logits[real.bool()])
    cache = SplitCache(model.config)
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=cache)
        cache.crop(11)
        again = model(input_ids=tokens[:, 11:], past_key_values=cache).logits
        torch.testing.assert_close(again, model(input_ids=tokens).logits[:, 11:])
        # attention that is not clearhead's never sees a part of the keys for the whole
        model.set_attn_implementation("eager")
        assert model(input_ids=tokens, past_key_values=cache).logits.isnan().all()
        cache = SplitCache(model.config)
        torch.testing.assert_close(
            model(input_ids=tokens, past_key_values=cache).logits, model(input_ids=tokens).logits
        )
        with pytest.raises(ch.ArgumentError, match="is a SplitCache, and attention did not come to it"):
            model(input_ids=tokens, past_key_values=cache)
        alone = model.generate(**given, max_new_tokens=5)
        with chd.parallel(timeout=30):  # a cache of its own stays whole then
            assert torch.equal(model.generate(**given, max_new_tokens=5), alone)
    model.set_attn_implementation("clearhead")
    with pytest.raises(ch.ArgumentError, match="require gradients, which a cache does not carry"):
        model(input_ids=tokens, past_key_values=SplitCache(model.config))
    with pytest.raises(ch.ArgumentError, match="config: is a dict, expected the model's"):
        SplitCache({})
    observed_in_parts(model, tokens)
    evicted_inside(model, tokens)
    encoders(rank, world)


def held_by_all(layer: Any, world: int) -> int:
    """How many tokens of a layer all ranks hold together."""
    return sum(map(int, everyone(torch.tensor([layer.here[0].shape[2]]), world)))


def observed_in_parts(model: Any, tokens: torch.Tensor) -> None:
    """What a model attended to with a split cache is what one process sees: received, too, of all keys."""
    from transformers import DynamicCache

    from clearhead.integrations.huggingface import register

    register("clearhead-received", want={"top": 2, "received": True})
    model.set_attn_implementation("clearhead-received")

    def run() -> list[Any]:
        cache, found = DynamicCache(config=model.config), []
        for part in (tokens[:, :19], tokens[:, 19:22], tokens[:, 22:]):
            found += model(input_ids=part, past_key_values=cache, output_attentions=True).attentions
        return found

    with torch.no_grad():
        whole = run()
        with chd.parallel(timeout=30):
            split = run()
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(other.received, one.received)
        torch.testing.assert_close(other.entropy, one.entropy)
        assert torch.equal(other.top.indices, one.top.indices)
    model.set_attn_implementation("clearhead")


def watched(rank: int, world: int) -> None:
    """A watch on one rank alone sees calls of whole tensors, and says which of split ones it missed; nobody waits."""
    torch.manual_seed(0)
    model = ch.nn.GPT(ch.nn.GPTConfig(vocabulary=31, context=64, layers=2, heads=4, width=32), dtype=torch.float64)
    tokens = torch.randint(31, (1, 20), generator=torch.Generator().manual_seed(1))
    placement = chd.place(ch.causal(), 20, world)
    with torch.no_grad():
        with ch.watch(model, want={"received": True}) as alone:
            expected = model(tokens)
        with chd.parallel(timeout=30):
            if rank == 1:
                with ch.watch(model, want={"received": True}) as seen:
                    found = model(tokens)
                assert len(seen) == len(alone) == 2
                torch.testing.assert_close(seen[1].received, alone[1].received)
            else:
                found = model(tokens)
        torch.testing.assert_close(found, expected)
        with chd.parallel(placement=placement, timeout=30), ch.watch(model) as seen:
            model(chd.shard(tokens, placement, rank, axis=1))
        assert len(seen) == 0
        assert "split over ranks" in seen.missed["blocks.0.attention"]
        with ch.watch(model) as seen:
            model.generate(tokens, 2, temperature=0, cache=lambda: model.caches(mesh=dist.group.WORLD))
        assert "split over ranks" in seen.missed["blocks.1.attention"]


def evicted_inside(model: Any, tokens: torch.Tensor) -> None:
    """A cache that keeps some tokens does so inside, too, on every rank the same."""
    from clearhead.integrations.huggingface_cache import EvictingCache
    from clearhead.nn.eviction import H2O

    given = {"input_ids": tokens, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(**given, past_key_values=EvictingCache(H2O(keep=8, recent=4), model.config))
    with chd.parallel(timeout=30):
        cache = EvictingCache(H2O(keep=8, recent=4), model.config)
        assert torch.equal(model.generate(**given, past_key_values=cache), alone)
    assert cache.positions[0].shape[-1] == 8


def encoders(rank: int, world: int) -> None:
    """A model with an encoder reads the keys of cross-attention from its cache itself: they are of all ranks, too."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes: dict[str, Any] = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "vocab_size": 37,
        "max_position_embeddings": 64,
    }
    heads: dict[str, Any] = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    }
    torch.manual_seed(0)
    config = BartConfig(**sizes, **heads, attn_implementation="clearhead")
    made: Any = BartForConditionalGeneration(config)
    model = made.double().eval()
    tokens = torch.randint(3, 37, (2, 41), generator=torch.Generator().manual_seed(4))
    given: dict[str, Any] = {"input_ids": tokens, "do_sample": False, "num_beams": 2, "max_new_tokens": 12}
    expected = model.generate(**given)
    with chd.parallel(timeout=30):
        assert torch.equal(model.generate(**given), expected)
