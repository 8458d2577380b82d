"""Keys over many machines, and keys that do not fit: exact, under any mask, observed.

place(mask, n, world)                                who holds which positions, so that all have as much to do
shard(x, placement, rank), gather(x, placement)      there and back
attention(q, k, v, mesh=mesh, mask=causal())         over ranks of torch.distributed; observe(…) the same
parallel(mesh)                                       models of clearhead.nn and of Hugging Face, over ranks
plan(q.shape, k.shape, world=8, mask=causal())       pairs, bytes and steps of each way, before anything is sent
stream(q, (on_disk("k.npy"), on_disk("v.npy")))      keys that are never all in memory; stream_observe(…) the same
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clearhead.distributed.disk import on_disk
from clearhead.distributed.entry import attention, observe
from clearhead.distributed.placement import Placement, shard, unshard
from clearhead.distributed.placing import place
from clearhead.distributed.planning import DistributedPlan, plan
from clearhead.distributed.streaming import stream, stream_observe

if TYPE_CHECKING:
    from clearhead.distributed.context import parallel
    from clearhead.distributed.gathering import gather
    from clearhead.distributed.links import DistributedError

__all__ = [
    "DistributedError",
    "DistributedPlan",
    "Placement",
    "attention",
    "gather",
    "observe",
    "on_disk",
    "parallel",
    "place",
    "plan",
    "shard",
    "stream",
    "stream_observe",
    "unshard",
]

# what needs PyTorch, which is imported when it is first asked for
_LATER = {
    "DistributedError": "clearhead.distributed.links",
    "gather": "clearhead.distributed.gathering",
    "parallel": "clearhead.distributed.context",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            return getattr(import_module(_LATER[name]), name)
        raise AttributeError(f"module 'clearhead.distributed' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted(__all__)
