"""A trace: every number is what attention and observe give, in every rendering, and only the steps a call has."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import jax.numpy
import ml_dtypes
import numpy as np
import pytest
import torch
from rich.console import Console

import clearhead as ch
from clearhead.core.arrays import to_numpy
from clearhead.core.formula import attention_loops
from clearhead.explain.render.page import figure, vector
from clearhead.textbook import EXAMPLES

CAT = EXAMPLES["cat_sat"]


def arrays(*lead: int, queries: int = 5, keys: int = 7, features: int = 11, width: int = 13, seed: int = 0) -> Any:
    draw = np.random.default_rng(seed).standard_normal
    return draw((*lead, queries, features)), draw((*lead, keys, features)), draw((*lead, keys, width))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ch.causal()},
    "softcap": {"softcap": 1.5, "scale": 0.7},
    "alibi": {"bias": ch.alibi(3)},
    "bias": {"bias": np.linspace(-1, 1, 3 * 5 * 7).reshape(3, 5, 7), "mask": ch.window(2, 1)},
    "sinks": {"sinks": np.array([0.5, -1.0, 9.0]), "mask": ch.lengths(4)},
    "dropout": {"dropout": (0.4, 3), "mask": ch.causal()},
    "nothing": {"mask": ch.lengths(0)},
    "nothing but the sink": {"mask": ch.lengths(0), "sinks": np.array([0.5, -1.0, 9.0])},
    "all": {
        "mask": ch.causal() & ch.window(3),
        "bias": ch.alibi(3),
        "softcap": 2.0,
        "sinks": np.array([0.1, 0.2, 0.3]),
        "dropout": (0.3, 1),
    },
}
STEPS = {"softcap": "Softcap", "bias": "Bias", "mask": "Mask", "dropout": "Dropout"}


def close(found: Any, expected: Any) -> None:
    """Equal up to the order of sums."""
    expected = np.asarray(to_numpy(expected) if hasattr(expected, "shape") else expected)
    eps = np.finfo(expected.dtype).eps
    finite = np.abs(expected[np.isfinite(expected)]).max(initial=1.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=64 * eps * finite)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("query", [0, 2, -1])
def test_every_number_is_that_of_attention_and_observe(name: str, query: int) -> None:
    q, k, v = arrays(2, 3)
    options = OPTIONS[name]
    seen = ch.observe(q, k, v, queries=[query], **options)
    output = ch.attention(q, k, v, **options)
    for at in ((0, 0), (1, 2)):
        row = ch.trace(q, k, v, query=query, head=at, **options).row
        close(row.output, output[at][query])
        close(row.weights, seen.queries.weights[at][0])
        for field, expected in (("lse", seen.lse), ("max_score", seen.max_score), ("entropy", seen.entropy)):
            close(getattr(row, field), expected[at][query])
        # and the steps between lead from one to the next
        close(row.scaled, row.dots * row.scale)
        close(row.exponentials, np.exp(row.scores - row.shift))
        assert row.total == pytest.approx(row.exponentials.sum() + (row.sink_exponential or 0.0), rel=1e-14)
        close(sum(row.contribution(j) for j in range(7)), row.output)


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_the_call_and_no_others(name: str) -> None:
    options = OPTIONS[name]
    titles = [step.title for step in ch.trace(*arrays(3), query=1, **options).page().steps]
    for option, title in STEPS.items():
        assert (title in titles) == (option in options)
    assert titles[0] == "Dot products"
    assert titles[-1] == "Output"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_libraries_and_precisions(library: str, dtype: str) -> None:
    plain = arrays(3)
    if library == "torch":
        q, k, v = (torch.tensor(a).to(getattr(torch, dtype)).requires_grad_() for a in plain)
    elif library == "jax":
        if dtype == "float64":
            pytest.skip("JAX has float64 only where it is switched on")
        q, k, v = (jax.numpy.asarray(a, dtype=dtype) for a in plain)
    else:
        q, k, v = (a.astype(getattr(ml_dtypes, dtype, dtype)) for a in plain)
        if dtype == "bfloat16":
            pytest.skip("NumPy has no bfloat16 of its own")
    row = ch.trace(q, k, v, query=3, head=2, mask=ch.causal()).row
    assert row.q.dtype == (np.float64 if dtype == "float64" else np.float32)
    seen = ch.observe(q, k, v, mask=ch.causal(), queries=[3])
    close(row.weights, to_numpy(seen.queries.weights)[2, 0])


def test_grouped_queries_share_keys() -> None:
    q, (_, k, v) = arrays(6)[0], arrays(2)
    row = ch.trace(q, k, v, query=1, head=5).row
    close(row.output, ch.attention(q, k, v)[5, 1])


def test_padding_may_be_nan() -> None:
    q, k, v = arrays()
    k[5:], v[5:] = np.nan, np.inf
    shown = ch.trace(q, k, v, query=0, mask=ch.lengths(5))
    close(shown.row.output, ch.attention(q, k, v, mask=ch.lengths(5))[0])
    assert "NaN" in str(shown)  # it is said what is there
    assert np.isfinite(shown.row.contribution(6)).all()


def test_text_shows_the_numbers() -> None:
    text = str(ch.trace(CAT.q, CAT.k, CAT.v, query="cat", tokens=CAT.tokens, mask=ch.causal()))
    seen = ch.observe(CAT.q, CAT.k, CAT.v, mask=ch.causal(), weights=True)
    assert text == str(ch.trace(CAT.q, CAT.k, CAT.v, query=1, tokens=CAT.tokens, mask=ch.causal()))
    assert f"[{', '.join(figure(x) for x in seen.output[1])}]" in text
    for token, weight in zip(CAT.tokens[:2], seen.weights[1], strict=False):
        assert re.search(rf"{token} +\d\.\d+ / \d\.\d+ = {figure(weight)}", text)
    assert "causal() lets position 1 see keys up to 1" in text
    assert "The  0·0 + 2·1 + 0·0 + 1·1     = 3.0000" in text


def test_long_rows_show_what_matters_and_say_what_is_left_out() -> None:
    q, k, v = (a.astype(np.float32) for a in arrays(queries=1000, keys=1000))
    mask = ch.causal() & ch.window(400)
    shown = ch.trace(q, k, v, query=700, mask=mask)
    page = shown.page(keys=12)
    names = [line.name for line in page.steps[0].lines]
    assert len(names) == 12
    assert {"key 299", "key 300", "key 700", "key 701"} <= set(names)  # the edges of the mask
    heaviest = np.argsort(-shown.row.weights)[:8].tolist()
    assert {f"key {j}" for j in heaviest} <= set(names)
    rest = np.delete(shown.row.weights, [int(name.split()[1]) for name in names]).sum()
    assert f"the 988 left out have {figure(rest)} of the weight" in page.facts[-1]
    assert len(ch.trace(q, k, v, query=0).page(keys=2000).steps[0].lines) == 1000


def test_memory_is_that_of_a_row() -> None:
    import tracemalloc

    q, k, v = (a.astype(np.float32) for a in arrays(queries=20000, keys=20000))
    tracemalloc.start()
    row = ch.trace(q, k, v, query=-1, mask=ch.causal()).row
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * row.k.nbytes  # the matrix would be 1,600 MB
    assert row.weights.sum() == pytest.approx(1, rel=1e-5)


def test_cell_has_the_whole_computation() -> None:
    shown = ch.trace(CAT.q, CAT.k, CAT.v, query="mat", tokens=CAT.tokens, mask=ch.causal() & ch.window(2))
    pair = shown.cell("sat")
    assert pair.terms.tolist() == (CAT.q[4] * CAT.k[2]).tolist()
    assert pair.weight == shown.row.weights[2]
    assert figure(pair.weight) in str(pair)
    hidden = shown.cell(0)
    assert not hidden.allowed
    assert "window(2) lets position 4 see keys 2 to 4" in str(hidden)
    with pytest.raises(ch.ArgumentError, match="key: is 'dog'"):
        shown.cell("dog")


@pytest.mark.parametrize("name", OPTIONS)
def test_walk_ends_at_the_numbers_of_the_row(name: str) -> None:
    shown = ch.trace(*arrays(3), query=2, head=1, **OPTIONS[name])
    steps = list(shown.walk())
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert all(step.sentence.endswith(".") for step in steps)
    row = shown.row
    dots = [step.value for step in steps if step.kind == "multiply-add"][10 : 7 * 11 : 11]
    np.testing.assert_allclose(dots, row.dots, rtol=0, atol=1e-13)
    seen = [j for j in range(7) if row.may(j)]
    assert [s.value for s in steps if s.kind == "division"] == row.weights[seen].tolist()
    if seen:
        last = [step.value for step in steps if step.kind == "multiply-add"][7 * 11 :][len(seen) - 1 :: len(seen)]
        np.testing.assert_allclose(last, row.output, rtol=0, atol=1e-13)


def test_walk_counts_as_the_loops_count() -> None:
    q, k, v = (a[0] for a in arrays(1, queries=3, keys=3, features=3, width=3))
    counted = attention_loops(q[1:2], k, v)
    kinds = [step.kind for step in ch.trace(q, k, v, query=1).walk()]
    assert kinds.count("multiply-add") == counted.multiply_adds
    assert kinds.count("exponential") == counted.exponentials
    assert kinds.count("division") == counted.divisions


def test_json_has_every_number_exactly() -> None:
    shown = ch.trace(*arrays(3), query=0, head=1, **OPTIONS["all"])
    found = json.loads(shown.json())
    assert found["weights"] == shown.row.weights.tolist()
    assert found["output"] == shown.row.output.tolist()
    assert found["scores"][-1] == "-inf"
    assert "capped" not in json.loads(ch.trace(*arrays(3), query=0).json())


class Balanced(HTMLParser):
    """Fails on a tag that is closed without having been opened, or the other way round."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        assert tag not in ("script", "link", "img", "iframe")
        assert all(name not in ("src", "href", "onload", "onclick") for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


HOSTILE = ("<script>alert(1)</script>", 'a"b&c', "| pipe\n*bold*", "\x1b[31mred", "מלה")


def test_html_is_whole_and_escapes_tokens() -> None:
    q, k, v = arrays(queries=5, keys=5)
    shown = ch.trace(q, k, v, query=0, tokens=HOSTILE, mask=ch.causal())
    for page in (shown.html(), shown._repr_html_()):
        words = "".join(Balanced(page).words)
        assert HOSTILE[0] in words
        assert "<script" not in page
        assert "http" not in page
        assert all(figure(x) in words for x in shown.row.weights)
        assert vector(shown.row.output) in words


def test_markdown_escapes_tokens_and_keeps_its_tables() -> None:
    q, k, v = arrays(queries=5, keys=5)
    text = ch.trace(q, k, v, query=0, tokens=HOSTILE).markdown()
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert tables
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (4, 5) for line in tables)
    assert r"\<script\>" in text


