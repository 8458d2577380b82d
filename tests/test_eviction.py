"""What a cache keeps by what was attended to: held to an eager reference that has all weights, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.nn import GPT, DifferentialAttention, GPTConfig, KVCache, LatentAttention, MultiHeadAttention
from clearhead.nn.eviction import H2O, TOVA, DropKV, ObservedAttention, Policy, SnapKV, StreamingLLM
from clearhead.nn.places import buckets

BATCH, HEADS, KEY_HEADS, WIDTH = 2, 4, 2, 24
POLICIES: dict[str, Policy] = {
    "h2o": H2O(keep=7, recent=3),
    "observed attention": ObservedAttention(keep=6),
    "snapkv": SnapKV(keep=8, window=3, pool=3),
    "tova": TOVA(keep=5),
    "dropkv": DropKV(keep=6, recent=2),
    "streaming": StreamingLLM(keep=6, sinks=2),
}
CHUNKS = {"prompt and tokens": [13, 1, 1, 1, 1], "chunks": [5, 4, 1, 6, 1], "token by token": [1] * 12}


class Eager:
    """Attention over lists of keys, with the whole matrix; what stays is chosen by sorting, in plain loops."""

    def __init__(self, policy: Policy, attend: MultiHeadAttention | None = None) -> None:
        self.policy, self.attend = policy, attend
        self.keys = [[[] for _ in range(KEY_HEADS)] for _ in range(BATCH)]  # of (position, k, v, score)
        self.seen = 0

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, new = HEADS // KEY_HEADS, q.shape[2]
        output = torch.zeros(BATCH, HEADS, new, v.shape[-1])
        for b in range(BATCH):
            gains = []
            for g in range(KEY_HEADS):
                held = self.keys[b][g]
                held += [[self.seen + t, k[b, g, t], v[b, g, t], 0.0] for t in range(new)]
                positions = torch.tensor([one[0] for one in held])
                keys, values = torch.stack([one[1] for one in held]), torch.stack([one[2] for one in held])
                by_head = []
                for h in range(g * group, (g + 1) * group):
                    far = positions - (self.seen + torch.arange(new))[:, None]
                    scores = q[b, h] @ keys.T / q.shape[-1] ** 0.5 + self.bias(h, far)
                    weights = scores.masked_fill(self.hidden(far), -torch.inf).softmax(-1)
                    output[b, h] = weights @ values
                    by_head.append((weights, output[b, h]))
                gains.append([gain(self.policy, w, values, o) for w, o in by_head])
            self.drop(b, gains, new)
        self.seen += new
        return output

    def bias(self, head: int, far: Tensor) -> Any:
        """What is added to scores, by the distance of a key from its query."""
        if self.attend is None or (self.attend.alibi is None and self.attend.relative is None):
            return 0.0
        if self.attend.alibi is not None:
            return float(self.attend.alibi.slopes[head]) * far
        both, most = self.attend.relative
        table = self.attend.relative_table
        return table[buckets(far, len(table), both, most), head].float()

    def hidden(self, far: Tensor) -> Tensor:
        """Later keys, and those before a window."""
        back = None if self.attend is None else self.attend.window
        return far > 0 if back is None else (far > 0) | (far < -back)

    def drop(self, b: int, gains: list[list[Tensor]], new: int) -> None:
        policy, last = self.policy, self.seen + new - 1
        for g in range(KEY_HEADS):
            held = self.keys[b][g]
            if isinstance(policy, TOVA):
                found = torch.stack([one for some in gains for one in some]).mean(0)
            else:
                found = torch.stack(gains[g]).mean(0) if isinstance(policy, SnapKV) else torch.stack(gains[g]).sum(0)
            for one, more in zip(held, found.tolist(), strict=True):
                one[3] = one[3] + more if policy.carries else more
            if len(held) <= policy.keep or (new == 1 and isinstance(policy, SnapKV | ObservedAttention)):
                continue
            ranks = [rank(policy, held, place, last) for place in range(len(held))]
            order = sorted(range(len(held)), key=lambda place: -ranks[place])
            self.keys[b][g] = [held[place] for place in sorted(order[: policy.keep])]

    @property
    def positions(self) -> Tensor:
        return torch.tensor([[[one[0] for one in held] for held in row] for row in self.keys])


def gain(policy: Policy, weights: Tensor, values: Tensor, output: Tensor) -> Tensor:
    """What a call says of each key, by the definition of a policy."""
    if isinstance(policy, DropKV):
        total = torch.zeros(weights.shape[1])
        for w, o in zip(weights, output, strict=True):
            for j, one in enumerate(w.tolist()):
                if one > 1 - 2**-12:
                    total[j] += o.square().sum()
                elif one:
                    without = (o - one * values[j]) / (1 - one)
                    total[j] += (o - without).square().sum()
        return total
    last = policy.window if isinstance(policy, SnapKV) else 1 if isinstance(policy, TOVA) else len(weights)
    return weights[-last:].sum(0)


def rank(policy: Policy, held: list[Any], place: int, last: int) -> float:
    position, score = held[place][0], held[place][3]
    if isinstance(policy, StreamingLLM):
        return float("inf") if position < policy.sinks else position
    if position > last - policy.protected:
        return float("inf")
    if isinstance(policy, ObservedAttention):
        return score / (last - position + 1)
    if isinstance(policy, SnapKV):
        half = policy.pool // 2
        near = [held[n] for n in range(max(place - half, 0), min(place + half + 1, len(held)))]
        return sum(one[3] for one in near if one[0] <= last - policy.window) / policy.pool
    return score


def layer(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(3)
    made = MultiHeadAttention(WIDTH, HEADS, kv_heads=KEY_HEADS, causal=True, **options).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


LAYERS: dict[str, dict[str, Any]] = {
    "no positions": {},
    "rotary": {"positions": ch.rotary()},
    "alibi": {"positions": "alibi"},
    "relative, window": {"positions": "relative", "window": 10},
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_the_keys_kept_are_those_of_an_eager_reference(name: str, kind: str, chunks: list[int]) -> None:
    policy, attend = POLICIES[name], layer(**LAYERS[kind])
    cache, eager = KVCache(keep=policy), Eager(policy, attend)
    x, start = torch.randn(BATCH, sum(chunks), WIDTH), 0
    for part in x.split(chunks, dim=1):
        q, k, v = attend.project(part, None, None)
        if attend.rotary is not None:
            places = torch.arange(start, start + part.shape[1])
            q, k = attend.rotary(q, places), attend.rotary(k, places)
        expected = attend.out_proj(eager.step(q, k, v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(attend(part, cache=cache), expected)
        start += part.shape[1]
        assert cache.positions is not None
        assert torch.equal(cache.positions, eager.positions)
        assert cache.lengths == [start] * BATCH
    held = cache.positions.shape[-1]
    assert held == policy.keep if policy.decodes else held >= policy.keep


@pytest.mark.parametrize(
    "positions", [None, ch.rotary(), "relative", "alibi"], ids=["none", "rotary", "relative", "alibi"]
)
@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_a_cache_that_has_room_for_all_is_no_other(name: str, positions: Any) -> None:
    policy = POLICIES[name]
    roomy = type(policy)(**{**vars(policy), "keep": 40})
    attend = layer(positions=positions)
    caches = KVCache(keep=roomy), KVCache()
    for part in torch.randn(BATCH, 20, WIDTH).split([9, 1, 1, 8, 1], dim=1):
        torch.testing.assert_close(*(attend(part, cache=cache) for cache in caches))
    ragged = KVCache(keep=roomy), KVCache()
    x = torch.randn(BATCH, 9, WIDTH)
    for cache in ragged:
        attend(x, cache=cache, lengths=[9, 4])
    for part in torch.randn(BATCH, 6, WIDTH).split([1, 4, 1], dim=1):
        torch.testing.assert_close(*(attend(part, cache=cache) for cache in ragged))


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_padding_is_dropped_first_and_never_seen(name: str) -> None:
    attend, cache = layer(positions=ch.rotary()), KVCache(keep=POLICIES[name])
    alone, x = KVCache(keep=POLICIES[name]), torch.randn(BATCH, 12, WIDTH)
    attend(x, cache=cache, lengths=[12, 10])
    attend(x[1:, :10], cache=alone)
    for part in torch.randn(BATCH, 4, WIDTH).split(1, dim=1):
        torch.testing.assert_close(attend(part, cache=cache)[1:], attend(part[1:], cache=alone))
    real = cache.positions[1]
    assert torch.equal(real[real >= 0].reshape(KEY_HEADS, -1)[:, -3:], alone.positions[0][:, -3:])


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_rows_of_other_lengths_keep_what_they_would_keep_alone(name: str) -> None:
    """Prompts that are padded, one after the other: padding between a row's tokens is no neighbour of theirs."""
    policy = POLICIES[name]
    roomy = type(policy)(**{**vars(policy), "keep": 9})  # so that padding stays for a while
    for kept in (policy, roomy):
        attend, cache = layer(positions=ch.rotary()), KVCache(keep=kept)
        alone = [KVCache(keep=kept) for _ in range(BATCH)]
        for lengths in ([4, 2], [2, 4], [6, 3], [1, 1], [3, 7], [1, 1]):
            x = torch.randn(BATCH, max(lengths), WIDTH)
            output = attend(x, cache=cache, lengths=lengths)
            for row, (own, real) in enumerate(zip(alone, lengths, strict=True)):
                torch.testing.assert_close(output[row, :real], attend(x[row : row + 1, :real], cache=own)[0])
        for row, own in enumerate(alone):
            for head in range(KEY_HEADS):
                held = cache.positions[row, head]
                assert torch.equal(held[held >= 0], own.positions[0, head])


