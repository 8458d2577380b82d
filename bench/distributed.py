"""Attention over ranks and out of core, measured: balance, bytes against the plan, error by ranks, time, disk.

    python bench/distributed.py [--only balance bytes errors time disk cost] [--n 8192] [--gigabytes 8] [--json FILE]

Ranks are gloo processes on this machine, each with one thread. Times are the least of several in turn, one rank and two
ranks one after the other, so that what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import ranks

import clearhead as ch
import clearhead.distributed as chd
from clearhead.distributed.calls import last

RNG = np.random.default_rng(0)


# attention of four queries over two files: seconds, and the most memory of the process in MB
BY_STREAM = """
import re, sys, time
import numpy as np, clearhead as ch
files = tuple(ch.distributed.on_disk(path) for path in sys.argv[1:])
heads, _, width = files[0].shape
q = np.random.default_rng(0).standard_normal((heads, 4, width)).astype(np.float32)
began = time.perf_counter()
ch.distributed.stream(q, files, mask=ch.causal())
spent = time.perf_counter() - began
# not ru_maxrss, which a process takes over from the one that started it
most = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())
print(spent, int(most[1]) * 1024 / 1e6)
"""


def masks(n: int) -> dict[str, Any]:
    ids = np.repeat(np.arange(n), RNG.integers(1, n // 8, n))[:n]
    return {
        "none": None,
        "causal": ch.causal(),
        "window(256)": ch.window(256),
        "documents": ch.documents(ids),
        "documents & causal": ch.documents(ids) & ch.causal(),
        "Longformer": ch.window(256, 256) | ch.global_tokens(range(8)),
        "prefix | causal": ch.prefix(n // 8) | ch.causal(),
    }


def balance(n: int) -> list[dict[str, Any]]:
    """Imbalance of pairs, contiguous and as `place` chooses, by mask and ranks."""
    found = []
    for name, mask in masks(n).items():
        for world in (2, 8, 16):
            chosen, plain = chd.place(mask, n, world), chd.place(mask, n, world, "contiguous")
            found.append(
                {
                    "mask": name,
                    "ranks": world,
                    "how": chosen.how,
                    "imbalance": chosen.imbalance,
                    "contiguous": plain.imbalance,
                }
            )
    return found


def count(rank: int, world: int, n: int, into: str) -> None:
    """Bytes that each rank sent, beside what the plan says."""
    rows = []
    for name, mask in masks(n).items():
        placement = chd.place(mask, n, world)
        q, k, v = torch.randn(3, 1, 4, placement.lengths[rank], 32)
        for way in ("ring", "gather", "queries", "heads"):
            chd.attention(q, k, v, placement=placement, mask=mask, way=way, timeout=120)
            plan = chd.plan((1, 4, n, 32), (1, 4, n, 32), world=world, mask=mask, placement=placement, way=way)
            sent = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
            dist.all_gather(sent, torch.tensor([last["sent"]]))
            counted = [int(one) for one in sent]
            rows.append(
                {"mask": name, "ranks": world, "way": way, "counted": counted, "planned": list(plan.chosen.sent)}
            )
    if rank == 0:
        Path(into).write_text(json.dumps(rows))


def error(rank: int, world: int, n: int, into: str) -> None:
    """The largest distance to float64, forward and in gradients."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(1)
        q, k, v, dout = (torch.randn(1, 4, n, 64, generator=generator).to(dtype) for _ in range(4))
        placement = chd.place(ch.causal(), n, world)
        own = [chd.shard(a, placement, rank).requires_grad_() for a in (q, k, v)]
        output = chd.attention(*own, placement=placement, mask=ch.causal(), way="ring", timeout=120)
        output.backward(chd.shard(dout, placement, rank))
        found = [chd.gather(a, placement) for a in (output, *(a.grad for a in own))]
        if rank == 0:
            whole = [a.double().requires_grad_() for a in (q, k, v)]
            exact = ch.attention(*whole, mask=ch.causal())
            exact.backward(dout.double())
            wanted = [exact.detach(), *(a.grad for a in whole)]
            far = [float((a.double() - b).abs().max()) for a, b in zip(found, wanted, strict=True)]
            rows.append(
                {"ranks": world, "dtype": str(dtype), **dict(zip(("output", "dq", "dk", "dv"), far, strict=True))}
            )
    if rank == 0:
        Path(into).write_text(json.dumps(rows))


def clock(rank: int, world: int, n: int, rounds: int, into: str) -> None:
    """Seconds of one causal call over all ranks, and of the processor, of the slowest of them, several times."""
    placement = chd.place(ch.causal(), n, world)
    q, k, v = torch.randn(3, 1, 8, placement.lengths[rank], 64)
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        chd.attention(q, k, v, placement=placement, mask=ch.causal(), way="ring", timeout=300)
        spent = torch.tensor([time.perf_counter() - began, time.process_time() - busy], dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        times.append(spent.tolist())
    if rank == 0:
        Path(into).write_text(json.dumps(times[1:]))


def theirs(rank: int, world: int, n: int, into: str) -> None:
    """PyTorch's own context parallel on gloo: what it says to each call."""
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh, said = init_device_mesh("cpu", (world,)), {}
    for name, options in {"no mask": {}, "causal": {"is_causal": True}, "no mask, gradients": {"learn": True}}.items():
        q, k, v = torch.randn(3, 1, 8, n, 64).unbind(0)
        learn = options.pop("learn", False)
        try:
            with (
                sdpa_kernel([SDPBackend.FLASH_ATTENTION]),
                context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3),
            ):
                tensors = [a.detach().requires_grad_(learn) for a in (q, k, v)]
                began = time.perf_counter()
                output = F.scaled_dot_product_attention(*tensors, **options)
                if learn:
                    output.sum().backward()
                said[name] = f"{time.perf_counter() - began:.3f} s"
        except Exception as refusal:
            said[name] = f"{type(refusal).__name__}: {str(refusal).splitlines()[0][:90]}"
    if rank == 0:
        Path(into).write_text(json.dumps(said))


