"""Mechanisms side by side: each is what it says, in the table, in JSON, in the picture and on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app


@pytest.fixture
def call() -> Any:
    return np.random.default_rng(0).standard_normal((3, 4, 24, 8))


def test_the_usual_ones(call: Any) -> None:
    q, k, v = call
    found = ch.compare(q, k, v)
    names = [one.name for one in found.mechanisms]
    for word in ("full", "causal", "window(3, 3)", "Longformer", "ALiBi", "rotary", "GQA", "linear", "performer",
                 "linformer", "nystrom"):  # fmt: skip
        assert any(name.startswith(word) for name in names), word
    assert found["full"].distance == 0
    np.testing.assert_allclose(found["causal"].output, ch.attention(q, k, v, mask=ch.causal()))
    turned = ch.attention(ch.rotary()(q), ch.rotary()(k), v)
    np.testing.assert_allclose(found["rotary"].output, turned)
    averaged = [a.reshape(2, 2, 24, 8).mean(1) for a in (k, v)]
    np.testing.assert_allclose(found["GQA, 2 key heads"].output, ch.attention(q, *averaged))
    for one in found.mechanisms:
        assert one.output.shape == (4, 24, 8)
        assert one.weights is not None
        assert one.weights.shape == (4, 24, 24)
        full = found["full"].output
        assert one.distance == pytest.approx(np.linalg.norm(one.output - full) / np.linalg.norm(full))
        if not one.name.startswith(("GQA",)):
            np.testing.assert_allclose(one.weights @ v, one.output, atol=1e-5 if "linear" in one.name else 1e-10)


def test_chosen_and_named(call: Any) -> None:
    q, k, v = map(torch.tensor, call)
    found = ch.compare(q[0], k[0], v[0], {"a": None, "b": {"softcap": 2.0}, "c": lambda q, k, v: v, "d": ch.lsh(4)})
    assert [one.name for one in found.mechanisms] == ["a", "b", "c", "d"]
    assert found["c"].weights is None
    assert np.isnan(found["c"].entropy)
    assert found["a"].output.shape == (24, 8)
    told = json.loads(found.json())
    assert told[2]["weights"] is None
    assert told[1]["distance"] == found["b"].distance
    for width in (30, 76):
        assert max(map(len, found.text(width).splitlines())) <= width
    with pytest.raises(KeyError, match="'e', expected one of a, b, c, d"):
        found["e"]
    with pytest.raises(ch.ArgumentError, match="mechanisms: have 3, expected None, a mask"):
        ch.compare(q, k, v, [3])
    with pytest.raises(ch.ArgumentError, match="mechanisms: are none"):
        ch.compare(q, k, v, [])


def test_pictures(call: Any) -> None:
    axes = ch.plot_comparison(ch.compare(*call), head=1)
    assert len(axes) == 11
    assert axes[0].get_title() == "full"
    with pytest.raises(ch.ArgumentError, match="head: is 9, expected one of 4"):
        ch.plot_comparison(ch.compare(*call), head=9)


def test_the_command_line(tmp_path: Path) -> None:
    run = CliRunner()
    done = run.invoke(app, ["compare", "it_animal", "-o", str(tmp_path / "c.png")])
    assert done.exit_code == 0, done.output
    assert re.search(r"Longformer.*FLOP", done.output)
    assert (tmp_path / "c.png").stat().st_size > 5000
    done = run.invoke(app, ["compare", "-w", "full", "-w", "causal()", "-w", "performer(16)", "-w", "rotary", "--json"])
    assert [one["name"] for one in json.loads(done.output)] == ["full", "causal()", "performer(16)", "rotary"]
    done = run.invoke(app, ["compare", "-w", "magic()"])
    assert done.exit_code == 2
    assert "--with" in done.output
