"""The formula with knobs: the right one, and each way of breaking it that the catalogue knows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from clearhead.doctor.by_block import in_blocks
from clearhead.doctor.mistakes import BY_SETTING, Mistake
from clearhead.doctor.turning import BASES, ROTARY, rotate
from clearhead.doctor.weighing import RARE_AXES, weighed

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
    grouping: str = "interleaved"
    blocks: str = "right"
    added: str = "nothing"
    output: str = "projected"
    causal: str = "end"
    masking: str = "right"
    factor: float | None = None  # a scale that was measured, in place of one that has a name
    penalty: float = 0.0
    block: int = 0  # keys in a block, where blocks are wrong
    embed: int = 0  # the features of all heads before they are projected, where they are not heads × features
    rotary: str = ""  # positions that are rotated into queries and keys: no mistake, but the scores are others
    empty: str = "zero"  # what a query gets that may attend to nothing: no mistake of its own, but it shows

    @property
    def mistakes(self) -> tuple[Mistake, ...]:
        """The named mistakes that this variant makes."""
        settings = [(field.name, getattr(self, field.name)) for field in fields(self)]
        if self.split == "unmoved":  # heads that were never moved have nowhere to be moved back from
            settings.remove(("merge", self.merge))
        return tuple(BY_SETTING[pair] for pair in settings if pair in BY_SETTING)


RIGHT = Variant()

SETTINGS = {
    "scale": ("none", "model", "model whole", "features", "keys", "queries", "width", "heads", "inverse", "late"),
    "axis": (
        "queries",
        "heads",
        "batch",
        "all",
        "twice",
        "none",
        "exponentials",
        "shifted exponentials",
        "sum",
        "absolute sum",
        "sum of absolutes",
        "positive sum",
        "maximum",
        "absolute maximum",
    ),
    "values": ("keys", "queries", "compared", "swapped", "exchanged", "untransposed", "reshaped", "turned weights"),
    "split": ("reshape", "unmoved", "features first"),
    "merge": ("reshape", "features first"),
}
# Mistakes that hardly come in pairs, and are tried alone
RARE = {
    "axis": RARE_AXES,
    "values": ("itself", "cosine", "negated"),
    "added": ("queries", "values"),
    "grouping": ("tiled",),
}
# What only a module can do, whose projections have names: take them in another order, or reshape all three at once
OWN = {
    "values": ("order kvq", "order vqk", "order vkq"),
    "split": ("fused 3BHTD", "fused B3HTD", "fused BHT3D", "fused BH3TD"),
    "output": ("unprojected",),
}
# What only those do who split heads themselves
JOINED = {"split": ("whole", "whole scaled"), "merge": ("reversed",)}
MASKINGS = (
    "inverted",
    "ignored",
    "after",
    "penalty after",
    "inf after",
    "zero",
    "transposed",
    "added",
    "raised",
    "first row",
    "raised far",
    "nan",
)
# Of those who are told how many keys are real
LENGTHS = ("one more", "one fewer")
CAUSALS = ("strict", "ahead", "future", "later", "ignored")
EMPTY = ("zero", "nan", "uniform")
# Where what a query without keys gets depends on the above: elsewhere no score is left out of the softmax
HIDING = ("right", "inverted", "transposed", "first row", *LENGTHS)
BLOCK_SIZES = (2, 3, 4, 5, 8, 10, 16, 20, 24, 32, 48, 50, 64, 96, 100, 128, 200, 256, 500, 512)
BLOCK_SETTINGS = (
    "tail lost",
    "cut",
    "queries lost",
    "not rescaled",
    "sum not rescaled",
    "output not rescaled",
    "inverse",
    "apart",
    "averaged",
    "padded",
    "overlap",
)
LOST = ("last lost", "first lost")
# Knobs of those who split heads themselves
HEADED = ("split", "merge")


def broken(base: Variant, packed: bool, own: bool = False) -> Iterator[Variant]:
    """Every formula with one mistake, then every one with two in different places."""
    yield from _once(base, packed, own)
    yield from _twice(base, packed)


# Made once: a search goes through all of them for each form that a function may have
@cache
def _once(base: Variant, packed: bool, own: bool) -> tuple[Variant, ...]:
    choices = (_knobs(packed), RARE, JOINED if packed else {}, OWN if own else {})
    turns = ((name, setting) for one in choices for name, settings in one.items() for setting in settings)
    return tuple(_turned(base, name, setting) for name, setting in turns)


@cache
def _twice(base: Variant, packed: bool) -> tuple[Variant, ...]:
    return tuple(
        _turned(_turned(base, one, first), two, second)
        for (one, some), (two, others) in itertools.combinations(_knobs(packed).items(), 2)
        for first, second in itertools.product(some, others)
    )


def _knobs(packed: bool) -> dict[str, tuple[str, ...]]:
    return {name: settings for name, settings in SETTINGS.items() if packed or name not in HEADED}


def rotated(base: Variant, bases: tuple[float, ...] = BASES) -> Iterator[Variant]:
    """The formula with rotary positions, in each of the ways that models have them."""
    for pairs, base_of_angles in itertools.product(ROTARY, bases):
        yield replace(base, rotary=f"{pairs} {base_of_angles:g}")


def _turned(base: Variant, knob: str, setting: str) -> Variant:
    settings: dict[str, Any] = {knob: setting}
    return replace(base, **settings)


def broken_masks(base: Variant, *, lengths: bool = False) -> Iterator[Variant]:
    """Every way of applying a mask wrongly."""
    for masking in (*LENGTHS, *MASKINGS) if lengths else MASKINGS:
        yield replace(base, masking=masking)
    for masking, penalty in itertools.product(("weak", "filled", "filled early"), WEAK):
        yield replace(base, masking=masking, penalty=penalty)


@cache
def broken_causals(base: Variant) -> tuple[Variant, ...]:
    """Every way of being causal wrongly: another mask, or the right one applied in a wrong way."""
    never = ("inverted", "ignored", "transposed", "first row", "nan", "filled early")
    wrong = [one for one in broken_masks(base) if one.masking not in never]
    both = [replace(one, causal=setting) for one, setting in itertools.product(wrong, CAUSALS[:-1])]
    return (*(replace(base, causal=setting) for setting in CAUSALS[:-1]), *wrong, *both)


def broken_blocks(base: Variant) -> Iterator[Variant]:
    """Every way of taking keys block by block wrongly."""
    for setting in LOST:
        yield replace(base, blocks=setting, block=1)
    for setting, block in itertools.product(BLOCK_SETTINGS, BLOCK_SIZES):
        yield replace(base, blocks=setting, block=block)


def scale_of(variant: Variant, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
    """What scores are multiplied with; q, k, v are (B, H, T, D)."""
    if variant.factor is not None:
        return variant.factor
    heads, queries, features = q.shape[-3:]
    model = variant.embed or heads * features
    divisor = {
        "right": math.sqrt(features),
        "none": 1.0,
        "model": math.sqrt(model),
        "model whole": model,
        "features": features,
        "keys": math.sqrt(k.shape[-2]),
        "queries": math.sqrt(queries),
        "width": math.sqrt(v.shape[-1]),
        "heads": math.sqrt(heads),
        "inverse": 1.0 / math.sqrt(features),
        "late": 1.0,
    }[variant.scale]
    return 1.0 / divisor


@cache
def causal_allowed(setting: str, queries: int, keys: int, align: str) -> np.ndarray:
    """(T, S), True where a query may attend; `align` says which corner is the right one."""
    if setting == "corner":
        align = "start" if align == "end" else "end"
    offset = keys - queries if align == "end" else 0
    distance = np.arange(keys) - (np.arange(queries)[:, None] + offset)
    allowed = {
        "strict": distance < 0,
        "ahead": distance <= 1,
        "future": distance >= 0,
        "later": distance > 0,
        "ignored": np.ones_like(distance, bool),
    }.get(setting, distance <= 0)
    allowed.flags.writeable = False  # one for all who ask
    return allowed


def spread(variant: Variant, q: np.ndarray, array: np.ndarray) -> np.ndarray:
    """Key heads, each for as many query heads as share it: (B, H/G, S, D) → (B, H, S, D)."""
    groups, rest = divmod(q.shape[-3], array.shape[-3])
    if groups == 1 or rest:
        return array
    if variant.grouping == "tiled":
        return np.concatenate([array] * groups, axis=-3)
    return np.repeat(array, groups, axis=-3)


def taken(variant: Variant, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a variant takes for queries, for keys and for values."""
    orders = {
        "keys": (q, k, k),
        "queries": (q, k, q),
        "compared": (q, v, v),
        "swapped": (k, q, v),
        "exchanged": (q, v, k),
        "order kvq": (k, v, q),
        "order vqk": (v, q, k),
        "order vkq": (v, k, q),
        "itself": (q, q, v),
    }
    return orders.get(variant.values, (q, k, v))


