"""Solutions that do odd things: whatever a function does, what comes of it is told, and nothing else happens."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core.errors import ArgumentError
from clearhead.doctor import quiet
from clearhead.learning.typed_answers import spoken


def of_three(function: Any) -> Any:
    return ch.learn(3, function, keep=False)


def right(q: Any, k: Any) -> Any:
    return q @ k.T / q.shape[-1] ** 0.5


def endless(q: Any, k: Any) -> Any:
    while True:
        try:
            np.add(q, 0)
        except Exception:  # whatever is thrown at it
            continue


def deep(q: Any, k: Any) -> Any:
    return deep(q, k)


def leaving(q: Any, k: Any) -> Any:
    sys.exit("enough")


def printing(q: Any, k: Any) -> None:
    print(right(q, k))


def writing(q: Any, k: Any) -> Any:
    q /= q.shape[-1] ** 0.5
    return q @ k.T


def writing_and_wrong(q: Any, k: Any) -> Any:
    k *= 2
    return right(q, k) + 1


class Late:
    """Right as often as there are problems, and then no more."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, q: Any, k: Any) -> Any:
        self.count += 1
        return right(q, k) if self.count <= 7 else right(q, k) + 1


def warning(q: Any, k: Any) -> Any:
    warnings.warn("careful", UserWarning, stacklevel=1)
    print("and loud", file=sys.stderr)
    return right(q, k)


class Unreadable:
    """Fails when it is looked at."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("not today")


ODD: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda q, k: None, "returns-nothing"),
    "printed": (printing, "prints-instead"),
    "text": (lambda q, k: "0.5", "wrong-type"),
    "a dictionary": (lambda q, k: {"scores": right(q, k)}, "wrong-type"),
    "ragged lists": (lambda q, k: [[1.0], [1.0, 2.0]], "wrong-type"),
    "a function": (lambda q, k: right, "wrong-type"),
    "unreadable": (lambda q, k: Unreadable(), "wrong-type"),
    "an empty tuple": (lambda q, k: (), "wrong-type"),
    "an object array": (lambda q, k: np.array([[None]]), "wrong-type"),
    "complex": (lambda q, k: right(q, k) + 0j, "complex-numbers"),
    "one number": (lambda q, k: 0.5, "wrong-shape"),
    "one row": (lambda q, k: right(q, k)[0], "wrong-shape"),
    "NaN": (lambda q, k: right(q, k) * np.nan, "gives-nan"),
    "half precision": (lambda q, k: right(q, k).astype(np.float16), "precision-lost"),
    "raised": (lambda q, k: 1 / 0, "raises"),
    "recursion": (deep, "raises"),
    "left": (leaving, "raises"),
    "one parameter": (lambda q: q, "other-parameters"),
    "three parameters": (lambda q, k, v: q, "other-parameters"),
    "a keyword": (lambda q, *, k: q, "other-parameters"),
    "input written to": (writing, "inputs-written-to"),
    "input written to, and wrong": (writing_and_wrong, "inputs-written-to"),
    "another each time": (Late(), "nondeterministic"),
    "random": (lambda q, k: np.random.default_rng().random((len(q), len(k))), "unknown"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_solutions_are_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    function, mistake = ODD[name]
    outcome = of_three(function)
    assert (outcome.right, outcome.name) == (False, mistake), str(outcome)
    for shown in (str(outcome), outcome.json(), outcome._repr_html_(), repr(outcome)):
        assert mistake in shown
    assert capsys.readouterr() == ("", "")


def test_an_endless_loop_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "LIMIT", 1)
    outcome = of_three(endless)
    assert outcome.name == "took-too-long"


def test_the_line_that_raised_is_told() -> None:
    def scaled_scores(q: Any, k: Any) -> Any:
        return q @ k.T / missing  # type: ignore[name-defined]  # noqa: F821  # a name that is not there is what is tried

    outcome = of_three(scaled_scores)
    assert "NameError" in outcome.seen
    assert "return q @ k.T / missing" in outcome.seen
    assert outcome.example[-1].startswith("got      raised NameError")


class Module(torch.nn.Module):
    """Right, as a module of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.factor * q @ k.mT / q.shape[-1] ** 0.5


@pytest.mark.parametrize(
    "function",
    [
        right,
        warning,
        functools.partial(lambda extra, q, k: right(q, k) + extra, 0.0),
        lambda *arrays: right(*arrays),
        Module(),
        lambda q, k: right(q, k).tolist(),
        lambda q, k: (right(q, k), None),
        lambda q, k: np.asfortranarray(right(q, k).astype(np.float64)),
        lambda q, k: torch.as_tensor(np.asarray(right(q, k))),
    ],
)  # fmt: skip
def test_right_in_other_ways(function: Any, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = of_three(function)
    assert outcome.right, str(outcome)
    assert capsys.readouterr() == ("", "")


def test_the_doctor_has_a_say_in_attention() -> None:
    """What shows only with more axes than the exercise asks for is no mistake; what is one, the doctor finds."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.T / q.shape[-1] ** 0.5
        weights = np.exp(scores - scores.max())
        return weights / weights.sum(-1, keepdims=True) @ v

    outcome = ch.learn(5, attention, keep=False)
    assert outcome.name == "maximum-of-the-whole-matrix", str(outcome)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0,), "number: is 0, expected one of the exercises 1 to 30"),
        ((True,), "number: is True"),
        (("3",), "number: is '3'"),
        ((3, [1.0]), "answer: is float, expected scaled_scores(q, k), or the name of a file with it"),
        ((3, right, right), "answer: is function, function, expected scaled_scores(q, k)"),
        ((10, right), "answer: is function, expected split_heads(x, heads) and merge_heads(y)"),
        ((1, [0.1, 0.2]), "answer: has 2 of 3 answers, expected a, b, c"),
        ((1, 0.1, 0.2, "c"), "answer: has 'c' for c, expected a number"),
        ((1, right, 1, 2), "answer: has a function, expected numbers and words"),
        ((3, "nowhere.py"), "FILE: is 'nowhere.py', and there is no such file"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        ch.learn(*arguments, keep=False)
    assert str(refused.value).startswith(words)
    assert "\n" not in str(refused.value)


def test_typed_answers_of_any_kind() -> None:
    for given in (np.array([0.2447, 0.09, 0.6652]), torch.tensor([0.2447, 0.09, 0.6652]), (0.2447, 0.09, 0.6652)):
        assert ch.learn(1, given, keep=False).right
    assert ch.learn(6, 1, 1, 0.25, 0.25, 0.5, False, keep=False).right
    assert not ch.learn(6, [1, 1, 0.25, 0.25, 0.5, True], keep=False).right
    assert spoken(["67,108,864 1,073,741,824 4"]) == ["67108864", "1073741824", "4"]
    with pytest.raises(ArgumentError, match="expected a number"):
        ch.learn(1, [float("nan")] * 3, keep=False)


def test_nothing_is_kept_unless_asked_for(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path))
    assert of_three(right).right
    assert os.listdir(tmp_path) == []
    assert ch.learn(3, right).right
    assert os.listdir(tmp_path) == ["progress.json"]
    assert "1 of 30" in str(ch.learn())
    assert "solved" in str(ch.learn(3))
