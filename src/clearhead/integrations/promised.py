"""The mask that a Hugging Face model is handed: what clearhead needs of it, and for anybody else eager attention's own.

Models ask transformers for a mask in one place and attend in another. Those that attend through its interface hand the
mask on to clearhead, which needs only a boolean one, or the word causal. Others, as BLOOM, compute with it themselves:
a boolean mask that is added to scores, or none at all, would be lost in silence. So the mask is a promise of eager
attention's additive one, which is made when anybody computes with it. Nothing can be lost, and a module that attends
without the interface is refused by name.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from clearhead.core.errors import ArgumentError

ATTENDS = re.compile(r"(?i)attention|attn")
# what a tensor is, which is known before it is made; all else that is asked of it has it made
KNOWN = {
    getattr(Tensor, name).__get__
    for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta")
} | {Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__}

# what leaves a mask as it is, where it asks for no other precision or device: hooks do so to every layer's arguments
SAME = {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.detach}


class Promised(Tensor):
    """An additive mask (batch, 1, queries, keys) that is made when it is first computed with.

    `allowed` is the boolean mask, True where a query may attend; None where query i sees the keys up to i and no other
    (`causal`), or every key. Where it was `made`, that counts: it may have been written to.
    """

    allowed: Tensor | None
    causal: bool
    way: str
    make: Callable[[], Tensor]
    made: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One use of the mask as a tensor."""
        kwargs = kwargs or {}
        if func in KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.__getitem__ and isinstance(args[0], Promised):
            with torch._C.DisableTorchFunctionSubclass():
                same = args[0].shape == func(*args).shape and _plain_slices(args[1])
            if same:  # all of it, as models take it that cut masks to the keys there are
                return args[0]
        if func in SAME and isinstance(args[0], Promised):
            with torch._C.DisableTorchFunctionSubclass():
                other = func(*args, **kwargs)
            if args[0].made is None and other.dtype == args[0].dtype and other.device == args[0].device:
                return args[0]
        return func(*_kept(args), **_kept(kwargs))

    def kept(self) -> Tensor:
        """The mask itself, for whoever computes with it; refused where that is attention without the interface."""
        if self.made is None:
            who = None if torch.compiler.is_compiling() else _attends_alone()
            if who is not None:
                raise ArgumentError(
                    "attn_implementation",
                    f"is {self.way!r}, and {who} does not attend through transformers' attention interface, by which "
                    "clearhead reaches a model: expected 'eager', or 'sdpa' where the model has it",
                )
            self.made = self.make()
        return self.made


def mask_for(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
    """The mask function that is registered beside the attention function; its arguments are transformers' own."""
    sizes: dict[str, Any] = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    allowed = sdpa_mask(**sizes, **kwargs)
    causal = allowed is None and kwargs.get("allow_is_causal_skip", True)
    if allowed is None and not causal:
        return None  # every query sees every key, and eager attention has no mask either
    # no memory; were it ever read as it is, NaN would show
    empty = torch.full((), torch.nan, dtype=kwargs.get("dtype", torch.float32), device=kwargs.get("device", "cpu"))
    promise = empty.expand(batch_size, 1, q_length, kv_length).as_subclass(Promised)
    promise.allowed, promise.causal, promise.made = allowed, causal and q_length > 1, None
    promise.way = getattr(kwargs.get("config"), "_attn_implementation", "clearhead")
    promise.make = lambda: eager_mask(**sizes, **kwargs)
    return promise


def _kept(value: Any) -> Any:
    """The same arguments with every promise kept."""
    if isinstance(value, Promised):
        return value.kept()
    if isinstance(value, tuple | list):
        return type(value)(map(_kept, value))
    if isinstance(value, dict):
        return {name: _kept(inner) for name, inner in value.items()}
    return value


def _plain_slices(index: Any) -> bool:
    """Is this the index of a view, which keeps axes as they are?"""
    return all(isinstance(one, slice) or one is Ellipsis for one in (index if isinstance(index, tuple) else (index,)))


def _attends_alone() -> str | None:
    """The attention class that is running, or about to, where none of its model's goes through the interface."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            alone = sorted(name for part in module.modules() if ATTENDS.search(name := type(part).__name__))
            return alone[0] if alone and not reaches(module) else None
        frame = frame.f_back
    return None


def reaches(model: nn.Module) -> bool:
    """Does any part of a model attend through transformers' interface?"""
    kinds: set[Any] = {type(part) for part in model.modules()}
    return any(map(asks, kinds))


@cache
def asks(kind: Any) -> bool:
    """Does a class of modules ask transformers' interface for its attention function?"""
    for base in kind.__mro__:
        if base in (nn.Module, PreTrainedModel):  # which checks the names that are asked for
            continue
        for function in vars(base).values():
            whole = inspect.unwrap(function) if callable(function) else None
            code, known = getattr(whole, "__code__", None), getattr(whole, "__globals__", {})
            if code is not None and any(isinstance(known.get(name), AttentionInterface) for name in _names(code)):
                return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
