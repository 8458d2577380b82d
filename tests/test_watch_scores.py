"""What kind of head it is, by scores held to a dense reference; traces, top tokens and differences of prompts."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import Any

import hf_models as hf
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watched import Gpt, ids

import clearhead as ch

IDS = torch.randint(1, 6, (2, 11), generator=torch.Generator().manual_seed(4))
LEFT = torch.tensor([[1] * 11, [0] * 4 + [1] * 7])


@cache
def built(name: str) -> nn.Module:
    model = hf.build(name)
    model.set_attn_implementation("eager")
    return model


def see(model: nn.Module, *args: Any, want: dict[str, Any], tokens: Any = None, **kwargs: Any) -> ch.Seen:
    with torch.no_grad(), ch.watch(model, want=want, tokens=tokens) as seen:
        model(*args, **kwargs)
    return seen


def dense(weights: np.ndarray, tokens: list[list[int]], real: np.ndarray, pair: Callable[..., bool]) -> np.ndarray:
    """The mean over real queries with any such pair of the weight on such pairs, one number a head."""
    found: list[list[float]] = [[] for _ in range(weights.shape[1])]
    for row, (name, live) in enumerate(zip(tokens, real, strict=True)):
        first = int(np.argmax(live))
        for i in range(len(name)):
            keys = [j for j in range(len(name)) if live[j] and pair(name, i, j, first)]
            if live[i] and keys:
                for head in range(weights.shape[1]):
                    found[head].append(float(weights[row, head, i, keys].sum()))
    return np.array([np.mean(numbers) for numbers in found])


PAIRS: dict[str, Callable[..., bool]] = {
    "previous_token": lambda t, i, j, first: j == i - 1,
    "first_token": lambda t, i, j, first: j == first,
    "duplicate_token": lambda t, i, j, first: j < i and t[j] == t[i],
    "induction": lambda t, i, j, first: first < j <= i and t[j - 1] == t[i],
}


@pytest.mark.parametrize("score", PAIRS)
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bert"])
@pytest.mark.parametrize("padded", [False, True])
def test_scores_equal_a_dense_reference(score: str, name: str, padded: bool) -> None:
    model = built(name)
    given = {"attention_mask": (LEFT.flip(1) if name == "bert" else LEFT)} if padded else {}
    seen = see(model, IDS, want={"keep": True}, **given)
    full = see(model, IDS, want={"weights": True}, **given)
    real = given["attention_mask"].bool().numpy() if padded else np.ones(IDS.shape, bool)
    tokens = () if score in ("previous_token", "first_token") else (IDS,)
    for record in (seen, full):
        got = getattr(record, score)(*tokens).array
        for row, call in zip(got, full, strict=True):
            expected = dense(call.weights.double().numpy(), IDS.tolist(), real, PAIRS[score])
            np.testing.assert_allclose(row, expected, rtol=3e-6, atol=1e-7)


class Numbers:
    def convert_ids_to_tokens(self, given: list[int]) -> list[str]:
        return [f"t{i}" for i in given]


def test_scores_take_the_tokens_that_were_watched_with_and_count_generated_steps() -> None:
    model = hf.build("llama")
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), ch.watch(model, want={"keep": True, "weights": True}, tokens=Numbers()) as seen:
        whole = model.generate(IDS[:1], max_new_tokens=4, do_sample=False)
    got = seen.induction().array
    shares: list[list[float]] = [[] for _ in range(4)]
    for call in seen.layer(0):
        first = call.keys - call.shape[-2]
        for q in range(call.shape[-2]):
            i = first + q
            keys = [j for j in range(1, i + 1) if whole[0, j - 1] == whole[0, i]]
            for head in range(4 if keys else 0):
                shares[head].append(float(call.weights[0, head, q, keys].sum()))
    np.testing.assert_allclose(got[0], [np.mean(numbers) for numbers in shares], rtol=3e-6)


def test_a_head_that_looks_back_by_one_is_found() -> None:
    class Back(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            place = 40.0 * torch.eye(7)[None, None]
            q = torch.cat([place.roll(-1, -1), place], 1)  # one head looks back, the other at itself
            return nn.functional.scaled_dot_product_attention(q, place.expand(1, 2, 7, 7), x, is_causal=True)

    seen = see(Back(), torch.randn(1, 2, 7, 3), want={"keep": True})
    scores = seen.previous_token()
    assert [round(line.score or 0, 3) for line in scores] == [1.0, 0.0]
    assert scores.best(1)[0].head == 0
    assert scores.rows()[1] == {"name": "", "layer": 0, "head": 1, "score": scores[1].score}
    assert "previous token: weight on the token before" in str(scores)


def test_scores_need_no_matrix() -> None:
    model = Gpt(layers=1, width=8, heads=1, vocabulary=50).eval()
    model.wpe = nn.Embedding(6000, 8)
    given = torch.randint(50, (1, 6000), generator=torch.Generator().manual_seed(0))
    seen = see(model, given, want={"keep": True})
    tracemalloc.start()
    score = seen.induction(given)[0].score
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < (score or 0) < 1
    assert peak < 6000 * 6000 / 2, "not even half a byte for each pair"


def test_scores_say_what_they_need() -> None:
    model = Gpt().eval()
    with pytest.raises(ch.ArgumentError, match=r"want: kept neither weights nor queries and keys of 'h.0.attn'"):
        see(model, ids(), want={"top": 1}).previous_token()
    seen = see(model, ids(), want={"keep": True})
    with pytest.raises(ch.ArgumentError, match=r"tokens: of 'h.0.attn' are not known: watch"):
        seen.induction()
    with pytest.raises(ch.ArgumentError, match="tokens: has 1 rows of 3, expected 13 for each of 2 sequences"):
        seen.induction([1, 2, 3])
    with pytest.raises(ch.ArgumentError, match="seen: has no calls of a sequence on itself"):
        ch.Seen().first_token()


def test_attention_to_another_sequence_is_not_scored() -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True).eval()
    seen = see(layer, torch.randn(1, 5, 8), torch.randn(1, 5, 8), want={"keep": True})
    assert seen.names == ["self_attn", "multihead_attn"]
    assert {line.name for line in seen.previous_token()} == {"self_attn"}


def test_one_head_of_those_kept_has_its_own_number() -> None:
    model = Gpt().eval()
    with torch.no_grad(), ch.watch(model, heads=[2, 1], want={"keep": True}) as seen:
        model(ids())
    whole = see(model, ids(), want={"weights": True})
    assert [line.head for line in seen.layer(0).first_token()] == [2, 1]
    np.testing.assert_allclose(
        seen[0].trace(4, head=1, batch=1).row.weights, whole[0].weights[1, 1, 4].numpy(), rtol=1e-5, atol=1e-7
    )
    with pytest.raises(ch.ArgumentError, match="head: is 0, expected one of 2, 1"):
        seen[0].trace(4, head=0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_a_trace_of_a_call_has_its_weights_and_its_output(name: str) -> None:
    seen = see(built(name), want={"keep": True, "weights": True, "output": True}, **hf.inputs(name))
    for call in seen:
        row = call.trace(3, head=2, batch=0).row
        np.testing.assert_allclose(row.weights, call.weights[0, 2, 3].numpy(), rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(row.output, call.observed.output[0, 2, 3].numpy(), rtol=2e-4, atol=2e-6)


def test_a_trace_has_the_tokens_and_says_how_to_be_kept(tmp_path: Any) -> None:
    names = [f"w{i}" for i in range(13)]
    seen = see(Gpt().eval(), ids(1), want={"keep": True}, tokens=names)
    told = seen[1].trace(query="w5")
    assert told.query_token == "w5"
    assert told.tokens == tuple(names)
    seen.save(tmp_path / "seen.safetensors")
    assert str(ch.Seen.load(tmp_path / "seen.safetensors")[1].trace(query="w5")) == str(told)
    bare = see(Gpt().eval(), ids(1), want={"top": 1})
    with pytest.raises(ch.ArgumentError, match=r"of 'h.1.attn': watch\(model, want=\{'keep': True\}\) does"):
        bare[1].trace(query=5)


def test_top_tokens_are_the_largest_weights_by_name() -> None:
    names = [f"w{i}" for i in range(13)]
    seen = see(Gpt().eval(), ids(), want={"weights": True}, tokens=[names, names[::-1]])
    weights = seen[0].weights[1].double().numpy()
    for head in (None, 2):
        row = weights.mean(0)[7] if head is None else weights[head, 7]
        got = seen[0].top_tokens(7, head=head, batch=1, count=4)
        order = np.argsort(-row)[:4]
        assert [one.position for one in got] == order.tolist()
        assert [one.token for one in got] == [names[::-1][place] for place in order]
        np.testing.assert_allclose([one.weight for one in got], row[order], rtol=1e-6)
    assert [one.position for one in seen[0].top_tokens("w0", batch=0)] == [0], "the first sees nothing but itself"
    with pytest.raises(ch.ArgumentError, match="count: is -1, expected a whole number, 0 or more"):
        seen[0].top_tokens(7, count=-1)


def test_a_difference_of_prompts_is_that_of_their_weights() -> None:
    model = Gpt().eval()
    one, two = ids(1), ids(1).flip(1)
    kept = {"keep": True, "received": True, "distance": True}
    gone = see(model, one, want=kept) - see(model, two, want=kept)
    a, b = (see(model, given, want={"weights": True}) for given in (one, two))
    moved = [(x.weights - y.weights).abs().sum(-1)[0].mean(-1) / 2 for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose([line.moved for line in gone.lines], torch.cat(moved), rtol=1e-4)
    first = see(model, one, want=kept).summary().lines[0].entropy or 0
    assert gone.lines[0].entropy == pytest.approx(first - (see(model, two, want=kept).summary().lines[0].entropy or 0))
    assert gone.best(1)[0].moved == max(line.moved or 0 for line in gone.lines)
    assert "moved" in str(gone)
    longer = see(model, ids(1, 20), want=kept) - see(model, one, want=kept)
    assert {line.moved for line in longer.lines} == {None}
    with pytest.raises(ch.ArgumentError, match="other: was seen of other modules or heads"):
        see(Gpt(layers=1).eval(), one, want=kept) - see(model, one, want=kept)


def test_a_difference_of_generated_runs_is_the_mean_over_queries() -> None:
    model = built("llama")
    records = []
    for given in (IDS[:1], IDS[1:]):
        with torch.no_grad(), ch.watch(model, want={"weights": True}) as seen:
            model.generate(given, max_new_tokens=3, do_sample=False)
        records.append(seen)
    gone = records[0] - records[1]
    for layer in (0, 1):
        pairs = zip(*(record.layer(layer) for record in records), strict=True)
        apart = torch.cat([(a.weights - b.weights).abs().sum(-1)[0] / 2 for a, b in pairs], -1)  # (heads, queries)
        assert apart.shape[-1] == 13
        moved = [line.moved for line in gone.lines if line.layer == layer]
        np.testing.assert_allclose(moved, apart.mean(-1), rtol=1e-5)
