"""What was seen, shown: one HTML file for all heads, a pandas table, and plots that take a call with its tokens."""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_browser import CHROMIUM, ink, screenshot
from torch import nn
from watched import Gpt, ids

import clearhead as ch

NASTY = '</script><b>&"\u2028'


def encoder(layers: int, heads: int, length: int, want: dict[str, Any], tokens: Any = None) -> ch.Seen:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(4 * heads, heads, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    with torch.no_grad(), ch.watch(model, want=want, tokens=tokens) as seen:
        model(3 * torch.randn(1, length, 4 * heads))
    return seen


def numbers(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def maps(call: dict[str, Any]) -> np.ndarray:
    """The numbers that the page shows, decoded as its script does."""
    cells = [np.frombuffer(base64.b64decode(head["data"]), "<u2") / 65535 * head["most"] for head in call["heads"]]
    return np.array(cells).reshape(-1, call["rows"], call["columns"])


@pytest.mark.parametrize("want", [{"keep": True}, {"weights": True}])
def test_the_page_holds_every_head_of_every_layer(want: dict[str, Any]) -> None:
    names = [f"w{i}" for i in range(9)]
    seen = encoder(3, 2, 9, want, names)
    calls = numbers(seen.html())
    full = encoder(3, 2, 9, {"weights": True})
    assert [call["name"] for call in calls] == full.names
    for call, there in zip(calls, full, strict=True):
        assert [head["head"] for head in call["heads"]] == [0, 1]
        assert call["queries"] == call["keys"] == names
        np.testing.assert_allclose(maps(call), there.weights[0], atol=1e-5)


@pytest.mark.parametrize("want", [{"keep": True}, {"weights": True}, {"map": (64, 64)}])
def test_a_long_call_is_pooled(want: dict[str, Any]) -> None:
    seen = encoder(1, 2, 150, want)
    (call,) = numbers(seen.html())
    expected = encoder(1, 2, 150, {"map": (64, 64)})[0].map.mean[0]
    assert (call["rows"], call["columns"]) == (64, 64)
    np.testing.assert_allclose(maps(call), expected, atol=2e-5 * float(expected.max()))
    assert call["keys"][0] == "0 … 2"
    assert call["keys"][-1] == "148 … 149"
    assert "the mean of up to 3 × 3 weights" in call["pooled"]


class Addresses(HTMLParser):
    """Every attribute of every element."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [(tag, name, value) for name, value in attrs]


def test_the_page_fetches_nothing_and_escapes_what_it_is_given() -> None:
    page = encoder(1, 2, 3, {"keep": True}, [NASTY, "b", "c"]).html(title=NASTY)
    parser = Addresses()
    parser.feed(page)
    assert not {name for _, name, _ in parser.found} & {"src", "href", "action", "data", "srcset", "style", "onclick"}
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|import\(", page)
    assert page.count("</script>") == 2, "no token ends the script"
    assert "<b>" not in page
    assert numbers(page)[0]["keys"][0] == NASTY


def test_what_cannot_be_drawn_says_how() -> None:
    with pytest.raises(
        ch.ArgumentError, match=r"want: kept nothing of .* that can be drawn: want=\{'weights': True\} or"
    ):
        encoder(1, 2, 5, {"top": 1}).html()
    with pytest.raises(ch.ArgumentError, match="seen: has no calls"):
        ch.Seen().html()
    with pytest.raises(ch.ArgumentError, match="batch: is 1, expected 0 to 0"):
        encoder(1, 2, 5, {"keep": True}).html(batch=1)
    seen = encoder(1, 2, 5, {"keep": True})
    with pytest.raises(ch.ArgumentError, match=r"seen: has 4,098 maps, and a page has room for 4,096: choose a step"):
        ch.Seen(seen.calls * 2049).html()


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js on this machine")
def test_the_script_is_javascript(tmp_path: Path) -> None:
    import subprocess

    from clearhead.watching.page_parts import SCRIPT

    (tmp_path / "page.js").write_text(SCRIPT, encoding="utf-8")
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True, capture_output=True, timeout=60)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize(("width", "length", "dark"), [(1440, 8, False), (390, 200, True)])
def test_twelve_layers_of_twelve_heads_are_drawn_and_fit(tmp_path: Path, width: int, length: int, dark: bool) -> None:
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    pixels = screenshot(tmp_path, encoder(12, 12, length, {"keep": True}).html(), width, *flags)
    assert ink(pixels).mean() > 0.05
    assert not ink(pixels)[:, -6:].any(), "nothing runs out of the window"
    assert (pixels[2, 2].sum() < 200) == dark


def test_a_table_for_pandas_has_a_row_for_each_query() -> None:
    model = Gpt(layers=2).eval()
    names = [[f"a{i}" for i in range(13)], [f"b{i}" for i in range(13)]]
    with torch.no_grad(), ch.watch(model, want={"top": 2, "distance": True}, tokens=names, heads=[2, 0]) as seen:
        model(ids())
    table = seen.to_pandas()
    assert len(table) == 2 * 2 * 2 * 13
    one = table[(table.layer == 1) & (table.batch == 1) & (table["head"] == 0) & (table["query"] == 7)].iloc[0]
    assert one.token == "b7"
    assert one.entropy == pytest.approx(float(seen[1].entropy[1, 1, 7]))
    assert one.distance == pytest.approx(float(seen[1].distance[1, 1, 7]))
    assert one.key == int(seen[1].top.indices[1, 1, 7, 0])
    assert one.key_token == f"b{one.key}"
    assert one.weight == pytest.approx(float(seen[1].top.weights[1, 1, 7, 0]))
    assert len(ch.Seen().to_pandas()) == 0


def test_without_pandas_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_pandas needs pandas: pip install pandas"):
        ch.Seen().to_pandas()


def labels(axis: Any) -> list[str]:
    return [tick.get_text() for tick in axis.get_ticklabels()]


@pytest.mark.parametrize("want", [{"keep": True}, {"weights": True}])
def test_plots_take_a_call_with_its_tokens(want: dict[str, Any]) -> None:
    names = [f"w{i}" for i in range(5)]
    seen = encoder(2, 3, 5, want, names)
    weights = encoder(2, 3, 5, {"weights": True})[1].weights[0]
    ax = ch.plot_attention(seen[1], head=2)
    assert labels(ax.xaxis) == labels(ax.yaxis) == names
    np.testing.assert_allclose(np.asarray(ax.get_images()[0].get_array()), weights[2], rtol=1e-5)
    every = ch.plot_heads(seen[1])
    assert [one.get_title() for one in every] == ["head 0", "head 1", "head 2"]
    assert labels(every[0].yaxis) == names
    np.testing.assert_allclose(np.asarray(every[1].get_images()[0].get_array()), weights[1], rtol=1e-5)
    assert labels(ch.plot_attention(seen[1], head=0, tokens=list("abcde")).xaxis) == list("abcde")


def test_plots_take_the_tokens_of_the_batch_row_that_is_drawn() -> None:
    names = [[f"a{i}" for i in range(13)], [f"b{i}" for i in range(13)]]
    model = Gpt().eval()
    with torch.no_grad(), ch.watch(model, want={"keep": True}, tokens=names) as seen:
        model(ids())
    assert labels(ch.plot_attention(seen[0], head=(1, 2)).xaxis) == names[1]


def test_a_long_call_is_drawn_in_blocks() -> None:
    ax = ch.plot_attention(encoder(1, 2, 600, {"keep": True})[0], head=1)
    assert ax.get_xlabel() == "key (blocks)"
    assert np.asarray(ax.get_images()[0].get_array()).shape == (128, 128)
    with pytest.raises(ch.ArgumentError, match="weights: is a call with nothing to draw"):
        ch.plot_attention(encoder(1, 2, 5, {"top": 1})[0])


def test_the_entropies_of_what_was_seen_are_drawn_by_layer() -> None:
    seen = encoder(3, 2, 6, {"received": True})
    ax = ch.plot_entropy(ch.Seen(seen.calls[1:]))
    lines = seen.summary().lines
    expected = np.array([line.entropy for line in lines[2:]]).reshape(2, 2)
    np.testing.assert_allclose(np.asarray(ax.get_images()[0].get_array()), expected)
    assert labels(ax.yaxis) == ["1", "2"]


def test_facts_under_a_map_are_those_of_its_step_and_row() -> None:
    model = Gpt(layers=1).eval()
    want = {"keep": True, "received": True, "distance": True}
    with torch.no_grad(), ch.watch(model, want=want) as seen:
        model(ids())
        model(ids().flip(1))
    for batch in (0, 1):
        with torch.no_grad(), ch.watch(model, want=want) as alone:
            model(ids()[batch : batch + 1])
            model(ids().flip(1)[batch : batch + 1])
        for step, call in enumerate(numbers(seen.html(batch=batch))):
            lines = alone.step(step).summary().lines
            for head, line in zip(call["heads"], lines, strict=True):
                assert f"entropy {line.entropy:.3f} nats · {line.first:.1%} on the first token" in head["facts"]
                assert f"mean distance {line.distance:.2f}" in head["facts"]


def test_in_a_notebook_a_table_is_text_where_text_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.no_grad(), ch.watch(model, want={"keep": True}) as seen:
        model(torch.zeros(1, 7, 16))
    there = str(seen.summary()), str(seen.previous_token())
    # as rich finds it in a kernel: a console then shows what it prints, and nothing is left to be read
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert (str(seen.summary()), str(seen.previous_token())) == there
    assert there[1].startswith("previous token")
