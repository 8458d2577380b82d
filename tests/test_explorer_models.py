"""What the explorer answers of heads, of long contexts and of observations alone; how a notebook shows it."""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_explorer import asked

import clearhead as ch
from clearhead.core.observations import Map, Observed, Top
from clearhead.explorer import long_view
from clearhead.explorer.answers import answer, spelled
from clearhead.explorer.layered import largest
from clearhead.explorer.model import Model
from clearhead.explorer.pooled import Pooled
from clearhead.explorer.saved import bundled, page
from clearhead.explorer.scene import scene_of
from clearhead.explorer.web_files import web_files

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((4, 19, 8)), RNG.standard_normal((2, 23, 8)), RNG.standard_normal((2, 23, 5))
CALLS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "causal": {"mask": ch.causal()},
    "an array that hides": {"mask": np.arange(23) % 3 > 0},
    "a mask for each head": {"mask": RNG.random((4, 19, 23)) < 0.6},
    "softcap, bias and a sink": {"softcap": 2.0, "bias": ch.alibi(4), "sinks": np.array([0.5, -np.inf, 1.0, 2.0])},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_every_matrix_of_a_head_is_what_a_trace_of_each_query_has(options: dict[str, Any]) -> None:
    scene = scene_of(Q, K, V, **options)
    for head in (0, 3):
        rows = [ch.trace(Q, K, V, query=i, head=head, **options).row for i in range(19)]
        for what in ("dots", "scaled", "scores", "weights"):
            expected = np.stack([getattr(row, what) for row in rows])
            np.testing.assert_allclose(asked(scene, "/matrix", what=what, head=head), expected, rtol=1e-12, atol=1e-15)
        lengths = np.array([[np.linalg.norm(row.contribution(j)) for j in range(23)] for row in rows])
        found = asked(scene, "/matrix", what="contributions", head=head)
        np.testing.assert_allclose(found, lengths, rtol=1e-12, atol=1e-15)
        one = asked(scene, "/number", what="contributions", head=head, query=7, key=2)["number"]
        assert one == pytest.approx(found[7, 2], rel=1e-12)
        margins = asked(scene, "/margins", what="contributions", head=head)
        np.testing.assert_allclose(margins["rows"], lengths.sum(1), rtol=1e-12)
        np.testing.assert_allclose(margins["columns"], lengths.sum(0), rtol=1e-12)
        np.testing.assert_allclose(margins["entropy"], [row.entropy for row in rows], rtol=1e-12, atol=1e-15)
        part = asked(scene, "/pooled", head=head, q0=3, q1=9, k0=1, k1=22)
        np.testing.assert_allclose(part, np.stack([row.weights for row in rows])[3:9, 1:22], rtol=1e-6)


def test_shades_without_the_sink_are_spread_over_the_rest() -> None:
    weights = np.array([[0.9, 0.06, 0.04], [0.8, 0.2, 0.0]])
    scores = np.log(np.maximum(weights, 1e-300))
    scene = scene_of(np.eye(2), scores.T, np.eye(3), scale=1.0)
    np.testing.assert_allclose(asked(scene, "/matrix"), weights, atol=1e-12)
    assert asked(scene, "/shade").tolist()[0][0] == 254
    assert asked(scene, "/shade", scale_of="no sink").tolist() == [[254, 76, 50], [254, 254, 0]]
    assert asked(scene, "/margins")["spread_but_first"] == pytest.approx([0, 0.2])
    logs = asked(scene, "/shade", scale_of="log")
    assert 200 < logs[0, 1] < 254, "six hundredths are far from a millionth"


def test_tones_are_the_next_larger_weight() -> None:
    scene = scene_of(*RNG.standard_normal((3, 2, 300, 8)), mask=ch.causal())
    edges, tones = asked(scene, "/edges"), asked(scene, "/tones", head=1)
    exact = asked(scene, "/pooled", head=1)
    assert tones.dtype == np.uint8
    assert (exact <= edges[tones] * (1 + 1e-5)).all()
    assert (exact[tones > 0] >= edges[tones[tones > 0] - 1]).all()
    assert asked(scene, "/tones", head=1, side=40).shape == (40, 40)


def test_a_part_too_large_to_compute_is_cut_out_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = RNG.standard_normal((3, 1, 900, 8))
    scene = scene_of(q, k, v)
    exact = asked(scene, "/pooled", q0=200, q1=700, k0=100, k1=800)
    monkeypatch.setattr(long_view, "MOST", 1000)
    monkeypatch.setattr(long_view, "FINE", 300)
    cut = asked(scene_of(q, k, v), "/pooled", q0=200, q1=700, k0=100, k1=800)
    assert cut.max() == pytest.approx(exact.max(), rel=1e-6)
    assert 100 < cut.shape[0] <= 256
    assert asked(scene, "/pooled", q0=5, q1=6, k0=0, k1=900).shape == (1, 256)


