"""Costs on paper against the library's own counts; what is measured against what must hold of it; the why of 1/√d."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import clearhead as ch
from clearhead.core.formula import attention_loops
from clearhead.measure.costs import PUBLISHED, Configuration, cost
from clearhead.measure.profiling import Fit, fit
from clearhead.measure.scales import jacobian_norm


def test_cost_of_both_products_is_that_of_plan_and_of_the_loops() -> None:
    one = Configuration("small", layers=1, heads=3, key_heads=3, features=5, tokens=7, item=4)
    found = cost(one)
    q = np.zeros((3, 7, 5), np.float32)
    planned = ch.plan(q, q, q)
    products = sum(step.flops for step in found.steps if step.name in ("scores", "values"))
    assert products == planned.flops
    assert found.matrix_bytes == planned.matrix_bytes
    assert found.fused_bytes == planned.bytes_moved
    counted = attention_loops(q[0], q[0], q[0])
    assert products == 2 * 3 * counted.multiply_adds
    assert found.cache_bytes == 2 * q.nbytes


def test_published_configurations() -> None:
    # 2 · layers · heads · features · tokens · 2 bytes, from each paper's own table
    assert cost("GPT-3 175B").cache_bytes == 2 * 96 * 12288 * 2048 * 2
    assert cost("LLaMA-2 70B").cache_bytes == 2 * 80 * 8 * 128 * 4096 * 2
    assert cost("ViT-L/16").matrix_bytes == 24 * 16 * 197 * 197 * 2
    assert cost("AlphaFold 2").matrix_bytes == 48 * 128 * 8 * 256 * 256 * 2
    assert all(one.source for one in PUBLISHED.values())
    assert all(len(line) <= 64 for name in PUBLISHED for line in str(cost(name)).splitlines())
    with pytest.raises(ch.ArgumentError, match="configuration: is 'GPT-9'"):
        cost("GPT-9")


def test_fit_finds_the_exponent_and_how_sure_it_is() -> None:
    lengths = [2**i for i in range(6, 13)]
    assert fit([(n, 3e-9 * n**2) for n in lengths]) == Fit(2.0, 0.0)
    assert fit([(1, 1.0), (2, 2.0)]) is None
    noise = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        found = fit([(n, n**1.5 * math.exp(0.1 * noise.standard_normal())) for n in lengths])
        assert found is not None
        inside += abs(found.exponent - 1.5) <= 2.57 * found.error  # Student's t with 5 degrees of freedom, 95%
    assert 175 <= inside <= 200


def test_profile_measures_time_and_memory() -> None:
    said = []
    found = ch.profile([64, 128, 512], heads=2, features=16, progress=lambda *words: said.append(words))
    assert [point.length for point in found.points] == [64, 128, 512]
    for point in found.points:
        q = np.zeros((2, point.length, 16), np.float32)
        planned = ch.plan(q, q, q)
        assert (point.matrix, point.name) == (planned.matrix_bytes, planned.kernel)
        assert point.formula is not None
        assert point.formula.peak >= point.matrix  # it cannot do with less than its matrix
        assert point.formula.seconds > 0
        assert point.kernel.seconds > 0
    assert found.kernel_fit is not None
    assert found.stopped is None
    assert [words[0] for words in said] == list(range(6))
    data = json.loads(found.json())
    assert data["points"][2]["formula"]["seconds"] == found.points[2].formula.seconds
    assert all(len(line) <= 60 for line in str(found).splitlines())


def test_profile_stops_before_memory_runs_out_and_says_where() -> None:
    found = ch.profile([64, 256, 1024], heads=1, features=8, memory=600_000)
    assert [point.formula is None for point in found.points] == [False, True, True]
    assert found.stopped is not None
    assert "stops before 256" in found.stopped
    assert "not run" in str(found)
    assert found.formula_fit is None


def test_profile_with_a_mask_and_refusals() -> None:
    assert ch.profile([32], heads=1, features=8, mask=ch.causal()).mask == "causal()"
    for options, words in (
        ({"lengths": []}, "lengths: is"),
        ({"heads": 0}, "heads: is"),
        ({"dtype": "int8"}, "dtype: is"),
        ({"seconds": 0}, "seconds: is"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            ch.profile(**options)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_scaling_spreads_as_theory_says(sigma: float) -> None:
    found = ch.scaling([16, 256], keys=128, queries=512, sigma=sigma)
    for row in found.rows:
        assert row.unscaled.predicted == sigma**2 * math.sqrt(row.d_k)
        assert row.scaled.predicted == sigma**2
        for one in (row.unscaled, row.scaled):
            # a sample's deviation is uncertain by about 1/√(2 · independent numbers); keys are the fewest
            assert one.deviation == pytest.approx(one.predicted, rel=4 / math.sqrt(2 * 128))
    assert found.rows[0].scaled.deviation == pytest.approx(found.rows[0].unscaled.deviation / 4)


def test_scaling_shows_saturation_without_the_scale() -> None:
    small, large = ch.scaling([4, 1024]).rows
    assert large.unscaled.largest > 0.9 > 0.2 > large.scaled.largest
    assert large.unscaled.entropy < 0.2
    assert large.unscaled.gradient < small.unscaled.gradient
    assert large.scaled.gradient == pytest.approx(small.scaled.gradient, rel=0.3)
    again = ch.scaling([4, 1024])
    assert again == ch.scaling([4, 1024])
    assert all(len(line) <= 60 for line in str(again).splitlines())
    assert json.loads(again.json())["rows"][1]["scaled"]["entropy"] == large.scaled.entropy


def test_scaling_numbers_are_those_of_observe() -> None:
    row = ch.scaling(9, keys=11, queries=13, seed=3).rows[0]
    generator = np.random.default_rng([3, 9])
    q, k = generator.standard_normal((13, 9)), generator.standard_normal((11, 9))
    seen = ch.observe(q, k, k, weights=True)
    assert row.scaled.entropy == pytest.approx(seen.entropy.mean(), rel=1e-12)
    assert row.scaled.largest == pytest.approx(seen.weights.max(-1).mean(), rel=1e-12)
    built = [np.linalg.norm(np.diag(w) - np.outer(w, w)) for w in seen.weights]
    np.testing.assert_allclose(jacobian_norm(seen.weights), built, rtol=1e-9)


def test_scaling_refusals() -> None:
    for options, words in (({"d_k": 0}, "d_k: is"), ({"sigma": 0}, "sigma: is"), ({"keys": 1.5}, "keys: is")):
        with pytest.raises(ch.ArgumentError, match=words):
            ch.scaling(**options)
