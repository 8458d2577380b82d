"""Masks and biases in wire form: text, tensors and whole numbers, which is all that a PyTorch operator takes.

The text is JSON; arrays and numbers in it are places in the two lists. It is written with plain string formatting, so
that PyTorch's compiler can follow it: the text becomes part of the graph, tensors and numbers stay its inputs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, is_traced, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Alignment, whole_numbers
from clearhead.core.mask import Both, Either, Mask, Not, Where, as_mask
from clearhead.core.masks import Band, Before, Documents, GlobalTokens, RandomBlocks
from clearhead.core.positions import Added, Alibi, Bias, Relative


def tensor(array: Array) -> Array:
    """An array of any library as a PyTorch tensor."""
    torch = sys.modules["torch"]
    if not torch.compiler.is_compiling() and isinstance(array, np.ndarray):
        return torch.from_numpy(np.array(array))  # PyTorch takes no read-only memory without complaint
    return torch.as_tensor(array)


def put(array: Array, arrays: list[Array]) -> str:
    """The place of an array that is added to the list."""
    arrays.append(tensor(array))
    return f"{len(arrays) - 1}"


def count(number: int, numbers: list[int]) -> str:
    """The place of a number that is added to the list."""
    numbers.append(number)
    return f"{len(numbers) - 1}"


def pack_alignment(alignment: Alignment, arrays: list[Array]) -> str:
    """Which end is aligned, or the place of the offset."""
    return f'"{alignment.align}"' if alignment.given is None else put(alignment.given, arrays)


def pack_mask(mask: Mask, arrays: list[Array], numbers: list[int]) -> str:
    """A mask as text; its arrays and numbers are added to the lists.

    >>> import torch
    >>> from clearhead.core.masks import causal, window
    >>> numbers = []
    >>> pack_mask(causal() & ~window(128), [], numbers), numbers
    ('["and",["band",null,0,"end"],["not",["band",1,2,"end"]]]', [0, 128, 0])
    """
    if isinstance(mask, Both | Either):
        name = "and" if isinstance(mask, Both) else "or"
        left = pack_mask(mask.left, arrays, numbers)
        return f'["{name}",{left},{pack_mask(mask.right, arrays, numbers)}]'
    if isinstance(mask, Not):
        return f'["not",{pack_mask(mask.mask, arrays, numbers)}]'
    if isinstance(mask, Where):
        return f'["where",{put(mask.array, arrays)}]'
    if isinstance(mask, Band):
        back = "null" if mask.back is None else count(mask.back, numbers)
        ahead = "null" if mask.ahead is None else count(mask.ahead, numbers)
        return f'["band",{back},{ahead},{pack_alignment(mask.alignment, arrays)}]'
    if isinstance(mask, Before):
        return f'["before","{mask.name}",{put(mask.count, arrays)}]'
    if isinstance(mask, Documents):
        keys = put(mask.keys, arrays)
        return f'["documents",{keys},{"null" if mask.queries is None else put(mask.queries, arrays)}]'
    if isinstance(mask, GlobalTokens):
        indices = put(mask.indices, arrays)
        return f'["global",{indices},{pack_alignment(mask.alignment, arrays)}]'
    if isinstance(mask, RandomBlocks):
        block, many, seed = count(mask.block, numbers), count(mask.count, numbers), count(mask.seed, numbers)
        return f'["random",{block},{many},{seed}]'
    raise ArgumentError(
        "mask", f"is a {type(mask).__name__}, which cannot be traced; where(mask.dense(queries, keys)) can"
    )


def pack_bias(bias: Bias, arrays: list[Array], numbers: list[int]) -> tuple[str, Array | None]:
    """A bias as text, and the tensor in it that may learn."""
    if isinstance(bias, Added):
        return '["added"]', tensor(bias.array)
    if isinstance(bias, Alibi):
        slopes = put(bias.slopes, arrays)
        return f'["alibi",{slopes},{pack_alignment(bias.alignment, arrays)}]', None
    if isinstance(bias, Relative):
        both = "true" if bias.bidirectional else "false"
        most = count(bias.max_distance, numbers)
        return f'["relative",{both},{most},{pack_alignment(bias.alignment, arrays)}]', tensor(bias.table)
    raise ArgumentError("bias", f"is a {type(bias).__name__}, which cannot be traced; an array can")


def unpack_alignment(form: Any, arrays: list[Array]) -> Alignment:
    """The alignment that was packed."""
    return (
        Alignment.of(form, None) if isinstance(form, str) else Alignment("start", whole_numbers("offset", arrays[form]))
    )


def unpack_mask(text: str, arrays: list[Array], numbers: list[int]) -> Mask:
    """The mask that was packed."""

    def number(place: int | None) -> int | None:
        return None if place is None else numbers[place]

    def whole(place: int, argument: str) -> Array:
        return whole_numbers(argument, arrays[place])

    def read(form: list[Any]) -> Mask:
        match form:
            case "and", left, right:
                return Both(read(left), read(right))
            case "or", left, right:
                return Either(read(left), read(right))
            case "not", inner:
                return Not(read(inner))
            case "where", place:
                return as_mask("mask", arrays[place])
            case "band", back, ahead, alignment:
                return Band(number(back), number(ahead), unpack_alignment(alignment, arrays))
            case "before", name, place:
                return Before(name, whole(place, name))
            case "documents", keys, queries:
                return Documents(whole(keys, "documents"), None if queries is None else whole(queries, "queries"))
            case "global", indices, alignment:
                return GlobalTokens(whole(indices, "indices"), unpack_alignment(alignment, arrays))
            case "random", block, many, seed:
                return RandomBlocks(numbers[block], numbers[many], numbers[seed])
        raise ArgumentError("mask", f"has the wire form {form!r}, which nothing writes")

    return read(json.loads(text))


def unpack_bias(text: str, arrays: list[Array], numbers: list[int], learned: Array | None) -> Bias:
    """The bias that was packed."""
    match json.loads(text):
        case ["added"]:
            return Added(learned)
        case "alibi", slopes, alignment:
            # a tensor that holds no numbers has no slopes to read, and only its size is asked for
            return Alibi(readable(arrays[slopes]), unpack_alignment(alignment, arrays))
        case "relative", both, most, alignment:
            return Relative(learned, both, numbers[most], unpack_alignment(alignment, arrays))
    raise ArgumentError("bias", f"has the wire form {text!r}, which nothing writes")


def readable(slopes: Array) -> np.ndarray:
    """The numbers of a tensor; zeros, as many, where it holds none."""
    return np.zeros(tuple(slopes.shape)) if is_traced(slopes) else to_numpy(slopes)
