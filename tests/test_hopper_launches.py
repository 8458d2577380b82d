"""What a call launches on Hopper: each launch takes the host microseconds, more than a short kernel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import MARKS

import clearhead as ch

pytestmark = MARKS
TOP = {"received": True, "top": 8}
# options of a call, what is observed of it, and what is launched
LAUNCHED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "plain": ({}, None, "attend"),
    "causal": ({"mask": ch.causal()}, None, "attend repair"),
    "entropy": ({}, {}, "attend"),
    "entropy, causal": ({"mask": ch.causal()}, {}, "attend repair"),
    "received": ({}, {"received": True}, "attend lay_out by_key"),
    "received and top": ({}, TOP, "attend lay_out by_key choose search"),
    "received and top, causal": (
        {"mask": ch.causal()},
        TOP,
        "attend lay_out by_key choose mend",
    ),
}


def launches(options: dict[str, Any], asked: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """The kernels that a call launches, in order, each with its last argument; none is run."""
    from clearhead.core.observations import want
    from clearhead.core.problem import pose
    from clearhead.kernels.gpu.call import Call
    from clearhead.kernels.gpu.launcher import Launcher
    from clearhead.kernels.hopper.launch import forward_and_look

    found: list[tuple[str, Any]] = []

    class Counted(Launcher):
        def __call__(self, name: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            found.append((kernel.fn.__name__, args[-1] if args else None))

        def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            found.append(("zeros", None))
            return super().zeros(shape, dtype, device)

    q, k, v = (torch.zeros(1, 2, 256, 128, dtype=torch.bfloat16) for _ in range(3))
    call = Call.of(pose(q, k, v, **options, want=None if asked is None else lambda grid: want(grid, **asked)))
    call.launch = Counted()
    forward_and_look(call)
    return found


@pytest.mark.parametrize("name", LAUNCHED)
def test_launches(name: str) -> None:
    options, asked, right = LAUNCHED[name]
    assert " ".join(kernel for kernel, _ in launches(options, asked)) == right


@pytest.mark.parametrize("order", ["attended first", "observed first"])
def test_what_is_observed_is_cut_up_in_its_own_way_whichever_came_first(order: str) -> None:
    from clearhead.kernels.hopper.schedule import LISTED, OBSERVED

    assert LISTED[128] != OBSERVED[128]
    mask = ch.documents([[3, 1, 2][i // 96] + 4 * (order == "observed first") for i in range(256)])
    calls = [(None, LISTED), (TOP, OBSERVED)]
    for asked, configs in calls if order == "attended first" else reversed(calls):
        config = dict(launches({"mask": mask}, asked))["attend"]
        assert config == configs[128], asked
