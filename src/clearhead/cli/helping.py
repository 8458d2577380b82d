"""Help that is no wider than the terminal: lines that are longer are broken, commands so that they can be pasted."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from typing import Any

# Narrower than this there is no column beside the options: what one does stands below it
BESIDE = 60


def fitted(help_of: Callable[[Any], str], context: Any) -> str:
    """The help of a command for the terminal that there is."""
    width = shutil.get_terminal_size().columns
    if width < BESIDE:
        context.terminal_width = 10_000  # every option on a line of its own, to be broken here
    return fit(help_of(context), width)


def fit(words: str, width: int) -> str:
    r"""Help in lines of at most `width`.

    >>> print(fit("  clearhead plot mask random:64,64,1 -o mask.png", 34))
      clearhead plot mask \
          random:64,64,1 -o mask.png
    >>> print(fit("  --npz FILE     Arrays q, k and v of a file.", 24))
      --npz FILE
        Arrays q, k and v of
        a file.
    """
    lines: list[str] = []
    for line in words.splitlines():
        lines += _broken(line, width)
    return "\n".join(lines)


def _broken(line: str, width: int) -> list[str]:
    width = max(width, 12)
    words = line.strip()
    indent = line[: len(line) - len(line.lstrip())]
    if len(line) > width and len(indent) > width // 3:
        indent = " " * 4  # a second column that stood below its first: there is no room for one
    name, gap, what = words.partition("  ")
    if gap and width < BESIDE:
        inner = f"{indent}  "
        below = textwrap.wrap(what.strip(), width, initial_indent=inner, subsequent_indent=inner)
        return [*textwrap.wrap(name, width, initial_indent=indent, subsequent_indent=inner), *below]
    if len(line) <= width:
        return [line]
    if words.startswith("clearhead "):
        inner = f"{indent}    "
        parts = textwrap.wrap(words, width - 2, initial_indent=indent, subsequent_indent=inner, break_on_hyphens=False)
        return [f"{part} \\" for part in parts[:-1]] + parts[-1:]
    return textwrap.wrap(words, width, initial_indent=indent, subsequent_indent=indent)
