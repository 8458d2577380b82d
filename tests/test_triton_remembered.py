"""Calls on a GPU of a kind that was seen before: what was launched is launched again, and gradients flow through it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from interpreted import MARKS

import clearhead as ch
from clearhead.core.problem import pose

pytestmark = MARKS
MASK = ch.window(9, 3) | ch.global_tokens([2])


def tensors(seed: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn((1, heads, 40, 16), dtype=dtype).requires_grad_(grad) for heads in (4, 2, 2)]


def recorded(mask: Any, dtype: torch.dtype, *, learns: bool) -> Any:
    """A problem, run twice: what the second launched is taken down."""
    from clearhead.kernels.triton import triton

    for seed in range(2):
        problem = pose(*tensors(seed, dtype), mask=mask)
        problem = problem.to_be_differentiated() if learns else problem
        triton.run(problem)
    assert "recorded" in problem.found
    return problem


def trained(mask: Any, dtype: torch.dtype = torch.float32) -> Any:
    from clearhead.kernels.gpu import run
    from clearhead.kernels.triton import triton
    from clearhead.torch_bridge.trained import Trained

    problem = recorded(mask, dtype, learns=True)
    found = Trained.of(problem, triton, run.Learnt(*problem.found["recorded"]))
    assert found is not None
    return found


@pytest.mark.parametrize("mask", [None, ch.causal(), MASK], ids=["full", "causal", "union"])
def test_the_output_is_that_of_other_tensors(mask: Any) -> None:
    from clearhead.kernels.gpu import run

    again = run.Attended(*recorded(mask, torch.float32, learns=False).found["recorded"])
    for seed in (5, 6):
        q, k, v = tensors(seed)
        torch.testing.assert_close(again(q, k, v), ch.attention(q, k, v, mask=mask, kernel="dense"))


@pytest.mark.parametrize("mask", [None, MASK], ids=["full", "union"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_flow_and_are_played_from_the_third_on(mask: Any, dtype: torch.dtype) -> None:
    again = trained(mask, dtype)
    close = {"atol": 2e-3, "rtol": 2e-2} if dtype == torch.float16 else {"atol": 1e-5, "rtol": 1e-4}
    for seed in range(5):
        mine = tensors(10 + seed, dtype, grad=True)
        plain = [a.detach().double().requires_grad_() for a in mine]
        output = again(*mine)
        dout = torch.randn_like(output)
        output.backward(dout)
        exact = ch.attention(*plain, mask=mask, kernel="dense")
        exact.backward(dout.double())
        torch.testing.assert_close(output.double(), exact, **close)
        for one, other in zip(mine, plain, strict=True):
            assert one.grad is not None
            assert one.grad.dtype == dtype
            torch.testing.assert_close(one.grad.double(), other.grad, **close)
    assert len(again.learnt.backward) == 1


def test_gradients_that_lie_otherwise_are_their_own_kind() -> None:
    again = trained(MASK)
    for turned in (False, True, True, True, False):
        mine = tensors(3, grad=True)
        output = again(*mine)
        dout = torch.randn(output.shape) if not turned else torch.randn((1, 40, 4, 16)).transpose(1, 2)
        found = torch.autograd.grad(output, mine, dout)
        expected = torch.autograd.grad(ch.attention(*mine, mask=MASK, kernel="dense"), mine, dout)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_what_is_unusual_about_gradients_goes_the_way_of_other_calls() -> None:
    again = trained(MASK)
    for _ in range(3):  # until gradients are played
        mine = tensors(3, grad=True)
        again(*mine).sum().backward()
    mine = tensors(4, grad=True)
    output = again(*mine)
    many = torch.randn((3, *output.shape))
    found = torch.autograd.grad(output, mine, many, is_grads_batched=True)
    exact = torch.autograd.grad(ch.attention(*mine, mask=MASK, kernel="dense"), mine, many, is_grads_batched=True)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    [dq] = torch.autograd.grad(again(*mine).sum(), mine[:1], create_graph=True)
    with pytest.raises(ch.KernelRefused):
        dq.sum().backward()


def test_who_writes_to_what_is_kept_is_told() -> None:
    again = trained(MASK)
    mine = tensors(3, grad=True)
    output = again(*mine)
    with torch.no_grad():
        mine[0].mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        output.sum().backward()


def test_a_mask_whose_array_is_written_to_later_is_as_it_was() -> None:
    ids = np.arange(40) // 13
    mask = ch.documents(ids)
    again = trained(mask)
    as_it_was = ch.documents(ids.copy())
    ids[:] = 0
    for _ in range(4):
        mine = tensors(8, grad=True)
        found = torch.autograd.grad(again(*mine).sum(), mine)
        exact = torch.autograd.grad(ch.attention(*mine, mask=as_it_was, kernel="dense").sum(), mine)
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_mask_with_a_tensor_is_not_remembered() -> None:
    """Autograd sees who writes to it."""
    from clearhead.kernels.gpu import run
    from clearhead.kernels.triton import triton
    from clearhead.torch_bridge.trained import Trained

    problem = recorded(ch.documents(torch.arange(40) // 13), torch.float32, learns=True)
    assert Trained.of(problem, triton, run.Learnt(*problem.found["recorded"])) is None


def test_a_key_that_is_kept_has_arrays_of_its_own() -> None:
    from clearhead.kernels.keys import as_numbers, part_of, to_keep

    ids = np.arange(12)
    mask = ch.documents(ids) & ch.causal()
    kept = to_keep((part_of(mask, None, as_numbers), 3))
    assert kept == (part_of(mask, None, as_numbers), 3)
    assert hash(kept) == hash((part_of(mask, None, as_numbers), 3))
    ids[3] = 7
    assert kept != (part_of(mask, None, as_numbers), 3)


def test_the_oldest_kinds_make_way() -> None:
    from clearhead.kernels.keys import Numbers
    from clearhead.kernels.prepared import ATTENDED, FEW, FEWEST, remember_attended

    before = dict(ATTENDED)
    ATTENDED.clear()
    try:
        for number in range(3 * FEW):
            remember_attended((number,), number)
        assert list(ATTENDED.values()) == list(range(2 * FEW, 3 * FEW))
        for number in range(3 * FEWEST):  # masks with arrays, as many as there are batches: they hold a GPU's memory
            remember_attended((0, (Numbers(np.array([number])),)), -number)
        kept = list(ATTENDED.values())
        assert kept[-FEWEST:] == [-number for number in range(2 * FEWEST, 3 * FEWEST)]
        assert sum(number < 0 for number in kept) == FEWEST
    finally:
        ATTENDED.clear()
        ATTENDED.update(before)
