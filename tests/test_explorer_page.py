"""The explorer in a real Chromium: every view, its numbers against Python's text, keys alone, both themes, offline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exploring
import pytest
from exploring import CAT, in_chromium, shown, sync_api

import clearhead as ch

pytestmark = in_chromium
browser, url = exploring.browser, exploring.url

VIEWS = ("pipeline", "heat", "walk", "scaling", "geometry", "masks", "long", "code", "compare")


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    made = browser.new_page(viewport={"width": 1280, "height": 900})
    wrong: list[str] = []
    made.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    made.on("pageerror", lambda error: wrong.append(str(error)))
    yield made
    made.close()
    assert not wrong


def turned(page: Any, state: str, view: str) -> None:
    """Another view of a page that is open."""
    page.evaluate("(state) => { document.documentElement.dataset.ready = ''; location.hash = state }", state)
    page.wait_for_selector(f'html[data-ready="{view}"]', timeout=10_000)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_and_asks_only_its_own_server(page: Any, url: str, view: str) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    shown(page, f"{url}#/{view}?query=2&key=1", view)
    assert page.locator("main h1").count() == 1
    assert page.locator(".error").count() == 0
    assert all(one.startswith((url, "about:", "data:")) for one in requests)
    assert "null" not in page.locator("main").inner_text().split()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing runs out of the window"


def test_numbers_on_screen_are_pythons(page: Any, url: str) -> None:
    steps = ch.trace(CAT.q, CAT.k, CAT.v, query=2, tokens=CAT.tokens, mask=ch.causal())
    shown(page, f"{url}#/pipeline?query=2&key=1", "pipeline")
    for title, numbers in (("Raw scores", steps.row.dots), ("Scaled", steps.row.scaled)):
        stage = page.locator(".stage", has=page.locator("h2", has_text=title))
        assert [box.split("\n")[-1] for box in stage.locator(".box").all_inner_texts()] == [f"{x:.2f}" for x in numbers]
        titles = [box.get_attribute("title") for box in stage.locator(".box").all()]
        assert [float(str(one)) for one in titles] == numbers.tolist(), "every digit, where one points"
    weights = page.locator(".stage", has=page.locator("h2", has_text="Weights")).locator(".box").all_inner_texts()
    assert [one.split("\n")[-1] for one in weights] == [
        *(f"{x:.2f}" for x in steps.row.weights[:3]),
        "hidden",
        "hidden",
    ]
    assert page.locator(".panel .work li").all_inner_texts() == list(steps.cell(1).lines)


def test_an_edited_number_is_followed_and_is_in_the_address(page: Any, url: str) -> None:
    shown(page, f"{url}#/pipeline?query=1", "pipeline")
    box = page.get_by_label("q, cat, feature 2")
    box.fill("-1.5")
    box.press("Enter")
    page.wait_for_url(lambda address: "edits" in address)
    q = CAT.q.copy()
    q[1, 1] = -1.5
    expected = ch.trace(q, CAT.k, CAT.v, query=1, mask=ch.causal()).row.dots
    stage = page.locator(".stage", has=page.locator("h2", has_text="Raw scores"))
    sync_api.expect(stage.locator(".box").first).to_contain_text(f"{expected[0]:.2f}")
    shown(page, page.url, "pipeline")
    assert [one.split("\n")[-1] for one in stage.locator(".box").all_inner_texts()] == [f"{x:.2f}" for x in expected]
    page.get_by_role("button", name="Undo edits").click()
    page.wait_for_url(lambda address: "edits" not in address)


def test_keys_alone_are_enough(page: Any, url: str) -> None:
    shown(page, url, "heat")
    for number, view in enumerate(VIEWS, 1):
        page.keyboard.press(str(number))
        page.wait_for_selector(f'html[data-ready="{view}"]')
    page.keyboard.press("2")
    page.wait_for_selector('html[data-ready="heat"]')
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    sync_api.expect(page.locator(".panel .pair")).to_have_text("sat → cat")
    weight = ch.trace(CAT.q, CAT.k, CAT.v, query=2, mask=ch.causal()).row.weights[1]
    sync_api.expect(page.locator(".panel .big")).to_have_text(f"{weight:.2f}")
    sync_api.expect(page.locator("#live")).to_contain_text("sat → cat")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator(".panel h2")).to_have_text("No cell yet")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0


def test_the_walk_goes_on_and_back_and_asks_before_it_tells(page: Any, url: str) -> None:
    operations = [
        o for i in range(5) for o in ch.trace(CAT.q, CAT.k, CAT.v, query=i, tokens=CAT.tokens, mask=ch.causal()).walk()
    ]
    shown(page, f"{url}#/walk", "walk")
    sentence = page.locator(".sentence")
    page.get_by_role("button", name="Next").click()
    sync_api.expect(sentence).to_have_text(operations[1].sentence)
    page.get_by_role("button", name="Back").click()
    sync_api.expect(sentence).to_have_text(operations[0].sentence)
    page.get_by_role("button", name="Predict first").click()
    sync_api.expect(sentence).to_contain_text("= ?")
    page.get_by_label("The next number").fill(str(operations[0].value + 7))
    page.get_by_role("button", name="Check").click()
    sync_api.expect(page.locator(".bad")).to_contain_text("Not")
    page.get_by_label("The next number").fill(str(operations[0].value))
    page.get_by_role("button", name="Check").click()
    sync_api.expect(page.locator(".good")).to_contain_text(operations[0].sentence)


def test_bad_input_is_one_sentence_on_the_page(browser: Any, url: str) -> None:
    page = browser.new_page()
    for address, word in (
        ("masks?expression=causal(", "expression"),
        ("heat?edits=q.0.0.0.1e999", "edits"),
        ("pipeline?edits=q.0.0.0.nan", "edits: is 'nan', expected a number"),
        ("heat?given={}", "given: has no q"),
        ('heat?given={"q":[],"k":[],"v":[]}', "given: has no q"),
        ('walk?given={"q":[[1]],"k":[[1]],"v":[[1]],"tokens":["a","b"]}', "tokens"),
        ("code?scale=x", "scale: is 'x', expected a number"),
        ("compare?to=nothing", "to: is 'nothing', expected one of"),
        ("scaling?d=0", "d: is 0, expected a whole number"),
        ("heat?mask=" + "x" * 100_000, "This is too long: 100,0"),
    ):
        page.goto("about:blank")
        page.goto(f"{url}#/{address}")
        page.wait_for_selector(".error", timeout=20_000)
        said = page.locator(".error").inner_text().strip()
        assert word in said
        assert "\n" not in said
    shown(page, f"{url}#/masks", "masks")
    page.get_by_label("Mask, as in Python").evaluate(
        "(box) => { box.value = 'x'.repeat(1e7); box.dispatchEvent(new Event('change')) }"
    )
    sync_api.expect(page.locator(".error")).to_contain_text("This is too long: 10,000,019 characters")
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_text_can_be_read_in_both_themes_and_fits(browser: Any, url: str, theme: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    shown(page, f"{url}#/long", "long")
    for view in VIEWS:
        turned(page, f"#/{view}?query=2&key=1", view)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} at {width}"
        low = page.evaluate(CONTRAST)
        assert not low, f"{view}, {theme}: {low}"
        bare = page.evaluate(NAMELESS)
        assert not bare, f"{view}: without a name: {bare}"
    for way in ("loops", "yours"):
        turned(page, f"#/code?way={way}", "code")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{way} at {width}"
        assert not page.evaluate(CONTRAST)
        assert not page.evaluate(NAMELESS)
    page.keyboard.press("?")
    assert not page.evaluate(CONTRAST)
    page.close()


def test_a_newcomer_is_shown_around_once_by_keys_alone(browser: Any, url: str) -> None:
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    shown(page, f"{url}#/heat", "heat")
    page.get_by_role("button", name="Take the tour").press("Enter")
    tour = page.get_by_role("dialog", name="Tour")
    sync_api.expect(tour).to_contain_text("1 of 8")
    seen = []
    for number in range(1, 9):
        sync_api.expect(tour).to_contain_text(f"{number} of 8")
        sync_api.expect(page.locator(".toured")).to_have_count(1)
        assert len(tour.locator("p").last.inner_text().split()) <= 12
        seen.append(page.url.split("#/")[1].split("?")[0])
        assert not page.evaluate(CONTRAST)
        page.keyboard.press("ArrowRight")
    assert seen == ["heat", "heat", "pipeline", "walk", "scaling", "masks", "code", "heat"]
    sync_api.expect(tour).to_have_count(0)
    sync_api.expect(page.locator(".toured")).to_have_count(0)
    shown(page, f"{url}#/heat", "heat")
    sync_api.expect(page.locator(".tour")).to_have_count(0)
    page.keyboard.press("t")
    sync_api.expect(tour).to_contain_text("1 of 8")
    page.keyboard.press("Escape")
    sync_api.expect(tour).to_have_count(0)
    context.close()
    page = browser.new_page()
    shown(page, f"{url}#/walk", "walk")
    page.get_by_role("button", name="No, thanks").click()
    page.reload()
    page.wait_for_selector('html[data-ready="walk"]')
    sync_api.expect(page.locator(".tour")).to_have_count(0)
    page.close()


def test_a_token_is_found_in_every_view(page: Any, url: str) -> None:
    shown(page, f"{url}#/long", "long")
    for view in ("pipeline", "heat", "walk", "geometry", "masks", "compare", "code"):
        turned(page, f"#/{view}", view)
        page.keyboard.press("/")
        page.keyboard.type("MAT")
        sync_api.expect(page.locator(".found li")).to_have_text(["matquery 4", "matkey 4"])
        page.keyboard.press("ArrowDown")
        sync_api.expect(page.locator(".found [aria-selected=true]")).to_have_text("matkey 4")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("dialog")).to_have_count(0)
        if view == "walk":
            sync_api.expect(page.locator(".where")).to_contain_text("query mat")
        else:
            assert "query=4" in page.url, view
    page.keyboard.press("/")
    page.keyboard.type("nowhere")
    sync_api.expect(page.locator("dialog")).to_contain_text("No token has this text.")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    sync_api.expect(page.locator("dialog")).to_have_count(0)


# every control and every picture has a name: its text, its label, or one that is said for it
NAMELESS = """() => [...document.querySelectorAll(
    'button, input, select, textarea, a, summary, canvas, svg, dialog, [tabindex], [role=img], [role=group]')]
  .filter((e) => e.checkVisibility() && !e.closest('[aria-hidden=true]') && !e.matches('main'))
  .filter((e) => !(e.innerText || e.labels?.length || e.getAttribute('aria-label') || e.title))
  .map((e) => e.outerHTML)"""

# every text that is seen, against the colour it stands on: WCAG's ratio, of which 4.5 is asked, 3 for large text
CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((x) => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const parts = numbers(getComputedStyle(e).backgroundColor);
      if (parts.length < 4 || parts[3] > 0.99) return getComputedStyle(e).backgroundColor;
    }
    return 'rgb(255,255,255)';
  };
  // numbers in cells stand on the cell, whose shade says which of two inks they have
  const skipped = '.live, .skip, noscript, script, style, title, :disabled, :disabled *, .matrix .number';
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!text || !e.checkVisibility() || e.matches(skipped)) continue;
    const style = getComputedStyle(e);
    const ink = e instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) low.push(`${e.textContent.trim()} ${ratio}`);
  }
  return low;
}"""


