"""The page's own files, as they lie in `web/`, by the names under which they are asked for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

WEB = Path(__file__).with_name("web")
MIME = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@cache
def web_files() -> dict[str, bytes]:
    """Name → content: `index.html`, `style.css`, `main.js`, `views/heat.js` …"""
    return {
        path.relative_to(WEB).as_posix(): path.read_bytes()
        for path in sorted(WEB.rglob("*"))
        if path.suffix[1:] in MIME
    }
