"""The forms a function may have its arrays in: layouts, packed heads, and modules with projections of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.doctor.probes import Probe, tolerance
from clearhead.doctor.projections import Projections
from clearhead.doctor.sizes import Sizes
from clearhead.doctor.turning import rotate, rotated_errors
from clearhead.doctor.variants import RIGHT, Variant, causal_allowed, compute, scale_of, spread, taken

# Weights that are no exponentials divided by their own row's sum: an error is magnified as the weights are
DIVIDED = ("sum", "absolute sum", "sum of absolutes", "positive sum", "maximum", "absolute maximum", "norm", "none")


@dataclass(frozen=True)
class Form:
    """How q (B, H, T, D), k and v are handed over, and how the answer comes back in (B, H, T, Dv)."""

    name: str
    words: str
    axes: tuple[int, ...] = (0, 1, 2, 3)  # where each of (B, H, T, D) stands; packed and missing axes differ
    back: tuple[int, ...] | None = None  # the same for the output, where it differs
    shared: str = ""  # which of q, k and v are one and the same input
    packed = False

    def fit(self, sizes: Sizes) -> Sizes:
        """The sizes cut down to the axes that this form has."""
        heads, groups = (sizes.heads, sizes.groups) if 1 in self.axes else (1, 1)
        sizes = replace(sizes, batch=sizes.batch if 0 in self.axes else 1, heads=heads, groups=groups)
        if self.shared:
            sizes = replace(sizes, width=sizes.features)
        return replace(sizes, keys=sizes.queries, groups=1) if self.shared == "qkv" else sizes

    def inner(self, sizes: Sizes) -> Sizes:
        """The sizes of one head, and how many there are, for whoever takes them as numbers."""
        return sizes

    def give(self, probe: Probe) -> tuple[np.ndarray, ...]:
        """The arrays as the function takes them: as many as are not shared."""
        return tuple(self.lay(a) for a in (probe.q, probe.k, probe.v)[: 3 - max(len(self.shared) - 1, 0)])

    def lay(self, array: np.ndarray) -> np.ndarray:
        """One array in this form's axes."""
        missing = [axis for axis in range(4) if axis not in self.axes]
        order = [*missing, *self.axes]
        return np.ascontiguousarray(array.transpose(order)[(0,) * len(missing)])

    def take(self, output: np.ndarray, probe: Probe) -> np.ndarray | None:
        """The answer in (B, H, T, Dv); None where it has another number of axes."""
        axes = self.back or self.axes
        if output.ndim != len(axes):
            return None
        missing = [axis for axis in range(4) if axis not in axes]
        return output[(None,) * len(missing)].transpose(np.argsort([*missing, *axes]))

    def shapes(self, probe: Probe) -> tuple[tuple[int, ...], ...]:
        """The shapes that an answer may have: a wrong function may average keys, or queries."""
        sizes = probe.sizes
        lead = (sizes.batch, sizes.heads, sizes.queries)
        return (*lead, sizes.width), (*lead, sizes.features)

    def take_weights(self, weights: np.ndarray, probe: Probe) -> np.ndarray | None:
        """The weights in (B, H, T, S), where heads, if any, come before the queries as they nearly always do."""
        if weights.ndim != len(self.axes):
            return None
        lead = (probe.sizes.batch if 0 in self.axes else 1, probe.sizes.heads if 1 in self.axes else 1)
        shape = (*lead, *weights.shape[-2:])
        return weights.reshape(shape) if weights.size == np.prod(shape) else None

    def reference(self, variant: Variant, probe: Probe, align: str = "end") -> tuple[np.ndarray, np.ndarray] | None:
        """(output, weights) that a variant gives, exactly; None where its sizes do not fit."""
        return compute(variant, probe.q, probe.k, probe.v, allowing(variant, probe, align))

    def tolerance(self, probe: Probe, weights: np.ndarray, eps: float, variant: Variant = RIGHT) -> np.ndarray:
        """How far an answer may be from `reference`."""
        return _allowance(variant, (probe.q, probe.k, probe.v), weights, eps)


