"""Random problems as data: one whole number gives a problem, which can be printed, cut down, and pinned as a line.

Draws are weighted to the borders: sizes around tiles and panels, few queries over many keys, numbers that are not
finite, softmax that saturates, masks that leave nothing, strides that nobody expects.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np
from meaning import Sizes, Tree, alibi_slopes, allowed_pairs, bucket, kept_weights, position
from reference import Question

SMALL = (1, 1, 2, 3, 5, 7, 8, 11, 13, 16, 17, 19, 23)
BORDERS = (31, 32, 33, 63, 64, 65, 127, 128, 129)
FAR = (191, 192, 193, 255, 256, 257, 384, 511, 512, 513, 575, 577)
FEATURES = (1, 2, 3, 4, 5, 7, 8, 8, 11, 13, 16, 17)
PLACES = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@dataclass(frozen=True)
class Drawn:
    """One problem. Every field that is left at its default is an ordinary call."""

    numbers: int = 0  # what the random numbers are drawn from
    verb: str = "attention"  # attention, observe, gradients, autograd, merge, merged autograd
    library: str = "numpy"
    kernel: str | None = None
    isa: str = ""
    tile: tuple[int, int] | None = None
    dtype: str = "float32"
    batch: tuple[tuple[int, ...], ...] = ((), (), ())  # of q, k and v
    key_heads: int = 1
    group: int = 1
    queries: int = 3
    keys: int = 5
    features: int = 4
    width: int = 3
    flat: bool = False
    large: float = 1.0  # what queries are multiplied with
    mask: Tree | None = None
    bias: Tree | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: float | None = None  # added to a normal number for each head
    dropout: tuple[float, int] | None = None
    layouts: tuple[str, str, str, str] = ("plain", "plain", "plain", "plain")  # of q, k, v and dout
    planted: tuple[Tree, ...] = ()  # ("padding", kind) or (array, kind, number of the place)
    want: tuple[tuple[str, Any], ...] = ()
    cuts: tuple[int, ...] = ()  # where a merge splits the keys
    through_lse: bool = False  # is the loss of the log-sum-exp too; of a merge it always is
    wants: str = "qkv"  # of which arrays PyTorch is asked for gradients: q, k, v, s(inks), b(ias)

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Drawn({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @property
    def whole_batch(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*self.batch)

    @property
    def sizes(self) -> Sizes:
        rows = int(np.prod(self.whole_batch))
        return Sizes(rows, self.key_heads * self.group, self.queries, self.keys)


def number_type(dtype: str) -> np.dtype:
    """NumPy's dtype, which for bfloat16 is not NumPy's own."""
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def normal(drawn: Drawn, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The same numbers for the same name, whatever else the problem has."""
    return np.random.default_rng([drawn.numbers, zlib.crc32(name.encode())]).standard_normal(shape)


def question(drawn: Drawn) -> Question:
    """The problem in full arrays, in the numbers that its own precision holds."""
    sizes, dtype = drawn.sizes, number_type(drawn.dtype)
    shapes = {
        "q": (*drawn.batch[0], sizes.heads, drawn.queries, drawn.features),
        "k": (*drawn.batch[1], drawn.key_heads, drawn.keys, drawn.features),
        "v": (*drawn.batch[2], drawn.key_heads, drawn.keys, drawn.width),
        "dout": (*drawn.whole_batch, sizes.heads, drawn.queries, drawn.width),
    }
    arrays = {name: normal(drawn, name, shape) for name, shape in shapes.items()}
    arrays["q"] *= drawn.large
    for name, layout in zip(arrays, drawn.layouts, strict=True):
        if layout == "expanded" and 0 not in arrays[name].shape:  # one head for all of them
            arrays[name] = np.broadcast_to(arrays[name][..., :1, :, :], shapes[name]).copy()
    allowed = allowed_pairs(drawn.mask, sizes)
    for plant in drawn.planted:
        planted(drawn, arrays, allowed, plant)
    with np.errstate(all="ignore"):
        q, k, v, dout = (a.astype(dtype).astype(np.float64) for a in arrays.values())
    scale = 1 / np.sqrt(drawn.features) if drawn.scale is None else drawn.scale
    dlse = normal(drawn, "dlse", shapes["dout"][:-1]) * (drawn.through_lse or drawn.verb == "merged autograd")
    keep = None if drawn.dropout is None else kept_weights(*drawn.dropout, sizes)
    return Question(
        q=q,
        k=k,
        v=v,
        dout=dout,
        dlse=dlse.astype(np.float64 if drawn.dtype == "float64" else np.float32).astype(np.float64),
        allowed=allowed,
        scale=scale,
        bias=None if drawn.bias is None else np.broadcast_to(bias_array(drawn), sizes),
        softcap=drawn.softcap,
        sinks=sink_array(drawn),
        keep=keep,
        rescale=1 if drawn.dropout is None else 1 / (1 - drawn.dropout[0]),
        by_steps="autograd" in drawn.verb,
    )