def compute(
    variant: Variant,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    allowed: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray] | None:
    """(output, weights) of one variant in float64; None where its sizes do not fit together."""
    scale = scale_of(variant, *((k, q, v) if variant.values == "swapped" else (q, k, v)))
    k, v = spread(variant, q, k), spread(variant, q, v)
    q, k, v = taken(variant, q, k, v)
    if variant.rotary:
        if q.shape[-1] % 2:
            return None
        q, k = rotate(variant.rotary, q), rotate(variant.rotary, k)
    if variant.values == "cosine":
        q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    turned = _turned_keys(variant, k)
    alike = q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    if not alike or turned.shape[-2] != q.shape[-1] or v.shape[-2] != turned.shape[-1]:
        return None
    with np.errstate(all="ignore"):
        scores = scale * (q @ turned)
        if allowed is not None and allowed.shape[-2:] != scores.shape[-2:]:
            return None
        if variant.blocks != "right":
            return in_blocks(variant.blocks, variant.block, scores, v, allowed)
        if allowed is None:
            weights = weighed(variant.axis, scores)
        else:
            if variant.masking == "transposed" and allowed.shape[-1] != allowed.shape[-2]:
                return None
            weights = _masked(variant, scores, allowed, scale)
        if variant.scale == "late":
            weights = weights / math.sqrt(q.shape[-1])
        if variant.values == "turned weights":
            if weights.shape[-1] != weights.shape[-2]:
                return None
            weights = weights.swapaxes(-1, -2)
        output = weights @ v
        if variant.added != "nothing":
            more = {"queries": q, "values": v}[variant.added]
            return (output + more, weights) if more.shape == output.shape else None
        return output, weights


