"""What pages of the site share: the explorer, put into a page as one that works without a server, and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MADE = Path(__file__).parent / "_made"
# Put before the explorer's own script: a lesson is its tour, and the site (`site.js`) says whether it is light or dark
IN_A_PAGE = """<script>
try { if (top !== self) localStorage.setItem("clearhead.tour", "done"); } catch { }
addEventListener("message", ({ data }) => {
  const root = document.documentElement;
  const now = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (!["light", "dark"].includes(data?.theme) || data.theme === now) return;
  const turn = document.querySelector('#tools [aria-label="Light or dark"]');
  if (turn) turn.click();
  else root.dataset.theme = data.theme;
});
</script>
"""


def explorer(page: Any, name: str, view: str = "", *, height: int = 560) -> Any:
    """What `clearhead.explore` gave, saved as `explorer/<name>.html` of the site and shown at one of its views.

    It is for pages one folder down. `name` is unique among pages; `view` is what stands behind `#/` in the address.
    It is loaded when the reader comes near it.
    """
    from IPython.display import HTML

    folder = MADE / "explorer"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.html"
    page.save(path)
    path.write_text(path.read_text(encoding="utf-8").replace("<head>", f"<head>\n{IN_A_PAGE}", 1), encoding="utf-8")
    address = f"../explorer/{name}.html" + (f"#/{view}" if view else "")
    return HTML(
        f'<iframe class="explorer" src="{address}" title="The explorer: {name}" loading="lazy" '
        f'style="height:{height}px"></iframe>'
        f'<p class="explorer-alone"><a href="{address}" target="_blank" rel="noopener">Open it alone</a></p>'
    )


def last_picture(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """For the gallery: the picture that a script made last, which it has called `picture`; pyplot never hears of it."""
    from sphinx_gallery.scrapers import figure_rst

    picture = block_vars["example_globals"].pop("picture", None)
    if picture is None:
        return ""
    axes = getattr(picture, "flat", [picture])[0]
    path = next(block_vars["image_path_iterator"])
    axes.figure.savefig(path, dpi=192)
    return figure_rst([path], gallery_conf["src_dir"])