@torch.no_grad()
def test_last_queries_that_are_others_in_each_row_are_refused_where_nothing_says_so() -> None:
    class Late(Policy):
        wants: ClassVar[dict[str, Any]] = {"removal": 2}

    cache, x = KVCache(keep=Late(keep=3)), torch.randn(BATCH, 6, WIDTH)
    with pytest.raises(ch.ArgumentError, match="keep: asks for removal of the last 2 queries"):
        layer()(x, cache=cache, lengths=[6, 4])
    assert cache.positions is None
    layer()(x, cache=cache)
    assert cache.positions.shape[-1] == 3


def state(cache: KVCache) -> Any:
    return copy.deepcopy((cache.k, cache.v, cache.seen, cache.kept.state if cache.kept else None)), repr(cache)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_a_refused_call_leaves_the_cache_as_it_was(name: str) -> None:
    attend, cache = layer(), KVCache(keep=POLICIES[name])
    attend(torch.randn(BATCH, 9, WIDTH), cache=cache)
    before, more = state(cache), torch.randn(BATCH, 1, WIDTH)
    refused: list[Callable[[], Any]] = [
        lambda: attend(more, cache=cache, mask=torch.ones(1, 1, dtype=torch.bool)),
        lambda: attend(more, cache=cache, lengths=[2, 2]),
        lambda: attend(more, cache=cache, lengths="two"),
        lambda: attend(more, cache=cache, observe={"top": 0}),
        lambda: attend(more, cache=cache, return_weights=True),
        lambda: attend(more.repeat(2, 1, 1), cache=cache),
        lambda: attend(more.double(), cache=cache),
        lambda: cache.append(torch.zeros(BATCH, 3, 1, 6), torch.zeros(BATCH, 3, 1, 6)),
        lambda: cache.append(torch.zeros(0, KEY_HEADS, 1, 6), torch.zeros(0, KEY_HEADS, 1, 6)),
        lambda: cache.trim(3),
        lambda: cache.trim([1]),
        lambda: cache.reorder([2]),
        lambda: cache.reorder("ab"),
    ]
    for call in refused:
        with pytest.raises((ch.ArgumentError, RuntimeError)):
            call()
        assert same(state(cache), before)
    if POLICIES[name].asked(1):
        with pytest.raises(ch.ArgumentError, match="the cache's policy needs"):
            attend(more, cache=cache, observe=dict.fromkeys(POLICIES[name].asked(1), 2))
        assert same(state(cache), before)

    def fails(*_: Any) -> None:
        raise MemoryError

    handle = attend.out_proj.register_forward_pre_hook(fails)
    with pytest.raises(MemoryError):
        attend(more, cache=cache)
    handle.remove()
    assert same(state(cache), before)


