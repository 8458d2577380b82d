"""Every attention call of a running model, seen: a `TorchFunctionMode` that is on while a watched module runs.

The mode is pushed when the outermost module of a watched model is entered, on whatever thread that is, and popped when
it is left. All watches that are open share it, so that they may be nested and may overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clearhead.calls import attention, observe
from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.watching import again, own, sdpa
from clearhead.watching.attending import ATTENTION
from clearhead.watching.distance import mean_distance
from clearhead.watching.familiar import Way
from clearhead.watching.given import Given
from clearhead.watching.multi_head import through, wants_weights
from clearhead.watching.recorder import Recorder
from clearhead.watching.results import dual, laid_out, trusted
from clearhead.watching.steps import FIXED, PLAIN, Steps, tensors

# kernels that libraries register, and those that take functions, as flex_attention does
KERNELS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)


@cache
def is_kernel(kind: Any) -> bool:
    """Is that the type of a kernel? To ask PyTorch's abstract classes each time takes as long as a small product."""
    return issubclass(kind, KERNELS)


@dataclass
class Active(threading.local):
    """The watches that are looking at this thread, and the mode that sees for them."""

    recorders: list[Recorder] = field(default_factory=list)
    standing: list[Recorder] = field(default_factory=list)  # those who look at nothing but what a registry hands out
    near: list[Recorder] = field(default_factory=list)  # the same of a model that runs, by the modules it is handed to
    handed: int = 0  # functions that a registry handed out and that are running
    given: Any = None  # the module that the last of them was called by
    query: Tensor | None = None  # and with these queries
    direct: bool = False  # its one call is made without being looked for
    made: list[tuple[Any, ...]] | None = None  # for who asks: calls that are played, their kinds, outputs and tensors
    mode: Mode | None = None
    spare: Mode | None = None  # the same, kept for the next time
    steps: Steps = field(default_factory=Steps)
    quiet: bool = False  # steps are made that belong to a call which is known
    following: bool = False  # some watch wants to know of attention in steps


active = Active()


def start(recorder: Recorder, given: Any = ()) -> None:
    """Look at this thread for a watch; `given` is what the module was called with."""
    if recorder not in active.recorders:
        active.recorders.append(recorder)
    active.following = any(one.follows for one in active.recorders)
    if active.following:
        active.steps.know(tensors(given), PLAIN)
        active.steps.know(recorder.root.buffers(), FIXED)
    if active.mode is None or not _on_stack(active.mode):
        active.mode = active.spare = active.spare or Mode()
        torch._C._push_on_torch_function_stack(active.mode)


def stand_by(recorder: Recorder) -> None:
    """Look at this thread for a watch when a function runs that a registry has handed out, and at nothing before."""
    if recorder not in active.standing:
        active.standing.append(recorder)


def come_near(recorder: Recorder) -> None:
    """The same as long as a model runs, at what is handed to those of its modules that are known to make calls so."""
    if recorder not in active.near:
        active.near.append(recorder)


def stop(recorder: Recorder, *, near: bool = True) -> None:
    """Stop looking at this thread for a watch; the mode goes with the last one. Or let it be near still."""
    if recorder in active.standing:
        active.standing.remove(recorder)
    if near and recorder in active.near:
        active.near.remove(recorder)
    rest(recorder)


def rest(recorder: Recorder) -> None:
    """Stop looking at what this thread computes."""
    if recorder in active.recorders:
        active.recorders.remove(recorder)
    active.following = any(one.follows for one in active.recorders)
    if not active.recorders and active.mode is not None:
        _take_off(active.mode)
        active.mode = None
        if active.steps.tags:
            active.steps = Steps()


def stack() -> list[TorchFunctionMode]:
    """The modes that are on in this thread, the innermost last."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(i) for i in range(count)]


def _on_stack(mode: TorchFunctionMode) -> bool:
    return any(other is mode for other in stack())


def _take_off(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack, also where an interrupted run has left others above it."""
    count = torch._C._len_torch_function_stack()
    if count and torch._C._get_function_stack_at(count - 1) is mode:
        torch._C._pop_torch_function_stack()
        return
    if not _on_stack(mode):
        return
    above = []
    while (top := torch._C._pop_torch_function_stack()) is not mode:
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)


class Enough(Exception):
    """Everything that was to be seen has been seen."""


