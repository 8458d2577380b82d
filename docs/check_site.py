"""Whether a built site stands by itself: nothing is loaded from elsewhere, and every link within it leads somewhere.

`python docs/check_site.py build/docs` says every fault, and is the end of `make docs`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

# What a browser fetches without being asked to: tag → attributes. `link` depends on what it is for.
LOADED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "manifest", "apple-touch-icon"}
IN_STYLE = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


@dataclass
class Page:
    """What one file of the site loads, where it links to, and the places in it that others may link to."""

    loads: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._styled = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self._styled = tag == "style"
        self.page.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.page.loads += _in_style(given.get("style", ""))
        for name in LOADED.get(tag, ()):
            if name in given:
                self.page.loads += _addresses(given[name], name)
        if tag == "link" and LOADED_LINKS & set(given.get("rel", "").lower().split()):
            self.page.loads.append(given.get("href", ""))
        if tag == "a" and "href" in given:
            self.page.links.append(given["href"])

    def handle_endtag(self, tag: str) -> None:
        self._styled = False

    def handle_data(self, data: str) -> None:
        if self._styled:
            self.page.loads += _in_style(data)


def _addresses(value: str, name: str) -> list[str]:
    if name != "srcset":
        return [value]
    return [part.split()[0] for part in value.split(",") if part.strip()]


def _in_style(text: str) -> list[str]:
    return [first or second for first, second in IN_STYLE.findall(text)]


def read(path: Path) -> Page:
    """What a page or a style sheet loads and links to."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".css":
        return Page(loads=_in_style(text))
    reader = _Reader()
    reader.feed(text)
    return reader.page


def _led_to(site: Path, path: Path, address: str) -> tuple[Path, str]:
    """The file that an address in a page means, and the place in it."""
    plain, place = urldefrag(address)
    plain = unquote(urlsplit(plain).path)
    if not plain:
        return path, unquote(place)
    target = (site / plain.lstrip("/") if plain.startswith("/") else path.parent / plain).resolve()
    return (target / "index.html" if target.is_dir() else target), unquote(place)


def faults(site: Path) -> list[str]:
    """Every fault of a built site, in one sentence each."""
    site = site.resolve()
    pages = {path: read(path) for kind in ("*.html", "*.css") for path in sorted(site.rglob(kind))}
    found = [] if any(path.suffix == ".html" for path in pages) else [f"{site} has no pages"]
    for path, page in pages.items():
        name = path.relative_to(site)
        for address in page.loads:
            if address.startswith(("data:", "#", "about:")):
                continue
            if urlsplit(address).scheme or address.startswith("//"):
                found.append(f"{name} loads {address}, which is not part of the site")
            elif not _led_to(site, path, address)[0].is_file():
                found.append(f"{name} loads {address}, which is not there")
        for address in page.links:
            if urlsplit(address).scheme or address.startswith("//"):
                continue
            target, place = _led_to(site, path, address)
            if not target.is_file():
                found.append(f"{name} links to {address}, which is not there")
            # what begins with a stroke is a view of the explorer, which no page names
            elif place and not place.startswith("/") and target in pages and place not in pages[target].anchors:
                found.append(f"{name} links to {address}, and that page has no #{place}")
    return found


def main() -> int:
    """Print every fault of the site that the command line names; 1 if there is one."""
    site = Path(sys.argv[1])
    found = faults(site)
    print("\n".join(found) or f"{site}: nothing is loaded from elsewhere, and every link leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
