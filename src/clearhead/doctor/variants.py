"""The formula with knobs: the right one, and each way of breaking it that the catalogue knows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from clearhead.core.formula import softmax
from clearhead.doctor.mistakes import BY_SETTING, Mistake

# A penalty that somebody took for −∞, from hardly any to nearly enough
WEAK = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True)
class Variant:
    """One setting for each knob; the defaults are the formula as it should be."""

    scale: str = "right"
    axis: str = "keys"
    values: str = "values"
    split: str = "transpose"
    merge: str = "transpose"
    masking: str = "right"
    causal: str = "end"
    factor: float | None = None  # a scale that was measured, in place of one that has a name
    penalty: float = 0.0

    @property
    def mistakes(self) -> tuple[Mistake, ...]:
        """The named mistakes that this variant makes."""
        settings = ((field.name, getattr(self, field.name)) for field in fields(self))
        return tuple(BY_SETTING[pair] for pair in settings if pair in BY_SETTING)


RIGHT = Variant()

SETTINGS = {
    "scale": (
        "none",
        "model",
        "model whole",
        "features",
        "keys",
        "queries",
        "width",
        "heads",
        "inverse",
        "late",
    ),
    "axis": ("queries", "heads", "batch", "all", "twice", "none"),
    "values": ("keys", "queries", "compared", "swapped"),
    "split": ("reshape",),
    "merge": ("reshape",),
}
MASKINGS = ("inverted", "ignored", "after", "penalty after", "zero", "transposed")
CAUSALS = ("strict", "ahead", "future", "ignored")


def broken(base: Variant, packed: bool) -> Iterator[Variant]:
    """Every formula with one mistake, then every one with two in different places."""
    knobs = {name: settings for name, settings in SETTINGS.items() if packed or name not in ("split", "merge")}
    for name, settings in knobs.items():
        for setting in settings:
            yield _turned(base, name, setting)
    for (one, some), (two, others) in itertools.combinations(knobs.items(), 2):
        for first, second in itertools.product(some, others):
            yield _turned(_turned(base, one, first), two, second)


def _turned(base: Variant, knob: str, setting: str) -> Variant:
    settings: dict[str, Any] = {knob: setting}
    return replace(base, **settings)


def broken_masks(base: Variant) -> Iterator[Variant]:
    """Every way of applying a mask wrongly."""
    for masking in MASKINGS:
        yield replace(base, masking=masking)
    for penalty in WEAK:
        yield replace(base, masking="weak", penalty=penalty)


def scale_of(variant: Variant, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
    """What scores are multiplied with; q, k, v are (B, H, T, D)."""
    if variant.factor is not None:
        return variant.factor
    heads, queries, features = q.shape[-3:]
    divisor = {
        "right": math.sqrt(features),
        "none": 1.0,
        "model": math.sqrt(heads * features),
        "model whole": heads * features,
        "features": features,
        "keys": math.sqrt(k.shape[-2]),
        "queries": math.sqrt(queries),
        "width": math.sqrt(v.shape[-1]),
        "heads": math.sqrt(heads),
        "inverse": 1.0 / math.sqrt(features),
        "late": 1.0,
    }[variant.scale]
    return 1.0 / divisor


def causal_allowed(setting: str, queries: int, keys: int, align: str) -> np.ndarray:
    """(T, S), True where a query may attend; `align` says which corner is the right one."""
    if setting == "corner":
        align = "start" if align == "end" else "end"
    offset = keys - queries if align == "end" else 0
    distance = np.arange(keys) - (np.arange(queries)[:, None] + offset)
    return {
        "strict": distance < 0,
        "ahead": distance <= 1,
        "future": distance >= 0,
        "ignored": np.ones_like(distance, bool),
    }.get(setting, distance <= 0)


def compute(
    variant: Variant,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    allowed: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray] | None:
    """(output, weights) of one variant in float64; None where its sizes do not fit together."""
    if variant.values == "swapped":
        q, k = k, q
    compared = v if variant.values == "compared" else k
    averaged = {"keys": k, "queries": q}.get(variant.values, v)
    if compared.shape[-1] != q.shape[-1] or averaged.shape[-2] != compared.shape[-2]:
        return None
    with np.errstate(all="ignore"):
        scores = scale_of(variant, q, k, v) * (q @ compared.swapaxes(-1, -2))
        if allowed is None:
            weights = _softmax(variant.axis, scores)
        else:
            if variant.masking == "transposed" and allowed.shape[-1] != allowed.shape[-2]:
                return None
            weights = _masked(variant, scores, allowed)
        if variant.scale == "late":
            weights = weights / math.sqrt(q.shape[-1])
        return weights @ averaged, weights


def _masked(variant: Variant, scores: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    masking, axis = variant.masking, variant.axis
    if masking == "inverted":
        allowed = ~allowed
    if masking == "transposed":
        allowed = allowed.swapaxes(-1, -2)
    if masking == "ignored":
        return _softmax(axis, scores)
    if masking == "after":
        return np.where(allowed, _softmax(axis, scores), 0.0)
    if masking == "penalty after":
        return np.where(allowed, _softmax(axis, scores), -1e9)
    if masking == "zero":
        return _softmax(axis, np.where(allowed, scores, 0.0))
    if masking == "weak":
        return _softmax(axis, scores - np.where(allowed, 0.0, variant.penalty))
    return _softmax(axis, np.where(allowed, scores, -np.inf))


def _softmax(axis: str, scores: np.ndarray) -> np.ndarray:
    if axis == "keys":
        return softmax(scores)[0]
    if axis == "none":
        return np.where(np.isfinite(scores), scores, 0.0)
    if axis == "twice":
        return softmax(softmax(scores)[0])[0]
    if axis == "all":
        return softmax(scores.reshape(1, -1))[0].reshape(scores.shape)
    place = {"queries": -2, "heads": -3, "batch": 0}[axis]
    return np.moveaxis(softmax(np.moveaxis(scores, place, -1))[0], -1, place)
