"""Sizes that are known only at run time: what PyTorch exports of its own attention, it exports of this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
import clearhead.nn

Q, K, V = (torch.randn(4, 4, n, 8, generator=torch.Generator().manual_seed(n)) for n in (5, 7, 7))
SOME, OTHERS = torch.tensor([True, False, True, True]), torch.tensor([False, True, False, False])


class Model(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        """Attention of the rows that are chosen, as many as there are."""
        rows = rows.nonzero()[:, 0]
        mask = (torch.arange(7) <= rows[:, None] + 3)[:, None, None, :]
        return self.call(q[rows], k[rows], v[rows], mask)


def theirs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


CALLS: dict[str, Callable[..., Tensor]] = {
    "nothing": lambda q, k, v, mask: ch.attention(q, k, v),
    "array": lambda q, k, v, mask: ch.attention(q, k, v, mask=mask),
    "expanded": lambda q, k, v, mask: ch.attention(q, k, v, mask=mask.expand(-1, 4, 5, 7)),
    "tree": lambda q, k, v, mask: ch.attention(q, k, v, mask=ch.where(mask) & ch.causal()),
    "lengths": lambda q, k, v, mask: ch.attention(q, k, v, mask=ch.lengths(mask.sum((-1, -2, -3)))),
    "offset": lambda q, k, v, mask: ch.attention(q, k, v, mask=ch.causal(offset=mask.sum((-1, -2, -3)))),
    "bias": lambda q, k, v, mask: ch.attention(q, k, v, bias=torch.where(mask, 0.0, -1.0)),
    "shared keys": lambda q, k, v, mask: ch.attention(q, k[:, :2], v[:, :2], mask=mask),
    "one row of keys": lambda q, k, v, mask: ch.attention(q, K[:1], V[:1], mask=mask),
    "sdpa": lambda *x: clearhead.nn.functional.scaled_dot_product_attention(*x),
    "float sdpa": lambda q, k, v, mask: clearhead.nn.functional.scaled_dot_product_attention(
        q, k, v, torch.where(mask, 0.0, -1.0)
    ),
}


def exported(call: Callable[..., Tensor], strict: bool) -> Any:
    torch._dynamo.reset()
    return torch.export.export(Model(call), (Q, K, V, SOME), strict=strict).module()


# to be strict is to be traced by PyTorch's compiler, which `test_ops.py` has trace every mask: here, one of each kind
STRICT = ("array", "tree", "lengths", "sdpa")
WAYS = [(name, strict) for name in CALLS for strict in (False, True) if not strict or name in STRICT]


@pytest.mark.parametrize(("name", "strict"), WAYS)
def test_a_batch_that_depends_on_data_is_exported(name: str, strict: bool) -> None:
    program = exported(CALLS[name], strict)
    for rows in (SOME, OTHERS):  # three rows, and one
        torch.testing.assert_close(program(Q, K, V, rows), Model(CALLS[name])(Q, K, V, rows))


def test_pytorch_exports_it_too() -> None:
    program = exported(theirs, False)
    torch.testing.assert_close(program(Q, K, V, OTHERS), Model(CALLS["array"])(Q, K, V, OTHERS))
