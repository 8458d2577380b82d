"""watch: calls, choices and models that are out of the ordinary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clearhead as ch


class Direct(nn.Module):
    """One call, with whatever it is given."""

    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_lies_in_memory_as_pytorch_lays_it(dtype):
    x = torch.randn(2, 6, 3 * 32).to(dtype)
    model = Direct()
    for part in (x[..., :32].contiguous(), x[..., :32]):  # of its own, and a part of queries, keys and values in one
        apart = part.unflatten(-1, (4, 8)).transpose(1, 2)
        for q in (apart, apart.contiguous(), apart.mT.contiguous().mT, apart[:, :, :1]):
            plain = model(q, apart, apart)
            with ch.watch(model):
                got = model(q, apart, apart)
            assert got.stride() == plain.stride()
    with ch.watch(model):
        assert model(apart, apart, apart).transpose(1, 2).view(2, 6, 32).shape == (2, 6, 32), "as many models do"