def _allowance(
    variant: Variant,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    weights: np.ndarray,
    eps: float,
    errors: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """The tolerance of a variant, whichever arrays it takes for queries, keys and values."""
    scale = abs(scale_of(variant, *arrays))
    q, k, v = taken(variant, arrays[0], *(spread(variant, arrays[0], a) for a in arrays[1:]))
    if errors is not None:
        errors = taken(variant, errors[0], *(spread(variant, errors[0], a) for a in errors[1:]))
    if variant.rotary:
        dq, dk, dv = (np.zeros_like(a) for a in (q, k, v)) if errors is None else errors
        dq, dk = (eps * rotated_errors(variant.rotary, a, e / eps) for a, e in ((q, dq), (k, dk)))
        q, k, errors = rotate(variant.rotary, q), rotate(variant.rotary, k), (dq, dk, dv)
    found = tolerance(q, k, v, weights, scale, eps, errors)
    if variant.axis in DIVIDED:
        magnified = 1.0 + np.abs(weights).sum(-1).max(initial=0.0)
        return np.full_like(found, 128 * magnified * found.max(initial=0.0))
    # where a softmax runs over another axis, an error reaches other rows than its own: the largest holds for all
    alone = variant.axis == "keys" and variant.values not in ("turned weights", "reshaped", "untransposed")
    return found if alone else np.full_like(found, found.max(initial=0.0))


def allowing(variant: Variant, probe: Probe, align: str) -> np.ndarray | None:
    """The mask and the causal flag of a problem together, (B, 1, T, S) or None."""
    allowed = probe.allowed
    if probe.causal:
        sizes = probe.sizes
        seen = causal_allowed(variant.causal, sizes.queries, sizes.keys, align)
        allowed = np.broadcast_to(seen, (sizes.batch, 1, *seen.shape)) if allowed is None else allowed & seen
    return allowed


def split(array: np.ndarray, heads: int, way: str) -> np.ndarray:
    """(B, T, H·D) → (B, H, T, D); the other ways mix positions, heads or features."""
    batch, length, width = array.shape
    if way == "reshape":
        return array.reshape(batch, heads, length, width // heads)
    if way.startswith("whole"):
        return array[:, None]
    if way == "unmoved":
        return array.reshape(batch, length, heads, width // heads)
    if way == "features first":
        return array.reshape(batch, length, width // heads, heads).transpose(0, 3, 1, 2)
    return array.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def _fused(arrays: tuple[np.ndarray, ...], heads: int, way: str) -> tuple[np.ndarray, ...]:
    """q, k and v, (B, T, 3·H·D) in one, reshaped without a transpose to the axes that the way names."""
    if len({array.shape for array in arrays}) > 1:
        return arrays
    joined = np.concatenate(arrays, axis=-1)
    batch, length, width = arrays[0].shape
    sizes = {"3": 3, "B": batch, "H": heads, "T": length, "D": width // heads}
    axes = way.split()[1]
    if axes.endswith("3D"):
        return tuple(np.split(joined.reshape(batch, heads, length, -1), 3, axis=-1))
    return tuple(np.moveaxis(joined.reshape([sizes[axis] for axis in axes]), axes.index("3"), 0))


def _strengthened(way: str, heads: int) -> float:
    """What makes the scale of the whole width that of one head's."""
    return float(np.sqrt(heads)) if way == "whole scaled" else 1.0


def merge(array: np.ndarray, way: str, length: int | None = None) -> np.ndarray:
    """(B, H, T, D) → (B, T, H·D), and the ways that mix heads or features into positions."""
    if way in ("transpose", "reversed"):
        array = (array[:, ::-1] if way == "reversed" else array).swapaxes(1, 2)
    elif way == "features first":
        array = array.transpose(0, 2, 3, 1)
    length = array.shape[2 if way == "reshape" else 1] if length is None else length
    return array.reshape(array.shape[0], length, -1)


@dataclass(frozen=True)
class Merged(Form):
    """(B, H, T, D) in, and the heads of the output merged into (B, T, H·Dv)."""

    def take(self, output: np.ndarray, probe: Probe) -> np.ndarray | None:
        heads = probe.sizes.heads
        return split(output, heads, "transpose") if output.ndim == 3 and not output.shape[-1] % heads else None


@dataclass(frozen=True)
class Apart(Form):
    """(B, T, H, D): whoever takes it has to transpose heads and positions, and may mix them up."""

    packed = True

    def reference(self, variant: Variant, probe: Probe, align: str = "end") -> tuple[np.ndarray, np.ndarray] | None:
        q, k, v = self.heads_of(variant, (probe.q, probe.k, probe.v))
        found = compute(variant, q, k, v, allowing(variant, probe, align))
        if found is None or (variant.merge, variant.split) == ("transpose", "transpose"):
            return found
        length, heads = probe.sizes.queries, probe.sizes.heads
        return split(merge(found[0], variant.merge, length), heads, "transpose"), found[1]

    def heads_of(self, variant: Variant, arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """The arrays in heads, as a variant splits them."""
        if variant.split == "transpose":
            return arrays
        q, k, v = (split(merge(a, "transpose"), a.shape[1], variant.split) for a in arrays)
        return q * _strengthened(variant.split, arrays[0].shape[1]), k, v

    def tolerance(self, probe: Probe, weights: np.ndarray, eps: float, variant: Variant = RIGHT) -> np.ndarray:
        q, k, v = self.heads_of(variant, (probe.q, probe.k, probe.v))
        found = _allowance(variant, (q, k, v), weights, eps)
        if (variant.merge, variant.split) == ("transpose", "transpose"):
            return found
        return np.full((*probe.q.shape[:3], probe.v.shape[-1]), found.max(initial=0.0))


@dataclass(frozen=True)
class Packed(Apart):
    """(B, T, H·D) with the number of heads said beside it."""

    def give(self, probe: Probe) -> tuple[np.ndarray, ...]:
        arrays = (probe.q, probe.k, probe.v)[: 3 - max(len(self.shared) - 1, 0)]
        return tuple(np.ascontiguousarray(merge(a, "transpose")) for a in arrays)

    def take(self, output: np.ndarray, probe: Probe) -> np.ndarray | None:
        heads = probe.sizes.heads
        if output.ndim != 3 or output.shape[-1] % heads:
            return None
        return split(output, heads, "transpose")

    def take_weights(self, weights: np.ndarray, probe: Probe) -> np.ndarray | None:
        return weights if weights.ndim == 4 else None


@dataclass(frozen=True)
class Module(Form):
    """A multi-head module, (B, T, E), held against its own projections. Compared as (B, 1, T, E)."""

    projections: Projections | None = None
    batch_first: bool = True
    packed = True

    @property
    def order(self) -> str:
        """The axes in words."""
        first = "batch, positions" if self.batch_first else "positions, batch"
        return f"({first if 0 in self.axes else 'positions'}, {self.own.embed})"

    @property
    def own(self) -> Projections:
        """The projections, which a module always has."""
        assert self.projections is not None
        return self.projections

    def fit(self, sizes: Sizes) -> Sizes:
        width, batch = self.own.embed, sizes.batch if 0 in self.axes else 1
        keys = sizes.queries if self.shared == "qkv" else sizes.keys
        return replace(sizes, batch=batch, heads=1, keys=keys, features=width, width=width, groups=1)

    def inner(self, sizes: Sizes) -> Sizes:
        own = self.own
        groups = own.heads // own.key_heads
        return replace(sizes, heads=own.heads, features=own.features, width=own.features, groups=groups)

    def give(self, probe: Probe) -> tuple[np.ndarray, ...]:
        arrays = (probe.q, probe.k, probe.v)[: 3 - max(len(self.shared) - 1, 0)]
        if 0 not in self.axes:
            return tuple(np.ascontiguousarray(a[0, 0]) for a in arrays)
        given = (a[:, 0] for a in arrays)
        return tuple(np.ascontiguousarray(a if self.batch_first else a.swapaxes(0, 1)) for a in given)

    def take(self, output: np.ndarray, probe: Probe) -> np.ndarray | None:
        if 0 not in self.axes:
            return output[None, None] if output.ndim == 2 else None
        if output.ndim != 3:
            return None
        return (output if self.batch_first else output.swapaxes(0, 1))[:, None]

    def shapes(self, probe: Probe) -> tuple[tuple[int, ...], ...]:
        return ((probe.sizes.batch, 1, probe.sizes.queries, self.own.width),)

    def take_weights(self, weights: np.ndarray, probe: Probe) -> np.ndarray | None:
        return weights if weights.ndim == 4 else None

    def heads_of(self, probe: Probe, way: str) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """The inputs projected and split into heads, and how far each may be off for an eps of one."""
        counts = (self.own.heads, self.own.key_heads, self.own.key_heads)
        arrays = (probe.q, probe.k, probe.v)
        projected = [self.own.project(role, a[:, 0]) for role, a in zip("qkv", arrays, strict=True)]
        found, errors = zip(*projected, strict=True)
        if way.startswith("fused"):
            return tuple(_fused(found, self.own.heads, way)), tuple(_fused(errors, self.own.heads, way))
        (q, k, v), (dq, dk, dv) = (
            (split(a, heads, way) for a, heads in zip(arrays, counts, strict=True)) for arrays in (found, errors)
        )
        stronger = _strengthened(way, self.own.heads)
        return (stronger * q, k, v), (stronger * dq, dk, dv)

    def reference(self, variant: Variant, probe: Probe, align: str = "end") -> tuple[np.ndarray, np.ndarray] | None:
        (q, k, v), _ = self.heads_of(probe, variant.split)
        variant = replace(variant, embed=self.own.embed)
        found = compute(replace(variant, added="nothing"), q, k, v, allowing(variant, probe, align))
        if found is None:
            return None
        merged = merge(found[0], variant.merge, probe.sizes.queries)
        if variant.output == "unprojected":
            alike = "o" in self.own.matrices and merged.shape[-1] == self.own.width
            return (merged[:, None], found[1]) if alike else None
        if "o" in self.own.matrices and merged.shape[-1] != self.own.matrices["o"][0].shape[0]:
            return None
        output = self.own.project("o", merged)[0][:, None]
        if variant.added != "nothing":
            more = {"queries": probe.q, "values": probe.v}[variant.added]
            return (output + more, found[1]) if more.shape == output.shape else None
        return output, found[1]

    def tolerance(self, probe: Probe, weights: np.ndarray, eps: float, variant: Variant = RIGHT) -> np.ndarray:
        (q, k, v), (dq, dk, dv) = self.heads_of(probe, variant.split)
        variant = replace(variant, embed=self.own.embed)
        inside = _allowance(variant, (q, k, v), weights, eps, (eps * dq, eps * dk, eps * dv))
        length = probe.sizes.queries
        output = np.abs(weights) @ np.abs(taken(variant, q, spread(variant, q, k), spread(variant, q, v))[2])
        _, size = self.own.project("o", merge(output, variant.merge, length))
        return (self.own.magnify(merge(inside, variant.merge, length)) + eps * size)[:, None]


LAYOUTS = (
    Form("BHTD", "(batch, heads, positions, features)"),
    Apart("BTHD", "(batch, positions, heads, features)", (0, 2, 1, 3)),
    Form("BTD", "(batch, positions, features)", (0, 2, 3)),
    Form("TD", "(positions, features)", (2, 3)),
)
# Heads first on the way in, and positions first, or merged heads, on the way out
RETURNED = (
    Form(
        "BHTD→BTHD",
        "(batch, heads, positions, features), output (batch, positions, heads, features)",
        back=(0, 2, 1, 3),
    ),
    Merged("BHTD→BTE", "(batch, heads, positions, features), output (batch, positions, heads · features)"),
)
# Positions before the batch, as in PyTorch's older modules
TURNED = Form("TBD", "(positions, batch, features)", (2, 0, 3))
PACKED = Packed("BTE", "(batch, positions, heads · features), heads given")


def permuted_keys(given: tuple[Any, ...], scale: float, axes: tuple[int, ...]) -> np.ndarray | None:
    """What `softmax(q k′) v` gives whose keys have their axes permuted, where the sizes let it."""
    q, k, v = given
    try:
        scores = scale * (q @ k.transpose(axes))
        exponentials = np.exp(scores - scores.max(-1, keepdims=True))
        return (exponentials / exponentials.sum(-1, keepdims=True)) @ v
    except ValueError:
        return None
