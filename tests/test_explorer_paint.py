"""Heat map, heads and long context in a real Chromium: their numbers and their pixels.

CLEARHEAD_PICTURE=1 writes docs/explorer.png anew, from the page that `test_the_picture_in_the_readme` opens.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exploring
import numpy as np
import pytest
import test_explorer_page as pages
import torch
from exploring import box_of, in_chromium, shown, sync_api
from PIL import Image
from test_explorer_models import needle, plausible
from test_explorer_page import CONTRAST, NAMELESS

import clearhead as ch
from clearhead.explorer.heat_view import MATRICES
from clearhead.explorer.model import Model
from clearhead.explorer.opening import Explorer
from clearhead.integrations.local_models import load
from clearhead.textbook import EXAMPLES
from clearhead.watching import meaning
from clearhead.watching.words import merge_subwords

pytestmark = in_chromium
browser, bare_page = exploring.browser, pages.page
expect = sync_api.expect

CAT = EXAMPLES["cat_sat"]
PICTURE = Path(__file__).parents[1] / "docs" / "explorer.png"
TEXT, OTHER = "I sat on the bank of the river", "The bank approved the loan"


@pytest.fixture
def page(bare_page: Any) -> Any:
    bare_page.add_init_script("try { localStorage.setItem('clearhead.tour', 'done') } catch {}")  # nothing lies over it
    return bare_page


def served(*given: Any, **options: Any) -> Iterator[str]:
    made = given[0] if isinstance(given[0], Explorer) else ch.explore(*given, **options)
    yield made.open(port=0, browser=False)
    made.close()


@pytest.fixture(scope="module")
def cat() -> Iterator[str]:
    yield from served(CAT.q, CAT.k, CAT.v, tokens=CAT.tokens, mask=ch.causal())


@pytest.fixture(scope="module")
def large() -> Iterator[str]:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2048, 16))
    yield from served(2 * q, k, v, mask=ch.causal())


class Tiny:
    """A model of three layers, four heads, and words for tokens."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()

    def read(self, text: str) -> Any:
        names = text.split()
        given = 2 * torch.randn(1, len(names), 32, generator=torch.Generator().manual_seed(len(text)))
        with torch.no_grad(), ch.watch(self.model, want={"keep": True}, tokens=names) as seen:
            self.model(given)
        return seen


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture(scope="module")
def heads(tiny: Tiny) -> Iterator[str]:
    text = "the bank of the un ##believ ##able river"
    yield from served(Explorer(Model("tiny", tiny.read(text), text=text, read=tiny.read)))


def cell(page: Any, query: int, key: int) -> tuple[float, float]:
    """Where a cell of the heat map is on the page."""
    canvas = page.locator("canvas[role=application]")
    left, top, size = map(float, canvas.get_attribute("data-cells").split())
    box = box_of(canvas)
    return box["x"] + left + (key + 0.5) * size, box["y"] + top + (query + 0.5) * size


def test_each_matrix_says_pythons_numbers(page: Any, cat: str) -> None:
    row = ch.trace(CAT.q, CAT.k, CAT.v, query=2, mask=ch.causal()).row
    for what in MATRICES:
        number = np.linalg.norm(row.contribution(1)) if what == "contributions" else getattr(row, what)[1]
        shown(page, f"{cat}#/heat?query=2&key=1&what={what}", "heat")
        expect(page.locator(".panel .big")).to_have_text(f"{number:.2f}")
        assert float(page.locator(".panel .big").get_attribute("title")) == pytest.approx(number, rel=1e-15), what
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(page.locator(".panel")).to_contain_text("The mask hides this key from this query.")


def test_pointing_moves_a_click_pins_and_arrows_go_on(page: Any, cat: str) -> None:
    shown(page, f"{cat}#/heat", "heat")
    at = cell(page, 3, 2)
    page.mouse.move(*at)
    expect(page.locator(".panel .pair")).to_have_text("on → sat")
    page.mouse.click(*at)
    expect(page.locator(".panel")).to_contain_text("Pinned: Esc lets go.")
    page.mouse.move(*cell(page, 4, 0))
    expect(page.locator(".panel .passed")).to_contain_text("mat → The, 0.19")
    expect(page.locator(".panel .pair")).to_have_text("on → sat")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".panel .pair")).to_have_text("on → on")
    page.keyboard.press("Escape")
    expect(page.locator(".panel h2")).to_have_text("No cell yet")


