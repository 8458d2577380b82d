"""attention() and observe() over many machines: on ranks of torch.distributed, or under JAX's shard_map."""

from __future__ import annotations

import sys
from typing import Any

from clearhead.core.arrays import Array
from clearhead.core.mask import Mask
from clearhead.core.observations import OBSERVATIONS, Observed
from clearhead.core.positions import Bias
from clearhead.distributed.placement import Placement


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mesh: Any = None,
    placement: Placement | None = None,
    key_placement: Placement | None = None,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: tuple[float, int] | None = None,
    kernel: str | None = None,
    way: str | None = None,
    timeout: float | None = None,
) -> Array:
    """Attention over sequences that are split over ranks; every rank calls it, with its own part of q, k and v.

        softmax(q kᵀ · scale [softcap] [+ bias] [mask]) v    of the whole sequences, the rows that lie here

    - q (…, Hq, T_here, D), k (…, Hk, S_here, D), v (…, Hk, S_here, Dv): plain tensors, or DTensors sharded along the
      sequence axis. Lengths may differ from rank to rank.
    - mesh: a DeviceMesh of one dimension, or a process group; None is all processes. For arrays of JAX, under
      `shard_map`, the name of the axis along which sequences are split; all its devices hold as many positions.
    - placement, key_placement: who holds which positions, from `place`. Without them each rank holds the positions
      after those of the rank before it. `Placement.on_all(T, world)` is for queries that every rank holds.
    - mask, bias, sinks, scale, softcap, dropout mean what they mean in `clearhead.attention` of the whole sequences:
      masks are asked about positions there. They are the same on every rank; arrays are those of the whole call.
    - way: "ring" (keys travel while one works), "gather" (all keys at once), "heads" (each rank gets all positions of
      some heads), "queries" (queries travel, keys stay); None takes what `plan` finds fastest.
    - timeout: seconds after which a rank that does not answer is an error on all others.

    Parts travel and add up in float32 (float64 for float64). Gradients flow into q, k and v; those of sinks and of a
    learned bias are this rank's share, to be added up over ranks as those of any other weight.

    >>> import torch, torch.distributed as dist, clearhead as ch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # here a world of one process
    >>> q, k, v = torch.randn(3, 2, 7, 4)
    >>> output = ch.distributed.attention(q, k, v, mask=ch.causal())
    >>> torch.allclose(output, ch.attention(q, k, v, mask=ch.causal()), atol=1e-6)
    True
    >>> dist.destroy_process_group()
    """
    given = locals()
    if _of_jax(q):
        from clearhead.distributed.in_shard_map import attention_in_ring

        return attention_in_ring(given)
    from clearhead.distributed.calls import attention_over_ranks

    return attention_over_ranks(given)


def observe(
    q: Array,
    k: Array,
    v: Array,
    *,
    mesh: Any = None,
    placement: Placement | None = None,
    key_placement: Placement | None = None,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: tuple[float, int] | None = None,
    kernel: str | None = None,
    way: str | None = None,
    timeout: float | None = None,
    top: int | None = None,
    received: bool | int | Array | None = None,
    received_max: bool | int | None = None,
    removal: bool | int | None = None,
    map: tuple[int, int] | None = None,
    queries: Any = None,
    weights: bool = False,
) -> Observed:
    """`attention` over ranks, and what was attended to, equal to what one machine observes.

    Of the queries that lie here: output, lse, max_score, entropy, top (with the positions of keys in the whole
    sequence) and weights. Of the keys that lie here: received, received_max and removal. On every rank the same: map,
    and queries, which are positions in the whole sequence. Where `received` is a weight for each query, it has those of
    the whole sequence, the same on every rank, as masks and biases have. What keys got, map and weights are found in a
    second look at all keys, the rest in the first. Of DTensors, too, it gives the parts that lie here, as plain
    tensors.

    >>> import torch, torch.distributed as dist, clearhead as ch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # here a world of one process
    >>> q, k, v = torch.randn(3, 2, 7, 4)
    >>> ch.distributed.observe(q, k, v, mask=ch.causal(), received=True, top=2).top.indices.shape
    torch.Size([2, 7, 2])
    >>> dist.destroy_process_group()
    """
    given = locals()
    asked = {name: given[name] for name in OBSERVATIONS}
    if _of_jax(q):
        from clearhead.distributed.in_shard_map import observe_in_ring

        return observe_in_ring(given, asked)
    from clearhead.distributed.calls import observe_over_ranks

    return observe_over_ranks(given, asked)


def _of_jax(q: Any) -> bool:
    """True for an array of JAX, traced or not."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(q, jax.Array)
