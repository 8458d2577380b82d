"""The explorer's answers, its server and its saved file, without a browser."""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
from base64 import b64decode
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import clearhead as ch
from clearhead.explorer.answers import LONGEST, answer, packed, spelled
from clearhead.explorer.layered import largest
from clearhead.explorer.model import Model
from clearhead.explorer.saved import page
from clearhead.explorer.scene import Scene, scene_of
from clearhead.explorer.server import Server
from clearhead.explorer.web_files import WEB, web_files
from clearhead.textbook import EXAMPLES

CAT = EXAMPLES["cat_sat"]
ch.explore  # noqa: B018  # imports the views, which add what they answer to


@pytest.fixture(scope="module")
def scene() -> Scene:
    return scene_of(CAT.q, CAT.k, CAT.v, name="cat_sat", tokens=CAT.tokens, mask=ch.causal())


def asked(scene: Scene | Model, path: str, **params: Any) -> Any:
    found = answer(scene, spelled(path, **params))
    return unpacked(found.body) if found.kind == "array" else json.loads(found.body)


def unpacked(body: bytes) -> np.ndarray:
    length = int.from_bytes(body[:4], "little")
    header = json.loads(body[4 : 4 + length])
    return np.frombuffer(body[4 + length :], f"<{header['dtype']}").reshape(header["shape"])


def test_matrices_are_those_of_the_library(scene: Scene) -> None:
    seen = ch.observe(CAT.q, CAT.k, CAT.v, mask=ch.causal(), weights=True, received=True)
    np.testing.assert_allclose(asked(scene, "/matrix"), seen.weights, rtol=1e-15)
    margins = asked(scene, "/margins")
    np.testing.assert_allclose(margins["entropy"], seen.entropy, rtol=1e-15)
    np.testing.assert_array_equal(margins["received"], seen.received)
    np.testing.assert_array_equal(margins["allowed"], np.tri(5, dtype=int))
    shades = asked(scene, "/shade")
    assert shades.dtype == np.uint8
    assert (shades == 255).sum() == 10, "what the mask hides"
    assert shades.max(where=shades < 255, initial=0) == 254


def test_an_edit_is_followed_by_everything(scene: Scene) -> None:
    q = CAT.q.copy()
    q[1, 2] = -3.5
    expected = ch.attention(q, CAT.k, CAT.v, mask=ch.window(1), scale=0.25)
    row = asked(scene, "/row", query=1, edits="q.0.1.2.-3.5", mask="window(1)", scale=0.25)
    np.testing.assert_allclose(row["output"], expected[1], rtol=1e-14)
    assert asked(scene, "/about", mask="none")["mask"] is None
    assert "mask" not in asked(scene, "/about", mask="none")["formula"]


def test_one_pair_is_told_as_trace_tells_it(scene: Scene) -> None:
    cell = asked(scene, "/cell", query=2, key=1)
    told = ch.trace(CAT.q, CAT.k, CAT.v, query=2, tokens=CAT.tokens, mask=ch.causal()).cell(1)
    assert tuple(cell["lines"]) == told.lines


def test_a_walk_has_every_operation_of_every_query(scene: Scene) -> None:
    steps = asked(scene, "/walk")
    alone = [list(ch.trace(CAT.q, CAT.k, CAT.v, query=i, tokens=CAT.tokens, mask=ch.causal()).walk()) for i in range(5)]
    assert [one["sentence"] for one in steps] == [one.sentence for row in alone for one in row]
    assert all(len(one["sentence"].split()) <= 12 for one in steps)
    nothing = asked(scene, "/walk", mask="~causal() & ~window(3, 9)")
    assert all(len(one["sentence"].split()) <= 12 for one in nothing)
    assert any("because" in one.get("detail", "") for one in nothing), "what was left out is told beside it"
    assert {one["phase"] for one in nothing} >= {"score", "scale", "mask", "output"}


