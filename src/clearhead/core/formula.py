"""The definition: scaled dot-product attention in a page of plain array code, every edge case decided here.

    softmax(Q Kᵀ · scale  [softcap] [+ bias] [mask]) V

Every kernel is held to these functions. They build the whole T×S matrix and take arrays of any library, already in one
precision and with as many key heads as query heads; what is None is left out. At the end, the same in explicit loops.

A number that is not finite spoils exactly the results that see it: those of its own query, or of the queries that may
attend to its key, and no others. Whether they become infinite or NaN is not promised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import array_api_compat

from clearhead.core.arrays import Array, refuse_masked, truth
from clearhead.core.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Answer:
    """What the formula gives: output (…, T, Dv), weights (…, T, S), and lse, max_score, entropy, each (…, T)."""

    output: Array
    weights: Array
    lse: Array
    max_score: Array
    entropy: Array


@dataclass(frozen=True, eq=False)
class Gradients:
    """The derivatives of ⟨output, dout⟩ + ⟨lse, dlse⟩: dq, dk, dv as q, k, v.

    dbias (…, T, S) and dsinks (…, T) are not yet summed.
    """

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
    dsinks: Array | None = None


def score(
    q: Array, k: Array, *, scale: float, softcap: float | None = None, bias: Array = None, mask: Array = None
) -> Array:
    """How well each query matches each key; −inf where it may not attend."""
    xp = array_api_compat.array_namespace(q)
    scores = q @ xp.matrix_transpose(k)  # (…, T, S)
    scores *= scale  # after the product: scaled queries are rounded once more, which shows where scores are large
    if softcap is not None:
        scores = softcap * xp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = xp.where(mask, scores, -xp.inf)
    return scores


def blank(mask: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Zeros in place of keys that nobody may attend to and of queries that may attend to nothing.

    They never influence the result, whatever they hold: in a product, zero weight times NaN would be NaN.
    """
    if mask is None:
        return q, k, v
    xp = array_api_compat.array_namespace(q)
    asked = xp.any(mask, axis=-1)[..., None]  # (…, T, 1)
    seen = xp.any(mask, axis=-2)[..., None]  # (…, S, 1)
    return xp.where(asked, q, 0.0), xp.where(seen, k, 0.0), xp.where(seen, v, 0.0)


def allowed_only(mask: Array, pairs: Array) -> Array:
    """The pairs (…, T, S) with 0 for those that the mask hides, also in rows that are NaN."""
    xp = array_api_compat.array_namespace(pairs)
    return pairs if mask is None else xp.where(mask, pairs, 0.0)


def mix(pairs: Array, rows: Array, mask: Array) -> Array:
    """pairs (…, T, S) @ rows (…, S, D), in which pairs that the mask hides take no part.

    They are 0, but in a product 0 · NaN is NaN. What is not finite is left out of it, and NaN put where it is seen.
    """
    if mask is None:
        return pairs @ rows
    xp = array_api_compat.array_namespace(pairs)
    finite = xp.isfinite(rows)
    if truth(xp.all(finite)):  # nearly always; where it cannot be told before the call runs, the long way is right too
        return pairs @ rows
    mask = xp.astype(xp.broadcast_to(mask, pairs.shape), rows.dtype)
    met = mask @ xp.astype(~finite, rows.dtype)  # (…, T, D): how many numbers that are not finite belong to a result
    return (pairs @ xp.where(finite, rows, 0.0)) * xp.where(met > 0, xp.nan, xp.ones_like(met))


def softmax(scores: Array, sinks: Array = None) -> tuple[Array, Array, Array]:
    """Weights (…, T, S) that are positive and sum to one, log-sum-exp (…, T) and the largest score (…, T).

    A row of only −inf has weights 0 and log-sum-exp −inf. A sink (…, 1) joins the denominator and has no weight; one of
    −inf is none, and one of inf leaves nothing for the keys.
    """
    xp = array_api_compat.array_namespace(scores)
    if scores.shape[-1]:
        peak = xp.max(scores, axis=-1)  # (…, T)
    else:
        peak = xp.sum(scores, axis=-1) - xp.inf  # no keys at all: the largest of nothing
    top = peak if sinks is None else xp.maximum(peak, sinks)
    # exp overflows float32 past 88: shift each row by its peak, or by 0 where the peak is −inf
    shift = xp.where(top == -xp.inf, 0.0, top)
    exponentials = xp.exp(scores - shift[..., None])
    total = xp.sum(exponentials, axis=-1)
    if sinks is not None:
        total = total + share_of(sinks, shift)
    some = total != 0  # true for NaN, which is to be seen and not turned into a 0
    weights = exponentials / xp.where(some, total, 1.0)[..., None]
    lse = xp.where(some, shift + xp.log(xp.where(some, total, 1.0)), -xp.inf)
    return weights, lse, peak


