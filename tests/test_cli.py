"""The command line: every number it shows is the library's, at every width, and mistakes are one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

import clearhead
from clearhead.cli import app
from clearhead.textbook import EXAMPLES
from clearhead.textbook.layers import LAYERS

# what the machine that runs the tests happens to have set must not decide them
UNSET = ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "PYTHONWARNINGS")
COLOUR = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}

CASES = [("cat_sat", False), ("cat_sat", True), ("it_animal", False), ("it_animal", True)]
DRAW = np.random.default_rng(0)
WIDE = {
    **{name: DRAW.standard_normal((2, 3, 2)).round(2).tolist() for name in ("q", "k", "v")},
    "tokens": ["河", "岸の土手", "internationalization"],
}
MISTAKES = {
    "explain dog": "clearhead: EXAMPLE: is 'dog', expected one of cat_sat, it_animal, two_by_three",
    "explain --query dog": "clearhead: --query: is 'dog', expected one of The, cat, sat, on, mat,",
    "explain --query 5": "clearhead: --query: is 5, expected one of The, cat, sat, on, mat, or a position from -5 to 4",
    "explain it_animal --query 1": "clearhead: --query: is 1, expected one of it, or a position from -1 to 0",
    "explain --query": "clearhead: ",
    "explain --colour": "clearhead: No such option",
    "explain cat_sat it_animal": "clearhead: Got unexpected extra argument",
    "explian": "clearhead: No such command 'explian'.",
}


def shown(arguments: str, columns: int = 60, **environment: str) -> str:
    result = CliRunner().invoke(app, arguments.split(), env={"COLUMNS": str(columns), "TERM": "dumb", **environment})
    assert result.exit_code == 0, result.output
    return result.output


def process(arguments: str, columns: int, module: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    source = str(Path(clearhead.__file__).parents[1])
    start = ["-m", "clearhead"] if module else ["-c", "from clearhead.cli import main; main()"]
    return subprocess.run(
        [sys.executable, "-W", "error", *start, *arguments.split()],
        env={**kept, "COLUMNS": str(columns), "PYTHONPATH": source, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        encoding=environment.get("PYTHONIOENCODING", "utf-8"),
        timeout=120,
        check=False,
    )


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)


def line(token: str, numbers: object) -> str:
    """A row of a table: the token's name and its numbers, whatever the spaces between."""
    return rf"{token} +" + " +".join(re.escape(f"{x:.4f}") for x in numbers)


@pytest.mark.parametrize("columns", [60, 100, 200])
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_numbers_are_those_of_attention(name: str, causal: bool, columns: int) -> None:
    example = EXAMPLES[name]
    text = shown(f"explain {name}" + " --causal" * causal, columns)
    assert max(map(len, text.splitlines())) == columns  # the rules between parts reach to the edge
    assert "…" not in text.replace("e^(…)", "")  # nothing is cut short
    mask = clearhead.causal() if causal else None
    seen = clearhead.observe(example.q, example.k, example.v, mask=mask, weights=True)
    output = clearhead.attention(example.q, example.k, example.v, mask=mask)
    raw = example.q @ example.k.T
    totals = 1 / seen.weights.max(-1)  # the largest exponential is e^0, so its weight is 1 / sum
    for i, token in enumerate(example.query_tokens):
        assert re.search(line(token, raw[i]), text)
        assert re.search(line(token, output[i]), text)
        assert re.search(line(token, [totals[i], *seen.weights[i]]), text)
        assert re.search(line(token, [seen.max_score[i], *(seen.weights[i] * totals[i])]), text)
        if not causal:
            assert re.search(line(token, raw[i] / example.q.shape[-1] ** 0.5), text)


# as a process, which takes a second: each width, example and mask once
@pytest.mark.parametrize(
    ("name", "causal", "columns"), [("cat_sat", False, 60), ("cat_sat", True, 200), ("it_animal", True, 60)]
)
def test_no_line_is_longer_than_the_terminal(name: str, causal: bool, columns: int) -> None:
    done = process(f"explain {name}" + " --causal" * causal, columns)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) == columns  # the rules between parts reach to the edge
    assert "…" not in done.stdout.replace("e^(…)", "")  # nothing is cut short
    assert all(text == text.rstrip() for text in lines)
    assert "\x1b" not in done.stdout
    if columns == 60 and not causal:  # the other way to start it
        assert done.stdout == process(f"explain {name}", columns, module=False).stdout


def test_wide_terminals_stand_steps_side_by_side() -> None:
    assert len(shown("explain", 200).splitlines()) < len(shown("explain", 60).splitlines()) / 2


@pytest.mark.parametrize("columns", [20, 40])
@pytest.mark.parametrize("arguments", ["explain", "explain it_animal --causal", "explain --query 河 --json-input"])
def test_narrow_terminals_lose_no_digits(arguments: str, columns: int, tmp_path: Path) -> None:
    if arguments.endswith("--json-input"):  # two heads, and names that are wide and long
        (tmp_path / "call.json").write_text(json.dumps(WIDE), encoding="utf-8")
        arguments += f" {tmp_path / 'call.json'}"
    narrow, wide = (shown(arguments, width) for width in (columns, 200))
    assert max(map(cell_len, narrow.splitlines())) <= columns
    numbers = re.compile(r"\d\.\d{4}\b")
    assert set(numbers.findall(wide)) <= set(numbers.findall(narrow))


