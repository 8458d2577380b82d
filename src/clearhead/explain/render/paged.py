"""What every computation told in steps can be asked for: text, Markdown, HTML, LaTeX and the terminal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from clearhead.explain.render import html, text
from clearhead.explain.render.page import Page

# As many keys as a screen has room for
SCREENFUL = 16


class Paged(ABC):
    """A value that tells itself as a page of steps: print it, or ask for `markdown()`, `html()` or `latex()`."""

    @abstractmethod
    def page(self, keys: int = SCREENFUL) -> Page:
        """The steps with at most `keys` keys."""

    def __str__(self) -> str:
        return text.text(self.page())

    def markdown(self, keys: int = SCREENFUL) -> str:
        """The steps as Markdown, a table for each."""
        return text.markdown(self.page(keys))

    def html(self, keys: int = SCREENFUL) -> str:
        """The steps as a self-contained HTML file: no script, no address."""
        return html.document(self.page(keys))

    def _repr_html_(self) -> str:
        return html.fragment(self.page())

    def latex(self) -> str:
        """The formulas of the steps, in an `aligned` block."""
        return text.latex(self.page())

    def __rich_console__(self, console: Any, options: Any) -> Any:
        # rich is only imported where rich is printing
        from clearhead.explain.render.terminal import terminal

        yield from terminal(self.page(), options.max_width)
