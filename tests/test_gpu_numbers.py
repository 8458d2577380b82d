"""Numbers that hurt, at sizes that Hopper's own kernels take: what is not finite, and weights that are nearly all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from budget import within
from on_gpu import MARKS, OWN, by, poison

import clearhead as ch

pytestmark = MARKS
# 60 and 120 are given zeros as features, for those kernels to take them
KINDS = [(dtype, width) for dtype in ("float16", "bfloat16") for width in (60, 64, 120, 128)]
MASKS = {"causal": ch.causal(), "window": ch.window(100, 30), "lengths": ch.lengths(613)}


def given(dtype: str, width: int, queries: int = 500, keys: int = 777) -> list[torch.Tensor]:
    shapes = ((2, 4, queries, width), (2, 2, keys, width), (2, 2, keys, width))
    return [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for shape in shapes]


def spoiled(kernel: str, dtype: str, width: int, name: str) -> None:
    """A value that is not finite spoils the outputs of the queries that see it, by feature, and no others."""
    q, k, v = given(dtype, width)
    for row, head, key, feature, number in ((0, 0, 300, 5, "nan"), (1, 1, 612, 7, "inf"), (1, 0, 776, 0, "-inf")):
        v[row, head, key, feature] = float(number)
    poison(4)
    got = by(kernel, ch.observe, q, k, v, mask=MASKS[name])
    again = by(kernel, ch.attention, q, k, v, mask=MASKS[name])
    assert torch.equal(got.output.isfinite(), again.isfinite())
    exact, plain = (ch.observe(*(x.to(p) for x in (q, k, v)), mask=MASKS[name], kernel="dense") for p in PRECISE)
    fine = exact.output.isfinite()
    assert torch.equal(got.output.isfinite(), fine), f"{int((got.output.isfinite() != fine).sum())} are spoiled or not"
    assert 0 < int((~fine).sum()) < fine.numel() // 20
    for mine in (got.output, again):
        within(mine[fine].cpu(), exact.output[fine].cpu(), plain.output[fine].to(mine.dtype).cpu(), k.shape[-2])
    for what in ("lse", "entropy"):
        within(*(getattr(x, what).cpu() for x in (got, exact, plain)), k.shape[-2], what)


PRECISE = (torch.float64, torch.float32)


def saturated(kernel: str, dtype: str, width: int, name: str) -> None:
    """Every query has nearly all of its weight on one key: what is left of a score's gradient is small."""
    q, k, v = given(dtype, width)
    q += 1.0
    k[..., 100::200, :] += 24.0 / width**0.5
    v += 8.0
    dout = torch.randn((*q.shape[:-1], width), device="cuda", dtype=q.dtype)
    options: dict[str, Any] = {"mask": MASKS[name]}
    poison(4)
    mine = by(kernel, ch.gradients, q, k, v, dout, **options)
    exact, plain = (ch.gradients(*(x.to(p) for x in (q, k, v, dout)), **options, kernel="dense") for p in PRECISE)
    for what, got, true, near in zip(("dq", "dk", "dv"), mine, exact, plain, strict=True):
        within(got.cpu(), true.cpu(), near.to(got.dtype).cpu(), k.shape[-2], what)


@pytest.mark.parametrize(("dtype", "width"), KINDS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kernel", OWN)
def test_what_is_not_finite_spoils_only_who_sees_it(kernel: str, dtype: str, width: int, name: str) -> None:
    spoiled(kernel, dtype, width, name)


@pytest.mark.parametrize(("dtype", "width"), KINDS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kernel", OWN)
def test_gradients_where_one_weight_is_nearly_all(kernel: str, dtype: str, width: int, name: str) -> None:
    saturated(kernel, dtype, width, name)
