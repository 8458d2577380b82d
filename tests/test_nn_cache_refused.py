"""A cache after a call that was refused is the cache before it; what inference mode wrote can be written to later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import GPT, DifferentialAttention, GPTConfig, KVCache, LatentAttention, MultiHeadAttention
from clearhead.nn.block import TransformerBlock

CACHES: dict[str, Callable[[], KVCache]] = {
    "growing": KVCache,
    "preallocated": lambda: KVCache(max_length=64),
    "ring": lambda: KVCache(window=4),
    "ring that is not full": lambda: KVCache(window=64),
    "ring with sinks": lambda: KVCache(window=3, sinks=2),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "multi-head": lambda: MultiHeadAttention(24, 4, causal=True, positions=ch.rotary()),
    "grouped": lambda: MultiHeadAttention(24, 4, kv_heads=2, causal=True, positions="relative"),
    "latent": lambda: LatentAttention(24, 4, kv_rank=8, rotary_dim=4),
    "differential": lambda: DifferentialAttention(24, 2, causal=True),
    "block": lambda: TransformerBlock(24, 4, causal=True),
}
PROMPTS = {"whole": None, "ragged": [7, 3]}


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODULES[name]().eval()


def state(cache: KVCache) -> Any:
    """All that the next queries could see of a cache."""
    held = [None, None]
    if cache.k is not None and cache.v is not None and cache.window is None:
        held = [[t[row, :, :n].clone() for row, n in enumerate(cache.seen)] for t in (cache.k, cache.v)]
    elif cache.k is not None and cache.v is not None:
        held = [[t.clone()] for t in (cache.k, cache.v)]
    return cache.lengths, held, repr(cache)


def same(one: Any, other: Any) -> bool:
    (seen, held, text), (seen_then, held_then, text_then) = one, other
    pairs = [(a, b) for x, y in zip(held, held_then, strict=True) if x is not None for a, b in zip(x, y, strict=True)]
    return seen == seen_then and text == text_then and all(torch.equal(a, b) for a, b in pairs)


def wrong_calls(cache: KVCache, batch: int, steps: int) -> dict[str, dict[str, Any]]:
    """Arguments that are refused before or after tokens were added."""
    calls: dict[str, dict[str, Any]] = {"lengths": {"lengths": [steps + 1] * batch}, "mask": {"mask": "causal"}}
    if cache.window is None:
        calls["shape of a mask"] = {"mask": torch.ones(batch, 1, steps, 999, dtype=torch.bool)}
        calls["heads of a mask"] = {"mask": torch.ones(batch, 13, steps, 1, dtype=torch.bool)}
    return calls


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_a_refused_call_leaves_a_cache_as_it_was(kind, name, prompt, steps):
    attend, cache = made(name), CACHES[kind]()
    x, more = torch.randn(2, 7, 24), torch.randn(2, steps, 24)
    attend(x, cache=cache, lengths=prompt)
    before, other = state(cache), copy.deepcopy(cache)
    for why, wrong in wrong_calls(cache, 2, steps).items():
        with pytest.raises(ch.ArgumentError):
            attend(more, cache=cache, **wrong)
        assert same(state(cache), before), why
    assert torch.equal(attend(more, cache=cache), attend(more, cache=other)), "and it goes on as if nothing had been"


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_whatever_fails_after_tokens_were_added(kind, name, steps, monkeypatch):
    """Also what no argument is to blame for: memory that runs out, and Ctrl-C."""
    attend, cache = made(name), CACHES[kind]()
    more = torch.randn(2, steps, 24)
    for filled in (0, 5):
        if filled:
            attend(torch.randn(2, filled, 24), cache=cache)
        before, other = state(cache), copy.deepcopy(cache)
        last = attend.feed_forward if name == "block" else attend.out_proj
        for error in (MemoryError, KeyboardInterrupt):

            def fails(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            handle = last.register_forward_pre_hook(fails)
            with pytest.raises(error):
                attend(more, cache=cache)
            handle.remove()
            assert same(state(cache), before)
        assert torch.equal(attend(more, cache=cache), attend(more, cache=other))


@pytest.mark.parametrize("kind", ["growing", "ring"])
@torch.no_grad()
def test_layers_before_the_one_that_refused_take_their_tokens_back(kind):
    model = GPT(GPTConfig(vocabulary=11, context=64, layers=3, heads=2, width=16)).eval()
    caches = [CACHES[kind](), CACHES[kind](), KVCache(max_length=6)]
    tokens = torch.randint(11, (2, 6))
    model(tokens, caches=caches)
    before = [state(cache) for cache in caches]
    with pytest.raises(ch.ArgumentError, match="max_length: is 6, and 6 positions with 1 more do not fit"):
        model(tokens[:, :1], caches=caches)
    assert all(same(state(cache), then) for cache, then in zip(caches, before, strict=True))


@pytest.mark.parametrize("chunks", [[5, 1, 1, 3, 1], [1] * 11, [1, 3, 1, 5, 1]], ids=str)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", CACHES)
def test_what_inference_mode_wrote_can_be_gone_on_with(kind, name, chunks):
    attend = made(name)
    x = torch.randn(2, 11, 24)

    def decoded(modes: list[Any]) -> Tensor:
        cache, parts = CACHES[kind](), []
        for place, part in enumerate(x.split(chunks, dim=1)):
            with modes[place % len(modes)]():
                parts.append(attend(part, cache=cache).clone())
        return torch.cat([part.clone() for part in parts], dim=1)

    with torch.no_grad():
        plain = decoded([torch.no_grad])
        for modes in ([torch.inference_mode, torch.no_grad], [torch.no_grad, torch.inference_mode]):
            assert torch.equal(decoded(modes), plain)
        assert torch.equal(decoded([torch.inference_mode, torch.no_grad, torch.no_grad]), plain)


@pytest.mark.parametrize("kind", CACHES)
def test_trimmed_reordered_and_cleared_after_inference_mode(kind):
    attend, cache = made("multi-head"), CACHES[kind]()
    x = torch.randn(2, 3, 24)
    with torch.inference_mode():
        attend(x, cache=cache)
    cache.trim(2)
    cache.reorder([1, 0])
    with torch.no_grad():
        attend(x[:, :1], cache=cache)
        cache.clear()
        other = CACHES[kind]()
        assert torch.equal(attend(x, cache=cache), attend(x, cache=other))


def test_a_model_generates_after_a_prompt_that_was_read_in_inference_mode():
    model = GPT(GPTConfig(vocabulary=11, context=64, layers=2, heads=2, width=16)).eval()
    tokens = torch.randint(11, (2, 6))
    caches, others = model.caches(), model.caches()
    with torch.inference_mode():
        model(tokens, caches=caches)
    with torch.no_grad():
        model(tokens, caches=others)
        assert torch.equal(model(tokens[:, :1], caches=caches), model(tokens[:, :1], caches=others))