def share_of(sinks: Array, lse: Array) -> Array:
    """exp(sinks − lse), which is 1 for a sink of inf."""
    xp = array_api_compat.array_namespace(lse)
    infinite = sinks == xp.inf
    return xp.where(infinite, 1.0, xp.exp(xp.where(infinite, 0.0, sinks) - lse))


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Array = None,
    mask: Array = None,
    sinks: Array = None,
    keep: Array = None,
    rescale: float = 1.0,
) -> Answer:
    """scores → scale → softcap → bias → mask → softmax → dropout → values."""
    xp = array_api_compat.array_namespace(q)
    q, k, v = blank(mask, q, k, v)
    scores = score(q, k, scale=scale, softcap=softcap, bias=bias, mask=mask)  # (…, T, S)
    weights, lse, peak = softmax(scores, sinks)
    weights = allowed_only(mask, weights)
    # 0 · ln 0 is 0
    entropy = 0.0 - xp.sum(weights * xp.log(xp.where(weights == 0, 1.0, weights)), axis=-1)
    kept = weights if keep is None else weights * (xp.astype(keep, weights.dtype) * rescale)
    return Answer(mix(kept, v, mask), weights, lse, peak, entropy)  # (…, T, Dv)


# Where less than this is left of a query's weights, what the others hold is lost to rounding
ALONE = 2.0**-12


def removal(weights: Array, v: Array, output: Array) -> Array:
    """‖o − o without the key‖² of each query and key, (…, T, S): what the output would change by without the key.

    Without key j the other weights are w / (1 − wⱼ), so that o changes by wⱼ / (1 − wⱼ) · (o − vⱼ):

        (w / (1 − w))² · ‖v − o‖²

    Where 1 − w is below 2⁻¹² nothing is taken to be left, and o is all that is lost: ‖o‖². A sink stays where it is,
    and so do all other keys. weights (…, T, S), v (…, S, Dv), output (…, T, Dv) before dropout.
    """
    xp = array_api_compat.array_namespace(weights)
    left = 1.0 - weights
    alone = left < ALONE
    ratio = weights / xp.where(alone, 1.0, left)
    v = xp.where(xp.isfinite(v), v, xp.nan)  # ∞ − ∞ is NaN in any case, and no sum has to say so
    whole = xp.sum(output * output, axis=-1)[..., None]  # (…, T, 1)
    apart = xp.sum(v * v, axis=-1)[..., None, :] - 2.0 * (output @ xp.matrix_transpose(v)) + whole
    # that difference has no digits where v is nearly o: for the one key that may have more than half of the weight, it
    # is taken by feature
    most = xp.argmax(weights, axis=-1, keepdims=True)  # (…, T, 1)
    lead = weights.shape[:-2]
    nearest = xp.take_along_axis(
        xp.broadcast_to(v, (*lead, *v.shape[-2:])), xp.broadcast_to(most, (*most.shape[:-1], v.shape[-1])), axis=-2
    )
    nearest = xp.sum((nearest - output) ** 2, axis=-1)[..., None]
    apart = xp.where(weights > 0.5, nearest, xp.where(apart < 0, 0.0, apart))
    change = xp.where(alone, whole, ratio * ratio * apart)
    return xp.where(weights == 0, 0.0, change)