CACHES = {
    "growing": {},
    "preallocated": {"max_length": 12},
    "ring": {"window": 4},
    "with sinks": {"window": 3, "sinks": 2},
}


@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_what_a_cache_itself_refuses_leaves_it_as_it_was(kind: str) -> None:
    cache = KVCache(**CACHES[kind])
    for filled in (0, 9):
        if filled:
            cache.append(torch.randn(2, 3, filled, 4), torch.randn(2, 3, filled, 5))
        before = state(cache)
        wrong = [((2, 3, 1, 4), (2, 3, 2, 5)), ((3, 1, 4), (3, 1, 5)), ((0, 3, 1, 4), (0, 3, 1, 5))]
        wrong += [((1, 3, 1, 4), (1, 3, 1, 5)), ((2, 3, 1, 4), (2, 3, 1, 6))] if filled else []
        wrong += [((2, 3, 13, 4), (2, 3, 13, 5))] if kind == "preallocated" else []
        for k, v in wrong:
            with pytest.raises(ch.ArgumentError):
                cache.append(torch.randn(k), torch.randn(v))
            assert same(state(cache), before)
        good = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 5)
        for lengths in ([2, 1], [1], [-1, 0], "ab", 0.5):
            with pytest.raises(ch.ArgumentError):
                cache.append(*good, lengths)
            assert same(state(cache), before)
        with torch.enable_grad(), pytest.raises(ch.ArgumentError, match="require gradients"):
            cache.append(good[0].requires_grad_(), good[1])
        assert same(state(cache), before)
        if filled:
            with pytest.raises(ch.ArgumentError):
                cache.append(good[0].detach().double(), good[1])
            for rows in ([2], [-1], "a", 1):
                with pytest.raises(ch.ArgumentError):
                    cache.reorder(rows)
            for length in (-1, [1], "a"):
                with pytest.raises(ch.ArgumentError):
                    cache.trim(length)
            if "window" in CACHES[kind]:
                with pytest.raises(ch.ArgumentError, match="already dropped"):
                    cache.trim(3)
            assert same(state(cache), before)


