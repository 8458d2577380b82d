"""What the exercises show: lines with a style, for a terminal, for print and for a notebook."""

from __future__ import annotations

from typing import Any

WIDTH = 100


class Shown:
    """Something that is printed in lines of at most a width, each with its style."""

    def lines(self, width: int) -> list[tuple[str, str]]:
        """The lines as (style, line)."""
        raise NotImplementedError

    def json(self) -> str:
        """All of it as JSON."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(line for _, line in self.lines(WIDTH))

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        for style, line in self.lines(min(options.max_width, WIDTH)):
            yield Text(line, style=style)
