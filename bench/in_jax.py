"""Attention of JAX arrays against `jax.nn.dot_product_attention`: by turns in one run, on the CPU or GPU that JAX has.

    python bench/in_jax.py [--lengths N …] [--kinds WORD …] [--json FILE]

Every ratio is the median time of the peer divided by ours, above 1 where we are faster; what is said of a target is the
ratio that is wanted. On a CPU our peers are JAX's own function under `jit` and our own call on NumPy arrays; on a GPU
JAX's own function with cuDNN, and with a mask where cuDNN has no words for it. Their arrays have heads after positions,
as they want them.

On a CPU the rate of XLA's own product of two large matrices is measured as well: "at the rate of matrix products" is
the share of our time that the products of attention alone would take at that rate. Where it is near 1 no kernel can be
much faster on that machine, whatever the ratio to a peer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import clearhead as ch

HEADS, WIDTH = 8, 64
PAUSE = 1.5e-8  # s for each pair of a query and a key
Call = Callable[[], Any]
ready: Any = jax.block_until_ready


def seconds(call: Call) -> float:
    start = time.perf_counter()
    ready(call())
    return time.perf_counter() - start


def by_turns(calls: Mapping[str, Call], rounds: int, pause: float = 0.0) -> dict[str, float]:
    """The median of each, after three calls that compile and warm up.

    Every turn has an order of its own and a pause before each call: XLA's threads go on spinning for a while after a
    call, and a matrix of all pairs is given back to the system, which whoever came next would pay for.
    """
    for call in calls.values():
        for _ in range(3):
            ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(list(calls), len(calls)):
            time.sleep(pause)
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


def rate_of_products() -> float:
    """Multiply-adds a second of XLA's own product of two matrices of 2,048²: the best of a few."""
    side = 2048
    one = jnp.ones((side, side), jnp.float32)
    product = jax.jit(jnp.matmul)
    ready(product(one, one))
    return side**3 / min(seconds(lambda: product(one, one)) for _ in range(7))


class Row(NamedTuple):
    """One length and mask: its arrays, those turned as jax.nn has them and NumPy's, and how they are measured."""

    what: str
    arrays: Any
    turned: Any
    plain: list[np.ndarray]
    mask: Any
    options: Any  # of jax.nn
    turns: tuple[int, float]  # how many, and seconds between them
    alone: float  # seconds that one of attention's products would take


def on_cpu(report: Report, lengths: list[int], kinds: list[str], rounds: Callable[[int], int]) -> None:
    known: dict[str, tuple[Any, dict[str, Any]]] = {"full": (None, {}), "causal": (ch.causal(), {"is_causal": True})}
    rate = rate_of_products()
    for n, name in ((n, name) for n in lengths for name in kinds or known):
        mask, options = known[name]
        arrays = numbers((1, HEADS, n, WIDTH), jnp.float32)
        plain = [np.asarray(array) for array in arrays]
        pairs = n * n if mask is None else n * (n + 1) // 2
        row = Row(
            f"{n:,} {name}", arrays, turned(arrays), plain, mask, options, (rounds(n), PAUSE * n * n),
            HEADS * pairs * WIDTH / rate,
        )  # fmt: skip
        forwards(report, row)
        backwards(report, row)
    short(report)


def forwards(report: Report, row: Row) -> None:
    what, arrays, turned, plain, mask, options, turns, alone = row
    mine, peer, look = jax.jit(ours(mask)), jax.jit(theirs(**options)), jax.jit(looking(mask))
    times = by_turns(
        {
            "jax.nn": lambda: peer(*turned),
            "jit": lambda: mine(*arrays),
            "NumPy": lambda: ch.attention(*plain, mask=mask),
            "as it is": lambda: ch.attention(*arrays, mask=mask),
            "observe": lambda: look(*arrays),
            "observe as it is": lambda: ch.observe(*arrays, mask=mask, received=True, top=8),
        },
        *turns,
    )
    report.add(f"{what}: jax.nn / ours, forward", times["jax.nn"] / times["jit"], "≥ 4", times)
    report.add(f"{what}: forward at the rate of matrix products", 2 * alone / times["jit"], "≤ 1", {})
    report.add(f"{what}: ours under jit / on NumPy arrays", times["jit"] / times["NumPy"], "≤ 1.05", {})
    report.add(f"{what}: observe / attention", times["observe"] / times["jit"], "≤ 1.8", {})
    more = (times["as it is"] - times["NumPy"]) * 1e6
    report.add(f"{what}: as it is, µs over the NumPy call", more, "≤ 100", {})


