"""What Hopper's own kernels take and why not, without a GPU: by the machine, and by the problem."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hopper_cases import HOPPER_CASES, HOPPER_REFUSED
from interpreted import MARKS
from libraries import LIBRARIES

import clearhead as ch
from clearhead.core.grid import Grid
from clearhead.core.problem import Problem, pose
from clearhead.kernels.contract import rejects_gradients
from clearhead.kernels.gpu import tuning
from clearhead.kernels.hopper import accepts, hopper
from clearhead.kernels.triton import triton

pytestmark = MARKS
TORCH = next(library for library in LIBRARIES if library.name == "torch")
GPU = torch.device("cuda", 0)


def problem(queries: int = 100, head_dim: int = 64, dtype: torch.dtype = torch.float16, **options: Any) -> Problem:
    q, k, v = (torch.zeros((2, 4, n, head_dim), dtype=dtype) for n in (queries, 100, 100))
    return pose(q, k, v, **options)


def test_which_machines() -> None:
    assert accepts.another_machine((9, 0), None) is None
    other = "it is written for Hopper GPUs (compute capability 9.0), and this one has 8.0"
    assert accepts.another_machine((8, 0), None) == other
    assert accepts.another_machine((10, 0), None) == other.replace("8.0", "10.0")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with one GPU, of a compute capability, by CUDA or by some ROCm."""

    def set_up(capability: tuple[int, int], hip: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        accepts.unable.cache_clear()

    yield set_up
    accepts.unable.cache_clear()


def test_amd_is_refused_in_words_though_it_says_nine(machine: Any) -> None:
    machine((9, 4), "6.2.41133")
    words = "it is written for NVIDIA Hopper GPUs, and this one is run by ROCm 6.2.41133"
    assert accepts.unable(GPU) == words
    given = SimpleNamespace(library=SimpleNamespace(name="torch"), q=SimpleNamespace(device=GPU))
    assert hopper.rejects(given) == hopper.rejects_gradients(given) == words


def test_portable_kernels_take_what_hopper_refuses_on_amd(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((9, 4), "6.2.41133")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr("clearhead.kernels.gpu.available.no_gpu", lambda device: None)
    monkeypatch.setattr(accepts, "no_gpu", lambda device: None)
    assert "ROCm" in (hopper.rejects(problem()) or "")
    assert triton.rejects(problem()) is None
    assert rejects_gradients(triton, problem()) is None


def test_an_old_triton_is_named(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((9, 0), None)
    monkeypatch.setitem(sys.modules, "clearhead.kernels.hopper.launch", None)
    assert (accepts.unable(GPU) or "").startswith("this Triton has no Gluon for Hopper")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    accepts.unable.cache_clear()
    x, n = torch.zeros((1, 4, 8)), np.zeros((1, 4, 8))
    assert ch.plan(x, x, x).others["hopper"] == "refused: PyTorch has no CUDA device here"
    assert ch.plan(n, n, n).others["hopper"] == "refused: it takes PyTorch tensors on a GPU, not numpy arrays"
    with pytest.raises(ch.KernelRefused, match="PyTorch has no CUDA device here"):
        ch.attention(x, x, x, kernel="hopper")


REFUSED: dict[str, dict[str, Any]] = {
    "few queries: up to 64 that share keys; `triton` splits the keys": {"queries": 64},
    "it takes float16 and bfloat16, not float32": {"dtype": torch.float32},
    "96 features of a query and 96 of a value are not, padded to 16, both one of 64, 128, 256": {"head_dim": 96},
    "scale -1.0 is not above 0": {"scale": -1.0},
    "it has no dropout; `triton` has": {"dropout": (0.5, 1)},
    "it has no sinks; `triton` has": {"sinks": torch.zeros(4)},
    "it has no bias but ALiBi; `triton` has": {"bias": torch.zeros(100, 100)},
    "scale 1e-30 is too small to divide ALiBi's slopes by": {"bias": ch.alibi(4), "scale": 1e-30},
    "it has a bias only where the keys that a query sees are in one range; `triton` has any": {
        "mask": ch.global_tokens([3]),
        "bias": ch.alibi(4),
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_reasons(reason: str) -> None:
    assert accepts.refusal(problem(**REFUSED[reason])) == reason


def test_gradients_are_left_to_others_where_their_order_matters() -> None:
    assert accepts.refusal_of_gradients(problem(queries=1)) is None
    assert "both one of 64, 128" in (accepts.refusal_of_gradients(problem(head_dim=256)) or "")
    torch.use_deterministic_algorithms(True)
    try:
        assert "in no fixed order" in (accepts.refusal_of_gradients(problem()) or "")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("head_dim", [49, 64, 113, 128, 250])
def test_widths_between_are_padded(head_dim: int) -> None:
    assert accepts.refusal(problem(head_dim=head_dim)) is None


def test_cases_are_refused_for_pinned_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FEW", 0)
    for case in HOPPER_CASES:
        arrays, _, options = case.build()
        posed = pose(*map(TORCH.make, arrays), **TORCH.options(options))
        assert accepts.refusal(posed) == HOPPER_REFUSED["forward"].get(case.name), case
        assert accepts.refusal_of_gradients(posed) == HOPPER_REFUSED["gradients"].get(case.name), case


def test_a_mask_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.core.mask import Mask
    from clearhead.kernels.gpu import key_ranges

    looked = []

    def counted(mask: Mask, grid: Any) -> Any:
        looked.append(mask)
        return original(mask, grid)

    original = key_ranges.key_ranges
    monkeypatch.setattr(key_ranges, "key_ranges", counted)
    mask = ch.documents(np.arange(100) // 37)
    for _ in range(3):
        assert accepts.refusal(problem(mask=mask, bias=ch.alibi(4))) is None
    assert len(looked) == 1


def test_large_peaks_and_products_cancel_in_the_shared_second_look(interpreting: None) -> None:
    """Hopper's totals are relative to the peak exactly, where the factor and the shift are rounded."""
    from clearhead.kernels.gpu.launcher import Launcher
    from clearhead.kernels.gpu.second_look import denominators

    scale, factor = np.float32(0.125), np.float32(0.125 * np.log2(np.e))
    scores = np.float32(8e4) - np.arange(0, 64, 4, dtype=np.float32)
    peak = scores.max() * scale  # rounded
    terms = np.exp(scores.astype(np.float64) * float(scale) - float(peak))
    exact = terms / terms.sum()
    given = torch.tensor([peak]), torch.tensor([terms.sum()], dtype=torch.float32)

    def off(ratio: float | None) -> float:
        shift, inverse = denominators(Launcher(), *given, ratio)
        found = np.exp2(scores.astype(np.float64) * float(factor) - shift.double().numpy()) * inverse.double().numpy()
        return float(np.abs(found / exact - 1).max())

    assert off(float(factor) / float(scale)) < 1e-6
    assert off(None) > 1e-5, "what it is for"


TABLE = np.random.default_rng(0).random((4, 13, 13)) < 0.5  # of blocks of 8: no tile of 128 is all of one kind
HALF = (ch.causal() & ch.lengths([90, 50])) | ch.global_tokens([5])


@pytest.mark.parametrize(
    ("name", "mask", "planes"),
    [
        ("alike", ch.window(9, 9) | ch.global_tokens([5]), 1),
        ("drawn", ch.random_blocks(8, count=3, seed=0) | ch.window(3), 1),
        ("by head", ch.blocks(TABLE, 8), 4),
        ("by row", HALF, 2),
        ("both", HALF | ch.blocks(TABLE, 8), 8),
        ("array by row", ch.where(torch.ones(2, 1, 100, 100, dtype=torch.bool).tril()), 2),
        ("array", ch.where(torch.ones(100, 100, dtype=torch.bool).tril()), 1),
    ],
)
def test_bits_are_counted_for_heads_and_batch_rows_that_differ(
    name: str, mask: ch.Mask, planes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepts, "_too_many", accepts.Cache())
    for most, taken in ((planes * 100 * 100, True), (planes * 100 * 100 - 1, False)):
        monkeypatch.setattr(accepts, "MOST_BITS", most)
        words = accepts.too_many(problem(mask=mask))
        assert words is None if taken else words == "the mask is mixed in too many tiles; `triton` takes any mask"
        monkeypatch.setattr(accepts, "_too_many", accepts.Cache())


def test_whether_bits_are_too_many_is_found_once_for_problems_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(accepts, "_too_many", accepts.Cache())
    monkeypatch.setattr(accepts, "MOST_BITS", 9_999)
    monkeypatch.setattr(accepts, "mixed_pairs", lambda mask, grid, size: found.append(size) or 10**5 // size)
    mask = ch.window(9, 9) | ch.global_tokens([5])
    assert accepts.too_many(problem(mask=mask)) is None
    assert found == [accepts.COARSE]
    assert accepts.too_many(problem(mask=ch.window(9, 9) | ch.global_tokens([5]))) is None
    assert found == [accepts.COARSE]
    assert accepts.too_many(problem(mask=ch.window(9, 9) | ch.global_tokens([6]))) is None
    assert found == [accepts.COARSE] * 2


@pytest.mark.parametrize("coarse", [256, 64])
def test_coarse_tiles_hold_no_fewer_mixed_pairs(coarse: int) -> None:
    grid = Grid((2,), 4, 100, 100)
    for mask in (
        ch.window(9, 9) | ch.global_tokens([5]),
        ch.random_blocks(8, count=3, seed=0) | ch.window(3),
        ~HALF,
        HALF & ch.blocks(TABLE, 8),
    ):
        assert accepts.mixed_pairs(mask, grid, coarse) >= accepts.mixed_pairs(mask, grid, 32)
