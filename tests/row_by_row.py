"""Attention a row at a time, each over the keys that it may see and no others: what is exact, by the definition.

Nothing of the library is used. A key that a query may not attend to is not multiplied by zero but left out, so that
what it holds cannot matter; a number that is not finite spoils exactly the results that it belongs to, which are NaN
here whether arithmetic would make them NaN or infinite.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, *, dlse: np.ndarray | None = None, **options: Any
) -> dict[str, np.ndarray]:
    """Everything that comes out, for q (…, H, T, D), k (…, H, S, D), v (…, H, S, Dv) and the gradient of the output.

    `dlse` (…, H, T) is that of the log-sum-exp: "dq of lse" and the like are gradients with it, "dq" without.
    `options` are the formula's. |dq| and |dk| are the sums of the absolute values of the terms of dq and dk.
    """
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    queries, keys = q.shape[-2], k.shape[-2]
    full = {
        name: np.broadcast_to(value, (*lead, queries, keys))
        for name, value in options.items()
        if name in ("mask", "bias", "keep") and value is not None
    }
    sinks = options.get("sinks")
    parts = ("",) if dlse is None else ("", " of lse")
    q, k, v = (np.broadcast_to(a, (*lead, *a.shape[-2:])) for a in (q, k, v))
    shapes = {"lse": (), "max_score": (), "entropy": (), "weights": (keys,), "output": (v.shape[-1],)}
    found = {name: np.zeros((*lead, queries, *shape), q.dtype) for name, shape in shapes.items()}
    gradients = {"dsinks": q[..., 0].shape, "dq": q.shape, "dk": k.shape, "dv": v.shape}
    names = [(part, name) for part in parts for name in gradients]
    found |= {name + part: np.zeros(gradients[name], q.dtype) for part, name in names}
    found |= {f"|{name}{part}|": np.zeros(gradients[name], q.dtype) for part, name in names if name in ("dq", "dk")}
    with np.errstate(all="ignore"):
        if queries > MANY and not full and sinks is None and all(np.isfinite(a).all() for a in (q, k, v, dout)):
            given = {part: None if dlse is None or not part else dlse[..., None] for part in parts}
            all_rows(found, q, k, v, dout, given, options["scale"], options.get("softcap"))
            return found
        for at in np.ndindex(*lead):
            sink = -np.inf if sinks is None else np.broadcast_to(sinks, (*lead, 1))[at][0]
            for i in range(queries):
                here = {name: value[at][i] for name, value in full.items()}
                rows = {name: array[at] for name, array in found.items()}
                knobs = {"softcap": options.get("softcap"), "rescale": options.get("rescale", 1.0)}
                given = {part: 0.0 if dlse is None or not part else dlse[at][i] for part in parts}
                one_row(rows, i, q[at], k[at], v[at], dout[at], given, sink, scale=options["scale"], **knobs, **here)
    for name in ("output", *(name + part for part, name in names)):
        found[name] = np.where(np.isfinite(found[name]), found[name], np.nan)
    for name in found:
        if name.startswith("|"):  # the size of what is finite
            found[name] = np.where(np.isfinite(found[name]), found[name], 0.0)
    return found


def all_rows(
    found: dict[str, np.ndarray], q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray,
    dlse: dict[str, Any], scale: Any, softcap: float | None,
) -> None:  # fmt: skip
    """The same for all rows at once, where each sees every key and all numbers are finite."""
    turned = k.swapaxes(-1, -2)
    scores = scale * (q @ turned)
    slopes = np.ones_like(scores)
    if softcap is not None:
        slopes = 1 - np.tanh(scores / softcap) ** 2
        scores = softcap * np.tanh(scores / softcap)
    peak = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - peak)
    total = exponentials.sum(-1, keepdims=True)
    weights = exponentials / total
    dweights = dout @ v.swapaxes(-1, -2)
    mean = (weights * dweights).sum(-1, keepdims=True)
    sizes = np.abs(dout) @ np.abs(v).swapaxes(-1, -2)
    sizes = sizes + (weights * sizes).sum(-1, keepdims=True)
    found["lse"][...], found["max_score"][...] = (peak + np.log(total))[..., 0], peak[..., 0]
    found["weights"][...], found["output"][...] = weights, weights @ v
    found["entropy"][...] = -(weights * np.log(np.where(weights == 0, 1, weights))).sum(-1)
    for part, of_lse in dlse.items():
        of_lse = 0.0 if of_lse is None else of_lse
        dscores = weights * (dweights - mean + of_lse) * slopes
        terms = np.abs(scale) * weights * (sizes + np.abs(of_lse))
        for name, left in (("", scale * dscores), ("|", terms)):
            left_q, left_k = (np.abs(q), np.abs(k)) if name else (q, k)
            found[f"{name}dq{part}{name}"][...] = left @ left_k
            found[f"{name}dk{part}{name}"][...] = left.swapaxes(-1, -2) @ left_q
        found["dv" + part][...] = weights.swapaxes(-1, -2) @ dout


MANY = 40  # rows from which on they are not taken one by one where that makes no difference


def one_row(
    found: dict[str, np.ndarray], i: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray,
    dlse: dict[str, Any], sink: Any, *, scale: Any, softcap: float | None, rescale: float,
    mask: np.ndarray | None = None, bias: np.ndarray | None = None, keep: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Row i of what was found, and what it adds to dk and dv; gradients for each of the `dlse`, by name."""
    seen = np.arange(len(k)) if mask is None else np.flatnonzero(mask)
    found["lse"][i], found["max_score"][i] = sink, -np.inf
    for part, of_lse in dlse.items():
        found["dsinks" + part][i] = 0.0 if sink == -np.inf else of_lse
    if not len(seen):
        return
    k, v, d = k[seen], v[seen], dout[i]
    scores = scale * (k * q[i]).sum(-1)
    slopes = np.ones_like(scores)
    if softcap is not None:
        slopes = 1 - np.tanh(scores / softcap) ** 2
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias[seen]
    peak = scores.max()
    lse, weights, sink_weight = softmax(scores, sink)
    found["lse"][i], found["max_score"][i] = lse, np.nan if peak == np.inf else peak
    found["weights"][i][seen] = weights
    found["entropy"][i] = -(weights * np.log(np.where(weights == 0, 1, weights))).sum()
    left = np.ones_like(weights) if keep is None else np.where(keep[seen], rescale, 0)  # what is dropped is still seen
    kept = weights * left
    found["output"][i] = (kept[:, None] * v).sum(0)
    dweights = (v * d).sum(-1) * left
    mean = (weights * dweights).sum()
    sizes = np.abs(v * d).sum(-1) * rescale
    sizes = sizes + (weights * sizes).sum()
    for part, of_lse in dlse.items():
        spread = mean - (0.0 if lse == -np.inf else of_lse)
        dscores = weights * (dweights - spread) * slopes
        found["dsinks" + part][i] = -sink_weight * spread
        found["dq" + part][i] = scale * (dscores[:, None] * k).sum(0)
        found["dk" + part][seen] += scale * dscores[:, None] * q[i]
        found["dv" + part][seen] += kept[:, None] * d
        terms = np.abs(scale) * weights * (sizes + np.abs(of_lse))
        found[f"|dq{part}|"][i] = (terms[:, None] * np.abs(k)).sum(0)
        found[f"|dk{part}|"][seen] += terms[:, None] * np.abs(q[i])


def softmax(scores: np.ndarray, sink: Any) -> tuple[Any, np.ndarray, Any]:
    """Log-sum-exp, the keys' weights and the sink's; all NaN where a score is NaN or +inf, or the sink is NaN."""
    if np.isnan(scores).any() or (scores == np.inf).any() or np.isnan(sink):
        return np.nan, np.full_like(scores, np.nan), np.nan
    if sink == np.inf:  # it takes everything
        return np.inf, np.zeros_like(scores), 1.0
    top = max(scores.max(), sink)
    if top == -np.inf:
        return -np.inf, np.zeros_like(scores), 0.0
    exponentials, rest = np.exp(scores - top), np.exp(sink - top)
    total = exponentials.sum() + rest
    return top + np.log(total), exponentials / total, rest / total
