"""FlopCounterMode counts attention: as many as `plan` says and as PyTorch counts for its own, eager calls included."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch

SHAPES = {
    "plain": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    "grouped": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)),
    "one head": ((5, 8), (7, 8), (7, 6)),
    "broadcast": ((3, 1, 4, 5, 8), (2, 4, 7, 8), (1, 4, 7, 6)),
    "empty": ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
}


def counted(call: Any, *tensors: torch.Tensor, backward: bool = False) -> int:
    with FlopCounterMode(display=False) as counter:
        output = call(*tensors)
        if backward:
            output.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kernel", [None, "dense", "tiled"])
@pytest.mark.parametrize("name", SHAPES)
def test_as_many_as_plan_says(name: str, kernel: str | None) -> None:
    q, k, v = (torch.randn(shape) for shape in SHAPES[name])
    assert counted(lambda *x: ch.attention(*x, kernel=kernel), q, k, v) == ch.plan(q, k, v).flops


@pytest.mark.parametrize("name", ["plain", "grouped"])
def test_as_many_as_pytorch_counts(name: str) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in SHAPES[name])
    shapes = [t.shape for t in (q, k, v)]
    forward = flop_counter.sdpa_flop_count(*shapes)
    assert counted(lambda *x: ch.attention(*x, mask=ch.causal()), q, k, v) == forward
    both = forward + flop_counter.sdpa_backward_flop_count((2, 4, 5, 6), *shapes)
    assert counted(lambda *x: ch.attention(*x, mask=ch.causal()), q, k, v, backward=True) == both


def test_a_counter_that_was_open_before_the_first_call_counts() -> None:
    code = (
        "import torch, clearhead as ch\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "q = torch.randn(3, 5, 8)\n"
        "with FlopCounterMode(display=False) as counter: ch.attention(q, q, q)\n"
        "print(counter.get_total_flops())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) == 2 * 3 * 5 * 5 * 16
