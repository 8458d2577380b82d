"""What the scaling view asks for: scores of random queries and keys with d features, with 1/√d and without."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from clearhead.calls import observe
from clearhead.core.errors import ArgumentError
from clearhead.core.formula import score
from clearhead.explorer.answers import Params, number, route
from clearhead.explorer.scene import Scene
from clearhead.measure.scales import scaling

STOPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SIGMAS = (0.5, 1.0, 2.0)
KEYS, QUERIES, BARS, BINS = 64, 64, 16, 41


@route("/scaling")
def spread(scene: Scene, params: Params) -> Any:
    """`scaling()` for one number of features, and beside it a histogram of scores and one row's weights, both ways."""
    d, sigma = number(params, "d", 64.0), number(params, "sigma", 1.0)
    assert d is not None
    assert sigma is not None
    if d != int(d) or not 1 <= d <= STOPS[-1]:
        raise ArgumentError("d", f"is {d:g}, expected a whole number from 1 to {STOPS[-1]}")
    found = scaling(int(d), keys=KEYS, queries=QUERIES, sigma=sigma)
    draw = np.random.default_rng([0, int(d)]).standard_normal
    q, k = sigma * draw((QUERIES, int(d))), sigma * draw((KEYS, int(d)))
    both = {}
    for name, scale in (("unscaled", 1.0), ("scaled", float(int(d)) ** -0.5)):
        scores = score(q, k, scale=scale)
        one: Any = observe(q[:1], k[:BARS], k[:BARS, :1], scale=scale, weights=True)
        limit = float(np.abs(scores).max())
        counts, edges = np.histogram(scores, BINS, (-limit, limit))
        both[name] = {"counts": counts, "edges": edges, "weights": one.weights[0], "limit": limit}
    row = asdict(found.rows[0])
    return {"d": int(d), "sigma": sigma, "uniform": found.uniform, **row, "drawn": both}