class Mode(TorchFunctionMode):
    """Sees attention calls, and passes on everything else as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of a PyTorch function."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # it is written down, and seen when it runs
            return func(*args, **kwargs)
        if func in sdpa.NAMES or func is attention or own.over_ranks(func):
            return known(seen_call(func, args, kwargs))
        if func is F.multi_head_attention_forward:
            return known(_multi_head(func, args, kwargs))
        kind: Any = type(func)
        if is_kernel(kind) and ATTENTION.search(str(func)):
            for recorder in active.recorders:
                recorder.count(_way(recorder))
                recorder.refuse(f"it calls {func}, a kernel of its own")
            return known(func(*args, **kwargs))
        result = func(*args, **kwargs)
        if active.following and not active.quiet:
            _follow(func, args, kwargs, result)
        return result


def known(result: Any) -> Any:
    """The same, which is no longer any attention's."""
    if active.following:
        active.steps.know(tensors(result), PLAIN)
    return result


def _follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    try:
        found = active.steps.follow(func, args, kwargs, result)
    except Exception:  # the model runs on, whatever it calls functions with
        found = "mixes"
    if found is not None:
        for recorder in active.recorders:
            recorder.step(found)


def seen_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, lay: bool = True) -> Tensor:
    """The result of a call of PyTorch's attention, or of ours, and every watch told of it; laid out as PyTorch does."""

    def plain() -> Tensor:
        return func(*args, **kwargs)

    if active.query is not None and func in sdpa.NAMES:
        found = sdpa.unfolded(active.query, args, kwargs)
        if found is not None:
            # rows of the batch are the output's: a learned query may be one for all of them
            output = _seen(func, (), found, lambda: plain().flatten(1, 2).unsqueeze(2), lay=False)
            key_heads = found["key"].shape[1]
            return output.reshape(len(output), key_heads, output.shape[1] // key_heads, output.shape[-1])
    return _seen(func, args, kwargs, plain, lay=lay)


def _seen(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[[], Tensor], *, lay: bool
) -> Tensor:
    """The same of a call that may be read otherwise than it is made, which is by `plain`."""
    try:
        if func is attention or own.over_ranks(func):
            given, dropped = own.read(*args, **kwargs), kwargs.get("dropout") is not None
            # a call over ranks is made in any case, since others wait for it
            return attend(given, plain, beside=dropped or func is not attention, ours=True)
        # who is alone may have met such a call before
        played = active.recorders[0].played if len(active.recorders) == 1 else None
        kind = None if played is None else again.kind_of(*args, **kwargs)
        known = None if played is None or kind is None else played.get(kind)
        if known is not None:
            tensors = args[:3] if len(args) >= 3 else tuple(sdpa.arguments(*args, **kwargs).values())[:3]
            output = play(active.recorders[0], known, *tensors)
            if output is not None and active.made is not None:
                active.made.append((known, output, *tensors))
            if output is not None:
                return laid_out(output, args[0] if args else kwargs["query"]) if lay else output
        given, dropout = sdpa.read(args, kwargs)
    except (ValueError, TypeError) as error:
        for recorder in active.recorders:
            recorder.count(_way(recorder))
            recorder.refuse(str(error))
        return plain()
    # of PyTorch's ways only some take both a mask and causality
    both = given.causal and (given.mask is not None or given.bias is not None)
    result = attend(given, plain, beside=both or dropout != 0)
    if played is not None and kind is not None and known is None:
        again.learn(played, kind, active.recorders[0].wanted, sdpa.arguments(*args, **kwargs))
    return result


def play(recorder: Recorder, known: again.Kind, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """The result of a call of a kind that this watch has met, which is told of it; None where it is not for that."""
    if recorder.edit is not None or recorder.careful or not recorder.selects():
        return None
    try:
        found = known.play(query, key, value)
    except Exception:  # it is observed as if for the first time, and what is wrong is said there
        found = None
    if found is None:
        return None
    output, kept = found
    recorder.count(_way(recorder))
    recorder.hold(known, kept, output)
    return output


def attend(given: Given, plain: Callable[[], Tensor], *, beside: bool = False, ours: bool = False) -> Tensor:
    """The result of a call, and every watch told of it.

    The result is that of the observing kernel. The model's own call is made instead, and observed beside it, where it
    drops weights (`beside`), where gradients are wanted, where only some heads are looked at, or where PyTorch's own
    attention might give something else; `ours` is of this library and gives the same.
    """
    interested = _interested()
    if not interested:
        return _edited(plain())
    tensors = [a for a in (given.q, given.k, given.v, given.bias, given.sinks) if isinstance(a, Tensor)]
    beside = beside or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)) or any(map(dual, tensors))
    result = plain() if beside else None
    with torch.no_grad():
        given = given.detached()
        for recorder in interested:
            observed = look(given, recorder)
            if (
                observed is not None
                and result is None
                and recorder.heads is None
                and (ours or trusted(given, recorder))
            ):
                result = laid_out(observed.output, given.q)
    return _edited(plain() if result is None else result)