def _turned_keys(variant: Variant, k: np.ndarray) -> np.ndarray:
    if variant.values == "untransposed":
        return k
    if variant.values == "negated":
        return -k.swapaxes(-1, -2)
    if variant.values == "reshaped":
        return k.reshape(*k.shape[:-2], k.shape[-1], k.shape[-2])
    return k.swapaxes(-1, -2)


def _masked(variant: Variant, scores: np.ndarray, allowed: np.ndarray, scale: float) -> np.ndarray:
    masking, axis = variant.masking, variant.axis
    if masking == "inverted":
        allowed = ~allowed
    if masking == "transposed":
        allowed = allowed.swapaxes(-1, -2)
    if masking == "first row":
        allowed = allowed[:1]
    if masking in LENGTHS:
        one = np.pad(allowed, [*[(0, 0)] * (allowed.ndim - 1), (1, 1)], mode="edge")
        allowed = (
            one[..., :-2]
            if masking == "one more"
            else one[..., 2:] & (np.arange(allowed.shape[-1]) < allowed.shape[-1] - 1)
        )
    after = {"after": 0.0, "penalty after": -1e9, "inf after": -np.inf}
    if masking in after:
        return np.where(allowed, weighed(axis, scores), after[masking])
    if masking in ("zero", "added", "raised", "ignored"):
        before = {"zero": scores * allowed, "added": scores + allowed, "raised": scores + ~allowed, "ignored": scores}
        return weighed(axis, before[masking])
    if masking == "weak":
        return weighed(axis, scores - np.where(allowed, 0.0, variant.penalty))
    fills = {"filled": -variant.penalty, "filled early": -variant.penalty * scale, "raised far": 1e9}
    if masking in fills:
        return weighed(axis, np.where(allowed, scores, fills[masking]))
    if masking == "nan":  # 0 · −inf, wherever a row has a key that it sees
        return np.where(allowed.any(-1, keepdims=True), np.nan, weighed(axis, scores))
    weights = weighed(axis, np.where(allowed, scores, -np.inf))
    if variant.empty != "zero" and axis == "keys":
        nothing = 1.0 / scores.shape[-1] if variant.empty == "uniform" else np.nan
        weights = np.where(allowed.any(-1, keepdims=True), weights, nothing)
    return weights