@torch.no_grad()
def test_rows_that_live_on_and_a_cleared_cache() -> None:
    attend, cache, one = layer(), KVCache(keep=H2O(5, recent=2)), KVCache(keep=H2O(5, recent=2))
    x, more = torch.randn(BATCH, 9, WIDTH), torch.randn(1, 1, WIDTH)
    attend(x, cache=cache)
    attend(x[1:], cache=one)
    cache.reorder([1, 1])
    torch.testing.assert_close(attend(more.expand(2, -1, -1), cache=cache)[:1], attend(more, cache=one))
    assert torch.equal(cache.positions[0], one.positions[0])
    cache.clear()
    assert "empty" in repr(cache)
    attend(x[:1], cache=cache)
    assert cache.lengths == [9]


@torch.no_grad()
def test_a_gpt_generates_with_less() -> None:
    model = GPT(GPTConfig(vocabulary=11, context=64, layers=2, heads=2, width=16)).eval()
    tokens = torch.randint(11, (2, 20))
    made: list[list[KVCache]] = []

    def caches() -> list[KVCache]:
        made.append(model.caches(keep=H2O(8, recent=4)))
        return made[-1]

    assert model.generate(tokens, 10, cache=caches).shape == (2, 30)
    assert all(cache.positions.shape[-1] == 8 and "8 held" in repr(cache) for cache in made[0])


def test_bad_input_in_one_sentence() -> None:
    for make, text in [
        (lambda: KVCache(keep=3), "keep: is 3, expected a policy of clearhead.nn.eviction"),
        (lambda: KVCache(9, keep=TOVA(3)), "max_length: is given together with keep"),
        (lambda: KVCache(window=9, keep=TOVA(3)), "window: is given together with keep"),
        (lambda: H2O(0), "keep: is 0, expected a whole number of at least 1"),
        (lambda: H2O(4, recent=5), "recent: is 5, expected at most keep, 4"),
        (lambda: SnapKV(40, pool=4), "pool: is 4, expected an odd number"),
        (lambda: StreamingLLM(3), "sinks: is 4, expected at most keep, 3"),
    ]:
        with pytest.raises(ch.ArgumentError, match=text):
            make()
    for attend in (LatentAttention(24, 4, kv_rank=8, rotary_dim=4), DifferentialAttention(24, 2, causal=True)):
        with torch.no_grad(), pytest.raises(ch.ArgumentError, match="MultiHeadAttention says so"):
            attend.eval()(torch.randn(1, 2, 24), cache=KVCache(keep=TOVA(3)))


@torch.no_grad()
def test_a_picture_of_what_was_kept() -> None:
    attend, cache = layer(), KVCache(keep=H2O(5, recent=2))
    with pytest.raises(ch.ArgumentError, match="cache: is KVCache that dropped nothing yet"):
        ch.plot_kept(cache)
    attend(torch.randn(BATCH, 11, WIDTH), cache=cache)
    ax = ch.plot_kept(cache, row=1)
    image = ax.get_images()[0].get_array()
    assert image.shape == (KEY_HEADS, 11)
    for head in range(KEY_HEADS):
        assert image[head].nonzero()[0].tolist() == cache.positions[1, head].tolist()
    assert ax.get_title() == "5 of 11 tokens kept a head"
    two = ch.plot_kept([cache, cache], tokens=[f"t{n}" for n in range(12)])
    assert two.get_images()[0].get_array().shape == (2 * KEY_HEADS, 12)
    assert [label.get_text() for label in two.get_yticklabels()] == ["0.0", "0.1", "1.0", "1.1"]
    with pytest.raises(ch.ArgumentError, match="tokens: has 3 words, expected one for each of 11 tokens"):
        ch.plot_kept(cache, tokens=["a", "b", "c"])
    with pytest.raises(ch.ArgumentError, match="row: is 2, expected one of 2 batch rows"):
        ch.plot_kept(cache, row=2)
