"""Every case on a GPU, with the kernel named; outputs poisoned first; long sequences.

    python tests/test_gpu.py [kernel …] [--processes N] [--only WORDS]

runs the same without pytest, and says what fails. Most of the time is compiling, so N processes share the work.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from cases import CASES, Case
from conformance import CHECKS, REFUSED
from hopper_cases import HOPPER_CASES, HOPPER_REFUSED, NOT_PROMISED
from libraries import CUDA
from on_gpu import MARKS, OWN, TIMES, longer, poison, poisoned  # noqa: F401  # a fixture that runs by itself

import clearhead as ch
from clearhead.kernels.gpu import tuning

pytestmark = MARKS

# what vendor refuses depends on PyTorch's own checks; what it takes must be right
KERNELS = (*OWN, "vendor")
# each kernel's cases; Hopper's are those of all kernels, in the widths that it takes
KERNEL_CASES = [(kernel, case) for kernel in KERNELS for case in (HOPPER_CASES if kernel == "hopper" else CASES)]


@pytest.mark.parametrize(("kernel", "case"), KERNEL_CASES, ids=str)
@pytest.mark.parametrize("what", CHECKS)
def test_kernel_conforms(kernel: str, case: Case, what: str) -> None:
    conforms(kernel, case, what)


def expected_of_hopper(case: Case, what: str) -> str | None:
    """Why a case is refused: its gradients, or as gradients need a forward, that."""
    reason = HOPPER_REFUSED["forward"].get(case.name)
    return reason or (HOPPER_REFUSED["gradients"].get(case.name) if what == "gradients" else None)


def conforms(kernel: str, case: Case, what: str) -> str:
    """Hold a kernel to a case; "ok", or the reason it was refused for."""
    reason = REFUSED.get((kernel, case.name))
    few = tuning.FEW
    if kernel == "hopper":
        if case.name in NOT_PROMISED[what]:
            return "not promised"
        reason, few = expected_of_hopper(case, what), 0
    try:
        for _ in range(TIMES):
            with mock.patch.object(tuning, "FEW", few):
                CHECKS[what](kernel, case, CUDA)
            poison(2)
    except ch.KernelRefused as refusal:
        if kernel != "vendor" and refusal.reason != reason:
            raise AssertionError(f"refused: {refusal.reason}, expected {reason}") from refusal
        return f"refused: {refusal.reason}"
    assert reason is None, f"taken, but pinned as refused: {reason}"
    return "ok"


WIDE = [(dtype, width) for dtype in ("float16", "bfloat16") for width in (64, 128, 256)]
LONGER = ("none", "causal", "window", "documents", "alibi", "softcap")


@pytest.mark.parametrize(("dtype", "width"), WIDE)
@pytest.mark.parametrize("name", LONGER)
@pytest.mark.parametrize("kernel", OWN)
def test_longer_sequences(kernel: str, dtype: str, width: int, name: str) -> None:
    longer(dtype, width, name, kernel=kernel)


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
@pytest.mark.parametrize("kernel", OWN)
def test_one_run_of_keys_for_each_query(kernel: str, dtype: str, width: int, name: str) -> None:
    one_run(kernel, dtype, width, name)


def one_run(kernel: str, dtype: str, width: int, name: str, queries: int = 777, keys: int = 1000) -> None:
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
    found = ch.observe(q, k, v, **options, kernel=kernel)
    again = ch.attention(q, k, v, **options, kernel=kernel)
    assert found.kernel == kernel
    for _ in range(TIMES):
        poison(2)
        assert torch.equal(ch.observe(q, k, v, **options, kernel=kernel).entropy, found.entropy)
        assert torch.equal(ch.attention(q, k, v, **options, kernel=kernel), again)
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


UNSEEN = {
    "causal": (ch.causal(offset=-300), slice(0, 300), slice(700, None)),
    "window": (ch.window(20, 30, offset=-400), slice(0, 370), slice(630, None)),
    "lengths": (ch.lengths(417), slice(0, 0), slice(417, None)),
}


@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kernel", OWN)
def test_what_is_not_seen_may_hold_anything(kernel: str, name: str, width: int) -> None:
    not_seen(kernel, name, width)


def not_seen(kernel: str, name: str, width: int) -> None:
    mask, no_queries, no_keys = UNSEEN[name]
    q, k, v, dout = torch.randn((4, 1, 2, 1000, width), device="cuda", dtype=torch.bfloat16).unbind(0)
    for a, rows in ((q, no_queries), (dout, no_queries), (k, no_keys), (v, no_keys)):
        a[..., rows, :] = 0
    clean = ch.gradients(q, k, v, dout, mask=mask, kernel=kernel)
    for a, rows in ((q, no_queries), (dout, no_queries), (k, no_keys), (v, no_keys)):
        a[..., rows, :] = float("nan")
    found = ch.gradients(q, k, v, dout, mask=mask, kernel=kernel)
    for got, want, rows in zip(found, clean, (no_queries, no_keys, no_keys), strict=True):
        assert not got[..., rows, :].any()
        assert (got.float() - want.float()).norm() < 0.01 * want.float().norm()


def work(kernels: list[str]) -> dict[str, tuple[int, Callable[..., object], tuple[object, ...]]]:
    """Name → (a number, the same for what compiles the same kernels; a check; what it is given)."""
    from test_gpu_numbers import KINDS, MASKS, saturated, spoiled

    found: dict[str, tuple[int, Callable[..., object], tuple[object, ...]]] = {}
    for kernel, what in product(kernels, CHECKS):
        for number, case in enumerate(HOPPER_CASES if kernel == "hopper" else CASES):
            found[f"{kernel} {what} {case.name}"] = (number, conforms, (kernel, case, what))
    for kernel in set(kernels) & set(OWN):
        for number, ((dtype, width), name) in enumerate(product(WIDE, LONGER)):
            found[f"{kernel} longer {dtype} {width} {name}"] = (number, longer, (dtype, width, name, 777, 1000, kernel))
        for number, ((dtype, width), name) in enumerate(product(WIDE, ONE_RUN)):
            found[f"{kernel} one run {dtype} {width} {name}"] = (number, one_run, (kernel, dtype, width, name))
        for number, (name, width) in enumerate(product(UNSEEN, (64, 128))):
            found[f"{kernel} unseen {name} {width}"] = (number, not_seen, (kernel, name, width))
        for number, ((dtype, width), name) in enumerate(product(KINDS, MASKS)):
            found[f"{kernel} spoiled {dtype} {width} {name}"] = (number, spoiled, (kernel, dtype, width, name))
            found[f"{kernel} saturated {dtype} {width} {name}"] = (number, saturated, (kernel, dtype, width, name))
    if "triton" in kernels:
        from test_gpu_calls import ALONE

        for number, function in enumerate(ALONE):
            found[function.__name__] = (number, function, ())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("kernels", nargs="*", default=KERNELS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--part", type=int, help="of the work, this share alone")
    parser.add_argument("--only", nargs="+", default=[""], help="checks that have one of these words in their names")
    given = parser.parse_args()
    if given.processes > 1 and given.part is None:
        shares = [subprocess.Popen([sys.executable, *sys.argv, "--part", str(part)]) for part in range(given.processes)]
        return max([share.wait() for share in shares])
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
