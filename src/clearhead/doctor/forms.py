"""The forms a function may have its arrays in: layouts, packed heads, and modules with projections of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.doctor.probes import Probe, Sizes, tolerance
from clearhead.doctor.projections import Projections
from clearhead.doctor.variants import RIGHT, Variant, causal_allowed, compute, scale_of


@dataclass(frozen=True)
class Form:
    """How q (B, H, T, D), k and v are handed over, and how the answer comes back in (B, H, T, Dv)."""

    name: str
    words: str
    axes: tuple[int, ...] = (0, 1, 2, 3)  # where each of (B, H, T, D) stands; packed and missing axes differ
    back: tuple[int, ...] | None = None  # the same for the output, where it differs
    packed = False

    def fit(self, sizes: Sizes) -> Sizes:
        """The sizes cut down to the axes that this form has."""
        return replace(
            sizes,
            batch=sizes.batch if 0 in self.axes else 1,
            heads=sizes.heads if 1 in self.axes else 1,
        )

    def give(self, probe: Probe) -> tuple[np.ndarray, ...]:
        """The arrays as the function takes them."""
        return tuple(self._lay(a) for a in (probe.q, probe.k, probe.v))

    def _lay(self, array: np.ndarray) -> np.ndarray:
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
        q, k = (probe.k, probe.q) if variant.values == "swapped" else (probe.q, probe.k)
        v = {"keys": k, "queries": q}.get(variant.values, probe.v)
        found = tolerance(q, k, v, weights, scale_of(variant, q, k, probe.v), eps)
        return _spread(variant, found)


def _spread(variant: Variant, found: np.ndarray) -> np.ndarray:
    """Where a softmax runs over another axis, an error reaches other rows than its own: the largest holds for all."""
    return found if variant.axis == "keys" else np.full_like(found, found.max(initial=0.0))


def allowing(variant: Variant, probe: Probe, align: str) -> np.ndarray | None:
    """The mask and the causal flag of a problem together, (B, 1, T, S) or None."""
    allowed = probe.allowed
    if probe.causal:
        sizes = probe.sizes
        seen = causal_allowed(variant.causal, sizes.queries, sizes.keys, align)
        allowed = np.broadcast_to(seen, (sizes.batch, 1, *seen.shape)) if allowed is None else allowed & seen
    return allowed


def split(array: np.ndarray, heads: int, way: str) -> np.ndarray:
    """(B, T, H·D) → (B, H, T, D); "reshape" is the way that mixes positions into heads."""
    batch, length, width = array.shape
    if way == "reshape":
        return array.reshape(batch, heads, length, width // heads)
    return array.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def merge(array: np.ndarray, way: str) -> np.ndarray:
    """(B, H, T, D) → (B, T, H·D), and the way that mixes heads into positions."""
    batch, heads, length, width = array.shape
    if way == "reshape":
        return array.reshape(batch, length, heads * width)
    return array.swapaxes(1, 2).reshape(batch, length, heads * width)


@dataclass(frozen=True)
class Merged(Form):
    """(B, H, T, D) in, and the heads of the output merged into (B, T, H·Dv)."""

    def take(self, output: np.ndarray, probe: Probe) -> np.ndarray | None:
        heads = probe.sizes.heads
        return split(output, heads, "transpose") if output.ndim == 3 and not output.shape[-1] % heads else None


@dataclass(frozen=True)
class Packed(Form):
    """(B, T, H·D) with the number of heads said beside it."""

    packed = True

    def give(self, probe: Probe) -> tuple[np.ndarray, ...]:
        return tuple(np.ascontiguousarray(merge(a, "transpose")) for a in (probe.q, probe.k, probe.v))

    def take(self, output: np.ndarray, probe: Probe) -> np.ndarray | None:
        heads = probe.sizes.heads
        if output.ndim != 3 or output.shape[-1] % heads:
            return None
        return split(output, heads, "transpose")

    def take_weights(self, weights: np.ndarray, probe: Probe) -> np.ndarray | None:
        return weights if weights.ndim == 4 else None

    def reference(self, variant: Variant, probe: Probe, align: str = "end") -> tuple[np.ndarray, np.ndarray] | None:
        heads = probe.sizes.heads
        q, k, v = (split(merge(a, "transpose"), heads, variant.split) for a in (probe.q, probe.k, probe.v))
        found = compute(variant, q, k, v, allowing(variant, probe, align))
        if found is None:
            return None
        return split(merge(found[0], variant.merge), heads, "transpose"), found[1]


@dataclass(frozen=True)
class Module(Form):
    """A multi-head module, (B, T, E), held against its own projections. Compared as (B, 1, T, E)."""

    projections: Projections | None = None
    single: bool = False  # forward(x): self-attention
    batch_first: bool = True
    packed = True

    @property
    def order(self) -> str:
        """The axes in words."""
        first = "batch, positions" if self.batch_first else "positions, batch"
        return f"({first}, {self.own.embed})"

    @property
    def own(self) -> Projections:
        """The projections, which a module always has."""
        assert self.projections is not None
        return self.projections

    def fit(self, sizes: Sizes) -> Sizes:
        width = self.own.embed
        keys = sizes.queries if self.single else sizes.keys
        return replace(sizes, heads=1, keys=keys, features=width, width=width)

    def give(self, probe: Probe) -> tuple[np.ndarray, ...]:
        arrays = (probe.q,) if self.single else (probe.q, probe.k, probe.v)
        given = (a[:, 0] for a in arrays)
        return tuple(np.ascontiguousarray(a if self.batch_first else a.swapaxes(0, 1)) for a in given)

    def take(self, output: np.ndarray, probe: Probe) -> np.ndarray | None:
        if output.ndim != 3:
            return None
        return (output if self.batch_first else output.swapaxes(0, 1))[:, None]

    def take_weights(self, weights: np.ndarray, probe: Probe) -> np.ndarray | None:
        return weights if weights.ndim == 4 else None

    def heads_of(self, probe: Probe, way: str) -> tuple[np.ndarray, ...]:
        """The inputs projected and split into heads, and how far each may be off for an eps of one."""
        arrays = (probe.q, probe.q, probe.q) if self.single else (probe.q, probe.k, probe.v)
        projected = [self.own.project(role, a[:, 0]) for role, a in zip("qkv", arrays, strict=True)]
        return tuple(split(a, self.own.heads, way) for pair in projected for a in pair)

    def reference(self, variant: Variant, probe: Probe, align: str = "end") -> tuple[np.ndarray, np.ndarray] | None:
        q, _, k, _, v, _ = self.heads_of(probe, variant.split)
        found = compute(variant, q, k, v, allowing(variant, probe, align))
        if found is None:
            return None
        return self.own.project("o", merge(found[0], variant.merge))[0][:, None], found[1]

    def tolerance(self, probe: Probe, weights: np.ndarray, eps: float, variant: Variant = RIGHT) -> np.ndarray:
        q, dq, k, dk, v, dv = self.heads_of(probe, variant.split)
        if variant.values == "swapped":
            q, dq, k, dk = k, dk, q, dq
        v, dv = {"keys": (k, dk), "queries": (q, dq)}.get(variant.values, (v, dv))
        errors = (eps * dq, eps * dk, eps * dv)
        inside = _spread(variant, tolerance(q, k, v, weights, scale_of(variant, q, k, v), eps, errors))
        _, size = self.own.project("o", merge(weights @ v, variant.merge))
        return (self.own.magnify(merge(inside, variant.merge)) + eps * size)[:, None]


LAYOUTS = (
    Form("BHTD", "(batch, heads, positions, features)"),
    Form("BTHD", "(batch, positions, heads, features)", (0, 2, 1, 3)),
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
PACKED = Packed("BTE", "(batch, positions, heads · features), heads given")


def reversed_transpose(given: tuple[Any, ...], scale: float) -> np.ndarray | None:
    """What `softmax(q @ k.T) v` gives for arrays of three or four axes, where the sizes let it."""
    q, k, v = given
    try:
        scores = scale * (q @ k.T)
        exponentials = np.exp(scores - scores.max(-1, keepdims=True))
        return (exponentials / exponentials.sum(-1, keepdims=True)) @ v
    except ValueError:
        return None