def backwards(report: Report, row: Row) -> None:
    what, arrays, turned, plain, mask, options, turns, alone = row
    learn, learn_too = jax.jit(learning(ours(mask))), jax.jit(learning(theirs(**options)))
    dout = np.ones_like(plain[2])
    times = by_turns(
        {
            "jax.nn": lambda: learn_too(*turned),
            "jit": lambda: learn(*arrays),
            "NumPy": lambda: ch.gradients(*plain, dout, mask=mask),
        },
        *turns,
    )
    report.add(f"{what}: jax.nn / ours, value_and_grad", times["jax.nn"] / times["jit"], "≥ 4", times)
    report.add(f"{what}: value_and_grad at the rate of products", 7 * alone / times["jit"], "≤ 1", {})
    report.add(f"{what}: value_and_grad under jit / on NumPy arrays", times["jit"] / times["NumPy"], "≤ 1.05", {})


def short(report: Report) -> None:
    """What a call costs beside its arithmetic."""
    arrays = numbers((1, HEADS, 16, WIDTH), jnp.float32)
    plain = [np.asarray(array) for array in arrays]
    small = {
        "NumPy": lambda: ch.attention(*plain, mask=ch.causal()),
        "as it is": lambda: ch.attention(*arrays, mask=ch.causal()),
    }
    times = by_turns(small, 400)
    more = (times["as it is"] - times["NumPy"]) * 1e6
    report.add("16 causal: as it is, µs over the NumPy call", more, "≤ 100", times)


def on_gpu(report: Report, lengths: list[int], wanted: list[str], rounds: Callable[[int], int]) -> None:
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
        for name in wanted or kinds:
            mask, options, target = kinds[name]
            print(ch.plan(*arrays, mask=mask).kernel, end=" ")
            mine, peer = jax.jit(ours(mask)), jax.jit(theirs(**options))
            calls: dict[str, Call] = {"jax.nn": lambda: peer(*given), "jit": lambda: mine(*arrays)}
            calls["as it is"] = lambda: ch.attention(*arrays, mask=mask)
            times = by_turns(calls, rounds(n))
            report.add(f"{n:,} {name}: jax.nn / ours, forward", times["jax.nn"] / times["jit"], target, times)
            learn, learn_too = jax.jit(learning(ours(mask))), jax.jit(learning(theirs(**options)))
            times = by_turns({"jax.nn": lambda: learn_too(*given), "jit": lambda: learn(*arrays)}, rounds(n))
            report.add(f"{n:,} {name}: jax.nn / ours, value_and_grad", times["jax.nn"] / times["jit"], target, times)
        peer, look = jax.jit(theirs(**cudnn)), jax.jit(looking(None))
        print(look(*arrays).kernel, end=" ")
        seen = {
            "jax.nn": lambda: peer(*given),
            "observe": lambda: looking(None)(*arrays),
            "observe, jit": lambda: look(*arrays),
        }
        times = by_turns(seen, rounds(n))
        for name, way in (("as it is", "observe"), ("under jit", "observe, jit")):
            report.add(f"{n:,} full: observe {name} / jax.nn", times[way] / times["jax.nn"], "≤ 2.3", times)


def main() -> None:
    options = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    options.add_argument("--lengths", type=int, nargs="+", help="of the sequences; all that have a target if not given")
    options.add_argument(
        "--kinds", nargs="+", default=[], help="full, causal, on a GPU also 'window 256', '8 documents'"
    )
    options.add_argument("--json", type=Path, help="where to write the rows")
    given = options.parse_args()
    report, place = Report(), jax.default_backend()
    print(f"JAX {jax.__version__} on {place}, {platform.machine()}; medians by turns")
    if place == "gpu":
        with suppress(ImportError):  # by whose tensors our kernels are lent JAX's arrays
            importlib.import_module("torch")
        on_gpu(report, given.lengths or [1024, 4096, 16384], given.kinds, lambda n: 30)
    else:
        on_cpu(report, given.lengths or [1024, 4096], given.kinds, lambda n: 21 if n <= 1024 else 5)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"jax": jax.__version__, "place": place, "rows": report.rows}, indent=1))


if __name__ == "__main__":
    main()
