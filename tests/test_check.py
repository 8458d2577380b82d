"""The doctor: it names every planted mistake, and passes right implementations in every convention."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import numpy as np
import planted
import pytest
import right_ones
import torch
from rich.console import Console

import clearhead as ch
from clearhead.doctor.mistakes import CATALOGUE
from clearhead.doctor.probes import probe
from clearhead.doctor.sizes import Sizes
from clearhead.doctor.variants import RIGHT, Variant, compute


@functools.cache
def passed(name: str) -> ch.Report:
    """The report of a right one, made once for all tests."""
    return ch.check(right_ones.RIGHT[name])


@functools.cache
def failed(name: str) -> ch.Report:
    """The report of a wrong one, made once for all tests."""
    function, _, told = planted.WRONG[name]
    return ch.check(function, **told)


@pytest.mark.parametrize("name", right_ones.RIGHT)
def test_right_ones_pass(name: str) -> None:
    report = passed(name)
    assert report.names == right_ones.HAZARDS.get(name, ()), str(report)
    assert report.right
    assert sum(check.outcome == "passed" for check in report.checks) >= 6


@pytest.mark.parametrize("name", planted.WRONG)
def test_planted_mistakes_are_named(name: str) -> None:
    names, report = planted.WRONG[name][1], failed(name)
    assert report.names == names, str(report)
    assert report.right == (name in HAZARDS)


# Told and not called wrong: nobody meets it who does not ask for it
HAZARDS = (
    "NaN rows",
    "-1e9 in float16",
    "-1e9 in float16, torch",
    "causal in the other corner",
    "through float32",
)


def test_every_name_in_the_catalogue_is_planted() -> None:
    named = {name for _, names, _ in planted.WRONG.values() for name in names}
    assert named == set(CATALOGUE)
    assert len(named) >= 20


CONVENTIONS = {
    "numpy (B, H, T, D), True attends": {"library": "numpy", "mask": r"mask: True means may attend; shape \(queries"},
    "numpy, (weights, output), True hides": {"returns": r"\(weights, output\)", "mask": "mask: True hides a key"},
    "numpy (T, D)": {"layout": r"\(positions, features\)"},
    "numpy, additive mask, causal to the end": {"mask": "added to the scores, −inf", "causal": "causal=True"},
    "numpy (B, T, D) in loops": {"layout": r"\(batch, positions, features\)"},
    "numpy (B, T, H·D), heads given": {"layout": r"heads · features\), heads given"},
    "torch (B, T, H, D), additive, (output, weights)": {
        "library": "torch",
        "layout": r"\(batch, positions, heads, features\)",
        "returns": r"\(output, weights\)",
    },
    "torch's own function": {"causal": "is_causal=True", "mask": "attn_mask: True means may attend"},
    "torch's own module, batch first": {"layout": r"\(batch, positions, 12\) through its own projections, 3 heads"},
    "torch's own module, batch second, training": {"layout": r"\(positions, batch, 12\)", "mask": "True hides"},
    "torch causal self-attention": {"causal": "always"},
    "jax (B, T, D), 1 attends": {"library": "jax", "mask": "may attend"},
    "jax's own function": {"library": "jax", "layout": r"\(batch, positions, heads, features\)"},
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_conventions_are_found_and_said(name: str) -> None:
    found = passed(name).conventions
    for convention, pattern in CONVENTIONS[name].items():
        assert re.search(pattern, found[convention]), found


def test_two_axes_are_told_from_more() -> None:
    report = ch.check(right_ones.reversed_axes)
    assert report.right
    noted = [check.words for check in report.checks if check.outcome == "noted"]
    assert any(".T reverses them all" in words for words in noted)
    with pytest.raises(ch.ArgumentError, match="layout: is 'DT'"):
        ch.check(right_ones.reversed_axes, layout="DT")


def test_smallest_example_shows_expected_beside_got() -> None:
    function = planted.WRONG["no scale"][0]
    example = ch.check(function).findings[0].example
    assert example is not None
    q, k, v = (example.inputs[name] for name in "qkv")
    assert q.size + k.size + v.size <= 8
    np.testing.assert_allclose(example.expected, ch.attention(q, k, v), rtol=1e-12)
    np.testing.assert_allclose(example.got, function(q, k, v), rtol=1e-5)
    assert np.abs(example.got - example.expected).max() > 1e-3


@pytest.mark.parametrize(
    "name", [name for name, (_, names, _) in planted.WRONG.items() if names[0].startswith(("mask", "causal", "scale"))]
)
def test_examples_are_small_and_really_wrong(name: str) -> None:
    example = failed(name).findings[0].example
    assert example is not None
    assert isinstance(example.got, np.ndarray)
    with np.errstate(invalid="ignore"):
        assert not np.allclose(example.got, example.expected, rtol=1e-4)
    assert sum(array.size for array in example.inputs.values()) < 120


def test_report_prints_at_every_width_and_is_json() -> None:
    report = ch.check(planted.WRONG["two mistakes"][0])
    assert "no-scale: the scores are not scaled" in str(report)
    assert str(report).count("✗ formula") == 2
    for width in (60, 100, 200):
        console = Console(width=width, no_color=True)
        with console.capture() as captured:
            console.print(report)
        assert max(map(len, captured.get().splitlines())) <= width
        assert "expected" in captured.get()
    data = json.loads(report.json())
    assert [finding["name"] for finding in data["findings"]] == list(report.names)
    assert data["right"] is False
    assert len(data["findings"][0]["example"]["inputs"]) == 3


def test_the_subject_is_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    module = planted.TorchSelfAttention().train()
    before = [parameter.clone() for parameter in module.parameters()]
    ch.check(module)
    assert module.training
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))

    def talkative(q: Any, k: Any, v: Any) -> Any:
        print("hello")
        return planted.numpy_bhtd(q, k, v)

    assert ch.check(talkative).right
    assert capsys.readouterr().out == ""


def test_what_cannot_be_called_is_said() -> None:
    def needs_a_file(q: Any, k: Any, v: Any) -> Any:
        raise FileNotFoundError("weights.bin")

    with pytest.raises(ch.ArgumentError, match=r"function: could not be called in any of .* weights\.bin"):
        ch.check(needs_a_file)
    with pytest.raises(ch.ArgumentError, match="function: is a int"):
        ch.check(3)
    with pytest.raises(ch.ArgumentError, match="mask: is 'yes', expected one of 'attend', 'hide'"):
        ch.check(planted.numpy_bhtd, mask="yes")


def test_the_right_variant_is_the_library_s_own_formula() -> None:
    given = probe(Sizes())
    found = compute(RIGHT, given.q, given.k, given.v)
    assert found is not None
    np.testing.assert_allclose(found[0], ch.attention(given.q, given.k, given.v), rtol=1e-13)


def test_doctor_is_not_imported_until_it_is_asked_for() -> None:
    import subprocess
    import sys

    code = "import sys, clearhead; assert 'clearhead.doctor' not in sys.modules; print(clearhead.check.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "check\n"


PAIRS = [
    (scale, axis)
    for scale in ("none", "model", "features", "keys", "queries", "width", "inverse")
    for axis in ("queries", "heads", "batch", "twice", "none")
]


@pytest.mark.parametrize(("scale", "axis"), PAIRS)
def test_two_mistakes_at_once_are_told_apart(scale: str, axis: str) -> None:
    variant = Variant(scale=scale, axis=axis)

    def function(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        found = compute(variant, *(a.astype(np.float64) for a in (q, k, v)))
        assert q.ndim == 4
        assert found is not None
        return found[0].astype(q.dtype)

    assert ch.check(function).names == tuple(mistake.name for mistake in variant.mistakes)


def test_a_class_is_built_and_what_was_inferred_is_said() -> None:
    from right_texts import ChapterNumPy, ChapterTorch

    for report in (ch.check(ChapterNumPy, 4), ch.check(ChapterNumPy, d_k=4), ch.check(ChapterNumPy)):
        assert report.right
        assert report.conventions["built"] == "d_k=4"
        assert report.conventions["sizes"] == "features 4 (d_k = 4)"
    assert ch.check(ChapterTorch(64)).conventions["sizes"] == "features 64 (scale = 8)"
    assert ch.check(right_ones.numpy_bhtd, d=6).conventions["sizes"] == "features 6 (d was stated)"
    with pytest.raises(ch.ArgumentError, match="d: is 0, expected the features of one head"):
        ch.check(right_ones.numpy_bhtd, d=0)
    with pytest.raises(ch.ArgumentError, match="arguments: are 4, and only a class is built"):
        ch.check(right_ones.numpy_bhtd, 4)
    with pytest.raises(ch.ArgumentError, match=r"arguments: do not build ChapterNumPy\(d_k: int\)"):
        ch.check(ChapterNumPy, 4, 5)


def test_what_was_found_of_arguments_groups_and_corners_is_said() -> None:
    found = ch.check(right_ones.numpy_without_names)
    assert found.conventions["arguments"] == "queries, keys and values are c, a and b"
    words = {check.name: check.words for check in ch.check(right_ones.torch_grouped).checks}
    assert "6 query heads over 2 key heads" in words["grouped heads"]
    words = {check.name: check.words for check in ch.check(right_ones.torch_always_causal).checks}
    assert words["causal corner"] == "first query aligned with the first key"
    assert ch.check(right_ones.torch_always_causal, causal="end").names == ("causal-other-corner",)


def test_a_function_that_leaves_or_hangs_does_not_end_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import time

    from clearhead.doctor import subject

    def leaves(q: Any, k: Any, v: Any) -> Any:
        sys.exit(3)

    with pytest.raises(ch.ArgumentError, match=r"it called sys\.exit\(3\)"):
        ch.check(leaves)

    def hangs(q: Any, k: Any, v: Any) -> Any:
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(subject, "LIMIT", 1)
    with pytest.raises(ch.ArgumentError, match="could not be checked: it had not answered after 1 seconds"):
        ch.check(hangs)


def test_a_class_is_built_from_the_command_line(tmp_path: Any) -> None:
    from typer.testing import CliRunner

    from clearhead.cli import app

    file = tmp_path / "mine.py"
    source = "import sys\nfrom right_texts import *\nint(sys.argv[1:] and 'no' or 0)\nsys.exit('done')\n"
    file.write_text(source, encoding="utf-8")
    for arguments in (["ChapterNumPy", "8"], ["ChapterNumPy", "d_k=8"], ["linear_algebra"]):
        result = CliRunner().invoke(app, ["check", f"{file}:{arguments[0]}", *arguments[1:]])
        assert result.exit_code == 0, result.output
        assert ("built" in result.output) == (len(arguments) > 1)
    result = CliRunner().invoke(app, ["check", f"{file}:linear_algebra", "8"])
    assert result.exit_code != 0
    assert "is no class" in str(result.exception) + result.output
