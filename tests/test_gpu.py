"""Every case on a GPU, with the kernel named; outputs poisoned first; determinism; long sequences.

    python tests/test_gpu.py [kernel …] [--precision ieee|tf32x3] [--processes N] [--only WORDS]

runs the same without pytest, and says what fails. Most of the time is compiling, so N processes share the work.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from unittest import mock

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

TIMES = 3  # a call is made: the first is prepared, the second recorded, the third played

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
        for _ in range(TIMES):
            CHECKS[what](kernel, case, CUDA)
            poison(2)
    except ch.KernelRefused as refusal:
        if kernel == "triton" and refusal.reason != reason:
            raise AssertionError(f"refused: {refusal.reason}, expected {reason}") from refusal
        return f"refused: {refusal.reason}"
    assert reason is None, f"taken, but pinned as refused: {reason}"
    return "ok"


WIDE = [(dtype, width) for dtype in ("float16", "bfloat16") for width in (64, 128, 256)]
LONGER = ("none", "causal", "window", "documents", "alibi", "softcap")


@pytest.mark.parametrize(("dtype", "width"), WIDE)
@pytest.mark.parametrize("name", LONGER)
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


def longer(
    dtype: str, width: int, name: str, queries: int = 777, keys: int = 1000, kernel: str = "triton", top: int = 3
) -> None:
    """Fresh numbers against `dense` in float64, and against it in float32 for the size of the error."""
    heads = 4
    options = options_of(name, heads, keys)
    for _ in range(TIMES):
        q = torch.randn((2, heads, queries, width), device="cuda", dtype=getattr(torch, dtype))
        k, v = (torch.randn((2, 2, keys, width), device="cuda", dtype=q.dtype) for _ in range(2))
        dout = torch.randn_like(q)
        poison(8)
        seen = ch.observe(q, k, v, **options, kernel=kernel, top=top, received=True, map=(8, 16))
        rows = ch.observe(q, k, v, **options, kernel=kernel, queries=[0, -1]).queries.weights
        mine = {"output": seen.output, "lse": seen.lse, "entropy": seen.entropy, "received": seen.received}
        mine |= {"mean": seen.map.mean, "max": seen.map.max, "top": seen.top.weights, "rows": rows}
        poison(8)
        mine |= dict(zip(("dq", "dk", "dv"), ch.gradients(q, k, v, dout, **options, kernel=kernel), strict=True))
    answers = []
    for precise in (torch.float64, torch.float32):
        a = [x.to(precise) for x in (q, k, v)]
        seen = ch.observe(*a, **options, kernel="dense", top=top, received=True, map=(8, 16), queries=[0, -1])
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


ONE_RUN = (
    "causal",
    "alibi",
    "alibi, positions by row",
    "alibi, window and softcap",
    "window",
    "window both ways",
    "documents",
    "documents by row",
    "lengths",
    "prefix",
    "not the first",
)


@pytest.mark.parametrize(("dtype", "width"), WIDE)
@pytest.mark.parametrize("name", ONE_RUN)
def test_one_run_of_keys_for_each_query(dtype: str, width: int, name: str) -> None:
    one_run(dtype, width, name)


def one_run(dtype: str, width: int, name: str, queries: int = 777, keys: int = 1000) -> None:
    """Hopper's own forward takes these, and more blocks than there are processors; hidden keys hold NaN."""
    heads, rng = 16, np.random.default_rng()
    ids = np.sort(rng.integers(0, 6, (2, keys)), axis=-1)
    options: dict[str, object] = {
        "causal": {"mask": ch.causal()},
        "alibi": {"bias": ch.alibi(heads)},
        "alibi, positions by row": {"bias": ch.alibi(heads, offset=[223, 3]), "mask": ch.causal(offset=[223, 3])},
        "alibi, window and softcap": {"bias": ch.alibi(heads), "mask": ch.window(100), "softcap": 5.0},
        "window": {"mask": ch.window(100)},
        "window both ways": {"mask": ch.window(60, 170)},
        "documents": {"mask": ch.documents(np.arange(keys) // 300) & ch.causal()},
        "documents by row": {"mask": ch.documents(ids, rng.integers(1, 8, (2, queries)))},
        "lengths": {"mask": ch.lengths([613, 0])},
        "prefix": {"mask": ch.prefix([500, 20]) | ch.causal()},
        "not the first": {"mask": ~ch.lengths([613, 130])},
    }[name]
    q = torch.randn((2, heads, queries, width), device="cuda", dtype=getattr(torch, dtype))
    k, v = (torch.randn((2, 4, keys, width), device="cuda", dtype=q.dtype) for _ in range(2))
    mask = options.get("mask")
    if isinstance(mask, ch.Mask):
        seen = mask.dense(queries, keys, batch=(2,)).any((-3, -2))
        hidden = torch.from_numpy(~np.broadcast_to(seen, (2, keys))).cuda()[:, None, :, None]
        k, v = (x.masked_fill(hidden, float("nan")) for x in (k, v))
    poison(8)
    with counted() as taken:
        found = ch.observe(q, k, v, **options, kernel="triton")
        again = ch.attention(q, k, v, **options, kernel="triton")
    assert taken.call_count == 2 or torch.cuda.get_device_capability()[0] != 9, "not in Hopper's own kernel"
    for _ in range(TIMES):
        poison(2)
        assert torch.equal(ch.observe(q, k, v, **options, kernel="triton").entropy, found.entropy)
        assert torch.equal(ch.attention(q, k, v, **options, kernel="triton"), again)
    true, near = (ch.observe(*(x.to(p) for x in (q, k, v)), **options, kernel="dense") for p in WORKING)
    for what in ("output", "lse", "max_score", "entropy", "again"):
        exact, plain = (getattr(x, "output" if what == "again" else what).double() for x in (true, near))
        got = again if what == "again" else getattr(found, what)
        finite = torch.isfinite(exact)
        assert torch.equal(got.double()[~finite], exact[~finite]), f"{what}: infinities differ"
        plain = plain.to(got.dtype).double()[finite]
        eps = torch.finfo(got.dtype).eps
        allowed = 2 * (plain - exact[finite]).abs().max() + keys**0.5 * eps * exact[finite].abs().max()
        off = (got.double()[finite] - exact[finite]).abs().max()
        assert off <= allowed, f"{what}: off by {float(off):.3g}, allowed {float(allowed):.3g}"


WORKING = (torch.float64, torch.float32)


@contextmanager
def counted() -> Iterator[mock.Mock]:
    """Hopper's own forward, which tells whether it was called."""
    from clearhead.kernels.triton.hopper import forward as module

    with mock.patch.object(module, "forward", wraps=module.forward) as taken:
        yield taken


def test_the_same_call_gives_the_same_bits() -> None:
    same_bits()


def same_bits() -> None:
    q, k, v, dout = torch.randn((4, 2, 4, 2000, 64), device="cuda", dtype=torch.bfloat16).unbind(0)
    runs = []
    for _ in range(3):
        seen = ch.observe(q, k, v, mask=ch.causal(), kernel="triton", top=4, received=True, map=(16, 16))
        found = [seen.output, seen.lse, seen.entropy, seen.received, *seen.map, *seen.top]
        with deterministic():
            runs.append(found + list(ch.gradients(q, k, v, dout, mask=ch.causal(), kernel="triton")))
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True))


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_are_added_up_in_no_order_only_where_they_may_be() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper has a kernel that adds up gradients in no order")
    from clearhead.kernels.triton.hopper import gradients as module

    q, k, v, dout = torch.randn((4, 1, 2, 300, 128), device="cuda", dtype=torch.bfloat16).unbind(0)
    with mock.patch.object(module, "gradients", wraps=module.gradients) as taken:
        with deterministic():
            ordered = ch.gradients(q, k, v, dout, kernel="triton")
        assert not taken.called
        free = ch.gradients(q, k, v, dout, kernel="triton")
        assert taken.called
    for one, other in zip(ordered, free, strict=True):
        assert (one.float() - other.float()).norm() < 0.01 * one.float().norm()


