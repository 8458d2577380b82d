"""PyTorch's `scaled_dot_product_attention`, read: its arguments as a `Given`, or why it cannot be observed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.core.admit import admit, lies_plainly
from clearhead.core.array_masks import of_pytorch
from clearhead.core.masks import Band
from clearhead.torch_bridge.autograd import autocast
from clearhead.watching.given import Given

FUNCTION = F.scaled_dot_product_attention  # as PyTorch has it
# the function as users and as other libraries call it
NAMES = frozenset(
    (
        F.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    )
)


def arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """The arguments by name, however they were passed."""
    return locals()


def unfolded(asked: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """A call of one query a head that was made with the heads of a group as if they were queries, as it was meant.

    transformers, since 5.23, calls PyTorch with (batch, key heads, group, features) where it was `asked` for (batch,
    heads, 1, features), so that keys need not be copied. None for other calls.
    """
    query = args[0] if args else kwargs.get("query")
    if query is asked or asked.ndim != 4 or asked.shape[2] != 1 or not isinstance(query, Tensor) or query.ndim != 4:
        return None
    try:
        call = arguments(*args, **kwargs)
    except TypeError:  # PyTorch says what is wrong with it
        return None
    batch, heads, _, features = asked.shape
    key, mask, group = call["key"], call["attn_mask"], query.shape[2]
    folded = group > 1 and heads % group == 0 and query.shape == (batch, heads // group, group, features)
    if not folded or call["is_causal"] or key.ndim != 4 or key.shape[1] != query.shape[1]:
        return None
    if mask is not None and mask.ndim == 4 and mask.shape[1:3] == query.shape[1:3]:
        mask = mask.reshape(mask.shape[0], heads, 1, mask.shape[-1])
    elif (
        mask is not None and mask.shape[-3:-1].numel() > 1
    ):  # it differs by key head or by query, which is read as it is
        return None
    return call | {"query": query.reshape(asked.shape), "attn_mask": mask, "enable_gqa": True}


def taken(mask: Tensor, query: Tensor) -> Tensor:
    """A mask that PyTorch takes; a ValueError for others, which the model's own call then refuses by itself."""
    if mask.layout is not torch.strided or mask.is_nested or mask.ndim < 2:
        raise ValueError(f"its attn_mask is {mask.layout} of shape {tuple(mask.shape)}")
    (mask,) = autocast(admit("attn_mask", mask))
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise ValueError(f"its attn_mask has dtype {mask.dtype}, and its query {query.dtype}")
    return mask


def hold_numbers(q: Tensor, k: Tensor, v: Tensor) -> None:
    """A ValueError that says why where tensors hold no numbers that can be observed."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    if not inside and type(q) is type(k) is type(v) is Tensor and lies_plainly(q, k, v):
        return  # as nearly all
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise ValueError(f"its {name} is a nested or sparse tensor")
        if tensor.device.type == "meta":
            raise ValueError("its tensors are on the meta device and hold no numbers")
        plain = type(tensor) is Tensor or type(tensor.detach()) is Tensor
        if not plain or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise ValueError(
                f"its {name} is a {type(tensor).__name__} inside a transform, and holds no numbers of its own"
            )


def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Given, float]:
    """A call as a `Given`, and its dropout; a ValueError that says why where it cannot be observed.

    Inside `torch.autocast` PyTorch casts the arguments after this point, so they are cast here.
    """
    call = arguments(*args, **kwargs)
    q, k, v, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    hold_numbers(q, k, v)
    if mask is not None and type(mask) is not Tensor and type(mask).__name__ not in ("CausalBias", "Parameter"):
        raise ValueError(f"its attn_mask is a {type(mask).__name__}, a class of its own")
    heads, key_heads = (t.shape[-3] if t.ndim > 2 else 1 for t in (q, k))
    if heads != key_heads and key_heads != 1 and not call["enable_gqa"]:
        raise ValueError("query and key have different numbers of heads, and enable_gqa is not set")
    q, k, v = autocast(q, k, v)
    causal = bool(call["is_causal"])
    corner = of_pytorch("attn_mask", mask, q, k)
    if isinstance(corner, Band):
        if causal:
            raise ValueError("its attn_mask is a CausalBias beside is_causal=True")
        causal = corner.alignment.align == "start" or q.shape[-2] == k.shape[-2]
        if not causal and q.shape[-2] > k.shape[-2]:
            raise ValueError("its attn_mask lets some queries see nothing, of which PyTorch's ways of this mask differ")
        mask = None if causal else mask._materialize(q.device)
    elif mask is not None:
        mask = taken(mask, q)
    boolean = mask is not None and mask.dtype == torch.bool
    given = Given(
        q,
        k,
        v,
        causal=causal,
        mask=mask if boolean else None,
        bias=None if boolean else mask,
        scale=None if call["scale"] is None else float(call["scale"]),
    )
    return given, float(call["dropout_p"])
