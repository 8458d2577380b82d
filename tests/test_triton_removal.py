"""What outputs would be without a key, on a GPU: products with outputs as they are rounded, where digits are few."""

from __future__ import annotations

import pytest
import torch
from interpreted import MARKS
from on_gpu import removal_within

import clearhead as ch
from clearhead.kernels.gpu import tuning

pytestmark = MARKS
HEADS, T, S, D, W = 2, 37, 41, 16, 24


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FEW", 0)
    some = ("forward", "listed", "by_key", "more_by_key")
    monkeypatch.setattr(tuning, "FIXED", dict.fromkeys(some, tuning.Blocks(16, 16)))


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
    removal_within("triton", q, k, v, ch.window(20, 3), last)
