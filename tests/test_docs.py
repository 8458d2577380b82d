"""The site: its own checks find what they are for, and its pages agree with one another before any of them is built."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import exploring
import pytest
from exploring import CAT, in_chromium

import clearhead as ch

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import check_site  # noqa: E402  # it lies in docs
import pages  # noqa: E402  # it lies in docs

browser = exploring.browser
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def site(tmp_path: Path, body: str, **others: str) -> list[str]:
    """The faults of a site with one page that has this body, and some other files beside it."""
    (tmp_path / "index.html").write_text(f"<html><head></head><body>{body}</body></html>", encoding="utf-8")
    for name, text in others.items():
        path = tmp_path / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return check_site.faults(tmp_path)


@pytest.mark.parametrize(
    "loaded",
    [
        '<script src="https://cdn.example/mathjax.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/inter.css">',
        '<link rel="preload icon" href="http://cdn.example/icon.svg">',
        '<img src="https://img.example/badge.svg">',
        '<img srcset="near.png 1x, https://img.example/far.png 2x">',
        '<iframe src="https://video.example/1"></iframe>',
        '<p style="background: url(https://img.example/paper.png)">',
        "<style>@import 'https://fonts.example/inter.css';</style>",
    ],
)
def test_a_page_that_loads_from_elsewhere_is_refused(tmp_path: Path, loaded: str) -> None:
    found = site(tmp_path, loaded, near_png="")
    assert len(found) == 1, found
    assert found[0].startswith("index.html loads ")
    assert found[0].endswith("is not part of the site")


def test_so_is_a_style_sheet_that_does(tmp_path: Path) -> None:
    found = site(tmp_path, "", site_css="body { src: url('https://fonts.example/a.woff2') }")
    assert found == ["site.css loads https://fonts.example/a.woff2, which is not part of the site"]


def test_links_to_elsewhere_are_fine(tmp_path: Path) -> None:
    body = '<a href="https://arxiv.org/abs/1706.03762">paper</a> <a href="mailto:a@b.example">us</a>'
    assert (
        site(tmp_path, body + '<img src="data:image/png;base64,AA=="><link rel="canonical" href="https://a.b/c">') == []
    )


def test_every_link_leads_somewhere(tmp_path: Path) -> None:
    there = '<a href="learn/one.html#end">1</a> <a href="#top">2</a> <a href="learn/one.html#/heat">3</a>'
    ids = '<p id="top"></p>'
    page = '<h2 id="end"></h2> <a href="../index.html#top">back</a> <a href="../">back</a>'
    assert site(tmp_path, there + ids, learn__one_html=page) == []
    gone = site(tmp_path, '<a href="learn/one.html#start">1</a><a href="two.html">2</a><img src="no.png">')
    assert gone == [
        "index.html loads no.png, which is not there",
        "index.html links to learn/one.html#start, and that page has no #start",
        "index.html links to two.html, which is not there",
        "learn/one.html links to ../index.html#top, and that page has no #top",
    ]


def test_nothing_built_is_a_fault(tmp_path: Path) -> None:
    assert check_site.faults(tmp_path) == [f"{tmp_path.resolve()} has no pages"]


def _cells() -> list[tuple[str, str]]:
    """Every cell of every page, with the page's name."""
    found = []
    for path in sorted(DOCS.rglob("*.md")):
        for cell in CELL.findall(path.read_text(encoding="utf-8")):
            lines = [line for line in cell.splitlines() if not line.startswith((":", "%", "!"))]
            found.append((path.relative_to(DOCS).as_posix(), "\n".join(lines)))
    return found


def test_what_pages_import_is_there() -> None:
    # pages are executed when the site is built; a name that moved is found before that, and without it
    asked = {
        (page, node.module, name.name)
        for page, cell in _cells()
        for node in ast.walk(ast.parse(cell))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clearhead")
        for name in node.names
    }
    assert len(asked) >= 10
    gone = [f"{page}: {name} of {module}" for page, module, name in sorted(asked) if not _has(module, name)]
    assert gone == []
    assert not _has("clearhead.core.lowered", "no_such_name")


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


def test_explorers_have_names_of_their_own() -> None:
    # two pages that save under one name would both show what was saved last
    saved: dict[str, str] = {}
    for page, cell in _cells():
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "explorer":
                name = ast.literal_eval(node.args[1])
                assert name not in saved, f"{page} and {saved[name]} both save an explorer called {name!r}"
                saved[name] = page
    assert len(saved) >= 3


def test_the_gallery_has_every_kind_of_picture() -> None:
    scripts = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "pictures").glob("*.py")}
    assert len(scripts) >= 24
    shown = "\n".join(scripts.values())
    assert [name for name in ch.__all__ if name.startswith("plot_") and f"ch.{name}(" not in shown] == []
    for name, script in scripts.items():
        docstring = ast.get_docstring(ast.parse(script))
        assert docstring, name
        title, line, *_ = docstring.splitlines()
        assert set(line) == {"="}, name
        assert len(line) >= len(title), name
        assert re.search(r"\bpicture = .*\npicture\n\Z", script, re.DOTALL), name


@in_chromium
def test_an_explorer_in_a_page_is_as_dark_as_the_page(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MADE", tmp_path)
    shown = pages.explorer(ch.explore(CAT.q, CAT.k, CAT.v, tokens=CAT.tokens), "cat", "heat").data
    (tmp_path / "learn").mkdir()
    shutil.copy(DOCS / "_static" / "site.js", tmp_path / "site.js")
    lesson = tmp_path / "learn" / "lesson.html"
    lesson.write_text(f'<body data-theme="dark">{shown}<script src="../site.js"></script>', encoding="utf-8")
    page = browser.new_page(color_scheme="light")
    page.goto(lesson.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator('html[data-ready="heat"][data-theme="dark"]').wait_for(state="attached", timeout=10_000)
    assert frame.locator("aside.tour").count() == 0
    page.evaluate("document.body.dataset.theme = 'light'")
    frame.locator('html[data-theme="light"]').wait_for(state="attached", timeout=10_000)
    page.close()
