"""What leaves a GPU while a model runs on, by stand-ins for CUDA; runs that nobody looks at; models that are known."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import hf_models as hf
import pytest
import torch
from torch import nn
from watched import Gpt

import clearhead as ch
from clearhead.watching import familiar, leaving, mode
from clearhead.watching.attending import attends
from clearhead.watching.given import Given
from clearhead.watching.leaving import Arriving, Leaving


class Away(torch.Tensor):
    """A tensor that says it is on a GPU; its numbers stay where they are."""

    @property
    def is_cuda(self) -> bool:
        return True

    def record_stream(self, stream: Any) -> None:
        LOG.append("record")

    def contiguous(self) -> Away:
        return self

    def to(self, *given: Any) -> Any:
        return super().to(*given).as_subclass(Away)


LOG: list[str] = []


class Stream:
    def __init__(self, *_: Any) -> None:
        self.name = "copying"

    def wait_stream(self, other: Any) -> None:
        LOG.append("wait for current")

    def __enter__(self) -> None:
        LOG.append("enter")

    def __exit__(self, *_: Any) -> None:
        LOG.append("leave")


class Event:
    def record(self, stream: Any) -> None:
        LOG.append("event")

    def synchronize(self) -> None:
        LOG.append("synchronize")

    def query(self) -> bool:
        return "reached" in LOG


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(leaving, "pinned", lambda count, dtype: torch.empty(count, dtype=dtype))


def away(*tensors: torch.Tensor) -> list[Away]:
    return [tensor.as_subclass(Away) for tensor in tensors]


@pytest.mark.usefixtures("cuda")
def test_copies_wait_for_the_model_and_readers_for_copies() -> None:
    under_way = Leaving()
    sources = [torch.arange(6.0).reshape(2, 3), torch.tensor([5, -1, 2**30]), torch.zeros(0, 4), torch.tensor([True])]
    found: list[torch.Tensor] = []
    under_way.send(away(*sources[:2]), found.extend)
    under_way.send(away(*sources[2:]), found.extend)
    assert not LOG, "small arrays wait for more"
    under_way.leave()
    assert LOG == ["wait for current", "enter", "leave", "event"]
    assert [one.dtype for one in found] == [torch.float32, torch.int32, torch.float32, torch.bool]
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(found, sources, strict=True))
    floats = [one for one in found if one.dtype == torch.float32]
    assert len({one.untyped_storage().data_ptr() for one in floats}) == 1, "one piece of memory, and one copy"
    calls: Arriving[str] = Arriving(under_way)
    calls.append("a")
    assert len(calls) == 1
    assert "synchronize" not in LOG
    assert calls[0] == "a"
    assert LOG.count("synchronize") == 1
    assert list(calls) == ["a"]
    assert calls[:1] == ["a"]
    assert LOG.count("synchronize") == 1, "there is nothing left to wait for"


@pytest.mark.usefixtures("cuda")
def test_much_leaves_by_itself_and_one_array_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "LOAD", 1000)
    monkeypatch.setattr(leaving, "SMALL", 200)
    under_way, found = Leaving(), []
    numbers = [torch.randn(count) for count in (40, 60, 100, 60)]
    for number in numbers:
        under_way.send(away(number), found.extend)
    assert [len(one) for one in found] == [40, 60, 100, 60], "1,040 bytes are more than wait"
    assert LOG.count("record") == 3, "the allocator is told of those of more than 200 bytes"
    assert all(torch.equal(one, other) for one, other in zip(found, numbers, strict=True))
    under_way.send(away(numbers[0]), found.extend)
    assert len(found) == 4
    assert torch.equal(under_way.at_once(away(numbers[1])[0]), numbers[1])
    assert len(found) == 5, "what waited went with it"
    assert under_way.at_once(numbers[2]) is numbers[2]
    assert under_way.at_once(None) is None


@pytest.mark.usefixtures("cuda")
def test_observations_leave_with_small_numbers_and_come_as_they_were() -> None:
    q, k, v = torch.randn(3, 2, 7, 4)
    observed = ch.observe(q, k, v, top=3, received=True)
    under_way = Leaving()
    given = observed.each(lambda a: a.as_subclass(Away))
    moved = leaving.on_its_way(under_way, given)
    held = weakref.ref(given.lse)
    del given
    assert held() is not None
    under_way.leave()
    assert held() is not None, "nobody may write there before it is copied"
    LOG.append("reached")
    under_way.send(away(torch.ones(1)), lambda found: None)
    under_way.leave()
    assert held() is None, "nothing holds what is on the GPU once it has left"
    assert moved.top.indices.dtype == torch.int32
    under_way.wait()
    assert moved.top.indices.dtype == torch.int64
    for name in ("output", "lse", "max_score", "entropy", "received"):
        assert torch.equal(getattr(moved, name), getattr(observed, name))
    assert torch.equal(moved.top.indices, observed.top.indices)


@pytest.mark.usefixtures("cuda")
def test_numbers_that_are_not_finite_are_told_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_foreach_norm", lambda many, order: away(*(one.abs().max() for one in many)))
    for spoil, scale, expected in ((None, None, 0), ("q", None, 1), ("v", None, 1), (None, 1e38, 1)):
        tensors = {name: torch.ones(1, 2, 3, 4) for name in "qkv"}
        if spoil:
            tensors[spoil][0, 1, 2, 3] = torch.inf
        told: list[int] = []
        under_way = Leaving()
        leaving.ask(under_way, Given(**tensors, scale=scale), lambda told=told: told.append(1))
        under_way.leave()
        assert not told
        under_way.wait()
        assert len(told) == expected


def test_what_was_seen_goes_when_it_is_let_go() -> None:
    """Memory that a GPU writes to is slow to be had: it must come back at once, and not when Python tidies up."""
    model = Gpt(layers=2).eval()
    gc.collect()
    gc.disable()
    try:
        for every in (1, 1):  # as a stranger, and known
            with torch.no_grad(), ch.watch(model, want={"top": 2}, every=every) as seen:
                model(torch.randint(31, (2, 5)))
            held = weakref.ref(seen[0].lse)
            del seen
            assert held() is None
    finally:
        gc.enable()


def test_every_so_manyth_run_is_looked_at() -> None:
    model, x = Gpt(layers=2).train(), torch.randint(31, (2, 5))
    with ch.watch(model, want={"max_score": True}, every=3) as seen:
        for _ in range(7):
            model(x).sum().backward()
            assert mode.active.mode is None
    assert [(call.step, call.layer) for call in seen] == [(step, layer) for step in range(3) for layer in range(2)]
    assert not seen.missed
    assert seen[0].max_score.shape == seen[0].entropy.shape
    for every in (0, True, 1.5, "2"):
        with pytest.raises(ch.ArgumentError, match=r"every: is .*, expected a whole number of at least 1"):
            ch.watch(model, every=every)
    with pytest.raises(ch.ArgumentError, match="want: has max_score=3, expected True or False"):
        ch.watch(model, want={"max_score": 3})


def test_a_model_that_is_known_is_looked_at_with_less_effort_and_seen_the_same() -> None:
    model: Any = hf.build("llama")
    with torch.no_grad(), ch.watch(model) as first:
        model(hf.IDS)
        model(hf.IDS)
    assert familiar.callers(model) == frozenset(first.names)
    with torch.no_grad():
        watching = ch.watch(model)
        with watching as again:
            assert set(watching.handles) == familiar.around(*[frozenset(first.names)] * 2)
            assert not watching.recorder.follows
            model(hf.IDS)
            model.model(hf.IDS)
            model.model.layers[1].self_attn.config._attn_implementation = "sdpa"
    assert not again.missed
    assert [call.name for call in again] == first.names * 2
    assert familiar.known(model) == {"": dict.fromkeys(first.names, familiar.Way.DIRECT)}
    assert [call.step for call in again] == [0] * 2 + [1] * 2
    for one, other in zip(first[:2], again[:2], strict=True):
        assert torch.equal(one.received, other.received)
        assert one.keys_named == other.keys_named


def test_a_part_that_is_known_is_no_whole_that_is_known() -> None:
    model: Any = hf.build("llama")
    with torch.no_grad():
        with ch.watch(model) as first:
            model.model(hf.IDS)
        assert set(familiar.known(model)) == {"model"}
        watching = ch.watch(model)
        with watching as again:
            model.model(hf.IDS)
            assert set(watching.handles) == familiar.around(*[frozenset(first.names)] * 2)
            assert not watching.recorder.follows
            model(hf.IDS)
        assert set(familiar.known(model)) == {"model", ""}
    assert not again.missed
    assert [call.name for call in again] == first.names * 2
    assert torch.equal(first[0].lse, again[0].lse)


def test_what_a_known_module_computes_beside_its_attention_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = hf.build("llama")
    seen_by_mode: list[Any] = []
    own = mode.Mode.__torch_function__

    def counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen_by_mode.append(func)
        return own(self, func, types, args, kwargs)

    monkeypatch.setattr(mode.Mode, "__torch_function__", counted)
    with torch.no_grad(), ch.watch(model) as seen:
        model(hf.IDS)
        stranger = len(seen_by_mode)
        model(hf.IDS)
        assert nn.functional.linear in seen_by_mode[:stranger]
        assert nn.functional.linear not in seen_by_mode[stranger:]
    assert len(seen.step(1)) == len(seen.step(0)) > 0
    assert mode.active.standing == [] == mode.active.recorders


class Changing(nn.Module):
    """Attends by PyTorch's function, or in steps once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.in_steps = False
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.in_steps:
            return (x @ x.transpose(-1, -2)).softmax(-1) @ x
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_known_model_that_does_otherwise_is_missed_by_name_and_a_stranger_again() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Changing()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x)

    model, x = Model().eval(), torch.randn(1, 2, 5, 8)
    with torch.no_grad():
        with ch.watch(model) as seen:
            model(x)
        assert familiar.callers(model) == {"attention"}
        model.attention.in_steps = True
        with ch.watch(model) as seen:
            model(x)
        assert "attention" in seen.missed
        assert familiar.callers(model) is None
        with pytest.warns(UserWarning, match="watch saw no attention"), ch.watch(model) as seen:
            model(x)
        assert "in steps, softmax" in seen.missed["attention"]
        model.attention.forward = lambda x: x  # which somebody has put in its place
        assert familiar.callers(model) is None
    assert attends("attention", model.attention)
