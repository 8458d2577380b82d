"""A page as plain text and as Markdown: the same characters on every machine."""

from __future__ import annotations

from collections.abc import Iterable

from clearhead.explain.render.page import Line, Page, Step
from clearhead.explain.tokens import bar, cells, padded


def text(page: Page) -> str:
    """The page as plain text, without a width: every line is as long as its arithmetic."""
    parts = [page.title, *page.facts]
    for number, step in enumerate(page.steps, 1):
        parts += ["", f"{number}. {step.title}  {step.formula}".rstrip(), *_aligned(step)]
        if step.says:
            parts.append(f"   {step.says}")
    return "\n".join(parts)


def _aligned(step: Step) -> list[str]:
    name = max((cells(line.name) for line in step.lines), default=0)
    worked = max((len(line.worked) for line in step.lines), default=0)
    result = max((len(line.result) for line in step.lines), default=0)
    return [f"   {_joined(line, name, worked, result)}" for line in step.lines]


def _joined(line: Line, name: int, worked: int, result: int) -> str:
    parts = [padded(line.name, name)]
    if worked:
        sign = " = " if line.worked and line.result else "   " if result else ""
        parts.append(f"{line.worked:<{worked}}{sign}{line.result:>{result}}")
    elif result:
        parts.append(f"{line.result:>{result}}")
    if line.share is not None:
        parts.append(bar(line.share))
    if line.note:
        parts.append(line.note)
    return "  ".join(parts).rstrip()


def markdown(page: Page) -> str:
    """The page as Markdown: a heading and a table for each step."""
    parts = [f"## {_plain(page.title)}", "", *(f"- {_plain(fact)}" for fact in page.facts), "", f"$${page.latex}$$"]
    for number, step in enumerate(page.steps, 1):
        parts += ["", f"### {number}. {_plain(step.title)}", "", f"$${step.latex}$$"]
        if step.lines:
            parts += ["", *_table(step)]
        if step.says:
            parts += ["", _plain(step.says)]
    return "\n".join(parts) + "\n"


def _table(step: Step) -> list[str]:
    columns = {
        "key": [line.name for line in step.lines],
        "arithmetic": [line.worked for line in step.lines],
        "result": [line.result for line in step.lines],
        "": ["" if line.share is None else bar(line.share, 20) for line in step.lines],
        "note": [line.note for line in step.lines],
    }
    used = {name: cells for name, cells in columns.items() if any(cells)}
    rows = zip(*used.values(), strict=True)
    rule = ["---:" if name == "result" else "---" for name in used]
    return [_row(used), _row(rule), *(_row(map(_plain, row)) for row in rows)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(words: str) -> str:
    """What Markdown would take for markup, escaped; a token may hold anything."""
    words = words.replace("\\", "\\\\").replace("\n", " ").replace("\r", " ")
    for sign in "|*_`<>[]#$":
        words = words.replace(sign, f"\\{sign}")
    return words


def latex(page: Page) -> str:
    """The formulas of the page as LaTeX, one line of an `aligned` block for each step."""
    lines = [page.latex, *(step.latex for step in page.steps)]
    rows = [line.replace("=", "&=", 1) for line in lines]
    return "\\begin{aligned}\n" + " \\\\\n".join(rows) + "\n\\end{aligned}"
