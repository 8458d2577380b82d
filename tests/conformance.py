"""One body of tests for all kernels: a kernel, a case and a library in, an assertion error out."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import numpy as np
import pytest
from budget import LAST, MAP, TOP, check, emphasis, expected, queries_of
from cases import Case
from libraries import ArrayLibrary, numbers

import clearhead as ch
from clearhead.kernels.compiled import native

built = pytest.mark.skipif(native is None, reason="the compiled kernel is not built: there is no C++ compiler")
# all instruction sets that there are, and those that this machine has; the kernel by itself takes the best of them
ALL_SETS = ("portable", "neon", "neon_fp16", "neon_bf16", "avx2", "avx512", "avx512_bf16", "amx")
INSTRUCTION_SETS = [name for name in ALL_SETS if native is not None and native.has(name)]
# those that multiply half precision as it is, and which; all else they do as the set that they add to
OF_HALF = {
    "neon_fp16": ["float16"],
    "neon_bf16": ["float16", "bfloat16"],
    "avx512_bf16": ["bfloat16"],
    "amx": ["bfloat16"],
}

# What a kernel refuses, pinned as data: (kernel, case) → the reason. Support cannot be lost unnoticed.
REFUSED: dict[tuple[str, str], str] = {
    ("compiled", name): "it has no dropout; `tiled` has"
    for name in ("dropout", "dropout, large seed", "everything", "bfloat16, everything", "NaN here and there, dropout")
}
REFUSED |= {
    ("triton", name): "it takes float16, bfloat16, float32, not float64"
    for name in (
        "one query, 32 features, float64",
        "float64",
        "scores of 10⁴, float64",
        "NaN here and there, float64",
        "sinks far above, float64",
    )
}
REFUSED["triton", "wide"] = "257 features of a value are outside 1 to 256"


def forward(kernel: str, case: Case, library: ArrayLibrary) -> None:
    arrays, _, options = case.build()
    q, k, v = map(library.make, arrays)
    output = ch.attention(q, k, v, **library.options(options), kernel=kernel)
    assert library.owns(output), f"output is {type(output)}"
    assert output.dtype == q.dtype
    check(numbers(output), expected(case.name)["output"], k.shape[-2], "output")


def backward(kernel: str, case: Case, library: ArrayLibrary, parts: tuple[str, ...] = ("", " of lse")) -> None:
    arrays, dout, options = case.build()
    q, k, v = map(library.make, arrays)
    if q.ndim == 2:
        dout = dout.reshape(dout.shape[-2:])
    dlse = library.make(case.dlse().reshape(dout.shape[:-1]))
    for of in parts:
        more = {"dlse": dlse} if of else {}
        try:
            found = ch.gradients(q, k, v, library.make(dout), **library.options(options), kernel=kernel, **more)
        except ch.KernelRefused:
            if kernel == "vendor" and more:  # PyTorch's own kernels have no gradient of the log-sum-exp
                return
            raise
        for what, gradient, like in zip(("dq", "dk", "dv"), found, (q, k, v), strict=True):
            assert gradient.dtype == like.dtype
            # dk and dv are sums over queries, dq over keys
            check(numbers(gradient), expected(case.name)[what + of], max(k.shape[-2], q.shape[-2]), what + of)


def observation(kernel: str, case: Case, library: ArrayLibrary) -> None:
    arrays, _, options = case.build()
    q, k, v = map(library.make, arrays)
    options = library.options(options)
    queries = queries_of(q.shape[-2])
    seen = ch.observe(q, k, v, **options, kernel=kernel, top=TOP, received=True, map=MAP, queries=queries, weights=True)
    assert seen.kernel == kernel
    want = expected(case.name)
    keys = max(k.shape[-2], q.shape[-2])
    seen = seen.each(numbers)
    check(seen.output, want["output"], keys, "output")
    for what in ("lse", "max_score", "entropy", "weights", "received"):
        check(getattr(seen, what), want[what], keys, what)
    assert seen.map is not None
    assert seen.top is not None
    assert seen.queries is not None
    check(seen.map.mean, want["map_mean"], keys, "map.mean")
    check(seen.map.max, want["map_max"], keys, "map.max")
    check(seen.queries.weights, want["queries"], keys, "queries")
    check_top(seen.top, np.asarray(seen.weights), want["top"], keys)
    few = ch.observe(q, k, v, **options, kernel=kernel, top=TOP, received=True).each(numbers)  # most often asked for
    check(few.output, want["output"], keys, "output, observed")
    check(few.received, want["received"], keys, "received, with the largest")
    check_top(few.top, np.asarray(seen.weights), want["top"], keys)
    removal = "removal" in want  # which is not said of what was dropped out
    counts = library.make(emphasis((*seen.lse.shape,)).astype(np.float32))
    more = {"removal": True} if removal else {}
    by_key = ch.observe(q, k, v, **options, kernel=kernel, received=counts, received_max=True, **more).each(numbers)
    check(by_key.received, want["received_weighted"], keys, "received, weighted queries")
    check(by_key.received_max, want["received_max"], keys, "received_max")
    if removal:
        check(by_key.removal, want["removal"], keys, "removal")
    if q.shape[-2]:
        more = {"removal": LAST} if removal else {}
        last = ch.observe(q, k, v, **options, kernel=kernel, received=LAST, received_max=LAST, **more).each(numbers)
        check(last.received, want["received_last"], keys, "received, last queries")
        check(last.received_max, want["received_max_last"], keys, "received_max, last queries")
        if removal:
            check(last.removal, want["removal_last"], keys, "removal, last queries")
        assert last.top is None
        assert last.map is None
        assert last.weights is None


def check_top(top: Any, weights: np.ndarray, want: Any, keys: int) -> None:
    """The largest weights, and that the keys named have them, whatever their order among equals."""
    check(top.weights, want, keys, "top.weights")
    if not weights.shape[-1]:
        return
    indices = np.asarray(top.indices).astype(int)
    assert np.array_equal(indices >= 0, np.asarray(top.weights) > 0)
    named = np.take_along_axis(weights, np.maximum(indices, 0), -1)
    check(np.where(indices < 0, np.asarray(top.weights), named), want, keys, "top.indices")
    for row in indices.reshape(-1, indices.shape[-1]):
        assert len(set(row[row >= 0])) == (row >= 0).sum(), "a key is named twice"


def whole(kernel: str, case: Case, library: ArrayLibrary) -> None:
    forward(kernel, case, library)
    backward(kernel, case, library)
    observation(kernel, case, library)


@cache
def spoiled(case: Case) -> bool:
    """Whether some of what comes out, or a sink, is not finite."""
    finite = np.isfinite(case.build()[2].get("sinks", 0.0)).all()
    return not finite or any(np.isnan(part.exact).any() for part in expected(case.name).values())


def quietly(check: Any) -> Any:
    """NumPy says so where something is not finite: expected where a result is spoiled, and an error anywhere else."""

    @wraps(check)
    def held(kernel: str, case: Case, library: ArrayLibrary) -> None:
        with np.errstate(all="ignore" if spoiled(case) else None):
            check(kernel, case, library)

    return held


CHECKS: dict[str, Any] = {"forward": quietly(forward), "gradients": quietly(backward), "observe": quietly(observation)}