def test_hidden_cells_are_hatched_and_others_have_one_colour(page: Any, cat: str) -> None:
    shown(page, f"{cat}#/heat", "heat")
    counts = []
    for query, key in ((0, 3), (3, 0)):
        x, y = cell(page, query, key)
        corner = {"x": x - 26, "y": y - 26, "width": 14, "height": 14}  # beside the number, were there one
        with Image.open(io.BytesIO(page.screenshot(clip=corner))) as image:
            counts.append(len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)))
    assert counts[0] > 1, "lines on a ground"
    assert counts[1] == 1


def test_queries_and_keys_have_their_own_names(page: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 3)), rng.standard_normal((4, 3)), rng.standard_normal((4, 3))
    for url in served(q, k, v, query_tokens=["the", "river"], tokens=["das", "Ufer", "des", "Flusses"]):
        shown(page, f"{url}#/heat?query=1&key=3", "heat")
        expect(page.locator(".panel .pair")).to_have_text("river → Flusses")
        with page.expect_download() as given:
            page.get_by_role("button", name="CSV").click()
        with Path(given.value.path()).open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
        assert lines[0] == ["", "das", "Ufer", "des", "Flusses"]
        assert [line[0] for line in lines[1:]] == ["the", "river"]
        exact = ch.observe(q, k, v, weights=True).weights
        np.testing.assert_allclose(np.array([line[1:] for line in lines[1:]], float), exact, rtol=1e-15)


@pytest.mark.parametrize(
    ("state", "name", "expected"),
    [
        ("heat", "weights", lambda seen, rows: seen.weights),
        ("heat?what=contributions", "contributions", lambda seen, rows: seen.weights * np.linalg.norm(CAT.v, axis=-1)),
        ("heat?what=scaled", "rows", lambda seen, rows: [row.scaled for row in rows]),
        ("long?q0=1&q1=3&k0=0&k1=2", "_", lambda seen, rows: seen.weights[1:3, 0:2]),
    ],
)
def test_copied_python_gives_what_is_seen(page: Any, cat: str, state: str, name: str, expected: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown(page, f"{cat}#/{state}", state.split("?")[0])
    page.get_by_role("button", name="Copy as Python").click()
    expect(page.locator("#live")).to_have_text("Copied as Python.")
    lines = page.evaluate("() => navigator.clipboard.readText()").strip().split("\n")
    if name == "_":
        lines[-1] = f"_ = {lines[-1]}"
    found: dict[str, Any] = {}
    exec("\n".join(lines), found)
    seen = ch.observe(CAT.q, CAT.k, CAT.v, mask=ch.causal(), weights=True)
    rows = [ch.trace(CAT.q, CAT.k, CAT.v, query=i, mask=ch.causal()).row for i in range(5)]
    np.testing.assert_allclose(found[name], expected(seen, rows), rtol=1e-12)


def test_a_link_to_a_part_shows_that_part(page: Any, large: str) -> None:
    pixels = "() => document.querySelector('canvas[role=application]').toDataURL()"
    shown(page, f"{large}#/heat?query=1012&key=1004", "heat")
    weight = ch.observe(*large_call(), mask=ch.causal(), queries=[1012]).queries.weights[0, 0, 1004]
    assert float(page.locator(".panel .big").get_attribute("title")) == pytest.approx(weight, rel=1e-12)
    whole = page.evaluate(pixels)
    for _ in range(5):
        page.keyboard.press("+")
    page.wait_for_function("() => location.hash.includes('zoom=')")
    page.wait_for_timeout(250)
    closer, link = page.evaluate(pixels), page.url
    assert closer != whole
    shown(page, link, "heat")
    assert page.evaluate(pixels) == closer


def large_call() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2048, 16))
    return 2 * q, k, v


