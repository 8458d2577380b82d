"""PyTorch's own attention: which back end is asked and what is remembered; on the CPU, with stand-ins for them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.core.problem import pose
from clearhead.kernels import fastest
from clearhead.kernels import vendor as module
from clearhead.kernels.speeds import Speeds
from clearhead.kernels.vendor import Vendor, options

TIMES = {"cudnn": 2.0, "flash": 3.0, "efficient": 1.0}


class Asked:
    """Back ends that compute by the formula, and tell what they were asked."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, able: tuple[str, ...] = ("cudnn", "flash", "efficient")
    ) -> None:
        self.forward: list[tuple[str, bool]] = []
        self.backward: list[str] = []
        self.questions = 0
        self.able = able
        self.unable: list[str] = []  # to give gradients
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(module, "able_to", self.able_to)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
        monkeypatch.setattr(fastest, "runs", lambda kernel, way, problem: way not in self.unable)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        known = Speeds("Some GPU")
        monkeypatch.setattr(fastest, "speeds_of", lambda device: known)
        monkeypatch.setattr(fastest, "measure", self.measure)
        monkeypatch.setattr(module, "FORWARD", {name: self.stand_in(name) for name in TIMES})
        monkeypatch.setattr(module, "BACKWARD", {name: self.gradients_of(name) for name in TIMES})

    def measure(self, sizes: Any, calls: dict[str, Any], synchronize: Any) -> dict[str, float]:
        return {name: 1 / TIMES[name] if name not in self.unable else 0.0 for name in calls}

    def able_to(self, problem: Any, causal: bool) -> tuple[str, ...]:
        self.questions += 1
        return self.able

    def stand_in(self, name: str) -> Any:
        def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, lse: bool = True):
            self.forward.append((name, causal))
            seen = ch.observe(q, k, v, mask=ch.causal() if causal else None, scale=scale, kernel="dense")
            return seen.output, seen.lse if lse else None

        forward.__name__ = name
        return forward

    def gradients_of(self, name: str) -> Any:
        def backward(
            dout: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, causal: bool, scale: float
        ):
            self.backward.append(name)
            return ch.gradients(q, k, v, dout, mask=ch.causal() if causal else None, scale=scale, kernel="dense")

        backward.__name__ = name
        return backward


def tensors(*lead: int, length: int = 7, width: int = 4) -> list[Tensor]:
    return list(torch.randn(3, *lead, length, width, generator=torch.Generator().manual_seed(3)).unbind(0))


