"""What `test_distributed.py` lets several processes do together: each function is one rank's part."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from budget import within

import clearhead as ch
import clearhead.distributed as chd
from clearhead.distributed.calls import last
from clearhead.distributed.links import DistributedError
from clearhead.distributed.pieces import Work

SIZES = (2, 4, 37, 16)


def numbers(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 3) -> list[torch.Tensor]:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def faults(rank: int, world: int) -> None:
    """One clear error on every rank, each time in a group of its own; afterwards a call goes well."""
    q, k, v = numbers(*[SIZES] * 3)
    placement = chd.Placement.contiguous(SIZES[-2], world)
    parts = [chd.shard(a, placement, rank) for a in (q, k, v)]
    odd = rank == 1

    def call(**options: Any) -> torch.Tensor:
        return chd.attention(*options.pop("parts", parts), mesh=dist.new_group(), timeout=20, **options)

    with pytest.raises(DistributedError, match="mask: is not the same on every rank: rank 1 has another"):
        call(mask=ch.window(3) if odd else ch.causal())
    with pytest.raises(DistributedError, match="dtype: is not the same on every rank: rank 1 has"):
        call(parts=[a.double() for a in parts] if odd else parts)
    with pytest.raises(DistributedError, match="dropout: is not the same"):
        call(dropout=(0.5, rank))
    with pytest.raises(DistributedError, match="gradients: is not the same"):
        call(parts=[a.clone().requires_grad_(odd) for a in parts])
    own = chd.Placement.zigzag(37, world) if odd else placement
    with pytest.raises(DistributedError, match="placement: is not the same"):
        call(parts=[chd.shard(a, own, rank) for a in (q, k, v)], placement=own)
    wrong = ch.ArgumentError if odd else DistributedError
    with pytest.raises(wrong, match="softcap: is -1" if odd else "rank 1 refused its arguments"):
        call(softcap=-1.0 if odd else 1.0)
    with pytest.raises(ch.ArgumentError, match=f"placement: is for {world + 1} ranks, and the mesh has {world}"):
        call(placement=chd.Placement.contiguous(37, world + 1))
    with pytest.raises(ch.ArgumentError, match="documents: has keys ids of shape"):
        call(mask=ch.documents([0, 1]))
    with pytest.raises(ch.ArgumentError, match="way: is 'fastest'"):
        call(way="fastest")
    with pytest.raises(ch.ArgumentError, match="timeout: is -1, expected a number of seconds above 0"):
        chd.attention(*parts, timeout=-1)
    asked = torch.arange(1200) % 37  # more than what is shown of an array
    asked[600] = rank == 1
    with pytest.raises(DistributedError, match="observations: is not the same on every rank: rank 1 has"):
        chd.observe(*parts, mesh=dist.new_group(), timeout=20, queries=asked)
    with pytest.raises(DistributedError, match="observations: is not the same on every rank: rank 1 has"):
        chd.observe(*parts, mesh=dist.new_group(), timeout=20, received=torch.arange(37) * (1 + odd))
    with pytest.raises(ch.ArgumentError, match=r"received: has shape \(3,\), expected a weight for each query"):
        chd.observe(*parts, mesh=dist.new_group(), timeout=20, received=torch.ones(3))
    with pytest.raises(ch.ArgumentError, match="removal: is asked for together with dropout"):
        chd.observe(*parts, mesh=dist.new_group(), timeout=20, removal=True, dropout=(0.5, 1))
    # what differs in size would end a process, if it were sent
    with pytest.raises(DistributedError, match="dtype: is not the same on every rank: rank 1 has"):
        chd.gather(parts[0].double() if odd else parts[0], placement, dist.new_group(), timeout=20)
    with pytest.raises(wrong, match="tensor: has 3 positions" if odd else "rank 1 refused its arguments"):
        chd.gather(parts[0][..., :3, :] if odd else parts[0], placement, dist.new_group(), timeout=20)
    group = dist.new_group()
    with pytest.raises(DistributedError, match="call: is not the same on every rank: rank 1 has"):
        chd.gather(parts[0], placement, group, timeout=20) if odd else chd.attention(*parts, mesh=group, timeout=20)
    whole = chd.gather(call(mask=ch.causal()), placement)
    within(
        whole,
        ch.attention(q.double(), k.double(), v.double(), mask=ch.causal()),
        ch.attention(q, k, v, mask=ch.causal()),
        37,
    )


class Nearby(ch.Mask):
    """A mask that a program defines for itself, by a function that lies elsewhere in every process."""

    def __init__(self, far: int) -> None:
        self.sees = lambda i, j: abs(i - j) <= far

    def tile(self, rows: range, columns: range, grid: Any) -> Any:
        i, j = (np.arange(some.start, some.stop) for some in (rows, columns))
        return self.sees(i[:, None], j)


def own_masks(rank: int, world: int) -> None:
    """Masks of a program's own, too, are the same on every rank, or said not to be."""
    q, k, v = numbers(*[SIZES] * 3)
    placement = chd.Placement.zigzag(SIZES[-2], world)
    parts = [chd.shard(a, placement, rank) for a in (q, k, v)]
    given: dict[str, Any] = {"placement": placement, "timeout": 20}
    found = chd.gather(chd.attention(*parts, mask=Nearby(5), **given), placement)
    torch.testing.assert_close(found, ch.attention(q, k, v, mask=Nearby(5)))
    with pytest.raises(DistributedError, match="mask: is not the same on every rank: rank 1 has another"):
        chd.attention(*parts, mask=Nearby(4 if rank == 1 else 5), **given, mesh=dist.new_group())


