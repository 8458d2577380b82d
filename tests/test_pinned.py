"""What the terminal shows, to the letter, at 60 and at 200 columns. To pin it anew: python tests/test_pinned.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from clearhead.cli import app

PINNED = Path(__file__).parent / "data" / "terminal"
COMMANDS = {
    "explain": "explain",
    "explain_masked": "explain --query sat --causal --softcap 5",
    "explain_long": "explain random:400,400,24 --query 300 --causal --keys 6",
    "walk": "explain it_animal --walk",
    "markdown": "explain it_animal --markdown",
    "scaling": "scaling --d-k 1,16,256",
    "paper": "profile --paper",
    "check_right": "check clearhead:attention",
    "check_wrong": "check planted:no_softmax",
}


def shown(name: str, columns: int) -> str:
    environment = {"COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": None, "FORCE_COLOR": None}
    result = CliRunner().invoke(app, COMMANDS[name].split(), env=environment)
    assert result.exit_code in (0, 1), result.output
    return result.output


@pytest.mark.parametrize("columns", [60, 200])
@pytest.mark.parametrize("name", COMMANDS)
def test_output_is_what_it_was(name: str, columns: int) -> None:
    assert shown(name, columns) == (PINNED / f"{name}_{columns}.txt").read_text(encoding="utf-8")


WHOLE = ("markdown",)  # one line is one fact, and is not broken


@pytest.mark.parametrize("columns", [60, 200])
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in WHOLE])
def test_no_line_is_longer_than_the_terminal(name: str, columns: int) -> None:
    assert max(map(len, shown(name, columns).splitlines())) <= columns


@pytest.mark.parametrize("command", ["explain", "check", "plan", "profile", "scaling", "plot"])
def test_help_has_examples(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100", "TERM": "dumb"}).output
    assert f"\n    clearhead {command}" in text.split("Examples:")[1]
    assert "--json" in text


if __name__ == "__main__":
    PINNED.mkdir(parents=True, exist_ok=True)
    for name in COMMANDS:
        for columns in (60, 200):
            (PINNED / f"{name}_{columns}.txt").write_text(shown(name, columns), encoding="utf-8")
