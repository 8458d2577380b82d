"""Masks of keys that lie apart, cut into sequences, by the same mask in its tiles; on a GPU where there is one.

    python bench/strided.py [--lengths N ...] [--seconds S] [--json FILE]

With `offset=[0]`, one for each batch row, a mask says the same of one row and is left whole.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cpu_turns import measure

import clearhead as ch

MASKS: dict[str, Callable[..., ch.Mask]] = {
    "dilated(4, 256)": partial(ch.dilated, 4, 256),
    "dilated(7)": partial(ch.dilated, 7),  # sequences of two lengths
    "dilated(8)": partial(ch.dilated, 8),
    "dilated(64)": partial(ch.dilated, 64),
    "strided(64)": partial(ch.strided, 64),
    "strided(128)": partial(ch.strided, 128),
}


def rows(n: int, seconds: float) -> list[dict[str, Any]]:
    """Milliseconds of each way, by turns: attention, observing, and with gradients."""
    on_gpu = torch.cuda.is_available()
    device, dtype, heads = ("cuda", torch.bfloat16, 16) if on_gpu else ("cpu", torch.float32, 8)
    q, k, v, dout = (torch.randn((1, heads, n, 64), device=device, dtype=dtype) for _ in range(4))
    learnt = [a.clone().requires_grad_() for a in (q, k, v)]

    def trained(mask: ch.Mask) -> Any:
        return torch.autograd.grad(ch.attention(*learnt, mask=mask), learnt, dout)

    def done(call: Callable[..., Any], mask: ch.Mask) -> None:
        call(mask=mask)
        if on_gpu:
            torch.cuda.synchronize()

    found = []
    for name, mask in MASKS.items():
        calls = {
            "attention": partial(ch.attention, q, k, v),
            "received, top=8": partial(ch.observe, q, k, v, received=True, top=8),
            "with gradients": trained,
        }
        for what, call in calls.items():
            ways = {"cut": partial(done, call, mask()), "whole": partial(done, call, mask(offset=[0]))}
            for _ in range(3):  # what is recorded, and played again
                for way in ways.values():
                    way()
            times = measure(ways, least=5, seconds=seconds)
            ratio = times["whole"] / times["cut"]
            row = {"what": f"{name}, {n:,}: {what}", "peer": "whole", "ratio": ratio, "target": ""}
            row |= {way: 1e3 * taken for way, taken in times.items()}
            print(
                f"  {name:16} {n:>7,} {what:16} {row['cut']:9.3f} ms, whole {row['whole']:9.3f}: × {ratio:.2f}",
                flush=True,
            )
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    torch.manual_seed(int(time.time()))
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    machine = f"{place}, torch {torch.__version__}"
    print(machine, flush=True)
    found = [row for n in options.lengths for row in rows(n, options.seconds)]
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
