"""What was seen: tables, rollouts, flows, words and files."""

from __future__ import annotations

import dataclasses
import io
import tracemalloc

import networkx
import numpy as np
import pytest
import torch
from budget import Expected, check
from rich.console import Console
from safetensors import safe_open
from torch import nn
from watched import Gpt, Vit, ids

import clearhead as ch
from clearhead.watching.flow import max_flow
from clearhead.watching.words import words_of

EPS = float(np.finfo(np.float32).eps)


def seen_of(model: nn.Module, *args, **options) -> ch.Seen:
    with torch.no_grad(), ch.watch(model, **options) as seen:
        model(*args)
    return seen


@pytest.fixture(scope="module")
def gpt() -> ch.Seen:
    torch.manual_seed(0)
    tokens = [f"t{i}" for i in range(13)]
    want = {"weights": True, "keep": True, "received": True, "top": 3, "map": (4, 4), "queries": [-1], "distance": True}
    return seen_of(Gpt(), ids(), want=want, tokens=tokens)


def by_definition(seen: ch.Seen, dtype: type = np.float64) -> np.ndarray:
    """Rollout as the paper writes it, from whole matrices."""
    length = seen[0].keys
    product = np.eye(length, dtype=dtype)
    for call in seen:
        product = (0.5 * call.weights.numpy().astype(dtype).mean(1) + 0.5 * np.eye(length, dtype=dtype)) @ product
    return product


def without_weights(seen: ch.Seen) -> ch.Seen:
    return ch.Seen([dataclasses.replace(c, observed=dataclasses.replace(c.observed, weights=None)) for c in seen])


def test_rollout_is_the_product_of_the_layers(gpt):
    expected = Expected(by_definition(gpt), by_definition(gpt, np.float32), EPS)
    check(gpt.rollout(), expected, 13, "from weights")
    check(without_weights(gpt).rollout(), expected, 13, "from queries and keys")
    row = Expected(expected.exact[:, 5], expected.plain[:, 5], EPS)
    check(without_weights(gpt).rollout(5), row, 13, "one row")
    np.testing.assert_allclose(gpt.rollout([0, -1]).sum(-1), 1.0, rtol=1e-6)
    assert gpt.rollout([0, -1]).shape == (2, 2, 13)


def test_rollout_of_grouped_heads_and_masks():
    class Grouped(nn.Module):
        def forward(self, q, k, mask):
            return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)

    torch.manual_seed(1)
    mask = torch.rand(2, 1, 7, 7) < 0.7
    mask[..., 0] = True
    arguments = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8)
    for one in (mask, torch.randn(2, 4, 7, 7)):
        seen = seen_of(Grouped(), *arguments, one, want={"weights": True, "keep": True})
        expected = Expected(by_definition(seen), by_definition(seen, np.float32), EPS)
        check(without_weights(seen).rollout(), expected, 7, "grouped")


