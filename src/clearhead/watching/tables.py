"""Tables of heads: columns of numbers without rules, and the same as text in 80 columns."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType
from rich.table import Table


def columns(*titles: str) -> Table:
    """An empty table with a column for each title: titles bold, numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def plain(value: RenderableType) -> str:
    """What rich would print, as text in 80 columns, with no blanks at the ends of lines."""
    page = io.StringIO()
    # in a notebook a console shows what it prints there, and the text would be empty; its kernel also asks for colours
    Console(file=page, width=80, highlight=False, force_jupyter=False, force_terminal=False).print(value)
    return "\n".join(line.rstrip() for line in page.getvalue().rstrip().splitlines())


def shown(value: float | None, how: str) -> str:
    """A number by its format, or a dash where there is none."""
    return "–" if value is None else format(value, how)
