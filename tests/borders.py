"""Problems on both sides of every size at which a kernel does something else: where a block, tile, panel or step ends.

A kernel says its sizes, `{axis: {name: size}}`, and the cases follow them when they change. Features are few, so that
sizes of thousands stay cheap; the axis that is not looked at is short and prime.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from cases import BY_NAME, Case

import clearhead as ch

Sizes = dict[str, dict[str, int]]
T, S, D, DV = 13, 11, 3, 2  # more queries than are taken for a step of decoding
APART = 1501  # keys that nobody sees, more than two tiles of them
LONG = 4096  # from here on queries go unmasked, and nothing is taken twice
SHARING, D_SHARED = 3, 37  # heads that share their keys, few of them; a whole tile of features and some more
ABREAST, D_ABREAST = 19, 16  # the same, so many that they go side by side, and features that are read where they lie
WIDEST = 512


def masks(axis: str, n: int) -> dict[str, dict[str, Any]]:
    """What is laid over n keys or queries: masks that begin and end beside the border or in the middle of a tile."""
    if axis == "queries":
        return {
            "causal": {"options": _mask(ch.causal(align="start"))},
            "window": {"options": _mask(ch.window(n // 3, 2))},
        }
    if axis == "seen keys":
        two = ch.documents(_hidden(n).astype(int), np.zeros(T, int))
        return {
            "in two pieces": {"options": _mask(two)},
            "in two pieces, causal": {"options": _mask(two & ch.causal())},
            "NaN between": {"options": _mask(two), "prepare": _nan_between},
        }
    found = {"causal": {"options": _mask(ch.causal())}}
    if n > 5:
        # the lowest key that each query sees lies inside a tile, and not at the start of a block
        found["window"] = {"options": _mask(ch.window(n // 3 + 1))}
        found["NaN padding"] = {"options": _mask(ch.lengths(n - 2)), "prepare": _padding}
    return found


def _mask(mask: Any) -> Any:
    return lambda rng: {"mask": mask}


def _hidden(n: int) -> np.ndarray:
    """Which of n + APART keys nobody sees: those in the middle, between two pieces of n in all."""
    place = np.arange(n + APART) - n // 2
    return (place >= 0) & (place < APART)


def _nan_between(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    hidden = _hidden(k.shape[-2] - APART)
    k[..., hidden, :], v[..., hidden, :] = np.nan, np.nan


def _padding(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    k[..., -2:, :], v[..., -2:, :] = np.nan, np.nan


def shapes(axis: str, n: int, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """q, k and v that are n long along an axis."""
    if axis == "heads":
        keys = 2 * sizes["keys"]["back_tile"] + 1
        return {"q": (n, T, D), "k": (n, keys, D), "v": (n, keys, DV)}
    if axis == "queries":
        return {"q": (1, n, D), "k": (1, S, D), "v": (1, S, DV)}
    if axis == "decoded heads":  # that share their keys
        keys = sizes["decoded keys"]["piece"] + sizes["decoded keys"]["shared"] + 1
        return {"q": (n, 1, D), "k": (1, keys, D), "v": (1, keys, DV)}
    if axis.startswith("shared"):  # by few heads, for which the pieces of keys are the largest
        features, keys = (n, n + S) if axis.endswith("features") else (D_SHARED, n)
        return {"q": (SHARING, 1, features), "k": (1, keys, features), "v": (1, keys, features)}
    if axis.startswith("abreast"):
        features, keys = (n, n + S) if axis.endswith("features") else (D_ABREAST, n)
        return {"q": (ABREAST, 1, features), "k": (1, keys, features), "v": (1, keys, features)}
    if axis == "seen keys":
        return {"q": (1, T, D), "k": (1, n + APART, D), "v": (1, n + APART, DV)}
    # several heads of one query each: two numbers alone say little of how far off the formula itself is
    heads, queries = (T, 1) if axis.startswith("decoded") else (1, T)
    if axis.endswith("features"):
        keys = n + S  # the budget counts the rounding of a sum over keys: not fewer than a score has terms
        return {"q": (heads, queries, n), "k": (heads, keys, n), "v": (heads, keys, n)}
    return {"q": (heads, queries, D), "k": (heads, n, D), "v": (heads, n, DV)}


def cases(sizes: Sizes, dtypes: Iterable[str] = ("float32",)) -> list[Case]:
    """On both sides of every size: one less, itself, one more, and one more than twice; of many queries, one more."""
    found: dict[str, Case] = {}
    for axis, named in sizes.items():
        counts = {n for size in named.values() for n in _around(axis, size)}
        for n in sorted(counts):
            laid: dict[str, dict[str, Any]] = {} if axis == "seen keys" else {"unmasked": {}}
            short = n <= LONG and axis in ("queries", "decoded keys", "decoded heads", "shared keys", "abreast keys")
            if axis in ("keys", "seen keys") or short:
                laid |= masks(axis, n if axis != "decoded heads" else sizes["decoded keys"]["piece"])
            for what, options in laid.items():
                for dtype in dtypes:
                    case = Case(f"{n} {axis}, {what}, {dtype}", dtype=dtype, **shapes(axis, n, sizes), **options)
                    found[case.name] = case
    BY_NAME.update(found)  # where the budget looks for what must come out
    return list(found.values())


def _around(axis: str, size: int) -> list[int]:
    near = [size - 1, size, size + 1] + ([2 * size + 1] if size <= LONG else [])
    if axis == "queries" and size > LONG:
        # what is exact takes seconds for so many rows; the blocks that they are split into are met on both sides
        near = [size + 1]
    most = WIDEST if axis.endswith("features") else max(near)
    return [n for n in near if 1 <= n <= most]
