"""Calls on PyTorch tensors that are known at a glance, without Python: right, and never where something is unusual."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead as ch
from clearhead.kernels.extension import native

pytestmark = [
    pytest.mark.skipif(native is None, reason="there is no compiled kernel"),
    pytest.mark.skipif(
        not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
        reason="this PyTorch does not let look at its tensors so",
    ),
]
WINDOW = ch.window(2)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    yield
    ch.set_threads(None)


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype) for _ in range(3)]


def known(q: Any, k: Any, v: Any, mask: Any = None, scale: Any = None) -> torch.Tensor | None:
    """What is known of a call at a glance, after some of its kind."""
    for _ in range(2):
        ch.attention(q, k, v, mask=mask, scale=scale)
    found: torch.Tensor | None = native.attend(q, k, v, mask, scale)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, ch.causal(), ch.causal(align="start"), WINDOW], ids=repr)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_output_is_that_of_its_own_tensors(dtype: torch.dtype, mask: Any, scale: float | None) -> None:
    for shape in ((1, 2, 5, 4), (2, 3, 40, 64), (3, 40, 64)):
        for _ in range(2):
            q, k, v = tensors(*shape, dtype=dtype)
            mine = known(q, k, v, mask, scale)
            assert mine is not None
            plain = ch.attention(q, k, v, mask=mask, scale=scale, kernel="compiled")
            assert torch.equal(mine, plain)
            assert mine.dtype == dtype
            assert not mine.requires_grad


def test_strides_heads_and_widths_are_parts_of_a_kind() -> None:
    q, k, v = torch.randn(1, 6, 9, 16), torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 24)
    turned = torch.randn(1, 9, 6, 16).transpose(1, 2)
    for one in (q, turned, q[:, :, ::2], q.flip(2)[:, :, 1:], q):
        found = known(one, k, v)
        assert found is not None
        assert found.shape == (*one.shape[:3], 24)
        torch.testing.assert_close(found, ch.attention(one, k, v, kernel="dense"))
        assert found.is_contiguous()


def test_a_mask_is_known_by_itself_alone() -> None:
    """Another of the same numbers takes longer, and gives the same."""
    q, k, v = tensors(1, 2, 20, 8)
    assert known(q, k, v, WINDOW) is not None
    assert native.attend(q, k, v, ch.window(2), None) is None
    torch.testing.assert_close(ch.attention(q, k, v, mask=ch.window(2)), ch.attention(q, k, v, mask=WINDOW))
    assert ch.causal() is ch.causal()


def test_a_mask_with_arrays_is_known_while_they_are_as_they_were() -> None:
    q, k, v = tensors(1, 2, 20, 8)
    ids = np.arange(20) // 7
    for mask in (ch.documents(ids), ch.causal() & ch.documents(ids) | ch.global_tokens([3])):
        ids[:] = np.arange(20) // 7
        found = known(q, k, v, mask)
        assert found is not None
        assert torch.equal(found, ch.attention(q, k, v, mask=mask, kernel="compiled"))
        ids[19] = 0
        assert native.attend(q, k, v, mask, None) is None
        other = ch.attention(q, k, v, mask=mask)
        assert not torch.equal(other, found)
        torch.testing.assert_close(other, ch.attention(q, k, v, mask=mask, kernel="dense"))
        assert native.attend(q, k, v, mask, None) is not None
        ids[19] = 2
        assert torch.equal(ch.attention(q, k, v, mask=mask), found)


def test_an_array_of_another_shape_or_kind_is_another_mask() -> None:
    q, k, v = tensors(1, 2, 20, 8)
    ids = np.arange(20) // 6
    mask = ch.documents(ids)
    assert known(q, k, v, mask) is not None
    ids.shape = (4, 5)
    assert native.attend(q, k, v, mask, None) is None
    ids.shape = (20,)
    assert native.attend(q, k, v, mask, None) is not None
    ids.dtype = np.uint64
    assert native.attend(q, k, v, mask, None) is None
    strided = np.zeros(40, int)[::2]
    assert known(q, k, v, ch.documents(strided)) is None, "it has no numbers side by side"


def test_few_masks_with_arrays_are_held_on_to() -> None:
    q, k, v = tensors(1, 1, 9, 8)
    masks = [ch.lengths([n % 9]) for n in range(200)]
    for mask in masks:
        ch.attention(q, k, v, mask=mask)
    gone = [weakref.ref(mask) for mask in masks]
    del masks, mask
    gc.collect()
    assert sum(one() is not None for one in gone) <= 64


def test_what_is_unusual_is_left_to_others() -> None:
    q, k, v = tensors(1, 2, 20, 8)
    assert known(q, k, v) is not None
    negative = torch._neg_view(q)
    assert native.attend(negative, k, v, None, None) is None
    torch.testing.assert_close(ch.attention(negative, k, v), ch.attention(-q, k, v))
    learning = q.clone().requires_grad_()
    assert native.attend(learning, k, v, None, None) is None
    assert ch.attention(learning, k, v).requires_grad
    with torch.no_grad():
        assert native.attend(learning, k, v, None, None) is not None
        assert not ch.attention(learning, k, v).requires_grad
    for one in (
        q.numpy(),
        q.tolist(),
        None,
        torch.nn.Parameter(q),
        q.to("meta"),
        q.to_sparse(),
        torch.zeros(1, 2, 0, 8),
    ):
        assert native.attend(one, k, v, None, None) is None
    for scale in (1, True, np.float64(0.5), torch.tensor(0.5), "1"):
        assert native.attend(q, k, v, None, scale) is None
    assert native.attend(q, k, v, np.ones((20, 20), bool), None) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert native.attend(q, k, v, None, None) is None
        assert ch.attention(q, k, v).dtype == torch.bfloat16
    with torch.autograd.forward_ad.dual_level():
        assert native.attend(q, k, v, None, None) is None
    assert native.attend(q, k, v, None, None) is not None


def test_what_is_no_longer_known_at_a_glance_is_still_not_posed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that autocast has made, and parameters: a kind that was seen before."""
    q, k, v = tensors(1, 2, 20, 8)
    learnt = torch.nn.Parameter(q, requires_grad=False)

    def calls() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            first = ch.attention(q, k, v)
        return [first, ch.attention(learnt, k, v)]

    for _ in range(2):
        expected = calls()
    monkeypatch.setattr("clearhead.calls.pose", None)
    for found, right in zip(calls(), expected, strict=True):
        assert torch.equal(found, right)


