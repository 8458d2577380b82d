"""The GPU kernels against their peers on this GPU: in one run, medians, random data, what was asked and what was got.

    python bench/gpu.py [section …] [--json FILE] [--seconds N]

Sections: ceilings choice forward masks sparse observe memory backward decode launching compiling watch; all of them
unless some are named. One that fails is reported and the others go on. TFLOP/s count the products of the pairs that are
not masked.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from gpu_launching import OWN, compiling, launching
from gpu_watch import watch
from sparse_masks import first_calls, on_gpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from turns import Call, milliseconds, together, tried

import clearhead as ch

BACK_ENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HEADS = 16
BEST = OWN[0]


class Bench:
    """Rows printed as they come, and kept for the JSON; a time after which sections are left out."""

    def __init__(self, seconds: float) -> None:
        self.rows: list[dict[str, object]] = []
        self.end = time.time() + seconds
        self.section = ""
        self.ceilings: dict[str, float] = {}

    def add(self, what: str, got: float, unit: str, asked: str = "", passed: bool | None = None) -> None:
        self.rows.append(
            {"section": self.section, "what": what, "got": got, "unit": unit, "asked": asked, "passed": passed}
        )
        verdict = "" if passed is None else "reached" if passed else "NOT REACHED"
        goal = f"asked {asked:<12}" if asked else " " * 18
        print(f"  {what:<58} {got:9.2f} {unit:<8} {goal} {verdict}", flush=True)

    def at_least(self, what: str, got: float, unit: str, least: float) -> None:
        self.add(what, got, unit, f"≥ {least:g}", got >= least)

    def at_most(self, what: str, got: float, unit: str, most: float) -> None:
        self.add(what, got, unit, f"≤ {most:g}", got <= most)


def tensors(n: int, width: int, *, batch: int = 1, heads: int = HEADS, keys: int | None = None, grad: bool = False):
    sizes = ((batch, heads, n, width), (batch, heads, keys or n, width), (batch, heads, keys or n, width))
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for s in sizes]


@contextmanager
def only(name: str) -> Iterator[None]:
    with sdpa_kernel([BACK_ENDS[name]]):
        yield


def sdpa(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> Call:
    def call() -> torch.Tensor:
        with only(name):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def flops(q: torch.Tensor, k: torch.Tensor, share: float = 1.0) -> float:
    return 4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3] * share


def rate(work: float, ms: float) -> float:
    return work / ms / 1e9


def ceilings(bench: Bench) -> None:
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * 2 / milliseconds(lambda: target.copy_(source)) / 1e6
    a, b = (torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = rate(2 * 8192**3, milliseconds(lambda: a @ b))
    bench.ceilings = {"copy GB/s": copied, "matrix product TFLOP/s": product}
    bench.add("copy, bytes read and written", copied, "GB/s")
    bench.add("matrix product, 8192³, bf16", product, "TFLOP/s")


def choice(bench: Bench) -> None:
    """What is chosen, by the best of PyTorch's back ends and our own kernel; the output alone, and with gradients."""
    worst = math.inf
    for batch, n in ((8, 1024), (2, 4096), (1, 16384)):
        for width in (64, 128):
            for causal in (False, True):
                for learns in (False, True):
                    q, k, v = tensors(n, width, batch=batch, grad=learns)
                    dout, mask = torch.randn_like(q), ch.causal() if causal else None
                    calls: dict[str, Call] = {name: sdpa(name, q, k, v, causal) for name in ("cuDNN", "FlashAttention")}
                    calls["hopper"] = partial(ch.attention, q, k, v, mask=mask, kernel="hopper")
                    calls["chosen"] = partial(ch.attention, q, k, v, mask=mask)
                    if learns:
                        calls = {name: partial(trained, call, (q, k, v), dout) for name, call in calls.items()}
                    peers = together(calls)
                    ours = peers.pop("chosen")
                    best = min((t, name) for name, t in peers.items() if not math.isnan(t))
                    worst = min(worst, best[0] / ours)
                    print("  " + ", ".join(f"{name} {ms:.4f}" for name, ms in {**peers, "chosen": ours}.items()), "ms")
                    which = f"{' causal' if causal else ''}{', with gradients' if learns else ''}"
                    bench.at_least(f"({batch}, {n}, D {width}){which}: best is {best[1]}", best[0] / ours, "×", 0.98)
    bench.at_least("worst of the grid", worst, "×", 0.98)