def planted(drawn: Drawn, arrays: dict[str, np.ndarray], allowed: np.ndarray, plant: Tree) -> None:
    """Numbers that are not finite: in all that nobody may see, or at one place."""
    if plant[0] == "padding":
        number = PLACES[plant[1]]
        # a merge of parts takes part in every row, so there a gradient is given to all of them
        idle = ~allowed.any(-1).reshape(arrays["dout"].shape[:-1])
        arrays["dout"][idle & (drawn.verb != "merged autograd")] = number
        for name, batch in zip("qkv", drawn.batch, strict=True):
            # who shares a batch row or a key head must all leave it alone
            array = arrays[name]
            by = allowed.any(-1) if name == "q" else allowed.any(-2)  # (rows, heads, positions)
            by = by.reshape(*drawn.whole_batch, *by.shape[1:])
            rank = len(drawn.whole_batch)
            full = (1,) * (rank - len(batch)) + batch
            for axis in range(rank):
                if full[axis] != by.shape[axis]:
                    by = by.any(axis, keepdims=True)
            by = by.reshape(*batch, *by.shape[rank:])
            if name != "q":
                by = by.reshape(*batch, drawn.key_heads, drawn.group, drawn.keys).any(-2)
            array[~by] = number
        return
    name, kind, place = plant
    if arrays[name].size:
        arrays[name].reshape(-1)[place % arrays[name].size] = PLACES[kind]


def sink_array(drawn: Drawn) -> np.ndarray | None:
    """A logit for each head."""
    if drawn.sinks is None:
        return None
    return (normal(drawn, "sinks", (drawn.sizes.heads,)) + drawn.sinks).astype(np.float32)


def bias_array(drawn: Drawn) -> np.ndarray:
    """The bias as an array that broadcasts to (rows, heads, queries, keys), pair by pair where it is a rule."""
    assert drawn.bias is not None
    kind, *given = drawn.bias
    sizes = drawn.sizes
    if kind == "array":
        axes, dtype, gone = given
        array = normal(drawn, "bias", sizes.along(axes))
        missing = np.random.default_rng([drawn.numbers, 3]).random(array.shape) < gone
        return np.where(missing, -np.inf, array).astype(dtype).astype(np.float64)
    if kind == "alibi":
        align, offset = given
        slopes = alibi_slopes(sizes.heads)
        return np.array(
            [
                [[[-slope * abs(j - position(i, b, align, offset, sizes)) for j in range(sizes.keys)]
                  for i in range(sizes.queries)] for slope in slopes] for b in range(sizes.batch)
            ]
        ).reshape(sizes)  # fmt: skip
    table, chosen = table_array(drawn), buckets_of(drawn)
    return np.array([[table[chosen[b], h] for h in range(sizes.heads)] for b in range(sizes.batch)]).reshape(sizes)


def table_array(drawn: Drawn) -> np.ndarray:
    """The table of a relative bias, (buckets, heads)."""
    assert drawn.bias is not None
    return normal(drawn, "table", (drawn.bias[1], drawn.sizes.heads)).astype(np.float32)


def buckets_of(drawn: Drawn) -> np.ndarray:
    """The bucket of each pair in each batch row."""
    assert drawn.bias is not None
    _, count, both, most, align, offset = drawn.bias
    sizes = drawn.sizes
    known = [
        bucket(j - position(i, b, align, offset, sizes), count, both, most)
        for b in range(sizes.batch)
        for i in range(sizes.queries)
        for j in range(sizes.keys)
    ]
    return np.array(known, int).reshape(sizes.batch, sizes.queries, sizes.keys)