def test_terminal_does_not_obey_tokens() -> None:
    q, k, v = arrays(queries=5, keys=5)
    console = Console(width=80, force_terminal=False, no_color=True)
    with console.capture() as captured:
        console.print(ch.trace(q, k, v, query=3, tokens=HOSTILE))
    assert "\x1b" not in captured.get()


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("name", OPTIONS)
def test_terminal_keeps_to_its_width_and_shows_every_weight(name: str, width: int) -> None:
    shown = ch.trace(*arrays(3, features=40), query=2, **OPTIONS[name])
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        console.print(shown)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(captured.get().split())
    assert all(figure(x) in text for x in shown.row.weights)
    assert all(figure(x) in text for x in shown.row.output[:8])


def test_latex_is_balanced_and_says_the_scale() -> None:
    text = ch.trace(*arrays(3), query=0, **OPTIONS["all"]).latex()
    assert text.count("{") == text.count("}")
    assert text.startswith("\\begin{aligned}")
    assert "\\sqrt{11}" in text
    assert all(line.count("&=") == 1 for line in text.splitlines()[1:-1])


MISTAKES = {
    "query: is 5, expected one of": {"query": 5},
    "query: is 'dog'": {"query": "dog", "query_tokens": list("abcde")},
    "tokens: has 2 names, expected one for each of 7 keys": {"query": 0, "tokens": ["a", "b"]},
    "tokens: is one string": {"query": 0, "tokens": "abcdefg"},
    "head: has 3, expected -3 to 2": {"query": 0, "head": 3},
    "head: is (0, 1), expected (batch row, …, head): an index for each of (3,)": {"query": 0, "head": (0, 1)},
    "head: is 'a'": {"query": 0, "head": "a"},
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_said_in_words(words: str) -> None:
    with pytest.raises(ch.ArgumentError, match=re.escape(words)):
        ch.trace(*arrays(3), **MISTAKES[words])


def test_head_of_several_batch_rows_must_be_said() -> None:
    with pytest.raises(ch.ArgumentError, match="head: is 1, expected"):
        ch.trace(*arrays(2, 3), query=0, head=1)
    assert ch.trace(*arrays(1, 3), query=0, head=1).at == (0, 1)


def test_traced_arrays_are_refused() -> None:
    def inside(q: Any) -> Any:
        ch.trace(q, q, q, query=0)
        return q

    with pytest.raises(ch.ArgumentError, match="outside of jit"):
        jax.jit(inside)(jax.numpy.ones((3, 4)))


def test_no_keys_and_no_features() -> None:
    empty = np.zeros((2, 0))
    assert ch.trace(np.ones((2, 3)), np.ones((0, 3)), np.ones((0, 4)), query=0).row.output.tolist() == [0.0] * 4
    assert math.isclose(ch.trace(empty, empty, np.ones((2, 4)), query=0).row.weights[0], 0.5)
    assert "Output" in str(ch.trace(empty, empty, np.ones((2, 4)), query=0))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_angles_are_those_between_the_vectors(dtype: Any) -> None:
    q, k, v = (array.astype(dtype) for array in arrays(2, 3))
    traced = ch.trace(q, k, v, query=4, head=(1, 2), mask=ch.causal())
    angles, query, keys = traced.angles, q[1, 2, 4].astype(np.float64), k[1, 2].astype(np.float64)
    assert angles.query == pytest.approx(np.linalg.norm(query), rel=1e-12)
    np.testing.assert_allclose(angles.keys, np.linalg.norm(keys, axis=-1), rtol=1e-12)
    np.testing.assert_allclose(angles.query * angles.keys * angles.cosines, keys @ query, atol=1e-12)
    np.testing.assert_allclose(np.cos(np.radians(angles.degrees)), angles.cosines, atol=1e-12)
    found = json.loads(traced.json())
    assert (found["q_norm"], found["cosines"]) == (angles.query, angles.cosines.tolist())
    assert found["k_norms"] == angles.keys.tolist()


def test_angles_of_vectors_that_are_large_or_nothing() -> None:
    k = np.array([[2e200, 0.0], [-1e-200, 0.0], [0.0, 0.0], [np.nan, 1.0], [1.0, 1.0]])
    angles = ch.trace(np.array([[3e200, 0.0]]), k, k, query=0).angles
    assert angles.query == 3e200
    np.testing.assert_allclose(angles.keys, [2e200, 1e-200, 0.0, np.nan, math.sqrt(2)])
    np.testing.assert_allclose(angles.degrees, [0.0, 180.0, np.nan, np.nan, 45.0], rtol=1e-12)
    lines = str(angles).splitlines()
    assert lines[5].split() == ["key", "2", "3.000e+200", "×", "0.0000", "×", "–", "=", "0.0000", "–"]
    many = ch.trace(*arrays(queries=1, keys=400), query=0)
    assert len(str(many.angles).splitlines()) == 3 + 16 + 1
    assert str(many.angles).endswith("and 384 keys more")
    assert "NaN" not in str(many.angles)


def test_wide_letters_stand_in_columns() -> None:
    from rich.cells import cell_len

    q = k = v = np.eye(3)
    lines = str(ch.trace(q, k, v, query=0, tokens=["河", "岸の土手", "bank"])).splitlines()
    at = lines.index("1. Dot products  q · k, feature by feature")
    assert [cell_len(line[: line.index("=")]) for line in lines[at + 1 : at + 4]] == [29] * 3