def trained(call: Call, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor) -> object:
    return torch.autograd.grad(call(), inputs, dout)  # type: ignore[call-overload]  # a call gives a tensor


def forward(bench: Bench) -> None:
    targets = {(128, False): 550.0, (128, True): 500.0, (64, False): 420.0}
    for batch, n in ((2, 4096), (1, 16384)):
        for width in (64, 128, 256):
            for causal in (False, True):
                q, k, v = tensors(n, width, batch=batch)
                mask = ch.causal() if causal else None
                work = flops(q, k, 0.5 if causal else 1.0)
                name = f"N {n:>5} D {width:>3}{' causal' if causal else ''}"
                for kernel in OWN:
                    ours = rate(work, milliseconds(partial(ch.attention, q, k, v, mask=mask, kernel=kernel)))
                    least = targets.get((width, causal)) if n == 16384 and kernel == BEST else None
                    if least is None:
                        bench.add(f"{name}: {kernel}", ours, "TFLOP/s")
                    else:
                        bench.at_least(f"{name}: {kernel}", ours, "TFLOP/s", least)
                for peer in ("cuDNN", "FlashAttention"):
                    bench.add(f"{name}: {peer}", rate(work, tried(peer, sdpa(peer, q, k, v, causal))), "TFLOP/s")


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule=None, change=None) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = q.shape[-2]
    block_mask = None if rule is None else create_block_mask(rule, None, None, n, n, device="cuda")
    torch._dynamo.reset()  # or other sizes would be compiled for sizes that vary, which is slower
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, score_mod=change, block_mask=block_mask)


