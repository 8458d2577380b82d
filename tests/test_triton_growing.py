"""GPU calls of sizes never seen before: what they take over from others, and how their kernels are found."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from interpreted import MARKS

import clearhead as ch
from clearhead.core.problem import pose

pytestmark = MARKS
MASKS = {
    "no mask": None,
    "causal": ch.causal(),
    "window": ch.window(5),
    "both": ch.causal() & ch.window(3, align="start"),
}
# strides of a row, a feature and a head; where memory starts; features: some are taken as they are, some are not
STRIDES = [
    (32, 1, 32, 0, 32), (40, 1, 40, 0, 32), (32, 1, 33, 0, 32), (32, 1, 32, 1, 32), (0, 1, 64, 0, 32),
    (64, 1, 0, 0, 32), (32, 1, 32, 0, 64), (32, 1, 32, 0, 24), (49, 1, 64, 0, 32), (32, 17, 32, 0, 32),
]  # fmt: skip


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The problems that something was prepared for from the beginning."""
    from clearhead.kernels.gpu import call

    problems: list[Any] = []
    original = call.Call.__init__

    def counted(self: Any, problem: Any) -> None:
        problems.append(problem)
        original(self, problem)

    monkeypatch.setattr(call.Call, "__init__", counted)
    return problems


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_a_growing_cache_is_prepared_for_once(mask: Any, contiguous: bool, prepared: list[Any]) -> None:
    q = torch.randn((1, 2, 1, 16))
    cache = torch.randn((2, 1, 1, 40, 16))
    for n in (1, 2, 3, 15, 16, 17, 32, 33, 40):
        k, v = cache[:, :, :, :n].contiguous() if contiguous else cache[:, :, :, :n]
        mine, plain = (ch.attention(q, k, v, mask=mask, kernel=name) for name in ("triton", "dense"))
        torch.testing.assert_close(mine, plain)
    assert len(prepared) <= 3  # one key, more, and where strides divide by 16 in another way


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_prompts_of_any_length_are_prepared_for_once(mask: Any, prepared: list[Any]) -> None:
    for n in (66, 65, 80):
        q, k, v = torch.randn((3, 1, 1, n, 16))
        mine, plain = (ch.attention(q, k, v, mask=mask, kernel=name) for name in ("triton", "dense"))
        torch.testing.assert_close(mine, plain)
    assert len(prepared) == 1


def test_what_is_taken_over_is_what_would_be_prepared() -> None:
    from clearhead.kernels.gpu import call

    def problems() -> Any:
        buffer = torch.zeros(300_000, dtype=torch.float16)
        for queries, keys in ((1, 1), (1, 2), (1, 33), (2, 33), (5, 48), (1, 0), (0, 7), (3, 1)):
            for step, last, lead, start, width in STRIDES:
                for heads in (1, 2):
                    strides = (lead * 50 * heads, lead * 50, step, last)
                    k = buffer[start:].as_strided((2, heads, keys, width), strides)
                    for dtype in (torch.float16, torch.float32):
                        q = torch.zeros((2, 2, queries, width), dtype=dtype)
                        for mask in MASKS.values():
                            yield pose(q, k.to(dtype), k.to(dtype), scale=0.25, mask=mask)

    shared = 0
    for problem in problems():
        before = len(call._families)
        mine, anew = call.Call.of(problem), call.Call(problem)
        shared += len(call._families) == before and mine.as_given
        for name in ("grid", "device", "batch", "rows", "as_given", "form"):
            assert getattr(mine, name) == getattr(anew, name), (name, problem)
        assert [mine.mask.span[:3], mine.mask.program] == [anew.mask.span[:3], anew.mask.program]
        assert [n for n in mine.scoring if not isinstance(n, torch.Tensor)] == [
            n for n in anew.scoring if not isinstance(n, torch.Tensor)
        ]
        assert [a.stride() for a in (mine.q, mine.k, mine.v)] == [a.stride() for a in (anew.q, anew.k, anew.v)]
    assert shared > 100


def test_what_has_more_to_it_than_numbers_is_of_no_family() -> None:
    from clearhead.kernels.gpu.cache_key import CacheKey

    q, k, v = torch.randn((3, 1, 2, 4, 16))
    for options in (
        {"mask": ch.causal(offset=np.array([1]))}, {"mask": ch.lengths([3])}, {"bias": ch.alibi(2)},
        {"mask": ch.causal() & ch.documents([0, 0, 1, 1])}, {"mask": ~ch.causal()},
    ):  # fmt: skip
        problem = pose(q, k, v, **options)
        assert CacheKey(problem).family(problem) is None


def test_sizes_are_checked_though_others_were_right() -> None:
    q, k, v = torch.randn((3, 2, 4, 8))
    assert pose(q, k, v).grid.keys == 4
    assert pose(q, k[:, :3], v[:, :3]).grid.keys == 3
    with pytest.raises(ch.ArgumentError, match="v: has 3 positions"):
        pose(q, k, v[:, :3])
    with pytest.raises(ch.ArgumentError, match="q: has shape"):
        pose(q[0, 0], k, v)


class Pair(NamedTuple):
    """A tuple with names, as kernels are given them."""

    low: Any
    array: Any


def wanted(tensor, strides, pair, n, free, where, FORM: tl.constexpr, BLOCK: tl.constexpr):  # noqa: F821  # read as text
    """A kernel's signature."""


class Driver:
    """A driver with one device and one stream."""

    def get_current_device(self) -> int:
        return 3

    def get_current_stream(self, device: int) -> tuple[str, int]:
        return ("stream of", device)