def test_lines_of_code_end_in_what_attention_gives(scene: Scene) -> None:
    lines = asked(scene, "/code")["lines"]
    np.testing.assert_allclose(lines[-1]["value"], ch.attention(CAT.q, CAT.k, CAT.v, mask=ch.causal()), rtol=1e-15)
    assert "tanh" not in str(lines)
    assert "tanh" in str(asked(scene, "/code", softcap=3))


def test_a_dragged_arrow_lies_where_it_was_dragged_to(scene: Scene) -> None:
    moved = asked(scene, "/drag", name="k", row=2, x=0.5, y=-0.25, query=1)["edits"]
    for edit in moved.split(";"):
        assert edit.startswith("k.0.2.")
    flat = scene_of(*(EXAMPLES["it_animal"].q, EXAMPLES["it_animal"].k, EXAMPLES["it_animal"].v))
    with_all = asked(scene, "/drag", name="k", row=2, x=0.5, y=-0.25, query=1, edits=f"q.0.0.0.7;{moved}")
    assert with_all["edits"].startswith("q.0.0.0.7;")
    assert with_all["edits"].count("k.0.2.1.") == 1, "in place of what was there"
    np.testing.assert_allclose(with_all["keys"][2], [0.5, -0.25], atol=1e-12)
    moved = asked(flat, "/drag", name="q", x=1.25, y=-2)["edits"]
    assert asked(flat, "/geometry", edits=moved)["query"] == [1.25, -2]


def test_a_long_matrix_is_pooled_and_its_parts_are_exact() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 600, 8))
    scene = scene_of(q, k, v, mask=ch.causal())
    weights = np.asarray(ch.observe(q, k, v, mask=ch.causal(), weights=True).weights)
    whole = asked(scene, "/pooled", head=1)
    assert whole.shape == (256, 256)
    np.testing.assert_allclose(whole, largest(weights[1], 256), rtol=1e-6)
    part = asked(scene, "/pooled", head=1, q0=400, q1=500, k0=300, k1=420)
    np.testing.assert_allclose(part, weights[1, 400:500, 300:420], rtol=1e-6)
    found = asked(scene, "/received", head=1)
    assert found["most"][0]["key"] == int(weights[1].sum(0).argmax())
    np.testing.assert_allclose(found["most"][0]["received"], weights[1].sum(0).max())
    with pytest.raises(ch.ArgumentError, match="expected more than q0"):
        answer(scene, "/pooled?q0=5&q1=5")


@pytest.mark.parametrize("d", [64, 100])
def test_scaling_is_the_librarys_own_at_the_sliders_stops_and_between(scene: Scene, d: int) -> None:
    found = asked(scene, "/scaling", d=d, sigma=2)
    expected = ch.scaling(d, keys=64, queries=64, sigma=2.0).rows[0]
    for name in ("unscaled", "scaled"):
        assert found[name] == vars(getattr(expected, name))
        drawn = found["drawn"][name]
        assert sum(drawn["own"]["counts"]) == sum(drawn["shared"]["counts"]) == 64 * 64
        assert sum(drawn["weights"]) == pytest.approx(1)
    along = asked(scene, "/curve", sigma=2)
    assert [row["d_k"] for row in along["rows"]] == [2**i for i in range(11)]


def test_loops_give_what_attention_gives_and_every_pass(scene: Scene) -> None:
    found = asked(scene, "/loops")
    np.testing.assert_allclose(found["output"], ch.attention(CAT.q, CAT.k, CAT.v, mask=ch.causal()), rtol=1e-14)
    lines = {one["line"].strip(): one["passes"] for one in found["lines"]}
    dots = [one["value"] for one in lines["dot = dot + q[i][c] * k[j][c]"]]
    np.testing.assert_allclose(dots, (CAT.q[:, None] * CAT.k).cumsum(-1).ravel(), rtol=1e-15)
    counters = [tuple(one["at"].values()) for one in lines["dot = dot + q[i][c] * k[j][c]"]]
    assert counters == list(np.ndindex(5, 5, 4)), "a pass that leaves its value as it was is a pass too"
    with pytest.raises(ch.ArgumentError, match="which the loops do not have"):
        answer(scene, "/loops?softcap=2")


