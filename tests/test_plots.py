"""Pictures: they show the library's numbers, touch nobody else's figures, and look as they did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.measure.profiling import Measured, Point, Profile
from clearhead.textbook import EXAMPLES

PICTURES = Path(__file__).parent / "pictures"
CAT, IT = EXAMPLES["cat_sat"], EXAMPLES["it_animal"]


def arrays(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((3, *shape))


def seen(**options: Any) -> Any:
    return ch.observe(CAT.q, CAT.k, CAT.v, weights=True, **options)


def shifted() -> Any:
    bank, river, loan = np.array([1.0, 1.0]), np.array([3.0, 0.5]), np.array([0.5, 3.0])
    there = [ch.attention(bank[None], text, text)[0] for text in (np.stack([bank, river]), np.stack([bank, loan]))]
    return ch.plot_shift(bank, there, labels=["by the river", "with a loan"], word="bank", others={"river": river})


def sinking() -> np.ndarray:
    weights = np.tri(30) * np.random.default_rng(0).random((30, 30))
    weights[:, 0] = 60
    return weights / weights.sum(-1, keepdims=True)


MEASURED = Profile(
    8,
    64,
    "float32",
    None,
    tuple(
        Point(
            n,
            32 * n * n,
            None if n > 2048 else Measured(4e-8 * n**2, 128 * n * n),
            Measured(2e-8 * n**1.9, 6200 * n),
            "tiled",
        )
        for n in (256, 512, 1024, 2048, 4096)
    ),
    None,
)

DRAWN = {
    "attention": lambda: ch.plot_attention(seen(mask=ch.causal()), CAT.tokens),
    "sink": lambda: ch.plot_attention(sinking()),
    "log": lambda: ch.plot_attention(sinking(), colours="log"),
    "heads": lambda: ch.plot_heads(ch.observe(*arrays(3, 6, 4), mask=ch.causal(), weights=True)),
    "mask": lambda: ch.plot_mask(ch.window(2, 2) | ch.global_tokens([0]), 14),
    "long_mask": lambda: ch.plot_mask(ch.causal() & ch.window(900), 4000),
    "bias": lambda: ch.plot_bias(ch.alibi(4), 16, heads=4, head=1),
    "scaling": lambda: ch.plot_scaling(ch.scaling([1, 16, 256])),
    "profile": lambda: ch.plot_profile(MEASURED),
    "shift": lambda: shifted(),
    "entropy": lambda: ch.plot_entropy(np.arange(24.0).reshape(4, 6) / 6, keys=64),
    "geometry": lambda: ch.plot_geometry(IT.q, IT.k, IT.v, tokens=IT.tokens, query_tokens=IT.query_tokens),
}


def first(axes: Any) -> Any:
    return np.asarray(axes).ravel()[0]


def pixels(path: Path) -> np.ndarray:
    """The picture in blocks of 4 × 4: where a letter stands by a pixel is not what is compared."""
    with Image.open(path) as image:
        grey = np.asarray(image.convert("RGB"), dtype=float)
    height, width = (n // 4 * 4 for n in grey.shape[:2])
    return grey[:height, :width].reshape(height // 4, 4, width // 4, 4, 3).mean((1, 3))


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_look_as_they_did(name: str, tmp_path: Path) -> None:
    """Stored pictures were looked at; to draw them anew: python tests/test_plots.py."""
    first(DRAWN[name]()).figure.savefig(tmp_path / "now.png", dpi=50)
    now, then = pixels(tmp_path / "now.png"), pixels(PICTURES / f"{name}.png")
    assert abs(now.shape[0] - then.shape[0]) <= 2
    assert abs(now.shape[1] - then.shape[1]) <= 2
    height, width = (min(a, b) for a, b in zip(now.shape[:2], then.shape[:2], strict=True))
    distance = np.abs(now[:height, :width] - then[:height, :width]).mean() / 255
    assert distance < 0.02, f"{name} differs by {distance:.3f} of the whole range"


@pytest.mark.parametrize("name", ["attention", "mask", "geometry", "heads"])
def test_the_distance_tells_pictures_apart(name: str) -> None:
    one, others = pixels(PICTURES / f"{name}.png"), [n for n in DRAWN if n != name]
    for other in others:
        two = pixels(PICTURES / f"{other}.png")
        if two.shape == one.shape:
            assert np.abs(one - two).mean() / 255 > 0.02


def test_maps_show_the_numbers_of_observe() -> None:
    found = seen(mask=ch.causal())
    ax = ch.plot_attention(found, CAT.tokens)
    shown = ax.images[0].get_array()
    assert shown.filled(0).tolist() == found.weights.tolist()
    assert shown.mask.tolist() == (~ch.causal().dense(5)[0]).tolist()  # what is hidden is not drawn
    assert any(patch.get_hatch() for patch in ax.patches)  # and the hatched ground shows through
    assert [label.get_text() for label in ax.get_xticklabels()] == list(CAT.tokens)
    assert [label.get_text() for label in ax.get_yticklabels()] == list(CAT.tokens)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    rows = ch.plot_heads(ch.observe(*arrays(2, 3, 4), weights=True))
    assert {ax.images[0].norm.vmax for ax in rows} == {ch.observe(*arrays(2, 3, 4), weights=True).weights.max()}


def test_queries_and_keys_are_not_exchanged() -> None:
    ax = ch.plot_attention(np.arange(1.0, 7).reshape(2, 3), ["a", "b", "c"], query_tokens=["x", "y"])
    assert ax.images[0].get_array().shape == (2, 3)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["x", "y"]


def test_ticks_are_thinned_past_forty() -> None:
    for count in (40, 41, 200):
        ax = ch.plot_attention(np.full((count, count), 1 / count), [f"t{i}" for i in range(count)])
        assert len(ax.get_xticklabels()) <= 40
    assert ax.get_xticklabels()[1].get_text() == "t5"


def test_one_key_that_takes_all_does_not_hide_the_rest() -> None:
    weights = sinking()
    ax = ch.plot_attention(weights)
    rest = np.ma.masked_equal(weights[:, 1:], 0)
    assert ax.images[0].norm.vmax == rest.max()
    assert "key 0 takes" in ax.figure.axes[1].get_ylabel()
    assert ch.plot_attention(weights, colours="linear").images[0].norm.vmax == weights.max()
    causal = seen(mask=ch.causal())  # the first rows have little choice: that makes no sink
    assert ch.plot_attention(causal).images[0].norm.vmax == causal.weights.max()
    even = ch.plot_attention(np.full((6, 6), 1 / 6))
    assert even.figure.axes[1].get_ylabel() == "weight"


def test_given_axes_are_drawn_on_and_nothing_global_is_touched() -> None:
    before = dict(matplotlib.rcParams)
    figure = Figure()
    ax = figure.subplots()
    assert ch.plot_attention(seen(), ax=ax) is ax
    three = figure.subplots(1, 3)
    assert list(ch.plot_geometry(IT.q, IT.k, IT.v, axes=three)) == list(three)
    assert dict(matplotlib.rcParams) == before
    code = (
        "import sys, numpy, clearhead as ch; ch.plot_attention(numpy.eye(3)); ch.plot_mask(ch.causal(), 4);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_geometry_draws_the_numbers_of_trace() -> None:
    axes = ch.plot_geometry(IT.q, IT.k, IT.v, tokens=IT.tokens)
    row = ch.trace(IT.q, IT.k, IT.v, query=0).row
    assert [bar.get_width() for bar in axes[1].patches] == row.weights.tolist()
    texts = [text.get_text() for text in axes[0].texts]
    assert all(any(f"{dot:.2f}" in text for text in texts) for dot in row.dots)


def test_pooled_maps_and_entropies_of_observed() -> None:
    q, k, v = arrays(2, 100, 4)
    found = ch.observe(q, k, v, map=(10, 10))
    ax = ch.plot_attention(found, head=1)
    np.testing.assert_array_equal(ax.images[0].get_array().filled(0), found.map.mean[1])
    assert "blocks" in ax.get_xlabel()
    table = ch.plot_entropy([found, found]).images[0].get_array()
    np.testing.assert_allclose(table, [found.entropy.mean(-1)] * 2)


def test_bias_is_that_of_the_library() -> None:
    shown = ch.plot_bias(ch.alibi(4), 6, heads=4, head=2).images[0].get_array()
    i, j = np.arange(6)[:, None], np.arange(6)
    np.testing.assert_allclose(shown, -ch.alibi(4).slopes[2] * np.abs(i - j))


MISTAKES = {
    "head: is not given": lambda: ch.plot_attention(np.zeros((2, 3, 3))),
    "head: is 5": lambda: ch.plot_attention(np.zeros((2, 3, 3)), head=5),
    "weights: is no array": lambda: ch.plot_attention([[1.0]]),
    "neither weights nor a map": lambda: ch.plot_attention(ch.observe(*arrays(3, 4))),
    "weights: cannot be read as a plain array: can't convert Sparse": lambda: ch.plot_attention(
        torch.eye(3).to_sparse()
    ),
    "weights: cannot be read as a plain array": lambda: ch.plot_heads(torch.ones(2, 3, 3).to_sparse()),
    "colours: is 'red'": lambda: ch.plot_attention(np.eye(3), colours="red"),
    "tokens: has 2 names": lambda: ch.plot_attention(np.eye(3), ["a", "b"]),
    "expected \\(heads, queries, keys\\)": lambda: ch.plot_heads(np.eye(3)),
    "k: has 4 features, expected 2": lambda: ch.plot_geometry(CAT.q, CAT.k, CAT.v),
    "entropy: has shape": lambda: ch.plot_entropy(np.zeros(3)),
    "head: is 9": lambda: ch.plot_bias(ch.alibi(4), 6, heads=4, head=9),
    "axes: has 1": lambda: ch.plot_scaling(ch.scaling(4), axes=[Figure().subplots()]),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_said_in_words(words: str) -> None:
    with pytest.raises(ch.ArgumentError, match=words):
        MISTAKES[words]()


@pytest.mark.parametrize(
    ("arguments", "suffix"),
    [  # all are written by the same lines, in both formats
        ("attention --causal", ".png"),
        ("attention --causal", ".svg"),
        ("mask --causal", ".svg"),
        ("geometry it_animal", ".svg"),
        ("scaling", ".png"),
        ("attention random:1500,1500,2", ".svg"),
    ],
)
def test_command_line_writes_the_file_it_was_asked_for(tmp_path: Path, suffix: str, arguments: str) -> None:
    path = tmp_path / f"picture{suffix}"
    written = []
    for _ in range(2):
        result = CliRunner().invoke(app, ["plot", *arguments.split(), "-o", str(path), "--dpi", "40"])
        assert result.exit_code == 0, result.output
        written.append(path.read_bytes())
    assert written[0] == written[1]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert written[0].startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_hostile_tokens_are_drawn(tmp_path: Path) -> None:
    names = ["$\\frac{", "a\nb", "\x1b[31m", "<b>&", "👩‍👩‍👧" * 9]
    ax = ch.plot_attention(seen(), names)
    ax.figure.savefig(tmp_path / "map.png", dpi=40)  # and nothing warns of letters that no font has


@pytest.mark.parametrize("name", ["it_animal", "crowded", "one"])
def test_labels_of_the_geometry_lie_on_nothing(name: str) -> None:
    if name == "it_animal":
        example = EXAMPLES[name]
        q, k, v, tokens = example.q, example.k, example.v, example.tokens
    else:
        count = 6 if name == "crowded" else 1
        draw = np.random.default_rng(1).standard_normal
        q, k, v = draw((1, 2)), draw((count, 2)), draw((count, 2))
        tokens = tuple(f"token {i}" for i in range(count))
    axes = ch.plot_geometry(q, k, v, tokens=tokens)
    axes[0].figure.draw_without_rendering()
    for ax in (axes[0], axes[2]):
        written = [text for text in ax.texts if text.get_text()]
        boxes = [text.get_window_extent() for text in written]
        assert len(boxes) == len(tokens) + 1
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
        frame = ax.get_window_extent()
        assert all(frame.x0 <= b.x0 and frame.y0 <= b.y0 and b.x1 <= frame.x1 and b.y1 <= frame.y1 for b in boxes)
        ends = [(text.xyann, text.xy) for text in ax.texts if not text.get_text()]  # the arrows
        lines = [ax.transData.transform(np.array(pair, float)) for pair in ends]
        along = [start + (end - start) * np.linspace(0, 1, 200)[:, None] for start, end in lines]
        if name != "crowded":
            assert not any(box.contains(*dot) for box in boxes for line in along for dot in line)


def test_letters_that_no_font_has_are_spelled_and_warn_of_nothing(tmp_path: Path) -> None:
    from clearhead.plots import fonts

    tokens = ["河", "\U00016a40", "bank"]  # the second is of a script that no common font has
    axes = [
        ch.plot_attention(np.full((3, 3), 1 / 3), tokens),
        ch.plot_geometry(np.eye(3, 2), np.eye(3, 2), np.eye(3, 2), query="河", tokens=tokens)[0],
    ]
    for i, ax in enumerate(axes):
        ax.figure.savefig(tmp_path / f"{i}.png")  # a warning of a missing letter would be an error here
    labels = [label.get_text() for label in axes[0].get_xticklabels()]
    assert labels[2] == "bank"
    assert labels[1] == r"\U00016a40"
    assert labels[0] == ("河" if fonts.families("河") and fonts.drawable("河") == "河" else r"\u6cb3")


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        first(draw()).figure.savefig(PICTURES / f"{name}.png", dpi=50)
