"""Calls that a watch has met before: played instead of read, and never where anything else is to be done.

CPU tensors say that they are on a GPU, and Triton's interpreter is the GPU: what is played is computed.
"""

from __future__ import annotations

from typing import Any

import hf_models as hf
import pytest
import torch
import torch.nn.functional as F
from interpreted import MARKS
from test_watch_leaving import Event, Stream
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead as ch
from clearhead.watching import again, familiar, leaving, mode
from clearhead.watching.again import Pending

pytestmark = MARKS
TOP = {"top": 3, "received": True}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where tensors are on a GPU; the kinds of calls that are played, in turn."""
    from clearhead import calls
    from clearhead.kernels import choose, prepared
    from clearhead.kernels.gpu.packed import Packed

    played: list[Any] = []
    own = Packed.play

    def counted(self: Packed, *given: Any) -> Any:
        played.append(self)
        return own(self, *given)

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(leaving, "pinned", lambda count, dtype: torch.empty(count, dtype=dtype))
    monkeypatch.setattr(calls, "choose", lambda problem, name=None: choose.named(name or "triton"))
    monkeypatch.setattr(prepared, "OBSERVED", {})
    monkeypatch.setattr(calls, "OBSERVED", prepared.OBSERVED)
    monkeypatch.setattr(again, "_known", {})
    monkeypatch.setattr(Packed, "play", counted)
    return played


def watched(model: nn.Module, *args: Any, want: Any = None, runs: int = 1, **options: Any) -> tuple[Any, Any]:
    """What a model gives in its last run, and what was seen."""
    with ch.watch(model, want=TOP if want is None else want, **options) as seen:
        for _ in range(runs):
            output = model(*args)
    return output, seen


def same(one: Any, other: Any) -> None:
    """Two records say the same."""
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        for name in ("name", "kind", "index", "step", "layer", "keys", "heads", "counted", "keys_named", "shape"):
            assert getattr(mine, name) == getattr(theirs, name), name
        for name in ("lse", "max_score", "entropy", "received", "received_max", "removal"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert (mine.top is None) == (theirs.top is None)
        if mine.top is not None:
            torch.testing.assert_close(mine.top.weights, theirs.top.weights, atol=1e-5, rtol=1e-5)
            assert mine.top.indices.dtype == torch.int64
            assert torch.equal(mine.top.indices.sort(-1)[0], theirs.top.indices.sort(-1)[0])


class Noticing(TorchDispatchMode):
    """A mode that sees every operation, and changes none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Attends(nn.Module):
    """PyTorch's attention of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Inner()

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        return self.attention(q, k, v, **options)


class Inner(nn.Module):
    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, **options)


def three(*shape: int, heads: int = 2) -> tuple[torch.Tensor, ...]:
    """As models have them: queries, keys and values laid out by positions."""
    return tuple(torch.randn(1, shape[0], heads, 16).transpose(1, 2) for _ in range(3))


@pytest.mark.parametrize("want", [{}, TOP, {"received_max": True, "removal": 3, "output": True}], ids=str)
def test_what_is_played_is_what_is_observed(want: Any, request: pytest.FixtureRequest) -> None:
    model: Any = hf.build("llama")
    with torch.no_grad():
        right, expected = watched(model, IDS, want=want, tokens=list("abcdefg"))
        played = request.getfixturevalue("gpu")
        for _ in range(4):  # seen, recorded and then played
            before = len(played)
            found, seen = watched(model, IDS, want=want, tokens=list("abcdefg"))
            assert not seen.missed
            torch.testing.assert_close(found.logits, right.logits, atol=1e-5, rtol=1e-5)
            same(seen, expected)
            if want.get("output"):
                torch.testing.assert_close(seen[1].observed.output, expected[1].observed.output, atol=1e-5, rtol=1e-5)
        assert len(played) - before == len(seen), "every call of the last run"
        _, there = watched(model, IDS, want=want, tokens=list("abcdefg"), on_device=True)
        same(there, expected)


def test_what_was_played_leaves_as_bytes_and_is_read_once(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = Attends(), three(7)
    with torch.no_grad():
        watched(model, *given, runs=3)
        for least in (again.APART, 0):  # whole numbers go with the others, or as 32 bits
            monkeypatch.setattr(again, "APART", least)
            gpu.clear()
            with ch.watch(model, want=TOP) as seen:
                model(*given)
                model(*given)
                raw = [list.__getitem__(seen.calls, i) for i in range(2)]
            assert len(gpu) == 2
            assert all(isinstance(one, Pending) for one in raw)
            assert len(seen) == 2
            assert seen[1] is seen[1]
            assert [call.step for call in seen] == [0, 1]
            right = ch.observe(*given, **TOP, kernel="dense")
            torch.testing.assert_close(seen[0].top.weights, right.top.weights)
            assert torch.equal(seen[0].top.indices, right.top.indices)


# each is otherwise in one thing; the kind that was played before is not its own
OTHERWISE: dict[str, Any] = {
    "causal": {"is_causal": True},
    "a scale": {"scale": 0.5},
    "a scale that is a whole number": {"scale": 1},
    "a mask": {"attn_mask": torch.ones(7, 7, dtype=torch.bool).tril()},
    "a bias": {"attn_mask": torch.randn(7, 7)},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_otherwise_is_not_played_as_it_was(gpu: list[Any], name: str) -> None:
    model, given = Attends(), three(7)
    with torch.no_grad():
        watched(model, *given, runs=3)
        assert gpu
        gpu.clear()
        with ch.watch(model, want=TOP) as seen:
            output = model(*given, **OTHERWISE[name])
        assert not gpu
        right = F.scaled_dot_product_attention(*given, **OTHERWISE[name])
    assert not seen.missed
    torch.testing.assert_close(output, right, atol=1e-5, rtol=1e-5)
    assert len(seen) == 1


def test_other_shapes_strides_and_places_are_other_kinds(gpu: list[Any]) -> None:
    model, (q, k, v) = Attends(), three(7)
    with torch.no_grad():
        watched(model, q, k, v, runs=3)
        gpu.clear()
        apart = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
        for others in (
            (q[:, :, :5], k, v),
            (q.contiguous(), k, v),
            (apart, k, v),
            (q.double(), k.double(), v.double()),
        ):
            output, seen = watched(model, *others)
            assert not gpu
            torch.testing.assert_close(output, F.scaled_dot_product_attention(*others), atol=1e-5, rtol=1e-5)
            assert len(seen) == 1
        watched(model, q + 1, k, v)  # other numbers, and all else alike
        assert len(gpu) == 1


def test_numbers_are_new_each_time_and_results_lie_as_pytorchs(gpu: list[Any]) -> None:
    model = Attends()
    with torch.no_grad():
        for _ in range(4):
            given = three(7)
            output, seen = watched(model, *given)
            plain = F.scaled_dot_product_attention(*given)
            torch.testing.assert_close(output, plain, atol=1e-5, rtol=1e-5)
            assert output.transpose(1, 2).is_contiguous()
            torch.testing.assert_close(seen[0].lse, ch.observe(*given, kernel="dense").lse, atol=1e-5, rtol=1e-5)
    assert len(gpu) == 2


def test_gradients_modes_and_autocast_are_not_played_over(gpu: list[Any]) -> None:
    model, (q, k, v) = Attends(), three(7)
    watched(model, q, k, v, runs=3)
    assert gpu
    gpu.clear()
    learns = q.clone().requires_grad_()
    output, seen = watched(model, learns, k, v)
    output.sum().backward()
    assert learns.grad is not None
    assert len(seen) == 1
    with torch.autocast("cpu", torch.bfloat16):
        output, seen = watched(model, q, k, v)
    assert output.dtype == torch.bfloat16
    assert not gpu
    with torch.no_grad():  # no gradient is asked of what could have one
        watched(model, learns, k, v)
    assert len(gpu) == 1
    with torch.no_grad(), Noticing():  # which may make anything of a tensor
        watched(model, q, k, v)
    assert len(gpu) == 1


def test_some_layers_some_heads_and_changes_are_as_ever(gpu: list[Any]) -> None:
    model: Any = hf.build("llama")
    with torch.no_grad():
        watched(model, IDS, runs=3)
        gpu.clear()
        _, seen = watched(model, IDS, layers=[1])
        assert [call.layer for call in seen] == [1]
        assert len(gpu) == 1
        gpu.clear()
        _, seen = watched(model, IDS, heads=[2])
        assert seen[0].heads == (2,)
        assert not gpu
        _, seen = watched(model, IDS, want={"keep": True})
        assert seen[0].kept is not None
        assert not gpu
        plain = model(IDS).logits
        with ch.ablate(model, layer=0, head=1):
            assert not torch.equal(model(IDS).logits, plain)
        assert not gpu


def test_numbers_that_are_not_finite_are_told_and_later_calls_wait(gpu: list[Any]) -> None:
    model, (q, k, v) = Attends(), three(7)
    with torch.no_grad():
        watched(model, q, k, v, runs=3)
        for on_device in (False, True):
            for spoiled in range(3):
                given = [one.clone(memory_format=torch.preserve_format) for one in (q, k, v)]
                given[spoiled][0, 1, 2, 3] = torch.inf
                gpu.clear()
                with ch.watch(model, want=TOP, on_device=on_device) as seen:
                    model(*given)
                    assert len(gpu) == 1
                    assert len(list(seen)) == 1
                    assert "not finite" in seen.missed["attention"]
                    model(q, k, v)
                    assert len(gpu) == 1, "it is careful now"
                assert "not finite" in seen.missed["attention"], "also once it is closed"


def test_what_cannot_be_played_is_observed_as_before(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.gpu import packed, run

    def fails(*given: Any) -> Any:
        raise RuntimeError("no such kernel")

    model, given = Attends(), three(7)
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(packed, "look_through", fails)
            watched(model, *given, runs=4)
            assert not gpu
        watched(model, *given)
        _, seen = watched(model, *given)
        assert len(gpu) == 1
        patched = next(iter(next(iter(again._known.values())).values()))
        monkeypatch.setattr(patched, "play", fails)
        output, seen = watched(model, *given)
        assert not seen.missed
        assert len(seen) == 1
        torch.testing.assert_close(output, F.scaled_dot_product_attention(*given), atol=1e-5, rtol=1e-5)
        monkeypatch.setattr(patched, "play", patched.packed.play)
        monkeypatch.setattr(packed, "hooked", lambda: True)  # somebody wants to hear of every launch
        monkeypatch.setattr(run, "hooked", lambda: True)
        output, seen = watched(model, *given)
        assert len(seen) == 1
        torch.testing.assert_close(output, F.scaled_dot_product_attention(*given), atol=1e-5, rtol=1e-5)


def test_two_watches_at_once_see_the_same(gpu: list[Any]) -> None:
    model: Any = hf.build("llama")
    with torch.no_grad():
        watched(model, IDS, runs=3)
        gpu.clear()
        with ch.watch(model, want=TOP) as outer, ch.watch(model, want=TOP) as inner:
            model(IDS)
        assert not gpu
        same(outer, inner)


@pytest.mark.usefixtures("gpu")
def test_sizes_that_grow_are_recorded_at_once_where_layers_follow() -> None:
    from clearhead.kernels.gpu.replay import Replay

    model, played = Attends(), []
    own = Replay.play

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        from clearhead.kernels.gpu.packed import Packed

        one = Packed.play
        patch.setattr(Replay, "play", lambda self, given: (played.append("replay"), own(self, given))[1])
        patch.setattr(Packed, "play", lambda self, *given: (played.append("packed"), one(self, *given))[1])
        for keys in range(5, 9):
            with ch.watch(model, want=TOP) as seen:
                for _ in range(4):  # layers
                    q, k, v = (torch.randn(1, 2, n, 16) for n in (1, keys, keys))
                    model(q, k, v)
            right = ch.observe(q, k, v, kernel="dense", **TOP)
            torch.testing.assert_close(seen[3].received, right.received, atol=1e-5, rtol=1e-5)
            assert torch.equal(seen[3].top.indices, right.top.indices)
            assert played == ["packed"] * (2 if keys == 5 else 3)
            played.clear()


@pytest.mark.usefixtures("gpu")
def test_no_mode_is_on_in_a_model_that_is_known_by_what_is_handed_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = hf.build("llama")
    with torch.no_grad():
        watched(model, IDS, runs=3)
        on: list[Any] = []
        monkeypatch.setattr(mode.Mode, "__torch_function__", lambda *given, **options: on.append(given))
        _, seen = watched(model, IDS)
    assert not on
    assert len(seen) == 2
    assert mode.active.near == mode.active.standing == mode.active.recorders == []
    assert set(familiar.known(model)[""].values()) == {familiar.Way.DIRECT}
