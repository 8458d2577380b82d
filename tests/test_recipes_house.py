"""What DESIGN.md says of adding something: a kernel, a layer, a mistake, an array library, each added from outside.

What a recipe names is all that is touched, by `monkeypatch`: if more were needed these would fail.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from libraries import LIBRARIES
from torch import Tensor, nn

import clearhead as ch
from clearhead.core.formula import Gradients
from clearhead.core.problem import Problem
from clearhead.doctor import mistakes, variants
from clearhead.kernels import choose
from clearhead.kernels.contract import Ran
from clearhead.kernels.dense import dense
from clearhead.nn.attend import attend

SOURCE = Path(ch.__file__).parent


class Doubtful:
    """A kernel that takes few keys, and computes as `dense` does."""

    name = "doubtful"

    def rejects(self, problem: Problem) -> str | None:
        return f"{problem.grid.keys} keys are more than 7" if problem.grid.keys > 7 else None

    def rejects_gradients(self, problem: Problem) -> str | None:
        return self.rejects(problem)

    def run(self, problem: Problem) -> Ran:
        ran = dense.run(problem)
        return ran._replace(observed=ch.Observed(**{**vars(ran.observed), "kernel": self.name}))

    def gradients(self, *arguments: Any) -> Gradients:
        return dense.gradients(*arguments)


@pytest.fixture
def doubtful(monkeypatch: pytest.MonkeyPatch) -> Doubtful:
    kernel = Doubtful()
    monkeypatch.setattr(choose, "KERNELS", (*choose.KERNELS, kernel))
    return kernel


def test_a_kernel_is_a_class_and_a_line(doubtful: Doubtful) -> None:
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 5, 3))
    given = ch.attention(q, k, v, mask=ch.causal(), kernel="doubtful")
    np.testing.assert_array_equal(given, ch.attention(q, k, v, mask=ch.causal(), kernel="dense"))
    assert ch.observe(q, k, v, kernel="doubtful").kernel == "doubtful"
    for found, expected in zip(
        ch.gradients(q, k, v, dout, kernel="doubtful"), ch.gradients(q, k, v, dout), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    assert ch.plan(q, k, v, kernel="doubtful").kernel == "doubtful"
    assert ch.plan(q, k, v, kernel="tiled").others["doubtful"] == "'tiled' was asked for"


def test_a_kernel_for_gpus_is_compared_with_the_others(doubtful: Doubtful, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "ON_GPU", (*choose.ON_GPU, doubtful))
    q = np.zeros((2, 11, 3))
    plan = ch.plan(q, q, q)
    assert {plan.kernel, *plan.others} == {kernel.name for kernel in choose.KERNELS}
    assert plan.others["doubtful"] == "refused: 11 keys are more than 7"


def test_its_refusal_is_said(doubtful: Doubtful) -> None:
    q = np.zeros((2, 11, 3))
    with pytest.raises(ch.KernelRefused, match="11 keys are more than 7"):
        ch.attention(q, q, q, kernel="doubtful")
    with pytest.raises(ch.ArgumentError, match="'doubtful'"):
        ch.attention(q, q, q, kernel="no such")


def test_pytorch_learns_through_it(doubtful: Doubtful) -> None:
    q = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (found,) = torch.autograd.grad(ch.attention(q, q, q, kernel="doubtful").sum(), q)
    (expected,) = torch.autograd.grad(ch.attention(q, q, q, kernel="dense").sum(), q)
    torch.testing.assert_close(found, expected)


class Averaging(nn.Module):
    """A layer: attention over its input, half of which is passed on as it came."""

    def forward(self, x: Tensor) -> Tensor:
        output, _ = attend(x, x, x, dropout=0.0, observe=None, mask=ch.causal())
        return (x + output) / 2


def test_a_layer_is_a_class() -> None:
    layer, x = Averaging(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(8, 8), layer)
    with ch.watch(model) as seen:
        model(x)
    assert [call.name for call in seen.calls] == ["1"]
    assert seen.missed == {}
    torch.testing.assert_close(layer(x), (x + ch.attention(x, x, x, mask=ch.causal())) / 2)


def test_a_mistake_is_an_entry_and_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    def sigmoid_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return sigmoid(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v

    def sigmoid(scores: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-scores))

    assert [one.mistake.name for one in ch.check(sigmoid_attention).findings][:1] == ["unknown"]
    entry = mistakes.Mistake("sigmoid", "a sigmoid in place of the softmax", "why", "mends", "axis", "sigmoid")
    monkeypatch.setitem(mistakes.CATALOGUE, entry.name, entry)
    monkeypatch.setitem(mistakes.BY_SETTING, ("axis", "sigmoid"), entry)
    monkeypatch.setitem(variants.SETTINGS, "axis", (*variants.SETTINGS["axis"], "sigmoid"))
    for name in ("_once", "_twice"):  # as it would be were it there from the start
        monkeypatch.setattr(variants, name, getattr(variants, name).__wrapped__)
    softmax = variants.weighed
    monkeypatch.setattr(variants, "weighed", lambda axis, s: sigmoid(s) if axis == "sigmoid" else softmax(axis, s))
    report = ch.check(sigmoid_attention)
    assert [one.mistake.name for one in report.findings][:1] == ["sigmoid"]
    assert "a sigmoid in place of the softmax" in str(report)


def test_an_array_library_is_none() -> None:
    # the conformance suite holds it to every case, and no file of ours knows its name
    assert "strict" in {library.name for library in LIBRARIES}
    naming = [path for path in SOURCE.rglob("*.py") if re.search("array_api_strict", path.read_text())]
    assert naming == []
