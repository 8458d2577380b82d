"""A whole layer, traced: every number is that of multi-head attention written out, and bank finds river."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.textbook import MultiHeadAttention
from clearhead.textbook.layers import LAYERS

BANK = LAYERS["bank_river"]
DRAW = np.random.default_rng(5)
TOKENS = ["a", "b", "c", "d", "e"]


def layer(heads: int = 3, shared: int = 3, size: int = 2, wide: int = 4, features: int = 7) -> dict[str, np.ndarray]:
    shapes = {"x": (5, features), "w_q": (features, heads * size), "w_k": (features, shared * size)}
    shapes |= {"w_v": (features, shared * wide), "w_o": (heads * wide, 11), "positions": (5, features)}
    return {name: DRAW.standard_normal(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(("heads", "shared"), [(1, 1), (3, 3), (6, 2)])
def test_numbers_are_those_of_the_layer_written_out(heads: int, shared: int) -> None:
    given = layer(heads, shared)
    found = ch.trace_layer(**given, heads=heads, query="d", tokens=TOKENS, mask=ch.causal(), softcap=3.0)
    x = given["x"] + given["positions"]
    q, k, v = (
        (x @ given[name]).reshape(5, count, -1).swapaxes(0, 1)
        for name, count in (("w_q", heads), ("w_k", shared), ("w_v", shared))
    )
    output = ch.attention(q, k, v, mask=ch.causal(), softcap=3.0).swapaxes(0, 1).reshape(5, -1)
    np.testing.assert_allclose(found.merged, output[3], rtol=1e-12)
    np.testing.assert_allclose(found.output, (output @ given["w_o"])[3], rtol=1e-12)
    assert len(found.heads) == heads
    text = str(found)
    assert f"[{', '.join(f'{number:.4f}' for number in found.output[:8])}, … 3 more]" in text
    assert ("which share 2 of keys and values" in text) == (heads == 6)
    assert json.loads(found.json())["output"] == found.output.tolist()
    assert found.html().count("<h3>") == found._repr_html_().count("<h3>") == len(found.page().steps)


def test_it_is_the_textbooks_layer_in_every_library() -> None:
    textbook = MultiHeadAttention(6, 2, seed=3)
    x = DRAW.standard_normal((4, 6))
    output, weights = textbook(x)
    w = (textbook.w_q, textbook.w_k, textbook.w_v, textbook.w_o)
    found = ch.trace_layer(x, *w, heads=2, query=1)
    np.testing.assert_allclose(found.output, output[1], rtol=1e-12)
    np.testing.assert_allclose([one.row.weights for one in found.heads], weights[:, 1], rtol=1e-12)
    tensors = [torch.tensor(a, dtype=torch.bfloat16) for a in (x, *w)]
    np.testing.assert_allclose(ch.trace_layer(*tensors, heads=2, query=1).output, output[1], atol=0.05)


def test_bank_finds_river_and_becomes_water() -> None:
    found = ch.trace_layer(**BANK.arguments, query="bank", tokens=BANK.tokens)
    by_meaning, by_place = (one.row.weights for one in found.heads)
    assert BANK.tokens[by_meaning.argmax()] == "river"
    assert by_meaning.max() > 0.7
    assert by_place.argmax() == BANK.tokens.index("bank") - 1  # the word before
    water, money = found.output[:2]
    assert found.x[3, 0] == found.x[3, 1]  # before, it might be either
    assert water > 5 * money


@pytest.mark.parametrize("columns", [20, 80])
def test_explain_shows_where_q_k_and_v_come_from(columns: int) -> None:
    done = CliRunner().invoke(app, ["explain", "bank_river"], env={"COLUMNS": str(columns), "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    assert max(map(cell_len, done.output.splitlines())) <= columns
    flat = " ".join(done.output.split())
    for title in ("2. Positions", "3. Query x w_q", "4. Keys x w_k", "5. Values x w_v", "6. Split", "9. Merge"):
        assert title in flat
    assert "10. Output merged w_o" in flat
    assert "1·0 + 1·0 + (-2)·(-0.75) + 2·0.75" in flat


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 4}, "heads: is 4, which does not divide the 6 columns of w_q"),
        ({"heads": 0}, "heads: is 0, expected a whole number of at least 1"),
        ({"w_k": np.zeros((7, 5))}, "w_k: has 5 columns, expected a multiple of 2 as a head has"),
        ({"w_v": np.zeros((7, 4))}, "w_v: has 4 columns, expected a multiple of 3 key heads"),
        ({"w_q": np.zeros((6, 6))}, "w_q: has shape (6, 6), expected (7, …): x has so many features"),
        ({"w_o": np.zeros((6, 6))}, "w_o: has shape (6, 6), expected (12, …): the heads give so many features"),
        ({"x": np.zeros((2, 5, 7))}, "x: has shape (2, 5, 7), expected two axes: one layer, one batch row"),
        (
            {"x": torch.zeros(5, 7).to_sparse()},
            "x: cannot be read as a plain array: can't convert Sparse layout tensor",
        ),
        ({"x": np.ma.masked_array(np.zeros((5, 7)))}, "x: is a masked array, expected a plain one"),
        ({"x": [[1.0]]}, "x: is a list, expected a NumPy, PyTorch, JAX or array-API array"),
        ({"positions": np.zeros((4, 7))}, "positions: has shape (4, 7), expected (5, 7) as x"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(change: dict[str, object], words: str) -> None:
    with pytest.raises(ch.ArgumentError) as refused:
        ch.trace_layer(**{**layer(), "heads": 3, "query": 0, **change})
    assert str(refused.value).startswith(words)
