"""What every face does inside: arguments as the texts hand them over, and attention with its weights."""

from __future__ import annotations

import math

import numpy as np

from clearhead.calls import attention, observe
from clearhead.core.arrays import Array, Library, dtype_name, is_torch, require_array, require_floating
from clearhead.core.errors import ArgumentError
from clearhead.core.formula import blank, score, softmax
from clearhead.core.grid import Grid
from clearhead.core.mask import Mask, as_mask


def both(q: Array, k: Array, v: Array, mask: Mask | Array | None, scale: float) -> tuple[Array, Array]:
    """The output (…, T, d_v) and the weights (…, T, S), both with gradients in PyTorch; True may attend.

    >>> output, weights = both(np.eye(2), np.eye(2), np.eye(2), None, scale=math.log(3))
    >>> weights
    array([[0.75, 0.25],
           [0.25, 0.75]])
    """
    q, k, v = side_by_side(q=q, k=k, v=v)
    may = None if mask is None else allowed(mask, q, (*q.shape[:-1], k.shape[-2]))
    # a mask value and no array: the text has said what its mask means, and nothing has to be made of it
    value = None if may is None else as_mask("mask", may)
    if not is_torch(q):
        seen = observe(q, k, v, mask=value, scale=scale, weights=True)
        return seen.output, Library.of(q).xp.astype(seen.weights, q.dtype)
    output = attention(q, k, v, mask=value, scale=scale)
    # what `observe` gives carries no gradients, and the texts' weights do: by the formula's own steps once more
    q, k, v = blank(may, *map(Library.of(q).computing, (q, k, v)))
    return output, softmax(score(q, k, scale=scale, mask=may))[0].to(output.dtype)


def side_by_side(**arrays: Array) -> list[Array]:
    """The arrays with one set of leading axes, broadcast as the texts' products do; whole numbers become float64.

    To `attention`, two keys for four queries would be grouped heads; in the texts they are a mistake.
    """
    found = [numbers(name, array) for name, array in arrays.items()]
    for name, array in zip(arrays, found, strict=True):
        if array.ndim < 2:
            raise ArgumentError(name, f"has shape {tuple(array.shape)}, expected (…, positions, features)")
    try:
        lead = np.broadcast_shapes(*(tuple(array.shape[:-2]) for array in found))
    except ValueError:
        shapes = ", ".join(str(tuple(array.shape)) for array in found)
        raise ArgumentError(
            ", ".join(arrays), f"have shapes {shapes}, expected the same batch in front of positions and features"
        ) from None
    return [
        array
        if tuple(array.shape[:-2]) == lead
        else Library.of(array).xp.broadcast_to(array, (*lead, *array.shape[-2:]))
        for array in found
    ]


def numbers(name: str, array: Array) -> Array:
    """An array of floating-point numbers; NumPy's whole numbers are what a text writes as [[1, 0], [0, 1]]."""
    require_array(name, array)
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu":
        return array.astype(np.float64)
    require_floating(name, array)
    return array


def of_size(name: str, array: Array, features: int) -> None:
    """Refuse what has another number of features than a class was made for."""
    require_array(name, array)
    if array.ndim < 2 or array.shape[-1] != features:
        raise ArgumentError(name, f"has shape {tuple(array.shape)}, expected (…, positions, d_k = {features})")


def embedded(name: str, array: Array, features: int, expected: str) -> None:
    """Refuse what is no sequence of vectors of so many features, nor a batch of them; `expected` says it in words."""
    require_array(name, array)
    require_floating(name, array)
    if array.ndim not in (2, 3) or array.shape[-1] != features:
        raise ArgumentError(name, f"has shape {tuple(array.shape)}, expected {expected}")


def allowed(mask: Mask | Array, like: Array, shape: tuple[int, ...]) -> Array:
    """A mask as a boolean array of the scores' shape, in the library and on the device of `like`."""
    value = as_mask("mask", mask)
    if len(shape) < 2:
        raise ArgumentError("scaled", f"has shape {shape}, expected (…, queries, keys)")
    *batch, heads, queries, keys = shape if len(shape) > 2 else (1, *shape)
    grid = Grid(tuple(batch), heads, queries, keys)
    value.check(grid)
    tile, library = value.tile(range(queries), range(keys), grid), Library.of(like)
    if isinstance(tile, bool):
        return library.asarray(np.full(shape, tile))
    return library.xp.reshape(library.xp.broadcast_to(library.asarray(tile), grid.shape), shape)


def heads_of(embed_dim: int, num_heads: int) -> tuple[int, int, int]:
    """(embed_dim, num_heads, head_dim), or one sentence that says why not."""
    embed_dim, num_heads = whole("embed_dim", embed_dim, least=1), whole("num_heads", num_heads, least=1)
    if embed_dim % num_heads:
        raise ArgumentError("num_heads", f"is {num_heads}, which does not divide embed_dim {embed_dim}")
    return embed_dim, num_heads, embed_dim // num_heads


def for_pairs(mask: Array, batched: int) -> Array:
    """The course's masks for scores with `batched` axes before (n, n): (n, n), (batch, n, n) or (batch, 1, 1, n).

    A third axis is the batch and never the heads; an axis for heads is left out where the scores have none.
    """
    if isinstance(mask, Mask) or mask is None or mask.ndim <= 2:
        return mask
    if mask.ndim == 3 and batched == 2:
        return mask[:, None]
    if mask.ndim == 4 and batched == 1:
        if mask.shape[1] != 1:
            raise ArgumentError("mask", f"has shape {tuple(mask.shape)}, expected 1 head: Q, K and V have none")
        return mask[:, 0]
    return mask


def whole(argument: str, value: object, least: int = 0) -> int:
    """A whole number, or one sentence that says why not."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ArgumentError(argument, f"is {value!r}, expected a whole number of at least {least}")
    return int(value)


def like_it(array: Array, like: Array) -> Array:
    """An array in the library, dtype and device of another."""
    return Library.of(like).asarray(array, like.dtype)


def divisor(d_k: int) -> float:
    """√d_k, which the texts call `scale` and divide by."""
    return math.sqrt(whole("d_k", d_k, least=1))


def same_dtype(**arrays: Array) -> None:
    """Refuse arrays of two libraries or precisions in one call."""
    (_, first), *others = arrays.items()
    for name, array in others:
        if not Library.of(first).owns(array) or dtype_name(array) != dtype_name(first):
            given, wanted = (f"{Library.of(a).name} of dtype {dtype_name(a)}" for a in (array, first))
            raise ArgumentError(name, f"is {given}, expected {wanted} as {next(iter(arrays))}")
