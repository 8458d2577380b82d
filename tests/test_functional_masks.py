"""Masks from outside of torch.func and of torch.compile: their numbers are there, and nothing inside can reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import clearhead as ch

REAL = torch.tensor([[1, 1, 0], [1, 0, 1]])
SQUARE = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
ALLOWED, HIDDEN = SQUARE.bool(), 1 - SQUARE  # made here: what torch.func makes it wraps
MASKS: dict[str, Callable[[], Any]] = {
    "padding": lambda: ch.padding(REAL),
    "array": lambda: ALLOWED,
    "where": lambda: ch.where(ALLOWED),
    "lets": lambda: ch.lets(SQUARE),
    "hides": lambda: ch.hides(HIDDEN),
}


@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_functions(name: str) -> None:
    q = torch.randn(2, 1, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(q: torch.Tensor) -> torch.Tensor:
        return ch.attention(q, q, q, mask=MASKS[name]()).square().sum()

    leaf = q.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(q), leaf.grad)
    torch.testing.assert_close(torch.func.jacrev(loss)(q), leaf.grad)


@pytest.mark.parametrize(
    "mask",
    [
        lambda: ch.lets(SQUARE.numpy()),
        lambda: ch.hides(HIDDEN.numpy()),
        lambda: ch.where(ALLOWED.numpy()),
        lambda: ALLOWED.numpy(),
        lambda: ch.padding([[1, 1, 0], [1, 0, 1]]),
        lambda: ch.padding(REAL.numpy()),
    ],
)
def test_arrays_of_numpy_in_what_is_compiled(mask: Callable[[], Any]) -> None:
    q = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(0))

    def attend(q: torch.Tensor) -> torch.Tensor:
        return ch.attention(q, q, q, mask=mask())

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="eager")(q), attend(q))
