"""watch(): what a PyTorch model attended to, with no change to the model."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

try:
    import torch
    from torch import nn
except ImportError:
    from clearhead.core.installing import brings

    raise ImportError(f"watch needs PyTorch: {brings('torch')}") from None

from clearhead.core.errors import ArgumentError
from clearhead.watching import familiar, mode
from clearhead.watching.chosen import heads_of, layers_of
from clearhead.watching.eager import registry
from clearhead.watching.names import Tokens
from clearhead.watching.padded import as_fast_path
from clearhead.watching.recorder import Recorder
from clearhead.watching.seen import Seen
from clearhead.watching.wants import wanted

TOO_LATE = "torch.compile was first used while watch was open, and what it compiled was not seen: compile it before"


class watch:
    """Watch every attention call that a model makes, without changing the model or what it computes.

    >>> import torch, clearhead as ch
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3).eval()
    >>> with ch.watch(model) as seen:
    ...     output = model(torch.zeros(1, 7, 16))
    >>> [call.name for call in seen]
    ['layers.0.self_attn', 'layers.1.self_attn', 'layers.2.self_attn']
    >>> seen["layers.2.self_attn"].entropy.shape, seen.layer(0)[0].received.shape
    (torch.Size([1, 2, 7]), torch.Size([1, 2, 7]))

    While it is open, every `scaled_dot_product_attention` that the model makes, in any module and on any thread, is
    observed: one kernel computes the output and what was attended to. Hugging Face models on "sdpa", timm's and
    nanoGPT's are seen like this, and so are `nn.MultiheadAttention` and `nn.TransformerEncoder`. Hugging Face models on
    "eager" compute what they do, and are observed beside it; a call whose output is not that of the formula is missed.

    - layers: which layers: numbers, or names of modules, where * stands for anything. A layer's number is the first
      number in its module's name.
    - heads: which heads; only those are kept, and the model's own call computes the output.
    - want: what to observe, as `observe` takes it: top, received, map, queries, weights. And distance=True, the mean
      distance; keep=True, queries, keys and values, so that rollouts, rows, traces and scores such as `induction` can
      be asked for later; output=True, the outputs. Without it, all that `summary` shows.
    - tokens: a list of tokens, one for each batch row where there are several, or a tokenizer.
    - on_device: leave what was observed where the model is. Else it goes to the CPU; from a GPU while the model runs
      on, and only who reads it waits.
    - every: look at every so manyth run of the model alone, the first included; the others run as they are. Largest
      logits and entropies of a training are then nearly free: `watch(model, want={"max_score": True}, every=100)`.

    The result is that of clearhead's kernel, within the error budget of PyTorch's. Where the model is training (it
    drops weights, or gradients are wanted) its own call computes the result, and is observed beside it; observations
    speak of the weights before dropout. A query that may attend to nothing gives 0, as PyTorch's does.

    Code that `torch.compile` has compiled runs uncompiled while watch is open, in all threads, and so is seen. What
    attends and cannot be seen (attention in steps, a kernel of its own, TorchScript) is said by name in `seen.missed`
    when watch closes; a model of which nothing was seen is warned about. Steps are known by what is computed,
    softmax(a @ b) @ c; where the softmax itself is written in steps, by what the module is called.

    A model of Flax is watched by `clearhead.integrations.flax.watch`, which says what is seen of it.
    """

    def __new__(cls, model: Any, *given: Any, **options: Any) -> Any:
        """A watch of a PyTorch model, or of one of Flax."""
        if any(kind.__module__.startswith("flax.") for kind in type(model).__mro__):
            from clearhead.watching.flax_modules import FlaxWatch  # needs Flax, which is here now

            return FlaxWatch(model, *given, **options)
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: Iterable[int | str] | int | str | None = None,
        heads: Iterable[int] | int | None = None,
        want: Mapping[str, Any] | None = None,
        tokens: Any = None,
        on_device: bool = False,
        every: int = 1,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ArgumentError("every", f"is {every!r}, expected a whole number of at least 1")
        model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
        if not isinstance(model, nn.Module):
            raise ArgumentError("model", f"is a {type(model).__name__}, expected a torch.nn.Module")
        self.recorder = Recorder(
            model, wanted(want), layers_of(layers), heads_of(heads), Tokens(tokens), on_device, every
        )
        self.handles: dict[str, list[Any]] = {}

    def __enter__(self) -> Seen:
        if self.recorder.closed or self.handles:
            raise ArgumentError("watch", "has been opened before; another call of watch makes a new one")
        recorder = self.recorder
        uncompiled.begin()
        registry.begin()
        if type(self) is not watch:  # others change what a model does, and see all of it
            self._look_at()
            return recorder.seen
        recorder.learnt, recorder.estranged, recorder.alone = self._keep, self._look_at, self._look_closely
        found = familiar.recall(recorder.root)
        if found is None:
            self._look_at()
        else:
            friend, modules = found
            recorder.know(friend.known)
            recorder.scripts.update(friend.scripts)
            for name, module in modules.items():
                self._hook(name, module)
        return recorder.seen

    def _look_at(self) -> None:
        """Look at all modules."""
        recorder = self.recorder
        for name, module in recorder.root.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                recorder.scripts[name] = type(module).__name__
                continue
            self._hook(name, module)

    def _hook(self, name: str, module: nn.Module) -> None:
        """Look at a module when it is entered and left; where that is enough, at that it is entered alone."""
        recorder = self.recorder
        lightly = name in recorder.direct
        if name in self.handles:
            if lightly == (len(self.handles[name]) == 1):
                return
            self._unhook(name)
        does = _ready if lightly else _before
        self.handles[name] = [
            module.register_forward_pre_hook(Hook(does, recorder, name), prepend=True, with_kwargs=True)
        ]
        if not lightly:
            left = Hook(_after, recorder, name)
            self.handles[name].append(module.register_forward_hook(left, always_call=True, with_kwargs=True))

    def _unhook(self, name: str) -> None:
        for handle in self.handles.pop(name):
            handle.remove()

    def _look_closely(self, name: str) -> None:
        """A module runs by itself that was looked at as a part of others."""
        self.recorder.direct -= {name}
        self._hook(name, self.recorder.root.get_submodule(name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mode.stop(self.recorder)  # on only where a run was interrupted
        self.recorder.close(self._let_go)
        if uncompiled.too_late:
            self.recorder.refused.setdefault("", TOO_LATE)
        uncompiled.end()
        registry.end()
        self.recorder.settle()
        if kind is None and self.recorder.blind:
            _warn(self.recorder.seen)

    def _keep(self) -> None:
        """Look at the modules that matter alone from now on."""
        if not self.handles:
            return
        names = familiar.around(self.recorder.callers or frozenset(), self.recorder.direct)
        for name in [name for name in self.handles if name not in names]:
            self._unhook(name)
        for name in self.recorder.direct.intersection(self.handles):
            self._hook(name, self.recorder.root.get_submodule(name))

    def _let_go(self) -> None:
        for name in list(self.handles):
            self._unhook(name)


def _warn(seen: Seen) -> None:
    """Say once, where it is not looked for, that a model attends and nothing of it was seen."""
    name, why = next(iter(seen.missed.items()))
    more = f" ({len(seen.missed)} modules alike: seen.missed)" if len(seen.missed) > 1 else ""
    warnings.warn(f"watch saw no attention. {name or 'The model'}: {why}{more}", stacklevel=3)


class Hook:
    """A hook of one watch on one module. In a copy of the model it does nothing: that is not watched."""

    only_looks = True  # what a module computes is not for it to change

    def __init__(self, does: Callable[..., Any], recorder: Recorder, name: str) -> None:
        self.does, self.recorder, self.name = does, recorder, name

    def __call__(self, *given: Any) -> Any:
        return self.does(self.recorder, self.name, *given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*given: Any) -> None:
    """What a hook does in a copy of a watched model."""


def _ready(recorder: Recorder, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if recorder.ready(name, module) or _not_a_run() or recorder.rests(module) or recorder.alone is None:
        return
    recorder.alone(name)
    _before(recorder, name, module, args, kwargs, depth=4)


def _before(
    recorder: Recorder, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], depth: int = 3
) -> None:
    if _not_a_run() or recorder.rests(module):
        return
    outermost = recorder.enter(name, module, args, kwargs, depth)
    if outermost and recorder.direct:
        mode.come_near(recorder)
    # where it is known who attends, all that others compute is let be
    if recorder.calling(name) if recorder.callers is not None else outermost:
        if recorder.callers is not None and recorder.asks(name):
            mode.stand_by(recorder)
        else:
            mode.start(recorder, (args, kwargs))


def _after(
    recorder: Recorder, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    if _not_a_run():
        return None
    if not recorder.rested(module):
        attended = recorder.calling(name)
        left = recorder.leave(name)
        if left or attended:
            mode.stop(recorder, near=left)
    if isinstance(module, nn.TransformerEncoder):
        return as_fast_path(module, args, kwargs, output)
    return None


def _not_a_run() -> bool:
    """True where a module is traced by the compiler, or is run again by a checkpoint in the backward pass."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1


class Uncompiled:
    """Compiled code runs as it was written while any watch is open, and as before once the last has closed."""

    def __init__(self) -> None:
        self.open = 0
        self.stance: Any = None
        self.lock = threading.Lock()

    @property
    def too_late(self) -> bool:
        """Was the compiler first used while a watch was open?"""
        compiler = sys.modules.get("torch._dynamo.utils")
        return self.stance is None and compiler is not None and bool(compiler.counters["frames"])

    def begin(self) -> None:
        """One more watch is open."""
        with self.lock:
            self.open += 1
            # importing the compiler takes seconds: where nobody has, nothing is compiled
            if self.stance is None and "torch._dynamo" in sys.modules:
                self.stance = torch.compiler.set_stance("force_eager")
                self.stance.__enter__()

    def end(self) -> None:
        """One less."""
        with self.lock:
            self.open -= 1
            if not self.open and self.stance is not None:
                self.stance.__exit__(None, None, None)
                self.stance = None


uncompiled = Uncompiled()