def never_arrives(rank: int, world: int) -> None:
    """A rank that does not come: the others say so after the time that they wait, and the group is not used again."""
    parts = numbers(*[SIZES] * 3)
    group = dist.new_group()
    if rank == 1:
        time.sleep(4)
        return
    began = time.monotonic()
    with pytest.raises(DistributedError, match=r"not every rank made this call within 1\.5 s"):
        chd.attention(*parts, mesh=group, timeout=1.5)
    assert time.monotonic() - began < 4
    with pytest.raises(DistributedError, match="cannot be used any more"):
        chd.attention(*parts, mesh=group, timeout=1.5)


def dies(rank: int, world: int) -> None:
    """A rank that dies in the middle of a call, after all have agreed: an error on every other one, in time."""
    parts = numbers(*[SIZES] * 3)
    if rank == world - 1:
        Work.attend = lambda *_: os._exit(0)  # type: ignore[method-assign]  # as one that dies
    began = time.monotonic()

    def some() -> None:
        for _ in range(3):  # the first may have had all that it needed already
            chd.attention(*parts, mesh=None, way="ring", timeout=3)

    with pytest.raises(DistributedError, match=r"lost another rank|within 3 s"):
        some()
    assert time.monotonic() - began < 12
    os._exit(0)  # a group that lost one cannot be left in good order


def decoding(rank: int, world: int) -> None:
    """Queries that every rank holds over keys that are split: the same bits on every rank, observed as on one."""
    q, k, v = numbers((2, 4, 1, 16), (2, 2, 41, 16), (2, 2, 41, 16))
    keys = chd.Placement.striped(41, world, block=3)
    options: dict[str, Any] = {"mask": ch.lengths([41, 17]), "sinks": torch.tensor([0.1, -0.5, 2.0, 0.0])}
    want: dict[str, Any] = {"top": 4, "received": True, "map": (1, 5), "queries": [0], "weights": True}
    want |= {"received_max": True, "removal": True}
    own = [chd.shard(a, keys, rank) for a in (k, v)]
    given = {"placement": chd.Placement.on_all(1, world), "key_placement": keys, "timeout": 20, **options}
    seen = chd.observe(q, *own, **given, **want)
    whole = ch.observe(q, k, v, **options, **want)
    for name in ("output", "lse", "max_score", "entropy", "weights"):
        torch.testing.assert_close(getattr(seen, name), getattr(whole, name))
    torch.testing.assert_close(seen.top.weights, whole.top.weights)
    assert torch.equal(seen.top.indices, whole.top.indices)
    for name in ("received", "received_max", "removal"):
        torch.testing.assert_close(getattr(seen, name), chd.shard(getattr(whole, name), keys, rank, axis=-1))
    torch.testing.assert_close(seen.map.mean, whole.map.mean)
    torch.testing.assert_close(seen.map.max, whole.map.max)
    torch.testing.assert_close(seen.queries.weights, whole.queries.weights)
    assert all(torch.equal(one, seen.output) for one in everyone(seen.output, world))
    learned = [a.clone().requires_grad_() for a in (q, *own)]
    chd.attention(*learned, **given).square().sum().backward()
    plain = [a.clone().requires_grad_() for a in (q, k, v)]
    ch.attention(*plain, **options).square().sum().backward()
    torch.testing.assert_close(learned[0].grad, plain[0].grad)
    for mine, all_of_it in zip(learned[1:], plain[1:], strict=True):
        torch.testing.assert_close(mine.grad, chd.shard(all_of_it.grad, keys, rank))