def test_rollout_of_a_long_sequence_builds_no_matrix():
    model = Vit(dim=16, heads=2, depth=2)
    seen = seen_of(model, torch.randn(1, 3, 200, 240), want={"keep": True})  # 3,001 positions
    tracemalloc.start()
    row = seen.rollout(0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert row.shape == (1, 3001)
    np.testing.assert_allclose(row.sum(), 1.0, rtol=1e-5)
    assert peak < 3001 * 3001, f"{peak:,} bytes: less than a matrix of single bytes"


def test_masks_are_kept_once():
    class Masked(nn.Module):
        def forward(self, x, mask):
            for _ in range(3):
                x = x + nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            return x

    some = torch.rand(1, 1, 9, 9) < 0.8
    some[..., 0] = True
    padding = (torch.arange(9) < 7).expand(1, 1, 9, 9)
    for mask, shape in ((some, (1, 1, 9, 9)), (padding, (1, 1, 1, 9))):
        seen = seen_of(Masked(), torch.randn(1, 2, 9, 8), mask, want={"keep": True, "weights": True})
        kept = [call.kept.mask for call in seen]
        assert kept[0].shape == shape
        assert kept[0] is kept[1] is kept[2]
        check(
            without_weights(seen).rollout(), Expected(by_definition(seen), by_definition(seen, np.float32), EPS), 9, ""
        )
        with pytest.raises(KeyError, match=r"'' made 3 calls, in step 0: seen\.named\(''\)\[i\]"):
            seen[""]


def test_flow_agrees_with_networkx(gpt):
    got = gpt.flow(6, batch=1)
    graph = networkx.DiGraph()
    for depth, call in enumerate(reversed(gpt.calls)):
        mixing = 0.5 * call.weights[1].double().mean(0).numpy() + 0.5 * np.eye(13)
        for i in range(13):
            for j in range(13):
                graph.add_edge((depth, i), (depth + 1, j), capacity=mixing[i, j])
    expected = [networkx.maximum_flow_value(graph, (0, 6), (3, j)) for j in range(13)]
    np.testing.assert_allclose(got, expected, atol=1e-9)
    assert (got[7:] == 0).all(), "a causal model draws nothing from what comes later"


def test_flow_uses_what_flows_back():
    # two paths that must share an edge: the second is found only by sending some of the first another way
    first = np.array([[1.0, 1.0]])
    second = np.array([[1.0, 1.0], [1.0, 0.0]])
    third = np.array([[1.0], [1.0]])
    assert max_flow([first, second, third], 0, 0) == 2.0


def test_what_cannot_be_followed_is_said(gpt):
    bare = seen_of(Gpt(layers=1), ids())
    with pytest.raises(ch.ArgumentError, match=r"kept neither weights nor queries and keys of 'h\.0\.attn'"):
        bare.rollout(0)
    model = Gpt(layers=1)
    with torch.no_grad(), ch.watch(model, want={"weights": True}) as twice:
        model(ids())
        model(ids(length=5))
    with pytest.raises(ch.ArgumentError, match="different lengths"):
        twice.rollout()
    assert twice.step(1).rollout().shape == (2, 5, 5)
    with pytest.raises(ch.ArgumentError, match="query: has 13, expected positions from -13 to 12"):
        gpt.rollout(13)
    with pytest.raises(ch.ArgumentError, match="residual: is 2, expected a share from 0 to 1"):
        gpt.rollout(0, residual=2)
    with pytest.raises(ch.ArgumentError, match="seen: has no calls"):
        ch.Seen().rollout(0)
    long = seen_of(Vit(), torch.randn(1, 3, 64, 64), want={"weights": True})
    with pytest.raises(ch.ArgumentError, match="has 257 positions, and a flow takes at most 128"):
        long.flow(0)


def test_summary_says_what_the_weights_say(gpt):
    lines = gpt.summary().lines
    assert [(line.name, line.layer, line.head) for line in lines[:4]] == [
        ("h.0.attn", 0, 0), ("h.0.attn", 0, 1), ("h.0.attn", 0, 2), ("h.1.attn", 1, 0),
    ]  # fmt: skip
    far = np.abs(np.arange(13)[:, None] - np.arange(13))
    for line in lines:
        weights = gpt[line.name].weights[:, line.head].double().numpy()
        logs = np.log(weights, where=weights > 0, out=np.zeros_like(weights))
        assert line.entropy == pytest.approx(-(weights * logs).sum(-1).mean(), rel=1e-5)
        assert line.first == pytest.approx(weights[..., 0].mean(), rel=1e-5)
        assert line.distance == pytest.approx((weights * far).sum(-1).mean(), rel=1e-4)
        assert line.largest == pytest.approx(gpt[line.name].max_score[:, line.head].max().item())
    assert gpt.summary().rows()[0].keys() == {"name", "layer", "head", "entropy", "first", "distance", "largest"}


def test_summary_leaves_padding_out():
    layer = nn.TransformerEncoderLayer(20, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x = torch.randn(1, 9, 20)
    padded = torch.cat([x, torch.zeros(1, 4, 20)], dim=1)
    padding = torch.arange(13)[None] >= 9
    whole = seen_of(model, x).summary().lines
    with torch.no_grad(), ch.watch(model) as seen:
        model(padded, src_key_padding_mask=padding)
    for one, other in zip(whole, seen.summary().lines, strict=True):
        assert one.entropy == pytest.approx(other.entropy, rel=1e-5)
        assert one.distance == pytest.approx(other.distance, rel=1e-5)
        assert one.largest == pytest.approx(other.largest, rel=1e-5)


@pytest.mark.parametrize("width", [50, 60, 140])
def test_summary_fits_the_terminal(gpt, width):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(gpt.summary())
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    assert max(map(len, lines)) <= width
    assert ("h.2.attn" in console.file.getvalue()) == (width == 140)
    assert all(title in lines[0] for title in ("head", "entropy", "on first", "distance", "logit"))
    assert ("largest logit" in lines[0]) == (width >= 60)
    assert "largest logit" in str(gpt.summary())
    unasked = seen_of(Gpt(layers=1), ids(), want={"top": 2}).summary()
    assert unasked.lines[0].distance is None
    assert "–" in str(unasked)


def test_words_are_known_by_their_marks():
    assert words_of(["[CLS]", "em", "##bed", "##ding", "##s", "##", "[SEP]"]) == [[0], [1, 2, 3, 4], [5], [6]]
    assert words_of(["<|begin|>", "The", "Ġem", "bed", "Ċ", "Ġ!"]) == [[0], [1], [2, 3], [4], [5]]
    assert words_of(["▁The", "▁em", "bed", "</s>"]) == [[0], [1, 2], [3]]
    assert words_of(["plain", "words"]) == [[0], [1]]
    assert words_of(["Hello", ",", "Ġbank", "er", "!?", "Ċ", "The", "Ġend"]) == [[0], [1], [2, 3], [4], [5], [6], [7]]
    assert words_of(["▁state", "-", "of", "▁do", "n", "'", "t"]) == [[0], [1], [2], [3, 4], [5], [6]]
    assert words_of(["▁", "word", "▁", "▁"]) == [[0, 1], [2], [3]]
    assert words_of([]) == []


def test_merged_weights_are_sums_over_keys_and_means_over_queries():
    weights = np.random.default_rng(0).dirichlet(np.ones(5), (2, 5))
    merged = ch.merge_subwords(weights, ["a", "b", "##c", "##d", "e"])
    assert merged.keys == merged.queries == ("a", "bcd", "e")
    groups = [[0], [1, 2, 3], [4]]
    for i, rows in enumerate(groups):
        for j, columns in enumerate(groups):
            expected = weights[:, rows][:, :, columns].sum(-1).mean(-1)
            np.testing.assert_allclose(merged.weights[:, i, j], expected)
    np.testing.assert_allclose(merged.weights.sum(-1), 1.0)
    with pytest.raises(ch.ArgumentError, match="query_tokens: is not given, and there are 1 queries for 5 keys"):
        ch.merge_subwords(weights[:, :1], list("abcde"))
    with pytest.raises(ch.ArgumentError, match="tokens: has 3 names, expected one for each of 5 keys"):
        ch.merge_subwords(weights, list("abc"))


def test_heads_and_layers_are_reduced(gpt):
    every = np.stack([call.weights[1].numpy() for call in gpt])  # layers, heads, queries, keys
    assert gpt.matrix(heads="each", layers="each", batch=1).weights.shape == (3, 3, 13, 13)
    for heads in ("mean", "max"):
        for layers in ("mean", "max"):
            expected = getattr(getattr(every, heads)(1), layers)(0)
            np.testing.assert_array_equal(gpt.matrix(heads=heads, layers=layers, batch=1).weights, expected)
    one = gpt.matrix(heads=2, layers=1, batch=1)
    np.testing.assert_array_equal(one.weights, every[1, 2])
    assert one.keys[:2] == ("t0", "t1")
    assert gpt.matrix(words=True).keys == one.keys, "no marks, no merging"
    rows = without_weights(gpt).matrix(heads="each", layers="each", batch=1).weights
    check(rows, Expected(every.astype(np.float64), every, EPS), 13, "from queries and keys")
    with pytest.raises(ch.ArgumentError, match="heads: is 'sum', expected 'each', 'mean', 'max' or a number below 3"):
        gpt.matrix(heads="sum")
    with pytest.raises(ch.ArgumentError, match="batch: is 2, expected 0 to 1"):
        gpt.matrix(batch=2)


def same(one: object, other: object) -> None:
    if isinstance(one, torch.Tensor | np.ndarray):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same(*pair)
    else:
        assert one == other


def test_one_file_holds_everything(gpt, tmp_path):
    gpt.missed["elsewhere"] = "for the test"
    path = tmp_path / "seen.safetensors"
    gpt.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["seen.safetensors"]
    back = ch.Seen.load(path)
    del gpt.missed["elsewhere"]
    assert back.missed == {"elsewhere": "for the test"}
    assert len(back) == 3
    for one, other in zip(gpt, back, strict=True):
        same(one, other)
    assert isinstance(back[0].entropy, np.ndarray)
    assert back.summary().lines == gpt.summary().lines
    np.testing.assert_array_equal(back.rollout(), gpt.rollout())
    with safe_open(path, "numpy") as file:
        assert file.metadata()["format"] == "clearhead.seen/1"


def test_other_files_are_refused(tmp_path):
    from safetensors.numpy import save_file

    with pytest.raises(ch.ArgumentError, match=r"path: cannot read .*none"):
        ch.Seen.load(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ch.ArgumentError, match="path: cannot read"):
        ch.Seen.load(tmp_path / "text")
    save_file({"a": np.zeros(2)}, tmp_path / "other")
    with pytest.raises(ch.ArgumentError, match=r"was not written by Seen\.save: its format is None"):
        ch.Seen.load(tmp_path / "other")
    with pytest.raises(ch.ArgumentError, match="path: cannot write"):
        ch.Seen().save(tmp_path / "no" / "such" / "folder")


def test_attention_to_another_sequence_as_long_has_no_distance():
    layer = nn.TransformerDecoderLayer(16, 2, 16, batch_first=True)
    seen = seen_of(nn.TransformerDecoder(layer, 1).eval(), torch.randn(1, 5, 16), torch.randn(1, 5, 16))
    assert [(call.name, call.distance is None) for call in seen] == [
        ("layers.0.self_attn", False), ("layers.0.multihead_attn", True),
    ]  # fmt: skip


def test_received_of_the_last_queries_gives_their_share_on_the_first():
    seen = seen_of(Gpt(layers=1), ids(), want={"weights": True, "received": 3})
    weights = seen[0].weights.double().numpy()
    for line in seen.summary().lines:
        assert line.first == pytest.approx(weights[:, line.head, -3:, 0].mean(), rel=1e-5)
        logs = np.log(weights[:, line.head], where=weights[:, line.head] > 0, out=np.zeros((2, 13, 13)))
        assert line.entropy == pytest.approx(-(weights[:, line.head] * logs).sum(-1).mean(), rel=1e-5)


class Split(nn.Module):
    """Two calls, with different numbers of heads."""

    def forward(self, x):
        for heads in (4, 2):
            part = x.unflatten(-1, (heads, -1)).transpose(1, 2)
            x = x + nn.functional.scaled_dot_product_attention(part, part, part).transpose(1, 2).flatten(2)
        return x


def test_summary_of_calls_with_different_numbers_of_heads():
    seen = seen_of(Split(), torch.randn(1, 5, 24))
    lines = seen.summary().lines
    assert [line.head for line in lines] == [0, 1, 2, 3]
    assert lines[3].entropy == pytest.approx(seen[0].entropy[0, 3].mean().item(), rel=1e-5)
    both = torch.stack([call.entropy[0, 1] for call in seen])
    assert lines[1].entropy == pytest.approx(both.mean().item(), rel=1e-5)


def test_names_are_no_markup():
    model = nn.Sequential()
    model.add_module("[/b][red]x", Gpt(layers=1).h[0].attn)
    seen = seen_of(model, torch.randn(1, 5, 24))
    seen.missed["[bold]"] = "pip install 'clearhead[torch]'"
    console = Console(file=io.StringIO(), width=140)
    console.print(seen.summary())
    assert "[/b][red]x" in console.file.getvalue()
    assert "missed [bold]: pip install 'clearhead[torch]'" in console.file.getvalue()
    assert "clearhead[torch]" in str(seen.summary())


def test_arguments_of_what_is_asked_are_checked(gpt):
    share = "residual: is {!r}, expected a share from 0 to 1"
    for asked, words in (
        (lambda: gpt.flow(0, residual=2), share.format(2)),
        (lambda: gpt.rollout(0, residual="x"), share.format("x")),
        (lambda: gpt.rollout(1.5), "query: has 1.5, expected positions from -13 to 12"),
        (lambda: gpt.rollout([True]), "query: has True, expected positions from -13 to 12"),
        (lambda: gpt[0].rows([1.5]), "queries: has 1.5, expected positions from -13 to 12"),
        (lambda: gpt.matrix(batch="0"), "batch: is '0', expected 0 to 1"),
        (lambda: gpt.flow(0, batch=1.0), "batch: is 1.0, expected 0 to 1"),
        (lambda: ch.Seen().layer(0), "layer: is 0, and the calls that were seen have none"),
    ):
        with pytest.raises(ch.ArgumentError) as error:
            asked()
        assert str(error.value) == words
    assert gpt[0].rows(-1).shape == (2, 3, 1, 13)


def test_a_matrix_is_of_one_step():
    model = Gpt(layers=2)
    with torch.no_grad(), ch.watch(model, want={"weights": True}) as seen:
        model(ids())
        model(ids())
    with pytest.raises(ch.ArgumentError, match=r"seen: has more than one step: choose one by step\(\)"):
        seen.matrix()
    assert seen.step(1).matrix(layers="each").weights.shape == (2, 13, 13)


def test_calls_without_heads_are_one_matrix_and_cannot_be_followed():
    class Bare(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    seen = seen_of(Bare(), torch.randn(5, 8), want={"weights": True, "received": True})
    np.testing.assert_array_equal(seen.matrix().weights, seen[0].weights.numpy())
    assert len(seen.summary().lines) == 1
    for follow in (seen.rollout, seen.flow):
        with pytest.raises(ch.ArgumentError, match="seen: has '' without heads"):
            follow(0)


def test_without_safetensors_it_says_what_brings_it(gpt, tmp_path, monkeypatch):
    import sys

    for name in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"files need safetensors: pip install safetensors"):
        gpt.save(tmp_path / "seen")
    with pytest.raises(ImportError, match=r"files need safetensors: pip install safetensors"):
        ch.Seen.load(tmp_path / "seen")
