"""The page in a notebook: as a frame that holds all of it, or, in Colab, as one that the server fills.

A frame that holds its page needs no server that the browser could reach, so it works in Jupyter on another machine, in
VS Code and in an exported notebook. Colab shows a port of its own machine through a proxy, and there the page is live.
"""

from __future__ import annotations

import html
import sys
from typing import Any

HEIGHT = 720  # pixels: in VS Code a frame without a height of its own has none


def colab() -> Any:
    """Colab's own `output` module, where this runs in Colab; nothing is imported to find out."""
    return getattr(sys.modules.get("google.colab"), "output", None)


def frame(page: str) -> str:
    """A frame that holds a page. What it runs has no access to the notebook around it."""
    inside = html.escape(page, quote=True)
    style = f"width:100%;height:{HEIGHT}px;border:0;border-radius:8px"
    return (
        f'<iframe title="clearhead" sandbox="allow-scripts allow-downloads" srcdoc="{inside}" style="{style}"></iframe>'
    )