def lone_keys(rank: int, world: int) -> None:
    """Ranks without queries, without keys, and with one: what is sent of one column lies apart in memory."""
    q, k, v = numbers((2, 4, 23, 8), (2, 1, 31, 8), (2, 1, 31, 8))
    queries = chd.Placement.of_lengths([11, 0, 12, *[0] * (world - 3)])
    keys = chd.Placement.of_lengths([0, 1, *[0] * (world - 3), 30])
    own = chd.shard(q, queries, rank), chd.shard(k, keys, rank), chd.shard(v, keys, rank)
    options: dict[str, Any] = {"mask": ch.window(9, 9) | ch.global_tokens([0]), "softcap": 3.0}
    asked: dict[str, Any] = {"received": torch.arange(23) % 5 - 1.0, "received_max": 9, "removal": True}
    whole = ch.observe(q, k, v, **options, **asked, weights=True)
    for way in ("ring", "gather", "heads"):
        where: dict[str, Any] = {"placement": queries, "key_placement": keys, "way": way, "timeout": 20}
        seen = chd.observe(*own, **where, **options, **asked, weights=True)
        torch.testing.assert_close(seen.output, chd.shard(whole.output, queries, rank))
        torch.testing.assert_close(seen.weights, chd.shard(whole.weights, queries, rank))
        for name in asked:
            torch.testing.assert_close(getattr(seen, name), chd.shard(getattr(whole, name), keys, rank, axis=-1))


def everyone(tensor: torch.Tensor, world: int) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(found, tensor.contiguous())
    return found


def parameters(rank: int, world: int) -> None:
    """Gradients of sinks and of learned biases: the shares of all ranks add up to one machine's."""
    n = 29
    q, k, v, dout = numbers((2, 4, n, 8), (2, 2, n, 8), (2, 2, n, 8), (2, 4, n, 8), dtype=torch.float64)
    (sinks,), (table, array) = numbers((4,), dtype=torch.float64), numbers((32, 4), (4, n, n), dtype=torch.float64)
    placement = chd.Placement.zigzag(n, world)
    for way in ("ring", "gather", "queries", "heads") if world in (2, 4) else ("ring",):
        for make in (lambda a: ch.relative_bias(a[0], max_distance=20), lambda a: a[1]):
            learned = [a.clone().requires_grad_() for a in (table, array, sinks)]
            plain = [a.clone().requires_grad_() for a in (table, array, sinks)]
            own = [chd.shard(a, placement, rank) for a in (q, k, v)]
            options: dict[str, Any] = {"mask": ch.causal(), "softcap": 3.0}
            output = chd.attention(
                *own, placement=placement, bias=make(learned), sinks=learned[2], way=way, timeout=20, **options
            )
            output.backward(chd.shard(dout, placement, rank))
            ch.attention(q, k, v, bias=make(plain), sinks=plain[2], **options).backward(dout)
            for mine, whole in zip(learned, plain, strict=True):
                if whole.grad is None:
                    assert mine.grad is None
                    continue
                dist.all_reduce(mine.grad)
                torch.testing.assert_close(mine.grad, whole.grad, msg=lambda m, way=way: f"{way}: {m}")


