"""Calls of a kind that was seen before: they give the same, keep nothing alive, and are never mistaken for another."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from conformance import built

import clearhead as ch
from clearhead.kernels import prepared

pytestmark = built
RNG = np.random.default_rng(5)


def arrays(*shape: int) -> list[np.ndarray]:
    return [RNG.standard_normal(shape, dtype=np.float32) for _ in range(3)]


def layouts(dtype: Any) -> dict[str, list[Any]]:
    """Arrays that lie in different ways, and each kind twice."""
    base = torch.randn(3, 2, 40, 6, 16).to(dtype)
    return {
        "whole": [x.permute(0, 2, 1, 3).contiguous() for x in base],
        "turned": [x.permute(0, 2, 1, 3) for x in base],
        "every second": [x.permute(0, 2, 1, 3)[:, :, ::2] for x in base],
        "one head of keys": [base[0].permute(0, 2, 1, 3), *(x.permute(0, 2, 1, 3)[:, :1] for x in base[1:])],
        "no batch": [x.permute(0, 2, 1, 3)[0] for x in base],
        "broadcast": [base[0].permute(0, 2, 1, 3), *(x.permute(0, 2, 1, 3)[:1] for x in base[1:])],
        "one query": [base[0].permute(0, 2, 1, 3)[:, :, -1:], *(x.permute(0, 2, 1, 3) for x in base[1:])],
    }


OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask": ch.causal()},
    {"mask": ch.causal(align="start")},
    {"mask": ch.window(3)},
    {"scale": 0.5},
    {"scale": 0.25, "mask": ch.window(3, 4)},
    {"mask": ~(ch.causal() & ch.window(5)) | ch.prefix(2)},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_kind_that_was_seen_before_gives_the_same(dtype: torch.dtype) -> None:
    prepared._prepared.clear()
    for options in OPTIONS:
        for name, (q, k, v) in layouts(dtype).items():
            expected = ch.attention(q, k, v, kernel="compiled", **options)
            known = len(prepared._prepared)
            others = [x.clone().normal_() for x in (q, k, v)]
            for x, other in zip(others, (q, k, v), strict=True):
                x.copy_(other)
            for call in ((q, k, v), (q.clone(), k, v), (q, k, v)):
                torch.testing.assert_close(ch.attention(*call, **options), expected, rtol=0, atol=0, msg=name)
            if dtype not in (torch.bfloat16,):
                a, b, c = (x.numpy() for x in (q, k, v))
                for _ in range(2):
                    got = ch.attention(a, b, c, kernel="compiled", **options)
                    np.testing.assert_array_equal(got, expected.numpy(), name)
            assert len(prepared._prepared) >= known
    assert prepared._prepared


def test_prepared_calls_keep_no_array_alive() -> None:
    q, k, v = arrays(2, 90, 32)
    ch.attention(q, k, v, mask=ch.causal())
    ch.attention(q, k, v, mask=ch.causal())
    gone = weakref.ref(q)
    del q
    assert gone() is None


class Odd(ch.Mask):
    """A mask of somebody's own, which kernels are told of pair by pair."""

    def __init__(self, every: int) -> None:
        self.every = every

    def tile(self, rows: range, columns: range, grid: Any) -> Any:
        return (np.arange(rows.start, rows.stop)[:, None] + np.arange(columns.start, columns.stop)) % self.every == 0

    def reason(self, query: int, key: int, grid: Any, at: Any) -> str:
        return f"every {self.every}"


@pytest.mark.parametrize(
    "mask", [Odd(3), ch.lengths([7, 9]), ch.where(RNG.random((1, 1, 9, 9)) < 0.7)], ids=["own", "lengths", "array"]
)
def test_masks_with_arrays_are_looked_at_anew(mask: Any) -> None:
    q, k, v = (torch.randn(2, 2, 9, 8) for _ in range(3))
    expected = ch.attention(q, k, v, mask=mask, kernel="dense")
    for _ in range(3):
        torch.testing.assert_close(ch.attention(q, k, v, mask=mask), expected)
        gc.collect()


