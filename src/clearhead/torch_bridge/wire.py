"""Masks and biases in wire form: text, tensors and whole numbers, which is all that a PyTorch operator takes.

The text is JSON; arrays and numbers in it are places in the two lists. It is written with plain string formatting, so
that PyTorch's compiler can follow it: the text becomes part of the graph, tensors and numbers stay its inputs.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np

from clearhead.core.admit import admit
from clearhead.core.arrays import Array, dtype_name, is_traced, settled, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.core.grid import Alignment, whole_numbers
from clearhead.core.mask import Mask
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
    names = getattr(mask, "__dataclass_fields__", None)
    if names is None:
        raise cannot_be_traced(mask)
    parts = "".join([f",{pack_field(getattr(mask, name), mask, arrays, numbers)}" for name in names])
    return f'["{mask.wire}"{parts}]'


def pack_field(value: Any, mask: Mask, arrays: list[Array], numbers: list[int]) -> str:
    """What a mask is made of: masks as text, words and what is absent as they are, the rest as places in the lists."""
    if value is None:
        return "null"
    if isinstance(value, Mask):
        return pack_mask(value, arrays, numbers)
    if isinstance(value, Alignment):
        return pack_alignment(value, arrays)
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return count(value, numbers) if mask.positional else f'{{"number":{count(value, numbers)}}}'
    if not hasattr(value, "dtype"):
        raise cannot_be_traced(mask)
    return put(value, arrays) if mask.positional else f'{{"array":{put(value, arrays)}}}'


def cannot_be_traced(mask: Mask) -> ArgumentError:
    """What is said of a mask that is more than its fields."""
    return ArgumentError(
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

    def read(form: list[Any]) -> Mask:
        name, *parts = form
        kind: Any = Mask.by_wire.get(name)
        if kind is None:
            raise ArgumentError("mask", f"has the wire form {form!r}, which nothing writes")
        read_as = declared(kind)
        mask: Mask = kind(**{name: value(part, read_as[name]) for name, part in zip(read_as, parts, strict=True)})
        return mask

    def value(part: Any, words: frozenset[str]) -> Any:
        if part is None:
            return None
        if isinstance(part, list):
            return read(part)
        if isinstance(part, bool):
            return part
        if isinstance(part, dict) and "number" in part:
            return numbers[part["number"]]
        if "Alignment" in words:
            return unpack_alignment(part, arrays)
        if isinstance(part, str):
            return part
        if "int" in words and not isinstance(part, dict):
            return numbers[part]
        array = arrays[part["array"] if isinstance(part, dict) else part]
        return settled(admit("mask", array)) if dtype_name(array) == "bool" else whole_numbers("mask", array)

    return read(json.loads(text))


@cache
def declared(kind: Any) -> dict[str, frozenset[str]]:
    """The fields of a class of masks, and the words of their types.

    >>> from clearhead.core.masks import Band
    >>> {name: sorted(words) for name, words in declared(Band).items()}
    {'back': ['None', 'int'], 'ahead': ['None', 'int'], 'alignment': ['Alignment']}
    """
    return {field.name: frozenset(re.findall(r"\w+", str(field.type))) for field in fields(kind)}


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
