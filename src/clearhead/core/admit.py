"""The gate in front of every kernel: numbers that lie in memory pass; others are made so, or refused in words."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, is_torch, refuse_masked, stands_in
from clearhead.core.errors import ArgumentError

# classes of tensors that hold no numbers of their own, and what to give instead
INSTEAD = {
    "CausalBias": "a causal mask without numbers: mask=causal(align='start') or causal() means the same",
    "DTensor": "cut over machines: give each its part, .to_local(), or all of it, .full_tensor()",
    "MaskedTensor": "half hidden: give its numbers, get_data(), and mask= what it hides",
    "UninitializedParameter": "not yet initialised: run the module once before",
    "UninitializedBuffer": "not yet initialised: run the module once before",
}


def admit(argument: str, array: Array) -> Array:
    """The array as a kernel may read it: as it is where its numbers lie in memory, made so where that is exact.

    What stands for numbers that come later (compiled, fake, on "meta", in torch.func) passes; where numbers are read at
    once, `require_numbers` refuses it.

    >>> admit("q", np.ones(3))
    array([1., 1., 1.])
    """
    if type(array) is np.ndarray:
        return array
    if not is_torch(array):
        refuse_masked(argument, array)
        return array
    torch = sys.modules["torch"]
    return array if torch.compiler.is_compiling() or lies_plainly(array) else _made_plain(argument, array)


def lies_plainly(*tensors: Array) -> bool:
    """True for PyTorch tensors whose memory holds their numbers as they are; asked of every call, so it is quick."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "strided"):  # another thread may be importing it
        return False
    whole, strided = torch.Tensor, torch.strided
    for tensor in tensors:
        if type(tensor) is not whole and type(tensor) is not torch.nn.Parameter:
            return False
        if tensor.layout is not strided or tensor.is_neg() or tensor.is_nested:
            return False
        try:
            if not tensor.data_ptr():  # zeros that are not stored, memory given back, nothing at all
                return False
        except RuntimeError:  # a tensor around another one, as torch.func has them
            return False
    return True


def _made_plain(argument: str, tensor: Array) -> Array:
    """A tensor with its numbers in memory, or the sentence that refuses it."""
    torch = sys.modules["torch"]
    refuse_by_class(argument, tensor)
    if tensor.is_nested:
        raise ArgumentError(argument, "is a nested tensor, expected a padded one: mask=lengths(…) hides its padding")
    functorch = torch._C._functorch
    transforming = functorch.peek_interpreter_stack() is not None
    if functorch.is_functorch_wrapped_tensor(tensor):
        if not transforming:
            raise ArgumentError(argument, "has left the transform of torch.func that it belongs to, expected numbers")
        return tensor
    if torch._is_functional_tensor(tensor):
        if torch._C._len_torch_dispatch_stack():
            return tensor
        torch._sync(tensor)
        return torch._from_functional_tensor(tensor)
    if stands_in(tensor):
        return tensor
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor._is_zerotensor():
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) + tensor
    if tensor.numel() and not tensor.data_ptr():
        raise ArgumentError(argument, "has no memory any more, expected numbers: its storage was given back")
    return tensor


def refuse_by_class(argument: str, value: object) -> None:
    """Refuse tensors of a class that says by itself that its numbers are elsewhere, before that class is asked."""
    name = type(value).__name__
    if name in INSTEAD and is_torch(value):
        raise ArgumentError(argument, f"is a {name}, {INSTEAD[name]}")


def require_numbers(kernel: str | None, **arrays: Any) -> None:
    """Refuse tensors that hold no numbers where these are read at once, as `observe` and `gradients` do.

    The `dense` kernel is made of PyTorch's own steps, which torch.func follows.
    """
    torch = sys.modules.get("torch")
    if torch is None or not any(map(is_torch, arrays.values())):
        return
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        raise ArgumentError(
            next(iter(arrays)), "is traced, expected numbers: call it outside torch.compile, torch.export and modes"
        )
    for name, tensor in arrays.items():
        if not is_torch(tensor) or lies_plainly(tensor):
            continue
        plain = _made_plain(name, tensor)
        if torch._C._functorch.is_functorch_wrapped_tensor(plain):
            if kernel != "dense":
                raise ArgumentError(
                    name, "is inside a transform of torch.func, expected numbers; kernel='dense' can be transformed"
                )
        elif stands_in(plain):
            raise ArgumentError(name, f"is traced, expected numbers: it is {standing(tensor)}")


def standing(tensor: Array) -> str:
    """What a tensor without numbers is, in few words."""
    return 'on "meta"' if type(tensor).__name__ in ("Tensor", "Parameter") else f"a {type(tensor).__name__}"
