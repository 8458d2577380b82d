"""Calls that are recorded and played give the same bits as those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import INSTALLED

import clearhead as ch

pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and kernels are not interpreted"),
]

SHAPE = (1, 2, 18, 16)
DOCUMENTS = ch.documents(np.arange(18) // 7)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    forget()
    with np.errstate(all="ignore"):
        yield
    forget()


def forget() -> None:
    from clearhead.kernels.triton import call

    call._calls, call._families = call.Remembered(), call.Latest()


def tapes() -> list[Any]:
    """What is known of calls, by what they did: a tape, or how often it was tried to make one."""
    from clearhead.kernels.triton import call

    return [tape for _, last in call._calls.known.values() for tape in last["tapes"].values()]


def three(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: torch.randn((3, *shape)).unbind(0)  # in one piece of memory


def apart(q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    return lambda: [torch.randn(shape).to(dtype) for shape in (q, k, k)]


def packed() -> tuple[torch.Tensor, ...]:
    """As a projection to queries, keys and values at once gives them."""
    return torch.randn((1, 18, 3, 2, 16)).transpose(1, 3).unbind(2)


PROBLEMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (apart(SHAPE, SHAPE), {}),
    "in one piece of memory": (three(*SHAPE), {"mask": ch.causal()}),
    "packed": (packed, {"mask": ch.causal(align="start")}),
    "one head": (three(18, 16), {"softcap": 3.0}),
    "grouped, with copies": (apart((1, 2, 18, 13), (1, 1, 18, 13), torch.bfloat16), {}),
    "batches that broadcast": (apart((2, 1, 2, 9, 16), (1, 3, 1, 5, 16)), {}),
    "one query": (apart((1, 2, 1, 16), SHAPE), {"mask": ch.causal()}),
    "documents, sinks": (three(*SHAPE), {"mask": DOCUMENTS, "sinks": torch.tensor([0.5, -1.0])}),
    "a slope": (three(*SHAPE), {"bias": ch.alibi(2)}),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_played_is_what_is_computed(name: str) -> None:
    new, options = PROBLEMS[name]
    for _ in range(3):  # seen, recorded, played
        q, k, v = new()
        output = ch.attention(q, k, v, **options, kernel="triton")
        dout = torch.randn_like(output)
        found = (output, *ch.gradients(q, k, v, dout, **options, kernel="triton"))
    copies, sinks = name == "grouped, with copies", "sinks" in options
    assert [type(tape) is int for tape in tapes()] == [copies, copies or sinks or "batches" in name]
    forget()
    output = ch.attention(q, k, v, **options, kernel="triton")
    for mine, right in zip(found, (output, *ch.gradients(q, k, v, dout, **options, kernel="triton")), strict=True):
        assert torch.equal(mine, right)


def test_inputs_that_are_one_tensor_are_told_apart_later() -> None:
    x = torch.randn(SHAPE)
    for _ in range(3):
        ch.attention(x, x, x, kernel="triton")
    q, k, v = torch.randn((3, *SHAPE)).unbind(0)
    torch.testing.assert_close(ch.attention(q, k, v, kernel="triton"), ch.attention(q, k, v, kernel="dense"))


def test_results_are_new_each_time() -> None:
    q, k, v = torch.randn((3, *SHAPE)).unbind(0)
    found = [ch.attention(q, k, v, kernel="triton") for _ in range(4)]
    assert len({output.data_ptr() for output in found}) == 4
    assert any(not isinstance(tape, int) for tape in tapes())


def test_what_pytorch_computes_in_between_is_not_played() -> None:
    q, k, v = torch.randn((3, *SHAPE)).unbind(0)
    for n in range(3):
        seen, right = (
            ch.observe(q + n, k, v, kernel=name, received=True, map=(3, 2)) for name in ("triton", "dense")
        )  # fmt: skip
        torch.testing.assert_close(seen.received, right.received)
        torch.testing.assert_close(seen.map, right.map)
    assert all(isinstance(tape, int) for tape in tapes())