def attend_beside(
    given: Given,
    plain: Callable[[], Tensor],
    again: Callable[[], Tensor] | None,
    like: Callable[[Given, Observed, Tensor], str | None],
) -> Tensor:
    """The result of a call that a model computes in steps, and every watch told of it where that is exact.

    `like` says why an observation is not of the call that gave an output: that of `plain`, or of `again` where `plain`
    drops weights. The steps are those of this call, and no attention of their own.
    """
    interested = _interested()
    with without_steps():
        result = plain()
        with torch.no_grad():
            quiet = given.detached()
            compared = result.detach() if again is None or not interested else again()
            for recorder in interested:
                look(quiet, recorder, lambda observed: like(quiet, observed, compared))
    return known(_edited(result))


@contextmanager
def without_steps() -> Iterator[None]:
    """What is computed inside belongs to a call that is known, or known to be missed: its steps are not followed."""
    before, active.quiet = active.quiet, True
    try:
        yield
    finally:
        active.quiet = before


def _way(recorder: Recorder) -> Way:
    """How the call that is being made is made."""
    if not active.handed:
        return Way.ITSELF
    return Way.DIRECT if active.direct and recorder.runs_now(active.given) else Way.HANDED


def _interested() -> list[Recorder]:
    """The watches that want to see the call that is being made."""
    for recorder in active.recorders:
        recorder.count(_way(recorder))
    return [recorder for recorder in active.recorders if recorder.edit is None and recorder.selects()]


def _edited(output: Tensor) -> Tensor:
    """What a call gives, (…, heads, queries, features), as those who change it would have it."""
    for recorder in active.recorders:
        if recorder.edit is not None and recorder.selects():
            output = recorder.edit(output)
    return output


def look(given: Given, recorder: Recorder, why_not: Callable[[Observed], str | None] | None = None) -> Observed | None:
    """Observe a call for one watch; None where that fails, or where `why_not` says that it was another call."""
    try:
        why = None if why_not is None else why_not(observe(given.q, given.k, given.v, **given.options))
        if why is not None:
            recorder.refuse(why)
            return None
        return _look(given, recorder)
    except Exception as error:  # the model runs on, whatever it was, and what was missed is said
        recorder.refuse(f"observing it failed: {error}")
        return None


def _look(given: Given, recorder: Recorder) -> Observed:
    wanted = recorder.wanted
    if recorder.heads is not None:
        count = given.q.shape[-3] if given.q.ndim > 2 else 0
        outside = [head for head in recorder.heads if head >= count]
        if outside:
            raise ArgumentError("heads", f"has {outside[0]}, and the call has {count or 'no'} heads")
        given = given.of_heads(recorder.heads)
    observed = observe(given.q, given.k, given.v, **given.options, **wanted.for_length(given.queries))
    # there is no distance between two sequences
    distance = mean_distance(given) if wanted.distance and not recorder.crosses else None
    recorder.add(given, observed, distance)
    return observed


def _multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`nn.MultiheadAttention`: PyTorch's own code, with the one call inside it replaced.

    The function asks for weights by building the matrix itself. It then runs as it is, and what it attended to is
    observed beside it, so that weights, dropout and gradients are its own.
    """

    def sees(*a: Any, **k: Any) -> Tensor:
        return seen_call(F.scaled_dot_product_attention, a, k)

    def only_looks(*a: Any, **k: Any) -> Tensor:
        sees(*a, **k)
        raise Enough

    if not wants_weights(args, kwargs):
        return through(sees)(*args, **kwargs)
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    alone = call | {"need_weights": False, "training": False, "is_causal": False}
    result = func(*args, **kwargs)
    if any(recorder.edit is not None and recorder.selects() for recorder in active.recorders):
        if call.get("training", True) and call["dropout_p"] > 0:
            raise ArgumentError(
                "layer", "gives its weights and drops some of them: its heads are not changed in training"
            )
        return through(sees)(**alone)[0], *result[1:]
    try:
        with torch.no_grad():
            through(only_looks)(**alone)
    except Enough:
        pass
    return result
