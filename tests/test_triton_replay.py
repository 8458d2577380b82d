"""Calls that are recorded and replayed give the same bits as those that are not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import MARKS

import clearhead as ch

pytestmark = MARKS

SHAPE = (1, 1, 18, 16)
DOCUMENTS = ch.documents(np.arange(18) // 7)


def forget() -> None:
    from clearhead.kernels.gpu import call

    call._calls, call._families = type(call._calls)(), type(call._families)()


def replays() -> list[Any]:
    """What is known of calls, by what they did: a replay, or how often it was tried to record one."""
    from clearhead.kernels.gpu import call

    return [one for _, last in call._calls.known.values() for one in last["replays"].values()]


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
    "batches that broadcast": (apart((2, 1, 1, 9, 16), (1, 3, 1, 5, 16)), {}),
    "one query": (apart((1, 2, 1, 16), SHAPE), {"mask": ch.causal()}),
    "half precision": (apart(SHAPE, SHAPE, torch.float16), {"mask": ch.causal()}),
    "documents, sinks": (three(*SHAPE), {"mask": DOCUMENTS, "sinks": torch.tensor([0.5])}),
    "a slope": (three(*SHAPE), {"bias": ch.alibi(1)}),
}


# interpreted gradients take longest: not of those that say nothing new of them
FORWARD = ("in one piece of memory", "packed", "one head", "one query", "a slope")


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_played_is_what_is_computed(name: str) -> None:
    new, options = PROBLEMS[name]
    learns = name not in FORWARD

    def gradients() -> tuple[torch.Tensor, ...]:
        return tuple(ch.gradients(q, k, v, dout, **options, kernel="triton")) if learns else ()

    for _ in range(3):  # seen, recorded, played
        q, k, v = new()
        output = ch.attention(q, k, v, **options, kernel="triton")
        dout = torch.randn_like(output)
        found = (output, *gradients())
    copies, sinks = name == "grouped, with copies", "sinks" in options
    # of half precisions, gradients want the output unrounded too
    runs = 2 if learns and q.dtype != torch.float32 else 1
    of_gradients = [copies or sinks or "batches" in name] * learns
    assert [type(one) is int for one in replays()] == [copies] * runs + of_gradients
    forget()
    output = ch.attention(q, k, v, **options, kernel="triton")
    for mine, right in zip(found, (output, *gradients()), strict=True):
        assert torch.equal(mine, right)


def test_inputs_that_are_one_tensor_are_told_apart_later() -> None:
    x = torch.randn(SHAPE)
    for _ in range(3):
        ch.attention(x, x, x, kernel="triton")
    q, k, v = torch.randn((3, *SHAPE)).unbind(0)
    torch.testing.assert_close(ch.attention(q, k, v, kernel="triton"), ch.attention(q, k, v, kernel="dense"))


def test_masks_of_any_kind_are_recorded_at_once_where_a_call_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.gpu import call

    recorded: list[int] = []
    recorder = call.Recorder
    monkeypatch.setattr(call, "Recorder", lambda *given: recorded.append(1) or recorder(*given))
    q, k, v = torch.randn((3, *SHAPE)).unbind(0)
    for options, times in (
        ({"mask": DOCUMENTS}, [1, 0]),
        ({"mask": ch.causal()}, [0, 1]),
        ({"mask": DOCUMENTS, "dropout": (0.5, 1)}, [0, 0]),  # no two calls are of one kind
    ):
        forget()
        outputs = []
        for count in times:
            recorded.clear()
            outputs.append(ch.attention(q, k, v, **options, kernel="triton"))
            assert len(recorded) == count
        assert torch.equal(*outputs)


def test_results_are_new_each_time() -> None:
    q, k, v = torch.randn((3, *SHAPE)).unbind(0)
    found = [ch.attention(q, k, v, kernel="triton") for _ in range(4)]
    assert len({output.data_ptr() for output in found}) == 4
    assert any(not isinstance(one, int) for one in replays())


def test_what_pytorch_computes_in_between_is_not_played() -> None:
    q, k, v = torch.randn((3, *SHAPE)).unbind(0)
    for n in range(3):  # so many of the largest are chosen by PyTorch
        seen, right = (ch.observe(q + n, k, v, kernel=name, top=70) for name in ("triton", "dense"))
        torch.testing.assert_close(seen.top.weights, right.top.weights)
    assert all(isinstance(one, int) for one in replays())


def test_what_is_observed_is_played() -> None:
    q, k, v = torch.randn((3, *SHAPE)).unbind(0)
    for n in range(4):
        seen, right = (
            ch.observe(q + n, k, v, kernel=name, received=True, map=(3, 2), top=3) for name in ("triton", "dense")
        )  # fmt: skip
        torch.testing.assert_close(seen.received, right.received)
        torch.testing.assert_close(seen.map, right.map)
        torch.testing.assert_close(seen.top.weights, right.top.weights)
        assert torch.equal(seen.top.indices, right.top.indices)
    assert not any(isinstance(one, int) for one in replays())


class Driver:
    """A driver that describes tensors by their addresses, and counts how often it is asked."""

    def __init__(self) -> None:
        self.utils, self.filled = self, []

    def fill_tma_descriptor(self, address: int, *rest: Any) -> Any:
        self.filled.append(address)
        return ("map", address, *rest)


class Compiled:
    """What Triton 3.6 keeps of a compiled kernel, as far as a launch needs it; it takes down what it is given."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = "cooperative", "dependent"

    def __init__(self, described: dict[int, dict[str, Any]]) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.launch = around(lambda *args: self.launched.append(args), set(described), list(described.values()))