def test_a_head_is_opened_as_map_lines_and_text_and_words_are_merged(page: Any, heads: str, tiny: Tiny) -> None:
    seen = tiny.read("the bank of the un ##believ ##able river")
    weights = seen.layer(1)[0].rows(range(8))[0, 3]
    shown(page, f"{heads}#/heads?layer=1&head=3&form=text&query=1", "heads")
    become(page.locator(".word"), weights[1].tolist())
    page.get_by_label("whole words").check()
    become(page.locator(".word"), merge_subwords(weights, seen[0].keys_named[0]).weights[1].tolist())
    page.get_by_role("button", name="lines").click()
    lines = page.locator(".opened canvas[role=img]")
    expect(lines).to_have_count(1)
    every = lines.evaluate("(canvas) => canvas.toDataURL()")
    page.get_by_label("lines of").select_option("4")
    page.wait_for_function("() => location.hash.includes('query=4')")
    page.wait_for_function("(every) => document.querySelector('.opened canvas')?.toDataURL() !== every", arg=every)
    page.get_by_role("button", name="map", exact=True).click()
    expect(page.locator(".opened canvas[role=application]")).to_have_count(1)


def test_two_texts_side_by_side_and_means_of_chosen_heads(page: Any, heads: str, tiny: Tiny) -> None:
    shown(page, f"{heads}#/heads?form=text&query=1&layer=2&head=1", "heads")
    box = page.get_by_label("Second text")
    box.fill("bank approved the loan")
    box.press("Enter")
    expect(page.locator(".opened section")).to_have_count(2)
    other = tiny.read("bank approved the loan").layer(2)[0].rows([1])[0, 1, 0]
    second = page.locator(".opened section").nth(1).locator(".word")
    become(second, other.tolist())
    page.get_by_role("button", name="click chooses").click()
    for name in ("0·1", "2·3"):
        page.locator(".thumb", has_text=name).click()
        expect(page.locator(".thumb.chosen", has_text=name)).to_have_count(1)
    which = page.locator("select:has(option[value=rollout])")
    expect(which).to_have_value("chosen")
    seen = tiny.read("the bank of the un ##believ ##able river")
    mean = (seen.layer(0)[0].rows([1])[0, 1, 0] + seen.layer(2)[0].rows([1])[0, 3, 0]) / 2
    first = page.locator(".opened section").first.locator(".word")
    become(first, mean.tolist())
    which.select_option("rollout")
    become(first, seen.rollout()[0][1].tolist())


def become(words: Any, expected: Any) -> None:
    """Wait until words have these numbers for titles: what is asked for comes a moment later."""
    for _ in range(200):
        titles = [float(one) for one in words.evaluate_all("(all) => all.map((one) => one.title)")]
        if titles == pytest.approx(expected, rel=1e-5):
            return
        words.page.wait_for_timeout(50)
    raise AssertionError(f"{titles} is not {expected}")


def test_a_pattern_that_is_drawn_comes_first(page: Any, heads: str, tiny: Tiny) -> None:
    shown(page, f"{heads}#/heads", "heads")
    page.get_by_role("button", name="itself").click()
    expect(page.get_by_label("order")).to_have_value("like")
    seen = tiny.read("the bank of the un ##believ ##able river")
    weights = np.stack([call.rows(range(8))[0] for call in seen])
    spread, drawn = weights - weights.mean((-1, -2), keepdims=True), np.eye(8) - 1 / 8
    like = (spread * drawn).sum((-1, -2)) / np.linalg.norm(spread, axis=(-1, -2))
    layer, head = np.unravel_index(like.argmax(), like.shape)
    expect(page.locator(".thumb").first).to_have_text(f"{layer}·{head}")


def test_long_context_names_zooms_and_moves(page: Any) -> None:
    q, k, v = needle()
    for url in served(q, k, v, mask=ch.causal(), tokens=[f"t{i}" for i in range(400)]):
        shown(page, f"{url}#/long", "long")
        expect(page.locator(".panel")).to_contain_text("t0 (0) is a sink")
        page.get_by_role("button", name="t350 (350) → t100 (100)").click()
        expect(page.locator(".card [role=status]")).to_contain_text("every cell")
        expect(page.locator(".row-of h2")).to_have_text("t350 (350) looks at")
        weight = ch.observe(q, k, v, mask=ch.causal(), queries=[350]).queries.weights[0, 100]
        expect(page.locator(".row-of td").first).to_have_text(f"{weight:.2f}")
        place = page.evaluate("() => Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))")
        assert (int(place["q1"]) - int(place["q0"]), int(place["k1"]) - int(place["k0"])) == (64, 64)
        page.keyboard.press("ArrowLeft")
        page.wait_for_function(f"() => location.hash.includes('k0={int(place['k0']) - 16}&')")
        box = box_of(page.get_by_label("Where on the whole this is"))
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_function("() => location.hash.includes('q0=168') && location.hash.includes('k0=168')")
        page.keyboard.press("Escape")
        page.wait_for_function("() => !location.hash.includes('q0')")


