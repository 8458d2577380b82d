"""What a cache means to a layer: the keys that new queries see, where the queries stand, what it wants to be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from clearhead.core.errors import ArgumentError
from clearhead.distributed.current import current
from clearhead.nn.cache import KVCache
from clearhead.nn.places import Held


def held_by(
    cache: KVCache | None,
    k: Tensor,
    v: Tensor,
    lengths: Any,
    mask: Any,
    looks_back: bool,
    tells: bool = False,
    splits: bool = False,
) -> Held:
    """The keys and values that new queries see: those given, after those of a cache if there is one.

    `tells` where the cache will be told what was attended to, `splits` where the module attends to keys that lie on
    several ranks.
    """
    if cache is None:
        return Held(k, v, [0])
    if cache.keep is not None and not tells:
        raise ArgumentError("cache", f"has keep={cache.keep!r}, by what was attended to: MultiHeadAttention says so")
    if cache.keep is not None and mask is not None:
        raise ArgumentError("mask", "is given together with a cache that keeps some of the keys")
    if cache.mesh is not None and not splits:
        raise ArgumentError(
            "cache", "is split over ranks, which MultiHeadAttention takes without a method, and no other"
        )
    ranks = current()
    if ranks is not None and ranks.placement is not None:
        raise ArgumentError(
            "cache", "is given where sequences are split over ranks: parallel(mesh) without a placement takes it"
        )
    if not looks_back:
        raise ArgumentError("cache", "is given to attention that is not causal self-attention")
    if mask is not None and cache.window is not None:
        raise ArgumentError("mask", "is given together with a ring, whose keys do not lie in order")
    held = cache.append(k, v, lengths)
    if mask is None or held.positions is not None or held.split is not None:
        return held
    # a mask speaks of the tokens so far, and not of the room that a compiled step is handed beyond them
    seen = max(held.start) + k.shape[2]
    return Held(held.k[:, :, :seen], held.v[:, :, :seen], held.start)


def begun(cache: KVCache | None) -> list[int]:
    """The positions at which the next queries of each row stand."""
    return cache.seen if cache is not None and cache.seen else [0]


def with_policy(cache: KVCache, wanted: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What a call observes: what its caller wants, and what the policy of the cache that it was added to does."""
    asked = {} if cache.kept is None else cache.kept.asked()
    for name, value in asked.items():
        other = None if wanted is None else wanted.get(name)
        if other is not None and (isinstance(value, Tensor) or isinstance(other, Tensor) or other != value):
            raise ArgumentError(
                "observe",
                f"has {name}={other!r}, and the cache's policy needs {name}={value!r} of the same call",
            )
    return {**(wanted or {}), **asked} if asked else wanted
