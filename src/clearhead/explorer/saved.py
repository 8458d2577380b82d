"""The page as one file that works from disk, with the network off: its modules, its style and the answers it needs.

Modules import one another by name from an import map of data: addresses, since a file on disk may import no other.
Answers are embedded by the address that the page would ask for, compressed.
"""

from __future__ import annotations

import base64
import gzip
import json
import posixpath
import re
from collections.abc import Iterable

from clearhead.core.errors import ArgumentError, KernelRefused
from clearhead.explorer.answers import KEPT, Subject, answer, spelled
from clearhead.explorer.call_views import MATRICES, SHADES
from clearhead.explorer.mask_view import POSITIONS
from clearhead.explorer.scaling_view import SIGMAS, STOPS
from clearhead.explorer.scene import Scene
from clearhead.explorer.web_files import web_files

POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:"
MOST_CELLS = 4096  # pairs up to which each has its computation in the file


def page(subject: Subject) -> str:
    """The whole page of a call or a model, as HTML."""
    files = {name: body.decode() for name, body in web_files().items()}
    scripts = {f"clearhead/{name}": named(name, text) for name, text in files.items() if name.endswith(".js")}
    imports = {name: f"data:text/javascript;base64,{coded(text.encode())}" for name, text in scripts.items()}
    answers = {address: coded(gzip.compress(body, 9, mtime=0)) for address, body in precomputed(subject)}
    html = files["index.html"]
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<style>{files['style.css']}</style>\n"
        f'<script type="importmap">{json.dumps({"imports": imports})}</script>\n'
        f'<script type="application/json" id="answers">{json.dumps(answers)}</script>\n'
        '<script type="module">import "clearhead/main.js";</script>\n'
    )
    body = re.sub(r'<link rel="stylesheet"[^>]*>\n|<script type="module"[^>]*></script>\n', "", html)
    return body.replace("</head>", f"{head}</head>", 1)


def coded(body: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(body).decode("ascii")


def named(name: str, text: str) -> str:
    """A module whose imports are by name, in place of where they lie."""

    def by_name(match: re.Match[str]) -> str:
        return f'from "clearhead/{posixpath.normpath(posixpath.join(posixpath.dirname(name), match[1]))}"'

    return re.sub(r'from "(\.[^"]+)"', by_name, text)


def precomputed(subject: Subject) -> Iterable[tuple[str, bytes]]:
    """What the page can ask of a saved file, each with its answer; what is refused live is left out."""
    for address in asked_for(subject):
        try:
            yield address, answer(subject, address).body
        except (ArgumentError, KernelRefused):
            continue


def asked_for(subject: Subject) -> Iterable[str]:
    """The addresses that views ask for, of what is explored as it is."""
    layers = subject.facts({}).get("layers")
    for layer in range(len(layers or [0])):
        yield from of_call(subject.scene({"layer": str(layer)}), layer or None, small=not layers)
    if layers:
        yield from ("/heads", "/atlas")
        for which in ("mean", "rollout"):
            yield spelled("/words", which=which)
            yield spelled("/words", which=which, merged=1)
    for more in KEPT:
        yield from more(subject)
    yield "/mask"
    yield spelled("/matrix", mask="none", what="weights")
    yield from (spelled("/position", count=24, kind=kind) for kind in POSITIONS)
    yield from (spelled("/scaling", d=d, sigma=f"{sigma:g}") for d in STOPS for sigma in SIGMAS)


def of_call(scene: Scene, layer: int | None, small: bool) -> Iterable[str]:
    """What is asked of one call; of a model's, and of many pairs, the matrices alone."""
    yield spelled("/about", layer=layer)
    small = small and scene.queries * scene.keys * scene.heads <= MOST_CELLS
    for head in range(scene.heads):
        said = {"head": head or None, "layer": layer}
        for what in MATRICES if small else ("weights",):
            yield spelled("/matrix", what=what, **said)
            for how in SHADES if small else ("linear",):
                yield spelled("/shade", scale_of=how, what=what, **said)
        yield spelled("/margins", **said)
        yield spelled("/pooled", **said)
        yield spelled("/received", **said)
        if not small:
            continue
        for query in range(scene.queries):
            yield spelled("/row", query=query, **said)
            yield spelled("/geometry", query=query, **said)
            yield from (spelled("/cell", query=query, key=key, **said) for key in range(scene.keys))
        yield spelled("/walk", **said)
        yield spelled("/code", **said)
