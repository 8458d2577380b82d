"""An autograder for a course module on attention: a student's file in, a table of points and JSON out.

    python examples/autograder.py student.py
    python examples/autograder.py student.py --json results.json

The module has `scaled_dot_product_attention(Q, K, V, mask=None)`, `MultiHeadAttention(embed_dim, num_heads)`,
`create_causal_mask(n)` and `create_padding_mask(lengths, max_length)`; True or 1 in a mask lets through. NumPy, PyTorch
and JAX will do, in any usual layout: `clearhead.check` finds out how each is called. Points are given by what was
checked, so that who forgot the mask still has those of the formula, and every point that is missing comes with the
mistake's name and a hint.

A student's code runs in a process of its own, item by item, with a time limit. That is no sandbox: grade files of
strangers where nothing can be lost. Exit status: 0 all points, 1 not all of them, 2 the file could not be read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clearhead as ch

# Sizes that a layer is built with: no two that could be taken for one another
EMBED, HEADS = 12, 3


@dataclass(frozen=True)
class Item:
    """A name that the module has to define, and points for each thing that is checked of it."""

    name: str
    points: dict[str, int]
    grade: Callable[[Any, dict[str, int]], tuple[dict[str, int], list[str]]]

    @property
    def most(self) -> int:
        """All points."""
        return sum(self.points.values())


def by_check(build: tuple[int, ...] = ()) -> Callable[[Any, dict[str, int]], tuple[dict[str, int], list[str]]]:
    """Points by the checks of `clearhead.check`: a check that failed, or could not be made, has none."""

    def grade(found: Any, points: dict[str, int]) -> tuple[dict[str, int], list[str]]:
        report = ch.check(found, *build, mask="attend")
        failed = {check.name for check in report.checks if check.outcome == "failed"}
        passed = {check.name for check in report.checks if check.outcome == "passed"} - failed
        if "formula" not in passed:  # what is not the formula is not attention, whatever else it does
            passed = set()
        got = {name: most if name in passed else 0 for name, most in points.items()}
        words = [
            f"{finding.name}: {finding.mistake.title}. {finding.mistake.why}. Hint: {finding.mistake.mends}."
            for finding in report.findings
            if not finding.hazard
        ]
        asked = {check.name: check.words for check in report.checks if check.outcome == "skipped"}
        words += [f"{name} was not checked: {why}" for name, why in asked.items() if name in points and passed]
        missing = [name for name in points if passed and not any(check.name == name for check in report.checks)]
        return got, words + [f"{name} was not checked: no way to ask for it was found" for name in missing]

    return grade


def by_exercise(number: int) -> Callable[[Any, dict[str, int]], tuple[dict[str, int], list[str]]]:
    """All points or none, by an exercise of `clearhead.learn` that asks for the same function."""

    def grade(found: Any, points: dict[str, int]) -> tuple[dict[str, int], list[str]]:
        outcome = ch.learn(number, found, keep=False)
        if outcome.right:
            return points, []
        example = "; ".join(outcome.example)
        words = f"{outcome.name}: {outcome.mistake}. {outcome.why}. Hint: {outcome.hint}."
        return dict.fromkeys(points, 0), [f"{words} {example}".strip()]

    return grade


ITEMS = (
    Item(
        "scaled_dot_product_attention", {"formula": 20, "weights": 5, "mask": 10, "large scores": 5, "inputs": 5},
        by_check(),
    ),
    Item("MultiHeadAttention", {"formula": 20, "mask": 10, "sizes": 5}, by_check((EMBED, HEADS))),
    Item("create_causal_mask", {"mask": 10}, by_exercise(7)),
    Item("create_padding_mask", {"mask": 10}, by_exercise(8)),
)  # fmt: skip


@dataclass(frozen=True)
class Graded:
    """What an item got, by check, and what is said about it."""

    name: str
    got: dict[str, int]
    points: dict[str, int]
    words: list[str]

    @property
    def score(self) -> int:
        """The points that it got."""
        return sum(self.got.values())


def grade(file: Path, seconds: float = 60.0) -> list[Graded]:
    """Every item of a student's file, each in a process of its own."""
    graded = []
    for item in ITEMS:
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "graded.json"
            command = [sys.executable, __file__, str(file.resolve()), "--item", item.name, "--json", str(answer)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            child = subprocess.Popen(
                command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                child.wait(seconds)
                told = json.loads(answer.read_text()) if answer.is_file() else {"words": ["it ended Python"]}
            except subprocess.TimeoutExpired:
                told = {"words": [f"it had not answered after {seconds:g} seconds"]}
            finally:
                _end(child)
        got = told.get("got", dict.fromkeys(item.points, 0))
        graded.append(Graded(item.name, got, item.points, told["words"]))
    return graded


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process and what it began."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    except (ProcessLookupError, PermissionError):
        pass
    child.wait()


def grade_one(file: Path, name: str) -> dict[str, Any]:
    """One item, here and now: what the process of its own does."""
    from clearhead.cli.checks import load
    from clearhead.core.errors import ArgumentError

    item = next(item for item in ITEMS if item.name == name)
    nothing = dict.fromkeys(item.points, 0)
    said = ""
    for spelling in dict.fromkeys([name, name.replace("MultiHead", "Multihead")]):  # the course has both
        try:
            got, words = item.grade(load(f"{file}:{spelling}"), item.points)
        except ArgumentError as refused:
            missing = f"has no attribute '{spelling}'" in str(refused)
            said = said or (f"the file defines no {name}" if missing else str(refused))
            continue
        return {"got": got, "words": words}
    return {"got": nothing, "words": [said]}


def table(graded: list[Graded]) -> str:
    """The points as lines of text, and below them what is wrong."""
    widest = max(len(one.name) for one in graded)
    lines = []
    for one in graded:
        most = sum(one.points.values())
        parts = ", ".join(f"{name} {one.got[name]}/{points}" for name, points in one.points.items())
        lines.append(f"{one.name:<{widest}}  {one.score:>3} / {most:<3} {parts}")
    score, most = sum(one.score for one in graded), sum(sum(one.points.values()) for one in graded)
    lines.append(f"{'all':<{widest}}  {score:>3} / {most}")
    for one in graded:
        lines += [f"\n{one.name}"] if one.words else []
        for words in one.words:
            lines += textwrap.wrap(words, 100, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def results(graded: list[Graded]) -> dict[str, Any]:
    """The points as grading systems read them: a score, and tests with a name, points and what to tell the student."""
    return {
        "score": sum(one.score for one in graded),
        "max_score": sum(sum(one.points.values()) for one in graded),
        "tests": [
            {
                "name": f"{one.name}: {check}",
                "score": one.got[check],
                "max_score": points,
                "output": "" if one.got[check] == points else "\n".join(one.words),
            }
            for one in graded
            for check, points in one.points.items()
        ],
    }


def main() -> int:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path, help="the student's module")
    parser.add_argument("--json", type=Path, help="write the points there, as grading systems read them")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each item may take")
    parser.add_argument("--item", choices=[item.name for item in ITEMS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.file.is_file():
        print(f"autograder: there is no file {given.file}", file=sys.stderr)
        return 2
    if given.item:
        given.json.write_text(json.dumps(grade_one(given.file, given.item)))
        return 0
    graded = grade(given.file, given.seconds)
    print(table(graded))
    if given.json:
        given.json.write_text(json.dumps(results(graded), indent=1), encoding="utf-8")
    return 0 if all(one.score == sum(one.points.values()) for one in graded) else 1


if __name__ == "__main__":
    sys.exit(main())
