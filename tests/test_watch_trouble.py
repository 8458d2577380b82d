"""watch: what goes wrong is said, and nothing is left behind."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable

import elsewhere
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from watched import CausalSelfAttention, Gpt, held, ids, left_behind

import clearhead as ch


class EagerAttention(nn.Module):
    """Attention in steps, which nothing can see from outside."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.attn_drop(torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)) @ v


@torch.library.custom_op("clearhead_tests::flash_attn_forward", mutates_args=())
def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A fused extension as other libraries register theirs."""
    return torch.softmax(q @ k.mT, -1) @ v


class Mixer(nn.Module):
    """Calls itself nothing in particular, and runs a fused extension."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.clearhead_tests.flash_attn_forward(x, x, x)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@torch.no_grad()
def test_attention_in_steps_is_missed_by_name():
    model = Stack(CausalSelfAttention(24, 3), EagerAttention(), nn.Linear(24, 24))
    with ch.watch(model) as seen:
        model(torch.randn(1, 5, 24))
    assert seen.names == ["layers.0"]
    assert seen.missed == {
        "layers.1": "EagerAttention ran, but not by scaled_dot_product_attention: in steps, softmax(a @ b) @ c"
    }
    assert "missed layers.1: EagerAttention ran" in str(seen.summary())
    assert "missed layers.1: EagerAttention ran" in repr(seen)


@torch.no_grad()
def test_a_fused_extension_is_missed_by_name_and_by_kernel():
    model = Stack(Mixer(), CausalSelfAttention(24, 3))
    with ch.watch(model) as seen:
        model(torch.randn(1, 5, 24))
    assert seen.names == ["layers.1"]
    assert list(seen.missed) == ["layers.0"]
    assert "clearhead_tests.flash_attn_forward" in seen.missed["layers.0"]


@torch.no_grad()
def test_a_helper_inside_attention_is_not_missed():
    class AttentionScale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    class Attention(CausalSelfAttention):
        def __init__(self) -> None:
            super().__init__(24, 3)
            self.attn_scale = AttentionScale()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.attn_scale(x))

    model = Stack(Attention())
    with ch.watch(model) as seen:
        model(torch.randn(1, 5, 24))
    assert seen.missed == {}


def test_a_model_that_was_not_called_or_does_not_attend_is_said():
    model = nn.Linear(3, 3)
    with ch.watch(model) as seen:
        pass
    assert seen.missed == {"": "Linear was not called while watch was open"}
    with ch.watch(model) as seen:
        model(torch.randn(2, 3))
    assert seen.missed == {"": "Linear ran and made no attention call that can be seen"}
    assert "nothing was seen" in str(seen.summary())


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_torchscript_is_missed_by_name():
    inner = torch.jit.trace(CausalSelfAttention(24, 3).eval(), torch.randn(1, 5, 24))
    model = Stack(CausalSelfAttention(24, 3), inner)
    with ch.watch(model) as seen:
        model(torch.randn(1, 5, 24))
    assert seen.names == ["layers.0"]
    assert "TorchScript" in seen.missed["layers.1"]


@torch.no_grad()
def test_a_model_on_another_device_runs_and_is_missed():
    model = Gpt(layers=1).to("meta")
    with ch.watch(model) as seen:
        assert model(ids().to("meta")).device.type == "meta"
    assert seen.missed == {"h.0.attn": "its tensors are on the meta device and hold no numbers"}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_run_and_are_missed():
    model = Gpt(layers=1)
    plain = torch.func.vmap(model)(ids()[:, None])
    with ch.watch(model) as seen:
        got = torch.func.vmap(model)(ids()[:, None])
    assert torch.equal(plain, got)
    assert "inside a transform" in seen.missed["h.0.attn"]


@torch.no_grad()
def test_a_call_that_pytorch_refuses_is_refused_by_pytorch():
    class Wrong(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k)

    model = Wrong()
    with ch.watch(model), pytest.raises(RuntimeError, match="must match"):
        model(torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8))
    with ch.watch(model), pytest.raises(TypeError, match="missing"):
        model(torch.randn(1, 4, 3, 8))
    assert not left_behind(model)


