"""Head scores where keys are no tokens: padding, and the empty slots of a cache made for its longest length."""

from __future__ import annotations

from typing import Any

import hf_models as hf
import numpy as np
import pytest
import torch
import transformers

import clearhead as ch

WANTS = [{"keep": True}, {"weights": True}]


@pytest.fixture(scope="module")
def llama() -> Any:
    return hf.build("llama")


@pytest.mark.parametrize("want", WANTS)
@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_padding_is_no_earlier_token(llama: Any, way: str, want: dict[str, Any]) -> None:
    llama.set_attn_implementation(way)
    x = torch.tensor([[0, 0, 0, 5, 6, 7], [0, 1, 2, 3, 4, 5]])  # the number of padding is that of a real token
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad(), ch.watch(llama, want=want) as seen:
        llama(x, attention_mask=mask)
    assert np.isnan(seen.duplicate_token(x).array).all()
    assert np.isnan(seen.induction(x).array).all()


@pytest.mark.parametrize("want", WANTS)
@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_the_first_token_after_padding_has_none_before_it(llama: Any, way: str, want: dict[str, Any]) -> None:
    llama.set_attn_implementation(way)
    mask = hf.LEFT[1:]
    with torch.no_grad(), ch.watch(llama, want=want) as seen:
        llama(hf.IDS[1:], attention_mask=mask)
    with torch.no_grad(), ch.watch(llama, want={"weights": True}) as alone:
        llama(hf.IDS[1:, 3:])
    expected = [call.weights[0].diagonal(-1, -2, -1).mean(-1).numpy() for call in alone]
    np.testing.assert_allclose(seen.previous_token().array, expected, rtol=1e-4)


@pytest.mark.parametrize("want", WANTS)
@pytest.mark.parametrize("way", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
def test_empty_slots_of_a_static_cache_change_no_score(
    llama: Any, way: str, want: dict[str, Any], padded: bool
) -> None:
    llama.set_attn_implementation(way)
    ids = torch.tensor([[3, 4, 3, 5, 4, 3, 5], [3, 3, 4, 4, 5, 6, 3]])
    whole = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]]) if padded else torch.ones_like(ids)
    scores = []
    for cache in (transformers.StaticCache(llama.config, max_cache_len=16), transformers.DynamicCache()):
        static = isinstance(cache, transformers.StaticCache)
        found: dict[str, list[np.ndarray]] = {}
        for start, stop in ((0, 4), (4, 5), (5, 7)):
            given = {"attention_mask": whole[:, :stop], "past_key_values": cache}
            places = torch.arange(start, stop)
            with torch.no_grad(), ch.watch(llama, want=want) as seen:
                llama(ids[:, start:stop], **given, cache_position=places, position_ids=places[None])
            assert not static or start == 0 or seen[0].keys == 16
            empty = torch.full((2, seen[0].keys - stop), 3)  # as if a token stood in them
            names = torch.cat([ids[:, :stop], empty], 1)
            for score, tokens in (("previous_token", ()), ("duplicate_token", (names,)), ("induction", (names,))):
                found.setdefault(score, []).append(getattr(seen, score)(*tokens).array)
        scores.append(found)
    for score, expected in scores[1].items():
        assert np.isfinite(expected[1:]).all()
        np.testing.assert_allclose(scores[0][score], expected, rtol=1e-4, err_msg=score)


def test_the_tokens_of_a_generated_run_are_given_once(llama: Any) -> None:
    llama.set_attn_implementation("sdpa")
    ids = torch.tensor([[3, 4, 3, 5, 4]])
    with torch.no_grad(), ch.watch(llama, want={"keep": True}) as seen:
        whole = llama.generate(ids, max_new_tokens=4, do_sample=False)
    steps = [seen.step(step).induction(whole[:, : seen.step(step)[0].keys]).array for step in range(4)]
    assert seen.induction(whole).array.shape == steps[0].shape == (2, 4)
    counts = [sum(int(n in whole[0, :i].tolist()) for i, n in enumerate(whole[0, :5].tolist()))]
    counts += [int(whole[0, i] in whole[0, :i]) for i in range(5, 8)]
    expected = sum(c * np.nan_to_num(step) for c, step in zip(counts, steps, strict=True)) / sum(counts)
    np.testing.assert_allclose(seen.induction(whole).array, expected, rtol=1e-6)
    with pytest.raises(ch.ArgumentError, match="tokens: has 1 rows of 6, expected at least 7 for each of 1 sequences"):
        seen.induction(whole[:, :6])


def test_a_table_without_a_score_says_why(llama: Any) -> None:
    ids = torch.arange(1, 6)[None]
    with torch.no_grad(), ch.watch(llama, want={"keep": True}) as seen:
        llama(ids)
    assert "no query has such a token" in str(seen.induction(ids))
    assert "no query has such a token" not in str(seen.induction(torch.ones_like(ids)))
