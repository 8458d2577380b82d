"""How far a query looks on average, Σ w·|i − j|, exactly and without a matrix.

Attention over the keys' positions instead of their values gives the mean position that a query attends to. Where no key
lies ahead of the query, the distance is its own position less that mean. Where keys lie on both sides, attention over
those up to the query alone says how much weight they have, exp(lse of them − lse of all), and where it lies; what is
left of the mean lies ahead.
"""

from __future__ import annotations

from clearhead.calls import observe
from clearhead.core.arrays import HALF, Array, Library, dtype_name
from clearhead.core.masks import causal
from clearhead.watching.given import Given
from clearhead.watching.places import allowed


def mean_distance(given: Given) -> Array | None:
    """Σ w·|i − j| for each query of a sequence on itself, (…, heads, queries); None where there is nothing.

    A call with as many queries as keys has query i at key i. With fewer queries, as in decoding with a cache, a query
    stands at the last key that it may attend to.
    """
    same = given.queries == given.keys or given.causal
    if not given.keys or not given.queries:
        return None
    library = Library.of(given.q)
    xp = library.xp
    q, k = given.q, given.k
    if dtype_name(q) in HALF:  # a position above 256 has no room in bfloat16
        q, k = xp.astype(q, xp.float32), xp.astype(k, xp.float32)
    along = xp.arange(given.keys, dtype=q.dtype, device=library.device)
    positions = xp.broadcast_to(along[:, None], (*k.shape[:-1], 1))
    # the weights sum to one but for a sink, which stands nowhere: the mean is over the keys
    whole = observe(q, k, positions, mask=given.masked(), **{**given.unmasked, "sinks": None})
    mean = whole.output[..., 0]  # (…, heads, T)
    dead = whole.lse == -xp.inf
    if not same:
        distance = _last(given, library, q.dtype) - mean
    else:
        place = xp.arange(given.queries, dtype=q.dtype, device=library.device)
        distance = place - mean
        if not given.causal:
            back = observe(
                q, k, positions, mask=given.masked(causal(align="start")), **{**given.unmasked, "sinks": None}
            )
            share = xp.exp(xp.where(dead, -xp.inf, back.lse - xp.where(dead, 0.0, whole.lse)))
            # Σ over all of w·(i − j) counts what lies ahead as negative: twice what lies behind puts it right
            distance = 2 * share * (place - back.output[..., 0]) - distance
    return xp.where(dead, xp.nan, distance)


def _last(given: Given, library: Library, dtype: object) -> Array:
    """The last key that each query may attend to, (…, queries)."""
    xp = library.xp
    seen = allowed(given)
    if seen is None:
        first = given.keys - given.queries
        return xp.arange(given.queries, dtype=dtype, device=library.device) + first
    hidden_after = xp.argmax(xp.astype(xp.flip(seen, axis=-1), xp.uint8), axis=-1)
    return xp.astype(given.keys - 1 - hidden_after, dtype)
