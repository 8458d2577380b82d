"""Every problem, as data: each kernel is held to each of them.

Sizes are distinct primes, so that swapped axes cannot pass. A case says what is put in; `budget.py` says what must come
out. A new capability adds cases here before it adds code.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from spoiled import SPOILED

import clearhead as ch

B, H, T, S, D, DV = 2, 3, 19, 23, 13, 11

Options = Callable[[np.random.Generator], dict[str, Any]]
Prepare = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Case:
    name: str
    q: tuple[int, ...] = (B, H, T, D)
    k: tuple[int, ...] = (B, H, S, D)
    v: tuple[int, ...] = (B, H, S, DV)
    dtype: str = "float32"
    options: Options = lambda rng: {}
    prepare: Prepare = lambda q, k, v: None
    layout: str = "plain"
    prepare_dout: Callable[[np.ndarray], None] = lambda dout: None

    def __str__(self) -> str:
        return self.name

    def dlse(self) -> np.ndarray:
        """The gradient of the log-sum-exp, in the precision that sums are taken in."""
        rng = np.random.default_rng(zlib.crc32(f"lse of {self.name}".encode()))
        batch = np.broadcast_shapes(self.q[:-3], self.k[:-3], self.v[:-3])
        numbers = rng.standard_normal((*batch, *self.q[-3:-1]))
        return numbers.astype(np.float64 if self.dtype == "float64" else np.float32)

    def build(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray, dict[str, Any]]:
        """(q, k, v), the gradient of the output, and the options: the same numbers every time, new for each case."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        dtype = np.dtype(ml_dtypes.bfloat16) if self.dtype == "bfloat16" else np.dtype(self.dtype)
        q, k, v = (rng.standard_normal(shape) for shape in (self.q, self.k, self.v))
        self.prepare(q, k, v)
        batch = np.broadcast_shapes(self.q[:-3], self.k[:-3], self.v[:-3])
        dout = rng.standard_normal((*batch, *self.q[-3:-1], self.v[-1]))
        self.prepare_dout(dout)
        options = self.options(rng)
        arrays = tuple(LAYOUTS[self.layout](a.astype(dtype)) for a in (q, k, v))
        return arrays, dout.astype(dtype), options


def _strided(a: np.ndarray) -> np.ndarray:
    """Every other position of an array twice as long, heads and positions swapped in memory."""
    wide = np.repeat(np.swapaxes(a, -2, -3), 2, axis=-3).copy()
    return np.swapaxes(wide[..., ::2, :, :], -2, -3)


def _read_only(a: np.ndarray) -> np.ndarray:
    a.flags.writeable = False
    return a


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": lambda a: a,
    "strided": _strided,
    "reversed": lambda a: a[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
    "fortran": np.asfortranarray,
    "read-only": _read_only,
}


