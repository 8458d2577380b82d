"""A real notebook, run by a real kernel, and its HTML in a real browser: everything shows itself, light and dark."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="there is no kernel to run a notebook with: pip install ipykernel")
nbformat: Any = pytest.importorskip("nbformat", reason="notebooks are not there: pip install nbclient nbconvert")
nbclient: Any = pytest.importorskip("nbclient", reason="notebooks cannot be run: pip install nbclient")
nbconvert: Any = pytest.importorskip("nbconvert", reason="notebooks cannot be shown: pip install nbconvert")

from test_browser import CHROMIUM  # noqa: E402  # after what it cannot do without

CELLS = {
    "trace": """
import numpy as np, clearhead as ch
from clearhead.textbook import EXAMPLES
from clearhead.measure.costs import cost
e = EXAMPLES["cat_sat"]
ch.trace(e.q, e.k, e.v, query="cat", tokens=e.tokens, mask=ch.causal())""",
    "plot": "ch.plot_attention(ch.observe(e.q, e.k, e.v, weights=True), e.tokens)",
    "panels": "ch.plot_heads(np.random.default_rng(0).dirichlet(np.ones(5), (3, 5)), e.tokens)",
    "plan": "ch.plan(e.q, e.k, e.v, mask=ch.causal())",
    "cost": "cost('GPT-3 175B')",
    "report": "ch.check(lambda q, k, v: ch.attention(q, k, v, scale=1.0))",
    "picture": "(ch.causal() & ch.window(2)).picture(5)",
}
# In the page itself: where bars begin, what can be read on what, and whether pictures are there
MEASURE = """
<script>
addEventListener("load", () => {
  const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).slice(0, 3)
    .map((x) => (x /= 255, x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$|transparent/.test(c)) return c; } return "rgb(255, 255, 255)"; };
  const contrast = (e) => { const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05); };
  const all = (s) => [...document.querySelectorAll(s)];
  const found = {
    starts: all(".clearhead .bar").map((b) => b.getBoundingClientRect().left -
      b.parentElement.getBoundingClientRect().left),
    shares: all(".clearhead .bar").map((b) => b.getBoundingClientRect().width /
      b.parentElement.getBoundingClientRect().width),
    contrast: all(".clearhead td, .clearhead h2, .clearhead h3, .clearhead p").filter((e) => e.innerText.trim())
      .map(contrast),
    ground: all(".clearhead").map((e) => light(ground(e))),
    images: all("img").map((i) => i.naturalWidth / i.width),
    squares: all("svg rect").length,
    titles: all(".clearhead h2").map((h) => h.innerText),
    names: all(".clearhead td:first-child").map((e) => getComputedStyle(e).textAlign),
  };
  const note = document.createElement("pre");
  note.id = "measured";
  note.textContent = JSON.stringify(found);
  document.body.append(note);
});
</script>
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code.strip()) for code in CELLS.values()])
    return nbclient.NotebookClient(
        made, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path_factory.mktemp("run")}}
    ).execute()


def test_every_cell_shows_itself(notebook: Any) -> None:
    for name, cell in zip(CELLS, notebook.cells, strict=True):
        (shown,) = [output for output in cell.outputs if output.output_type == "execute_result"]
        assert len(cell.outputs) == 1, f"{name} also printed something"
        wanted = "image/png" if name in ("plot", "panels") else "text/html"
        assert wanted in shown.data, name
    assert notebook.cells[-1].outputs[0].data["text/plain"].splitlines()[0] == "■ · · · ·"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_can_be_read_as_jupyter_styles_it(notebook: Any, theme: str, tmp_path: Path) -> None:
    exporter = nbconvert.HTMLExporter(theme=theme, require_js_url="", jquery_url="", mathjax_url="")
    page, _ = exporter.from_notebook_node(notebook)
    found = measured(page, tmp_path)
    assert found["starts"] == [0.0, 0.0]  # a causal row of the second token: two keys have a bar
    assert found["shares"] == pytest.approx([0.8176, 0.1824], abs=0.01)
    assert min(found["contrast"]) >= 4.5  # what accessibility guidelines ask for
    assert all(ground > 0.9 if theme == "light" else ground < 0.1 for ground in found["ground"])
    assert found["images"] == [pytest.approx(2.0, abs=0.02)] * 2
    assert found["squares"] == 25
    assert set(found["names"]) == {"left"}
    assert found["titles"][:3] == ['Attention of "cat" (query 1)', "plan", "GPT-3 175B"]
    assert found["titles"][3].startswith("<lambda> is wrong: 1 mistake")


def measured(page: str, folder: Path) -> dict[str, Any]:
    (folder / "page.html").write_text(page.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1000,3000", "--dump-dom",
        (folder / "page.html").as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=120).stdout
    words = re.search(r'<pre id="measured">(.*?)</pre>', dom)
    assert words is not None
    return json.loads(words[1].replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_a_figure_can_be_pickled() -> None:
    import clearhead as ch

    figure = ch.plot_mask(ch.causal(), 3).figure
    again = pickle.loads(pickle.dumps(figure))
    assert again.axes[0].get_title() == "causal()"
    assert again.axes[0]._repr_png_()[0].startswith(b"\x89PNG")
