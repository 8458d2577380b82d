"""Attention over ranks on one GPU, and over keys that the host holds: right, and how fast; in a few minutes.

    python bench/distributed_gpu.py [--only ranks host] [--gigabytes 8] [--ranks 2] [--limit 110] [--json FILE]

`ranks`: several processes share the GPU, over NCCL where the driver lets them and over gloo with CUDA tensors; forward,
gradients and observations against one process in float64, within twice the error of one process, each back end for at
most so many seconds. `host`: keys of so many gigabytes in pinned memory, beside plain copies to the GPU in the same
run, of whose speed 0.8 is asked for. Without a GPU `ranks` runs on tensors of the CPU, and the rest is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import ranks

import clearhead as ch
import clearhead.distributed as chd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, HEADS, WIDTH = 1021, 8, 64  # a prime length, which no number of ranks divides
MASKS: dict[str, Any] = {"causal": ch.causal(), "window": ch.window(200) | ch.global_tokens([0, 7]), "none": None}


def numbers(dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, HEADS, N, WIDTH), (1, HEADS, N, WIDTH), (1, HEADS, N, WIDTH), (1, HEADS, N, WIDTH)]
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes]


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, mask: Any) -> dict[str, torch.Tensor]:
    """Everything that is compared, by one process."""
    learned = [a.clone().requires_grad_() for a in (q, k, v)]
    output = ch.attention(*learned, mask=mask)
    output.backward(dout)
    seen = ch.observe(q, k, v, mask=mask, received=True, map=(8, 16), top=3)
    return {
        "output": output.detach(), "dq": learned[0].grad, "dk": learned[1].grad, "dv": learned[2].grad,
        "lse": seen.lse, "entropy": seen.entropy, "received": seen.received, "map": seen.map.mean,
        "top": seen.top.weights,
    }  # fmt: skip


def over_ranks(rank: int, world: int, into: str, seconds: float) -> None:
    """One rank's part: every mask, dtype and way; rank 0 writes down how far each is, in errors of one process.

    After so many seconds nothing new is begun: on a GPU most of the time goes into compiling.
    """
    began = time.monotonic()
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.barrier()  # here NCCL says that two ranks share a GPU, if it minds
    rows: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        for name, mask in MASKS.items():
            late = torch.tensor([time.monotonic() - began > seconds], dtype=torch.int32, device=DEVICE)
            dist.all_reduce(late)
            if late:
                break
            q, k, v, dout = numbers(dtype)
            placement = chd.place(mask, N, world)
            exact = alone(*(a.double() for a in (q, k, v, dout)), mask)
            single = alone(q, k, v, dout, mask)
            for way in ("ring", "gather", "heads"):
                own = [chd.shard(a, placement, rank).clone().requires_grad_() for a in (q, k, v)]
                given: dict[str, Any] = {"placement": placement, "mask": mask, "way": way, "timeout": 90}
                output = chd.attention(*own, **given)
                output.backward(chd.shard(dout, placement, rank))
                seen = chd.observe(*(a.detach() for a in own), **given, received=True, map=(8, 16), top=3)
                parts = {"output": (output.detach(), -2), "lse": (seen.lse, -1), "entropy": (seen.entropy, -1),
                         "received": (seen.received, -1), "top": (seen.top.weights, -2)}  # fmt: skip
                parts |= {f"d{what}": (a.grad, -2) for what, a in zip("qkv", own, strict=True)}
                found = {what: chd.gather(part, placement, axis=axis) for what, (part, axis) in parts.items()}
                found["map"] = seen.map.mean
                for what, got in found.items():
                    size = float(exact[what].abs().max())
                    budget = 2 * float((single[what].double() - exact[what]).abs().max()) + 1e-6 * size
                    far = float((got.double() - exact[what]).abs().max())
                    rows.append(
                        {"dtype": str(dtype), "mask": name, "way": way, "what": what, "of budget": far / budget}
                    )
    if rank == 0:
        Path(into).write_text(json.dumps(rows))


def ranked(backend: str, world: int, seconds: float) -> dict[str, Any]:
    """How many checks there were of how many, and which failed."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "found.json"
        ranks.together(world, over_ranks, str(into), seconds, backend=backend)
        rows = json.loads(into.read_text())
    bad = [row for row in rows if not row["of budget"] <= 1]
    return {
        "checks": len(rows),
        "of": 2 * len(MASKS) * 3 * 9,
        "failures": len(bad),
        "worst": max(row["of budget"] for row in rows),
        "failed": bad[:9],
    }


