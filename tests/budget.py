"""The error that is allowed, derived, never guessed.

`exact` is the definition row by row (`row_by_row.py`) in float64, or for problems in float64 in the machine's extended
precision: nothing is exact in the precision it is held against. `plain` is the formula in the kernel's own precision.
A result passes when its distance to exact is at most twice plain's, plus √S · eps · max|exact|, the rounding of a sum
over S keys.

For dq and dk, max|exact| is replaced by the size of the terms that are summed. A score's gradient is a difference,
dweight − Σ weight · dweight, and both sides are rounded before they cancel: where they cancel to nothing (one key, one
large weight) a bound relative to what is left would ask for digits that no order of summing has. Terms are rounded in
the precision of sums, which for half precisions is float32; only what is left is rounded to the result's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import row_by_row
from cases import BY_NAME, Case

from clearhead.core import formula
from clearhead.core.dropout import Dropout
from clearhead.core.grid import Grid
from clearhead.core.mask import as_mask
from clearhead.core.positions import as_bias

HALF = ("float16", "bfloat16")
TOP, MAP, QUERIES, LAST = 5, (4, 7), (-1, 0, 2), 6
ALONE = 2.0**-12  # of a query's weights: where less is left, its whole output is lost with the key


class Expected(NamedTuple):
    """One array, in float64 and in the kernel's own precision."""

    exact: np.ndarray
    plain: np.ndarray
    eps: float
    size: float | None = None
    sum_eps: float | None = None  # the rounding of terms that large, where it is not that of the result


def check(got: Any, expected: Expected, keys: int, what: str) -> None:
    """Hold an array to its budget. Infinities must be the same; it is not finite where exact is NaN, and only there.

    Whether a number that is not finite makes a result infinite or NaN is nobody's promise.
    """
    got = np.asarray(got).astype(expected.exact.dtype)
    exact, plain = expected.exact, expected.plain.astype(expected.exact.dtype)
    assert got.shape == exact.shape, f"{what}: shape {got.shape}, expected {exact.shape}"
    spoiled = np.isnan(exact)
    assert not np.isfinite(got[spoiled]).any(), f"{what}: {np.isfinite(got[spoiled]).sum()} are finite, expected NaN"
    got, exact, plain = got[~spoiled], exact[~spoiled], plain[~spoiled]
    assert not np.isnan(got).any(), f"{what}: {np.isnan(got).sum()} of {got.size} are NaN"
    infinite = np.isinf(exact)
    assert np.array_equal(got[infinite], exact[infinite]), f"{what}: infinities differ"
    got, exact, plain = got[~infinite], exact[~infinite], plain[~infinite]
    if not exact.size:
        return
    rounding = expected.eps * np.abs(exact).max()
    if expected.size is not None:
        rounding = max(rounding, (expected.sum_eps or expected.eps) * expected.size)
    allowed = 2 * np.abs(plain - exact).max() + np.sqrt(max(keys, 1)) * rounding
    distance = np.abs(got - exact).max()
    assert distance <= allowed, f"{what}: off by {distance:.3g}, allowed {allowed:.3g}"


def within(got: Any, exact: Any, plain: Any, keys: int, what: str = "output", size: float | None = None) -> None:
    """The same budget where exact and plain are at hand: tensors, exact in float64, plain in the precision of `got`."""
    eps = float(ml_dtypes.finfo(str(got.dtype).removeprefix("torch.")).eps)
    numbers = [np.asarray(a.detach().double()) for a in (got, exact, plain)]
    check(numbers[0], Expected(numbers[1], numbers[2], eps, size), keys, what)


@cache
def expected(name: str) -> dict[str, Expected]:
    """Everything that can come out of a case: output, gradients, observations."""
    return expected_of(BY_NAME[name])


