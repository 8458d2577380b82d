"""A temperature is a scale, 1/(τ√D), in every function that takes one."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.core.temperature import tempered

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((5, 7)), RNG.standard_normal((11, 7)), RNG.standard_normal((11, 3))
SAME = {"scale": 1 / (2.5 * math.sqrt(7))}


@pytest.mark.parametrize("kernel", [None, "compiled", "tiled", "dense"])
@pytest.mark.parametrize("library", [np.asarray, torch.tensor])
def test_it_is_the_scale_it_stands_for(kernel: str | None, library: Any) -> None:
    q, k, v = map(library, (Q, K, V))
    got = ch.attention(q, k, v, temperature=2.5, kernel=kernel)
    np.testing.assert_allclose(got, ch.attention(q, k, v, kernel=kernel, **SAME), rtol=1e-14)
    seen, same = ch.observe(q, k, v, temperature=2.5, kernel=kernel), ch.observe(q, k, v, kernel=kernel, **SAME)
    np.testing.assert_allclose(seen.entropy, same.entropy, rtol=1e-14)
    cold = ch.observe(q, k, v, temperature=0.5, kernel=kernel)
    assert bool((cold.entropy < seen.entropy).all())


def test_it_divides_a_scale_that_is_given() -> None:
    np.testing.assert_array_equal(ch.attention(Q, K, V, scale=0.5, temperature=4.0), ch.attention(Q, K, V, scale=0.125))


def test_gradients_trace_and_plan_take_it() -> None:
    for one, other in zip(
        ch.gradients(Q, K, V, np.ones((5, 3)), temperature=2.5),
        ch.gradients(Q, K, V, np.ones((5, 3)), **SAME),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-13)
    traced = ch.trace(Q, K, V, query=2, temperature=2.5)
    assert traced.row.scale == pytest.approx(SAME["scale"], rel=1e-15)
    np.testing.assert_allclose(traced.row.output, ch.attention(Q, K, V, temperature=2.5)[2], rtol=1e-13)
    assert ch.plan(Q, K, V, temperature=2.5) == ch.plan(Q, K, V, **SAME)


def test_it_is_watched() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ch.attention(x, x, x, temperature=2.5)

    x = torch.tensor(Q)
    model = Model()
    with ch.watch(model) as seen:
        model(x)
    np.testing.assert_allclose(seen[0].entropy, ch.observe(Q, Q, Q, temperature=2.5).entropy, rtol=1e-12)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, "2", True, 10**400, np.ones(2)])
def test_what_is_no_temperature_is_refused(wrong: Any) -> None:
    for call in (ch.attention, ch.observe, ch.plan):
        with pytest.raises(ch.ArgumentError, match=r"^temperature: is .*expected a finite number above 0"):
            call(Q, K, V, temperature=wrong)
    with pytest.raises(ch.ArgumentError, match=r"^scale: is 'x'"):
        ch.attention(Q, K, V, scale="x", temperature=2.0)
    with pytest.raises(ch.ArgumentError, match=r"^temperature: wants its gradient"):
        ch.attention(torch.tensor(Q), torch.tensor(K), torch.tensor(V), temperature=torch.ones((), requires_grad=True))


def test_the_command_line_takes_it() -> None:
    found = CliRunner().invoke(app, ["explain", "--temperature", "2", "--json"])
    assert json.loads(found.output)["scale"] == 0.25
    refused = CliRunner().invoke(app, ["explain", "--temperature", "0"])
    assert refused.exit_code == 2
    assert refused.output.startswith("clearhead: temperature: is 0.0")


def test_the_scale_is_checked_before_it_is_divided() -> None:
    q = np.ones((3, 4), np.float32)
    for options, words in (
        ({"scale": True, "temperature": 1e-10}, "scale: is True"),
        ({"scale": "1", "temperature": 1.0}, "scale: is '1'"),
        ({"scale": np.inf, "temperature": 2.0}, "scale: is inf"),
        ({"scale": 1e300, "temperature": 1e-300}, "temperature: is 1e-300, by which the scale 1e[+]300"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            ch.attention(q, q, q, **options)
    assert tempered(3.0, np.float32(0.1), q) == float(np.float32(0.1)) / 3.0