def patterns(n: int) -> dict[str, tuple[dict[str, object], Callable[..., Call]]]:
    """Name → our options, and FlexAttention doing the same."""
    ids = torch.arange(n, device="cuda") // 1024
    slopes = torch.tensor(ch.alibi(HEADS).slopes, device="cuda", dtype=torch.float32)

    def back(b, h, i, j):
        return (j <= i) & (j >= i - 1024)

    def after(b, h, i, j):
        return j <= i

    def same(b, h, i, j):
        return ids[i] == ids[j]

    def cap(s, b, h, i, j):
        return 30.0 * torch.tanh(s / 30.0)

    def slope(s, b, h, i, j):
        return s - slopes[h] * (i - j).abs()

    documents = ch.documents((torch.arange(n) // 1024).numpy())
    return {
        "causal": ({"mask": ch.causal()}, lambda *a: flex(*a, rule=after)),
        "window(1024)": ({"mask": ch.window(1024)}, lambda *a: flex(*a, rule=back)),
        "documents": ({"mask": documents}, lambda *a: flex(*a, rule=same)),
        "softcap": ({"softcap": 30.0}, lambda *a: flex(*a, change=cap)),
        "ALiBi": ({"bias": ch.alibi(HEADS)}, lambda *a: flex(*a, change=slope)),
    }


def masks(bench: Bench) -> None:
    n = 16384
    q, k, v = tensors(n, 128)
    for name, (options, peer) in patterns(n).items():
        calls = {"FlexAttention": peer(q, k, v), "ours": partial(ch.attention, q, k, v, **options, kernel=BEST)}
        theirs, ours = together(calls).values()
        bench.add(f"{name}: ours", ours, "ms")
        if name == "causal":
            bench.add(f"{name}: FlexAttention's time by ours", theirs / ours, "×")
        else:
            bench.at_least(f"{name}: FlexAttention's time by ours", theirs / ours, "×", 1.15)


def sparse(bench: Bench) -> None:
    on_gpu(bench, tensors, flex, together)


def preparing(bench: Bench) -> None:
    first_calls(bench, tensors)


def eager_observation(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        n = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device="cuda").triu(1), -math.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    blocks = weights.unflatten(-1, (64, -1)).unflatten(-3, (64, -1))
    return weights @ v, weights.sum(-2), blocks.mean((-1, -3)), blocks.amax((-1, -3))


def observe(bench: Bench) -> None:
    wanted = {"received": True, "map": (64, 64)}
    for causal in (False, True):
        mask = ch.causal() if causal else None
        name = "causal" if causal else "full"
        q, k, v = tensors(16384, 128)
        plain = milliseconds(sdpa("cuDNN", q, k, v, causal))
        own = milliseconds(lambda: ch.attention(q, k, v, mask=mask, kernel=BEST))
        rows = milliseconds(lambda: ch.observe(q, k, v, mask=mask, kernel=BEST))
        seen = milliseconds(lambda: ch.observe(q, k, v, mask=mask, kernel=BEST, **wanted))
        top = milliseconds(lambda: ch.observe(q, k, v, mask=mask, kernel=BEST, top=8, **wanted))
        bench.add(f"{name}, cuDNN's plain forward", plain, "ms")
        bench.add(f"{name}, our forward by cuDNN's", own / plain, "×")
        bench.add(f"{name}, our forward with entropy by cuDNN's", rows / plain, "×")
        bench.add(f"{name}, the second look by cuDNN's forward", (seen - rows) / plain, "×")
        bench.add(f"{name}, top=8 alone by cuDNN's forward", (top - seen) / plain, "×")
        bench.at_most(f"{name}, received and map, by cuDNN's forward", seen / plain, "×", 1.7)
        bench.at_most(f"{name}, received, map and top=8, by cuDNN's forward", top / plain, "×", 2.2)
        for batch in (1, 2):
            q, k, v = tensors(4096, 128, batch=batch)
            calls = {
                "eager": partial(eager_observation, q, k, v, causal),
                "ours": partial(ch.observe, q, k, v, mask=mask, kernel=BEST, **wanted),
            }
            eager, ours = together(calls).values()
            bench.add(f"{name}, ({batch}, 4096): ours", ours, "ms")
            bench.at_least(f"{name}, ({batch}, 4096): eager's time by ours", eager / ours, "×", 15)


def memory(bench: Bench) -> None:
    q, k, v = tensors(131072, 128, heads=8)
    for name, mask in (("full", None), ("causal", ch.causal())):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        seen = ch.observe(q, k, v, mask=mask, kernel=BEST, received=True, map=(64, 64), top=8)
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        results = [seen.output, seen.lse, seen.max_score, seen.entropy, seen.received, *seen.map, *seen.top]
        kept = sum(a.numel() * a.element_size() for a in results)
        beyond = torch.cuda.max_memory_allocated() - before - kept
        bench.at_most(f"{name}, N 131,072, 8 heads: GB beyond results ({took:.2f} s)", beyond / 1e9, "GB", 2.0)
        del seen, results


def backward(bench: Bench) -> None:
    for n, width, causal in ((16384, 128, False), (16384, 128, True), (16384, 64, True), (4096, 128, True)):
        q, k, v = tensors(n, width, grad=True)
        mask = ch.causal() if causal else None
        dout = torch.randn_like(q)

        outputs = {kernel: ch.attention(q, k, v, mask=mask, kernel=kernel) for kernel in (*OWN, "vendor")}
        with only("cuDNN"):
            outputs["cuDNN"] = scaled_dot_product_attention(q, k, v, is_causal=causal)
        try:
            outputs["FlexAttention"] = flex(q, k, v, rule=(lambda b, h, i, j: j <= i) if causal else None)()
        except Exception as error:
            print(f"  (FlexAttention: {type(error).__name__}: {str(error).splitlines()[0][:110]})")
        calls = {
            name: partial(torch.autograd.grad, output, (q, k, v), dout, retain_graph=True)
            for name, output in outputs.items()
        }
        times = together(calls)
        name = f"N {n:>5} D {width:>3}{' causal' if causal else ''}"
        work = 2.5 * flops(q, k, 0.5 if causal else 1.0)
        for kernel in OWN:
            bench.add(f"{name}: {kernel}", rate(work, times[kernel]), "TFLOP/s")
            bench.add(f"{name}: cuDNN's time by {kernel}'s", times["cuDNN"] / times[kernel], "×")
        bench.add(f"{name}: cuDNN's time by our vendor kernel's", times["cuDNN"] / times["vendor"], "×")
        if "FlexAttention" in times:
            ratio = times["FlexAttention"] / times[BEST]
            bench.at_least(f"{name}: FlexAttention's time by ours", ratio, "×", 1.2)


def decode(bench: Bench) -> None:
    if not bench.ceilings:
        ceilings(bench)
    for batch, heads, key_heads in ((1, 16, 16), (8, 32, 8), (1, 8, 8)):
        k, v = (torch.randn((batch, key_heads, 65536, 128), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        q = torch.randn((batch, heads, 1, 128), device="cuda", dtype=torch.bfloat16)
        read = 2 * k.numel() * 2
        name = f"batch {batch}, heads {heads} over {key_heads}, S 65,536"
        ours = milliseconds(lambda: ch.attention(q, k, v, kernel="triton"))
        bench.add(f"{name}", ours * 1e3, "µs")
        share = read / ours / 1e6 / bench.ceilings["copy GB/s"]
        bench.at_least(f"{name}: share of copy bandwidth", share, "", 0.85)
        graph = captured(lambda: ch.attention(q, k, v, kernel="triton"))
        if graph is not None:
            replay = milliseconds(graph)
            bench.add(f"{name}: the same as a graph", read / replay / 1e6 / bench.ceilings["copy GB/s"], "")
        for peer in ("cuDNN", "FlashAttention"):
            if heads == key_heads:
                bench.add(f"{name}: {peer}'s time by ours", tried(peer, sdpa(peer, q, k, v)) / ours, "×")


def captured(call: Call) -> Call | None:
    """The call as a CUDA graph: what is left when launching costs nothing."""
    try:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except Exception as error:
        print(f"  (no graph: {type(error).__name__}: {str(error).splitlines()[0][:110]})")
        return None
    return graph.replay


SECTIONS: dict[str, Callable[[Bench], None]] = {
    f.__name__: f
    for f in (
        ceilings,
        forward,
        observe,
        masks,
        sparse,
        preparing,
        decode,
        backward,
        memory,
        choice,
        launching,
        compiling,
        watch,
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("sections", nargs="*", help=", ".join(SECTIONS))
    parser.add_argument("--json", type=Path, help="write the rows there too")
    parser.add_argument("--seconds", type=float, default=360, help="sections that would start later are left out")
    options = parser.parse_args()
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown sections {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        sys.exit("bench: PyTorch has no CUDA device here")
    torch.manual_seed(int(time.time()))
    import triton

    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(machine, flush=True)
    bench = Bench(options.seconds)
    failed = []
    for name in options.sections or SECTIONS:
        if time.time() > bench.end:
            print(f"\n{name}: left out, the time is up")
            continue
        bench.section = name
        print(f"\n{name}", flush=True)
        start = time.time()
        try:
            SECTIONS[name](bench)
        except Exception:
            failed.append(name)
            print(traceback.format_exc(limit=-4), flush=True)
        print(f"  ({time.time() - start:.0f} s)", flush=True)
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps({"machine": machine, "rows": bench.rows}, indent=1))
    goals = [row for row in bench.rows if row["passed"] is not None]
    print(f"\n{sum(bool(row['passed']) for row in goals)} of {len(goals)} goals reached")
    for row in goals:
        if not row["passed"]:
            print(f"  not reached: {row['section']}: {row['what']}: asked {row['asked']}, got {row['got']:.2f}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