def kernel_of(function: Any = wanted) -> Any:
    """A kernel that notes how it is launched the ordinary way, and how what that compiled is run."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    class Noted(JITFunction):
        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            self.found.append((grid, args, options))
            number = len(self.found)
            return SimpleNamespace(
                run=lambda *given: self.ran.append((number, given)), function="function", packed_metadata="metadata"
            )

    kernel = Noted(function, do_not_specialize=["pair", "free"], do_not_specialize_on_alignment=["where"])
    kernel.found, kernel.ran = [], []
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    kernel.device_caches[3] = ({}, {}, None, backend, binder)
    return kernel


def all_kinds_of_arguments() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    floats, halves = torch.zeros(64), torch.zeros(64, dtype=torch.float16)
    usual = [floats, (64, 1), Pair(3, floats), 100, 100, floats, "form"]
    options = {"BLOCK": 16, "num_warps": 4}
    described = [
        TensorDescriptor(halves, [4, 16], [16, 1], block, gl.NVMMASharedLayout.get_default_for(block, gl.float16))
        for block in ([2, 16], [4, 16], [4, 16])
    ]
    changes = [
        (0, [floats[1:], floats[4:], halves, None, *described]),
        (1, [(64, 2), (65, 1), (32, 1), (64,), (64, 1, 1), (2**31, 1)]),
        (2, [Pair(4, floats), Pair(1, floats), Pair(16, floats), Pair(3, floats[1:]), Pair(None, floats)]),
        (3, [101, 112, 1, 0, -16, 2**31 - 1, 2**31, 2**63, 1.5, True, None]),
        (4, [101, 112, 1, 2**31, 1.5]),
        (5, [floats[1:], halves]),
        (6, ["another form", None]),
    ]
    found = [
        (tuple(usual), options),
        (tuple(usual), options | {"BLOCK": 32}),
        (tuple(usual), options | {"num_warps": 8}),
    ]
    for place, values in changes:
        found += [((*usual[:place], value, *usual[place + 1 :]), options) for value in values]
    return found


def test_whatever_triton_tells_apart_is_told_apart() -> None:
    from triton.runtime.jit import compute_cache_key

    from clearhead.kernels.gpu.bypass import variants_of

    kernel = kernel_of()
    binder = kernel.device_caches[3][4]
    given = all_kinds_of_arguments()
    mine, theirs = [], []
    for args, options in given:
        _, specialization, rest = binder(*args, **options)
        theirs.append(compute_cache_key({}, specialization, rest))
        mine.append(variants_of(kernel, len(args)).key(3, args, options))
        hash(mine[-1])
    for i, j in combinations(range(len(given)), 2):
        assert theirs[i] == theirs[j] or mine[i] != mine[j], (given[i], given[j])
    assert len(set(mine)) < len(given) - 8  # and what they do not tell apart is found again
    assert len(set(theirs)) > 25


def test_a_kernel_is_found_once_and_then_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs
    from triton.runtime import driver

    from clearhead.kernels.gpu import bypass
    from clearhead.kernels.gpu.launcher import Launcher

    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(bypass, "DIRECT", True)
    kernel, tensor = kernel_of(), torch.zeros(64)
    rest = ((64, 1), Pair(3, tensor), 100, 100, tensor, "form")
    launch = Launcher()
    for _ in range(3):
        launch("name", kernel, (5, 6), tensor, *rest, BLOCK=16)
    assert kernel.found == [((5, 6), (tensor, *rest), {"BLOCK": 16})]
    start = (5, 6, 1, ("stream of", 3), "function", "metadata", None, None, None)
    assert kernel.ran == [(1, (*start, tensor, *rest, None))] * 2
    launch("another name", kernel, (5, 6), tensor, *rest, BLOCK=16)
    Launcher()("name", kernel, (5, 6), tensor, *rest, BLOCK=16)  # numbers of another size, say
    assert len(kernel.found) == 1
    assert kernel.ran == [(1, (*start, tensor, *rest, None))] * 4
    Launcher()("name", kernel, (5, 6), tensor[1:], *rest, BLOCK=16)
    Launcher()("name", kernel, (5, 6), tensor, *rest, BLOCK=32)
    assert len(kernel.found) == 3
    Launcher()("name", kernel, (5, 6), tensor[1:], *rest, BLOCK=16)
    assert kernel.ran[-1][0] == 2
    chain = knobs.HookChain()
    chain.add(print)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", chain)
    launch("name", kernel, (5, 6), tensor, *rest, BLOCK=16)  # a profiler is told of each launch by Triton
    assert len(kernel.found) == 4


def test_another_triton_is_asked_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.gpu import bypass
    from clearhead.kernels.gpu.launcher import Launcher

    monkeypatch.setattr(bypass, "DIRECT", False)
    kernel, launch = kernel_of(), Launcher()
    for n in range(2):
        launch("name", kernel, (1,), None, (), (), n, 0, None, "form", BLOCK=16)
    assert len(kernel.found) == 2
    assert not kernel.ran


def test_a_kernel_whose_constants_come_first_is_launched_the_ordinary_way() -> None:
    from clearhead.kernels.gpu.bypass import constants_last

    class Parameter(NamedTuple):
        is_constexpr: bool

    no, yes = Parameter(False), Parameter(True)
    assert constants_last([no, no, yes], 2)
    assert constants_last([no, yes, yes], 2)
    assert not constants_last([yes, no], 2)
    assert not constants_last([no, no, yes], 1)