@pytest.mark.parametrize("lead", [(), (2,), (3, 2), (2, 3, 2)])
@pytest.mark.parametrize("mask", [None, ch.causal()], ids=str)
def test_results_have_the_callers_axes(lead: tuple[int, ...], mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Asked(monkeypatch)
    q, k, v = tensors(*lead)
    problem = pose(q, k, v, mask=mask)
    kernel = Vendor()
    for _ in range(2):  # found, then remembered
        seen, peak, total, _ = kernel.run(problem)
        right = ch.observe(q, k, v, mask=mask, kernel="dense")
        torch.testing.assert_close(problem.restore(seen.output), right.output)
        torch.testing.assert_close(problem.restore(seen.lse), right.lse)
        assert peak.shape == total.shape == seen.lse.shape
        assert (total == 1).all()
        dout = torch.ones_like(seen.output)
        found = kernel.gradients(problem, dout, seen.output, peak, total)
        best = ch.gradients(q, k, v, torch.ones_like(q), mask=mask, kernel="dense")
        for mine, right_one in zip((found.dq, found.dk, found.dv), best, strict=True):
            torch.testing.assert_close(problem.restore(mine), right_one)


def test_the_fastest_back_end_runs_with_gradients_by_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, kernel = Asked(monkeypatch), Vendor()
    problem = pose(*tensors(2, 2)).to_be_differentiated()
    seen, peak, total, _ = kernel.run(problem)
    assert asked.forward == [("efficient", False)]
    kernel.gradients(problem, torch.ones_like(seen.output), seen.output, peak, total)
    assert asked.backward == ["efficient"]


@pytest.mark.parametrize(
    ("unable", "taken"), [(["efficient"], "cudnn"), (["cudnn", "efficient"], "flash"), (list(TIMES), None)]
)
def test_a_back_end_without_gradients_is_not_taken(
    unable: list[str], taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, kernel, problem = Asked(monkeypatch), Vendor(), pose(*tensors(2, 2)).to_be_differentiated()
    asked.unable = unable
    with pytest.raises(ch.KernelRefused, match="gives gradients") if taken is None else nullcontext():
        seen, peak, total, _ = kernel.run(problem)
        kernel.gradients(problem, torch.ones_like(seen.output), seen.output, peak, total)
    assert asked.backward == ([] if taken is None else [taken])


def test_what_another_kernel_ran_is_differentiated_by_its_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, kernel = Asked(monkeypatch), Vendor()
    given: list[Tensor] = []
    backward = module.BACKWARD["efficient"]
    monkeypatch.setitem(module.BACKWARD, "efficient", lambda *a: (given.append(a[5]), backward(*a))[1])
    problem = pose(*tensors(2, 2)).to_be_differentiated()
    seen = ch.observe(problem.q, problem.k, problem.v, kernel="dense")
    total = (seen.lse - seen.max_score).exp()
    kernel.gradients(problem, torch.ones_like(seen.output), seen.output, seen.max_score, total)
    torch.testing.assert_close(given[0], seen.lse)
    assert asked.backward == ["efficient"]


def test_pytorch_is_asked_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, kernel = Asked(monkeypatch), Vendor()
    q, k, v = tensors(2, 2)
    for _ in range(3):
        kernel.run(pose(q, k, v, mask=ch.causal()))
    assert asked.questions == 1
    assert {causal for _, causal in asked.forward} == {True}
    kernel.run(pose(q, k, v))
    assert asked.questions == 2, "another mask"
    kernel.run(pose(q, k, v, mask=ch.causal(offset=6)))
    assert asked.questions == 3, "another place of the first query, which sees all keys"
    assert asked.forward[-1][1] is False
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    kernel.run(pose(*strided, mask=ch.causal()))
    assert asked.questions == 4, "other strides"
    was = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(not was)
    try:
        kernel.run(pose(q, k, v, mask=ch.causal()))
    finally:
        torch.backends.cuda.enable_flash_sdp(was)
    assert asked.questions == 5, "a back end was switched off"
    for mask in (ch.window(3), ch.documents([0, 0, 0, 1, 1, 1, 1]), ch.causal(offset=1)):
        assert kernel.way(pose(q, k, v, mask=mask)).reason is not None
    assert asked.questions == 5, "masks that PyTorch has not are refused without asking"


@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_a_scale_that_turns_what_is_hidden_into_the_largest_is_refused(scale: float) -> None:
    """−inf · scale is NaN or inf: cuDNN, FlashAttention and the memory-efficient back end give NaN for causal ones."""
    assert options(pose(*tensors(2, 2), scale=scale)) == f"scale {scale} is not above 0"
    assert options(pose(*tensors(2, 2), scale=0.1)) is None


def test_what_was_found_the_fastest_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, kernel = Asked(monkeypatch), Vendor()
    q, k, v = tensors(2, 2)
    mask = ch.causal()
    assert kernel.at_once(q, k, v, mask, None) is None, "nothing is known yet"
    kernel.settle(pose(q, k, v, mask=ch.causal(offset=0)), "forward", "flash")
    assert kernel.at_once(q, k, v, ch.causal(offset=[[0]]), None) is None, "which has one axis too many"
    for known in (mask, None):
        kernel.settle(pose(q, k, v, mask=known), "forward", "flash")
    for known, scale in ((mask, None), (None, 0.25), (ch.causal(), 0.5)):
        found = kernel.at_once(q + 1, k, v, known, scale)
        torch.testing.assert_close(found, ch.attention(q + 1, k, v, mask=known, scale=scale, kernel="dense"))
    assert asked.questions == 3
    heads = [x[0] for x in (q, k, v)]
    kernel.settle(pose(*heads), "forward", "flash")
    others: dict[str, tuple[Any, ...]] = {
        "another dtype": (q, k.double(), v, None, None),
        "no batch axis": (*heads, None, None),
        "another mask": (q, k, v, ch.window(2), None),
        "an array": (q, k, v, torch.ones(7, 7, dtype=torch.bool), None),
        "no number": (q, k, v, None, float("inf")),
        "to be checked": (q, k, v, None, "1"),
        "gradients": (q, k.clone().requires_grad_(), v, None, None),
    }
    for what, given in others.items():
        assert kernel.at_once(*given) is None, what
    with torch.no_grad():
        assert kernel.at_once(*others["gradients"]) is not None
    kernel.settle(pose(*others["gradients"][:3]), "training", "flash")
    assert kernel.at_once(*others["gradients"]).requires_grad, "by PyTorch's own autograd"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    Asked(monkeypatch)
    monkeypatch.setattr(module, "KINDS", 4)
    kernel = Vendor()
    for length in range(1, 12):
        kernel.run(pose(*tensors(1, 1, length=length)))
        kernel.settle(pose(*tensors(1, 1, length=length)), "forward", "flash")
    assert len(kernel.known) <= 4
    assert len(kernel.settled) <= 4


def test_the_one_that_is_kept_serves_training_too() -> None:
    module.one.cache_clear()
    with torch.inference_mode():
        assert not module.one(torch.device("cpu")).is_inference()