def _nan_padding(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    k[0, :, 17:], v[0, :, 17:] = np.nan, np.nan
    k[1, :, 5:], v[1, :, 5:] = np.inf, np.nan


def _nan_queries(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    q[..., 3::4, :] = np.nan


def _nan_first_keys(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    k[..., :3, :], v[..., :3, :] = np.nan, -np.inf


def _huge(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    q *= 10**4 / np.abs(q @ np.swapaxes(k, -1, -2)).max() * np.sqrt(D)


def _saturated(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """Every query has nearly all of its weight on the first key, and values are far from zero: gradients cancel."""
    q += 2.0
    k[..., 0, :] += 1.5
    v += 8.0


def _mask(mask: Any) -> Options:
    return lambda rng: {"mask": mask}


def _random_mask(*shape: int, density: float = 0.7) -> Options:
    return lambda rng: {"mask": rng.random(shape) < density}


def _blocks(*shape: int, size: int, share: float = 0.5) -> Options:
    return lambda rng: {"mask": ch.blocks(rng.random(shape) < share, size)}


def _rows_masked(rng: np.random.Generator) -> dict[str, Any]:
    mask = rng.random((B, H, T, S)) < 0.5
    mask[:, :, 3:7] = False
    mask[1] = False
    return {"mask": mask}


def _bias(*shape: int) -> Options:
    return lambda rng: {"bias": rng.standard_normal(shape).astype(np.float32)}


def _additive_mask(rng: np.random.Generator) -> dict[str, Any]:
    """Some people's masks: −inf where a query may not attend, one row of it entirely."""
    bias = np.where(rng.random((T, S)) < 0.5, -np.inf, 0.0).astype(np.float32)
    bias[4] = -np.inf
    return {"bias": bias}


def _sinks(rng: np.random.Generator) -> dict[str, Any]:
    return {"sinks": rng.standard_normal(H).astype(np.float32)}


def _everything(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "mask": (ch.causal() | ch.prefix([3, 5])) & ch.lengths([23, 17]),
        "bias": ch.alibi(6),
        "softcap": 2.5,
        "scale": 0.7,
        "sinks": rng.standard_normal(6).astype(np.float32),
        "dropout": (0.25, 11),
    }


def _table(rng: np.random.Generator, **options: Any) -> dict[str, Any]:
    return {"bias": ch.relative_bias(rng.standard_normal((32, H)).astype(np.float32), max_distance=20, **options)}


LAYOUT = np.random.default_rng(5).random((6, 6)) < 0.5
IDS = np.array([0] * 4 + [1] * 9 + [2] * 10)
SQUARE: dict[str, Any] = {"q": (B, H, S, D)}
LONG: dict[str, Any] = {"q": (1, 131, 17), "k": (1, 257, 17), "v": (1, 257, 7)}
GROUPED: dict[str, Any] = {"q": (B, 6, T, D), "k": (B, 2, S, D), "v": (B, 2, S, DV)}

CASES: tuple[Case, ...] = (
    # shapes
    Case("plain"),
    Case("one head, two dimensions", q=(T, D), k=(S, D), v=(S, DV)),
    Case("heads without batch", q=(H, T, D), k=(H, S, D), v=(H, S, DV)),
    Case("two batch axes", q=(2, 3, 5, T, D), k=(2, 3, 5, S, D), v=(2, 3, 5, S, DV)),
    Case("one token", q=(1, 1, 1, D), k=(1, 1, 1, D), v=(1, 1, 1, DV)),
    Case("one feature", q=(H, T, 1), k=(H, S, 1), v=(H, S, 1)),
    Case("one query", q=(B, H, 1, D)),
    Case("one key", k=(B, H, 1, D), v=(B, H, 1, DV)),
    Case("no keys", k=(B, H, 0, D), v=(B, H, 0, DV)),
    Case("no queries", q=(B, H, 0, D)),
    Case("empty batch", q=(0, H, T, D), k=(0, H, S, D), v=(0, H, S, DV)),
    Case("more queries than keys", q=(B, H, 29, D)),
    Case("longer", q=(1, 131, 17), k=(1, 257, 17), v=(1, 257, 7)),
    Case("wide", q=(2, 7, 131), k=(2, 11, 131), v=(2, 11, 257)),
    Case("one query, 64 features", q=(B, H, 1, 64), k=(B, H, S, 64), v=(B, H, S, 64)),
    Case(
        "one query, 64 features, lengths",
        q=(B, H, 1, 64),
        k=(B, H, S, 64),
        v=(B, H, S, 64),
        prepare=_nan_padding,
        options=_mask(ch.lengths([17, 5])),
    ),
    Case("one query, 32 features, float64", q=(B, 2, 1, 32), k=(B, 1, S, 32), v=(B, 1, S, 32), dtype="float64"),
    Case("batch broadcasts from queries", q=(1, H, T, D), k=(5, H, S, D), v=(5, H, S, DV)),
    Case("batch broadcasts both ways", q=(2, 1, H, T, D), k=(1, 5, H, S, D), v=(1, 5, H, S, DV)),
    Case("batch of keys is missing", k=(H, S, D), v=(H, S, DV)),
    Case("only values have a batch", q=(1, H, T, D), k=(1, H, S, D), v=(5, H, S, DV)),
    Case("grouped queries", **GROUPED),
    Case("multi-query", q=(B, 6, T, D), k=(B, 1, S, D), v=(B, 1, S, DV)),
    Case("grouped, causal", **GROUPED, options=_mask(ch.causal())),
    Case("grouped, mask by head", **GROUPED, options=_random_mask(6, T, S)),
    # precisions
    Case("float64", dtype="float64", options=_mask(ch.causal())),
    Case("float16", dtype="float16", options=_mask(ch.causal())),
    Case("bfloat16", dtype="bfloat16", options=_mask(ch.causal())),
    Case("float16, longer", q=(1, 131, 17), k=(1, 257, 17), v=(1, 257, 7), dtype="float16"),
    Case("float16, rows masked", dtype="float16", options=_rows_masked),
    Case("float16, saturated", dtype="float16", prepare=_saturated),
    Case("bfloat16, saturated", dtype="bfloat16", prepare=_saturated),
    Case("bfloat16, saturated and causal", **GROUPED, dtype="bfloat16", prepare=_saturated, options=_mask(ch.causal())),
    Case("float16, saturated, with sinks", dtype="float16", prepare=_saturated, options=_sinks),
    # of the widths that vendors' own kernels have, which take few other cases
    Case("bfloat16, 16 features", q=(B, H, T, 16), k=(B, H, S, 16), v=(B, H, S, 16), dtype="bfloat16"),
    Case(
        "float16, 32 features, causal",
        q=(B, H, 37, 32),
        k=(B, H, 37, 32),
        v=(B, H, 37, 32),
        dtype="float16",
        options=_mask(ch.causal()),
    ),
    Case("bfloat16, 64 features, grouped", q=(B, 6, 67, 64), k=(B, H, 67, 64), v=(B, H, 67, 64), dtype="bfloat16"),
    Case("bfloat16, everything", **GROUPED, dtype="bfloat16", options=_everything),
    # masks
    Case("causal", **SQUARE, options=_mask(ch.causal())),
    Case("causal, fewer queries", options=_mask(ch.causal())),
    Case("causal, more queries", q=(B, H, 29, D), options=_mask(ch.causal())),
    Case("causal from the start", options=_mask(ch.causal(align="start"))),
    Case("causal, offset", options=_mask(ch.causal(offset=2))),
    Case("causal, offset below zero", options=_mask(ch.causal(offset=-5))),
    Case("causal, offset by row", options=_mask(ch.causal(offset=[4, 1]))),
    Case("window", **SQUARE, options=_mask(ch.window(4))),
    Case("window both ways", options=_mask(ch.window(3, 2))),
    Case("window of one", **SQUARE, options=_mask(ch.window(0))),
    Case("window from the start", options=_mask(ch.window(5, 1, align="start"))),
    Case("window, offset by row", options=_mask(ch.window(5, 1, offset=[-3, 9]))),
    Case("lengths", options=_mask(ch.lengths([17, 5]))),
    Case("lengths, one empty", options=_mask(ch.lengths([0, 23]))),
    Case("lengths, one number", options=_mask(ch.lengths(7))),
    Case("documents", **SQUARE, options=_mask(ch.documents(IDS))),
    Case("documents, fewer queries", options=_mask(ch.documents(IDS))),
    Case("documents by row", **SQUARE, options=_mask(ch.documents(np.stack([IDS, IDS[::-1]])))),
    Case("documents, own query ids", options=_mask(ch.documents(IDS, np.arange(T) % 4))),
    Case("NaN in queries of no document", prepare=_nan_queries, options=_mask(ch.documents(IDS, np.arange(T) % 4))),
    Case("prefix", **SQUARE, options=_mask(ch.prefix(5) | ch.causal())),
    Case("prefix by row", **SQUARE, options=_mask(ch.prefix([2, 9]) | ch.causal())),
    Case("global tokens", **SQUARE, options=_mask(ch.global_tokens([0, 11]))),
    Case("random blocks", **SQUARE, options=_mask(ch.random_blocks(4, count=2, seed=3))),
    Case("Longformer", **SQUARE, options=_mask(ch.window(3, 3) | ch.global_tokens([0]))),
    Case(
        "BigBird",
        **SQUARE,
        options=_mask(ch.window(4, 4) | ch.global_tokens(range(2)) | ch.random_blocks(4, count=1, seed=5)),
    ),
    Case("blocks", options=_mask(ch.blocks(LAYOUT[:5], 4))),
    Case("blocks by head", **SQUARE, options=_blocks(H, 5, 5, size=5)),
    Case("blocks by row and head, grouped", **GROUPED, options=_blocks(B, 6, 7, 8, size=3)),
    Case("blocks by row", options=_blocks(B, 1, 2, 3, size=10)),
    Case("blocks of one", options=_blocks(T, S, size=1)),
    Case("one large block", options=_mask(ch.blocks([[True]], 64))),
    Case("blocks, causal", **SQUARE, options=_mask(ch.blocks(LAYOUT, 4) & ch.causal())),
    Case("no block", options=_mask(ch.blocks(np.zeros((5, 6), bool), 4))),
    Case("dilated", **SQUARE, options=_mask(ch.dilated(3, 4))),
    Case("dilated both ways", options=_mask(ch.dilated(2, 3, 2))),
    Case("dilated without end, by row", options=_mask(ch.dilated(4, offset=[4, -1]))),
    Case("strides of four", **SQUARE, options=_mask(ch.strided(4))),
    Case("strides by row", options=_mask(ch.strided(3, offset=[0, 7]))),
    Case("first tokens", **SQUARE, options=_mask(ch.window(3) | ch.first_tokens(2))),
    Case("first tokens, offset below zero", options=_mask(ch.first_tokens(4, offset=-3))),
    Case(
        "a deep tree",
        options=_mask(
            ~((ch.causal(offset=[2, -4]) & ~ch.dilated(2)) | (ch.lengths([5, 20]) & ch.blocks(LAYOUT[:5], 4)))
        ),
    ),
    Case(
        "a deeper tree, longer",
        **LONG,
        options=_mask((ch.window(9, 3) | ~(ch.strided(7) | ch.prefix(200))) & ~ch.random_blocks(16, count=2, seed=1)),
    ),
    Case(
        "Longformer, longer",
        **LONG,
        options=_mask(ch.window(20, 20, align="start") | ch.global_tokens([0, 1, 200], align="start")),
    ),
    Case("block top-k, longer", **LONG, options=_blocks(17, 33, size=8, share=0.2)),
    Case("documents in pieces, longer", **LONG, options=_mask(ch.documents(np.arange(257) // 40 * 5 % 3))),
    Case("documents, causal and window", **SQUARE, options=_mask(ch.documents(IDS) & ch.causal() & ch.window(3))),
    Case("negated", **SQUARE, options=_mask(~(ch.causal() | ch.lengths(4)))),
    Case("array", options=_random_mask(B, H, T, S)),
    Case("array of keys", options=_random_mask(S)),
    Case("array of keys by row", options=_random_mask(B, 1, 1, S)),
    Case("array of queries", options=_random_mask(T, 1)),
    Case("array and causal", options=lambda rng: {"mask": (rng.random((T, S)) < 0.6) & ch.causal()}),
    Case("all masked", options=_mask(ch.lengths(0))),
    Case("rows masked", options=_rows_masked),
    Case("rows masked by causal", options=_mask(ch.causal(offset=-7))),
    # numbers that hurt
    Case("NaN in padding", prepare=_nan_padding, options=_mask(ch.lengths([17, 5]))),
    Case("NaN in padding, grouped", **GROUPED, prepare=_nan_padding, options=_mask(ch.lengths([17, 5]))),
    Case(
        "NaN in padding, one query, grouped",
        q=(B, 6, 1, 64),
        k=(B, 2, S, 64),
        v=(B, 2, S, 64),
        prepare=_nan_padding,
        options=_mask(ch.lengths([17, 5])),
    ),
    Case("NaN before a window", prepare=_nan_first_keys, options=_mask(ch.window(1, offset=4))),
    Case("scores of 10⁴", prepare=_huge),
    Case("scores of 10⁴, causal", prepare=_huge, options=_mask(ch.causal())),
    Case("scores of 10⁴, float64", prepare=_huge, dtype="float64"),
    Case("one score for all", prepare=lambda q, k, v: q.fill(0.0)),
    # bias, softcap, sinks, scale, dropout
    Case("scale", options=lambda rng: {"scale": 0.37}),
    Case("scale of zero", options=lambda rng: {"scale": 0.0}),
    Case("scale of zero, causal", **SQUARE, options=lambda rng: {"scale": 0.0, "mask": ch.causal()}),
    Case("scale below zero", options=lambda rng: {"scale": -0.4}),
    Case("scale below zero, causal", **SQUARE, options=lambda rng: {"scale": -0.4, "mask": ch.causal()}),
    Case("bias", options=_bias(B, H, T, S)),
    Case("bias by head", options=_bias(H, 1, S)),
    Case("bias by pair", options=_bias(T, S)),
    Case("bias with −inf", options=_additive_mask),
    Case("alibi", **SQUARE, options=lambda rng: {"bias": ch.alibi(H), "mask": ch.causal()}),
    Case("alibi, fewer queries", options=lambda rng: {"bias": ch.alibi(H)}),
    Case("alibi, offset by row", options=lambda rng: {"bias": ch.alibi(H, offset=[4, 0])}),
    Case("relative bias", **SQUARE, options=_table),
    Case("relative bias of a decoder", options=lambda rng: _table(rng, bidirectional=False)),
    Case("relative bias, offset by row", options=lambda rng: _table(rng, offset=[1, 4])),
    Case("softcap", options=lambda rng: {"softcap": 0.8}),
    Case("softcap and bias", options=lambda rng: {"softcap": 0.8, **_bias(H, T, S)(rng)}),
    Case("sinks", options=_sinks),
    Case("sinks, all masked", options=lambda rng: {"sinks": np.ones(H, np.float32), "mask": ch.lengths([0, 4])}),
    Case("sinks of −inf", options=lambda rng: {"sinks": np.full(H, -np.inf, np.float32), "mask": ch.lengths([0, 4])}),
    Case("dropout", options=lambda rng: {"dropout": (0.3, 5)}),
    Case("dropout, large seed", options=lambda rng: {"dropout": (0.5, 2**63 + 12345), "mask": ch.causal()}),
    Case("everything", **GROUPED, options=_everything),
    # memory
    Case("strided", layout="strided", options=_mask(ch.causal())),
    Case("negative strides", layout="reversed", options=_mask(ch.causal())),
    Case("fortran order", layout="fortran", options=_mask(ch.causal())),
    Case("read-only", layout="read-only"),
    # numbers that are not finite
    *(Case(name, **fields) for name, fields in SPOILED.items()),
)

BY_NAME = {case.name: case for case in CASES}
