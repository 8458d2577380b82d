"""Few queries over many keys: the compiled kernel reads what they see, and no more."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from budget import check, given
from conformance import INSTRUCTION_SETS, built
from libraries import numbers

import clearhead as ch
from clearhead.core.mask import Mask
from clearhead.core.problem import pose
from clearhead.kernels.compiled import compiled

pytestmark = built
KEYS = 32_768
K, V = np.random.default_rng(5).standard_normal((2, 1, KEYS, 64), dtype=np.float32)
IDS = np.arange(KEYS) // 100


def seen_by_array(queries: int) -> np.ndarray:
    seen = np.zeros((queries, KEYS), bool)
    seen[:, -300:-170] = True
    return seen


# (mask for so many queries) that sees a few hundred keys at most
NARROW: dict[str, Callable[[int], Mask | np.ndarray]] = {
    "window": lambda queries: ch.window(128),
    "lengths": lambda queries: ch.lengths(10),
    "documents": lambda queries: ch.documents(IDS),
    "documents out of order": lambda queries: ch.documents(IDS[::-1].copy()),
    "array": seen_by_array,
    "negated lengths": lambda queries: ~ch.lengths(KEYS - 100),
    "negated band": lambda queries: ~ch.causal(offset=KEYS - 100),
    "negated array": lambda queries: ~ch.where(~seen_by_array(queries)),
    "window and prefix": lambda queries: ch.window(128) | ch.prefix(4),
    "window and global tokens": lambda queries: ch.window(128) | ch.global_tokens([0, 15_000]),
    "window in blocks": lambda queries: ch.window(128) & ch.random_blocks(64, count=350, seed=1),
}


def quickest(call: Callable[[], object]) -> float:
    """Seconds of this process, all threads together: others may have the machine meanwhile."""
    times = []
    for _ in range(5):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def some(queries: int) -> np.ndarray:
    return np.random.default_rng(queries).standard_normal((1, queries, 64), dtype=np.float32)


@cache
def seconds_for_everything(queries: int) -> float:
    return quickest(lambda: ch.attention(some(queries), K, V, kernel="compiled"))


@pytest.mark.parametrize("queries", [1, 4, 5, 30])
@pytest.mark.parametrize("name", NARROW)
def test_only_what_is_seen_is_read(name: str, queries: int) -> None:
    q = some(queries)
    mask = NARROW[name](queries)
    mine = ch.attention(q, K, V, mask=mask, kernel="compiled")
    plain = ch.attention(q, K, V, mask=mask, kernel="dense")
    np.testing.assert_allclose(mine, plain, rtol=1e-4, atol=1e-5)
    problem = pose(q, K, V, mask=mask)
    compiled.run(problem)
    assert compiled.used < K.nbytes / 8, f"{compiled.used:,} bytes of its own"
    took = quickest(lambda: ch.attention(q, K, V, mask=mask, kernel="compiled"))
    assert took < seconds_for_everything(queries)


def test_pieces_that_nobody_sees_may_hold_anything() -> None:
    q = np.ones((1, 2, 64), np.float32)
    k, v = K.copy(), V.copy()
    k[:, 100:-100], v[:, 100:-100] = np.nan, np.inf
    output = ch.attention(q, k, v, mask=ch.window(50) | ch.prefix(7), kernel="compiled")
    assert np.isfinite(numbers(output)).all()


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# what is laid over the scores of so many heads and keys
LAID: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "nothing": lambda heads, keys: {},
    "causal": lambda heads, keys: {"mask": ch.causal()},
    "an offset": lambda heads, keys: {"mask": ch.causal(offset=keys // 2)},
    "a window": lambda heads, keys: {"mask": ch.window(keys // 3 + 1)},
    "an array": lambda heads, keys: {"mask": np.random.default_rng(keys).random((1, heads, 1, keys)) < 0.5},
    "softcap and sinks": lambda heads, keys: {"softcap": 2.0, "sinks": np.linspace(-1, 2, heads, dtype=np.float32)},
    "a bias": lambda heads, keys: {"bias": np.cos(np.arange(float(heads * keys))).reshape(1, heads, 1, keys)},
}
LENGTHS = {64: (17, 129, 515), 128: (33, 257), 32: (31,), 40: (130,), 80: (95,), 256: (300,)}  # for each width
LENGTHS |= {
    60: (67,),
    68: (9,),
    124: (70,),
    132: (35,),
    192: (66,),
}  # on both sides of those that ARM takes as they are


def halves(group: int, keys: int, width: int, queries: int = 1, dtype: Any = BFLOAT16) -> list[np.ndarray]:
    rng = np.random.default_rng(group * keys + width)
    shapes = (1, 2 * group, queries, width), (1, 2, keys, width), (1, 2, keys, width)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def before_the_end(array: np.ndarray) -> np.ndarray:
    """A copy of which the last byte is the last that may be read: the page behind it may not."""
    room = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, room + mmap.PAGESIZE), np.uint8)
    protect = getattr(ctypes.CDLL(None, use_errno=True), "mprotect", None)
    if protect is not None:
        assert protect(ctypes.c_void_p(memory.ctypes.data + room), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = memory[room - array.nbytes : room].view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


# from some number on they go side by side on x86, fewer numbers where nothing is converted
GROUPS = [*product([1, 2, 3, 4, 8, 15, 16, 32, 33, 49], [BFLOAT16, np.float16])]
GROUPS += [*product([4, 11, 12, 16, 33, 49], [np.float32]), *product([4, 5, 6, 9, 25], [np.float64])]


@pytest.mark.parametrize(("group", "dtype"), GROUPS)
@pytest.mark.parametrize("laid", LAID)
def test_heads_that_share_keys(laid: str, group: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for width, lengths in LENGTHS.items():
        for keys in lengths:
            q, k, v = halves(group, keys, width, dtype=dtype)
            options = LAID[laid](2 * group, keys)
            wanted = given(q, k, v, **options)["output"]  # which takes longer than all of the sets
            for isa in INSTRUCTION_SETS:
                monkeypatch.setattr(compiled, "isa", isa)
                output = ch.attention(q, k, v, **options, kernel="compiled")
                check(output, wanted, keys, f"output by {isa}, {width} features, {keys} keys")


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16, np.float32])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("group", [1, 4, 17])
def test_a_value_that_is_not_finite_spoils_its_own_feature(
    group: int, number: float, dtype: Any, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "isa", isa)
    q, k, v = halves(group, 700, 64, dtype=dtype)
    v[0, 1, 600, 17] = number
    output = numbers(ch.attention(q, k, v, kernel="compiled"))
    spoiled = np.zeros(output.shape, bool)
    spoiled[:, group:, :, 17] = True
    assert np.array_equal(~np.isfinite(output), spoiled)
    hidden = ch.attention(q, k, v, mask=ch.lengths(600), kernel="compiled")
    check(hidden, given(q, k[:, :, :600], v[:, :, :600])["output"], 600, "output")
    around = np.arange(700) != 600  # one key alone is hidden, and keys go on behind it
    hidden = ch.attention(q, k, v, mask=around[None], kernel="compiled")
    check(hidden, given(q, k[:, :, around], v[:, :, around])["output"], 700, "output")


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("width", [5, 32, 40, 64, 128, 129])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16, np.float32])
@pytest.mark.parametrize(("group", "queries"), [(4, 2), (1, 1), (8, 2)])
def test_keys_may_end_where_memory_ends(
    group: int, queries: int, dtype: Any, width: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "isa", isa)
    for keys in (1, 2, 15, 16, 17, 65, 513):
        q, k, v = halves(group, keys, width, queries, dtype)
        mine = ch.attention(q, before_the_end(k), before_the_end(v), kernel="compiled")
        np.testing.assert_array_equal(mine, ch.attention(q, k, v, kernel="compiled"))
        turned = [a[:, :, ::-1].copy()[:, :, ::-1] for a in (k, v)]
        np.testing.assert_array_equal(mine, ch.attention(q, *turned, kernel="compiled"))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32])
@pytest.mark.parametrize(("group", "keys"), [(4, 3001), (20, 3001), (6, 17_000), (20, 17_000)])
def test_shared_keys_give_the_same_whatever_the_threads(
    group: int, keys: int, dtype: Any, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "isa", isa)
    q, k, v = halves(group, keys, 72, dtype=dtype)
    mask = ch.window(keys - 501)
    try:
        found = []
        for threads in (1, 2, 7):
            ch.set_threads(threads)
            found.append(ch.attention(q, k, v, mask=mask, kernel="compiled"))
    finally:
        ch.set_threads(None)
    check(found[0], given(q, k, v, mask=mask)["output"], keys, "output")
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def between(array: np.ndarray, axis: int) -> np.ndarray:
    """The same numbers in every other place along an axis of a larger array."""
    room = np.full([2 * n if at == axis else n for at, n in enumerate(array.shape)], np.nan, array.dtype)
    place = tuple(slice(None, None, 2) if at == axis else slice(None) for at in range(array.ndim))
    room[place] = array
    return room[place]


# how keys and values may lie, beside one row after the other
LYING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "heads between rows": lambda array: array.swapaxes(1, 2).copy().swapaxes(1, 2),
    "room between rows": lambda array: between(array, 2),
    "room between features": lambda array: between(array, 3),
    "rows between features": lambda array: array.swapaxes(2, 3).copy().swapaxes(2, 3),
    "backwards": lambda array: array[:, :, ::-1].copy()[:, :, ::-1],
}


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32, np.float64])
@pytest.mark.parametrize("queries", [1, 3])
def test_queries_side_by_side_read_keys_wherever_they_lie(
    queries: int, dtype: Any, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "isa", isa)
    for width in (16, 24, 64):
        q, k, v = halves(18, 700, width, queries, dtype)
        seen = ch.observe(q, k, v, mask=ch.causal(), kernel="compiled")
        wanted = given(q, k, v, mask=ch.causal())
        for name in ("output", "lse", "entropy", "max_score"):
            check(getattr(seen, name), wanted[name], 700, f"{name}, {width} features")
        for laid, lie in LYING.items():
            again = ch.observe(q, lie(k), lie(v), mask=ch.causal(), kernel="compiled")
            for name in ("output", "lse", "entropy", "max_score"):
                found, what = getattr(again, name), f"{name}, {laid}, {width} features"
                if tiled(isa, dtype) and laid.endswith("between features"):
                    check(found, wanted[name], 700, what)
                else:
                    np.testing.assert_array_equal(found, getattr(seen, name), what)
        for axis in (2, 3):  # one key for all, and one feature
            same = np.broadcast_to(k.take([0], axis), k.shape)
            mine = ch.attention(q, same, same, mask=ch.causal(), kernel="compiled")
            if axis == 3 and tiled(isa, dtype):
                check(mine, given(q, same, same, mask=ch.causal())["output"], 700, f"one feature, {width} times")
                continue
            copied = same.copy()
            np.testing.assert_array_equal(mine, ch.attention(q, copied, copied, mask=ch.causal(), kernel="compiled"))


def tiled(isa: str, dtype: Any) -> bool:
    """True where tiles multiply features that lie side by side, and vectors the others, in another order."""
    return isa == "amx" and dtype == BFLOAT16


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("seen", [300, 2000])
def test_a_cache_with_room_for_more_is_shared_among_threads_like_a_full_one(
    seen: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "isa", isa)
    q = np.random.default_rng(3).standard_normal((32, 1, 64), dtype=np.float32)
    full = ch.attention(q, K[:, :seen], V[:, :seen], kernel="compiled")
    np.testing.assert_array_equal(ch.attention(q, K, V, mask=ch.lengths(seen), kernel="compiled"), full)
