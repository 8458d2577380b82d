"""Masks out of arrays: where, lets, hides and padding; nothing is guessed about what a 1 or a True means.

>>> upper = np.triu(np.ones((3, 3)), 1)                  # as many texts write it: 1 hides
>>> print(hides(upper).picture(3))
■ · ·
■ ■ ·
■ ■ ■
>>> print(padding([[1, 1, 0]]).picture(2, 3, batch=(1,)))
■ ■ ·
■ ■ ·
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.core.admit import admit
from clearhead.core.arrays import Array, dtype_name, is_array, is_torch, refuse_masked, settled
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Grid, certainly
from clearhead.core.mask import Mask, Where, as_mask
from clearhead.core.masks import causal

# sizes of the triangles that are looked for: smaller ones come about by chance, larger ones take long to compare
SMALLEST, LARGEST = 3, 4096
# what PyTorch's compiler can make a tensor of; a union of types is more than it follows
KINDS = (np.ndarray, list, tuple)


def where(array: Array) -> Mask:
    """A boolean array as a mask value, True where a query may attend; it broadcasts to (*batch, heads, T, S).

    >>> import numpy as np
    >>> print(where(np.eye(3, dtype=bool)).picture(3))
    ■ · ·
    · ■ ·
    · · ■
    """
    return as_mask("where", _own(array))


def lets(array: Array) -> Mask:
    """`where` that takes 1 and 0 as well: True or 1, of any kind of number, where a query may attend.

    >>> lets(np.tri(3)) == where(np.tri(3, dtype=bool))
    True

    Other numbers are refused. On an accelerator, and where an array is traced, they are not read: what is not 0 is 1.
    """
    return as_mask("lets", array if isinstance(array, Mask) else truths("lets", array))


def hides(array: Array) -> Mask:
    """The opposite of `lets`: True or 1 where a query may **not** attend, as in `torch.nn.MultiheadAttention`.

    >>> hides(np.array([[0, 1, 1], [0, 0, 1], [0, 0, 0]])).explain(0, 2)
    'query 0 may not attend to key 2: where(array(3, 3)) holds False there'
    """
    if isinstance(array, Mask):
        raise ArgumentError("hides", f"is {array!r}, expected an array; the opposite of a mask value is ~mask")
    return as_mask("hides", ~truths("hides", array))


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Where):
    """Which keys are real, (batch, 1, 1, keys) or (1, keys): unlike other arrays never stretched over keys."""

    wire = "padding"

    def check(self, grid: Grid) -> None:
        keys = self.array.shape[-1]
        if certainly(keys != grid.keys):
            raise ArgumentError("padding", f"has {keys} keys in a row, expected {grid.keys}: {grid}")
        super().check(grid)


def padding(attention_mask: Any) -> Mask:
    """Which keys are real, as tokenizers say it: (batch, S) or (S,), 1 or True for a token and 0 for padding.

    Padding may be on either side, or anywhere. Queries that are padding themselves see what the others see; what comes
    out for them means nothing.

    >>> causal_too = padding([[0, 1, 1], [1, 1, 1]])                # the first row is padded on the left
    >>> causal_too.dense(1, 3, batch=(2,))[:, 0, 0].astype(int).tolist()
    [[0, 1, 1], [1, 1, 1]]
    """
    if isinstance(attention_mask, list | tuple):
        attention_mask = _own(attention_mask)
    if isinstance(attention_mask, list | tuple):
        try:
            attention_mask = np.asarray(attention_mask)
        except ValueError:  # rows that have not the same length
            raise ArgumentError("padding", "has rows of different lengths, expected (batch, keys)") from None
    real = truths("padding", attention_mask)
    if real.ndim not in (1, 2):
        shape = tuple(real.shape)
        raise ArgumentError("padding", f"has shape {shape}, expected (batch, keys) or (keys,), 1 where a token is real")
    mask = as_mask("padding", real if real.ndim == 1 else real[:, None, None, :])
    assert isinstance(mask, Where)
    return Padding(mask.array)


def truths(argument: str, array: Array) -> Array:
    """Zeros and ones of any kind of number as booleans; other numbers are refused where they can be read at once."""
    refuse_masked(argument, array)
    array = _own(array)
    if not is_array(array):
        raise ArgumentError(argument, f"is a {type(array).__name__}, expected an array of True and False, or 1 and 0")
    array = admit(argument, array)
    name = dtype_name(array)
    if name == "bool":
        return array
    if not name.startswith(("int", "uint", "float", "bfloat")) or name.startswith("float8"):
        raise ArgumentError(argument, f"has dtype {name}, expected True and False, or 1 and 0")
    if not _compiling():
        array = settled(array)
        if isinstance(array, np.ndarray):
            other = array[(array != 0) & (array != 1)]
            if other.size:
                added = "; what is added to scores goes into bias=" if name.startswith(("float", "bfloat")) else ""
                raise ArgumentError(argument, f"has {other.flat[0]}, expected True and False, or 1 and 0{added}")
    return array != 0


def given_mask(argument: str, value: Mask | Array) -> Mask:
    """The mask that a caller gives to a call: `as_mask`, and an array that says the opposite of causal is refused.

    Who means it says so: `where(array)` and every other mask value is taken as it is.
    """
    if isinstance(value, Mask):
        return value
    mask = as_mask(argument, _own(value))
    if is_mirrored(mask):
        raise ArgumentError(
            argument,
            "lets each query attend to what comes after it and hides what comes before, the mirror image of causal():"
            " True means may attend; give hides(mask) where True hides, or where(mask) if it is meant",
        )
    return mask


def is_mirrored(mask: Mask) -> bool:
    """True for an array that is exactly the triangle above the diagonal, with or without it.

    Three numbers tell nearly every other array; what lies on an accelerator or is traced is not looked at.
    """
    if not isinstance(mask, Where) or not isinstance(mask.array, np.ndarray) or _compiling():
        return False
    array = mask.array
    side = array.shape[-1]
    if array.shape[-2] != side or not SMALLEST <= side <= LARGEST or not array.size:
        return False
    first = array[(0,) * (array.ndim - 2)]
    if not first[0, -1] or first[1, 0] or first[-1, 0]:
        return False
    triangle = np.triu(np.ones((side, side), bool), 0 if first[0, 0] else 1)
    return np.array_equal(first, triangle) and bool((array == triangle).all())


def of_pytorch(argument: str, mask: Any, q: Array, k: Array) -> Any:
    """PyTorch's `CausalBias` as the mask that it means; anything else as it is.

    It is a tensor whose memory holds nothing: what it says is its sizes and which corner is aligned.
    """
    if type(mask).__name__ != "CausalBias" or not is_torch(mask):
        return mask
    sizes, expected = (mask.seq_len_q, mask.seq_len_kv), (*q.shape[-2:-1], *k.shape[-2:-1])
    if sizes != expected:
        raise ArgumentError(argument, f"is a CausalBias of sizes {sizes}, expected {expected}: queries and keys")
    return causal(align="start" if mask.variant.name == "UPPER_LEFT" else "end")


def _own(array: Any) -> Any:
    """What PyTorch compiles stays its own: there, NumPy arrays are tensors in disguise, and lists become tensors."""
    if _compiling() and isinstance(array, KINDS):
        return sys.modules["torch"].as_tensor(array)
    return array


def _compiling() -> bool:
    """True while PyTorch compiles: arrays then stand for numbers to come."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()