def test_the_saved_file_works_without_a_network(browser: Any, tmp_path: Path) -> None:
    made = ch.explore(CAT.q, CAT.k, CAT.v, tokens=CAT.tokens, mask=ch.causal())
    path = made.save(tmp_path / "page.html")
    context = browser.new_context(offline=True)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for view in VIEWS:
        shown(page, f"{path.as_uri()}#/{view}?query=2&key=1", view)
        assert page.locator(".error").count() == 0, view
    page.keyboard.press("2")
    sync_api.expect(page.locator(".panel .pair")).to_have_text("sat → cat")
    assert not wrong
    assert {one.split(":", 1)[0] for one in requests} <= {"file", "data", "about", "blob"}
    context.close()


def test_a_notebooks_frame_shows_every_view(browser: Any, tmp_path: Path) -> None:
    made = ch.explore(CAT.q, CAT.k, CAT.v, tokens=CAT.tokens, mask=ch.causal())
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><meta charset=utf-8>{made._repr_html_()}", encoding="utf-8")
    page = browser.new_page(viewport={"width": 1100, "height": 800})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(notebook.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator('html[data-ready="heat"]').wait_for()
    for view in VIEWS:
        frame.locator(f'#nav a[href="#/{view}"]').click()
        frame.locator(f'html[data-ready="{view}"]').wait_for()
        assert frame.locator(".error").count() == 0, view
    frame.get_by_role("button", name="Copy as Python").click()
    sync_api.expect(frame.locator("dialog textarea, #live").last).not_to_be_empty()
    assert frame.locator(".tour").count() == 0, "what cannot be remembered is not offered"
    assert not wrong
    page.close()


def test_names_of_tokens_are_text(browser: Any, tmp_path: Path) -> None:
    tokens = ["<img src=x onerror=document.title='owned'>", "</script>", "&amp;", "한국어", "🙂"]
    path = ch.explore(CAT.q, CAT.k, CAT.v, tokens=tokens).save(tmp_path / "page.html")
    page = browser.new_page()
    shown(page, f"{path.as_uri()}#/pipeline?query=0&key=0", "pipeline")
    assert "owned" not in page.title()
    assert page.locator("main img").count() == 0
    assert json.dumps(tokens[0])[1:-1] in page.locator(".tokens").inner_text()
    page.close()


def test_a_models_heads_can_be_opened_sorted_and_drawn(browser: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    names = ["the", "bank", "of", "the", "un", "##believ", "##able", "river"]
    with torch.no_grad(), ch.watch(model, want={"keep": True}, tokens=names) as seen:
        model(2 * torch.randn(1, len(names), 32))
    made = ch.explore(seen)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    shown(page, f"{made.open(port=0, browser=False)}#/heads", "heads")
    sync_api.expect(page.locator(".thumb")).to_have_count(12)
    page.locator(".thumb").nth(7).click()
    sync_api.expect(page.locator(".thumb[aria-pressed=true]")).to_have_text("1·3")
    page.get_by_role("button", name="coloured text").click()
    weights = seen.layer(1)[0].rows([0])[0, 3, 0]
    page.wait_for_selector(".word")
    titles = [float(str(one.get_attribute("title"))) for one in page.locator(".word").all()]
    assert titles == pytest.approx(weights, rel=1e-5), "in float64, of what the model had in float32"
    page.keyboard.press("]")
    sync_api.expect(page.locator(".thumb[aria-pressed=true]")).to_have_text("2·3")
    page.keyboard.press("1")
    page.wait_for_selector('html[data-ready="pipeline"]')
    sync_api.expect(page.get_by_label("head")).to_have_value("3")
    sync_api.expect(page.get_by_label("layer")).to_have_value("2")
    for key in ("[", ","):
        page.keyboard.press(key)
    sync_api.expect(page.get_by_label("head")).to_have_value("2")
    sync_api.expect(page.get_by_label("layer")).to_have_value("1")
    dots = seen.layer(1)[0].trace(0, head=2).row.dots
    raw = page.locator(".stage", has=page.locator("h2", has_text="Raw scores")).locator(".box").first
    assert float(str(raw.get_attribute("title"))) == pytest.approx(dots[0], rel=1e-5)
    for key in ("7", ".", "]"):
        page.keyboard.press(key)
    page.wait_for_selector('html[data-ready="heads"]')
    for i in range(8):
        page.get_by_label(f"row {i + 1}, column {i + 1}", exact=True).click()
    sync_api.expect(page.locator("select").first).to_have_value("like")
    assert not wrong
    page.close()
    made.close()
