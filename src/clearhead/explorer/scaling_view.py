"""What the scaling view asks for: scores of random queries and keys with d features, with 1/√d and without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np

from clearhead.calls import observe
from clearhead.core.errors import ArgumentError
from clearhead.core.formula import score
from clearhead.explorer.answers import Params, Subject, keep, number, route, spelled
from clearhead.explorer.scene import Scene
from clearhead.measure.scales import scaling

STOPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SIGMAS = (0.25, 0.5, 1.0, 2.0, 4.0)
KEYS, QUERIES, BARS, BINS = 64, 64, 16, 41


@route("/scaling")
def spread(scene: Scene, params: Params) -> Any:
    """`scaling()` for one number of features, and beside it a histogram of scores and one row's weights, both ways."""
    d, sigma = number(params, "d", 64.0), sigma_of(params)
    assert d is not None
    if d != int(d) or not 1 <= d <= STOPS[-1]:
        raise ArgumentError("d", f"is {d:g}, expected a whole number from 1 to {STOPS[-1]}")
    return at(int(d), sigma)


@lru_cache(maxsize=256)
def at(d: int, sigma: float) -> dict[str, Any]:
    """The same by d and σ, remembered: it depends on nothing else."""
    along = stops(sigma)
    row = next((one for one in along["rows"] if one["d_k"] == d), None)
    if row is None:
        row = asdict(scaling(d, keys=KEYS, queries=QUERIES, sigma=sigma).rows[0])
    draw = np.random.default_rng([0, d]).standard_normal
    q, k = sigma * draw((QUERIES, d)), sigma * draw((KEYS, d))
    both = {}
    scales = (("unscaled", 1.0), ("scaled", float(d) ** -0.5))
    widest = float(np.abs(score(q, k, scale=1.0)).max())
    for name, scale in scales:
        scores = score(q, k, scale=scale)
        one: Any = observe(q[:1], k[:BARS], k[:BARS, :1], scale=scale, weights=True)
        limit = float(np.abs(scores).max())
        both[name] = {
            "weights": one.weights[0],
            "own": {"counts": np.histogram(scores, BINS, (-limit, limit))[0], "limit": limit},
            "shared": {"counts": np.histogram(scores, BINS, (-widest, widest))[0], "limit": widest},
        }
    return {"d": d, "sigma": sigma, "uniform": along["uniform"], **row, "drawn": both}


@route("/curve")
def curve(scene: Scene, params: Params) -> Any:
    """`scaling()` for every stop of the slider: how entropy, the largest weight and the gradient go as d grows."""
    return stops(sigma_of(params))


@lru_cache(maxsize=32)
def stops(sigma: float) -> dict[str, Any]:
    """The same by σ, remembered: it depends on nothing else."""
    found = scaling(STOPS, keys=KEYS, queries=QUERIES, sigma=sigma)
    rows = [asdict(row) for row in found.rows]
    return {"sigma": sigma, "uniform": found.uniform, "verdict": found.verdict(), "rows": rows}


def sigma_of(params: Params) -> float:
    """The spread that a parameter says."""
    sigma = number(params, "sigma", 1.0)
    assert sigma is not None
    if not SIGMAS[0] / 5 <= sigma <= SIGMAS[-1] * 5:
        raise ArgumentError("sigma", f"is {sigma:g}, expected {SIGMAS[0] / 5:g} to {SIGMAS[-1] * 5:g}")
    return sigma


@keep
def kept(subject: Subject) -> Iterator[str]:
    """What a saved file holds of it: the slider's stops."""
    for sigma in SIGMAS:
        yield spelled("/curve", sigma=f"{sigma:g}")