def needle() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A sink at the first key, and a query that finds one key far before it."""
    q, k, v = 0.1 * RNG.standard_normal((3, 400, 8))
    k[0, 0], q[:, 0] = 4.0, 4.0
    q[350] = [0, 30, 0, 0, 0, 0, 0, 0]
    k[100, 1] = 3.0
    return q, k, v


def test_sinks_and_queries_that_find_a_key_far_away_are_named() -> None:
    q, k, v = needle()
    names = [f"t{i}" for i in range(400)]
    seen = ch.observe(q, k, v, mask=ch.causal(), received=True, top=2, map=(64, 64))
    scene = scene_of(q, k, v, mask=ch.causal(), tokens=names)
    for subject in (scene, ch.explore(seen, tokens=names).subject):
        found = asked(subject, "/received")
        assert [one["token"] for one in found["sinks"]] == ["t0"]
        assert found["sinks"][0]["received"] == pytest.approx(float(seen.received[0]))
        assert [(one["token"], one["key_token"]) for one in found["found"]] == [("t350", "t100")]
        assert found["found"][0]["weight"] == pytest.approx(float(seen.top.weights[350, 0]))
        assert asked(subject, "/query", query=350)["looks"][0]["token"] == "t100"
        np.testing.assert_allclose(asked(subject, "/along"), largest(seen.received[None], 256)[0], rtol=1e-6)


def test_an_observed_is_explored_as_far_as_it_was_observed() -> None:
    q, k, v = RNG.standard_normal((3, 2, 2, 40, 8))  # two batch rows: the first is looked at
    seen: Any = ch.observe(q, k, v, map=(16, 16), received=True, top=3, queries=[5])
    made = ch.explore(seen)
    assert repr(made) == "Explorer of observed, 40 queries over 40 keys; .open() shows it, .save('page.html') writes it"
    about = asked(made.subject, "/about")
    assert about["views"] == ["heads", "long"]
    assert about["layers"] == [0]
    np.testing.assert_array_equal(asked(made.subject, "/pooled", head=1), np.float32(seen.map.max[0, 1]))
    cut = asked(made.subject, "/pooled", head=1, q0=10, q1=20, k0=0, k1=40)
    np.testing.assert_array_equal(cut, np.float32(seen.map.max[0, 1, 4:8]))
    exact = asked(made.subject, "/query", head=1, query=5)
    assert exact["exact"] is True
    assert exact["looks"][0]["weight"] == seen.queries.weights[0, 1, 0].max()
    top = asked(made.subject, "/query", head=1, query=6)
    assert (top["exact"], [one["key"] for one in top["looks"]]) == (False, seen.top.indices[0, 1, 6].tolist())
    heads = asked(made.subject, "/heads")
    np.testing.assert_allclose(heads["entropy"], [seen.entropy[0].mean(-1)], rtol=1e-12)
    np.testing.assert_allclose(heads["first"], [seen.received[0, :, 0] / 40], rtol=1e-12)
    assert heads["distance"] is None
    for address in ("/row?query=1", "/walk", "/matrix", "/words?which=mean", "/words?which=rollout"):
        with pytest.raises(ch.ArgumentError, match=r"needs|follows"):
            answer(made.subject, address)


def test_a_whole_matrix_that_was_observed_is_a_heat_map() -> None:
    q, k, v = RNG.standard_normal((3, 7, 4))[0], RNG.standard_normal((9, 4)), RNG.standard_normal((9, 4))
    seen: Any = ch.observe(q, k, v, weights=True)
    subject = ch.explore(seen, query_tokens=list("abcdefg"), tokens=list("ABCDEFGHI")).subject
    about = asked(subject, "/about")
    assert about["views"] == ["heat", "heads", "long"]
    assert (about["query_tokens"][2], about["tokens"][8]) == ("c", "I")
    np.testing.assert_array_equal(asked(subject, "/matrix"), seen.weights)
    np.testing.assert_allclose(asked(subject, "/margins")["columns"], seen.weights.sum(0), rtol=1e-12)
    assert asked(subject, "/shade").max() == 254
    np.testing.assert_array_equal(asked(subject, "/words")["weights"], seen.weights)
    np.testing.assert_array_equal(asked(subject, "/pooled", q0=2, q1=4, k0=1, k1=5), np.float32(seen.weights[2:4, 1:5]))


@pytest.mark.parametrize(
    ("given", "beside", "words"),
    [
        ({}, {}, "nothing to look at: observe(map=(64, 64)"),
        ({"received": True}, {"k": K}, "k: is given beside"),
        ({"received": True}, {"mask": ch.causal()}, "mask: is given beside"),
        ({"received": True}, {"tokens": ["one"]}, "tokens"),
    ],
)
def test_what_cannot_be_explored_of_an_observed_is_said(
    given: dict[str, Any], beside: dict[str, Any], words: str
) -> None:
    seen = ch.observe(Q, K, V, **given)
    with pytest.raises(ch.ArgumentError, match=re.escape(words)):
        ch.explore(seen, **beside)


def test_layers_of_different_sizes_are_refused() -> None:
    one, two = (ch.observe(*RNG.standard_normal((3, 2, n, 4)), received=True) for n in (5, 6))
    with pytest.raises(ch.ArgumentError, match="different sizes"):
        ch.explore([one, two])
    assert asked(ch.explore([one, one]).subject, "/about")["layers"] == [0, 1]


def watched(want: dict[str, Any]) -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    made = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    with torch.no_grad(), ch.watch(made, want=want, tokens=list("abcdefghi")) as seen:
        made(2 * torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(1)))
    return seen


def test_a_watched_model_is_explored_with_and_without_its_arrays() -> None:
    kept, mapped, weighed = (
        watched(want) for want in ({"keep": True}, {"map": (4, 4), "received": True, "top": 2}, {"weights": True})
    )
    whole, pooled, matrices = (ch.explore(seen).subject for seen in (kept, mapped, weighed))
    assert isinstance(whole, Model)
    assert isinstance(pooled, Pooled)
    assert asked(pooled, "/about")["tokens"] == list("abcdefghi")
    assert asked(pooled, "/about")["views"] == ["heads", "long"]
    for name in ("entropy", "first"):
        np.testing.assert_allclose(asked(pooled, "/heads")[name], asked(whole, "/heads")[name], rtol=1e-5)
    assert asked(pooled, "/atlas").shape == (3, 4, 4, 4)
    expected = asked(whole, "/words", which="rollout")["weights"]
    np.testing.assert_allclose(asked(matrices, "/words", which="rollout")["weights"], expected, rtol=1e-5)
    chosen = asked(whole, "/words", which="chosen", chosen="0.1,2.3,2.0")["weights"]
    of = [asked(whole, "/words", layer=y, head=n)["weights"] for y, n in ((0, 1), (2, 3), (2, 0))]
    np.testing.assert_allclose(chosen, np.mean(of, axis=0), rtol=1e-12)
    np.testing.assert_allclose(
        asked(matrices, "/words", which="chosen", chosen="0.1,2.3,2.0")["weights"], chosen, rtol=1e-4
    )
    for address, words in (
        (spelled("/words", which="chosen"), "expected heads as layer.head"),
        (spelled("/words", which="chosen", chosen="0.9"), "has head 9, expected 0 to 3"),
        (spelled("/words", which="chosen", chosen="7.0"), "expected 0 to 2"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            answer(whole, address)
    with pytest.raises(ch.ArgumentError, match="a Seen has its own"):
        ch.explore(kept, tokens=["a"])


def test_a_new_text_is_read_once_however_many_ask_at_once() -> None:
    seen, reading, together = watched({"keep": True}), [], []

    def read(text: str) -> Any:
        reading.append(text)
        together.append(len(reading) - len(done))
        time.sleep(0.05)
        done.append(text)
        return seen

    done: list[str] = []
    model = Model("slow", seen, text="own", read=read)
    with ThreadPoolExecutor(4) as pool:
        texts = ["one", "two", "one", "one"]
        found = list(pool.map(lambda text: asked(model, "/about", text=text)["text"], texts))
    assert found == texts
    assert sorted(reading) == ["one", "two"]
    assert together == [1, 1], "a model is watched by one at a time"


def plausible(layers: int, heads: int, tokens: int, side: int = 64) -> list[Observed[np.ndarray]]:
    """Maps as long contexts have them: a sink, a band along the diagonal, some columns, noise over four decades."""
    rng = np.random.default_rng(0)
    i, j = np.arange(side)[:, None], np.arange(side)
    made = []
    for _ in range(layers):
        noise = rng.lognormal(-9, 1.5, (heads, side, side))
        band = rng.uniform(0.1, 0.6, (heads, side, side)) * np.exp(-np.abs(i - j) / rng.uniform(0.5, 8, (heads, 1, 1)))
        columns = np.where(rng.random((heads, 1, side)) < 0.04, rng.uniform(0.01, 0.3, (heads, side, side)), 0)
        map = np.minimum(noise + band + columns + 0.5 * (j == 0), 1) * (j <= i)
        received = rng.exponential(1.0, (heads, tokens)).astype(np.float32)
        received[:, 0] = tokens / 3
        entropy = np.broadcast_to(rng.uniform(1, 6, (heads, 1)), (heads, tokens))
        top = Top(np.zeros((heads, tokens, 1), np.int64), np.full((heads, tokens, 1), 0.4, np.float32))
        output = np.zeros((heads, tokens, 0))
        made.append(Observed(output, entropy, entropy, entropy, "plausible", top, received, Map(map / 2, map)))
    return made


def test_a_thousand_heads_fit_into_a_file() -> None:
    """32 layers × 32 heads; a name for each of 128k tokens adds 0.8 MB to what is measured here."""
    text = page(ch.explore(plausible(32, 32, 512)).subject)
    assert len(text) < 8_500_000
    found = re.search(r'id="answers">(.*?)</script>', text)
    assert found is not None
    answers = json.loads(found[1])
    assert {"/heads", "/atlas", "/edges", "/tones?head=31&layer=31&side=76", "/received?head=7"} <= set(answers)
    assert answers["/about?layer=31"] == "/about", "one answer, whatever the layer"


def test_modules_become_one_script() -> None:
    files = {name: body.decode() for name, body in web_files().items()}
    text = bundled(files)
    modules = [name for name in files if name.endswith(".js")]
    assert len(modules) > 20
    for name in modules:
        assert text.count(f"const {re.sub(r'[^A-Za-z0-9_]', '_', name)} = await") == 1, f"{name} is imported by nobody"
    assert not re.search(r"^\s*(?:import|export)\b", text, re.MULTILINE)
    circle = {"main.js": 'import { a } from "./a.js";\n', "a.js": 'import { b } from "./main.js";\n'}
    with pytest.raises(AssertionError, match="in a circle"):
        bundled(circle)


def test_a_notebook_has_the_page_in_a_frame_and_colab_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ch.explore(Q[0], K[0], V[0])
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    with pytest.raises(NotImplementedError):  # by which IPython goes on to _repr_html_
        made._ipython_display_()
    html = made._repr_html_()
    assert 'sandbox="allow-scripts allow-downloads"' in html
    assert "height:720px" in html
    assert made.server is None, "a frame that holds its page needs no server"

    calls: list[tuple[int, str, str]] = []
    colab = ModuleType("google.colab")
    colab.output = SimpleNamespace(  # type: ignore[attr-defined]  # a stand-in for the module
        serve_kernel_port_as_iframe=lambda port, path, height: calls.append((port, path, height))
    )
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    made._ipython_display_()
    assert made.server is not None
    try:
        assert calls == [(made.server.server_port, f"/{made.server.token}/", "720")]
        for path, status in ((calls[0][1], 200), ("/other/", 403)):
            connection = HTTPConnection("127.0.0.1", calls[0][0], timeout=10)
            connection.request("GET", path, headers={"Host": "x-colab.googleusercontent.com"})
            reply = connection.getresponse()
            assert reply.status == status, "the token alone says who may ask"
            assert "frame-ancestors https://colab.research.google.com" in reply.headers["Content-Security-Policy"]
            reply.read()
            connection.close()
    finally:
        made.close()


def test_ipython_shows_it_as_html() -> None:
    formatters = pytest.importorskip("IPython.core.formatters", reason="IPython is not installed")
    data, _ = formatters.DisplayFormatter().format(ch.explore(Q[0], K[0], V[0]))
    assert data["text/html"].startswith("<iframe")


def test_a_saved_call_with_many_pairs_has_shades_and_one_with_more_has_its_map() -> None:
    for tokens, there, missing in (
        (600, "/shade?scale_of=linear&what=weights", "/matrix?what=weights"),
        (2100, "/tones", "/shade?scale_of=linear&what=weights"),
    ):
        text = page(scene_of(*RNG.standard_normal((3, tokens, 4))))
        found = re.search(r'id="answers">(.*?)</script>', text)
        assert found is not None
        answers = json.loads(found[1])
        assert there in answers
        assert missing not in answers
        assert len(text) < 3_000_000
