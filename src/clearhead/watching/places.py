"""Where the queries of a call stand among its keys, by what hides keys from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clearhead.core.arrays import Array, Library, to_numpy
from clearhead.watching.given import Given

if TYPE_CHECKING:
    from clearhead.watching.call import Call


def allowed(given: Given) -> Array | None:
    """Which keys each query may attend to by the mask or the bias, (…, queries, keys); None where neither says so."""
    found = given.mask
    if found is None and given.bias is not None:
        xp = Library.of(given.bias).xp
        found = given.bias > xp.finfo(given.bias.dtype).min / 2
    return None if found is None or found.shape[-1] != given.keys else found


def start(call: Call) -> int:
    """The key at which the first query stands.

    With as many queries as keys it is the first. With fewer, the last query stands at the last key, unless slots are
    empty after it, as those of a cache that was made for its longest length: then a query stands at the last key that
    it may attend to. Padded queries say otherwise, each another number: what most queries say holds.
    """
    queries, keys = call.shape[-2:]
    if queries == keys or (call.kept is not None and call.kept.causal):
        return 0
    seen = None if call.kept is None else allowed(call.kept)
    if call.kept is None and call.weights is not None:
        seen = call.weights > 0
    if seen is None or not queries:
        return keys - queries
    pairs = np.atleast_2d(to_numpy(seen))
    last = keys - 1 - pairs[..., ::-1].argmax(-1) - np.arange(queries)  # (…, queries)
    said = last[np.broadcast_to(pairs.any(-1), last.shape)]
    most = int(np.bincount(np.maximum(said, 0)).argmax()) if said.size else keys  # of equals the lowest
    return min(most, keys - queries)