class Failing(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.attn, self.error = CausalSelfAttention(24, 3), error
        self.failing = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(x)
        if self.failing:
            raise self.error("inside the model")
        return x


@torch.no_grad()
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_the_model_goes_through(error):
    model = Stack(Failing(error))
    x = torch.randn(1, 5, 24)
    with pytest.raises(error, match="inside the model"), ch.watch(model) as seen:
        model(x)
    assert seen.names == ["layers.0.attn"], "what was seen before it stays"
    assert not left_behind(model)
    with ch.watch(model) as seen:
        with pytest.raises(error, match="inside the model"):
            model(x)
        model.layers[0].failing = False
        model(x)
    assert [call.name for call in seen] == ["layers.0.attn"] * 2, "and watching goes on"
    assert [call.step for call in seen] == [0, 1]
    assert not left_behind(model)


@torch.no_grad()
def test_an_exception_in_the_block_leaves_nothing():
    model = Gpt()
    with pytest.raises(KeyError, match="nobody"), ch.watch(model) as seen:
        {model(ids()): 1}["nobody"]
    assert len(seen) == 3
    assert not left_behind(model)


@torch.no_grad()
def test_nested_watches_see_the_same():
    model = Gpt()
    plain = model(ids())
    with ch.watch(model, want={"weights": True}) as outer:
        with ch.watch(model, want={"top": 2}, layers=1) as inner:
            got = model(ids())
        model(ids())
    assert len(outer) == 6
    assert len(inner) == 1
    assert torch.equal(outer[0].entropy, outer[3].entropy)
    assert torch.equal(inner[0].top.weights[..., 0], outer[1].weights.amax(-1))
    assert not left_behind(model)
    held(got, plain, model.double()(ids()), 13, "nested")


@torch.no_grad()
def test_overlapping_watches_close_in_any_order():
    model = Gpt()
    first, second = ch.watch(model), ch.watch(model.h[1])
    one = first.__enter__()
    model(ids())
    two = second.__enter__()
    model(ids())
    first.__exit__(None, None, None)
    model(ids())
    second.__exit__(None, None, None)
    model(ids())
    assert [call.name for call in one] == ["h.0.attn", "h.1.attn", "h.2.attn"] * 2
    assert [call.name for call in two] == ["attn"] * 2
    assert not left_behind(model)
    with pytest.raises(ch.ArgumentError, match="watch: has been opened before; another call of watch makes a new one"):
        first.__enter__()


@torch.no_grad()
def test_watching_inside_another_mode():
    class Counting(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
            Counting.seen += 1
            return func(*args, **(kwargs or {}))

    model = Gpt()
    with Counting(), ch.watch(model) as seen:
        model(ids())
        assert torch._C._len_torch_function_stack() == 1
    assert len(seen) == 3
    assert Counting.seen > 3


def in_threads(count: int, work: Callable[[int], None]) -> None:
    errors = []

    def run(number: int) -> None:
        try:
            with torch.no_grad():
                work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_threads_are_seen_and_kept_apart():
    model = Gpt()
    stacks = []

    def work(number: int) -> None:
        for _ in range(3):
            model(ids(length=5 + number))
        stacks.append(torch._C._len_torch_function_stack())

    with ch.watch(model) as seen:
        in_threads(4, work)
    assert stacks == [0] * 4
    assert len(seen) == 4 * 3 * 3
    assert seen.steps == 12
    for step in range(12):
        calls = seen.step(step)
        assert [call.name for call in calls] == ["h.0.attn", "h.1.attn", "h.2.attn"]
        assert len({call.shape for call in calls}) == 1, "one run, on one thread"


def test_a_run_on_another_thread_outlives_watch():
    started, closed = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            started.set()
            assert closed.wait(20)
            return x

    model = Stack(CausalSelfAttention(24, 3), Slow(), CausalSelfAttention(24, 3))
    stacks = []

    def work(number: int) -> None:
        model(torch.randn(1, 5, 24))
        stacks.append(torch._C._len_torch_function_stack())

    thread = threading.Thread(target=in_threads, args=(1, work))
    with ch.watch(model) as seen:
        thread.start()
        assert started.wait(20)
    closed.set()
    thread.join()
    assert stacks == [0]
    assert seen.names == ["layers.0"], "what is run after it has closed is not seen"
    assert not left_behind(model)


@torch.no_grad()
def test_other_models_and_threads_are_left_alone():
    model, other = Gpt(), Gpt()
    with ch.watch(model) as seen:
        other(ids())
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 8))
        assert set(left_behind(other)) <= {"a stance"}
        model(ids())
    assert len(seen) == 3


@torch.no_grad()
def test_compiled_models_run_uncompiled_and_are_seen():
    model = Gpt(layers=2)
    compiled = torch.compile(model, backend="eager")
    plain = compiled(ids())
    with ch.watch(compiled) as seen:
        got = compiled(ids())
    assert seen.names == ["h.0.attn", "h.1.attn"]
    assert seen.missed == {}
    held(got, plain, model.double()(ids()), 13, "compiled")
    model.float()
    assert not left_behind(model)
    in_place = Gpt(layers=1)
    in_place.compile(backend="eager")
    with ch.watch(in_place) as seen:
        in_place(ids())
    assert seen.names == ["h.0.attn"]
    assert torch.equal(compiled(ids()), plain), "compiled again once watch has closed"
    assert sys.modules["torch._dynamo"].eval_frame._stance.stance == "default"


def test_a_model_that_is_compiled_while_watch_is_open_is_missed():
    code = """
import torch, clearhead
model = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
with torch.no_grad(), clearhead.watch(model) as seen:
    torch.compile(model, backend="eager")(torch.zeros(1, 3, 8))
print(len(seen), seen.missed)
"""
    done = elsewhere.python("-c", code)
    assert done.stdout.startswith("0 {'': 'torch.compile was first used while watch was open"), (
        done.stdout + done.stderr
    )


@torch.no_grad()
def test_what_fails_while_observing_is_said_and_the_model_runs_on(monkeypatch):
    from clearhead.watching import mode

    def failing(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no room")

    model = Gpt(layers=1)
    plain = model(ids())
    monkeypatch.setattr(mode, "observe", failing)
    with ch.watch(model) as seen:
        assert torch.equal(model(ids()), plain)
    assert seen.missed == {"h.0.attn": "observing it failed: no room"}
    monkeypatch.undo()
    with ch.watch(model, heads=5) as seen:
        model(ids())
    assert seen.missed == {"h.0.attn": "observing it failed: heads: has 5, and the call has 3 heads"}


def test_watching_is_not_imported_before_it_is_asked_for() -> None:
    code = "import sys, clearhead; sys.exit('torch' in sys.modules or 'clearhead.watching' in sys.modules)"
    done = elsewhere.python("-c", code)
    assert done.returncode == 0, done.stderr


def test_without_pytorch_it_says_what_brings_it() -> None:
    code = "import sys; sys.modules['torch'] = None; import clearhead; clearhead.watch(None)"
    done = elsewhere.python("-c", code)
    assert done.stderr.strip().endswith("ImportError: watch needs PyTorch: pip install torch")
