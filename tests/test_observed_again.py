"""Observed calls of the compiled kernel that come again: right, and never where something is unusual."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from conformance import built

import clearhead as ch
from clearhead.core.observations import OBSERVATIONS
from clearhead.kernels.prepared import OBSERVED

pytestmark = built
RNG = np.random.default_rng(5)
ASKED: list[dict[str, Any]] = [
    {}, {"top": 3}, {"received": True, "map": (3, 4)}, {"received": 2, "top": 2}, {"received_max": True, "removal": 5},
]  # fmt: skip
MASKS = (None, ch.causal(), ch.window(7, 2) | ch.global_tokens([1]), ch.documents(np.arange(30) // 11))


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    OBSERVED.clear()
    yield
    OBSERVED.clear()


def arrays(library: str, dtype: str, *shape: int) -> list[Any]:
    found = [RNG.standard_normal(shape).astype("float64" if dtype == "float64" else "float32") for _ in range(3)]
    if library == "numpy":
        return [a.astype(dtype) for a in found]
    return [torch.from_numpy(a).to(getattr(torch, dtype)) for a in found]


def fields(seen: ch.Observed) -> dict[str, np.ndarray]:
    named = {name: getattr(seen, name) for name in ("output", "lse", "max_score", "entropy")}
    for name, one in OBSERVATIONS.items():
        if (value := getattr(seen, name)) is not None:
            named |= dict(zip(one.names(name), one.arrays(value), strict=True))
    return {name: a.float().numpy() if isinstance(a, torch.Tensor) else a for name, a in named.items()}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_same_bit_by_bit_as_a_call_of_its_own(library: str, dtype: str) -> None:
    for mask, asked in product(MASKS, ASKED):
        OBSERVED.clear()
        for time in range(4):
            q, k, v = arrays(library, dtype, 2, 3, 30, 8)
            seen = ch.observe(q, k, v, mask=mask, **asked)
            # what outputs would be without a key is found from outputs before they are rounded
            assert len(OBSERVED) == (dtype != "float16" or "removal" not in asked), (mask, asked, time)
            expected = fields(ch.observe(q, k, v, mask=mask, kernel="compiled", **asked))
            found = fields(seen)
            assert found.keys() == expected.keys()
            for name, array in found.items():
                np.testing.assert_array_equal(array, expected[name], err_msg=f"{name} {mask} {asked}")
            assert type(seen.output) is type(q)
            assert seen.output.dtype == q.dtype


def test_bfloat16_and_heads_and_batch_rows_that_share_keys() -> None:
    for _ in range(3):
        q, k, v = (a.bfloat16() for a in arrays("torch", "float32", 2, 6, 30, 8))
        k, v = k[:1, :2], v[:1, :2].expand(2, 2, 30, 8)
        seen = ch.observe(q, k, v, mask=ch.causal(), received=True, top=2)
        expected = fields(ch.observe(q, k, v, mask=ch.causal(), received=True, top=2, kernel="compiled"))
        for name, array in fields(seen).items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert len(OBSERVED) == 1


def test_strides_and_dtypes_are_part_of_the_kind() -> None:
    q, k, v = arrays("numpy", "float32", 2, 30, 8)
    turned = [np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1) for a in (q, k, v)]
    expected = ch.observe(q, k, v, received=True, kernel="compiled").received
    for _ in range(3):
        for inputs in ((q, k, v), turned, [a[:, ::-1] for a in (q[:, ::-1], k[:, ::-1], v[:, ::-1])]):
            np.testing.assert_allclose(ch.observe(*inputs, received=True).received, expected, rtol=1e-6)


def test_a_mask_that_is_written_to_is_another() -> None:
    ids = np.arange(30) // 11
    mask = ch.documents(ids)
    q, k, v = arrays("numpy", "float32", 2, 30, 8)
    for size in (3, 3, 5, 5, 30, 30):
        ids[:] = np.arange(30) // size
        seen = ch.observe(q, k, v, mask=mask, top=2)
        exact = ch.observe(q, k, v, mask=ch.documents(ids.copy()), top=2, kernel="compiled")
        np.testing.assert_array_equal(seen.top.weights, exact.top.weights)


def test_gradients_flow_where_they_are_wanted() -> None:
    q, k, v = (a.requires_grad_() for a in arrays("torch", "float32", 1, 2, 30, 8))
    with torch.no_grad():
        for _ in range(3):
            assert not ch.observe(q, k, v, received=True).output.requires_grad
    for _ in range(3):
        seen = ch.observe(q, k, v, received=True)
        assert seen.output.requires_grad
        assert seen.lse.requires_grad


def test_what_is_asked_for_is_still_checked() -> None:
    q, k, v = arrays("numpy", "float32", 2, 30, 8)
    for _ in range(3):
        ch.observe(q, k, v, map=(3, 4))
        for wrong in ({"map": ([3], 4)}, {"map": (0, 4)}, {"top": 0}, {"received": -1}, {"map": (3.0, 4)}):
            with pytest.raises(ch.ArgumentError, match=next(iter(wrong))):
                ch.observe(q, k, v, **wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_threads_at_once_each_have_their_own() -> None:
    inputs = [arrays("numpy", "float32", 2, 300, 16) for _ in range(6)]
    expected = [ch.observe(*some, received=True, top=2, kernel="compiled") for some in inputs]
    ch.observe(*inputs[0], received=True, top=2)
    wrong: list[str] = []

    def work(number: int) -> None:
        for _ in range(20):
            seen = ch.observe(*inputs[number], received=True, top=2)
            if not np.array_equal(seen.received, expected[number].received):
                wrong.append(f"thread {number}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