def over(world: int, work: Any, *arguments: Any) -> Any:
    """What rank 0 wrote down."""
    with tempfile.TemporaryDirectory() as folder:
        into = f"{folder}/out.json"
        ranks.together(world, work, *arguments, into)
        return json.loads(Path(into).read_text())


def disk(gigabytes: float, folder: str) -> dict[str, Any]:
    """Keys and values from disk: bytes a second beside plain reading of the same files, and the most memory.

    Each in turn, three times, the best of each; streaming in a process of its own, whose memory is looked at. Plain is
    the faster of reading as any program does, and past the system's cache: what the disk can give.
    """
    heads, width = 8, 128
    n = int(gigabytes * 2**30 / (2 * heads * width * 4))
    paths = [Path(folder) / f"clearhead-bench-{name}.npy" for name in "kv"]
    noise = np.random.default_rng(1).standard_normal((4096, width)).astype(np.float32).tobytes()
    try:
        for path in paths:
            with path.open("wb") as file:
                header = {"descr": "<f4", "fortran_order": False, "shape": (heads, n, width)}
                np.lib.format.write_array_header_1_0(file, header)
                left = heads * n * width * 4
                while left:
                    left -= file.write(noise[: min(left, len(noise))])
        os.sync()
        size = sum(path.stat().st_size for path in paths)
        plain, past, streamed, memory = 0.0, 0.0, 0.0, 0.0
        for _ in range(3):
            plain = max(plain, size / read_plainly(paths))
            past = max(past, size / read_plainly(paths, getattr(os, "O_DIRECT", 0)))
            forget(paths)
            done = subprocess.run(
                [sys.executable, "-c", BY_STREAM, *map(str, paths)], capture_output=True, text=True, check=True
            )
            seconds, memory = map(float, done.stdout.split())
            streamed = max(streamed, size / seconds)
        return {
            "gigabytes": size / 2**30, "plain GB/s": plain / 1e9, "past the cache GB/s": past / 1e9,
            "streamed GB/s": streamed / 1e9, "share": streamed / max(plain, past), "most memory MB": memory,
        }  # fmt: skip
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def read_plainly(paths: list[Path], flags: int = 0) -> float:
    """Seconds that reading the files takes, into 32 MiB of memory."""
    forget(paths)
    # mapped, so that it begins at a page, as reading past the cache demands
    began, room = time.perf_counter(), mmap.mmap(-1, 32 * 2**20)
    for path in paths:
        file = os.open(path, os.O_RDONLY | flags)
        at = 0
        while count := os.preadv(file, [room], at):
            at += count
            if count % 4096:  # the end
                break
        os.close(file)
    return time.perf_counter() - began


def forget(paths: list[Path]) -> None:
    """What the system keeps of some files, so that they are read from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["balance", "bytes", "errors", "time", "disk", "cost"])
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--json")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    if "disk" in given.only:  # first: what other measurements need stays in memory
        found["disk"] = disk(given.gigabytes, given.folder)
        print("\n".join(f"{name:<22}{value:,.2f}" for name, value in found["disk"].items()))
    if "balance" in given.only:
        found["balance"] = balance(given.n)
        for row in found["balance"]:
            print(
                f"{row['mask']:<20}{row['ranks']:>4} ranks  {row['how']:<11}{row['imbalance']:>7.1%}"
                f"   contiguous {row['contiguous']:>7.1%}"
            )
    if "bytes" in given.only:
        found["bytes"] = over(4, count, 1021)
        for row in found["bytes"]:
            print(
                f"{row['mask']:<20}{row['way']:<9}"
                f"{'equal' if row['counted'] == row['planned'] else 'DIFFERENT'}  {row['counted']}"
            )
    if "errors" in given.only:
        found["errors"] = [row for world in (1, 2, 4, 8, 16) for row in over(world, error, 1024)]
        for row in found["errors"]:
            print(
                f"{row['dtype']:<16}{row['ranks']:>3} ranks"
                + "".join(f"  {name} {row[name]:.2e}" for name in ("output", "dq", "dk", "dv"))
            )
    if "time" in given.only:
        each: dict[int, list[list[float]]] = {1: [], 2: []}
        for _ in range(2):
            for world, times in each.items():
                times += over(world, clock, given.n, 3)
        one, two = ([min(some) for some in zip(*times, strict=True)] for times in each.values())
        found["time"] = {"one rank": one, "two ranks": two, "ratio": two[0] / one[0], "of processor": two[1] / one[1]}
        print(
            f"N {given.n} causal, 8 heads of 64: one rank {one[0]:.3f} s, two ranks {two[0]:.3f} s,"
            f" ratio {two[0] / one[0]:.2f}; of the processor's time {two[1] / one[1]:.2f}"
        )
        found["PyTorch's context parallel"] = over(2, theirs, given.n // 8)
        print(found["PyTorch's context parallel"])
    if "cost" in given.only:
        for world in (8, 32, 128, 1024):
            plan = chd.plan((1, 32, 131072, 128), (1, 8, 131072, 128), world=world, mask=ch.causal(), dtype="bfloat16",
                            placement=chd.Placement.zigzag(131072, world))  # fmt: skip
            found[f"cost, {world} ranks"] = {one.name: one.seconds for one in plan.ways if one.refused is None}
            print(plan)
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
