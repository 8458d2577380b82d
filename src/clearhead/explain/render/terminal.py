"""A page in the terminal, by rich: steps side by side where there is room, bars, colours, aligned decimals."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from clearhead.explain.render.page import Line, Page, Step
from clearhead.explain.tokens import bar

# What a step may take: two stand side by side in 120 columns, three in 180
NARROW, WIDEST = 56, 72
GAP = 4
# Arithmetic narrower than this is broken into too many lines
ROOM = 30

# A terminal obeys these; a token that holds one must not
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def visible(words: str) -> str:
    r"""A token as it may be printed: what would steer the terminal is shown as a sign.

    >>> visible("a\x1b[31mb")
    'a�[31mb'
    """
    return CONTROL.sub("�", words)


def terminal(page: Page, width: int) -> Iterable[RenderableType]:
    """The page for a console of this width."""
    yield Rule(Text(visible(page.title), style="bold"), style="dim")
    for fact in page.facts:
        yield from (Text(line) for line in textwrap.wrap(visible(fact), width))
    yield ""
    yield from (Text(line, style="bold cyan") for line in textwrap.wrap(page.formula, width))
    yield ""
    beside = max(width // (NARROW + GAP), 1)
    block = min((width - GAP * (beside - 1)) // beside, WIDEST)
    yield Columns([_block(number, step, block) for number, step in enumerate(page.steps, 1)], padding=(0, GAP))


def show(page: Page, console: Console) -> None:
    """Print the page; a pipe or a file gets no trailing blanks."""
    printed(console, Group(*terminal(page, console.width)))


def printed(console: Console, shown: RenderableType) -> None:
    """Print anything; blocks are padded to stand side by side, which a file or a pipe has no use for."""
    if console.is_terminal:
        console.print(shown)
        return
    with console.capture() as captured:
        console.print(shown)
    console.file.write("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()) + "\n")


def hanging(line: str, width: int, column: int) -> list[str]:
    """A line of two columns in lines of at most `width`: what stands in the second goes on below itself.

    >>> hanging("  kernel    tiled, and no other", 24, 12)
    ['  kernel    tiled, and', '            no other']
    """
    if cell_len(line) <= width:
        return [line]
    inner = " " * (column if column <= width // 2 else 4)
    indent = line[: len(line) - len(line.lstrip())]
    # the gap between the columns is kept, where both fit
    first, rest = line[:column], line[column:]
    if indent and first[-1:].isspace() and first.strip() and column <= width // 2:
        wrapped = textwrap.wrap(rest, width, initial_indent=first, subsequent_indent=inner)
    else:
        wrapped = textwrap.wrap(" ".join(line.split()), width, initial_indent=indent, subsequent_indent=f"{indent}  ")
    return wrapped or [line]


def _block(number: int, step: Step, width: int) -> RenderableType:
    heading = textwrap.wrap(f"{number}. {step.title}  {step.formula}".rstrip(), width)
    title = f"{number}. {step.title}"
    parts: list[RenderableType] = []
    for at, words in enumerate(heading):
        line = Text(words, style="cyan")
        if at == 0:
            line.stylize("bold not dim default", 0, len(title))
        parts.append(line)
    if step.lines:
        parts += [Text(), _lines(step.lines, width)]
    if step.says:
        parts += [Text(), *(Text(line, style="italic") for line in textwrap.wrap(visible(step.says), width))]
    return Group(*parts, Text())


def _lines(lines: tuple[Line, ...], width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    used = {
        "name": any(line.name for line in lines),
        "worked": any(line.worked for line in lines),
        "result": any(line.result for line in lines),
        "share": any(line.share is not None for line in lines),
        # a note stands where its line has no bar
        "note": any(line.note for line in lines) and all(line.share is None for line in lines),
    }
    names = max((cell_len(visible(line.name)) for line in lines), default=0)
    results = max((cell_len(line.result) for line in lines), default=0)
    names = min(names, max(8, width // 4))
    signed = results + (2 if used["worked"] else 0)
    room = width - names - 2 - (signed + 2 if used["result"] else 0)
    table.add_column(width=names, overflow="ellipsis", no_wrap=True)
    longest = max((cell_len(line.worked) for line in lines), default=0)
    if used["worked"] and room < min(longest, ROOM):
        # a long result, such as a vector, stands after its arithmetic and not in a column of its own
        table.add_column(width=width - names - 2, overflow="fold")
        for line in lines:
            table.add_row(Text(visible(line.name)), Text(f"{line.worked} = {line.result}"))
        return table
    if used["worked"]:
        worked = min(room, longest)
        table.add_column(width=worked, overflow="fold")
        room -= worked + 2
    if used["result"]:
        table.add_column(justify="right", no_wrap=True, width=signed, style="bold")
    if used["share"]:
        table.add_column(no_wrap=True, style="cyan")
    if used["note"]:
        table.add_column(overflow="fold", style="dim", width=max(room, 12))
    blocks = max(min(room - 2, 40), 4)
    for line in lines:
        cells = [Text(visible(line.name))]
        if used["worked"]:
            cells.append(Text(line.worked))
        if used["result"]:
            # padded here, so that the signs stand in one column and the decimals in another
            sign = "" if not used["worked"] else "= " if line.worked else "  "
            cells.append(Text(f"{sign}{line.result:>{results}}"))
        if used["share"]:
            cells.append(Text(visible(line.note) if line.share is None else bar(line.share, blocks)))
        if used["note"]:
            cells.append(Text(visible(line.note)))
        table.add_row(*cells, style="dim" if line.faint else None)
    return table
