"""How much of a query's weight falls on pairs that a mask names, exactly and without a matrix.

Over those keys alone the log-sum-exp of a query's scores is smaller than over all: their share of the weight is
exp(lse of them − lse of all). A head's previous-token, induction or first-token score is one such share.
"""

from __future__ import annotations

import numpy as np

from clearhead.calls import observe
from clearhead.core.arrays import to_numpy
from clearhead.core.grid import Grid
from clearhead.core.mask import Mask
from clearhead.watching.given import Given


def share_of(given: Given, pairs: Mask) -> np.ndarray:
    """The weight of each query on the keys that `pairs` lets it see, (…, heads, queries); 0 where it sees none."""
    call = given.in_float64()
    nothing = np.zeros((*call.k.shape[:-1], 1))
    whole = observe(call.q, call.k, nothing, **call.options).lse
    # a sink is in the whole, and no key
    some = observe(call.q, call.k, nothing, mask=call.masked(pairs), **{**call.unmasked, "sinks": None}).lse
    seen = np.isfinite(some)
    return np.where(seen, np.exp(np.where(seen, some - np.where(seen, whole, 0.0), 0.0)), 0.0)


def share_in(weights: np.ndarray, pairs: Mask) -> np.ndarray:
    """The same, of a matrix of weights (…, heads, queries, keys) that is there."""
    *lead, queries, keys = weights.shape
    grid = Grid(tuple(lead[:-1]), lead[-1] if lead else 1, queries, keys)
    pairs.check(grid)
    allowed = pairs.tile(range(queries), range(keys), grid)
    return np.where(np.asarray(allowed), weights.astype(np.float64), 0.0).sum(-1)


def attended(given: Given) -> np.ndarray:
    """Which keys any query of any head gives any weight, (…, keys): padding gets none."""
    received = observe(given.q, given.k, given.k[..., :1], **given.options, received=True).received
    return to_numpy(received).max(-2) > 0
