"""The page as one file that works from disk, with the network off: its modules, its style and the answers it needs.

Modules become functions of one script, since a file on disk may import no other, and a notebook's policy may forbid
scripts from anywhere but the page itself. Answers are embedded by the address that the page would ask for, compressed.
How much is precomputed depends on how much there is: each pair of a small call, every head's matrix, its shades, and of
what is larger still pooled maps alone.
"""

from __future__ import annotations

import base64
import gzip
import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any

from clearhead.core.errors import ArgumentError, KernelRefused
from clearhead.explorer.answers import KEPT, Subject, answer, spelled
from clearhead.explorer.heat_view import MATRICES, SHADES
from clearhead.explorer.layered import Layered
from clearhead.explorer.mask_view import POSITIONS
from clearhead.explorer.pooled import Pooled
from clearhead.explorer.scaling_view import SIGMAS, STOPS
from clearhead.explorer.scene import Scene
from clearhead.explorer.web_files import web_files

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
MOST_CELLS = 4096  # pairs up to which each has its computation in the file
MOST_EXACT = 2**18  # pairs of all heads up to which each has its weight
MOST_SHADED = 2**22  # and its shade
MOST_BESIDE = 2**16  # pairs of one head up to which it is held against other masks and mechanisms
IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";.*\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.MULTILINE)


def page(subject: Subject | Pooled) -> str:
    """The whole page of a call or a model, as HTML."""
    files = {name: body.decode() for name, body in web_files().items()}
    html = files["index.html"]
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<style>{files['style.css']}</style>\n"
        f'<script type="application/json" id="answers">{json.dumps(embedded(subject))}</script>\n'
        f'<script type="module">\n{bundled(files)}</script>\n'
    )
    body = re.sub(r'<link rel="stylesheet"[^>]*>\n|<script type="module"[^>]*></script>\n', "", html)
    return body.replace("</head>", f"{head}</head>", 1)


def embedded(subject: Subject | Pooled) -> dict[str, str]:
    """Address → answer, compressed; or the address of the same answer, where it is there already."""
    found: dict[str, str] = {}
    first: dict[bytes, str] = {}
    for address, body in precomputed(subject):
        if body in first:
            found[address] = first[body]
            continue
        first[body] = address
        found[address] = base64.b64encode(gzip.compress(body, 9, mtime=0)).decode("ascii")
    return found


def bundled(files: Mapping[str, str], start: str = "main.js") -> str:
    r"""All modules that `start` needs as one script: each a function that gives what it exports.

    >>> files = {"main.js": 'import { one } from "./a.js";\nuse(one);\n', "a.js": "export const one = 1;\n"}
    >>> print(bundled(files))
    const a_js = await (async () => {
    const one = 1;
    return { one };
    })();
    const main_js = await (async () => {
    const { one } = a_js;
    use(one);
    return {  };
    })();
    <BLANKLINE>
    """
    scripts: dict[str, str] = {}

    def called(name: str) -> str:
        return re.sub(r"\W", "_", name)

    def add(name: str, path: tuple[str, ...]) -> None:
        def bound(match: re.Match[str]) -> str:
            source = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2]))
            assert source not in path, f"{' → '.join((*path, source))}: modules that import one another in a circle"
            if source not in scripts:
                add(source, (*path, source))
            return f"const {{{match[1].replace(' as ', ': ')}}} = {called(source)};\n"

        text = IMPORT.sub(bound, files[name])
        given = ", ".join(EXPORT.findall(text))
        text = EXPORT.sub("", text)
        assert not re.search(r"^(?:import|export)\b", text, re.MULTILINE), f"{name}: an import of another form"
        assert "</script" not in text, name
        scripts[name] = (
            f"const {called(name)} = await (async () => {{\n{text.rstrip()}\nreturn {{ {given} }};\n}})();\n"
        )

    add(start, (start,))
    return "".join(scripts.values())


