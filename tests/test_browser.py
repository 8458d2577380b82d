"""The HTML of a trace in a real browser: it is drawn, it fits the window, light and dark."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import clearhead as ch
from clearhead.textbook import EXAMPLES

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
CAT = EXAMPLES["cat_sat"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


def screenshot(folder: Path, page: str, width: int, *flags: str) -> np.ndarray:
    (folder / "page.html").write_text(page, encoding="utf-8")
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},1600",
        f"--screenshot={folder / 'page.png'}",
        *flags,
        (folder / "page.html").as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(folder / "page.png") as image:
        return np.asarray(image.convert("RGB")).astype(int)


def ink(pixels: np.ndarray) -> np.ndarray:
    """Where something is drawn: what is unlike the page's own ground."""
    return np.abs(pixels - pixels[2, pixels.shape[1] // 2]).sum(-1) > 60


@pytest.mark.parametrize("width", [1000, 600])
@pytest.mark.parametrize("long", [False, True])
def test_page_is_drawn_and_fits_the_window(tmp_path: Path, width: int, long: bool) -> None:
    if long:
        q, k, v = np.random.default_rng(0).standard_normal((3, 2000, 64))
        page = ch.trace(q, k, v, query=1500, mask=ch.causal() & ch.window(400)).html(8)
    else:
        page = ch.trace(CAT.q, CAT.k, CAT.v, query="sat", tokens=CAT.tokens, mask=ch.causal()).html()
    drawn = ink(screenshot(tmp_path, page, width))
    assert drawn.mean() > 0.01
    assert not drawn[:, -6:].any()  # nothing runs out of the window
    blue = screenshot(tmp_path, page, width)
    assert ((blue[..., 2] - blue[..., 0]) > 100).sum() > 200  # the bars


def test_bars_are_as_long_as_the_weights(tmp_path: Path) -> None:
    shown = ch.trace(CAT.q, CAT.k, CAT.v, query="cat", tokens=CAT.tokens)
    pixels = screenshot(tmp_path, shown.html(), 1000)
    bars = np.abs(pixels - [0x17, 0x69, 0xAA]).sum(-1) < 12
    runs = [max(group) for group in _groups([_longest(row) for row in bars], least=12)]
    weights = shown.row.weights
    assert len(runs) == len(weights)
    found = np.array(runs, float)
    np.testing.assert_allclose(found / found[0], weights / weights[0], atol=0.03)


def _longest(row: np.ndarray) -> int:
    """The most pixels in a row without a gap: letters have only short ones."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def _groups(numbers: list[int], least: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for number in numbers:
        if number >= least:
            groups[-1].append(number)
        elif groups[-1]:
            groups.append([])
    return [group for group in groups if len(group) > 6]


def test_dark_is_dark(tmp_path: Path) -> None:
    page = ch.trace(CAT.q, CAT.k, CAT.v, query="cat", tokens=CAT.tokens).html()
    light = screenshot(tmp_path, page, 800)
    dark = screenshot(tmp_path, page, 800, "--blink-settings=preferredColorScheme=0")
    assert light[40, 400].sum() > 600
    assert dark[40, 400].sum() < 200