def test_lines_with_every_option_still_end_in_what_attention_gives() -> None:
    draw = np.random.default_rng(0).standard_normal
    q, k, v, sinks = draw((4, 3, 6)), draw((2, 5, 6)), draw((2, 5, 2)), draw(4)
    options: dict[str, Any] = {"mask": ch.causal(), "bias": ch.alibi(4), "softcap": 2.0, "sinks": sinks}
    scene = scene_of(q, k, v, **options)
    found = asked(scene, "/code", head=3)
    np.testing.assert_allclose(found["lines"][-1]["value"], ch.attention(q, k, v, **options)[3], rtol=1e-13)
    names: dict[str, Any] = {"np": np, "q": q, "k": k, "v": v}
    exec(found["python"], names)
    np.testing.assert_allclose(names["output"], ch.attention(q, k, v, **options)[3], rtol=1e-13)


def test_the_python_that_is_copied_is_the_call() -> None:
    draw = np.random.default_rng(0).standard_normal
    q, k, v = draw((2, 3, 4)), draw((1, 3, 4)), draw((1, 3, 2))
    for options in (
        {"mask": (ch.causal() | ch.window(1, 1)) & ~ch.lengths(1), "scale": 0.3},
        {"mask": ch.lets(np.eye(3, dtype=bool)), "bias": ch.alibi(2)},
        {"sinks": np.array([0.5, -1.0]), "bias": draw((3, 3))},
    ):
        names: dict[str, Any] = {}
        exec(asked(scene_of(q, k, v, **options), "/about")["python"].replace("ch.observe", "found = ch.observe"), names)
        np.testing.assert_allclose(names["found"].output, ch.attention(q, k, v, **options), rtol=1e-14)


def test_mechanisms_are_computed_by_the_library(scene: Scene) -> None:
    ways = {way["name"]: way for way in asked(scene, "/compare")["ways"]}
    causal = ch.attention(CAT.q, CAT.k, CAT.v, mask=ch.causal())
    np.testing.assert_allclose(ways["causal"]["output"], causal, rtol=1e-14, atol=1e-16)
    turned = ch.attention(ch.rotary()(CAT.q[None])[0], ch.rotary()(CAT.k[None])[0], CAT.v)
    np.testing.assert_allclose(ways["rotary"]["output"], turned, rtol=1e-14)
    assert ways["full"]["largest"] == 0
    eight = [np.stack([array] * 8) for array in (CAT.q, CAT.k, CAT.v)]
    slopes = ch.attention(*eight, bias=ch.alibi(8), mask=ch.causal())[0]
    np.testing.assert_allclose(ways["ALiBi"]["output"], slopes, rtol=1e-14, atol=1e-16)
    np.testing.assert_allclose(ways["linear"]["output"], ch.approximate(CAT.q, CAT.k, CAT.v, ch.linear()), rtol=1e-14)
    for name in ("linear", "Performer"):  # the weights that are shown are those that give the output
        np.testing.assert_allclose(ways[name]["weights"] @ CAT.v, ways[name]["output"], rtol=1e-5)
    held = {way["name"]: way for way in asked(scene, "/compare", to="causal")["ways"]}
    np.testing.assert_allclose(held["rotary"]["differences"], turned - causal, rtol=1e-12, atol=1e-15)
    odd = asked(scene_of(CAT.q[:, :3], CAT.k[:, :3], CAT.v[:, :3]), "/compare")["ways"]
    assert [way["name"] for way in odd if "refused" in way] == ["rotary", "grouped"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("/nothing", "which nothing answers to"),
        ("/cell?query=9", "expected a whole number from 0 to 4"),
        ("/matrix?what=__class__", "expected one of dots"),
        ("/row?edits=q.0.9.9.1", "within q, k and v"),
        ("/row?edits=q.0.1.1.nan", "expected a number"),
        ("/mask?expression=__import__('os')", "expression"),
        ("/scaling?d=1e9", "from 1 to 1024"),
        ("/scaling?sigma=-1", "sigma"),
        ("/position?kind=x", "expected one of alibi"),
        ("/row?mask=lengths([1,2,3])", "lengths: has shape (3,)"),
        ("/" + "x" * LONGEST, "characters"),
    ],
)
def test_what_cannot_be_answered_is_said_in_a_sentence(scene: Scene, address: str, words: str) -> None:
    with pytest.raises(ch.ArgumentError, match=re.escape(words)):
        answer(scene, address)


