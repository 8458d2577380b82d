"""The explorer's views in a real Chromium, one by one: what can be done in each, and what comes out of it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from xml.etree import ElementTree

import exploring
import numpy as np
import pytest
from exploring import CAT, box_of, in_chromium, shown, sync_api

import clearhead as ch
from clearhead.explorer.compare_view import MECHANISMS

pytestmark = in_chromium
browser, url = exploring.browser, exploring.url

MINE = ("pipeline", "walk", "scaling", "geometry", "masks", "code", "compare")


@pytest.fixture(scope="module")
def context(browser: Any) -> Iterator[Any]:
    made = browser.new_context(viewport={"width": 1440, "height": 900})
    made.grant_permissions(["clipboard-read", "clipboard-write"])
    made.add_init_script("try { localStorage.setItem('clearhead.tour', 'done') } catch {}")
    yield made
    made.close()


@pytest.fixture
def page(context: Any) -> Iterator[Any]:
    made = context.new_page()
    wrong: list[str] = []
    made.on("pageerror", lambda error: wrong.append(str(error)))
    yield made
    made.close()
    assert not wrong


def state(page: Any) -> dict[str, str]:
    return state_of(page.url)


def state_of(address: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(address.partition("?")[2]).items()}


def stage(page: Any, title: str) -> Any:
    return page.locator(".stage", has=page.locator("h2", has_text=title))


@pytest.mark.parametrize("view", [*MINE, "heat"])
def test_every_view_gives_a_picture_its_numbers_and_the_python_that_gives_them(page: Any, url: str, view: str) -> None:
    shown(page, f"{url}#/{view}?query=2&key=1", view)
    files = {}
    for kind in ("PNG", "SVG", "CSV"):
        with page.expect_download() as handed:
            page.get_by_role("button", name=kind, exact=True).click()
        files[kind] = Path(handed.value.path()).read_bytes()
    assert files["PNG"].startswith(b"\x89PNG")
    width, height = (int.from_bytes(files["PNG"][at : at + 4], "big") for at in (16, 20))
    assert min(width, height) > 200
    drawing = ElementTree.fromstring(files["SVG"])
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    words = " ".join(drawing.itertext())
    assert "cat" in words or view == "scaling"
    assert b"<script" not in files["SVG"]
    rows = list(csv.reader(io.StringIO(files["CSV"].decode())))
    assert len(rows) > 4
    assert sum(cell.replace(".", "", 1).lstrip("-").isdigit() for row in rows for cell in row) > 10
    page.get_by_role("button", name="Copy as Python").click()
    sync_api.expect(page.locator("#live")).to_contain_text("Copied")
    said = io.StringIO()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(said):
        exec(page.evaluate("navigator.clipboard.readText()"), names)
    if view == "code":
        np.testing.assert_allclose(names["output"], ch.attention(CAT.q, CAT.k, CAT.v, mask=ch.causal()), rtol=1e-14)
    if view == "pipeline":
        np.testing.assert_array_equal(names["q"], CAT.q)
        assert said.getvalue().strip() == str(ch.trace(CAT.q, CAT.k, CAT.v, query=2, mask=ch.causal())).strip()


def test_arrows_are_as_thick_as_weights_and_boxes_light_up(page: Any, url: str) -> None:
    shown(page, f"{url}#/pipeline?query=2", "pipeline")
    weights = ch.trace(CAT.q, CAT.k, CAT.v, query=2, mask=ch.causal()).row.weights
    thick = [
        float(str(path.get_attribute("stroke-width"))) for path in page.locator(".curves [data-stage=arrow]").all()
    ]
    np.testing.assert_allclose(np.array(thick) / thick[0], weights[:3] / weights[0])
    stage(page, "Scaled").locator(".box").nth(1).hover()
    sync_api.expect(page.locator(".box.lit")).to_have_attribute("aria-label", "Scaled, cat: 1.00")
    lit = {one.get_attribute("aria-label") for one in page.locator(".box.from").all()}
    assert lit == {"Raw scores, cat: 2.00"}
    assert page.locator("input.from").count() == 8, "the query's features and the key's"
    goes = {str(one.get_attribute("aria-label")).split(":")[0] for one in page.locator(".box.to").all()}
    assert {"Masked, cat", "Exponentials, cat", "Weights, cat", "Output, feature 1"} <= goes
    page.get_by_label("Output, feature 2").hover()
    output = ch.attention(CAT.q, CAT.k, CAT.v, mask=ch.causal())[2, 1]
    sync_api.expect(page.locator(".panel .big")).to_have_text(f"{output:.2f}")
    assert page.locator(".box.from").count() == 5, "every weight"


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_any_number_can_be_changed_in_place_and_keeps_the_focus(page: Any, url: str, name: str) -> None:
    shown(page, f"{url}#/pipeline?query=1", "pipeline")
    box = page.get_by_label(f"{name}, cat, feature 2")
    box.fill("-1.5")
    box.press("Enter")
    page.wait_for_url(re.compile("edits"))
    arrays = {one: getattr(CAT, one).copy() for one in "qkv"}
    arrays[name][1, 1] = -1.5
    output = ch.attention(**arrays, mask=ch.causal())[1]
    sync_api.expect(stage(page, "Output").locator(".box").nth(1)).to_have_text(f"{output[1]:.2f}")
    sync_api.expect(box).to_be_focused()
    box.fill("")
    box.press("Enter")
    sync_api.expect(page.locator(".panel .bad")).to_have_text(f"{name}, feature 2: expected a number.")
    assert state(page)["edits"].endswith("-1.5"), "what is no number changes nothing"


def test_what_is_pinned_stays_and_a_page_that_is_scrolled_stays_where_it_is(page: Any, url: str) -> None:
    page.set_viewport_size({"width": 390, "height": 500})
    shown(page, f"{url}#/pipeline?query=2", "pipeline")
    stage(page, "Raw scores").locator(".box").nth(1).click()
    sync_api.expect(page.locator(".panel")).to_contain_text("Pinned")
    page.mouse.wheel(0, 400)
    at = page.evaluate("new Promise((done) => requestAnimationFrame(() => done(scrollY)))")
    stage(page, "Raw scores").locator(".box").nth(0).dispatch_event("pointerenter")
    sync_api.expect(page.locator(".panel .pair")).to_have_text("sat → cat")
    page.mouse.move(2, 2)
    page.keyboard.press("Escape")
    sync_api.expect(page.locator(".panel .pair")).to_have_text("output of sat")
    page.keyboard.press("ArrowDown")
    sync_api.expect(page.locator(".panel .pair")).to_have_text("sat → The")
    assert page.evaluate("scrollY") >= at > 0


def test_the_walk_fills_a_board_jumps_and_plays(page: Any, url: str) -> None:
    shown(page, f"{url}#/walk", "walk")
    page.get_by_role("button", name="weights", exact=True).click()
    sync_api.expect(page.locator(".sentence")).to_contain_text("weight")
    row = ch.trace(CAT.q, CAT.k, CAT.v, query=0, mask=ch.causal()).row
    first = page.locator(".board tbody tr").first.locator("td").all_inner_texts()
    assert first[4:8] == [f"{x:.2f}" for x in (row.dots[0], row.scaled[0], row.exponentials[0], row.weights[0])]
    page.locator("select").first.select_option("3")
    sync_api.expect(page.locator(".where")).to_contain_text("query on")
    page.keyboard.press("Escape")
    page.get_by_label("speed").select_option("fast")
    before = int(state(page)["at"])
    page.get_by_role("button", name="Play").click()
    page.wait_for_url(lambda address: int(state_of(address)["at"]) > before + 1)
    page.get_by_role("button", name="Pause").click()
    page.keyboard.press("End")
    steps = sum(len(list(ch.trace(CAT.q, CAT.k, CAT.v, query=i, mask=ch.causal()).walk())) for i in range(5))
    sync_api.expect(page.locator(".where")).to_contain_text(f"Step {steps} of {steps}")


def test_sliders_show_what_scaling_gives(page: Any, url: str) -> None:
    shown(page, f"{url}#/scaling", "scaling")
    slider = page.get_by_label("d, the number of features")
    slider.focus()
    slider.press("End")
    sync_api.expect(slider).to_have_attribute("aria-valuetext", "d = 1024")
    page.get_by_label("d, exactly").fill("100")
    page.get_by_label("d, exactly").press("Enter")
    page.get_by_label("σ, the spread").press("ArrowRight")
    expected = ch.scaling(100, keys=64, queries=64, sigma=1.25).rows[0]
    facts = page.locator(".facts").first
    for name in ("entropy", "largest", "gradient", "norm"):
        sync_api.expect(facts).to_contain_text(f"{getattr(expected.unscaled, name):.2f}")
    page.get_by_role("button", name="with 1/√d", exact=True).click()
    sync_api.expect(page.locator(".facts")).to_have_count(1)
    sync_api.expect(page.locator(".facts")).to_contain_text(f"{expected.scaled.entropy:.2f}")
    page.get_by_label("d, exactly").fill("4096")
    page.get_by_label("d, exactly").press("Enter")
    sync_api.expect(page.locator(".error")).to_contain_text("expected a whole number from 1 to 1024")


def test_a_dragged_tip_moves_scores_weights_and_output_while_it_is_held(page: Any, url: str) -> None:
    shown(page, f"{url}#/geometry?query=2", "geometry")
    tip = page.get_by_label("Tip of key The")
    box = box_of(tip)
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    table = page.locator(".planes table")
    before = table.inner_text()
    page.mouse.move(*middle)
    page.mouse.down()
    page.mouse.move(middle[0] + 60, middle[1] + 20, steps=3)
    sync_api.expect(table).not_to_have_text(before, use_inner_text=True)
    assert "edits" not in state(page), "what is held is not yet kept"
    page.mouse.up()
    page.wait_for_url(re.compile("edits"))
    k = CAT.k.copy()
    for edit in state(page)["edits"].split(";"):
        name, _, row, column, value = edit.split(".", 4)
        assert (name, row) == ("k", "0")
        k[0, int(column)] = float(value)
    weights = ch.trace(CAT.q, k, CAT.v, query=2, mask=ch.causal()).row.weights
    page.wait_for_selector('html[data-ready="geometry"]')
    sync_api.expect(table.locator("tbody tr").first.locator("td").last).to_have_text(f"{weights[0]:.2f}")
    now = box_of(tip)
    assert now["x"] - box["x"] == pytest.approx(60, abs=12), "the plane stays where it is"
    query = page.get_by_label("Tip of query sat")
    query.focus()
    query.press("ArrowUp")
    page.wait_for_url(re.compile(r"q\.0\.2\."))
    sync_api.expect(query).to_be_focused()


def test_masks_are_joined_by_clicking_and_say_why(page: Any, url: str) -> None:
    shown(page, f"{url}#/masks", "masks")
    box = page.get_by_label("Mask, as in Python")
    page.get_by_role("button", name="window", exact=True).click()
    sync_api.expect(box).to_have_value("causal() & window(1)")
    page.get_by_role("button", name="| or").click()
    page.get_by_role("button", name="random blocks").click()
    sync_api.expect(box).to_have_value("causal() & window(1) | random_blocks(1, count=1)")
    page.get_by_role("button", name="& and").click()
    page.get_by_role("button", name="padding").click()
    mask = (ch.causal() & ch.window(1) | ch.random_blocks(1, count=1)) & ch.lengths(4)
    sync_api.expect(box).to_have_value("(causal() & window(1) | random_blocks(1, count=1)) & lengths(4)")
    count = int(mask.dense(5, 5).sum())
    sync_api.expect(page.locator(".thirds .card").first).to_contain_text(f"{count} of 25 pairs")
    page.get_by_label("Mask: ").locator(".cell").nth(3 * 5 + 4).click()
    sync_api.expect(page.locator(".why")).to_contain_text(mask.explain(3, 4, queries=5, keys=5))
    page.keyboard.press("ArrowLeft")
    sync_api.expect(page.locator(".why")).to_contain_text(mask.explain(3, 3, queries=5, keys=5))
    box.fill("lengths([")
    box.press("Enter")
    sync_api.expect(page.locator(".error")).to_contain_text("which is no mask")
    box.fill("~causal()")
    box.press("Enter")
    page.get_by_role("button", name="Use in every view").click()
    sync_api.expect(page.locator("#formula")).to_contain_text("mask")
    page.keyboard.press("1")
    page.wait_for_selector('html[data-ready="pipeline"]')
    assert state(page)["mask"] == "~causal()"
    assert page.locator(".quarters .card").count() == 0


def test_mechanisms_are_held_against_any_of_them(page: Any, url: str) -> None:
    shown(page, f"{url}#/compare", "compare")
    assert page.locator(".ways .card h2").all_inner_texts() == [one.name for one in MECHANISMS]
    page.get_by_label("difference from").select_option("causal")
    full, causal = ch.attention(CAT.q, CAT.k, CAT.v), ch.attention(CAT.q, CAT.k, CAT.v, mask=ch.causal())
    card = page.locator(".ways .card").first
    sync_api.expect(card.locator(".fact")).to_have_text(f"differs by at most {np.abs(full - causal).max():.2f}")
    assert card.locator("svg").nth(1).locator(".number").all_text_contents() == [
        f"{x:.2f}" for x in (full - causal).ravel()
    ]


def test_a_line_in_a_loop_shows_each_pass(page: Any, url: str) -> None:
    shown(page, f"{url}#/code?way=loops", "code")
    page.get_by_role("button", name="dot = dot + q[i][c] * k[j][c]").click()
    sync_api.expect(page.locator(".panel .muted").first).to_contain_text("pass 1 of 100: i = 0, j = 0, c = 0")
    page.get_by_label("Pass", exact=True).fill("37")
    dots = np.cumsum(CAT.q[1] * CAT.k[4])
    sync_api.expect(page.locator(".panel .muted").first).to_contain_text("pass 38 of 100: i = 1, j = 4, c = 1")
    sync_api.expect(page.locator(".panel .big")).to_have_text(f"{dots[1]:.2f}")
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    sync_api.expect(page.locator(".panel .big")).to_have_text(f"{dots[2]:.2f}")
    page.keyboard.press("ArrowDown")
    sync_api.expect(page.locator(".listing [aria-current=true]")).to_contain_text("score = scale * dot")


def test_a_pasted_function_runs_only_behind_its_switch_and_its_failing_cell_opens(page: Any, url: str) -> None:
    shown(page, f"{url}#/code?way=yours", "code")
    run, switch = page.get_by_role("button", name="Check it"), page.get_by_label("Let this page run Python code")
    sync_api.expect(run).to_be_disabled()
    page.get_by_label("Your function").fill(
        "import numpy as np\n\ndef mine(q, k, v):\n    e = np.exp(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)\n"
        "    return e / e.sum(-2, keepdims=True) @ v\n"
    )
    switch.check()
    sync_api.expect(run).to_be_enabled()
    run.click()
    sync_api.expect(page.locator(".verdict")).to_contain_text("mine is wrong", timeout=30_000)
    example = json.loads(ch.check(mine).json())["findings"][0]["example"]
    page.get_by_role("button", name="Open the failing cell").first.click()
    page.wait_for_selector('html[data-ready="heat"]')
    given = json.loads(state(page)["given"])
    assert {name: given[name] for name in "qkv"} == {name: example["inputs"][name] for name in "qkv"}
    weights = ch.observe(*(np.array(given[name]) for name in "qkv"), weights=True).weights
    at = weights[int(state(page)["query"]), int(state(page)["key"])]
    sync_api.expect(page.locator(".panel .big")).to_have_text(f"{at:.2f}")
    page.get_by_role("button", name="Back to my call").click()
    page.wait_for_url(lambda address: "given" not in address)
    page.keyboard.press("8")
    page.wait_for_selector('html[data-ready="code"]')
    assert "mine" in page.get_by_label("Your function").input_value(), "what was typed is still there"
    switch.uncheck()
    sync_api.expect(run).to_be_disabled()


def mine(q: Any, k: Any, v: Any) -> Any:
    e = np.exp(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)
    return e / e.sum(-2, keepdims=True) @ v
