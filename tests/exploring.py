"""What the tests of the explorer's page share: a real Chromium, a page over one call, waiting for a view."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

import clearhead as ch
from clearhead.textbook import EXAMPLES

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

CAT = EXAMPLES["cat_sat"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    made = ch.explore(CAT.q, CAT.k, CAT.v, tokens=CAT.tokens, mask=ch.causal())
    yield made.open(port=0, browser=False)
    made.close()


def shown(page: Any, address: str, view: str) -> None:
    """Open an address anew, and wait until a view is there."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(f'html[data-ready="{view}"]', timeout=10_000)


def box_of(element: Any) -> dict[str, float]:
    """Where an element lies; one that is drawn anew at this moment is waited for."""
    for _ in range(100):
        if (box := element.bounding_box()) is not None:
            return box
        element.page.wait_for_timeout(20)
    raise AssertionError(f"{element} is not there")