def around(launcher: Any, tensordesc_indices: Any, tensordesc_meta: Any) -> Any:
    """A function around a launcher, with Triton's own names."""

    def inner(*args: Any) -> Any:
        raise AssertionError(f"descriptors are expanded again: {launcher, tensordesc_indices, tensordesc_meta, args}")

    return inner


class Description:
    shape, strides, padding = [18, 16], [16, 1], "zero"

    def __init__(self, base: torch.Tensor) -> None:
        self.base = base


def test_a_compiled_kernel_is_launched_with_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.gpu import bypass
    from clearhead.kernels.gpu import replay as module
    from clearhead.kernels.gpu.bypass import Ready
    from clearhead.kernels.gpu.launcher import Launcher

    fake = Driver()
    monkeypatch.setattr(bypass, "driver", SimpleNamespace(active=fake))
    meta = {"swizzle": 3, "elem_size": 4, "elem_type": 9, "block_size": [16, 16], "fp4_padded": False}
    launcher = Compiled({0: meta})
    streams: list[int] = []
    ready = Ready(launcher, "function", "metadata", lambda device: streams.append(device) or "stream", 1, (None, None))
    launches = Launcher()
    launches.known["name"] = ready
    monkeypatch.setattr(Launcher, "__call__", lambda *args, **options: None)
    q, k = torch.randn((2, 18, 16)), torch.randn((2, 18, 16))
    lasting = torch.zeros(4)
    recorder = module.Recorder(launches, (q, k, None))
    output = recorder.room((2, 18), torch.float32, q.device)
    counts = recorder.zeros((36,), torch.int32, q.device)
    recorder("name", None, (5, 6), Description(k[1]), q, k[:, 3:], (lasting, 7), counts[4:], output, 1.5)
    replay = recorder.replay((output, {"rest": counts.view(2, 18)}), [lasting])
    assert replay is not None
    for _ in range(2):
        q, k = torch.randn((2, 18, 16)), torch.randn((2, 18, 16))
        for _ in range(2):
            found, rest = replay.play((q, k, None))
            given, where = launcher.launched[-1], k[1].data_ptr()
            mapped = ("map", where, 3, 4, 8, [16, 16], [18, 16], [16, 1], 0)
            options = ("cooperative", "dependent", None, None, "metadata", None, None, None)
            start = (5, 6, 1, "stream", "function", *options)
            args = (mapped, 18, 16, 16, 1, q.data_ptr(), k[:, 3:].data_ptr(), (lasting, 7))
            assert given == (*start, *args, rest["rest"].data_ptr() + 16, found.data_ptr(), 1.5, None, None)
            assert not rest["rest"].any()
            assert (found.shape, rest["rest"].shape, rest["rest"].dtype) == ((2, 18), (2, 18), torch.int32)
    assert len(fake.filled) == 2, "once for each address"
    assert streams == [1] * 4
    Compiled.global_scratch_size = 16
    assert recorder.replay(output, [lasting]) is None, "it would need memory of its own"
    Compiled.global_scratch_size = 0
    assert recorder.replay(output, []) is None, "a tensor that is neither here nor there"
    assert recorder.replay(q, [lasting]) is None, "a result that is no room"
    assert recorder.replay(output, [lasting]) is not None
    output.fill_(1.0)
    assert recorder.replay(output, [lasting]) is None, "PyTorch has written to it"


def test_a_part_of_nothing_does_not_keep_the_whole() -> None:
    from clearhead.kernels.gpu import replay as module
    from clearhead.kernels.gpu.launcher import Launcher

    recorder = module.Recorder(Launcher(), ())
    output = recorder.room((8,), torch.float32, torch.device("cpu"))
    step = recorder.step(set(), None, None, (1,), (output[3:3], output), {})
    assert step.args[0].untyped_storage().nbytes() == 0
    assert step.args[1] is None


def test_replays_are_bounded() -> None:
    from clearhead.core.problem import pose
    from clearhead.kernels.gpu import call as module

    call = module.Call(pose(*torch.randn((3, *SHAPE)).unbind(0)))
    for n in range(3 * module.MOST):
        assert call.replayed(n, (), lambda n=n: n) == n
    assert len(call.replays) <= module.MOST
