"""Costs on paper against the library's own counts; what is measured against what must hold of it; the why of 1/√d."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.core.formula import attention_loops
from clearhead.measure.costs import PUBLISHED, Configuration, cost, grown
from clearhead.measure.memory import free_memory
from clearhead.measure.profiling import Fit, Measured, Point, Profile, _inputs, _taken, fit, measure
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


def test_multiply_adds_are_counted_as_texts_count_them() -> None:
    one = cost(Configuration("a text's", layers=1, heads=1, key_heads=1, features=64, tokens=512))
    scores, scale, softmax, values = one.steps
    # "17 million, 34 million a head", "262 thousand" for the softmax
    assert scores.multiply_adds == values.multiply_adds == 512 * 512 * 64
    assert softmax.multiply_adds == 512 * 512
    assert round(scores.multiply_adds / 1e6) == 17
    assert round(one.multiply_adds / 1e6) == 34
    eight = cost(Configuration("a text's", layers=1, heads=8, key_heads=8, features=64, tokens=512))
    assert round(eight.multiply_adds / 1e7) == 27
    assert [step.flops for step in (scores, scale, values)] == [2 * 512 * 512 * 64, 512 * 512, 2 * 512 * 512 * 64]
    counted = attention_loops(*np.zeros((3, 7, 5)))
    small = cost(Configuration("loops", layers=1, heads=1, key_heads=1, features=5, tokens=7))
    assert small.steps[0].multiply_adds + small.steps[3].multiply_adds == counted.multiply_adds


def test_memory_held_at_each_step_is_what_the_arrays_take() -> None:
    one = Configuration("small", layers=3, heads=6, key_heads=2, features=5, tokens=7, batch=11, item=8)
    q, k = np.zeros((11, 6, 7, 5)), np.zeros((11, 2, 7, 5))
    v, matrix, output = k.copy(), np.zeros((11, 6, 7, 7)), q.copy()
    given = q.nbytes + k.nbytes + v.nbytes
    held = [step.held for step in cost(one).steps]
    assert held == [
        given + more for more in (matrix.nbytes, 2 * matrix.nbytes, 2 * matrix.nbytes, matrix.nbytes + output.nbytes)
    ]
    assert cost(one).held == max(held)


def test_growth_of_cost() -> None:
    found = grown("GPT-3 175B", [2048, 4096, 16384])
    assert [one.configuration.tokens for one in found.costs] == [2048, 4096, 16384]
    assert found.costs[2].flops == pytest.approx(1.28e15, rel=2e-3)  # where a text has 4e12
    lines = str(found).splitlines()
    assert lines[2].split()[3:5] == ["×", "4.00"]
    assert lines[3].split().count("16.00") == 2
    assert lines[3].endswith("× 4.00")  # the cache grows as the tokens do
    with pytest.raises(ch.ArgumentError, match="tokens: is empty"):
        grown("GPT-3 175B", [])


@pytest.mark.parametrize("width", [24, 30, 60])
def test_costs_stay_within_their_width(width: int) -> None:
    shown = "\n".join([cost(name).text(width) for name in PUBLISHED] + [grown("ViT-L/16", [197, 10**6]).text(width)])
    assert max(map(len, shown.splitlines())) <= width
    assert all(number in shown for number in ("20.02 TFLOP", "1.641 GiB", "9.934 T"))


def test_costs_of_no_configuration_are_refused() -> None:
    good = {"name": "mine", "layers": 1, "heads": 6, "key_heads": 2, "features": 5, "tokens": 7}
    for name, value, words in (
        ("heads", 5, "heads: is 5, expected a multiple of key_heads, 2"),
        ("tokens", 0, "tokens: is 0, expected a whole number from 1"),
        ("layers", 1.5, "layers: is 1.5"),
        ("features", 10**5000, "features: is a whole number of thousands of digits"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            cost(Configuration(**good | {name: value}))


def test_published_configurations() -> None:
    # 2 · layers · heads · features · tokens · 2 bytes, from each paper's own table
    assert cost("GPT-3 175B").cache_bytes == 2 * 96 * 12288 * 2048 * 2
    assert cost("LLaMA-2 70B").cache_bytes == 2 * 80 * 8 * 128 * 4096 * 2
    assert cost("ViT-L/16").matrix_bytes == 24 * 16 * 197 * 197 * 2
    assert cost("AlphaFold 2").matrix_bytes == 48 * 128 * 8 * 256 * 256 * 2
    assert cost("AlphaFold 2, 500 residues").matrix_bytes == 48 * 128 * 8 * 500 * 500 * 2
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


def test_profile_ends_before_inputs_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.measure.profiling.free_memory", lambda: 10**6)
    found = ch.profile([16, 32, 10**5], heads=1, features=8)
    assert [point.length for point in found.points] == [16, 32]
    assert found.ended is not None
    assert found.ended.startswith("everything stops before 100,000: it would hold about")
    assert json.loads(found.json())["ended"] == found.ended
    assert found.ended in " ".join(str(found).split())


def test_profile_says_when_its_time_is_over() -> None:
    found = ch.profile([16, 32], heads=1, features=8, seconds=1e-9)
    assert [point.length for point in found.points] == [16]
    assert found.ended == "everything stops before 32: the time that it may take is over"


def test_what_profile_reserves_is_no_less_than_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.measure.profiling.ENOUGH", 1e-9)
    for dtype, kernel in (("float16", "tiled"), ("float32", "compiled"), ("float64", "tiled"), ("float64", "compiled")):
        inputs = _inputs(32, 64, 64, dtype)
        call = partial(ch.attention, *inputs, kernel=kernel)
        call()  # the first time also imports
        held = measure(call).peak + sum(array.nbytes for array in inputs)
        assert held <= _taken(32, 64, 64, dtype) <= 2 * held


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_is_what_the_cgroup_leaves(tmp_path: Path, version: int) -> None:
    system, own, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs"
    system.write_text("MemTotal: 99999999 kB\nMemAvailable:  9000000 kB\n")
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    own.write_text("0::/box/inner\n" if version == 2 else "5:cpu,cpuacct:/other\n4:memory:/box/inner\n")
    assert free_memory(system, root, own) == 9_000_000 * 1024
    box = (root if version == 2 else root / "memory") / "box"
    (box / "inner").mkdir(parents=True)
    for folder, limit in ((box, "700000"), (box / "inner", "max")):
        (folder / names[0]).write_text(limit)
        (folder / names[1]).write_text("400000")
        (folder / "memory.stat").write_text("anon 300000\ninactive_file 50000\n")
    assert free_memory(system, root, own) == 350_000
    assert free_memory(tmp_path / "none", tmp_path / "none", tmp_path / "none") > 0


@pytest.mark.parametrize("width", [20, 33, 40, 60])
def test_tables_stay_within_their_width(width: int) -> None:
    measured = tuple(Point(n, 4 * n * n, Measured(1e-7 * n, n * n), Measured(1e-8 * n, n), "tiled") for n in (64, 4096))
    found = Profile(8, 64, "float32", "causal() & window(128)", measured, "the formula stops before 8,192: " * 3)
    tables = [*found.blocks(width), *ch.scaling([1, 4096], keys=8, queries=8, sigma=1e30).blocks(width)]
    tables += [ch.scaling([16], keys=8, queries=8).words(width)]
    assert max(len(line) for table in tables for line in table.splitlines()) <= width
    shown = "\n".join(found.blocks(width))
    assert all(word in shown for word in ("× 64.00", "64 MiB", "16 MiB", "410 µs"))


def test_profile_with_a_mask_and_refusals() -> None:
    assert ch.profile([32], heads=1, features=8, mask=ch.causal()).mask == "causal()"
    for options, words in (
        ({"lengths": []}, "lengths: is"),
        ({"heads": 0}, "heads: is"),
        ({"dtype": "int8"}, "dtype: is"),
        ({"seconds": 0}, "seconds: is"),
        ({"heads": 10**6}, "heads, lengths and features: 1,000,000 heads of 256 positions and 64 features.* GiB"),
        ({"heads": 10**40}, "heads: has 1000.*expected at most"),
        ({"heads": 10**5000}, "heads: has a whole number of thousands of digits"),
        ({"features": 10**9, "lengths": [16]}, "1,000,000,000 features, in q, k, v and the output, would take about"),
        ({"lengths": [10**9]}, "1,000,000,000 positions.*expected at most .*half of the memory that is free"),
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


def test_scaling_never_looks_refuted() -> None:
    """Without the scale weights answer less and less to their scores, from d = 4 on and at every d between."""
    rows = ch.scaling([4, 16, 32, 64, 256, 1024]).rows
    without, with_it = [row.unscaled for row in rows], [row.scaled for row in rows]
    assert all(a.gradient < b.gradient for a, b in zip(without, with_it, strict=True))
    for name, falls in (("gradient", True), ("entropy", True), ("saturated", False), ("largest", False)):
        numbers = [getattr(one, name) for one in without]
        assert numbers == sorted(numbers, reverse=falls)
    assert without[-1].gradient < 0.1 < 0.9 < with_it[-1].gradient
    assert without[-1].saturated > 0.7
    assert with_it[-1].saturated == 0


def test_gradient_and_saturation_are_those_of_the_jacobian() -> None:
    row = ch.scaling(100, keys=7, queries=29, seed=1).rows[0].unscaled
    generator = np.random.default_rng([1, 100])
    q, k = generator.standard_normal((29, 100)), generator.standard_normal((7, 100))
    weights: Any = ch.observe(q, k, k, scale=1.0, weights=True).weights
    built = [np.diag(w) - np.outer(w, w) for w in weights]
    assert row.gradient == pytest.approx(np.mean([np.trace(one) for one in built]), rel=1e-9)
    still = [np.abs(one).max() <= 0.01 for one in built]
    assert 0 < row.saturated <= np.mean(still) < 1


def test_scaling_says_in_words_what_its_columns_mean_and_show() -> None:
    found = ch.scaling()
    shown = " ".join(str(found).split())
    for title in ("spread", "theory", "entropy", "largest", "gradient", "saturated"):
        assert f"{title} {' '.join(found.meaning()[title].split())}" in shown
    last = found.rows[-1].unscaled
    assert f"the gradient is {last.gradient:.3f} of at most 0.984: it vanishes as d grows" in shown
    assert json.loads(found.json())["verdict"] == found.verdict()
    for options, words in (
        ({"sigma": 3.0}, "even with 1/√d, since scores then still spread as 3²."),
        ({"sigma": 0.01}, "scores spread too little"),
        ({"temperature": 0.05}, "spread as 1/0.05. What keeps their spread at 1 is 1/(σ²√d), and a temperature of 1"),
        ({"keys": 1}, "One key has all the weight"),
        ({"d_k": [4]}, "it falls as d grows"),
    ):
        assert words in ch.scaling(**options).verdict()


def test_a_temperature_is_a_smaller_scale() -> None:
    hot, plain = ch.scaling([64], temperature=4.0), ch.scaling([64], sigma=0.5)
    assert hot.rows[0].scaled.predicted == plain.rows[0].scaled.predicted == 0.25
    assert hot.rows[0].scaled.entropy == pytest.approx(plain.rows[0].scaled.entropy, rel=1e-12)
    assert "√d/4" in hot.blocks()[0]


@pytest.mark.parametrize("sigma", [1e35, 1e-35])
def test_scaling_at_the_ends_of_what_it_takes(sigma: float) -> None:
    for row in ch.scaling([1, 1024], sigma=sigma).rows:
        for one in (row.unscaled, row.scaled):
            assert one.deviation == pytest.approx(one.predicted, rel=0.1)
            assert all(math.isfinite(value) for value in vars(one).values())


def test_scaling_refusals() -> None:
    for options, words in (
        ({"d_k": 0}, "d_k: is"),
        ({"d_k": 10**12}, "d_k, keys and queries: 256 queries and 64 keys of 1,000,000,000,000 features would take"),
        ({"keys": 10**11}, "d_k, keys and queries: 256 queries and 100,000,000,000 keys"),
        ({"keys": 10**50}, "keys: has 1000"),
        ({"sigma": 0}, "sigma: is 0, expected a finite number above 0"),
        ({"sigma": 1e200}, r"sigma: is 1e\+200, expected 1e-35 to 1e\+35: the variance of scores"),
        ({"sigma": 10**400}, "sigma: is 1000"),
        ({"sigma": math.inf}, "sigma: is inf"),
        ({"sigma": math.nan}, "sigma: is nan"),
        ({"sigma": "1"}, "sigma: is '1'"),
        ({"sigma": 1e-200}, "sigma: is 1e-200"),
        ({"temperature": 0}, "temperature: is 0"),
        ({"temperature": -1.0}, "temperature: is -1.0"),
        ({"keys": 1.5}, "keys: is"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            ch.scaling(**options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("scaling --sigma 1e200", "sigma: is 1e+200"),
        ("scaling --sigma=-1", "sigma: is -1.0"),
        ("scaling --temperature nan", "temperature: is nan"),
        ("profile --heads 1000000", "1,000,000 heads of 256 positions and 64 features"),
        (f"profile --heads {'9' * 30}", "heads: has 999"),
        ("profile --lengths 999999999", "999,999,999 positions"),
        ("profile --lengths 64,99999999999", "--lengths: has 99999999999, expected numbers up to 999,999,999"),
        (f"profile --lengths {','.join(['8'] * 65)}", "--lengths: has 65 numbers, expected at most 64"),
        ("profile --lengths 64;128", "expected whole numbers with commas between"),
    ],
)
def test_the_command_line_refuses_in_one_line(arguments: str, words: str) -> None:
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2
    assert result.output.startswith("clearhead: ")
    assert words in result.output
    assert result.output.count("\n") == 1


def test_the_command_line_counts_on_paper_at_any_length() -> None:
    arguments = "profile --paper --lengths 1024,512 --heads 8 --features 64"
    result = CliRunner().invoke(app, arguments.split(), env={"COLUMNS": "60", "TERM": "dumb"})
    assert result.exit_code == 0
    assert [line.split()[:3] for line in result.output.splitlines()[-2:]] == [
        ["512", "270.5", "M"],
        ["1,024", "1.082", "G"],
    ]
    rows = json.loads(CliRunner().invoke(app, [*arguments.split(), "--json"]).output)
    assert [row["multiply_adds"] for row in rows] == [270532608, 4 * 270532608]
    assert [row["configuration"]["item"] for row in rows] == [4, 4]
    said = CliRunner().invoke(app, ["profile", "--paper"]).output
    assert "GPT-4 is not among them" in said


@pytest.mark.parametrize("columns", [20, 40])
def test_the_command_line_stays_within_narrow_terminals(columns: int) -> None:
    for arguments in ("scaling --d-k 1,1024 --queries 8 --sigma 1e30", "profile --lengths 16,32 --heads 1"):
        result = CliRunner().invoke(app, arguments.split(), env={"COLUMNS": str(columns), "TERM": "dumb"})
        assert result.exit_code == 0
        assert max(map(len, result.output.splitlines())) <= columns