UNSEEN = {
    "causal": (ch.causal(offset=-300), slice(0, 300), slice(700, None)),
    "window": (ch.window(20, 30, offset=-400), slice(0, 370), slice(630, None)),
    "lengths": (ch.lengths(417), slice(0, 0), slice(417, None)),
}


@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.parametrize("width", [64, 128])
def test_what_is_not_seen_may_hold_anything(name: str, width: int) -> None:
    not_seen(name, width)


def not_seen(name: str, width: int) -> None:
    mask, no_queries, no_keys = UNSEEN[name]
    q, k, v, dout = torch.randn((4, 1, 2, 1000, width), device="cuda", dtype=torch.bfloat16).unbind(0)
    for a, rows in ((q, no_queries), (dout, no_queries), (k, no_keys), (v, no_keys)):
        a[..., rows, :] = 0
    clean = ch.gradients(q, k, v, dout, mask=mask, kernel="triton")
    for a, rows in ((q, no_queries), (dout, no_queries), (k, no_keys), (v, no_keys)):
        a[..., rows, :] = float("nan")
    found = ch.gradients(q, k, v, dout, mask=mask, kernel="triton")
    for got, want, rows in zip(found, clean, (no_queries, no_keys, no_keys), strict=True):
        assert not got[..., rows, :].any()
        assert (got.float() - want.float()).norm() < 0.01 * want.float().norm()