def gradients(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Array = None,
    mask: Array = None,
    sinks: Array = None,
    keep: Array = None,
    rescale: float = 1.0,
    dlse: Array = None,
) -> Gradients:
    """The chain rule through `attention`, backwards, one line a step."""
    xp = array_api_compat.array_namespace(q)
    q, k, v = blank(mask, q, k, v)
    if mask is not None:
        dout = xp.where(xp.any(mask, axis=-1)[..., None], dout, 0.0)
    scores = score(q, k, scale=scale, softcap=softcap, bias=bias, mask=mask)
    weights, lse, _ = softmax(scores, sinks)
    dout = xp.where((lse == -xp.inf)[..., None], 0.0, dout)  # a bias of −inf hides keys as well
    weights = allowed_only(mask, weights)
    left = 1.0 if keep is None else xp.astype(keep, weights.dtype) * rescale
    kept = weights * left
    turned = None if mask is None else xp.matrix_transpose(xp.broadcast_to(mask, weights.shape))

    dv = mix(xp.matrix_transpose(kept), dout, turned)  # (…, S, Dv)
    dweights = allowed_only(mask, dout @ xp.matrix_transpose(v)) * left  # (…, T, S)
    spread = xp.sum(weights * dweights, axis=-1)  # (…, T): what normalising takes back from each weight
    if dlse is not None:
        spread = spread - xp.where(lse == -xp.inf, 0.0, dlse)  # the log-sum-exp grows by weight · dscore
    dscores = allowed_only(mask, weights * (dweights - spread[..., None]))
    dbias, dsinks = dscores, None
    if sinks is not None:
        dsinks = -share_of(sinks, xp.where(lse == -xp.inf, 0.0, lse)) * spread
    if softcap is not None:
        uncapped = score(q, k, scale=scale)
        dscores = allowed_only(mask, dscores * (1.0 - xp.tanh(uncapped / softcap) ** 2))
    dq, dk = mix(dscores, k, mask), mix(xp.matrix_transpose(dscores), q, turned)
    return Gradients(scale * dq, scale * dk, dv, dbias, dsinks)


@dataclass(frozen=True)
class Counted:
    """Attention by explicit loops: the output and weights as lists, and how often each operation was done."""

    output: list[list[float]]
    weights: list[list[float]]
    multiply_adds: int
    exponentials: int
    divisions: int


def _rows(name: str, matrix: Array) -> list[list[float]]:
    """Two axes of numbers as lists; anything else is refused."""
    refuse_masked(name, matrix)
    try:
        count = len(matrix)
        if "complex" in str(getattr(matrix, "dtype", "")):  # of which float takes a part
            raise TypeError
        rows = [[float(x) for x in row] for row in matrix]
    except (TypeError, ValueError, RuntimeError):
        count, rows = -1, []
    if len({len(row) for row in rows}) > 1 or len(rows) != count:
        shape = f"has shape {tuple(matrix.shape)}" if hasattr(matrix, "shape") else "is no table of numbers"
        raise ArgumentError(name, f"{shape}, expected (positions, features)")
    return rows


def attention_loops(q: Array, k: Array, v: Array, *, scale: float | None = None, mask: Array | None = None) -> Counted:
    """The same in explicit loops over numbers, counting each: the n² can be seen.

    q (T, D), k (S, D), v (S, Dv), mask (T, S), any of them nested lists or arrays.

    >>> counted = attention_loops([[1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[1.0], [3.0]], scale=1.0)
    >>> counted.weights[0], counted.multiply_adds
    ([0.7310585786300049, 0.2689414213699951], 6)
    """
    q, k, v = (_rows(name, matrix) for name, matrix in (("q", q), ("k", k), ("v", v)))
    if q and k and len(q[0]) != len(k[0]):
        raise ArgumentError("k", f"has {len(k[0])} features, expected {len(q[0])} as q has")
    if len(k) != len(v):
        raise ArgumentError("v", f"has {len(v)} positions, expected {len(k)} as k has")
    if scale is None:
        scale = 1.0 / math.sqrt(len(k[0])) if k and k[0] else 1.0
    if mask is not None:
        mask = _rows("mask", mask)
        if len(mask) != len(q) or any(len(row) != len(k) for row in mask):
            shape = (len(mask), len(mask[0]) if mask else 0)
            raise ArgumentError("mask", f"has shape {shape}, expected {(len(q), len(k))}: queries and keys")
    multiply_adds = exponentials = divisions = 0
    output, weights = [], []
    for i in range(len(q)):
        allowed = [mask is None or bool(mask[i][j]) for j in range(len(k))]
        scores = []
        for j in range(len(k)):
            dot = 0.0
            for c in range(len(q[i])):
                dot += q[i][c] * k[j][c]
                multiply_adds += 1
            scores.append(scale * dot if allowed[j] else -math.inf)
        peak = max(scores, default=-math.inf)
        row = []
        for s in scores:
            row.append(0.0 if s == -math.inf else math.exp(s - peak))
            exponentials += 1
        total = sum(row)
        for j in range(len(k)):
            row[j] = row[j] / total if total and allowed[j] else 0.0
            divisions += 1
        result = [0.0] * (len(v[0]) if v else 0)
        for j in range(len(k)):
            for c in range(len(result)):
                result[c] += row[j] * v[j][c] if allowed[j] else 0.0
                multiply_adds += 1
        weights.append(row)
        output.append(result)
    return Counted(output, weights, multiply_adds, exponentials, divisions)