def bits_and_bytes(rank: int, world: int) -> None:
    """Dropout drops what one machine drops; and every rank sends what the plan says, to the byte."""
    n, dtype = 67, torch.float32
    q, k, v = numbers((1, 4, n, 8), (1, 4, n, 8), (1, 4, n, 12), dtype=dtype)
    placement = chd.place(ch.causal(), n, world, "zigzag")
    own = [chd.shard(a, placement, rank).requires_grad_() for a in (q, k, v)]
    ways = [way for way in ("ring", "gather", "queries", "heads") if way != "heads" or 4 % world == 0]
    for way in ways:
        eye = torch.eye(n)[:, :n].expand(1, 4, n, n)
        dropped = chd.attention(own[0].detach(), own[1].detach(), chd.shard(eye, placement, rank), placement=placement,
                                mask=ch.causal(), dropout=(0.4, 9), way=way, timeout=20)  # fmt: skip
        whole = ch.attention(q, k, eye, mask=ch.causal(), dropout=(0.4, 9))
        assert torch.equal(chd.gather(dropped, placement) == 0, whole == 0)
        output = chd.attention(*own, placement=placement, mask=ch.causal(), way=way, timeout=20)
        plan = chd.plan(q.shape, k.shape, v.shape, world=world, mask=ch.causal(), placement=placement, way=way)
        assert last["sent"] == plan.chosen.sent[rank], (way, last["sent"], plan.chosen.sent)
        links = last["links"]
        output.sum().backward()
        assert links.sent - last["sent"] == plan.chosen.sent_backward[rank], (
            way,
            links.sent - last["sent"],
            plan.chosen,
        )
        if way in ("ring", "gather"):  # a second look takes the keys once more, and tells each owner what its keys got
            asked = dict.fromkeys(("received", "received_max", "removal"), True)
            given = [a.detach() for a in own]
            chd.observe(*given, placement=placement, mask=ch.causal(), way=way, timeout=20, **asked)
            told = (n - placement.lengths[rank]) * 4 * len(asked) * 4
            assert last["sent"] == 2 * plan.chosen.sent[rank] + told, (way, last["sent"], plan.chosen.sent, told)


def windows(rank: int, world: int) -> None:
    """What nobody sees is neither sent nor computed: of a window only the neighbour's last keys."""
    n = 1024 * world
    q, k, v = numbers((1, 2, 1024, 8), (1, 2, 1024, 8), (1, 2, 1024, 8), seed=rank)
    calls = []
    attend = Work.attend

    def counted(self: Work, columns: Any, *rest: Any) -> Any:
        calls.append(columns)
        return attend(self, columns, *rest)

    Work.attend = counted  # type: ignore[method-assign]  # to count the calls
    output = chd.attention(q, k, v, mask=ch.window(100), way="ring", timeout=20)
    Work.attend = attend  # type: ignore[method-assign]  # as it was
    assert last["sent"] == (128 * 2 * 16 * 4 if rank + 1 < world else 0)
    assert sum(map(len, calls)) == 1024 + (128 if rank else 0)
    whole = [chd.gather(a, chd.Placement.contiguous(n, world)) for a in (q, k, v, output)]
    torch.testing.assert_close(whole[3], ch.attention(*whole[:3], mask=ch.window(100)))


def sharded(rank: int, world: int) -> None:
    """DTensors in, a DTensor out, over one dimension of a mesh that has two; its gradient, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "context"))
    q, k, v = numbers(*[(2, 4, 37, 8)] * 3)
    given = [distribute_tensor(a, mesh, [Shard(0), Shard(2)]).requires_grad_() for a in (q, k, v)]
    output = chd.attention(*given, mask=ch.causal() & ch.window(9), timeout=20)
    assert isinstance(output, DTensor)
    assert output.placements == given[0].placements
    plain = [a.clone().requires_grad_() for a in (q, k, v)]
    expected = ch.attention(*plain, mask=ch.causal() & ch.window(9))
    torch.testing.assert_close(output.full_tensor(), expected)
    output.sum().backward()
    expected.sum().backward()
    for mine, whole in zip(given, plain, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)


def errors_by_ranks(rank: int, world: int, into: str) -> None:
    """How far bfloat16 and float32 are from exact: written down by rank 0."""
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = numbers(*[(1, 4, 512, 32)] * 3, dtype=dtype)
        placement = chd.place(ch.causal(), 512, world)
        own = [chd.shard(a, placement, rank) for a in (q, k, v)]
        found = chd.gather(
            chd.attention(*own, placement=placement, mask=ch.causal(), way="ring", timeout=60), placement
        )
        exact = ch.attention(q.double(), k.double(), v.double(), mask=ch.causal())
        if rank == 0:
            with open(into, "a") as file:
                print(world, dtype, float((found.double() - exact).abs().max()), file=file)
