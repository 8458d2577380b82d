"""parallel(): inside of it, models that attend by clearhead do so over the ranks of a mesh, with their masks kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from clearhead.core.errors import ArgumentError
from clearhead.distributed.current import Ranks, begin
from clearhead.distributed.links import Links, group_of
from clearhead.distributed.placement import Placement


@contextmanager
def parallel(mesh: Any = None, placement: Placement | None = None, *, timeout: float | None = None) -> Iterator[Links]:
    """Attention of the layers of `clearhead.nn`, and of Hugging Face models on "clearhead", over the ranks of a mesh.

    Without a placement every rank runs the model on the same whole input, and each attends for a part of the queries
    (for a part of the keys where there are fewer queries than ranks, as in generating), balanced by the pairs that the
    model's own mask allows. Of the cache that a Hugging Face model makes for itself here every rank keeps a part.

    With a placement every rank runs the model on its part of the sequences, `shard(tokens, placement, rank, axis=1)`,
    and positions, masks and gradients are those of the whole ones; layers of `clearhead.nn` take that. A part of a loss
    belongs to each rank then, and gradients of weights are to be added up over ranks.

    >>> import torch, torch.distributed as dist, clearhead as ch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # here a world of one process
    >>> attend = ch.nn.MultiHeadAttention(16, 2, causal=True)
    >>> with ch.distributed.parallel(), torch.no_grad():
    ...     output = attend(torch.randn(1, 7, 16))
    >>> output.shape
    torch.Size([1, 7, 16])
    >>> dist.destroy_process_group()
    """
    group = group_of(mesh)
    links = Links(group, timeout)
    if placement is not None and placement.world != links.world:
        raise ArgumentError("placement", f"is for {placement.world} ranks, and the mesh has {links.world}")
    before = begin(Ranks(group, placement, timeout))
    try:
        yield links
    finally:
        begin(before)
