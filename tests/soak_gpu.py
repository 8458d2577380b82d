"""Random problems on the GPU against float64, for as long as it is let: shapes, masks, biases and options drawn anew.

    python tests/soak_gpu.py [--seconds 180] [--processes N] [--seed N]

Each result is held to the error budget of `budget.py`: twice the distance of the formula in the kernel's own precision,
plus the rounding of its sums, over keys and in scores. A failure prints the seed that draws it again, alone. Most of
the time is compiling, so N processes draw side by side.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from on_gpu import OWN, by

import clearhead as ch

OF_WEIGHTS = ("output", "entropy", "received", "mean", "max", "top", "rows")
PLAIN = 5  # times that the formula is evaluated for its own distance: small problems have few numbers to tell it by
ALIKE = 12  # problems in a row of one structure, in other sizes and numbers


def draw_mask(rng: np.random.Generator, batch: int, heads: int, queries: int, keys: int, depth: int = 0) -> Any:
    kind = rng.integers(11 if depth < 2 else 8)
    if kind == 0:
        return ch.causal(align=str(rng.choice(["end", "start"])))
    if kind == 1:
        return ch.causal(offset=rng.integers(-5, keys, batch))
    if kind == 2:
        return ch.window(int(rng.integers(0, keys + 1)), int(rng.integers(0, 40)))
    if kind == 3:
        return ch.lengths(rng.integers(0, keys + 1, batch))
    if kind == 4:
        ids = np.sort(rng.integers(0, 5, (batch, keys)), axis=-1)
        return ch.documents(ids, rng.integers(0, 5, queries))
    if kind == 5:
        return ch.global_tokens(rng.integers(0, keys, 3))
    if kind == 6:
        return ch.random_blocks(int(rng.integers(1, 70)), count=int(rng.integers(1, 4)), seed=int(rng.integers(99)))
    if kind == 7:
        shape = [int(n) if rng.random() < 0.5 else 1 for n in (batch, heads, queries, keys)]
        return torch.from_numpy(rng.random(shape) < 0.6).cuda()
    left, right = (draw_mask(rng, batch, heads, queries, keys, depth + 1) for _ in range(2))
    if kind == 8:
        return ch.where(left) & right if isinstance(left, torch.Tensor) else left & right
    if kind == 9:
        return ch.where(left) | right if isinstance(left, torch.Tensor) else left | right
    return ~(ch.where(left) if isinstance(left, torch.Tensor) else left)


def draw(seed: int) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, Any], dict[str, Any]]:
    # kernels are compiled for what is drawn first, which takes longer than running them: it stays for some problems
    rng, fresh = np.random.default_rng(seed // ALIKE), np.random.default_rng(seed)
    torch.manual_seed(seed)
    batch, key_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    heads = key_heads * group
    queries, keys = (int(2 ** fresh.uniform(0, 10)) for _ in range(2))
    width, out = (int(rng.choice([8, 13, 16, 32, 48, 64, 80, 96, 128, 192, 256])) for _ in range(2))
    if rng.random() < 0.5:  # what models have, and Hopper's own kernels take
        width = out = int(rng.choice([64, 128, 256]))
    dtype = (torch.float16, torch.bfloat16, torch.float32)[rng.integers(3)]

    def made(*shape: int) -> torch.Tensor:
        array = torch.randn(shape, device="cuda").to(dtype)
        if rng.random() < 0.3:  # heads and positions swapped in memory
            array = array.transpose(1, 2).contiguous().transpose(1, 2)
        return array

    arrays = [
        made(batch, heads, queries, width),
        made(batch, key_heads, keys, width),
        made(batch, key_heads, keys, out),
    ]
    options: dict[str, Any] = {}
    if rng.random() < 0.7:
        options["mask"] = draw_mask(rng, batch, heads, queries, keys)
    chance = rng.random()
    if chance < 0.15:
        options["bias"] = ch.alibi(heads)
    elif chance < 0.3:
        options["bias"] = ch.relative_bias(torch.randn(32, heads, device="cuda"), bidirectional=bool(rng.integers(2)))
    elif chance < 0.4:
        options["bias"] = torch.randn([int(n) if rng.random() < 0.5 else 1 for n in (heads, queries, keys)]).cuda()
    if rng.random() < 0.2:
        options["softcap"] = float(rng.uniform(0.5, 30))
    if rng.random() < 0.2:
        options["sinks"] = torch.randn(heads, device="cuda")
    if rng.random() < 0.2:
        options["dropout"] = (float(rng.uniform(0.05, 0.7)), int(rng.integers(2**40)))
    if rng.random() < 0.2:
        options["scale"] = float(rng.uniform(-0.5, 1.0))
    wanted = {
        "received": True if rng.random() < 0.5 else int(fresh.integers(1, queries + 1)),
        "map": (int(rng.integers(1, 80)), int(rng.integers(1, 80))),
        "top": int(rng.integers(1, 12)),
    }
    return arrays, torch.randn((batch, heads, queries, out), device="cuda").to(dtype), options, wanted


def answers(arrays: list[torch.Tensor], dout: torch.Tensor, options: Any, wanted: Any, kernel: str) -> dict[str, Any]:
    seen = by(kernel, ch.observe, *arrays, **options, **wanted)
    rows = by(kernel, ch.observe, *arrays, **options, queries=[0, -1])
    found = {"output": seen.output, "lse": seen.lse, "max_score": seen.max_score, "entropy": seen.entropy}
    found |= {"received": seen.received, "mean": seen.map.mean, "max": seen.map.max, "top": seen.top.weights}
    found["rows"] = rows.queries.weights
    gradients = by(kernel, ch.gradients, *arrays, dout, **options)
    return found | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def in_precision(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in options.items()
    }


def formula(arrays: list[torch.Tensor], dout: torch.Tensor, options: Any, wanted: Any) -> dict[str, Any]:
    """The formula in float32, its products added up in an order of chance, which exact numbers would not tell."""
    q, k, v = (a.float() for a in arrays)
    order = torch.randperm(q.shape[-1], device=q.device)
    found = answers(
        [q[..., order], k[..., order], v], dout.float(), in_precision(options, torch.float32), wanted, "dense"
    )
    back = torch.argsort(order)
    return found | {name: found[name][..., back] for name in ("dq", "dk")}


def off_one_by_one(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> float:
    """How far a score is off where its products are added up one after the other, as in a product of tiles.

    The formula's own sums go by pairs, which round less.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.zeros((*q.shape[:-1], k.shape[-2]), device=q.device)
    for feature in range(q.shape[-1]):
        scores += q[..., feature].float()[..., None] * k[..., feature].float()[..., None, :]
    exact = q.double() @ k.double().transpose(-1, -2)
    return float((scores - exact).abs().max()) * abs(q.shape[-1] ** -0.5 if scale is None else scale)


