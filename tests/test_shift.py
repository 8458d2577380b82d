"""Where context moves a word: distances and angles in the picture are those of the vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch

RNG = np.random.default_rng(0)


def ends(ax: Any) -> np.ndarray:
    return np.array([text.xy for text in ax.texts if text.arrow_patch is not None])


@pytest.mark.parametrize("features", [2, 3, 50])
def test_two_texts_are_drawn_without_distortion(features: int) -> None:
    static, one, two = RNG.standard_normal((3, features))
    ax = ch.plot_shift(static, [one, two])
    left, right = ends(ax)
    for drawn, moved in ((left, one - static), (right, two - static), (right - left, two - one)):
        assert np.linalg.norm(drawn) == pytest.approx(np.linalg.norm(moved), rel=1e-12)
    assert left[1] == pytest.approx(right[1])  # side by side, the second at the right
    assert left[0] < right[0]
    assert (left + right)[1] >= 0
    moves = [one - static, two - static]
    cosine = moves[0] @ moves[1] / np.linalg.norm(moves[0]) / np.linalg.norm(moves[1])
    assert f"{np.degrees(np.arccos(cosine)):.0f}° apart" in ax.get_title()


def test_ways_other_words_and_more_texts() -> None:
    static, paths, other = RNG.standard_normal(5), RNG.standard_normal((3, 4, 5)), RNG.standard_normal(5)
    ax = ch.plot_shift(static, list(paths), labels=["a", "b", "c"], word="w", others={"x": other})
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b", "c"]
    assert "of it lies in this plane" in ax.get_title()
    assert sum(len(line.get_xdata()) == 5 for line in ax.lines) == 3  # from the start through four layers
    assert "x" in [text.get_text() for text in ax.texts]
    alone = ends(ch.plot_shift(static, [paths[0, 0]]))
    assert alone[0, 0] == pytest.approx(0.0, abs=1e-12)
    assert alone[0, 1] == pytest.approx(np.linalg.norm(paths[0, 0] - static))
    still = ch.plot_shift(torch.tensor(static), [static, static])
    assert "by 0 and 0" in still.get_title()
    assert ends(ch.plot_shift(np.ones(1), [np.zeros(1), np.full(1, 3.0)])).shape == (2, 2)


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        ("contexts: is empty", lambda: ch.plot_shift(np.ones(3), [])),
        ("contexts: has shape \\(4,\\), expected \\(3,\\) or", lambda: ch.plot_shift(np.ones(3), [np.ones(4)])),
        ("static: has shape \\(2, 3\\), expected", lambda: ch.plot_shift(np.ones((2, 3)), [np.ones(3)])),
        ("static: has numbers that are not finite", lambda: ch.plot_shift(np.array([np.nan, 1]), [np.ones(2)])),
        (
            "labels: are 1, expected one for each of 2",
            lambda: ch.plot_shift(np.ones(2), [np.ones(2)] * 2, labels=["a"]),
        ),
    ],
)
def test_mistakes_are_said_in_words(words: str, mistake: Any) -> None:
    with pytest.raises(ch.ArgumentError, match=words):
        mistake()
