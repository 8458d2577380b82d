"""GPU calls that are made again: what is remembered of a call, when it is forgotten, and how a kernel is launched."""

from __future__ import annotations

import gc
import weakref
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
KEYS = 600  # so many ids are compared with a copy; fewer would be a part of the key


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> object:
    from clearhead.kernels.triton import call

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(call, "_calls", call.Remembered())
    with np.errstate(all="ignore"):
        yield


def arrays(keys: int = KEYS) -> list[torch.Tensor]:
    return [torch.randn((1, 1, n, 16)) for n in (1, keys, keys)]


def remembered() -> Any:
    from clearhead.kernels.triton import call

    return call._calls.known


def agrees(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    mine, plain = (ch.attention(q, k, v, **options, kernel=name) for name in ("triton", "dense"))
    torch.testing.assert_close(mine, plain)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_mask_that_was_written_to_is_noticed(as_tensor: bool) -> None:
    q, k, v = arrays()
    ids = torch.zeros(KEYS, dtype=torch.int64) if as_tensor else np.zeros(KEYS, dtype=np.int64)
    mask = ch.documents(ids)
    agrees(q, k, v, mask=mask)
    agrees(q, k, v, mask=mask)
    assert len(remembered()) == 1
    ids[: KEYS // 2] = 1
    agrees(q, k, v, mask=mask)
    ids[:] = 0
    agrees(q, k, v, mask=mask & ch.causal())


def test_numbers_of_a_small_mask_are_noticed_too() -> None:
    q, k, v = arrays(40)
    seen = np.array([7])
    mask, bias = ch.lengths(seen), ch.alibi(1)
    agrees(q, k, v, mask=mask, bias=bias)
    seen[0] = 30
    agrees(q, k, v, mask=mask, bias=bias)
    bias.slopes[0] = 3.0
    agrees(q, k, v, mask=mask, bias=bias)


def test_sinks_may_be_strided_or_of_numpy() -> None:
    q, k, v = (torch.randn((1, 3, n, 16)) for n in (2, 9, 9))
    sinks = torch.randn(3, 2)[:, 0]
    for given in (sinks, sinks.numpy()):
        mine = ch.attention(q, k, v, sinks=given, kernel="triton")
        torch.testing.assert_close(mine, ch.attention(q, k, v, sinks=sinks, kernel="dense"))


def test_an_array_as_mask_or_bias_is_never_remembered() -> None:
    q, k, v = arrays(40)
    allowed, added = torch.ones((1, 40), dtype=torch.bool), torch.zeros((1, 40))
    for options in ({"mask": allowed}, {"mask": ~(ch.causal() & allowed)}, {"bias": added}, {"dropout": (0.5, 1)}):
        agrees(q, k, v, **options)
        allowed[0, 3:9], added[0, 5] = False, 2.0
        agrees(q, k, v, **options)
    assert not remembered()


def test_calls_of_one_kind_are_prepared_once_and_others_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.triton import call

    prepared = []
    original = call.Call.__init__

    def counted(self: Any, problem: Any) -> None:
        prepared.append(problem)
        original(self, problem)

    monkeypatch.setattr(call.Call, "__init__", counted)
    q, k, v = arrays(40)
    for _ in range(2):
        agrees(q, k, v, mask=ch.causal() & ch.window(9))  # a value: made anew, and known
    assert len(prepared) == 1
    for n, options in enumerate(
        ({"scale": 0.3}, {"softcap": 2.0}, {"mask": ch.window(8)}, {"sinks": torch.ones(1)}), 2
    ):
        agrees(q, k, v, **options)
        assert len(prepared) == n
    agrees(q, k.transpose(-1, -2).contiguous().transpose(-1, -2), v)  # other strides
    apart = torch.randn(k.numel() + 1)[1:].view(k.shape)  # memory that starts at no multiple of 16 bytes
    agrees(q, apart, v)
    assert len(prepared) == 7


def test_neither_tensors_nor_masks_are_kept_alive() -> None:
    q, k, v = arrays()
    mask = ch.documents(np.zeros(KEYS, dtype=np.int64))
    alive = [weakref.ref(x) for x in (q, k, v, mask, mask.keys)]
    sinks = torch.ones(1)
    alive.append(weakref.ref(sinks))
    agrees(q, k, v, mask=mask, sinks=sinks)
    assert len(remembered()) == 1
    del q, k, v, mask, sinks
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6
    agrees(*arrays(8))
    assert len(remembered()) == 1  # what was prepared for a mask goes with it


def test_only_the_last_kinds_are_remembered() -> None:
    from clearhead.kernels.triton.kinds import MOST, Kind, Remembered
    from clearhead.problem import pose

    known = Remembered()
    q, k, v = arrays(8)
    for n in range(2 * MOST + 1):
        known.keep(Kind(pose(q, k, v, scale=1.0 + n)), n)
    assert len(known.known) == 1
    assert known.get(Kind(pose(q, k, v, scale=1.0 + 2 * MOST))) == 2 * MOST


class Parameter:
    """As much of a kernel's parameter as is asked for."""

    def __init__(self, is_constexpr: bool) -> None:
        self.is_constexpr = is_constexpr


class Kernel:
    """A kernel that notes how it is found and how it is run."""

    def __init__(self) -> None:
        from triton.compiler import CompiledKernel

        self.found: list[Any] = []
        self.ran: list[Any] = []
        self.params = [Parameter(False), Parameter(False), Parameter(True)]
        self.compiled = object.__new__(CompiledKernel)
        self.compiled._run = lambda *args: self.ran.append(args)
        self.compiled.function, self.compiled.packed_metadata = "function", "metadata"

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.found.append((grid, args, options))
            return self.compiled

        return launch


class Driver:
    """A driver with one device and one stream."""

    def get_current_device(self) -> int:
        return 3

    def get_current_stream(self, device: int) -> tuple[str, int]:
        return ("stream of", device)


def test_a_kernel_is_found_once_and_then_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs
    from triton.runtime import driver

    from clearhead.kernels.triton import launches

    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(launches, "DIRECT", True)
    kernel, launch = Kernel(), launches.Launches()
    for n in range(3):
        launch("name", kernel, (5, 6), f"tensor {n}", n, BLOCK=16)
    assert kernel.found == [((5, 6), ("tensor 0", 0), {"BLOCK": 16})]
    start = (5, 6, 1, ("stream of", 3), "function", "metadata", None, None, None)
    assert kernel.ran == [(*start, "tensor 1", 1, None), (*start, "tensor 2", 2, None)]
    launch("another name", kernel, (5,), "tensor", 0, BLOCK=16)
    assert len(kernel.found) == 2
    chain = knobs.HookChain()
    chain.add(print)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", chain)
    launch("name", kernel, (5, 6), "tensor", 0, BLOCK=16)  # a profiler is told of each launch by Triton
    assert len(kernel.found) == 3


def test_another_triton_is_asked_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.triton import launches

    monkeypatch.setattr(launches, "DIRECT", False)
    kernel, launch = Kernel(), launches.Launches()
    for n in range(2):
        launch("name", kernel, (1,), "tensor", n, BLOCK=16)
    assert len(kernel.found) == 2
    assert not kernel.ran


def test_room_is_what_torch_empty_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.triton import room

    for shape in ((2, 3, 5), (0, 4), (1,), torch.Size((3, 1, 2)), ()):
        plain = torch.empty(shape, dtype=torch.bfloat16)
        for quick in (room.QUICK, {}):
            monkeypatch.setattr(room, "QUICK", quick)
            made = room.room(shape, torch.bfloat16, torch.device("cpu"))
            assert (made.shape, made.stride(), made.dtype) == (plain.shape, plain.stride(), plain.dtype)