def test_every_back_end_of_the_vendor_gives_gradients() -> None:
    """Each by itself, since which one runs is found out by measuring."""
    from clearhead.kernels.vendor import BACKWARD, FORWARD, one_a_query

    for length, causal in product((64, 130), (False, True)):
        q, k, v, dout = torch.randn((4, 2, 4, length, 64), device="cuda", dtype=torch.bfloat16).unbind(0)
        mask = ch.causal() if causal else None
        exact = ch.gradients(*(x.double() for x in (q, k, v, dout)), mask=mask, kernel="dense")
        for name in FORWARD:
            output, lse = FORWARD[name](q, k, v, causal, 0.125)
            lse = one_a_query(lse, q)
            found = BACKWARD[name](dout, q, k, v, output.contiguous(), lse.contiguous(), causal, 0.125)
            for what, got, best in zip(("dq", "dk", "dv"), found, exact, strict=True):
                off = float((got.double() - best).norm() / best.norm())
                assert off < 2**-6, f"{name} {what}: off by {off:.2g} of its size, a few times bfloat16's 2⁻⁸"


def test_the_vendor_gives_gradients_for_every_width_that_it_takes() -> None:
    for width in (8, 64, 128, 192, 256):
        q, k, v, dout = torch.randn((4, 1, 4, 300, width), device="cuda", dtype=torch.bfloat16).unbind(0)
        exact = ch.gradients(*(x.double() for x in (q, k, v, dout)), kernel="dense")
        for mine, best in zip(ch.gradients(q, k, v, dout, kernel="vendor"), exact, strict=True):
            assert float((mine.double() - best).norm() / best.norm()) < 2**-6, f"{width} features"


def test_few_queries_over_many_keys() -> None:
    for queries in (1, 3):
        longer("bfloat16", 128, "causal", queries=queries, keys=5000)
        longer("float16", 64, "window", queries=queries, keys=3000)


