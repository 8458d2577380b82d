"""The GPU kernels in Triton's interpreter, on CPU tensors: the same source that runs on a GPU, held to the same cases.

It is slow, so not every case runs; `test_gpu.py` runs them all where there is a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cases import BY_NAME, Case
from conformance import CHECKS, REFUSED, backward, quietly
from interpreted import MARKS
from libraries import LIBRARIES

import clearhead as ch
from clearhead.core.problem import pose
from clearhead.kernels.gpu.available import depth
from clearhead.kernels.triton import triton

pytestmark = MARKS
TORCH = next(library for library in LIBRARIES if library.name == "torch")

# every kind of mask, bias and option, all dtypes, and the numbers that hurt
FORWARD = (
    "one head, two dimensions",
    "no keys",
    "no queries",
    "wide",
    "float64",
    "float16, rows masked",
    "causal, offset by row",
    "window both ways",
    "documents by row",
    "prefix by row",
    "BigBird",
    "negated",
    "array and causal",
    "NaN before a window",
    "scores of 10⁴, causal",
    "one key",
    "bias by head",
    "bias with −inf",
    "alibi, offset by row",
    "relative bias, offset by row",
    "softcap and bias",
    "sinks, all masked",
    "scale of zero",
    "negative strides",
    "NaN in the last value, causal",
    "NaN here and there, documents",
    "NaN in padding, array, softcap",
    "NaN in padding, negated array",
    "sinks far above, causal",
    "sinks of NaN",
)
GRADIENTS = (
    "bfloat16, everything, two heads",
    "window both ways, one head",
    "prefix by row, one head",
    "NaN before a window, one head",
    "scores of 10⁴, causal, one head",
    "NaN here and there, bfloat16",
    "NaN here and there, array",
    "NaN and inf in dout, causal, one head",
    "NaN in dout of a query without keys",
    "NaN in padding, documents, softcap",
    "sinks of inf",
)
OBSERVE = (
    "one head, two dimensions",
    "heads without batch",
    "37 × 41",
    "one feature",
    "inf in a query, window, one head",
    "NaN here and there, negated",
    "sinks far above, NaN in a key",
)
# as long, and of as many heads, as it takes to meet the edges of small tiles
SMALLER = (
    Case("37 × 41", q=(1, 37, 17), k=(1, 41, 17), v=(1, 41, 7)),
    Case(
        "bfloat16, everything, two heads",
        q=(2, 2, 19, 13),
        k=(2, 1, 23, 13),
        v=(2, 1, 23, 11),
        dtype="bfloat16",
        options=lambda rng: {
            **BY_NAME["everything"].options(rng),
            "bias": ch.alibi(2),
            "sinks": rng.standard_normal(2).astype(np.float32),
        },
    ),
)
# gradients and observations take longest: those that no head matters to have one
ONE_HEAD = (
    "window both ways",
    "prefix by row",
    "NaN before a window",
    "scores of 10⁴, causal",
    "NaN and inf in dout, causal",
    "inf in a query, window",
)
SMALLER += tuple(
    replace(case, name=f"{case}, one head", q=(2, 1, *case.q[2:]), k=(2, 1, *case.k[2:]), v=(2, 1, *case.v[2:]))
    for case in map(BY_NAME.get, ONE_HEAD)
)
BY_NAME.update({case.name: case for case in SMALLER})
SOME = [
    (what, BY_NAME[name])
    for what, names in (("forward", FORWARD), ("gradients", GRADIENTS), ("observe", OBSERVE))
    for name in names
]
# tiles smaller than every case, so that tiles are merged and edges are met
SMALL = {
    "forward": (16, 16),
    "listed": (16, 16),
    "repair": (16, 16),
    "by_key": (16, 16),
    "more_by_key": (16, 16),
    "top": (16, 16),
    "keys": (16, 16),
    "queries": (16, 16),
}
ONCE = quietly(partial(backward, parts=(" of lse",)))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tiles, and no splitting of keys, which few queries would otherwise have."""
    from clearhead.kernels.gpu import tuning

    monkeypatch.setattr(tuning, "FEW", 0)
    monkeypatch.setattr(tuning, "FIXED", {kernel: tuning.Blocks(*size) for kernel, size in SMALL.items()})


