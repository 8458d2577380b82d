"""Memory of somebody else's as PyTorch's tensors, by its address."""

from __future__ import annotations

import ctypes
import math

import torch

from clearhead.kernels.extension import TYPES
from clearhead.kernels.xla.lending import Place

NAMES = {number: name for name, number in TYPES.items()}
# what NumPy's names say of types for an array interface; bfloat16 has none there and is read as whole numbers
INTERFACE = {
    "float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<i2", "bool": "|b1", "int32": "<i4",
    "int64": "<i8",
}  # fmt: skip


class OnDevice:
    """Memory of a GPU, as PyTorch reads it."""

    def __init__(self, address: int, kind: str, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": INTERFACE[kind], "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def tensor_at(place: Place, stream: int) -> torch.Tensor:
    """A tensor in memory that is there: of the GPU that this thread has made its own; without a stream, of the CPU."""
    address, number, sizes = place
    kind, shape = NAMES[number], tuple(sizes)
    dtype: torch.dtype = getattr(torch, kind)
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device="cuda" if stream else "cpu")
    if not stream:
        memory = (ctypes.c_byte * (math.prod(shape) * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).reshape(shape)
    found = torch.as_tensor(OnDevice(address, kind, shape), device=torch.device("cuda", torch.cuda.current_device()))
    if found.data_ptr() != address:
        raise RuntimeError("XLA's arrays lie on another GPU than the one that its thread has made its own")
    return found.view(torch.bfloat16) if kind == "bfloat16" else found