def test_tables_stay_with_a_scale_a_softcap_and_many_tokens() -> None:
    text = shown("explain random:12,12,64 --scale 0.3 --softcap 5", 200)
    q, k, v = np.random.default_rng(0).standard_normal((3, 12, 64))
    seen = clearhead.observe(q, k, v, scale=0.3, softcap=5.0, weights=True)
    scaled = 0.3 * (q @ k.T)
    for i in range(12):
        assert re.search(line(str(i), scaled[i]), text)
        assert re.search(line(str(i), 5 * np.tanh(scaled[i] / 5)), text)
        assert re.search(line(str(i), seen.output[i][:8]) + " +…", text)
    assert "softmax(5 tanh(Q Kᵀ × 0.3 / 5)) V" in text
    assert "Step 5  Output" in text
    assert "… 56 more" in text


def test_tables_stay_with_several_heads(tmp_path: Path) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 3, 4, 2))
    np.savez(tmp_path / "call.npz", q=q, k=k, v=v)
    text = shown(f"explain --npz {tmp_path / 'call.npz'} --head 2", 60)
    weights = clearhead.observe(q, k, v, weights=True).weights
    assert "head 2 of 3; --head shows another" in text
    for row in weights[2]:
        assert re.search(" +".join(f"{x:.4f}" for x in row), text)
    for head in weights:  # every head has its map
        assert re.search("▸ 1  " + " ".join(f".. {x:.2f}" for x in head[1]), text)


def test_inputs_formula_and_axes_are_said() -> None:
    text = shown("explain")
    assert "softmax(Q Kᵀ / √d_k) V" in text
    assert re.search(r"▸ cat +0 +2 +0 +1 ", text)
    assert re.search(r"mat +1 +0 +0.5 +0.5\n", text)
    assert "queries on rows, keys on columns" in text
    assert "cat · sat = 0·1 + 2·1 + 0·0 + 1·0 = 2" in text
    assert "e^(1.0000 − 1.5000) / sum = 0.6065 / 2.4840 = 0.2442" in text


def test_chosen_query_has_its_bars() -> None:
    text = shown("explain")
    assert 'What "cat" attends to' in text
    assert f"The  0.4026  {'█' * 16}\ncat  0.0898  {'█' * 4}\n" in text


@pytest.mark.parametrize("query", ["mat", "4", "-1"])
def test_query_is_a_token_or_a_position(query: str) -> None:
    text = shown(f"explain --query {query}")
    assert 'What "mat" attends to' in text
    assert "▸ mat" in text
    assert "▸ cat" not in text


def test_causal_shows_what_is_masked() -> None:
    text = shown("explain --causal")
    assert "softmax(Q Kᵀ / √d_k + mask) V" in text
    assert re.search(r"▸ cat +1\.5000 +0\.0000 +−∞ +−∞ +−∞", text)
    assert "sat  0.0000  masked" in text


def test_heat_map_has_shades_without_colour() -> None:
    assert "▸ cat  ██ 0.40 ░░ 0.09 ▓▓ 0.24 ▒▒ 0.15 ▒▒ 0.12" in shown("explain")


def test_heat_map_has_colours_in_a_terminal() -> None:
    text = process("explain", 60, **COLOUR).stdout
    assert "\x1b[1;38;2;0;0;0;48;2;252;250;170m 0.4026 " in text
    assert "▓" not in text


def test_no_color_is_honoured_in_a_terminal() -> None:
    text = process("explain", 60, NO_COLOR="1", **COLOUR).stdout
    assert not re.search(r"\x1b\[[\d;]*[34]8;", text)
    assert "▓▓ 0.24" in text


def test_encodings_without_blocks_still_show_the_numbers() -> None:
    done = process("explain", 60, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "0.4026" in done.stdout


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistake_is_one_line_and_status_2(arguments: str) -> None:
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2
    assert result.output.startswith(MISTAKES[arguments])
    assert result.output.count("\n") == 1


def test_mistake_goes_to_stderr() -> None:
    done = process("explain dog", 60)
    assert (done.returncode, done.stdout) == (2, "")
    names = [*EXAMPLES, *LAYERS]
    assert done.stderr == f"clearhead: EXAMPLE: is 'dog', expected one of {', '.join(names)}, random:T,S,D\n"


@pytest.mark.parametrize("arguments", ["", "--help", "explain --help"])
def test_help_is_shown(arguments: str) -> None:
    text = shown(arguments)
    assert "Usage: " in text
    assert "explain" in text


def test_import_brings_neither_rich_nor_typer() -> None:
    heavy = "{'rich', 'typer', 'torch', 'jax', 'matplotlib', 'clearhead.doctor', 'clearhead.measure.profiling'}"
    code = f"import sys, clearhead, clearhead.textbook; print({heavy} & set(sys.modules))"
    source = str(Path(clearhead.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "set()\n"