SIDE = 290
BY_NUMBERS: dict[str, Callable[[], ch.Mask]] = {
    "global tokens": lambda: ch.window(20, 9) | ch.global_tokens([0, 77, 280]),
    "random blocks": lambda: ch.random_blocks(16, count=2) | ch.global_tokens([5]),
    "blocks": lambda: ch.blocks(np.arange(81).reshape(9, 9) % 5 == 0, 33),
    "blocks by head": lambda: ch.blocks(np.arange(16 * 81).reshape(16, 9, 9) % 7 == 0, 33),
    "documents by row": lambda: ch.documents(np.arange(4 * SIDE).reshape(4, SIDE) // 111),
    "documents, not in order": lambda: ch.documents(np.arange(SIDE) // 37 * 5 % 8) & ch.causal(),
    "lengths": lambda: ch.lengths([290, 0, 7, 100]),
    "prefix": lambda: ch.prefix(9) | ch.window(3),
    "offset by row": lambda: ch.causal(offset=[0, -3, 50, 400]) | ch.global_tokens([1]),
}


@pytest.mark.parametrize("name", BY_NUMBERS)
def test_masks_with_arrays_are_known_again_by_their_numbers(name: str) -> None:
    """As many heads that tasks have several panels, and what panels see is kept for all of them and for later calls."""
    prepared._by_numbers.clear()
    given = [torch.randn(4, 16, SIDE, 16) for _ in range(3)]
    expected = ch.attention(*given, mask=BY_NUMBERS[name](), kernel="tiled")
    first = ch.attention(*given, mask=BY_NUMBERS[name]())
    torch.testing.assert_close(first, expected)
    known = len(prepared._by_numbers)
    assert known
    for count in (1, 2, 5):
        ch.set_threads(count)
        try:
            torch.testing.assert_close(ch.attention(*given, mask=BY_NUMBERS[name]()), first, rtol=0, atol=0)
        finally:
            ch.set_threads(None)
    assert len(prepared._by_numbers) == known, "it is the same kind"


def test_who_writes_to_an_array_of_a_mask_changes_the_mask() -> None:
    prepared._by_numbers.clear()
    ids, given = np.arange(60) // 20, [torch.randn(2, 60, 16) for _ in range(3)]
    mask = ch.documents(ids)
    for _ in range(3):
        torch.testing.assert_close(ch.attention(*given, mask=mask), ch.attention(*given, mask=mask, kernel="tiled"))
        ids[10:31] += 1
    assert len(prepared._by_numbers) == 6, "three kinds, each with its scale given and not"


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_an_array_of_pairs_is_read_again_in_every_call(library: str) -> None:
    """The call is known by which array it is, and not by what the array holds."""
    prepared._by_numbers.clear()
    q, k, v = arrays(2, 60, 16)
    given = [q, k, v] if library == "numpy" else [torch.from_numpy(one) for one in (q, k, v)]
    cells = np.random.default_rng(0).random((60, 60)) < 0.3
    for mask in (ch.where(cells), ch.window(20) & ~ch.where(cells) | ch.documents(np.arange(60) // 20)):
        for count in range(3):
            expected = ch.attention(q, k, v, mask=mask, kernel="tiled")
            np.testing.assert_allclose(np.asarray(ch.attention(*given, mask=mask)), expected, atol=1e-6)
            known = len(prepared._by_numbers)
            np.testing.assert_allclose(np.asarray(ch.attention(*given, mask=mask)), expected, atol=1e-6)
            assert len(prepared._by_numbers) == known > 0
            cells[count * 20 : count * 20 + 20] ^= True
    assert len(prepared._by_numbers) == 4, "two masks, each with its scale given and not"


def test_an_array_of_pairs_is_not_kept_alive_and_never_mistaken_for_another() -> None:
    given = arrays(2, 60, 16)
    for seed in range(20):  # the next one may lie where the last one lay
        cells = np.random.default_rng(seed).random((60, 60)) < 0.5
        gone, mask = weakref.ref(cells), ch.where(cells)
        for _ in range(2):
            found = ch.attention(*given, mask=mask)
            np.testing.assert_allclose(found, ch.attention(*given, mask=mask, kernel="tiled"), atol=1e-6)
        wide = ch.where(cells[:, ::-1])
        np.testing.assert_allclose(
            ch.attention(*given, mask=wide), ch.attention(*given, mask=wide, kernel="tiled"), atol=1e-6
        )
        del cells, mask, wide
        gc.collect()
        assert gone() is None


def test_few_kinds_with_arrays_are_remembered() -> None:
    given = [torch.randn(1, 1, 9, 8) for _ in range(3)]
    for length in range(2 * prepared.FEW):
        ch.attention(*given, mask=ch.lengths([length]))
    assert len(prepared._by_numbers) <= prepared.FEW + 1


def test_what_learns_is_never_taken_from_what_was_prepared() -> None:
    q, k, v = (torch.randn(2, 60, 16) for _ in range(3))
    plain = ch.attention(q, k, v)
    ch.attention(q, k, v)
    learns = q.clone().requires_grad_()
    output = ch.attention(learns, k, v)
    assert output.requires_grad
    torch.testing.assert_close(output.detach(), plain, rtol=0, atol=0)
    with torch.no_grad():
        assert not ch.attention(learns, k, v).requires_grad


def test_a_prepared_call_that_is_running_is_not_disturbed() -> None:
    q, k, v = arrays(4, 500, 32)
    others = arrays(4, 500, 32)
    expected, other = ch.attention(q, k, v), ch.attention(*others)
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda n: ch.attention(*((q, k, v) if n % 2 else others)), range(64)))
    for n, one in enumerate(found):
        np.testing.assert_array_equal(one, expected if n % 2 else other)


def test_wrong_arguments_are_refused_after_right_ones() -> None:
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    for _ in range(2):
        ch.attention(q, k, v, scale=0.5)
    for wrong in (0.5j, "0.5", torch.tensor([0.5, 0.5])):
        with pytest.raises((ch.ArgumentError, TypeError)):
            ch.attention(q, k, v, scale=wrong)  # type: ignore[arg-type]  # which is what is tried
    with pytest.raises(ch.ArgumentError):
        ch.attention(q, k.to("meta"), v, scale=0.5)
