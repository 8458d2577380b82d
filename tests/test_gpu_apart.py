"""Masks of keys that lie apart on a GPU: by every kernel's parts, and by calls of each part that are played again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from budget import within
from on_gpu import MARKS, poison, poisoned, removal_within  # noqa: F401  # one is a fixture that runs by itself

import clearhead as ch
from clearhead.kernels import apart
from clearhead.kernels.apart import Apart, Calls

pytestmark = MARKS
MASKS = {
    "every eighth": ch.dilated(8),
    "every fifth, few": ch.dilated(5, 9, 2),
    "from another place on": ch.dilated(6, offset=-40),
    "strides": ch.strided(16),
}
KINDS = ((torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 64))
SEEN = ("output", "lse", "max_score", "entropy")
BY_KEY = ("received", "received_max")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    for kind in (Apart, Calls):
        method = "run" if kind is Apart else "__call__"
        original = getattr(kind, method)

        def counted(self: Any, *given: Any, original: Any = original, name: str = kind.__name__) -> Any:
            names.append(name)
            return original(self, *given)

        monkeypatch.setattr(kind, method, counted)
    monkeypatch.setattr(apart, "KEYS", 0)
    monkeypatch.setattr(apart, "SEQUENCE", dict.fromkeys(apart.WORTH, 0))
    return names


def drawn(dtype: torch.dtype, width: int, batch: int = 2, queries: int = 700, keys: int = 777) -> list[torch.Tensor]:
    shapes = ((batch, 4, queries, width), (batch, 2, keys, width), (batch, 2, keys, width), (batch, 4, queries, width))
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def close(found: Any, right: Any, near: Any, what: str) -> None:
    within(*(one.cpu() for one in (found, right, near)), 777, what)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("dtype", "width"), KINDS)
@pytest.mark.parametrize("way", ["Apart", "Calls"])
def test_sequences(
    way: str, dtype: torch.dtype, width: int, name: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "WORTH", {"cpu": 0, "gpu": 0, "calls": 0 if way == "Calls" else 2**60})
    mask, (q, k, v, dout) = MASKS[name], drawn(dtype, width)
    one = name != "strides"
    if way == "Calls" and not one:
        pytest.skip("outputs of several combs are merged before they are rounded")
    if not one and dtype != torch.float32:
        pytest.skip("gradients of several combs are added before they are rounded, which no kernel here does")
    wanted = {"top": 5, **dict.fromkeys(BY_KEY, True)} if one else {}
    right, near = (
        ch.observe(*(a.to(kind) for a in (q, k, v)), mask=mask, kernel="dense", **wanted)
        for kind in (torch.float64, torch.float32)
    )
    gradients = [
        ch.gradients(*(a.to(kind) for a in (q, k, v, dout)), mask=mask, kernel="dense")
        for kind in (torch.float64, torch.float32)
    ]
    for _ in range(3):  # the first is recorded, the second may be, the third is played
        poison(4)
        found = ch.observe(q, k, v, mask=mask, **wanted)
        output = ch.attention(q, k, v, mask=mask)
        given = [a.clone().requires_grad_() for a in (q, k, v)]
        ch.attention(*given, mask=mask).backward(dout)
        for what in (*SEEN, *(BY_KEY if one else ())):
            close(getattr(found, what), getattr(right, what), getattr(near, what), what)
        close(output, right.output, near.output, "output")
        if one:
            close(found.top.weights, right.top.weights, near.top.weights, "top")
            named = ch.observe(q.double(), k.double(), v.double(), mask=mask, kernel="dense", weights=True).weights
            seen = torch.where(found.top.indices < 0, 0.0, named.gather(-1, found.top.indices.clamp_min(0)))
            close(seen.float(), right.top.weights, near.top.weights, "the keys named")
        for what, got, exact, plain in zip(("dq", "dk", "dv"), given, *gradients, strict=True):
            assert (got.grad.double() - exact).norm() <= 1e-2 * exact.norm() + (plain - exact).norm(), what
    assert ran == [way] * 9
    if one:
        removal_within(None, q, k, v, mask, last=True)
        assert ran == [way] * 10