def test_whoever_hears_of_a_call_still_does() -> None:
    q, k, v = tensors(1, 2, 20, 8)
    assert known(q, k, v) is not None
    heard: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    with Functions():
        ch.attention(q, k, v)
    assert "attention" in heard
    with Dispatched():
        ch.attention(q, k, v)
    assert any("clearhead" in name for name in heard)
    stacked = torch.func.vmap(lambda one: ch.attention(one, k, v))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(stacked[1], ch.attention(2 * q, k, v))

    class Own(torch.Tensor):
        pass

    assert native.attend(q.as_subclass(Own), k, v, None, None) is None


def test_threads_are_those_that_are_allowed_now(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(1, 8, 128, 64)
    expected = known(q, k, v)
    assert expected is not None
    for change in (lambda: ch.set_threads(1), lambda: ch.set_threads(3), lambda: ch.set_threads(None)):
        change()
        assert native.attend(q, k, v, None, None) is None  # it is asked again
        assert torch.equal(ch.attention(q, k, v), expected)
        assert native.attend(q, k, v, None, None) is not None
    monkeypatch.setenv("CLEARHEAD_THREADS", "2")
    assert native.attend(q, k, v, None, None) is None
    assert torch.equal(ch.attention(q, k, v), expected)
    monkeypatch.setenv("CLEARHEAD_THREADS", "none")
    with pytest.raises(ch.ArgumentError, match="CLEARHEAD_THREADS"):
        ch.attention(q, k, v)


def test_surroundings_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLEARHEAD_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    found = [native.surroundings()]
    for name, value in (
        ("CLEARHEAD_THREADS", "1"),
        ("OMP_NUM_THREADS", "1"),
        ("OMP_NUM_THREADS", ""),
        ("OMP_NUM_THREADS", "12"),
    ):
        monkeypatch.setenv(name, value)
        found.append(native.surroundings())
    monkeypatch.delenv("CLEARHEAD_THREADS")
    found.append(native.surroundings())
    assert len(set(found)) == len(found)
    assert 0 not in found


def test_many_threads_at_once_have_their_own_results() -> None:
    given = [tensors(1, 4, 60, 16) for _ in range(8)]
    expected = [ch.attention(*one, kernel="dense") for one in given]
    for one in given[:2]:
        known(*one)
    wrong: list[int] = []

    def work(number: int) -> None:
        found = [ch.attention(*given[number]) for _ in range(200)]
        wrong.extend(number for one in found if not torch.allclose(one, expected[number], atol=1e-5))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []


FORKS = """
import os, torch, clearhead as ch
from clearhead.kernels.extension import native

q, k, v = (torch.randn(1, 8, 64, 64) for _ in range(3))
expected = [ch.attention(q, k, v) for _ in range(3)][-1]
assert native.attend(q, k, v, None, None) is not None
child = os.fork()
if not child:
    right = all(torch.equal(ch.attention(q, k, v), expected) for _ in range(3))
    os._exit(0 if right and native.attend(q, k, v, None, None) is not None else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(native.attend(q, k, v, None, None), expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_that_was_forked_finds_its_own() -> None:
    """In a process of its own: another test may have brought threads that do not take to it."""
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=120)


def test_compiled_models_are_not_looked_at() -> None:
    q, k, v = tensors(1, 2, 20, 8)
    expected = known(q, k, v)
    assert expected is not None
    function = torch.compile(lambda q, k, v: 2 * ch.attention(q, k, v, mask=None), backend="eager", fullgraph=True)
    torch.testing.assert_close(function(q, k, v), 2 * expected)
    causal = torch.compile(lambda q, k, v: ch.attention(q, k, v, mask=ch.causal()), backend="eager", fullgraph=True)
    torch.testing.assert_close(causal(q, k, v), ch.attention(q, k, v, mask=ch.causal()))