def test_heads_side_by_side() -> None:
    """More causal heads than are worked on at a time, in several rounds, with a last group that is smaller."""
    from clearhead.kernels.triton.hopper import cuts

    for width, waves, heads in product((64, 128), (1, 4), (40, 44)):
        q = torch.randn((2, heads, 1100, width), device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn((2, heads // 4, 1100, width), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        wanted = {"received": True, "map": (10, 12), "top": 2}
        with mock.patch.multiple(cuts, WAVES=waves, ROUNDS=4 * waves):
            seen = ch.observe(q, k, v, mask=ch.causal(), kernel="triton", scale=0.1 + waves / 100, **wanted)
        exact = ch.observe(
            *(x.float() for x in (q, k, v)), mask=ch.causal(), scale=0.1 + waves / 100, kernel="dense", **wanted
        )
        close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-5, check_dtype=False)
        close(seen.lse, exact.lse)
        close(seen.entropy, exact.entropy, atol=1e-4)
        close(seen.received, exact.received)
        close(seen.map, exact.map)
        close(seen.top.weights, exact.top.weights)
        close(seen.output, exact.output, rtol=0.02, atol=0.01)


def test_more_of_the_largest_weights() -> None:
    for count in (9, 16, 17):
        longer("bfloat16", 128, "causal", top=count)


def test_nothing_to_see() -> None:
    for keys, mask in ((200, ch.lengths(0)), (200, ch.causal(offset=-500)), (0, None)):
        q, k, v = (torch.randn((1, 2, n, 64), device="cuda", dtype=torch.bfloat16) for n in (200, keys, keys))
        for _ in range(TIMES + 1):
            poison(2)
            seen = ch.observe(q, k, v, mask=mask, kernel="triton", received=True)
            nothing = [ch.attention(q, k, v, mask=mask, kernel="triton"), seen.output, seen.entropy, seen.received]
            nothing += ch.gradients(q, k, v, torch.randn_like(q), mask=mask, kernel="triton")
            assert not any(tensor.any() for tensor in nothing)
            assert (seen.lse == -torch.inf).all()


def test_a_mask_prepared_on_one_stream_serves_another() -> None:
    q, k, v = torch.randn((3, 1, 4, 3000, 64), device="cuda", dtype=torch.bfloat16).unbind(0)
    here = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        mask = ch.documents(np.random.default_rng().integers(0, 9, 3000)) | ch.window(70)  # not one run of keys
        with torch.cuda.stream(here):
            torch.cuda._sleep(20_000_000)  # some 10 ms, which what is prepared waits for
            first = ch.attention(q, k, v, mask=mask, kernel="triton")
        second = ch.attention(q, k, v, mask=mask, kernel="triton")
        torch.cuda.synchronize()
        assert torch.equal(first, second)


def test_a_graph_that_is_captured_and_replayed() -> None:
    held = torch.randn((4, 2, 4, 700, 64), device="cuda", dtype=torch.bfloat16)
    other = torch.randn_like(held)

    def call() -> list[torch.Tensor]:
        q, k, v, dout = held.unbind(0)
        seen = ch.observe(q, k, v, mask=ch.causal(), kernel="triton", received=True, map=(8, 8), top=2)
        few = ch.attention(q[:, :, :1], k, v, kernel="triton")
        plain = ch.attention(q, k, v)  # by vendor
        with deterministic():
            found = ch.gradients(q, k, v, dout, mask=ch.causal(), kernel="triton")
        return [seen.output, seen.lse, seen.entropy, seen.received, *seen.map, *seen.top, few, plain, *found]

    for times in (0, TIMES):  # calls before: nothing is known yet, all is on tape
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(max(times, 1)):
                call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = call()
        held.copy_(other)
        poison(2)
        graph.replay()
        torch.cuda.synchronize()
        for mine, right in zip(found, call(), strict=True):
            assert torch.equal(mine, right)
        other = torch.randn_like(held)


def test_gradients_of_sinks() -> None:
    case = BY_NAME["sinks"]
    arrays, dout, options = case.build()
    q, k, v = (CUDA.make(a).requires_grad_() for a in arrays)
    sinks = CUDA.make(options["sinks"]).requires_grad_()
    ch.attention(q, k, v, sinks=sinks, kernel="triton").backward(CUDA.make(dout))
    check(q.grad.cpu(), expected("sinks")["dq"], 23, "dq")
    assert torch.isfinite(sinks.grad).all()


def work(kernels: list[str]) -> dict[str, tuple[int, Callable[..., object], tuple[object, ...]]]:
    """Name → (a number, the same for what compiles the same kernels; a check; what it is given)."""
    found: dict[str, tuple[int, Callable[..., object], tuple[object, ...]]] = {}
    for kernel, what, (number, case) in product(kernels, CHECKS, enumerate(CASES)):
        found[f"{kernel} {what} {case.name}"] = (number, conforms, (kernel, case, what))
    if "triton" in kernels:
        for number, ((dtype, width), name) in enumerate(product(WIDE, LONGER)):
            found[f"longer {dtype} {width} {name}"] = (number, longer, (dtype, width, name))
        for number, ((dtype, width), name) in enumerate(product(WIDE, ONE_RUN)):
            found[f"one run {dtype} {width} {name}"] = (number, one_run, (dtype, width, name))
        for number, (name, width) in enumerate(product(UNSEEN, (64, 128))):
            found[f"unseen {name} {width}"] = (number, not_seen, (name, width))
        for number, f in enumerate(
            (
                same_bits,
                test_every_back_end_of_the_vendor_gives_gradients,
                test_few_queries_over_many_keys,
                test_the_vendor_gives_gradients_for_every_width_that_it_takes,
                test_gradients_of_sinks,
                test_more_of_the_largest_weights,
                test_heads_side_by_side,
                test_a_graph_that_is_captured_and_replayed,
                test_a_mask_prepared_on_one_stream_serves_another,
                test_nothing_to_see,
                test_gradients_are_added_up_in_no_order_only_where_they_may_be,
            )
        ):
            found[f.__name__] = (number, f, ())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("kernels", nargs="*", default=KERNELS)
    parser.add_argument("--precision", default="ieee", help="how the GPU kernels multiply float32: ieee or tf32x3")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--part", type=int, help="of the work, this share alone")
    parser.add_argument("--only", nargs="+", default=[""], help="checks that have one of these words in their names")
    given = parser.parse_args()
    if given.processes > 1 and given.part is None:
        shares = [subprocess.Popen([sys.executable, *sys.argv, "--part", str(part)]) for part in range(given.processes)]
        return max([share.wait() for share in shares])
    from clearhead.kernels.triton import tuning

    tuning.PRECISION = given.precision
    chosen = {
        name: (function, arguments)
        for name, (number, function, arguments) in work(list(given.kernels)).items()
        if any(word in name for word in given.only) and (given.part is None or number % given.processes == given.part)
    }
    taken, failed, start = 0, 0, time.time()
    for name, (function, arguments) in chosen.items():
        try:
            poison(4)
            taken += function(*arguments) in ("ok", None)
        except Exception as error:
            failed += 1
            words = str(error)
            print(f"FAILED {name}: {type(error).__name__}: {words[:300]} … {words[300:][-300:]}", flush=True)
            if "CUDA error" in words or "illegal" in words:
                print("the device is lost; stopping")
                break
    print(f"{len(chosen)} checks, {taken} taken and right, {failed} failed, {time.time() - start:.0f} s", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
