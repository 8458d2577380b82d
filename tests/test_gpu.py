"""Every case on a GPU, with the kernel named; outputs poisoned first; determinism; long sequences.

    python tests/test_gpu.py [kernel …] [--precision ieee|tf32x3]

runs the same without pytest, and says what fails.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest
import torch
from budget import check, expected
from cases import BY_NAME, CASES, Case
from conformance import CHECKS, REFUSED
from libraries import CUDA

import clearhead as ch

THERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not THERE, reason="PyTorch has no CUDA device here")]

# what vendor refuses depends on PyTorch's own checks; what it takes must be right
KERNELS = ("triton", "vendor")


@pytest.fixture(autouse=True)
def _poisoned() -> None:
    if THERE:
        poison()


def poison(count: int = 64) -> None:
    """Freed memory full of NaN, which results that are not written to would be made of."""
    for size in (2**10, 2**14, 2**18, 2**20):
        held = [torch.full((size,), float("nan"), device="cuda") for _ in range(count if size < 2**20 else 4)]
        del held


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("what", CHECKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_conforms(kernel: str, case: Case, what: str) -> None:
    conforms(kernel, case, what)


def conforms(kernel: str, case: Case, what: str) -> str:
    """Hold a kernel to a case; "ok", or the reason it was refused for."""
    reason = REFUSED.get((kernel, case.name))
    try:
        CHECKS[what](kernel, case, CUDA)
    except ch.KernelRefused as refusal:
        if kernel == "triton" and refusal.reason != reason:
            raise AssertionError(f"refused: {refusal.reason}, expected {reason}") from refusal
        return f"refused: {refusal.reason}"
    assert reason is None, f"taken, but pinned as refused: {reason}"
    return "ok"


WIDE = [(dtype, width) for dtype in ("float16", "bfloat16") for width in (64, 128, 256)]


@pytest.mark.parametrize(("dtype", "width"), WIDE)
@pytest.mark.parametrize("name", ["none", "causal", "window", "documents", "alibi", "softcap"])
def test_longer_sequences(dtype: str, width: int, name: str) -> None:
    longer(dtype, width, name)


def options_of(name: str, heads: int, keys: int) -> dict[str, object]:
    return {
        "none": {},
        "causal": {"mask": ch.causal()},
        "window": {"mask": ch.window(100)},
        "documents": {"mask": ch.documents(np.arange(keys) // 300) & ch.causal()},
        "alibi": {"bias": ch.alibi(heads), "mask": ch.causal()},
        "softcap": {"softcap": 5.0},
    }[name]


def longer(dtype: str, width: int, name: str, queries: int = 777, keys: int = 1000, kernel: str = "triton") -> None:
    """Fresh numbers against `dense` in float64, and against it in float32 for the size of the error."""
    heads = 4
    q = torch.randn((2, heads, queries, width), device="cuda", dtype=getattr(torch, dtype))
    k, v = (torch.randn((2, 2, keys, width), device="cuda", dtype=q.dtype) for _ in range(2))
    dout = torch.randn_like(q)
    options = options_of(name, heads, keys)
    poison(8)
    seen = ch.observe(q, k, v, **options, kernel=kernel, top=3, received=True, map=(8, 16), queries=[0, -1])
    mine = {"output": seen.output, "lse": seen.lse, "entropy": seen.entropy, "received": seen.received}
    mine |= {"mean": seen.map.mean, "max": seen.map.max, "top": seen.top.weights, "rows": seen.queries.weights}
    poison(8)
    mine |= dict(zip(("dq", "dk", "dv"), ch.gradients(q, k, v, dout, **options, kernel=kernel), strict=True))
    answers = []
    for precise in (torch.float64, torch.float32):
        a = [x.to(precise) for x in (q, k, v)]
        seen = ch.observe(*a, **options, kernel="dense", top=3, received=True, map=(8, 16), queries=[0, -1])
        found = {"output": seen.output, "lse": seen.lse, "entropy": seen.entropy, "received": seen.received}
        found |= {"mean": seen.map.mean, "max": seen.map.max, "top": seen.top.weights, "rows": seen.queries.weights}
        found |= dict(
            zip(("dq", "dk", "dv"), ch.gradients(*a, dout.to(precise), **options, kernel="dense"), strict=True)
        )
        answers.append(found)
    for what, got in mine.items():
        exact, plain = answers[0][what], answers[1][what].to(got.dtype)
        eps = torch.finfo(got.dtype).eps
        allowed = 2 * (plain.double() - exact).abs().max() + keys**0.5 * eps * exact.abs().max()
        off = (got.double() - exact).abs().max()
        assert off <= allowed, f"{what}: off by {float(off):.3g}, allowed {float(allowed):.3g}"


def test_the_same_call_gives_the_same_bits() -> None:
    same_bits()


def same_bits() -> None:
    q, k, v, dout = torch.randn((4, 2, 4, 2000, 64), device="cuda", dtype=torch.bfloat16).unbind(0)
    runs = []
    for _ in range(3):
        seen = ch.observe(q, k, v, mask=ch.causal(), kernel="triton", top=4, received=True, map=(16, 16))
        found = [seen.output, seen.lse, seen.entropy, seen.received, *seen.map, *seen.top]
        runs.append(found + list(ch.gradients(q, k, v, dout, mask=ch.causal(), kernel="triton")))
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True))


def test_few_queries_over_many_keys() -> None:
    for queries in (1, 3):
        longer("bfloat16", 128, "causal", queries=queries, keys=5000)
        longer("float16", 64, "window", queries=queries, keys=3000)


def test_gradients_of_sinks() -> None:
    case = BY_NAME["sinks"]
    arrays, dout, options = case.build()
    q, k, v = (CUDA.make(a).requires_grad_() for a in arrays)
    sinks = CUDA.make(options["sinks"]).requires_grad_()
    ch.attention(q, k, v, sinks=sinks, kernel="triton").backward(CUDA.make(dout))
    check(q.grad.cpu(), expected("sinks")["dq"], 23, "dq")
    assert torch.isfinite(sinks.grad).all()


def main(arguments: list[str]) -> int:
    if "--precision" in arguments:
        from clearhead.kernels.triton import tuning

        tuning.PRECISION = arguments[arguments.index("--precision") + 1]
        arguments = arguments[: arguments.index("--precision")]
    kernels, failed, start = arguments or list(KERNELS), 0, time.time()
    work = [(f"{k} {w} {c.name}", conforms, (k, c, w)) for k in kernels for w in CHECKS for c in CASES]
    if "triton" in kernels:
        work += [
            (f"longer {d} {w} {n}", longer, (d, w, n))
            for d, w in WIDE
            for n in ("none", "causal", "window", "documents", "alibi", "softcap")
        ]
        work += [(f.__name__, f, ()) for f in (same_bits, test_few_queries_over_many_keys, test_gradients_of_sinks)]
    taken = 0
    for name, function, given in work:
        try:
            poison(4)
            taken += function(*given) in ("ok", None)
        except Exception as error:
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if "CUDA error" in str(error) or "illegal" in str(error):
                print("the device is lost; stopping")
                break
    print(f"{len(work)} checks, {taken} taken and right, {failed} failed, {time.time() - start:.0f} s")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