def test_numbers_that_json_has_no_word_for(scene: Scene) -> None:
    assert "-inf" in asked(scene, "/row", query=0)["scores"]
    assert packed(np.zeros((2, 3), np.float32))[:4] == (28).to_bytes(4, "little"), "numbers begin at a multiple of 8"


@pytest.fixture(scope="module")
def server(scene: Scene) -> Iterator[Server]:
    made = Server(scene, port=0)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def get(server: Server, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    found = reply.status, dict(reply.getheaders()), reply.read()
    connection.close()
    return found


def test_the_page_and_its_files_are_served_with_a_policy(server: Server) -> None:
    base = urlsplit(server.url).path
    for name in ("", *web_files()):
        status, headers, body = get(server, base + name)
        assert status == 200, name
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert body
    assert get(server, base.rstrip("/"))[0] == 301


def test_only_its_own_page_is_answered(server: Server) -> None:
    base, port = urlsplit(server.url).path, server.server_port
    assert get(server, base + "data/about")[0] == 200
    assert get(server, base + "data/about", Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert get(server, base + "data/about", Origin="http://example.org")[0] == 403
    assert get(server, base + "data/about", Host="example.org")[0] == 403, "a name that was made to lead here"
    assert get(server, "/data/about")[0] == 403
    assert get(server, "/")[0] == 403
    assert get(server, f"/{'x' * 22}/data/about")[0] == 403
    assert get(server, f"{base}../../../../etc/passwd")[0] == 404
    assert get(server, base + "server.py")[0] == 404
    assert get(server, base + "data/about?" + "x" * LONGEST)[0] == 414


def test_a_refusal_is_one_sentence_of_json(server: Server) -> None:
    status, _, body = get(server, urlsplit(server.url).path + "data/cell?query=9")
    assert status == 422
    assert "expected a whole number" in json.loads(body)["error"]


def test_the_next_free_port_is_taken(scene: Scene) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        made = Server(scene, port=port)
        assert made.server_port != port
        made.server_close()


def test_the_saved_page_holds_what_views_ask_for_and_nothing_from_elsewhere(scene: Scene, tmp_path: Path) -> None:
    text = page(scene)
    found = re.search(r'id="answers">(.*?)</script>', text)
    assert found is not None
    answers = json.loads(found[1])
    for address in ("/about", "/matrix?what=weights", "/cell?key=1&query=2", "/walk", "/code", "/compare"):
        assert gzip.decompress(b64decode(answers[address])) == answer(scene, address).body
    markup = re.sub(r"(?s)(<script[^>]*>).*?</script>", r"\1</script>", text)
    assert markup.count("<script") == 2
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", markup)
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/2000/svg", "", re.sub(r"base64,[\w+/=]+", "", text))
    assert len(text) < 400_000
    tokens = ["</script>", "<b>", "&", '"', "ok"]
    hostile = page(scene_of(CAT.q, CAT.k, CAT.v, tokens=tokens))
    assert hostile.count("</script>") == page(scene).count("</script>"), "names are inside of what is compressed"


@pytest.fixture(scope="module")
def model() -> Model:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    made = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()

    def read(text: str) -> Any:
        names = text.split()
        with torch.no_grad(), ch.watch(made, want={"keep": True}, tokens=names) as seen:
            made(2 * torch.randn(1, len(names), 32, generator=torch.Generator().manual_seed(len(text))))
        return seen

    text = "the bank of the un ##believ ##able river"
    return Model("tiny", read(text), text=text, read=read)


def test_a_models_heads_are_those_that_were_seen(model: Model) -> None:
    calls = model.layers({})
    weights = np.stack([call.rows(range(8))[0] for call in calls])
    found = asked(model, "/heads")
    np.testing.assert_allclose(found["first"], weights[..., 0].mean(-1), rtol=1e-5)
    steps = np.abs(np.arange(8)[:, None] - np.arange(8))
    np.testing.assert_allclose(found["distance"], (weights * steps).sum(-1).mean(-1), rtol=1e-5)
    assert asked(model, "/atlas").shape == (3, 4, 8, 8)
    np.testing.assert_allclose(asked(model, "/matrix", layer=2, head=1), weights[2, 1], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(asked(model, "/words", which="mean")["weights"], weights.mean((0, 1)), rtol=1e-5)
    merged = asked(model, "/words", which="rollout", merged=1)
    assert merged["tokens"] == ["the", "bank", "of", "the", "unbelievable", "river"]
    np.testing.assert_allclose(np.sum(merged["weights"], -1), 1, rtol=1e-6)
    like = np.array(asked(model, "/like", drawn="".join(str(int(i == j)) for i in range(8) for j in range(8)))["like"])
    diagonal = np.eye(8) - 1 / 8
    spread = weights - weights.mean((-1, -2), keepdims=True)
    expected = (spread * diagonal).sum((-1, -2)) / np.linalg.norm(spread, axis=(-1, -2)) / np.linalg.norm(diagonal)
    np.testing.assert_allclose(like, expected, rtol=1e-4)


def test_another_text_is_read_by_the_model_and_bounded(model: Model) -> None:
    assert asked(model, "/about", text="a b c", layer=1)["tokens"] == ["a", "b", "c"]
    for address, words in (
        (spelled("/about", text="x " * 3000), "expected at most 4,000"),
        (spelled("/about", layer=7), "expected 0 to 2"),
        (spelled("/like", drawn="01"), "expected 64 signs"),
        (spelled("/words", which="x"), "expected head, mean, chosen or rollout"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            answer(model, address)
    with pytest.raises(ch.ArgumentError, match="is asked of a model"):
        answer(scene_of(CAT.q, CAT.k, CAT.v), "/heads")
    with pytest.raises(ch.ArgumentError, match="where the model is"):
        answer(Model("seen", model.seen({})), "/heads?text=other")


def test_a_saved_model_holds_every_heads_map(model: Model) -> None:
    text = page(model)
    found = re.search(r'id="answers">(.*?)</script>', text)
    assert found is not None
    answers = json.loads(found[1])
    assert {"/heads", "/atlas", "/about?layer=2", "/matrix?head=3&layer=2&what=weights"} <= set(answers)


def test_javascript_computes_no_number_of_attention() -> None:
    for path in WEB.rglob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"Math\.(?:exp|log|sqrt|pow|tanh|hypot)|\w \*\* ", text), path.name


def test_what_is_explored(tmp_path: Path) -> None:
    steps = ch.trace(CAT.q, CAT.k, CAT.v, query=1, tokens=CAT.tokens, mask=ch.causal())
    assert ch.explore(steps).subject.scene({}).tokens == CAT.tokens
    assert ch.explore(CAT.q[None, None], CAT.k[None, None], CAT.v[None, None]).subject.scene({}).q.shape == (1, 5, 4)
    saved = ch.explore(CAT.q, CAT.k, CAT.v).save(tmp_path / "page.html")
    assert saved.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "srcdoc" in ch.explore(CAT.q, CAT.k, CAT.v)._repr_html_()
    with pytest.raises(ch.ArgumentError, match="without k and v"):
        ch.explore(CAT.q)
    with pytest.raises(ch.ArgumentError, match="nothing to explore"):
        ch.explore(np.zeros((0, 4)), np.zeros((3, 4)), np.zeros((3, 4)))
    with pytest.raises(ch.ArgumentError, match="tokens"):
        ch.explore(CAT.q, CAT.k, CAT.v, tokens=["one"])
