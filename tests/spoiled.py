"""Cases with numbers that are not finite, some of them seen by some queries and not by others; data as in `cases.py`.

What must come out: each spoils exactly the results that see it (`row_by_row.py`), and what nobody sees spoils nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import clearhead as ch

NAN, INF = np.nan, np.inf
B, H, T, S, D, DV = 2, 3, 19, 23, 13, 11
LONG: dict[str, Any] = {"q": (1, 131, 17), "k": (1, 257, 17), "v": (1, 257, 7)}
FEW: dict[str, Any] = {"q": (B, H, 1, 64), "k": (B, H, S, 64), "v": (B, H, S, 64)}
GROUPED: dict[str, Any] = {"q": (B, 6, T, D), "k": (B, 2, S, D), "v": (B, 2, S, DV)}

Prepare = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def put(name: str, place: Any, number: float) -> Prepare:
    """A number at a place of q, k or v."""

    def prepare(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        {"q": q, "k": k, "v": v}[name][place] = number

    return prepare


def here_and_there(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """One number of each in the first batch row and head, two in the last."""
    v[0, 0, 7, 3], v[-1, -1, 2, 0], v[-1, -1, 3, 10] = INF, NAN, -INF
    k[0, 1, 11, 4] = NAN
    q[0, -1, 5, 1] = INF


def last_keys(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """Padding that nobody sees: the last six keys."""
    k[..., -6:, :], v[..., -6:, :] = NAN, INF


def masked(mask: Any, **more: Any) -> Callable[[np.random.Generator], dict[str, Any]]:
    return lambda rng: {"mask": mask, **more}


def _some(rng: np.random.Generator) -> dict[str, Any]:
    """An array in which the last six keys are hidden from all and the others from some."""
    mask = rng.random((B, H, T, S)) < 0.6
    mask[..., -6:] = False
    return {"mask": mask}


def _dout(dout: np.ndarray) -> None:
    dout[..., 5, 1], dout[..., 6, :] = NAN, INF


def _sinks(*logits: float) -> Callable[[np.random.Generator], dict[str, Any]]:
    return lambda rng: {"sinks": np.array(logits, np.float32)}


FIRST = np.arange(S) < S - 6  # all keys but the last six
IDS = np.array([0] * 4 + [1] * 9 + [2] * 10)
PADDED_IDS = np.where(FIRST, np.arange(S) // 7, 99)

# name → the fields of a Case
SPOILED: dict[str, dict[str, Any]] = {
    # seen by some queries
    "NaN in the last value, causal": {"prepare": put("v", (..., -1, slice(None)), NAN), "options": masked(ch.causal())},
    "inf in one feature of a value, causal": {"prepare": put("v", (0, 1, 9, 3), INF), "options": masked(ch.causal())},
    "−inf in a value, no mask": {"prepare": put("v", (..., 3, 2), -INF)},
    "NaN in a key, window": {"prepare": put("k", (..., 9, 2), NAN), "options": masked(ch.window(4, 1))},
    "inf in a key, causal": {"prepare": put("k", (..., 12, 2), INF), "options": masked(ch.causal())},
    "inf in a key, softcap": {"prepare": put("k", (..., 12, 2), INF), "options": masked(ch.causal(), softcap=0.8)},
    "NaN in a query, causal": {"prepare": put("q", (..., 3, 0), NAN), "options": masked(ch.causal())},
    "inf in a query, window": {"prepare": put("q", (..., 3, 0), INF), "options": masked(ch.window(6, 2))},
    "NaN and inf in dout, causal": {"prepare_dout": _dout, "options": masked(ch.causal())},
    "NaN and inf in dout, documents": {"prepare_dout": _dout, "options": masked(ch.documents(IDS, np.arange(T) % 4))},
    "NaN in dout of a query without keys": {
        "prepare_dout": _dout,
        "options": lambda rng: {"mask": ch.causal(offset=-7), "sinks": np.ones(H, np.float32)},
    },
    "NaN here and there, grouped, causal": {**GROUPED, "prepare": here_and_there, "options": masked(ch.causal())},
    "NaN here and there, documents": {
        "prepare": here_and_there, "options": masked(ch.documents(IDS, np.arange(T) % 4)),
    },
    "NaN here and there, array": {"prepare": here_and_there, "options": _some},
    "NaN here and there, negated": {"prepare": here_and_there, "options": masked(~(ch.causal() | ch.lengths(4)))},
    "NaN here and there, blocks and global tokens": {
        "prepare": here_and_there,
        "options": masked(ch.random_blocks(4, count=2, seed=3) | ch.global_tokens([0])),
    },
    "NaN here and there, bfloat16": {
        "prepare": here_and_there, "dtype": "bfloat16", "options": masked(ch.causal() & ch.window(7)),
    },
    "NaN here and there, float64": {"prepare": here_and_there, "dtype": "float64", "options": masked(ch.causal())},
    "NaN here and there, everything": {
        "prepare": here_and_there,
        "options": lambda rng: {
            "mask": (ch.causal() | ch.prefix([3, 5])) & ch.lengths([23, 17]),
            "bias": ch.alibi(3), "softcap": 2.5, "sinks": rng.standard_normal(3).astype(np.float32),
        },
    },
    "NaN here and there, dropout": {
        "prepare": here_and_there, "options": lambda rng: {"mask": ch.causal(), "dropout": (0.3, 5)},
    },
    "NaN in the middle, longer, causal": {
        **LONG, "prepare": put("v", (0, 150, 3), NAN), "options": masked(ch.causal()),
    },
    "NaN in a key in the middle, longer, window": {
        **LONG, "prepare": put("k", (0, 150, 3), NAN), "options": masked(ch.window(20)),
    },
    "NaN in a query in the middle, longer": {
        **LONG, "prepare": put("q", (0, 77, 3), NAN), "options": masked(ch.window(20)),
    },
    "NaN in a bias, causal": {
        "options": lambda rng: {"mask": ch.causal(), "bias": np.where(np.eye(T, S) * (np.arange(S) == 7), NAN, 0.0)},
    },
    # seen by some of few queries
    "NaN in a value, one query": {**FEW, "prepare": put("v", (0, 1, 4, 3), NAN), "options": masked(ch.window(30))},
    "NaN in values, four queries, window": {
        **FEW, "q": (B, H, 4, 64), "prepare": put("v", (..., 17, 3), NAN), "options": masked(ch.window(3)),
    },
    "NaN in keys, four queries, narrow": {
        "q": (B, H, 4, D), "prepare": put("k", (..., 17, 3), NAN), "options": masked(ch.window(3)),
    },
    "NaN in a value of weight zero, one query": {
        **FEW, "prepare": put("v", (..., 4, 3), NAN),
        "options": lambda rng: {"bias": np.where(np.arange(S) == 4, np.float32(-1e4), np.float32(0.0))[None]},
    },
    # seen by nobody
    **{
        f"NaN in padding, {name}": {"prepare": last_keys, "options": masked(mask)}
        for name, mask in {
            "negated array": ~ch.where(~FIRST),
            "negated lengths": ~~ch.lengths(S - 6),
            "negated band": ~ch.window(0, 9, offset=S - 6 + T) & ch.lengths(S - 6) | ~ch.lengths(S),
            "negated documents": ~ch.documents(np.where(FIRST, np.arange(S) % 3, 99), np.full(T, 99)),
            "negated blocks": ~(ch.random_blocks(4, count=2, seed=3) | ~ch.lengths(S - 6)),
            "negated global tokens": ~(ch.global_tokens([2]) | ~ch.lengths(S - 6)),
            "negated and": ~(~ch.lengths(S - 6) | ~ch.causal()),
            "documents": ch.documents(PADDED_IDS, np.arange(T) // 7),
        }.items()
    },
    "NaN in padding, array, softcap": {
        "prepare": last_keys, "options": lambda rng: {**_some(rng), "softcap": 0.8},
    },
    "NaN in padding, documents, softcap": {
        "prepare": last_keys, "options": masked(ch.documents(PADDED_IDS, np.arange(T) // 7), softcap=0.8),
    },
    "NaN in padding, negated, softcap and bias": {
        "prepare": last_keys, "options": masked(~ch.where(~FIRST), softcap=0.8, bias=ch.alibi(H)),
    },
    "NaN in padding, one query, negated": {**FEW, "prepare": last_keys, "options": masked(~ch.where(~FIRST))},
    # sinks that outweigh all keys, or nothing
    "sinks far above": {"options": _sinks(0.5, 95.0, 700.0)},
    "sinks far above, causal": {
        "options": lambda rng: {**_sinks(1e30, 87.5, 0.5)(rng), "mask": ch.causal(offset=-3), "scale": 0.3},
    },
    "sinks far above, softcap and bias": {
        "options": lambda rng: {**_sinks(95.0, 300.0, 2.0)(rng), "softcap": 3.0, "bias": ch.alibi(H)},
    },
    "sinks far above, float64": {"dtype": "float64", "options": _sinks(720.0, 1e4, 1.0)},
    "sinks far above, one query": {"q": (B, H, 1, D), "options": _sinks(0.5, 95.0, 1e4)},
    "sinks far below": {"options": _sinks(-1e4, -95.0, -1e30)},
    "sinks of inf": {"options": _sinks(INF, 0.3, -INF)},
    "sinks of NaN": {"options": _sinks(NAN, 0.3, INF)},
    "sinks far above, NaN in a key": {
        "prepare": put("k", (..., 9, 2), NAN),
        "options": lambda rng: {**_sinks(95.0, INF, 1.0)(rng), "mask": ch.causal()},
    },
}  # fmt: skip
