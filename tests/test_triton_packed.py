"""Recorded calls that are played into one piece of memory: the same bits, and the largest numbers beside them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from interpreted import MARKS

import clearhead as ch

pytestmark = MARKS
WANTS = [{}, {"top": 3, "received": True}, {"map": (3, 2), "top": 2, "received_max": True, "removal": 4}]


def given(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Two query heads that share their keys."""
    return [torch.randn(1, n, heads, 16).to(dtype).transpose(1, 2) for n, heads in ((queries, 2), (keys, 1), (keys, 1))]


def recorded(queries: int, keys: int, **asked: Any) -> Any:
    """What plays calls of this kind."""
    from clearhead.core.observations import want
    from clearhead.core.problem import pose
    from clearhead.kernels.triton import launch

    for _ in range(2):
        q, k, v = given(queries, keys)
        problem = pose(q, k, v, mask=ch.causal(), want=lambda grid: want(grid, **asked))
        launch.run(problem)
    return problem.found["again"].packed(q, k, v)


@pytest.mark.parametrize("asked", WANTS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 9), (18, 18)], ids=str)
def test_what_is_packed_is_what_is_observed(asked: dict[str, Any], sizes: tuple[int, int]) -> None:
    packed = recorded(*sizes, **asked)
    for _ in range(2):
        q, k, v = given(*sizes)
        output, kept = packed.play(q, k, v)
        right = ch.observe(q, k, v, mask=ch.causal(), kernel="triton", **asked)
        assert torch.equal(output, right.output)
        assert kept.dtype == torch.uint8
        assert {"lse", "max_score", "entropy"} < set(packed.arrays) or not asked
        for name, array in packed.arrays.items():
            theirs: Any = right
            for part in name.split("."):
                theirs = getattr(theirs, part)
            mine = array.of(kept)
            assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype), name
            assert torch.equal(mine, theirs), name
        found = packed.largest(packed.norms.of(kept))
        assert found == tuple(float(one.abs().max()) for one in (q, k, v))
    starts = sorted((array.start, array.dtype == torch.int64) for array in packed.arrays.values())
    assert [whole for _, whole in starts] == sorted(whole for _, whole in starts), "whole numbers come last"


def test_pieces_of_two_calls_do_not_meet() -> None:
    packed = recorded(18, 18, received=True)
    calls = [given(18, 18) for _ in range(3)]
    found = [packed.play(*one) for one in calls]
    for one, (output, kept) in zip(calls, found, strict=True):
        right = ch.observe(*one, mask=ch.causal(), kernel="triton", received=True)
        assert torch.equal(output, right.output)
        assert torch.equal(packed.arrays["received"].of(kept), right.received)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_largest_number_is_found_wherever_it_is_and_nothing_hides_one_that_is_none(dtype: torch.dtype) -> None:
    from clearhead.kernels.gpu.launcher import Launcher
    from clearhead.kernels.gpu.packed import look_through, programs

    shapes = [(2, 3, 70, 16), (2, 1, 131, 16), (2, 1, 131, 8)]
    tensors = [torch.randn(b, n, h, d).to(dtype).transpose(1, 2) for b, h, n, d in shapes]
    for odd in (-30.0, math.inf, -math.inf, math.nan, 0.0):
        for spoiled in range(3):
            spot = tuple(size - 1 for size in tensors[spoiled].shape)
            before = tensors[spoiled][spot].clone()
            tensors[spoiled][spot] = odd
            parts = look_through(*tensors, Launcher()).split([programs(one) for one in tensors])
            found = [float(part.view(torch.float32)[part.argmax()]) for part in parts]
            for one, mine in zip(tensors, found, strict=True):
                right = float(one.float().abs().max())
                assert mine == right or (math.isnan(mine) and math.isnan(right))
            tensors[spoiled][spot] = before


def test_what_cannot_be_packed_is_not() -> None:
    from clearhead.kernels.gpu.packed import norms_of

    q, k, v = given(3, 3)
    for others in ((q.double(), k.double(), v.double()), (q, k.half(), v), (q[0], k[0], v[0])):
        with pytest.raises(ValueError, match="not looked through"):
            norms_of(*others)