def in_a_process(backend: str, world: int, seconds: float) -> dict[str, Any]:
    """The same in a process of its own: a driver that does not answer keeps nobody."""
    command = [sys.executable, __file__, "--one", backend, str(world), str(0.5 * seconds)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # its ranks, too, which would keep the GPU and what is read from them
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            return {"refused": f"nothing within {seconds:.0f} s", "said": errors.strip()[-300:]}
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()]
        told = [line for line in lines if "uplicate GPU" in line] or lines[-1:]
        return {"refused": told[0].strip()[:200] if told else f"exit code {process.returncode}"}
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def best(call: Callable[[], Any], times: int) -> float:
    """The least seconds of several."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def host(gigabytes: float) -> list[dict[str, Any]]:
    """Bytes a second of keys that the host holds, beside those of plain copies, in turn."""
    heads, width, item = 8, 128, 2
    count = int(gigabytes * 2**30 / (2 * heads * width * item))
    k, v = (torch.empty(1, heads, count, width, dtype=torch.bfloat16, pin_memory=True) for _ in range(2))
    for tensor in (k, v):  # the same few thousand keys again and again: to draw gigabytes would take minutes
        noise = torch.randn(heads, 4096, width).to(tensor.dtype)
        for low in range(0, count, 4096):
            tensor[0, :, low : low + 4096] = noise[:, : min(4096, count - low)]
    size = 2 * k.nbytes
    there = torch.empty_like(k[:, :, : min(count, 2**18)], device="cuda")
    flat = k.reshape(-1)[: there.numel()].reshape(there.shape)  # in one piece, as it lies
    found = []
    for queries in (1, 16):
        q = torch.randn(1, 4 * heads, queries, width, device="cuda", dtype=torch.bfloat16)
        few = k[:, :, :4096], v[:, :, :4096]
        stream = chd.stream(q, few, chunk=1000).float()
        whole = ch.attention(q.float(), *(a.cuda().float() for a in few))
        plain = streamed = 0.0
        chd.stream(q, (k, v), mask=ch.causal())  # what is compiled and pinned once
        for _ in range(3):
            plain = max(plain, there.nbytes / best(lambda: there.copy_(flat, non_blocking=True), 3))
            torch.cuda.reset_peak_memory_stats()
            streamed = max(streamed, size / best(lambda q=q: chd.stream(q, (k, v), mask=ch.causal()), 1))
        found.append(
            {
                "queries": queries, "gigabytes": size / 2**30, "plain GB/s": plain / 1e9,
                "streamed GB/s": streamed / 1e9, "share": streamed / plain,
                "most memory of the GPU, MiB": torch.cuda.max_memory_allocated() / 2**20,
                "error": float((stream - whole).abs().max()),
            }
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["host", "ranks"])
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2])
    parser.add_argument("--limit", type=float, default=110.0)
    parser.add_argument("--one", nargs=3, help="back end, ranks and seconds: one run of `ranks`, as JSON")
    parser.add_argument("--json")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(ranked(given.one[0], int(given.one[1]), float(given.one[2]))))
        return
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU: tensors of the CPU"
    }
    print(found["device"], flush=True)
    if "host" in given.only and DEVICE == "cuda":
        found["host"] = host(given.gigabytes)
        for row in found["host"]:
            print(", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            print("  reached" if row["share"] >= 0.8 else "  NOT REACHED: 0.8 of the plain copy", flush=True)
    if "ranks" in given.only:
        backends = ("gloo",) if DEVICE == "cpu" else ("nccl", "gloo")
        for backend, world in product(backends, given.ranks):
            one = found[f"{backend}, {world} ranks"] = in_a_process(backend, world, given.limit)
            print(f"{backend}, {world} ranks:", one, flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
