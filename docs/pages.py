"""What pages of the site share: the explorer, put into a page as one that works without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from IPython.display import HTML

MADE = Path(__file__).parent / "_made"


def explorer(page: Any, name: str, view: str = "", *, height: int = 560) -> HTML:
    """What `clearhead.explore` gave, saved as `explorer/<name>.html` of the site and shown at one of its views.

    It is for pages one folder down. `name` is unique among pages; `view` is what stands behind `#/` in the address.
    """
    folder = MADE / "explorer"
    folder.mkdir(parents=True, exist_ok=True)
    page.save(folder / f"{name}.html")
    address = f"../explorer/{name}.html" + (f"#/{view}" if view else "")
    return HTML(
        f'<iframe class="explorer" src="{address}" title="The explorer: {name}" loading="lazy" '
        f'style="width:100%;height:{height}px;border:1px solid #8884;border-radius:6px"></iframe>'
        f'<p><a href="{address}" target="_blank" rel="noopener">Open it alone</a></p>'
    )