def hold(seed: int) -> list[str]:
    """What is wrong with the problem of a seed."""
    arrays, dout, options, wanted = draw(seed)
    held = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(8)]
    del held  # results that are not written to would be made of it
    for factor in (-0.5, 2.0, 1.0):  # prepared, recorded, played
        mine = answers([a * factor for a in arrays], dout, options, wanted, OWN[seed % len(OWN)])
    exact = answers([a.double() for a in arrays], dout.double(), in_precision(options, torch.float64), wanted, "dense")
    plains = [formula(arrays, dout, options, wanted) for _ in range(PLAIN)]
    scores = off_one_by_one(arrays[0], arrays[1], options.get("scale"))
    wrong = []
    terms = max(arrays[1].shape[-2], arrays[0].shape[-2])
    for what, got in mine.items():
        true, near = exact[what].double(), [plain[what].to(got.dtype).double() for plain in plains]
        finite = torch.isfinite(true)
        if not torch.equal(got.double()[~finite], true[~finite]):
            wrong.append(f"{what}: infinities differ")
            continue
        if not finite.any():
            continue
        got, true, near = got.double()[finite], true[finite], torch.stack([a[finite] for a in near])
        size = float(true.abs().max())
        if what in ("dq", "dk"):  # a difference of terms of this size; see budget.py
            size = max(
                size, float(dout.double().abs().max() * arrays[2].double().abs().max() * arrays[1].double().abs().max())
            )
        eps = torch.finfo(mine[what].dtype).eps
        allowed = 2 * float((near - true).abs().max()) + terms**0.5 * eps * size
        if what in OF_WEIGHTS:  # a weight is off by so much of it, in its score and in the sum over all
            allowed += 2 * scores * size
        off = float((got - true).abs().max())
        if not off <= allowed:
            wrong.append(f"{what}: off by {off:.3g}, allowed {allowed:.3g}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, help="this one problem alone")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--from", type=int, dest="first", help="the first seed of many")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("soak: PyTorch has no CUDA device here")
    first = next((n for n in (given.seed, given.first) if n is not None), int(time.time()) % 10**8)
    if given.processes > 1:
        common = [sys.executable, sys.argv[0], "--seconds", str(given.seconds)]
        starts = [str(first + n * 1000 * ALIKE) for n in range(given.processes)]
        return max([process.wait() for process in [subprocess.Popen([*common, "--from", start]) for start in starts]])
    end, count, failed = time.time() + given.seconds, 0, 0
    while count == 0 or (given.seed is None and time.time() < end):
        seed = first + count
        try:
            wrong = hold(seed)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {str(error)[:300]}"]
        if wrong:
            failed += 1
            arrays, _, options, wanted = draw(seed)
            shapes = ", ".join(str(tuple(a.shape)) for a in arrays)
            print(f"seed {seed}: {arrays[0].dtype} {shapes} {options} {wanted}")
            print("\n".join(f"   {line}" for line in wrong), flush=True)
        count += 1
    print(f"{count} problems from seed {first}, {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
