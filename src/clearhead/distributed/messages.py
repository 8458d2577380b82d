"""Stretches of a rank's tensors as one flat message, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def packed(tensors: Sequence[Tensor], places: Sequence[slice]) -> Tensor:
    """Some stretches of the sequence axes (the last but one) of several tensors, end to end."""
    parts = [tensor[..., place, :].reshape(-1) for tensor in tensors for place in places]
    return torch.cat(parts) if parts else tensors[0].new_empty(0)


def count_of(shapes: Sequence[tuple[int, ...]], length: int) -> int:
    """How many numbers so many positions of tensors of these shapes are; their own lengths do not count."""
    return sum(math.prod(shape[:-2]) * length * shape[-1] for shape in shapes)


def unpacked(flat: Tensor, shapes: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """The stretches again, each a tuple with a part of every tensor."""
    found: list[list[Tensor]] = [[] for _ in lengths]
    start = 0
    for shape in shapes:
        for stretch, length in zip(found, lengths, strict=True):
            size = math.prod(shape[:-2]) * length * shape[-1]
            stretch.append(flat[start : start + size].reshape(*shape[:-2], length, shape[-1]))
            start += size
    return [tuple(parts) for parts in found]


def laid(lengths: Sequence[int]) -> list[slice]:
    """Places one after the other.

    >>> laid([2, 3])
    [slice(0, 2, None), slice(2, 5, None)]
    """
    found, start = [], 0
    for length in lengths:
        found.append(slice(start, start + length))
        start += length
    return found
