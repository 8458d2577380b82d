"""A sheet: a few facts and a table, for values that a notebook shows; the look is that of a trace's page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from clearhead.explain.render.html import STYLE


def sheet(title: str, facts: Iterable[str], *tables: str, grade: str = "") -> str:
    """One element with its own style: a title, facts, and tables made by `rows` one below the other.

    >>> sheet("plan", ["8 heads"], rows([["kernel", "tiled"]])).count("<td")
    2
    """
    kind = f' class="{grade}"' if grade else ""
    parts = [f"<style>{STYLE}</style>", f"<h2{kind}>{escape(title)}</h2>"]
    parts += [f"<p>{escape(fact)}</p>" for fact in facts]
    return f'<div class="clearhead">{"".join([*parts, *tables])}</div>'


def rows(
    cells: Iterable[Sequence[str]], *, headings: Sequence[str] = (), numbers: Sequence[int] = (), words: str = ""
) -> str:
    """A table; columns in `numbers` stand at the right, and `words` before it say what it is."""
    head = "".join(f"<th{_right(i, numbers)}>{escape(name)}</th>" for i, name in enumerate(headings))
    body = "".join(
        f"<tr>{''.join(f'<td{_right(i, numbers)}>{escape(cell)}</td>' for i, cell in enumerate(row))}</tr>"
        for row in cells
    )
    above = f"<h3>{escape(words)}</h3>" if words else ""
    heading = f"<tr>{head}</tr>" if headings else ""
    return f'{above}<div class="scroll"><table class="sheet">{heading}{body}</table></div>'


def _right(column: int, numbers: Sequence[int]) -> str:
    return ' class="result"' if column in numbers else ""
