"""A call that is traced: masks and biases are put into wire form, and the operator is called.

Masks may be made inside a compiled function or outside of it; a changed one is never taken for the old one. Numbers and
arrays in it may change without compiling anew. PyTorch's compiler does not call `~mask` and `array & mask` of a class
that it does not know: the first is made outside, the second is also `where(array) & mask`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.admit import admit, standing
from clearhead.core.arrays import Array, is_torch, stands_in
from clearhead.core.dropout import as_dropout
from clearhead.core.errors import ArgumentError
from clearhead.core.mask import Mask, as_mask
from clearhead.core.positions import Bias, as_bias
from clearhead.core.problem import refuse_gradient
from clearhead.torch_bridge.ops import attention
from clearhead.torch_bridge.transforms import active, transformed
from clearhead.torch_bridge.wire import pack_bias, pack_mask, tensor


def traced_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | Array | None,
    bias: Bias | Array | None,
    scale: float | None,
    softcap: float | None,
    sinks: Array | None,
    dropout: tuple[float, Any] | None,
    kernel: str | None,
) -> Array:
    """`attention` by way of the operator."""
    if not torch.compiler.is_compiling():
        q, k, v, sinks = admit("q", q), admit("k", k), admit("v", v), admit("sinks", sinks)
    if isinstance(mask, np.ndarray):
        mask = tensor(mask)
    if isinstance(bias, np.ndarray):
        bias = tensor(bias)
    if sinks is not None:
        sinks = tensor(sinks)
    refuse_gradient("scale", scale)
    refuse_gradient("softcap", softcap)
    arrays: list[Tensor] = []
    numbers = [0]  # PyTorch takes an empty list for one of tensors
    mask_form = None if mask is None else pack_mask(as_mask("mask", mask), arrays, numbers)
    bias_form, learned = (None, None) if bias is None else pack_bias(as_bias(bias), arrays, numbers)
    drop = as_dropout(dropout)
    seed = None
    if drop is not None:
        seed = drop.seed if isinstance(drop.seed, Tensor) else torch.tensor(signed(drop.seed))
    learns = learned is not None and learned.requires_grad and torch.is_grad_enabled()
    wanting = any(a is not None and a.requires_grad for a in (q, k, v, sinks, learned))
    differentiated = active() or (wanting and torch.is_grad_enabled())
    run = transformed if active() else attention
    inputs = (
        q,
        k,
        v,
        sinks,
        learned,
        seed,
        arrays,
        numbers,
        mask_form,
        bias_form,
        None if scale is None else float(scale),
        None if softcap is None else float(softcap),
        0.0 if drop is None else drop.probability,
        differentiated,
        kernel,
        learns,
    )
    return run(*inputs)[0] if torch.compiler.is_compiling() else taken(run, inputs)[0]


def taken(run: Any, inputs: tuple[Any, ...]) -> Any:
    """The operator's results; a class of tensors that does not take the operator is told of in words."""
    tensors = {"q": inputs[0], "k": inputs[1], "v": inputs[2], "sinks": inputs[3], "bias": inputs[4]}
    tensors |= {f"mask[{i}]": array for i, array in enumerate(inputs[6])}
    classes = {name: standing(t) for name, t in tensors.items() if is_torch(t) and stands_in(t)}
    if not classes:
        return run(*inputs)
    hollow = [name for name, kind in classes.items() if tensors[name].is_meta]
    if hollow and "q" not in hollow:
        raise ArgumentError(hollow[0], 'is on "meta" and holds no numbers, expected numbers as q has')
    try:
        return run(*inputs)
    except (TypeError, NotImplementedError, AssertionError) as error:
        words = str(error).split("\n")[0].split(". ")[0]
        name, kind = next(iter(classes.items()))
        raise ArgumentError(
            name, f"is {kind}, which does not go with the others through clearhead::attention: {words}"
        ) from error


def signed(seed: int) -> int:
    """A seed below 2⁶⁴ as the 64-bit number with a sign that has the same bits."""
    return seed - 2**64 if seed >= 2**63 else seed