class Given(NamedTuple):
    """A problem that is no case: its arrays, of any library that NumPy reads, and its options."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    options: dict[str, Any]

    @property
    def dtype(self) -> str:
        return self.q.dtype.name

    def build(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray, dict[str, Any]]:
        return (self.q, self.k, self.v), self.dout, self.options

    def dlse(self) -> np.ndarray:
        return np.zeros(self.dout.shape[:-1], np.float32)


def given(q: Any, k: Any, v: Any, dout: Any = None, **options: Any) -> dict[str, Expected]:
    """Everything that can come out of a problem of four axes, q, k and v of one precision."""
    read = {name: np.asarray(value) if hasattr(value, "__array__") else value for name, value in options.items()}
    arrays = [np.asarray(array) for array in (q, k, v)]
    shape = (*arrays[0].shape[:-1], arrays[2].shape[-1])
    return expected_of(Given(*arrays, np.zeros(shape) if dout is None else np.asarray(dout), read))


def hold(found: dict[str, Any], wanted: dict[str, Expected], keys: int) -> None:
    """Hold arrays to what is expected of those names; `keys`: how many terms are summed at most."""
    for what, array in found.items():
        check(array, wanted[what], keys, what)


def expected_of(case: Case | Given) -> dict[str, Expected]:
    """The same of any problem."""
    own = np.float64 if case.dtype == "float64" else np.float32
    with np.errstate(all="ignore"):  # NaN and infinities are put in on purpose
        exact = answers(case, np.longdouble if case.dtype == "float64" else np.float64, row_by_row.attend)
        plain = answers(case, own, by_formula)
    rounded = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    found = {}
    for what in plain:
        value = exact[what]
        comes_back_rounded = what == "output" or what.startswith(("dq", "dk", "dv"))
        dtype = rounded if comes_back_rounded else np.dtype(own)
        size = float(exact[f"|{what}|"].max(initial=0.0)) if f"|{what}|" in exact else None
        eps, sum_eps = (float(ml_dtypes.finfo(kind).eps) for kind in (dtype, own))
        if what.startswith("removal"):  # a difference from outputs, which a kernel may sum from rounded weights
            sum_eps = float(ml_dtypes.finfo(rounded).eps)
        found[what] = Expected(value, plain[what].astype(dtype), eps, size, sum_eps)
    return found


def answers(case: Case | Given, dtype: type, by: Callable[..., dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """All that comes out of a case, by the formula or by the definition, in one precision."""
    (q, k, v), dout, options = case.build()
    flat = q.ndim == 2
    q, k, v, dout = (a.astype(dtype) for a in (q, k, v, dout))
    if flat:
        q, k, v, dout = (a[None] for a in (q, k, v, dout))
    rank = max(a.ndim for a in (q, k, v))
    q, k, v = (a.reshape((1,) * (rank - a.ndim) + a.shape) for a in (q, k, v))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    grid = Grid(batch, q.shape[-3], q.shape[-2], k.shape[-2])
    call = in_full(options, grid, dtype)
    if call["scale"] is None:
        call["scale"] = 1 / np.sqrt(dtype(q.shape[-1]))
    group = q.shape[-3] // k.shape[-3]
    # query head h uses key head h // group, written as an index so as not to share code with any kernel
    heads = [h // group for h in range(q.shape[-3])]
    lead = (*batch, grid.heads)
    dlse = case.dlse().astype(dtype).reshape(*lead, grid.queries)
    given = by(q, k[..., heads, :, :], v[..., heads, :, :], dout, dlse=dlse, **call)
    found = {
        "output": np.broadcast_to(given["output"], (*lead, grid.queries, v.shape[-1])),
        **{name: np.broadcast_to(given[name], (*lead, grid.queries)) for name in ("lse", "max_score", "entropy")},
        **observations(np.broadcast_to(given["weights"], grid.shape)),
    }
    if "keep" not in call:
        found |= removals(
            found["weights"], np.broadcast_to(v[..., heads, :, :], (*lead, *v.shape[-2:])), found["output"]
        )
    if flat:
        found = {what: value[0] for what, value in found.items()}
    shapes = [a.shape for a in case.build()[0]]
    found |= {name: value for name, value in given.items() if name.startswith("|")}
    for of in ("", " of lse"):
        found[f"dq{of}"] = sum_to(given[f"dq{of}"], q.shape).reshape(shapes[0])
        found[f"dk{of}"] = by_key_head(given[f"dk{of}"], k, heads).reshape(shapes[1])
        found[f"dv{of}"] = by_key_head(given[f"dv{of}"], v, heads).reshape(shapes[2])
    return found


def by_key_head(gradient: np.ndarray, like: np.ndarray, heads: list[int]) -> np.ndarray:
    """The gradients of query heads, added up for the key head that each uses."""
    total = np.zeros((*gradient.shape[:-3], *like.shape[-3:]), gradient.dtype)
    for h, key_head in enumerate(heads):
        total[..., key_head, :, :] += gradient[..., h, :, :]
    return sum_to(total, like.shape)


def by_formula(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, *, dlse: np.ndarray | None = None, **call: Any
) -> dict[str, np.ndarray]:
    """What `formula.py` gives; gradients without that of the log-sum-exp, and with it where there is one."""
    found = {**vars(formula.attention(q, k, v, **call)), **vars(formula.gradients(q, k, v, dout, **call))}
    if dlse is not None:
        of_lse = vars(formula.gradients(q, k, v, dout, dlse=dlse, **call))
        found |= {f"{name} of lse": gradient for name, gradient in of_lse.items()}
    return found


def in_full(options: dict[str, Any], grid: Grid, dtype: type) -> dict[str, Any]:
    """The options of a call as whole arrays."""
    call: dict[str, Any] = {"softcap": options.get("softcap"), "scale": options.get("scale")}
    rows, columns = range(grid.queries), range(grid.keys)
    if "mask" in options:
        mask = as_mask("mask", options["mask"]).tile(rows, columns, grid)
        call["mask"] = np.broadcast_to(np.asarray(mask), grid.shape)
    if "bias" in options:
        call["bias"] = np.asarray(as_bias(options["bias"]).tile(rows, columns, grid)).astype(dtype)
    if "sinks" in options:
        call["sinks"] = options["sinks"].astype(dtype)[:, None]
    if "dropout" in options:
        dropout = Dropout(*options["dropout"])
        lead = (*grid.batch, grid.heads)
        call["keep"] = dropout.keep(np.arange(int(np.prod(lead))).reshape(lead), rows, columns)
        call["rescale"] = dropout.rescale
    return call


def observations(weights: np.ndarray) -> dict[str, np.ndarray]:
    """What is observed, by its definition, from the matrix."""
    *lead, queries, keys = weights.shape
    rows, columns = min(MAP[0], queries), min(MAP[1], keys)
    mean, most = np.zeros((2, *lead, rows, columns), weights.dtype)
    in_row = [[i for i in range(queries) if i * rows // queries == r] for r in range(rows)]
    in_column = [[j for j in range(keys) if j * columns // keys == c] for c in range(columns)]
    for r in range(rows):
        for c in range(columns):
            block = weights[..., in_row[r], :][..., in_column[c]]
            mean[..., r, c], most[..., r, c] = block.mean((-1, -2)), block.max((-1, -2))
    top = np.sort(weights, axis=-1)[..., ::-1][..., :TOP]
    top = np.concatenate([top, np.zeros((*lead, queries, TOP - top.shape[-1]), weights.dtype)], axis=-1)
    top[np.isnan(weights).any(-1)] = np.nan  # a row that is spoiled has no largest
    return {
        "weights": weights,
        "received": weights.sum(-2),
        "received_last": weights[..., max(queries - LAST, 0) :, :].sum(-2),
        "received_weighted": (weights * emphasis(weights.shape[:-1])[..., None]).sum(-2),
        "received_max": weights.max(-2, initial=0.0),
        "received_max_last": weights[..., max(queries - LAST, 0) :, :].max(-2, initial=0.0),
        "map_mean": mean,
        "map_max": most,
        "top": top,
        "queries": weights[..., [i % queries for i in queries_of(queries)], :],
    }


def emphasis(shape: tuple[int, ...]) -> np.ndarray:
    """How much each query counts, where that is said, in few digits: some less than nothing, all something."""
    return ((np.arange(int(np.prod(shape))) % 23 - 5) / 8 + 1 / 16).reshape(shape)


def removals(weights: np.ndarray, v: np.ndarray, output: np.ndarray) -> dict[str, np.ndarray]:
    """‖o − o without the key‖² summed over queries, pair by pair; and the size of what rounding errors grow by.

    With r = w / (1 − w), a rounding of w is one of r that is 1 / (1 − w) times as large, and one of v or o is one of
    r · ‖v − o‖ that is r · (‖v‖ + ‖o‖) times as large.
    """
    *lead, queries, _ = weights.shape
    change, size = np.zeros((2, *weights.shape), weights.dtype)
    for at in np.ndindex(*lead):
        for i in range(queries):
            seen = np.flatnonzero(weights[at][i])
            if not seen.size:
                continue
            w, o = weights[at][i, seen], output[at][i]
            left, apart = 1 - w, np.sqrt(((v[at][seen] - o) ** 2).sum(-1))
            lengths = np.sqrt((v[at][seen] ** 2).sum(-1)) + np.sqrt((o**2).sum())
            alone = left < ALONE
            r = np.where(alone, 1.0, w / np.where(alone, 1.0, left))
            change[at][i, seen] = np.where(alone, (o**2).sum(), (r * apart) ** 2)
            terms = (
                (r * apart) ** 2 / np.where(alone, 1.0, left)
                + r * r * apart * lengths
                + (r * lengths) ** 2 * np.where(w > 0.5, 0, 1)
            )
            size[at][i, seen] = 2 * np.where(alone, (o**2).sum(), terms)
    size = np.where(np.isfinite(size), size, 0.0)
    last = slice(max(queries - LAST, 0), None)
    return {
        "removal": change.sum(-2),
        "|removal|": size.sum(-2),
        "removal_last": change[..., last, :].sum(-2),
        "|removal_last|": size[..., last, :].sum(-2),
    }


def queries_of(count: int) -> list[int]:
    """The queries whose rows are asked for, where there are that many."""
    return [i for i in QUERIES if -count <= i < count]


def sum_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    axes = tuple(i for i, (have, want) in enumerate(zip(array.shape, shape, strict=True)) if have != want)
    return array.sum(axis=axes, keepdims=True)
