"""Messages between ranks over a process group of PyTorch: within a time limit, counted, and one clear error if not.

Only messages from one rank to another are used, so that nothing is sent that nobody needs, and all that a rank waits
for is known before. They carry the number of the call, so that what one call left behind is never read by another.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clearhead.core.errors import ArgumentError, first_line, shown

# seconds that a rank waits for another
PATIENCE = 600.0


class DistributedError(RuntimeError):
    """Ranks that do not agree, or one that did not answer: nothing was computed, or what was is not given.

    >>> import clearhead as ch
    >>> issubclass(ch.distributed.DistributedError, RuntimeError)
    True
    """


class State:
    """What is remembered of a process group: how many calls it had, and why it is not to be used any more."""

    def __init__(self) -> None:
        self.calls, self.broken = 0, ""


_states: weakref.WeakKeyDictionary[Any, State] = weakref.WeakKeyDictionary()


def group_of(mesh: Any) -> Any:
    """The process group of a mesh, which has one dimension; a group as it is; None is that of all processes."""
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError("mesh", "cannot be used: torch.distributed.init_process_group was not called")
    if mesh is None:
        return dist.group.WORLD
    if hasattr(mesh, "get_group") and hasattr(mesh, "mesh"):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            example = f'mesh["{names[-1]}"]' if names else "one of its dimensions"
            raise ArgumentError(
                "mesh", f"has {mesh.ndim} dimensions, expected one, along which sequences are split: {example}"
            )
        return mesh.get_group()
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    raise ArgumentError("mesh", f"is {shown(mesh)}, expected a DeviceMesh or a process group of torch.distributed")


class Links:
    """One call's way to the other ranks."""

    def __init__(self, group: Any, timeout: float | None = None) -> None:
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        # a year is more than anybody waits, and less than what a back end can count
        if timeout is not None and not (number and 0 < timeout < 3.2e7):
            raise ArgumentError("timeout", f"is {shown(timeout)}, expected a number of seconds above 0, or None")
        self.group, self.timeout = group, PATIENCE if timeout is None else float(timeout)
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ArgumentError("mesh", "does not hold this process, which therefore has no part in the call")
        self.state = _states.setdefault(group, State())
        if self.state.broken:
            raise DistributedError(f"this process group cannot be used any more: {self.state.broken}")
        self.backend = dist.get_backend(group)
        self.number = self.state.calls * (8 * self.world + 32)  # more than a call has messages to one rank
        self.state.calls += 1
        self.sent = self.received = 0  # bytes
        self.steps = 0

    @property
    def through_host(self) -> bool:
        """True where tensors of an accelerator travel by way of the host's memory."""
        return self.backend == "gloo"

    def table(self, own: Tensor) -> Tensor:
        """The same few whole numbers of every rank, (world, n)."""
        device = "cpu" if self.through_host else torch.device("cuda", torch.cuda.current_device())
        mine = own.to(device)
        found = [torch.empty_like(mine) for _ in range(self.world)]

        def ask() -> None:
            work = dist.all_gather(found, mine, group=self.group, async_op=True)
            self.wait(work, "not every rank made this call")

        self.guarded(ask)
        return torch.stack(found).cpu()

    def guarded(self, run: Callable[[], Any]) -> Any:
        """What is done over the group; after a failure nobody uses it again."""
        try:
            return run()
        except DistributedError as error:
            self.state.broken = str(error)
            raise
        except (RuntimeError, ValueError) as error:  # what a back end raises where a peer is gone
            words = f"rank {self.rank} lost another rank during attention over {self.world} ranks: {first_line(error)}"
            self.state.broken = words
            raise DistributedError(words) from error

    def wait(self, work: Any, otherwise: str) -> None:
        """Until a message is there, or for as long as one waits."""
        start = time.monotonic()
        try:
            work.wait(timedelta(seconds=self.timeout))
        except (RuntimeError, ValueError) as error:
            if time.monotonic() - start >= 0.95 * self.timeout or "imed out" in str(error):
                raise DistributedError(
                    f"{otherwise} within {self.timeout:g} s: rank {self.rank} waited for it"
                ) from error
            raise

    def start(
        self, sends: dict[int, Tensor], expects: dict[int, tuple[int, torch.dtype]], number: int, like: Tensor
    ) -> Flight:
        """Messages to some ranks and from some, under way at once; each a flat tensor of so many numbers."""
        self.steps += 1
        device = torch.device("cpu") if self.through_host else like.device
        works: list[tuple[Any, str]] = []
        buffers = {}
        tag = self.number + number

        def post() -> None:
            jobs: list[tuple[Any, Tensor, int, str]] = []
            for peer, (count, dtype) in expects.items():
                buffers[peer] = torch.empty(count, dtype=dtype, device=device)
                if not count:  # nothing is no message
                    continue
                jobs.append((dist.irecv, buffers[peer], peer, f"nothing came from rank {peer}"))
                self.received += buffers[peer].nbytes
            for peer, tensor in sends.items():
                tensor = tensor.to(device).contiguous()  # one column of several reads as flat, and lies apart
                if not tensor.numel():
                    continue
                jobs.append((dist.isend, tensor, peer, f"rank {peer} did not take what was sent to it"))
                self.sent += tensor.nbytes
            if self.backend == "nccl":
                ops = [dist.P2POp(way, tensor, self.global_rank(peer), self.group) for way, tensor, peer, _ in jobs]
                works.extend((work, "a rank did not answer") for work in (dist.batch_isend_irecv(ops) if ops else ()))
                kept.extend(tensor for _, tensor, _, _ in jobs)
                return
            for way, tensor, peer, words in jobs:
                works.append((way(tensor, self.global_rank(peer), group=self.group, tag=tag), words))
                kept.append(tensor)

        kept: list[Tensor] = []
        self.guarded(post)
        return Flight(self, works, buffers, kept, like.device)

    def global_rank(self, peer: int) -> int:
        """A rank of the group, as the back end numbers it."""
        return dist.get_global_rank(self.group, peer)


class Flight:
    """Messages under way."""

    def __init__(
        self, links: Links, works: list[tuple[Any, str]], buffers: dict[int, Tensor], kept: list[Tensor], device: Any
    ) -> None:
        self.links, self.works, self.buffers, self.kept, self.device = links, works, buffers, kept, device

    def landed(self) -> dict[int, Tensor]:
        """What came, by the rank that sent it."""

        def land() -> None:
            for work, otherwise in self.works:
                self.links.wait(work, otherwise)

        self.links.guarded(land)
        self.kept = []
        return {peer: buffer.to(self.device) for peer, buffer in self.buffers.items()}
