"""Attention of JAX arrays against `jax.nn.dot_product_attention`: by turns in one run, on the CPU or GPU that JAX has.

    python bench/in_jax.py [--quick] [--json FILE]

Every ratio is the median time of the peer divided by ours, above 1 where we are faster; what is said of a target is the
ratio that is wanted. On a CPU our peers are JAX's own function under `jit` and our own call on NumPy arrays; on a GPU
JAX's own function with cuDNN, and with a mask where cuDNN has no words for it. Their arrays have heads after positions,
as they want them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import clearhead as ch

HEADS, WIDTH = 8, 64
Call = Callable[[], Any]
ready: Any = jax.block_until_ready


def seconds(call: Call) -> float:
    start = time.perf_counter()
    ready(call())
    return time.perf_counter() - start


def by_turns(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """The median of each, after three calls that compile and warm up; the order goes forwards and backwards."""
    for call in calls.values():
        for _ in range(3):
            ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            times[name].append(seconds(calls[name]))
    return {name: statistics.median(taken) for name, taken in times.items()}


class Report:
    """Rows, printed as they come and kept for the JSON."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, ratio: float, target: str, times: Mapping[str, float]) -> None:
        kept = {name: round(taken * 1e3, 4) for name, taken in times.items()}
        self.rows.append({"what": what, "ratio": round(ratio, 3), "target": target, "milliseconds": kept})
        print(f"{what:<52} {ratio:7.2f}  {target:<8} {kept}", flush=True)


def numbers(shape: tuple[int, ...], dtype: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(3)]


def turned(arrays: list[Any]) -> list[Any]:
    return [jnp.array(jnp.swapaxes(array, 1, 2)) for array in arrays]


def ours(mask: Any) -> Callable[..., Any]:
    return lambda q, k, v: ch.attention(q, k, v, mask=mask)


def theirs(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)


def learning(call: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *given: call(*given).astype(jnp.float32).sum(), argnums=(0, 1, 2))


def looking(mask: Any) -> Callable[..., Any]:
    return lambda q, k, v: ch.observe(q, k, v, mask=mask, received=True, top=8)


def on_cpu(report: Report, lengths: list[int], rounds: Callable[[int], int]) -> None:
    for n in lengths:
        arrays = numbers((1, HEADS, n, WIDTH), jnp.float32)
        given, plain = turned(arrays), [np.asarray(array) for array in arrays]
        for name, mask, options in (("full", None, {}), ("causal", ch.causal(), {"is_causal": True})):
            mine, peer, look = jax.jit(ours(mask)), jax.jit(theirs(**options)), jax.jit(looking(mask))
            learn, learn_too = jax.jit(learning(ours(mask))), jax.jit(learning(theirs(**options)))
            times = by_turns(
                {
                    "jax.nn": lambda: peer(*given),
                    "jit": lambda: mine(*arrays),
                    "NumPy": lambda: ch.attention(*plain, mask=mask),
                    "as it is": lambda: ch.attention(*arrays, mask=mask),
                    "observe": lambda: look(*arrays),
                    "observe as it is": lambda: ch.observe(*arrays, mask=mask, received=True, top=8),
                },
                rounds(n),
            )
            what = f"{n:,} {name}"
            report.add(f"{what}: jax.nn / ours, forward", times["jax.nn"] / times["jit"], "≥ 4", times)
            report.add(f"{what}: ours under jit / on NumPy arrays", times["jit"] / times["NumPy"], "≤ 1.05", {})
            report.add(f"{what}: observe / attention", times["observe"] / times["jit"], "≤ 1.8", {})
            more = (times["as it is"] - times["NumPy"]) * 1e6
            report.add(f"{what}: as it is, µs over the NumPy call", more, "≤ 100", {})
            times = by_turns({"jax.nn": lambda: learn_too(*given), "jit": lambda: learn(*arrays)}, rounds(n))
            report.add(f"{what}: jax.nn / ours, value_and_grad", times["jax.nn"] / times["jit"], "≥ 4", times)
    arrays = numbers((1, HEADS, 16, WIDTH), jnp.float32)
    plain = [np.asarray(array) for array in arrays]
    small = {
        "NumPy": lambda: ch.attention(*plain, mask=ch.causal()),
        "as it is": lambda: ch.attention(*arrays, mask=ch.causal()),
    }
    times = by_turns(small, 400)
    more = (times["as it is"] - times["NumPy"]) * 1e6
    report.add("16 causal: as it is, µs over the NumPy call", more, "≤ 100", times)


def on_gpu(report: Report, lengths: list[int], rounds: Callable[[int], int]) -> None:
    for n in lengths:
        arrays = numbers((max(1, 8192 // n), 16, n, 128), jnp.bfloat16)
        given = turned(arrays)
        ids = jnp.arange(n) // (n // 8)
        back = min(255, n - 1)
        near = jnp.abs(jnp.arange(n)[:, None] - jnp.arange(n) - back / 2) <= back / 2
        cudnn = {"implementation": "cudnn"}
        kinds: dict[str, tuple[Any, dict[str, Any], str]] = {
            "full": (None, cudnn, "≥ 0.97"),
            "causal": (ch.causal(), {"is_causal": True, **cudnn}, "≥ 0.97"),
            "window 256": (ch.window(back), {"mask": near[None, None]}, "≥ 2"),
            "8 documents": (ch.documents(np.asarray(ids)), {"mask": (ids[:, None] == ids)[None, None]}, "≥ 2"),
        }
        for name, (mask, options, target) in kinds.items():
            print(ch.plan(*arrays, mask=mask).kernel, end=" ")
            mine, peer = jax.jit(ours(mask)), jax.jit(theirs(**options))
            calls: dict[str, Call] = {"jax.nn": lambda: peer(*given), "jit": lambda: mine(*arrays)}
            calls["as it is"] = lambda: ch.attention(*arrays, mask=mask)
            times = by_turns(calls, rounds(n))
            report.add(f"{n:,} {name}: jax.nn / ours, forward", times["jax.nn"] / times["jit"], target, times)
            learn, learn_too = jax.jit(learning(ours(mask))), jax.jit(learning(theirs(**options)))
            times = by_turns({"jax.nn": lambda: learn_too(*given), "jit": lambda: learn(*arrays)}, rounds(n))
            report.add(f"{n:,} {name}: jax.nn / ours, value_and_grad", times["jax.nn"] / times["jit"], target, times)
        peer = jax.jit(theirs(**cudnn))
        seen = {"jax.nn": lambda: peer(*given), "observe": lambda: looking(None)(*arrays)}
        times = by_turns(seen, rounds(n))
        report.add(f"{n:,} full: observe as it is / jax.nn", times["observe"] / times["jax.nn"], "≤ 2.3", times)


def main() -> None:
    options = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    options.add_argument("--quick", action="store_true", help="the shortest length alone")
    options.add_argument("--json", type=Path, help="where to write the rows")
    given = options.parse_args()
    report, place = Report(), jax.default_backend()
    print(f"JAX {jax.__version__} on {place}, {platform.machine()}; medians by turns")
    if place == "gpu":
        on_gpu(report, [1024] if given.quick else [1024, 4096, 16384], lambda n: 30)
    else:
        on_cpu(report, [1024] if given.quick else [1024, 4096], lambda n: 11 if n <= 1024 else 3)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"jax": jax.__version__, "place": place, "rows": report.rows}, indent=1))


if __name__ == "__main__":
    main()
