"""What the tests on a GPU share: when they run, memory that is poisoned, a problem of some length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from budget import ALONE

import clearhead as ch
from clearhead.kernels.hopper.accepts import unable

THERE = torch.cuda.is_available()
MARKS = [pytest.mark.gpu, pytest.mark.skipif(not THERE, reason="PyTorch has no CUDA device here")]

# the kernels of our own that run here
OWN = ("hopper", "triton") if THERE and unable(torch.device("cuda", 0)) is None else ("triton",)

TIMES = 3  # a call is made: the first is prepared, the second recorded, the third played


@pytest.fixture(autouse=True)
def poisoned() -> None:
    if THERE:
        poison()


def poison(count: int = 64) -> None:
    """Freed memory full of NaN, which results that are not written to would be made of."""
    for size in (2**10, 2**14, 2**18, 2**20):
        held = [torch.full((size,), float("nan"), device="cuda") for _ in range(count if size < 2**20 else 4)]
        del held


def options_of(name: str, heads: int, keys: int) -> dict[str, object]:
    return {
        "none": {},
        "causal": {"mask": ch.causal()},
        "window": {"mask": ch.window(100)},
        "documents": {"mask": ch.documents(np.arange(keys) // 300) & ch.causal()},
        "alibi": {"bias": ch.alibi(heads), "mask": ch.causal()},
        "softcap": {"softcap": 5.0},
    }[name]


def longer(
    dtype: str, width: int, name: str, queries: int = 777, keys: int = 1000, kernel: str = "triton", top: int = 3
) -> None:
    """Fresh numbers against `dense` in float64, and against it in float32 for the size of the error."""
    heads = 4
    options = options_of(name, heads, keys)
    for _ in range(TIMES):
        q = torch.randn((2, heads, queries, width), device="cuda", dtype=getattr(torch, dtype))
        k, v = (torch.randn((2, 2, keys, width), device="cuda", dtype=q.dtype) for _ in range(2))
        dout = torch.randn_like(q)
        poison(8)
        seen = ch.observe(q, k, v, **options, kernel=kernel, top=top, received=True, map=(8, 16))
        rows = ch.observe(q, k, v, **options, kernel=kernel, queries=[0, -1]).queries.weights
        mine = {"output": seen.output, "lse": seen.lse, "entropy": seen.entropy, "received": seen.received}
        mine |= {"mean": seen.map.mean, "max": seen.map.max, "top": seen.top.weights, "rows": rows}
        poison(8)
        mine |= dict(zip(("dq", "dk", "dv"), by(kernel, ch.gradients, q, k, v, dout, **options), strict=True))
    answers = []
    for precise in (torch.float64, torch.float32):
        a = [x.to(precise) for x in (q, k, v)]
        seen = ch.observe(*a, **options, kernel="dense", top=top, received=True, map=(8, 16), queries=[0, -1])
        found = {"output": seen.output, "lse": seen.lse, "entropy": seen.entropy, "received": seen.received}
        found |= {"mean": seen.map.mean, "max": seen.map.max, "top": seen.top.weights, "rows": seen.queries.weights}
        found |= dict(
            zip(("dq", "dk", "dv"), ch.gradients(*a, dout.to(precise), **options, kernel="dense"), strict=True)
        )
        answers.append(found)
    for what, got in mine.items():
        exact, plain = answers[0][what], answers[1][what].to(got.dtype)
        eps = torch.finfo(got.dtype).eps
        allowed = 2 * (plain.double() - exact).abs().max() + keys**0.5 * eps * exact.abs().max()
        off = (got.double() - exact).abs().max()
        assert off <= allowed, f"{what}: off by {float(off):.3g}, allowed {float(allowed):.3g}"


def removal_within(
    kernel: str | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: ch.Mask | None, last: bool | int
) -> None:
    """What outputs would change by without a key, against `dense`, in half precision: off by what outputs are."""
    asked = {"mask": mask, "removal": last}
    got = ch.observe(q, k, v, **asked, received_max=True, kernel=kernel)
    exact, plain = (
        ch.observe(*(a.to(kind) for a in (q, k, v)), **asked, weights=True, kernel="dense")
        for kind in (torch.float64, torch.float32)
    )
    queries, keys = exact.weights.shape[-2:]
    values = v.double().repeat_interleave(q.shape[-3] // v.shape[-3], dim=-3)
    counted = slice(None) if last is True else slice(queries - last, None)
    room = removal_room(exact.weights, values, exact.output, torch.finfo(q.dtype).eps)[..., counted, :].sum(-2)
    plainly = 2 * (plain.removal - exact.removal).abs().max()
    plainly += max(queries, keys) ** 0.5 * torch.finfo(torch.float32).eps * exact.removal.abs().max()
    off = (got.removal.double() - exact.removal).abs() - room - plainly
    assert off.max() <= 0, f"removal: off by {float(off.max()):.3g} more than allowed"


def removal_room(weights: torch.Tensor, v: torch.Tensor, output: torch.Tensor, eps: float) -> torch.Tensor:
    """How far off the change of each pair may be by an output that is off by δ: (w / (1 − w))² (2 ‖v − o‖ ‖δ‖ + ‖δ‖²).

    Weights are rounded before they are summed with the values, all but the largest, which is 1 before it is divided.
    Then outputs are rounded, but where one weight is above a half. Of 1 − w float32 has so many digits: where it is
    2⁻¹² but for those, ‖o‖² may count or not.
    """
    lengths, whole = v.norm(dim=-1)[..., None, :], output.norm(dim=-1)[..., None]
    apart = torch.cdist(output, v)
    summed = weights * lengths
    off = eps / 2 * (summed.sum(-1, keepdim=True) - summed.gather(-1, weights.argmax(dim=-1, keepdim=True)))
    off = off + torch.where(weights > 0.5, 0.0, eps / 2 * whole)
    alone = 1 - weights < ALONE
    ratio = torch.where(alone, 1.0, weights / (1 - weights))
    room = ratio**2 * (2 * torch.where(alone, whole, apart) * off + off**2)
    either = (1 - weights - ALONE).abs() <= 4 * torch.finfo(torch.float32).eps
    return torch.where(either, room + torch.maximum((weights / ALONE * apart) ** 2, whole**2), room)


def first_of_the_largest(weights: torch.Tensor, top: int) -> torch.Tensor:
    """The keys of the largest weights, of those that are equal but for rounding the first; −1 where there are none."""
    order = torch.sort(weights.double().mul(1e9).round(), dim=-1, descending=True, stable=True).indices[..., :top]
    return torch.where(weights.gather(-1, order) > 0, order, -1)


def by(kernel: str, verb: Callable[..., Any], *arrays: torch.Tensor, **options: Any) -> Any:
    """What a verb gives with a kernel of our own, or where it refuses with the portable one."""
    try:
        return verb(*arrays, **options, kernel=kernel)
    except ch.KernelRefused:
        return verb(*arrays, **options, kernel="triton")


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
