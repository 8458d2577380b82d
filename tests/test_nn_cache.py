"""KVCache: decoding with any cache is the full forward, token by token; and what a cache can be asked to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from budget import within
from torch._dynamo.testing import CompileCounter

import clearhead as ch
from clearhead.nn import KVCache, MultiHeadAttention

N = 17
CHUNKS = {"one by one": [1] * N, "prompt, then one by one": [7] + [1] * (N - 7), "chunks": [3, 5, 1, 6, 2]}
POSITIONS: dict[str, Any] = {
    "none": None,
    "rotary": ch.rotary(),
    "alibi": "alibi",
    "relative": ch.relative_bias(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), max_distance=12),
}
# a cache, and the mask that a full forward needs to see what it keeps
CACHES: dict[str, tuple[Any, Any]] = {
    "growing": (lambda: KVCache(), None),
    "preallocated": (lambda: KVCache(max_length=N), None),
    "ring": (lambda: KVCache(window=4), ch.window(4)),
    "ring of all": (lambda: KVCache(window=N), None),
    "ring with sinks": (lambda: KVCache(window=4, sinks=2), ch.window(4) | ch.prefix(2)),
}


def module(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(1)
    return MultiHeadAttention(24, 6, causal=True, **options)


def decoded(attend: MultiHeadAttention, x: torch.Tensor, cache: KVCache, chunks: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([attend(part, cache=cache) for part in x.split(chunks, dim=1)], dim=1)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("make", "mask"), CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_decoding_is_the_full_forward(make: Any, mask: Any, positions: str, chunks: list[int], kv_heads: int) -> None:
    attend = module(kv_heads=kv_heads, positions=POSITIONS[positions])
    x = torch.randn(2, N, 24)
    exact = copy.deepcopy(attend).double()(x.double(), mask=mask)
    cache = make()
    got = decoded(attend, x, cache, chunks)
    within(got, exact, attend(x, mask=mask), N)
    assert cache.lengths == [N, N]
    precise = decoded(copy.deepcopy(attend).double(), x.double(), make(), chunks)
    within(precise, exact, exact, N, "in float64")


@pytest.mark.parametrize("back", [0, 3, 9])
@pytest.mark.parametrize("make", [KVCache, lambda: KVCache(window=10), lambda: KVCache(window=4)])
def test_a_window_of_the_module_holds_in_every_cache(back: int, make: Any) -> None:
    torch.manual_seed(1)
    attend = MultiHeadAttention(24, 6, kv_heads=2, window=back, positions=ch.rotary()).double()
    x = torch.randn(2, N, 24, dtype=torch.float64)
    cache = make()
    mask = None if cache.window is None else ch.window(cache.window)
    for chunks in CHUNKS.values():
        torch.testing.assert_close(decoded(attend, x, make(), chunks), attend(x, mask=mask))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("make", "mask"), CACHES.values(), ids=CACHES)
def test_rows_of_different_length_are_each_their_own(make: Any, mask: Any, positions: str) -> None:
    attend = module(kv_heads=2, positions=POSITIONS[positions]).double()
    x = torch.randn(3, N, 24, dtype=torch.float64)
    prompt, rest = [7, 3, 1], [[1, 4, 2], [2, 1, 2], [1, 1, 1], [1, 1, 1]]
    taken, cache, found = [0] * 3, make(), [[], [], []]
    with torch.no_grad():
        for lengths in [prompt, *rest]:
            padded = torch.full((3, max(lengths), 24), 7.0, dtype=torch.float64)
            for row, n in enumerate(lengths):
                padded[row, :n] = x[row, taken[row] : taken[row] + n]
            output = attend(padded, cache=cache, lengths=torch.tensor(lengths))
            for row, n in enumerate(lengths):
                found[row].append(output[row, :n])
                taken[row] += n
    assert cache.lengths == taken
    for row, n in enumerate(taken):
        alone = attend(x[row : row + 1, :n], mask=mask)[0]
        torch.testing.assert_close(torch.cat(found[row]), alone)


ALIGNED: dict[str, Any] = {
    "window": ch.window(2),
    "not a window": ~ch.window(2, 1) | ch.prefix(1),
    "Longformer": ch.window(1) | ch.global_tokens([4, 8]),
    "documents": ch.documents([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]),
    "documents by row": ch.documents([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 3, 3, 3, 3, 4, 4, 4]]),
}


@pytest.mark.parametrize("mask", ALIGNED.values(), ids=ALIGNED)
def test_a_mask_follows_rows_of_different_length(mask: Any) -> None:
    attend = module(positions=ch.rotary()).double()
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    full = attend(x, mask=mask)
    cache = KVCache()
    with torch.no_grad():
        attend(x[:, :9], cache=cache, lengths=[9, 5])
        got = attend(torch.stack([x[0, 9:], x[1, 5:7]]), cache=cache, mask=mask)
    torch.testing.assert_close(got, torch.stack([full[0, 9:], full[1, 5:7]]))


def test_a_mask_means_the_same_to_a_compiled_step() -> None:
    torch._dynamo.reset()
    attend = module(positions=ch.rotary()).double()
    x = torch.randn(2, N, 24, dtype=torch.float64)
    step = torch.compile(lambda one, cache, mask: attend(one, cache=cache, mask=mask), fullgraph=True, backend="eager")
    hidden = torch.rand(1, N, generator=torch.Generator().manual_seed(0)) < 0.5
    masks: list[Any] = [lambda n: ch.window(2), lambda n: hidden[:, :n]]
    for mask in masks:
        cache, start = KVCache(max_length=2 * N), 0
        with torch.no_grad():
            for chunk in (5, 1, 4):
                end = start + chunk
                got = step(x[:, start:end], cache, mask(end))
                torch.testing.assert_close(got, attend(x[:, :end], mask=mask(end))[:, start:])
                start = end


def test_a_guess_is_taken_back() -> None:
    attend = module(positions=ch.rotary()).double()
    x = torch.randn(2, N, 24, dtype=torch.float64)
    full = attend(x)
    for cache in (KVCache(), KVCache(max_length=N), KVCache(window=N)):
        decoded(attend, x[:, :6], cache, [6])
        decoded(attend, torch.ones(2, 4, 24, dtype=torch.float64), cache, [4])  # a wrong guess
        cache.trim(6)
        torch.testing.assert_close(decoded(attend, x[:, 6:], cache, [4, 7]), full[:, 6:])
    uneven = KVCache()
    decoded(attend, x[:, :6], uneven, [6])
    uneven.trim([6, 4])
    assert uneven.lengths == [6, 4]
    with torch.no_grad():
        step = torch.stack([x[0, 6], x[1, 4]])[:, None]
        got = attend(step, cache=uneven)
    torch.testing.assert_close(got[:, 0], torch.stack([full[0, 6], full[1, 4]]))
    ring = KVCache(window=4)
    decoded(attend, x, ring, [N])
    with pytest.raises(ch.ArgumentError) as refusal:
        ring.trim(3)
    assert str(refusal.value) == "length: is 3, but the ring has already dropped tokens before that"


@pytest.mark.parametrize(("make", "mask"), CACHES.values(), ids=CACHES)
def test_beams_are_reordered(make: Any, mask: Any) -> None:
    attend = module(positions=ch.rotary()).double()
    x = torch.randn(3, N, 24, dtype=torch.float64)
    cache = make()
    decoded(attend, x[:, :10], cache, [10])
    rows = [2, 0, 0]
    cache.reorder(torch.tensor(rows))
    got = decoded(attend, x[:, 10:], cache, [1] * 7)
    mixed = torch.cat([x[rows, :10], x[:, 10:]], dim=1)
    torch.testing.assert_close(got, attend(mixed, mask=mask)[:, 10:])


def test_padding_needs_no_room() -> None:
    attend = module(positions=ch.rotary()).double()
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    full, cache = attend(x), KVCache(max_length=10)
    with torch.no_grad():
        attend(x[:, :9], cache=cache, lengths=[9, 3])
        padded = torch.stack([torch.cat([x[0, 9:], torch.full((2, 24), torch.nan)]), x[1, 3:6]])
        got = attend(padded, cache=cache, lengths=[1, 3])
        rest = attend(torch.stack([torch.zeros_like(x[1, 6:]), x[1, 6:]]), cache=cache, lengths=[0, 4])
    assert cache.lengths == [10, 10]
    torch.testing.assert_close(got[0, 0], full[0, 9])
    torch.testing.assert_close(torch.cat([got[1], rest[1]]), full[1, 3:])


def test_numbers_may_come_in_tensors_and_one_for_all_rows() -> None:
    cache = KVCache()
    cache.append(X, X, lengths=3)
    assert cache.lengths == [3, 3]
    cache.append(X, X, lengths=torch.tensor([2, 5]))
    assert cache.lengths == [5, 8]
    cache.trim(torch.tensor([4, 8]))
    cache.trim(torch.tensor(7))
    assert cache.lengths == [4, 7]
    cache.reorder([])
    assert cache.lengths == []
    assert cache.k is not None
    assert cache.k.shape[0] == 0


def test_bytes_growth_and_clearing() -> None:
    k, v = torch.zeros(2, 3, 1, 8), torch.zeros(2, 3, 1, 4)
    growing, fixed, ring = KVCache(), KVCache(max_length=100), KVCache(window=10, sinks=2)
    assert (growing.bytes, len(growing)) == (0, 0)
    for _ in range(40):
        for cache in (growing, fixed, ring):
            cache.append(k, v)
    one = 2 * 3 * (8 + 4) * 4
    assert (growing.bytes, fixed.bytes, ring.bytes) == (64 * one, 100 * one, 13 * one)
    assert len(growing) == len(fixed) == len(ring) == 40
    addresses = fixed.k.data_ptr(), ring.k.data_ptr()
    for cache in (growing, fixed, ring):
        cache.clear()
        assert cache.lengths == [0, 0]
        cache.append(k, v)
    assert (fixed.k.data_ptr(), ring.k.data_ptr()) == addresses  # nothing is allocated while decoding


def test_it_prints_what_it_holds() -> None:
    cache = KVCache(max_length=1024)
    assert repr(cache) == "KVCache(max_length=1024): empty"
    cache.append(torch.zeros(2, 8, 5, 64), torch.zeros(2, 8, 5, 32), lengths=[5, 2])
    assert repr(cache) == (
        "KVCache(max_length=1024): 5 / 2 tokens seen in 6.000 MiB, 2 rows × 8 heads of 64 + 32 features"
    )
    assert repr(KVCache(window=4, sinks=1)) == "KVCache(window=4, sinks=1): empty"


def filled(**options: Any) -> KVCache:
    cache = KVCache(**options)
    cache.append(torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5, 4))
    return cache


def one_token() -> KVCache:
    cache = KVCache()
    with torch.no_grad():
        module()(torch.zeros(2, 1, 24), cache=cache)
    return cache


X = torch.zeros(2, 3, 5, 4)
REFUSED: dict[str, Any] = {
    "max_length: is 0, expected a whole number of at least 1": lambda: KVCache(0),
    "max_length: is given together with window, which has a size of its own": lambda: KVCache(5, window=3),
    "sinks: is 2 without a window: everything is kept": lambda: KVCache(sinks=2),
    "max_length: is 7, and 5 positions with 5 more do not fit": lambda: filled(max_length=7).append(X, X),
    "k, v: have shapes (3, 5, 4) and (3, 5, 4), expected (batch, heads, positions, features)": (
        lambda: KVCache().append(X[0], X[0])
    ),
    "k: has shape (1, 3, 5, 4), expected (batch 2, heads 3, positions, features 4) as the cache holds": (
        lambda: filled().append(X[:1], X[:1])
    ),
    "k: is torch.float64 on cpu, expected torch.float32 on cpu as the cache holds": (
        lambda: filled().append(X.double(), X.double())
    ),
    "lengths: is [5, 6], expected 2 numbers from 0 to 5": lambda: KVCache().append(X, X, [5, 6]),
    "lengths: is [2.5, 1], expected a whole number or a list of them": lambda: KVCache().append(X, X, [2.5, 1]),
    "max_length: is 7, and 5 positions with 3 more do not fit": (
        lambda: filled(max_length=7).append(X, X, lengths=[2, 3])
    ),
    "length: is 2.5, expected a whole number or a list of them": lambda: filled().trim(2.5),
    "rows: is [0, 2], expected a list of numbers from 0 to 1": lambda: filled().reorder([0, 2]),
    "rows: is [0, -1], expected a list of numbers from 0 to 1": lambda: filled().reorder([0, -1]),
    "length: is [1], expected a number from 0, or one for each of 2 rows": lambda: filled().trim([1]),
    "k, v: require gradients, which a cache does not carry: decode under torch.no_grad()": (
        lambda: module()(torch.zeros(2, 5, 24), cache=KVCache())
    ),
    "cache: is given to attention that is not causal self-attention": (
        lambda: MultiHeadAttention(24, 6)(torch.zeros(2, 5, 24), cache=KVCache())
    ),
    "mask: has random_blocks(2, count=1, seed=0), which numbers queries from 0 and not after those in the cache": (
        lambda: torch.no_grad()(module())(torch.zeros(2, 1, 24), cache=one_token(), mask=ch.random_blocks(2, count=1))
    ),
    "mask: is given together with a ring, whose keys do not lie in order": (
        lambda: module()(torch.zeros(2, 5, 24), cache=KVCache(window=3), mask=ch.lengths(3))
    ),
}


@pytest.mark.parametrize(("text", "mistake"), REFUSED.items(), ids=lambda v: v if isinstance(v, str) else "")
def test_a_mistake_is_refused_in_one_sentence(text: str, mistake: Any) -> None:
    with pytest.raises(ch.ArgumentError) as refusal:
        mistake()
    assert str(refusal.value) == text


@pytest.mark.parametrize("make", [lambda: KVCache(max_length=N), lambda: KVCache(window=4, sinks=1), KVCache])
def test_a_decoding_step_compiles_in_one_graph(make: Any) -> None:
    torch._dynamo.reset()
    attend = module(kv_heads=2, positions=ch.rotary())
    x = torch.randn(2, N, 24)
    counted = CompileCounter()
    step = torch.compile(lambda one, cache: attend(one, cache=cache), fullgraph=True, backend=counted)
    eager, cache = make(), make()
    want = decoded(attend, x, eager, [1] * N)
    with torch.no_grad():
        got = torch.cat([step(one, cache) for one in x.split(1, dim=1)], dim=1)
    torch.testing.assert_close(got, want)
    assert counted.frame_count <= 5  # empty, the first tokens, any number of them, and where it grows
