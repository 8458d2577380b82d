"""Tables, heat maps and bars in the terminal: cut into parts where they are wider than it, and never cut off."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from clearhead.explain.render.page import figure
from clearhead.explain.render.terminal import visible
from clearhead.explain.tokens import bar

MARK = "▸"
SHADES = " ░▒▓█"
GAP = 2
# A name is cut short past this many cells, and past a third of the terminal
LONGEST = 16
# A worked line is broken here, so that blocks can stand side by side
WRAPPED = 52

# Dark to light, the same order on every background; what lies between is interpolated
HEAT = ((36, 18, 74), (90, 30, 122), (166, 45, 110), (229, 92, 65), (252, 182, 60), (252, 250, 170))


def named(name: str, width: int) -> str:
    """A token as a row or a column is called: printable, and no longer than there is room for.

    >>> named("antidisestablishmentarianism", 80), named("河の土手", 20)
    ('antidisestablis…', '河の…')
    """
    name = visible(name)
    most = max(min(LONGEST, width // 3), 4)
    return name if cell_len(name) <= most else f"{set_cell_size(name, most - 1).rstrip()}…"


def block(title: str, formula: str, parts: Sequence[RenderableType], width: int, worked: str = "") -> RenderableType:
    """A part of a page: its title and formula, what it shows, and one number worked out."""
    lines: list[RenderableType] = [Text.assemble((title, "bold"), "  ", (formula, "cyan")), Text(), *parts]
    if worked:
        # wrapped here: a block is as wide as its longest line, and blocks stand side by side
        lines += [Text(), *(Text(line, style="italic") for line in textwrap.wrap(worked, min(WRAPPED, width)))]
    return Group(*lines, Text())


def side_by_side(blocks: Sequence[RenderableType]) -> RenderableType:
    """Blocks beside one another where there is room."""
    return Columns(blocks, padding=(0, 4))


def matrix(
    names: Sequence[str],
    headings: Sequence[str],
    rows: Sequence[Sequence[Text]],
    width: int,
    at: int | None = None,
) -> list[RenderableType]:
    """A table with a name before each row, and one row marked; in parts, by columns, where it is too wide."""
    called = _marked(names, width, at)
    titles = [named(heading, width) for heading in headings]
    sizes = [max(cell_len(title), *(cell_len(row[i].plain) for row in rows)) for i, title in enumerate(titles)]
    parts: list[RenderableType] = []
    for chunk in _chunks(sizes, width - max(map(cell_len, called), default=0)):
        table = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
            header_style="bold",
            border_style="dim",
        )
        table.add_column(no_wrap=True)
        for i in chunk:
            table.add_column(Text(titles[i]), justify="right", no_wrap=True)
        for i, (name, row) in enumerate(zip(called, rows, strict=True)):
            table.add_row(Text(name), *row[chunk.start : chunk.stop], style="bold" if i == at else None)
        parts += [Text(), table] if parts else [table]
    return parts


def heat_map(
    names: Sequence[str],
    headings: Sequence[str],
    weights: np.ndarray,
    allowed: np.ndarray,
    coloured: bool,
    width: int,
    at: int | None = None,
) -> list[RenderableType]:
    """Weights as colours, or as shades without them; queries on rows, keys on columns, and a strip to read it by."""
    finite = np.where(np.isfinite(weights), weights, 0.0)
    largest = float(finite.max(initial=0.0))
    called = [f"{name}  " for name in _marked(names, width, at)]
    titles = [named(heading, min(width, 21)) for heading in headings]  # a cell has eight
    parts: list[RenderableType] = []
    for chunk in _chunks([8 - GAP] * len(titles), width - max(map(cell_len, called), default=0)):
        table = Table(box=None, padding=0, collapse_padding=True, pad_edge=False, header_style="bold")
        table.add_column(no_wrap=True)
        for i in chunk:
            table.add_column(Text(titles[i]), justify="center", no_wrap=True, width=8)
        for i, name in enumerate(called):
            cells = [
                _cell(float(finite[i, j]), largest, coloured) if allowed[i, j] else Text("   ·    ", style="dim")
                for j in chunk
            ]
            table.add_row(Text(name), *cells, style="bold" if i == at else None)
        parts += [Text(), table] if parts else [table]
    steps = max(min(17, (width - 10) // 2), 2)
    shares = np.linspace(0.0, 1.0, steps).tolist()
    strip = [Text("  ", style=_heat(share)) if coloured else Text(_shade(share) * 2) for share in shares]
    return [*parts, Text(), Text.assemble("0 ", *strip, f" {largest:.4f}")]


def bars(names: Sequence[str], weights: Sequence[float], allowed: Sequence[bool], width: int) -> RenderableType:
    """One query's weights, each with a bar."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_header=False)
    called = [named(name, width) for name in names]
    numbers = [number(weight) for weight in weights]
    taken = max(map(cell_len, called), default=0) + max((cell_len(one.plain) for one in numbers), default=0)
    blocks = max(min(40, width - taken - 2 * GAP), 1)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, overflow="crop")
    for name, one, weight, may in zip(called, numbers, weights, allowed, strict=True):
        share = float(weight) if math.isfinite(weight) else 0.0
        table.add_row(Text(name), one, Text(bar(share, blocks), "cyan") if may else Text("masked", "dim"))
    return table


def number(value: float) -> Text:
    """A computed number as a cell."""
    return Text(figure(value), style="dim" if value == -np.inf else "")


def _marked(names: Sequence[str], width: int, at: int | None) -> list[str]:
    """The chosen row is marked, with and without colour."""
    return [f"{MARK if i == at else ' '} {named(name, width)}" for i, name in enumerate(names)]


def _chunks(sizes: Sequence[int], room: int) -> Iterator[range]:
    """Columns in as many runs as it takes for each to fit; one that fits nowhere stands alone."""
    start, used = 0, 0
    for i, size in enumerate(sizes):
        if i > start and used + size + GAP > room:
            yield range(start, i)
            start, used = i, 0
        used += size + GAP
    yield range(start, len(sizes))


def _cell(weight: float, largest: float, coloured: bool) -> Text:
    share = weight / largest if largest else 0.0
    return Text(f" {weight:.4f} ", style=_heat(share)) if coloured else Text(f"{_shade(share) * 2} {weight:.2f} ")


def _heat(share: float) -> Style:
    """The colour of a share between 0 and 1, and letters that can be read on it."""
    place = share * (len(HEAT) - 1)
    low = min(int(place), len(HEAT) - 2)
    red, green, blue = (round(a + (b - a) * (place - low)) for a, b in zip(HEAT[low], HEAT[low + 1], strict=True))
    # dark letters where the eye sees the colour as bright
    letters = "rgb(0,0,0)" if 0.3 * red + 0.59 * green + 0.11 * blue > 128 else "rgb(255,255,255)"
    return Style(color=letters, bgcolor=f"rgb({red},{green},{blue})")


def _shade(share: float) -> str:
    # rounded up, so that only a share of 0 is blank; the rounding first keeps 0.25 · 4 from being a little over 1
    return SHADES[math.ceil(round(share * (len(SHADES) - 1), 9))]
