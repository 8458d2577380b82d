"""What the doctor found: conventions, checks, findings with the smallest failing example; text, JSON, terminal."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from clearhead.doctor.mistakes import Mistake
from clearhead.explain.render.page import figure, given
from clearhead.explain.render.sheet import rows, sheet

MARKS = {"passed": "✓", "failed": "✗", "noted": "!", "skipped": "–"}
STYLES = {"passed": "green", "failed": "bold red", "noted": "yellow", "skipped": "dim"}
WIDTH = 100


@dataclass(frozen=True, eq=False)
class Example:
    """The smallest problem found on which a function is wrong: what it was given, what it should give, what it gave."""

    inputs: dict[str, np.ndarray]
    expected: np.ndarray
    got: np.ndarray | str

    def lines(self) -> list[str]:
        """The example, one array a line where it fits."""
        rows = [f"{name} = {spelled(array)}" for name, array in self.inputs.items()]
        got = self.got if isinstance(self.got, str) else spelled(self.got, figure)
        return [*rows, f"expected {spelled(self.expected, figure)}", f"got      {got}"]

    def data(self) -> dict[str, Any]:
        """The example as JSON has it."""
        got = self.got if isinstance(self.got, str) else listed(self.got)
        return {
            "inputs": {name: listed(array) for name, array in self.inputs.items()},
            "expected": listed(self.expected),
            "got": got,
        }


@dataclass(frozen=True, eq=False)
class Finding:
    """A mistake that was found, by which check, in which words, and the example that shows it."""

    mistake: Mistake
    check: str
    words: str
    example: Example | None = None
    hazard: bool = False  # right as long as nobody asks for what it cannot do: told, and not called wrong

    @property
    def name(self) -> str:
        """The mistake's name in the catalogue."""
        return self.mistake.name


@dataclass(frozen=True)
class Checked:
    """One check and how it came out: passed, failed, noted (legal, but to be known) or skipped (and why)."""

    name: str
    outcome: str
    words: str


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """Whether a function is right: `right` says so, `names` are the mistakes. `print` it, or ask for `json()`.

    >>> import clearhead as ch
    >>> report = ch.check(ch.attention)
    >>> report.right, [finding.name for finding in report.findings]
    (True, [])
    """

    function: str
    conventions: dict[str, str]
    checks: tuple[Checked, ...]
    findings: tuple[Finding, ...]

    @property
    def right(self) -> bool:
        """True where no mistake was found; a hazard, which shows only where it is asked for, is no mistake."""
        return all(finding.hazard for finding in self.findings)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mistakes, in the order they were found."""
        return tuple(finding.name for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        passed = sum(check.outcome == "passed" for check in self.checks)
        if self.right and not passed:
            return f"{self.function} was not judged: none of the checks could be made"
        if self.right:
            noted = sum(check.outcome == "noted" for check in self.checks)
            more = f", {noted} to know of" if noted else ""
            risks = len(self.findings)
            more += f", {risks} hazard{'s' if risks > 1 else ''}" if risks else ""
            return f"{self.function} is right: {passed} checks passed{more}"
        count = len(self.findings)
        return f"{self.function} is wrong: {count} mistake{'s' if count > 1 else ''}, {passed} checks passed"

    def lines(self, width: int = WIDTH) -> list[tuple[str, str]]:
        """The report as (style, line), no line longer than `width` unless a number makes it so."""
        found = [("bold red" if self.findings else "bold green", self.verdict), ("", "")]
        found += _hanging([(name, words, "") for name, words in self.conventions.items()], width, "  ")
        found.append(("", ""))
        found += _hanging([(check.name, check.words, check.outcome) for check in self.checks], width, "")
        for finding in self.findings:
            found += [("", ""), ("bold", f"{finding.name}: {finding.mistake.title}")]
            texts = (("seen", finding.words), ("why", finding.mistake.why), ("mend", finding.mistake.mends))
            for label, words in texts:
                body = textwrap.wrap(words, max(width - 8, 24))
                found += [("", f"  {label if not i else '':<5} {line}") for i, line in enumerate(body)]
            if finding.example is not None:
                found.append(("dim", "  the smallest example found:"))
                for line in finding.example.lines():
                    style = {"expected": "green", "got": "red"}.get(line.split()[0], "")
                    body = textwrap.wrap(line, max(width - 4, 24), subsequent_indent=" " * 9)
                    found += [(style, f"    {part}") for part in body]
        return found

    def __str__(self) -> str:
        return "\n".join(line for _, line in self.lines())

    def __repr__(self) -> str:
        return f"Report({self.verdict!r})"

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        for style, line in self.lines(min(options.max_width, 120)):
            yield Text(line, style=style)

    def _repr_html_(self) -> str:
        tables = [rows(self.conventions.items(), words="how it is called")] if self.conventions else []
        checks = [(MARKS[check.outcome], check.name, check.words) for check in self.checks]
        tables.append(rows(checks, words="what was checked"))
        for finding in self.findings:
            found = [("seen", finding.words), ("why", finding.mistake.why), ("mend", finding.mistake.mends)]
            if finding.example is not None:
                found.append(("smallest example", "\n".join(finding.example.lines())))
            tables.append(rows(found, words=f"{finding.name}: {finding.mistake.title}"))
        return sheet(self.verdict, (), *tables, grade="good" if self.right else "bad")

    def json(self) -> str:
        """The whole report as JSON."""
        return json.dumps(
            {
                "function": self.function,
                "right": self.right,
                "conventions": self.conventions,
                "checks": [asdict(check) for check in self.checks],
                "findings": [
                    {
                        "name": finding.name,
                        "title": finding.mistake.title,
                        "why": finding.mistake.why,
                        "mend": finding.mistake.mends,
                        "check": finding.check,
                        "seen": finding.words,
                        "example": None if finding.example is None else finding.example.data(),
                    }
                    for finding in self.findings
                ],
            },
            ensure_ascii=False,
        )


def _hanging(rows: list[tuple[str, str, str]], width: int, indent: str) -> list[tuple[str, str]]:
    """Names in one column and words, wrapped, in the next; the mark of each outcome first."""
    column = max((len(name) for name, _, _ in rows), default=0)
    found = []
    for name, words, outcome in rows:
        mark = f"{MARKS[outcome]} " if outcome else ""
        body = textwrap.wrap(words, max(width - column - 2 - len(indent) - len(mark), 24)) or [""]
        for i, line in enumerate(body):
            head = f"{mark}{name:<{column}}" if not i else " " * (len(mark) + column)
            found.append((STYLES.get(outcome, ""), f"{indent}{head}  {line}".rstrip()))
    return found


def spelled(array: np.ndarray, number: Any = given) -> str:
    """An array as nested lists, with every number written for reading.

    >>> spelled(np.array([[1.0, 0.5]]))
    '[[1, 0.5]]'
    """
    if array.ndim == 0:
        return str(number(float(array))) if array.dtype.kind == "f" else str(array.item())
    return f"[{', '.join(spelled(part, number) for part in array)}]"


def listed(array: np.ndarray) -> Any:
    """An array as nested lists for JSON; what is not finite as a string.

    >>> listed(np.array([1.0, np.nan]))
    [1.0, 'nan']
    """
    if array.ndim:
        return [listed(part) for part in array]
    value = array.item()
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