def precomputed(subject: Subject | Pooled) -> Iterable[tuple[str, bytes]]:
    """What the page can ask of a saved file, each with its answer; what is refused live is left out."""
    about = answer(subject, "/about").body
    for address in asked_for(subject):
        try:
            # observations have one answer for all layers, and the names in it may be a hundred thousand
            same = isinstance(subject, Pooled) and address.startswith("/about")
            yield address, about if same else answer(subject, address).body
        except (ArgumentError, KernelRefused):
            continue


def asked_for(subject: Subject | Pooled) -> Iterable[str]:
    """The addresses that views ask for, of what is explored as it is."""
    facts = subject.facts({})
    layers = facts.get("layers")
    count = len(layers or [0])
    if isinstance(subject, Pooled):
        heads, (queries, keys) = subject.heads, map(len, subject.known)
    else:
        scene: Scene = subject.scene({})
        heads, queries, keys = scene.heads, scene.queries, scene.keys
    cells = heads * count * queries * keys
    yield "/edges"
    if isinstance(subject, Layered):
        yield from ("/heads", "/atlas")
        yield from of_heads(count, heads, cells)
    for layer in range(count):
        yield spelled("/about", layer=layer or None)
        for head in range(heads):
            said = {"head": head or None, "layer": layer or None}
            yield from of_matrix(said, cells, one=not layers)
            yield from of_map(said, facts.get("side"))
    if isinstance(subject, Pooled):
        return
    if not layers and cells <= MOST_CELLS:
        yield from of_pairs(heads, queries, keys)
    yield from (spelled("/position", count=24, kind=kind) for kind in POSITIONS)
    yield from (spelled("/scaling", d=d, sigma=f"{sigma:g}") for d in STOPS for sigma in SIGMAS)
    if queries * keys <= MOST_BESIDE:
        for more in KEPT:
            yield from more(subject)
        yield "/mask"
        yield spelled("/matrix", mask="none", what="weights")


def of_matrix(said: dict[str, Any], cells: int, *, one: bool) -> Iterable[str]:
    """The matrix of a head: every number of a small call, the weights of more, the shades of many."""
    if cells > MOST_SHADED:
        return
    small = one and cells <= MOST_CELLS
    for what in MATRICES if small else ("weights",):
        if cells <= MOST_EXACT:
            yield spelled("/matrix", what=what, **said)
        for how in SHADES if cells <= MOST_EXACT else ("linear",):
            yield spelled("/shade", scale_of=how, what=what, **said)
        yield spelled("/margins", what=what, **said)


def of_map(said: dict[str, Any], side: int | None) -> Iterable[str]:
    """The pooled map of a head and what stands out in it; as tones alone, a byte each, where there are many heads."""
    yield spelled("/received", **said)
    yield spelled("/tones", side=side, **said)
    yield spelled("/along", side=side, **said)
    if side is None:
        yield spelled("/pooled", **said)


def of_heads(layers: int, heads: int, cells: int) -> Iterable[str]:
    """What the view of heads asks for beside thumbnails."""
    merged = (None, 1)
    if cells // (layers * heads) <= MOST_EXACT // 4:
        yield from (spelled("/words", merged=m, which=which) for which in ("mean", "rollout") for m in merged)
    if cells <= MOST_EXACT:
        places = ((layer, head) for layer in range(layers) for head in range(heads))
        yield from (spelled("/words", head=n or None, layer=y or None, merged=1, which="head") for y, n in places)


def of_pairs(heads: int, queries: int, keys: int) -> Iterable[str]:
    """Every pair of a small call with its whole computation, every query's row, and every operation."""
    for head in range(heads):
        said = {"head": head or None}
        for query in range(queries):
            yield spelled("/row", query=query, **said)
            yield spelled("/query", query=query, **said)
            yield spelled("/geometry", query=query, **said)
            yield from (spelled("/cell", query=query, key=key, **said) for key in range(keys))
        yield spelled("/walk", **said)
        yield spelled("/code", **said)
