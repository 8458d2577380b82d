"""Who shares the work of attention now: what `parallel` says, and layers ask before they attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearhead.core.errors import ArgumentError
from clearhead.distributed.placement import Placement
from clearhead.torch_bridge.autograd import hand_over, overridden

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """What `parallel` says: the process group, who holds which positions of split sequences, how long to wait."""

    group: Any
    placement: Placement | None
    timeout: float | None

    def places(self, queries: int, like: Tensor) -> Tensor | None:
        """The positions of the tokens here, where sequences are split."""
        if self.placement is None:
            return None
        import torch

        rank = torch.distributed.get_rank(self.group)
        own = self.placement.positions(rank)
        if len(own) != queries:
            raise ArgumentError(
                "x", f"has {queries} positions, expected the {len(own)} that the placement gives rank {rank}"
            )
        return torch.as_tensor(own, device=like.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention over the ranks: of parts where sequences are split, else of whole tensors that all ranks have."""
        # not before they are needed: PyTorch may be built without its distributed part
        from clearhead.distributed.entry import attention
        from clearhead.distributed.shared import shared_attention

        how: dict[str, Any] = {"mesh": self.group, "timeout": self.timeout, **options}
        if self.placement is not None:
            how |= {"placement": self.placement, "key_placement": self.placement}
        return in_sight(shared_attention if self.placement is None else attention, q, k, v, **how)


def in_sight(attend: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """A call over ranks, made known as `attention` makes itself known: a watch sees it, or says that it was missed."""
    import torch

    others = tuple(options.get(name) for name in ("mask", "bias", "sinks"))
    if not torch.compiler.is_compiling() and overridden(q, k, v, *others):
        found: Tensor = hand_over(attend, (q, k, v), others, **options)
        return found
    output: Tensor = attend(q, k, v, **options)
    return output


# of this process; plain, so that what PyTorch compiles may look at it
_now: Ranks | None = None


def current() -> Ranks | None:
    """Who shares the work of attention now; None where nobody does."""
    return _now


def begin(ranks: Ranks | None) -> Ranks | None:
    """From now on these; who it was before comes back."""
    global _now
    before, _now = _now, ranks
    return before
