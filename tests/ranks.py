"""Processes that work together: every case of `cases.py` over several ranks, held to the budget of one machine.

    python tests/ranks.py --world 4 [--case causal] [--way ring] [--part 2/9]

`test_distributed.py` runs some of it, `python tests/ranks.py` the whole grid: every case, way and placement, or the
second of nine parts of the cases. A process for each rank is started for a number of ranks, and runs all cases of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def start(
    rank: int, world: int, folder: str, backend: str, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """One process: it joins the others, works, and writes down what went wrong."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        work(rank, world, *arguments)
    except BaseException:
        with open(f"{folder}/failed{rank}", "w") as file:
            file.write(traceback.format_exc())
        sys.stdout.flush()
        os._exit(1)  # what waits for others must not keep this process
    dist.destroy_process_group()


def together(world: int, work: Callable[..., None], *arguments: Any, backend: str = "gloo") -> None:
    """`work(rank, world, …)` in so many processes; the first failure is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")  # one process imports PyTorch, and each rank is a copy of it
        context.set_forkserver_preload(["torch.distributed", "torch.distributed.tensor", "clearhead.distributed.calls"])
        processes = [
            context.Process(target=start, args=(rank, world, folder, backend, work, arguments)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        failed = [name for name in sorted(os.listdir(folder)) if name.startswith("failed")]
        if failed:
            with open(f"{folder}/{failed[0]}") as file:
                raise AssertionError(f"{failed[0]} of {len(failed)}:\n{file.read()}")
        bad = [process.exitcode for process in processes if process.exitcode]
        assert not bad, f"exit codes {bad}"


def tensors(arrays: Any, dtype: str) -> list[torch.Tensor]:
    return [
        torch.from_numpy(np.array(a, dtype=np.float64 if dtype == "float64" else np.float32)).to(TYPES[dtype])
        for a in arrays
    ]


def splits(case: Any) -> bool:
    """Whether a case is one for many ranks: tensors as they lie, and something to split."""
    return case.layout in ("plain", "strided")


def placements(n: int, world: int, kind: str) -> Any:
    from clearhead.distributed import Placement

    if kind == "uneven":
        cuts = np.sort(np.random.default_rng(world + n).integers(0, n + 1, world - 1))
        return Placement.of_lengths(np.diff(np.concatenate([[0], cuts, [n]])).tolist())
    return (
        {"contiguous": Placement.contiguous, "zigzag": Placement.zigzag}[kind](n, world)
        if kind != "striped"
        else Placement.striped(n, world, block=2)
    )


def hold(name: str, rank: int, world: int, way: str | None, kind: str) -> int:
    """One case over all ranks: forward, gradients and observations, within the budget of one machine; how many."""
    from budget import LAST, MAP, TOP, check, emphasis, expected, queries_of
    from cases import BY_NAME

    import clearhead.distributed as chd

    case = BY_NAME[name]
    arrays, dout, options = case.build()
    q, k, v, dout = tensors((*arrays, dout), case.dtype)
    options = {n: torch.from_numpy(np.array(o)) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    by_query, by_keys = (placements(a.shape[-2], world, kind) for a in (q, k))
    rows, columns = (lambda a: chd.shard(a, by_query, rank)), (lambda a: chd.shard(a, by_keys, rank))
    parts = [rows(q), columns(k), columns(v)]
    given: dict[str, Any] = {"placement": by_query, "key_placement": by_keys, "way": way, "timeout": 30, **options}
    want = {"top": TOP, "map": MAP, "received": True, "queries": queries_of(q.shape[-2])}
    # how much outputs would change without a key is not said of what was dropped out
    by_key = ["received_max", *(["removal"] if "dropout" not in options else [])]
    want |= dict.fromkeys(by_key, True)
    if way == "queries":
        want, by_key = {}, []
    learned = [part.clone().requires_grad_() for part in parts]
    with np.errstate(all="ignore"):
        output = chd.attention(*learned, **given)
        output.backward(rows(dout))
        seen = chd.observe(*parts, **given, **want)
        last = chd.observe(*parts, **given, received=LAST, **dict.fromkeys(by_key, LAST)) if want else None
        lead = (*seen.lse.shape[:-1], q.shape[-2])
        counts = torch.from_numpy(emphasis(lead).astype(np.float32))  # of all queries, as every rank has them
        weighted = chd.observe(*parts, **given, received=counts) if want else None
    answers: dict[str, tuple[torch.Tensor, Any, int]] = {
        "output": (output.detach(), by_query, -2),
        **{
            what: (g.grad, by, -2)
            for what, g, by in zip(("dq", "dk", "dv"), learned, (by_query, by_keys, by_keys), strict=True)
        },
        **{what: (getattr(seen, what), by_query, -1) for what in ("lse", "max_score", "entropy")},
    }
    if want and last is not None and weighted is not None:
        answers["top"] = (seen.top.weights, by_query, -2)
        answers["received_weighted"] = (weighted.received, by_keys, -1)
        for what in ("received", *by_key):
            answers[what], answers[f"{what}_last"] = ((getattr(one, what), by_keys, -1) for one in (seen, last))
    found = {}
    for what, (part, placement, axis) in answers.items():
        found[what] = chd.gather(part, placement, axis=axis, timeout=30)
    if want:
        found |= {"map_mean": seen.map.mean, "map_max": seen.map.max, "queries": seen.queries.weights}
    if rank == 0:
        exact = expected(name)
        for what, got in found.items():
            check(got.double().numpy(), exact[what], k.shape[-2], f"{name}, {world} ranks, {way}, {kind}: {what}")
    return len(found)


def grid(rank: int, world: int, names: list[str], ways: list[str | None], kinds: list[str]) -> None:
    """Every case, way and placement, each said as it passes or not."""
    from cases import BY_NAME

    failed: list[str] = []
    calls = checks = 0
    for name in names:
        case = BY_NAME[name]
        heads, key_heads = (1, 1) if len(case.q) == 2 else (case.q[-3], case.k[-3])
        for way in ways:
            if way == "heads" and (heads % world or (key_heads % world and world % key_heads)):
                continue
            for kind in kinds:
                began = time.monotonic()
                try:
                    checks += hold(name, rank, world, way, kind)
                    calls += 1
                except Exception as error:  # all of them are told at the end
                    failed.append(f"{name}, {way}, {kind}: {type(error).__name__}: {error}")
                if rank == 0 and os.environ.get("RANKS_SAY") == "each":
                    print(f"{name}, {way}, {kind}: {time.monotonic() - began:.2f} s", flush=True)
    if rank == 0 and os.environ.get("RANKS_SAY"):
        print(f"{calls} calls, {checks} checks, {len(failed)} failures", flush=True)
    assert not failed, "\n".join(failed)


def main() -> None:
    from cases import CASES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--case", nargs="*", default=[case.name for case in CASES if splits(case)])
    parser.add_argument("--way", nargs="*", default=["ring", "gather", "queries", "heads"])
    parser.add_argument("--kind", nargs="*", default=["contiguous", "zigzag", "striped", "uneven"])
    parser.add_argument("--part", default="1/1")
    given = parser.parse_args()
    os.environ.setdefault("RANKS_SAY", "sums")
    part, parts = map(int, given.part.split("/"))
    cases = given.case[part - 1 :: parts]
    for world in given.world:
        began = time.monotonic()
        together(world, grid, cases, given.way, given.kind)
        print(f"{world} ranks: {len(cases)} cases, {given.way}, {given.kind} in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