@pytest.mark.parametrize(("what", "case"), SOME, ids=str)
@pytest.mark.usefixtures("tiny")
def test_the_kernels_conform(what: str, case: Case) -> None:
    reason = REFUSED.get(("triton", case.name))
    if reason is not None:
        arrays, _, options = case.build()
        with pytest.raises(ch.KernelRefused) as refusal:
            ch.attention(*map(TORCH.make, arrays), **TORCH.options(options), kernel="triton")
        assert refusal.value.reason == reason
        return
    # of gradients those of the output and the log-sum-exp together: half the time, and one case has both alone
    once = what == "gradients" and case.name != "window both ways, one head"
    (ONCE if once else CHECKS[what])("triton", case, TORCH)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("forward", "bfloat16, everything"),
        ("forward", "documents, own query ids"),
        ("observe", "one query, 64 features, lengths"),
        ("forward", "NaN in values, four queries, window"),
        ("forward", "NaN in a value, one query"),
        ("observe", "NaN in padding, one query, grouped"),
        ("forward", "sinks far above, one query"),
    ],
)
def test_few_queries_conform_with_keys_split(what: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.gpu import tuning
    from clearhead.kernels.triton import launch

    monkeypatch.setattr(launch, "TILES", 1)
    monkeypatch.setattr(tuning, "FIXED", {"decode": tuning.Blocks(16, 16)})
    CHECKS[what]("triton", BY_NAME[name], TORCH)


def test_keys_are_split_for_few_heads_only() -> None:
    from clearhead.kernels.triton.launch import split

    assert split(65536, 64, numbers=8, processors=132) == (64, 1024)
    assert split(65536, 64, numbers=1000, processors=132) == (1, 65536)
    assert split(100, 64, numbers=1, processors=132) == (1, 128)


def test_many_top_keys_and_last_queries() -> None:
    q, k, v = torch.randn(3, 1, 70, 16).unbind(0)
    mine, plain = (
        ch.observe(q, k, v, mask=ch.causal(), top=70, received=9, kernel=name) for name in ("triton", "dense")
    )
    torch.testing.assert_close(mine.top.weights, plain.top.weights)
    torch.testing.assert_close(mine.received, plain.received)
    assert torch.equal(mine.top.indices.sort().values, plain.top.indices.sort().values)


def test_gradients_flow_through_autograd() -> None:
    torch.manual_seed(0)
    arrays = [torch.randn(2, 9, 16, requires_grad=True) for _ in range(3)]
    sinks = torch.randn(2, requires_grad=True)
    found = [
        torch.autograd.grad(ch.attention(*arrays, sinks=sinks, kernel=name).sum(), (*arrays, sinks))
        for name in ("triton", "dense")
    ]
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain)


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros((1, 4, 257))
    with pytest.raises(ch.KernelRefused, match="257 features of a query are outside 1 to 256"):
        ch.attention(x, x, x, kernel="triton")
    deep = ch.causal()
    for _ in range(40):
        deep = ch.prefix(1) | deep
    assert depth(deep) == 41
    with pytest.raises(ch.KernelRefused, match="a mask nested 41 deep is above 31"):
        ch.attention(x[..., :8], x[..., :8], x[..., :8], mask=deep, kernel="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert ch.plan(x, x, x).others["triton"] == "refused: PyTorch has no CUDA device here"
    assert ch.plan(x, x, x).others["vendor"] == "refused: PyTorch has no CUDA device here"
    n = np.zeros((1, 4, 8))
    assert ch.plan(n, n, n).others["triton"] == "refused: it takes PyTorch tensors on a GPU, not numpy arrays"
    monkeypatch.setattr("clearhead.kernels.gpu.available.installed", lambda: False)
    assert triton.rejects(pose(x, x, x)) == "Triton is not installed"


def test_measured_blocks_are_kept_in_a_file(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.gpu import tuning

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.measured.cache_clear()
    key = ("bfloat16", 128, 128)
    assert tuning.blocks("forward", key, 4096, (9, 0), "some GPU") == tuning.HOPPER["forward", "half", 128]
    tuning.remember("some GPU", {("forward", "half", 128): tuning.Blocks(64, 32, 4, 5)})
    assert tuning.blocks("forward", key, 4096, (9, 0), "some GPU") == tuning.Blocks(64, 32, 4, 5)
    assert tuning.blocks("forward", key, 4096, (8, 0), "another") == tuning.AMPERE["forward", "half", 128]
    tuning.file().write_text("{")
    tuning.measured.cache_clear()
    assert tuning.measured("some GPU") == {}
    tuning.measured.cache_clear()


@pytest.mark.parametrize("mask", [ch.causal(), ch.window(3, 1), ch.lengths(9)], ids=str)
@pytest.mark.usefixtures("tiny")
def test_outputs_marked_as_not_finite_are_computed_anew(mask: ch.Mask) -> None:
    """As after Hopper's own kernel; what is not marked stays as it is."""
    from clearhead.kernels.gpu.call import Call
    from clearhead.kernels.gpu.repair import repaired
    from clearhead.kernels.triton import launch

    q, k, v = (torch.randn(2, 3, n, 16).half() for n in (37, 41, 41))
    call = Call.of(pose(q, k, v, mask=mask).to_be_differentiated())
    right = launch.forward(call)
    found = right._replace(output=right.output.clone(), unrounded=right.unrounded.clone())
    odd = torch.zeros(2, 3, 37, dtype=torch.int32)
    odd[0, 1, 5] = odd[1, 2, 36] = 1
    found.output[0, 1, :16] = found.output[1, 2, 32:] = float("nan")
    found.output[1, 0, 3] = 7.0
    found.unrounded[0, 1, :16] = float("nan")
    repaired(call, found, odd)
    assert (found.output[1, 0, 3] == 7.0).all()
    found.output[1, 0, 3] = right.output[1, 0, 3]
    assert torch.equal(found.output, right.output)
    assert torch.equal(found.unrounded, right.unrounded)
