"""GPU calls that are made again: what is remembered of a call, when it is forgotten, and how a kernel is launched."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import MARKS

import clearhead as ch

pytestmark = MARKS
KEYS = 600  # so many ids are compared with a copy; fewer would be a part of the key


def arrays(keys: int = KEYS) -> list[torch.Tensor]:
    return [torch.randn((1, 1, n, 16)) for n in (1, keys, keys)]


def remembered() -> Any:
    from clearhead.kernels.gpu import call

    return call._calls.known


def agrees(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    mine, plain = (ch.attention(q, k, v, **options, kernel=name) for name in ("triton", "dense"))
    torch.testing.assert_close(mine, plain)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_mask_that_was_written_to_is_noticed(as_tensor: bool) -> None:
    q, k, v = arrays()
    ids = torch.zeros(KEYS, dtype=torch.int64) if as_tensor else np.zeros(KEYS, dtype=np.int64)
    mask = ch.documents(ids)
    agrees(q, k, v, mask=mask)
    agrees(q, k, v, mask=mask)
    assert len(remembered()) == 1
    ids[: KEYS // 2] = 1
    agrees(q, k, v, mask=mask)
    ids[:] = 0
    agrees(q, k, v, mask=mask & ch.causal())


def test_numbers_of_a_small_mask_are_noticed_too() -> None:
    q, k, v = arrays(40)
    seen = np.array([7])
    mask, bias = ch.lengths(seen), ch.alibi(1)
    agrees(q, k, v, mask=mask, bias=bias)
    seen[0] = 30
    agrees(q, k, v, mask=mask, bias=bias)
    bias.slopes[0] = 3.0
    agrees(q, k, v, mask=mask, bias=bias)


def test_sinks_may_be_strided_or_of_numpy() -> None:
    q, k, v = (torch.randn((1, 3, n, 16)) for n in (2, 9, 9))
    sinks = torch.randn(3, 2)[:, 0]
    for given in (sinks, sinks.numpy()):
        mine = ch.attention(q, k, v, sinks=given, kernel="triton")
        torch.testing.assert_close(mine, ch.attention(q, k, v, sinks=sinks, kernel="dense"))


def test_an_array_as_bias_is_never_remembered_and_as_mask_by_its_numbers() -> None:
    q, k, v = arrays(40)
    allowed, added = torch.ones((1, 40), dtype=torch.bool), torch.zeros((1, 40))
    for options in ({"bias": added}, {"dropout": (0.5, 1)}):
        agrees(q, k, v, **options)
        added[0, 5] += 2.0
        agrees(q, k, v, **options)
    assert not remembered()
    for options in ({"mask": allowed}, {"mask": ~(ch.causal() & allowed)}):
        allowed[:] = True
        agrees(q, k, v, **options)
        allowed[0, 3:9] = False
        agrees(q, k, v, **options)


def test_calls_of_one_kind_are_prepared_once_and_others_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.gpu import call

    prepared = []
    original = call.Call.__init__

    def counted(self: Any, problem: Any) -> None:
        prepared.append(problem)
        original(self, problem)

    monkeypatch.setattr(call.Call, "__init__", counted)
    q, k, v = arrays(40)
    for _ in range(2):
        agrees(q, k, v, mask=ch.causal() & ch.window(9))  # a value: made anew, and known
    assert len(prepared) == 1
    for n, options in enumerate(
        ({"scale": 0.3}, {"softcap": 2.0}, {"mask": ch.window(8)}, {"sinks": torch.ones(1)}), 2
    ):
        agrees(q, k, v, **options)
        assert len(prepared) == n
    agrees(q, k.transpose(-1, -2).contiguous().transpose(-1, -2), v)  # other strides
    apart = torch.randn(k.numel() + 1)[1:].view(k.shape)  # memory that starts at no multiple of 16 bytes
    agrees(q, apart, v)
    assert len(prepared) == 7


def test_neither_tensors_nor_masks_are_kept_alive() -> None:
    q, k, v = arrays()
    mask = ch.documents(np.zeros(KEYS, dtype=np.int64))
    alive = [weakref.ref(x) for x in (q, k, v, mask, mask.keys)]
    sinks = torch.ones(1)
    alive.append(weakref.ref(sinks))
    agrees(q, k, v, mask=mask, sinks=sinks)
    assert len(remembered()) == 1
    del q, k, v, mask, sinks
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6
    agrees(*arrays(8))
    assert len(remembered()) == 1  # what was prepared for a mask goes with it


def test_only_the_last_kinds_are_remembered() -> None:
    from clearhead.core.problem import pose
    from clearhead.kernels.gpu.cache_key import MOST, Cache, CacheKey

    known = Cache()
    q, k, v = arrays(8)
    for n in range(2 * MOST + 1):
        known.keep(CacheKey(pose(q, k, v, scale=1.0 + n)), n)
        if n:
            assert known.get(CacheKey(pose(q, k, v, scale=2.0))) == 1  # what is asked for again stays
    assert len(known.known) == MOST
    assert known.get(CacheKey(pose(q, k, v, scale=1.0 + 2 * MOST))) == 2 * MOST
    assert known.get(CacheKey(pose(q, k, v, scale=4.0))) is None


def test_room_is_what_torch_empty_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.gpu import allocate as room

    for shape in ((2, 3, 5), (0, 4), (1,), torch.Size((3, 1, 2)), ()):
        plain = torch.empty(shape, dtype=torch.bfloat16)
        for quick in (room.QUICK_EMPTY, {}):
            monkeypatch.setattr(room, "QUICK_EMPTY", quick)
            made = room.room(shape, torch.bfloat16, torch.device("cpu"))
            assert (made.shape, made.stride(), made.dtype) == (plain.shape, plain.stride(), plain.dtype)


def test_one_name_is_one_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one name a kernel is launched as it was compiled first: calls that need another one have another name."""
    from clearhead.kernels.gpu.launcher import Launcher

    known: dict[Any, Any] = {}
    launched = Launcher.__call__

    def watched(self: Any, name: Any, kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        numbers = [(a == 1, a % 16 == 0) for a in args if isinstance(a, int)]
        needs = (kernel, options, numbers, [a is None for a in args])
        assert known.setdefault((id(self), name), needs) == needs, f"{name} was another kernel before"
        launched(self, name, kernel, grid, *args, **options)

    monkeypatch.setattr(Launcher, "__call__", watched)
    q, k, v = torch.randn((3, 1, 2, 128, 16)).unbind(0)
    asked: list[dict[str, Any]] = [
        {"map": (4, 3)},
        {"map": (4, 2)},
        {"map": (3, 2)},
        {"received": True},
        {"received": 5},
    ]
    asked += [{"received": True, "map": (1, 2)}, {"received": 5, "map": (4, 2)}, {"top": 1}, {"top": 3}, {}]
    for want in asked:
        seen, right = (ch.observe(q, k, v, **want, kernel=name) for name in ("triton", "dense"))
        for name in {"received", "map"} & set(want):
            torch.testing.assert_close(getattr(seen, name), getattr(right, name))
    assert known


def test_a_map_that_is_made_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.gpu import second_look as look

    q, k, v = torch.randn((3, 1, 7, 40, 16)).unbind(0)
    monkeypatch.setattr(look, "STRIPS", 3 * 5 * 40)  # of three heads at a time
    seen, right = (ch.observe(q, k, v, map=(5, 1), received=True, kernel=name) for name in ("triton", "dense"))
    torch.testing.assert_close(seen.map, right.map)
    torch.testing.assert_close(seen.received, right.received)
