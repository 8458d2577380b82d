"""Dropout that is a function of its seed: the same weights are dropped by every kernel, on every device.

Each weight has a place: the number of its batch row and head, its query and its key. A 32-bit mix of seed and place
gives its random number, so no state is kept, tiles may be computed in any order, and a backward pass drops the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clearhead.core.arrays import Array, dtype_name, is_array, is_torch, is_traced
from clearhead.core.errors import ArgumentError, shown


class Dropout(NamedTuple):
    """Drop each weight with this probability, and scale the others by 1 / (1 - probability).

    >>> import clearhead as ch
    >>> ch.Dropout(probability=0.2, seed=7).rescale
    1.25
    """

    probability: float
    seed: int

    @property
    def rescale(self) -> float:
        """What kept weights are multiplied with, so that the expected output stays."""
        return 1.0 / (1.0 - self.probability)

    @property
    def threshold(self) -> int:
        """A weight is dropped when its 32-bit random number is below this."""
        return round(self.probability * 2**32)

    def halves(self) -> tuple[Array, Array]:
        """The lower and the upper 32 bits of the seed, (1,) each, also of one that JAX traces: it drops the same."""
        if not is_traced(self.seed):
            low, high = np.array([[self.seed & 0xFFFFFFFF], [self.seed >> 32]], dtype=np.uint32)
            return low, high
        seed: Array = self.seed
        seed = seed.reshape(1)
        # shifted with its sign, in two steps: a number of 32 bits cannot be shifted by as many
        return seed.astype(np.uint32), ((seed >> 16) >> 16).astype(np.uint32)

    def keep(self, heads: np.ndarray, rows: range, columns: range) -> np.ndarray:
        """True where a weight is kept: (*heads.shape, rows, columns). `heads` numbers each batch row and head.

        >>> Dropout(0.5, seed=1).keep(np.arange(1), range(2), range(6)).astype(int).tolist()
        [[[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 1]]]
        """
        low, high = self.halves()
        query = np.asarray(rows, dtype=np.uint32)
        key = np.asarray(columns, dtype=np.uint32)
        head = mix(mix(mix(low) ^ high) ^ heads.astype(np.uint32).reshape(-1)).reshape(heads.shape)
        row = mix(head[..., None] ^ query)  # (…, rows)
        return mix(row[..., None] ^ mix(key)) >= np.uint32(min(self.threshold, 0xFFFFFFFF))


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble 32-bit numbers: two rounds of xor-shift and multiply, with each input bit reaching every output bit."""
    x = x + np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))


def is_whole(number: Array) -> bool:
    """True for one whole number of NumPy or JAX."""
    return not number.ndim and dtype_name(number).startswith(("int", "uint"))


def as_dropout(value: object) -> Dropout | None:
    """`(probability, seed)` checked; None, or a probability of zero, is no dropout."""
    if value is None:
        return None
    if not (isinstance(value, tuple) and len(value) == 2):
        raise ArgumentError("dropout", f"is {shown(value)}, expected (probability, seed)")
    probability, seed = value
    if isinstance(probability, bool) or not isinstance(probability, int | float) or not 0 <= probability < 1:
        raise ArgumentError(
            "dropout", f"has probability {shown(probability)}, expected a number from 0 up to, not with, 1"
        )
    if is_torch(seed) and seed.numel() == 1 and not seed.is_floating_point():
        # drawn by PyTorch: a number where it can be read, a tensor until then
        seed = seed if is_traced(seed) else int(seed) % 2**64
    elif not isinstance(seed, int) and not is_torch(seed) and is_array(seed) and is_whole(seed):  # JAX's and NumPy's
        seed = seed if is_traced(seed) else int(seed) % 2**64
    elif isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ArgumentError("dropout", f"has seed {shown(seed)}, expected a whole number from 0 to 2**64 - 1")
    return Dropout(float(probability), seed) if probability else None