def test_a_file_of_observations_opens_offline(browser: Any, tmp_path: Path) -> None:
    path = ch.explore(plausible(3, 5, 131_072, side=32)).save(tmp_path / "long.html")
    context = browser.new_context(offline=True)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    shown(page, path.as_uri(), "heads")
    assert page.locator("nav a").all_inner_texts() == ["Heads\n1", "Long context\n2"]
    expect(page.locator(".thumb")).to_have_count(15)
    page.locator(".thumb", has_text="2·4").click()
    page.get_by_role("button", name="Open in Long context").click()
    expect(page.locator(".panel")).to_contain_text("0 is a sink")
    canvas = box_of(page.locator("canvas[role=application]"))
    page.mouse.move(canvas["x"] + canvas["width"] / 3, canvas["y"] + canvas["height"] / 2)
    expect(page.locator(".card [role=status]")).to_contain_text("at most")
    page.mouse.click(canvas["x"] + canvas["width"] / 3, canvas["y"] + canvas["height"] / 2)
    expect(page.locator(".card [role=status]")).to_contain_text("need the live page")
    assert not wrong
    context.close()


# what VS Code lets a notebook's output do, which a frame inside of it inherits
VSCODE = (
    "default-src 'none'; script-src https://x.vscode-cdn.net 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline';"
    " img-src https: data: blob:; font-src https:; connect-src https:; child-src https: data:"
)


@pytest.mark.parametrize("policy", ["", VSCODE], ids=["Jupyter", "VS Code"])
def test_the_page_lives_in_a_notebook(page: Any, tmp_path: Path, policy: str) -> None:
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">' if policy else ""
    frame = ch.explore(CAT.q, CAT.k, CAT.v, tokens=CAT.tokens)._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><html><head>{meta}</head><body>{frame}</body></html>")
    page.goto((tmp_path / "notebook.html").as_uri())
    inside = page.frame_locator("iframe")
    expect(inside.locator("h1")).to_have_text("Heat map")
    inside.locator("nav a", has_text="Long context").click()
    expect(inside.locator("h1")).to_have_text("Long context")
    inside.locator("nav a", has_text="Heat map").click()
    inside.locator("canvas[role=application]").click(position={"x": 150, "y": 120})
    expect(inside.locator(".panel .pair")).to_be_visible()
    assert box_of(page.locator("iframe"))["height"] == 720


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_heads_can_be_read_and_fit(browser: Any, heads: str, theme: str) -> None:
    page = browser.new_page(color_scheme=theme)
    for width, form in ((1440, "map"), (1024, "lines"), (390, "text")):
        page.set_viewport_size({"width": width, "height": 900})
        shown(page, f"{heads}#/heads?form={form}&other=a+b&chosen=0.1&drawn={'10' * 32}", "heads")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{form} at {width}"
        assert not page.evaluate(CONTRAST)
        assert not page.evaluate(NAMELESS)
    page.close()


def test_the_picture_in_the_readme(browser: Any, heads: str) -> None:
    """Its page still opens, of a small model here; CLEARHEAD_PICTURE=1 takes it anew, of MiniLM."""
    address = f"#/heads?layer=2&head=3&form=lines&other={OTHER.replace(' ', '+')}"
    page = browser.new_page(viewport={"width": 1440, "height": 1270}, color_scheme="light")
    page.add_init_script("try { localStorage.setItem('clearhead.tour', 'done') } catch {}")
    for url in minilm() if os.environ.get("CLEARHEAD_PICTURE") else [heads]:
        shown(page, f"{url}{address}", "heads")
        expect(page.locator(".thumb[aria-pressed=true]")).to_have_text("2·3")
        assert page.locator(".opened h2").all_inner_texts()[1] == OTHER
        assert page.locator(".opened canvas").count() == 2
        if url != heads:
            page.screenshot(path=PICTURE)
    with Image.open(PICTURE) as picture:
        assert picture.size == (1440, 1270), "CLEARHEAD_PICTURE=1 makes it anew"
    page.close()


def minilm() -> Iterator[str]:
    loaded = load("minilm")

    def read(text: str) -> Any:
        return meaning.watched(loaded, text, {"keep": True})[0]

    yield from served(Explorer(Model("minilm", read(TEXT), text=TEXT, read=read)))
