"""What outputs would be without a key, on a GPU: products with outputs as they are rounded, where digits are few."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from budget import ALONE
from interpreted import MARKS

import clearhead as ch
from clearhead.kernels.gpu import tuning

pytestmark = MARKS
HEADS, T, S, D, W = 2, 37, 41, 16, 24
EPS = float(np.finfo(np.float32).eps)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FEW", 0)
    some = ("forward", "listed", "by_key", "more_by_key")
    monkeypatch.setattr(tuning, "FIXED", dict.fromkeys(some, tuning.Blocks(16, 16)))


def room(weights: torch.Tensor, v: torch.Tensor, output: torch.Tensor, eps: float) -> torch.Tensor:
    """How far off the change of each pair may be by an output that is off by δ: (w / (1 − w))² (2 ‖v − o‖ ‖δ‖ + ‖δ‖²).

    Weights are rounded before they are summed with the values, all but the largest, which is 1 before it is divided.
    Then outputs are rounded, but where one weight is above a half.
    """
    lengths, whole = v.norm(dim=-1)[:, None, :], output.norm(dim=-1)[..., None]
    apart = (v[:, None, :, :] - output[:, :, None, :]).norm(dim=-1)
    summed = weights * lengths
    most = weights.argmax(dim=-1, keepdim=True)
    off = eps / 2 * (summed.sum(-1, keepdim=True) - summed.gather(-1, most))
    off = off + torch.where(weights > 0.5, 0.0, eps / 2 * whole)
    alone = 1 - weights < ALONE
    ratio = torch.where(alone, 1.0, weights / (1 - weights))
    return ratio**2 * (2 * torch.where(alone, whole, apart) * off + off**2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("common", [0.0, 64.0], ids=["values apart", "values that have much in common"])
@pytest.mark.parametrize("sharp", [1.0, 12.0], ids=["even weights", "many weights above a half"])
@pytest.mark.parametrize("last", [True, 11], ids=["all queries", "last queries"])
def test_rounded_outputs_cost_what_lies_along_the_difference(
    dtype: torch.dtype, common: float, sharp: float, last: bool | int
) -> None:
    """The error is that of a distance from an output that is rounded, and not that of its product with the value."""
    generator = torch.Generator().manual_seed(3)
    shapes = (HEADS, T, D), (HEADS, S, D), (HEADS, S, W)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    q, k, v = (a.to(dtype) for a in (q * sharp**0.5, k * sharp**0.5, v + common))
    mask = ch.window(20, 3)
    got = ch.observe(q, k, v, mask=mask, removal=last, received_max=True, kernel="triton")
    exact, plain = (
        ch.observe(q.to(kind), k.to(kind), v.to(kind), mask=mask, removal=last, weights=True, kernel="dense")
        for kind in (torch.float64, torch.float32)
    )
    counted = slice(None) if last is True else slice(T - last, None)
    by_key = room(exact.weights, v.double(), exact.output, torch.finfo(dtype).eps)[:, counted].sum(1)
    plainly = 2 * (plain.removal - exact.removal).abs().max() + S**0.5 * EPS * exact.removal.abs().max()
    assert (got.removal.double() - exact.removal).abs().le(by_key + plainly).all()
