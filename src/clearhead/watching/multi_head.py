"""`multi_head_attention_forward`, what `nn.MultiheadAttention` calls, with another attention inside it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def wants_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is the function asked for the weights of all pairs?"""
    code = F.multi_head_attention_forward.__code__
    place = code.co_varnames.index("need_weights")
    return bool(args[place] if len(args) > place else kwargs.get("need_weights", True))


def through(attention: Callable[..., Tensor]) -> Callable[..., Any]:
    """`multi_head_attention_forward` with another attention inside: the same code over changed names.

    It asks for the mode before it does anything, and the mode would never see inside; patching the module would be seen
    by every thread.
    """
    source = F.multi_head_attention_forward
    names = {**vars(F), "has_torch_function": lambda _: False, "scaled_dot_product_attention": attention}
    return types.FunctionType(source.__code__, names, source.__name__, source.__defaults__, source.__closure__)
