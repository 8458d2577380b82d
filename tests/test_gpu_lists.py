"""The second look under masks of any kind on a GPU: wide heads, long lists beside short ones, ties without end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from budget import within
from on_gpu import (  # noqa: F401  # one is a fixture that runs by itself
    MARKS,
    OWN,
    TIMES,
    first_of_the_largest,
    poison,
    poisoned,
    removal_within,
)

import clearhead as ch

pytestmark = MARKS
N = 1500  # blocks of keys that see some tiles of queries, and one that sees all of them
RNG = np.random.default_rng(5)
LISTED = {
    "Longformer": ch.window(60, 60) | ch.global_tokens(range(3)),
    "a global token in the middle": ch.window(60) | ch.global_tokens([777]),
    "blocks by head": ch.blocks(RNG.random((4, 24, 24)) < 0.1, 64) | ch.window(0),
    "unsorted documents": ch.documents(np.arange(N) // 100 * 7 % 15),
    "every eighth key": ch.dilated(8),
    "the last keys and every 32nd": ch.strided(32),
}
MASKS = {
    **LISTED,
    "none": None,
    "causal": ch.causal(),
    "causal from another place on": ch.causal(offset=-40),
    "window": ch.window(300),
}


def observed(q: torch.Tensor, k: torch.Tensor, mask: ch.Mask | None, kernel: str, **wanted: Any) -> ch.Observed:
    return ch.observe(q, k, k, mask=mask, kernel=kernel, **{"received": True, "top": 8, **wanted})


def by_formula(q: torch.Tensor, k: torch.Tensor, mask: ch.Mask | None, **wanted: Any) -> list[ch.Observed]:
    """The same in float64, and in float32 for the size of the error."""
    return [observed(q.to(kind), k.to(kind), mask, "dense", **wanted) for kind in (torch.float64, torch.float32)]


def held(found: ch.Observed, right: list[ch.Observed], top: bool = True) -> None:
    """What keys received, and the largest weights, within the error that `budget.py` derives; N terms are summed."""
    within(*(one.received.cpu() for one in (found, *right)), N, "received")
    if top:
        within(*(one.top.weights.cpu() for one in (found, *right)), N, "top")


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("received", [True, 400])
def test_what_keys_received_and_the_largest(kernel: str, width: int, name: str, received: bool | int) -> None:
    for _ in range(TIMES):
        q = torch.randn((2, 4, N, width), device="cuda", dtype=torch.bfloat16)
        k = torch.randn((2, 2, N, width), device="cuda", dtype=torch.bfloat16)
        poison(8)
        found = observed(q, k, MASKS[name], kernel, received=received)
    again = observed(q, k, MASKS[name], kernel, received=received)
    assert torch.equal(found.received, again.received), "every run gives the same bits"
    held(found, by_formula(q, k, MASKS[name], received=received))


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_ties_that_overflow_the_list(kernel: str, width: int, name: str) -> None:
    q = torch.randn((1, 4, N, width), device="cuda", dtype=torch.bfloat16)
    k = torch.randn((1, 4, 1, width), device="cuda", dtype=torch.bfloat16).expand(1, 4, N, width).contiguous()
    found, right = observed(q, k, MASKS[name], kernel), by_formula(q, k, MASKS[name], weights=True)
    assert torch.equal(found.top.indices, first_of_the_largest(right[0].weights, 8))
    held(found, right)


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("name", [*LISTED, "no mask", "causal", "window"])
def test_queries_that_do_not_count_may_be_nan(kernel: str, name: str) -> None:
    """What the last 200 queries gave each key, where one in ten of the others is NaN."""
    mask = {"no mask": None, "causal": ch.causal(), "window": ch.window(700)}.get(name, LISTED.get(name))
    q = torch.randn((1, 4, N, 64), device="cuda", dtype=torch.bfloat16)
    k = torch.randn((1, 4, N, 64), device="cuda", dtype=torch.bfloat16)
    right = by_formula(q, k, mask, received=200, top=None)
    q[:, :, : N - 200 : 10] = torch.nan
    for _ in range(TIMES):
        found = observed(q, k, mask, kernel, received=200, top=None)
    held(found, right, top=False)


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("sharp", [1.0, 12.0], ids=["even weights", "many weights above a half"])
@pytest.mark.parametrize("name", [*LISTED, "no mask", "causal", "window"])
@pytest.mark.parametrize("last", [True, 400])
def test_what_outputs_would_be_without_a_key(
    kernel: str, width: int, sharp: float, name: str, last: bool | int
) -> None:
    mask = {"no mask": None, "causal": ch.causal(), "window": ch.window(700)}.get(name, LISTED.get(name))
    for _ in range(TIMES):
        q = torch.randn((1, 4, N, width), device="cuda") * sharp**0.5
        k, v = (torch.randn((1, 2, N, width), device="cuda") for _ in range(2))
        poison(8)
        removal_within(kernel, *(a.bfloat16() for a in (q, k * sharp**0.5, v + 8.0)), mask, last)
