"""Calls on a GPU: the same bits, graphs, streams, gradients of every back end, heads side by side, nothing to see."""

from __future__ import annotations

from functools import partial
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from budget import check, expected
from cases import BY_NAME
from libraries import CUDA
from on_gpu import MARKS, OWN, TIMES, by, deterministic, longer, poison, poisoned  # noqa: F401  # a fixture that runs by itself

import clearhead as ch

pytestmark = MARKS


def test_the_same_call_gives_the_same_bits() -> None:
    q, k, v, dout = torch.randn((4, 2, 4, 2000, 64), device="cuda", dtype=torch.bfloat16).unbind(0)
    for kernel in OWN:
        runs = []
        for _ in range(3):
            seen = ch.observe(q, k, v, mask=ch.causal(), kernel=kernel, top=4, received=True, map=(16, 16))
            runs.append([seen.output, seen.lse, seen.entropy, seen.received, *seen.map, *seen.top])
            seen = ch.observe(q, k, v, mask=ch.causal(), kernel=kernel, top=4, received=True)  # by two a block of keys
            runs[-1] += [seen.received, *seen.top]
            runs[-1] += ch.gradients(q, k, v, dout, mask=ch.causal(), kernel="triton")
        for run in runs[1:]:
            assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("mask", [None, ch.causal(), ch.window(70, 9) | ch.global_tokens([1])], ids=str)
def test_outputs_lie_as_queries_do_and_are_mended_there(mask: ch.Mask | None) -> None:
    """Of a model's heads, which lie between its positions; a value that is NaN spoils the queries that see it alone."""
    exact = None
    for asked in ({}, {"top": 3, "received": True}, {"received": True}):
        for lying in ("heads between", "heads before"):
            torch.manual_seed(3)
            q, k, v = (
                torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
            )
            v[1, 2, 290] = torch.nan
            if lying == "heads before":
                q = q.contiguous()
            for _ in range(4):  # the last of which are played
                seen = ch.observe(q, k, v, mask=mask, kernel="hopper", **asked)
            assert seen.output.stride() == q.stride()
            plain = ch.attention(q, k, v, mask=mask, kernel="hopper")
            assert plain.stride() == q.stride()
            assert torch.equal(plain.isnan(), seen.output.isnan())
            if exact is None:
                exact = ch.attention(*(a.float() for a in (q, k, v)), mask=mask, kernel="dense")
            torch.testing.assert_close(seen.output.float(), exact, atol=0.02, rtol=0.02, equal_nan=True)
            torch.testing.assert_close(plain.float(), exact, atol=0.02, rtol=0.02, equal_nan=True)


def test_a_watch_that_plays_calls_is_told_of_numbers_that_are_not_finite() -> None:
    from torch.nn.functional import scaled_dot_product_attention

    class Attends(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    model = Attends()
    for keys, want in product((200, 150, 250), ({}, {"top": 3, "received": True})):  # more keys: some that nobody sees
        q, k, v = (torch.randn(1, 4, n, 64, device="cuda", dtype=torch.bfloat16) for n in (200, keys, keys))
        for spoiled in (None, None, None, 0, 1, 2, None):
            given = [one.clone() for one in (q, k, v)]
            if spoiled is not None:
                given[spoiled][0, 1, 140, 3] = torch.inf
            with torch.no_grad(), ch.watch(model, want=want) as seen:
                model(*given)
                assert len(list(seen)) == 1
            assert bool(seen.missed) == (spoiled is not None), (keys, want, spoiled)


def test_an_observed_call_of_a_kind_that_was_seen_before_is_told_of_its_own_tensors() -> None:
    """From the third call on what was launched is launched again, with nothing else looked at."""
    from clearhead.kernels.prepared import OBSERVED

    kinds: list[dict[str, object]] = [
        {}, {"top": 3}, {"top": 3, "received": True}, {"received": 1}, {"received": True, "map": (4, 5)},
        {"received_max": True, "removal": 7},
    ]  # fmt: skip
    masks = (None, ch.causal(), ch.window(40, 3) | ch.global_tokens([1]))
    for queries, heads in ((1, 2), (150, 4)):
        for mask, asked in product(masks, kinds):
            OBSERVED.clear()  # full, it would grow no further
            for _ in range(5):
                q, k, v = (torch.randn(2, n, 150, 64, device="cuda", dtype=torch.bfloat16) for n in (4, heads, heads))
                q = q[:, :, :queries]
                seen = ch.observe(q, k, v, mask=mask, **asked)
                exact = ch.observe(*(a.float() for a in (q, k, v)), mask=mask, kernel="dense", **asked)
                torch.testing.assert_close(seen.output.float(), exact.output, atol=0.02, rtol=0.02)
                for name in ("lse", "entropy", "max_score", "received", "received_max"):
                    if getattr(exact, name) is not None:
                        torch.testing.assert_close(getattr(seen, name), getattr(exact, name), atol=2e-3, rtol=2e-3)
                if exact.top is not None:
                    torch.testing.assert_close(seen.top.weights, exact.top.weights, atol=1e-3, rtol=2e-3)
            listed = mask is not None and mask != ch.causal()
            if not listed or not {"map", "removal"} & set(asked):  # of those, PyTorch computes a part under such a mask
                assert OBSERVED, f"{asked} of {queries} queries under {mask}"
    needs = q.detach().requires_grad_()
    assert ch.observe(needs, k, v).output.requires_grad
    array = torch.rand(150, 150, device="cuda") < 0.5
    for _ in range(4):  # an array may be written to
        array.logical_not_()
        found, exact = (ch.observe(q, k, v, mask=array, kernel=kernel).lse for kernel in (None, "dense"))
        torch.testing.assert_close(found, exact, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("queries", [1, 16, 64, 65])
def test_few_queries_under_a_union_with_flags(kernel: str, queries: int) -> None:
    """LLVM stopped the process while it compiled up to 64 of them."""
    mask = ch.window(20) | ch.global_tokens([0, 7])
    for width in (64, 128):
        q = torch.randn(1, 4, queries, width, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn((2, 1, 4, 90, width), device="cuda", dtype=torch.bfloat16).unbind(0)
        found = by(kernel, ch.attention, q, k, v, mask=mask)
        exact = ch.attention(q.float(), k.float(), v.float(), mask=mask, kernel="dense")
        torch.testing.assert_close(found.float(), exact, atol=0.02, rtol=0.02)


def seen_before(mask: ch.Mask, dtype: torch.dtype, learns: bool, n: int = 300) -> None:
    """One call and its gradients against the formula in float32."""
    mine = [torch.randn(2, 4, n, 64, device="cuda", dtype=dtype, requires_grad=learns) for _ in range(3)]
    plain = [a.detach().float().requires_grad_(learns) for a in mine]
    found, exact = ch.attention(*mine, mask=mask), ch.attention(*plain, mask=mask, kernel="dense")
    torch.testing.assert_close(found.float(), exact, atol=0.02, rtol=0.02)
    if learns:
        dout = torch.randn_like(found)
        for one, other in zip(
            torch.autograd.grad(found, mine, dout), torch.autograd.grad(exact, plain, dout.float()), strict=True
        ):
            torch.testing.assert_close(one.float(), other, atol=0.06, rtol=0.06)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_call_of_a_kind_that_was_seen_before_is_told_of_its_own_tensors(dtype: torch.dtype, learns: bool) -> None:
    from clearhead.kernels.prepared import ATTENDED

    ATTENDED.clear()
    ids = np.arange(300) // 77
    for mask in (ch.window(40), ch.window(40, 3) | ch.global_tokens([1, 250]), ch.documents(ids), ~ch.causal()):
        held = len(ATTENDED)
        for _ in range(5):
            seen_before(mask, dtype, learns)
        assert len(ATTENDED) == held + 1, mask
    mask = ch.documents(ids)
    for step in range(6):  # an array that is written to makes it another kind
        ids[:] = np.arange(300) // (50 + step // 2)
        seen_before(mask, dtype, learns)
    again = next(one for one in ATTENDED.values())
    if learns:
        assert again.learnt.backward


def test_a_remembered_call_is_checkpointed_and_captured_and_may_be_told_to_be_deterministic() -> None:
    mask = ch.window(40, 3) | ch.global_tokens([1])
    q, k, v = (torch.randn(1, 4, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ch.attention(q, k, v, mask=mask)

    for _ in range(5):  # remembered between a forward and its second run
        once = torch.autograd.grad(torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False).sum(), (q, v))
        plain = torch.autograd.grad(call(q, k, v).sum(), (q, v))
        for one, other in zip(once, plain, strict=True):
            torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)
    with deterministic():
        runs = [torch.autograd.grad(call(q, k, v).sum(), q)[0] for _ in range(4)]
        assert all(torch.equal(runs[0], run) for run in runs[1:])
    with torch.no_grad(), torch.autograd.graph.save_on_cpu():
        expected = call(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(q, k, v)
        graph.replay()
        assert torch.equal(captured, expected)
    with torch.autograd.graph.save_on_cpu():  # what comes back lies elsewhere
        for _ in range(4):
            [dq] = torch.autograd.grad(call(q, k, v).sum(), q)
            torch.testing.assert_close(dq, plain[0], atol=1e-2, rtol=1e-2)


def test_gradients_are_added_up_in_no_order_only_where_they_may_be() -> None:
    if "hopper" not in OWN:
        pytest.skip("only Hopper has a kernel that adds up gradients in no order")
    q, k, v, dout = torch.randn((4, 1, 2, 300, 128), device="cuda", dtype=torch.bfloat16).unbind(0)
    with deterministic(), pytest.raises(ch.KernelRefused, match="in no fixed order"):
        ch.gradients(q, k, v, dout, kernel="hopper")
    ordered, free = (ch.gradients(q, k, v, dout, kernel=name) for name in ("triton", "hopper"))
    for one, other in zip(ordered, free, strict=True):
        assert (one.float() - other.float()).norm() < 0.01 * one.float().norm()


def test_every_back_end_of_the_vendor_gives_gradients() -> None:
    """Each by itself, since which one runs is found out by measuring."""
    from clearhead.kernels.vendor import BACKWARD, FORWARD, one_a_query

    for length, causal in product((64, 130), (False, True)):
        q, k, v, dout = torch.randn((4, 2, 4, length, 64), device="cuda", dtype=torch.bfloat16).unbind(0)
        mask = ch.causal() if causal else None
        exact = ch.gradients(*(x.double() for x in (q, k, v, dout)), mask=mask, kernel="dense")
        for name in FORWARD:
            output, lse = FORWARD[name](q, k, v, causal, 0.125)
            lse = one_a_query(lse, q)
            found = BACKWARD[name](dout, q, k, v, output.contiguous(), lse.contiguous(), causal, 0.125)
            for what, got, best in zip(("dq", "dk", "dv"), found, exact, strict=True):
                off = float((got.double() - best).norm() / best.norm())
                assert off < 2**-6, f"{name} {what}: off by {off:.2g} of its size, a few times bfloat16's 2⁻⁸"


def test_the_vendor_gives_gradients_for_every_width_that_it_takes() -> None:
    for width in (8, 64, 128, 192, 256):
        q, k, v, dout = torch.randn((4, 1, 4, 300, width), device="cuda", dtype=torch.bfloat16).unbind(0)
        exact = ch.gradients(*(x.double() for x in (q, k, v, dout)), kernel="dense")
        for mine, best in zip(ch.gradients(q, k, v, dout, kernel="vendor"), exact, strict=True):
            assert float((mine.double() - best).norm() / best.norm()) < 2**-6, f"{width} features"


def test_few_queries_over_many_keys() -> None:
    for queries in (1, 3):
        longer("bfloat16", 128, "causal", queries=queries, keys=5000)
        longer("float16", 64, "window", queries=queries, keys=3000)


def test_heads_side_by_side() -> None:
    """More causal heads than are worked on at a time, in several rounds, with a last group that is smaller."""
    if "hopper" not in OWN:
        pytest.skip("only Hopper's kernels work on some heads at a time")
    from clearhead.kernels.hopper import schedule as cuts

    for width, waves, heads, flat in product((64, 128), (1, 4), (40, 44), (True, False)):
        q = torch.randn((2, heads, 1100, width), device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn((2, heads // 4, 1100, width), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        wanted = {"received": True, "map": (10, 12) if flat else None, "top": 2}
        with mock.patch.multiple(cuts, WAVES=waves, ROUNDS=4 * waves):
            seen = ch.observe(q, k, v, mask=ch.causal(), kernel="hopper", scale=0.1 + waves / 100, **wanted)
        exact = ch.observe(
            *(x.float() for x in (q, k, v)), mask=ch.causal(), scale=0.1 + waves / 100, kernel="dense", **wanted
        )
        close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-5, check_dtype=False)
        close(seen.lse, exact.lse)
        close(seen.entropy, exact.entropy, atol=1e-4)
        close(seen.received, exact.received)
        if flat:
            close(seen.map, exact.map)
        close(seen.top.weights, exact.top.weights)
        close(seen.output, exact.output, rtol=0.02, atol=0.01)


def test_more_of_the_largest_weights() -> None:
    for kernel, count in product(OWN, (9, 16, 17)):
        longer("bfloat16", 128, "causal", top=count, kernel=kernel)


def test_nothing_to_see() -> None:
    nowhere = ((200, ch.lengths(0)), (200, ch.causal(offset=-500)), (0, None))
    for kernel, (keys, mask) in product(OWN, nowhere):
        if kernel == "hopper" and not keys:
            continue
        q, k, v = (torch.randn((1, 2, n, 64), device="cuda", dtype=torch.bfloat16) for n in (200, keys, keys))
        for _ in range(TIMES + 1):
            poison(2)
            seen = ch.observe(q, k, v, mask=mask, kernel=kernel, received=True)
            nothing = [ch.attention(q, k, v, mask=mask, kernel=kernel), seen.output, seen.entropy, seen.received]
            nothing += ch.gradients(q, k, v, torch.randn_like(q), mask=mask, kernel=kernel)
            assert not any(tensor.any() for tensor in nothing)
            assert (seen.lse == -torch.inf).all()


def test_a_mask_prepared_on_one_stream_serves_another() -> None:
    q, k, v = torch.randn((3, 1, 4, 3000, 64), device="cuda", dtype=torch.bfloat16).unbind(0)
    here = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        mask = ch.documents(np.random.default_rng().integers(0, 9, 3000)) | ch.window(70)  # not one run of keys
        with torch.cuda.stream(here):
            torch.cuda._sleep(20_000_000)  # some 10 ms, which what is prepared waits for
            first = ch.attention(q, k, v, mask=mask, kernel="triton")
        second = ch.attention(q, k, v, mask=mask, kernel="triton")
        torch.cuda.synchronize()
        assert torch.equal(first, second)


def test_a_graph_that_is_captured_and_replayed() -> None:
    held = torch.randn((4, 2, 4, 700, 64), device="cuda", dtype=torch.bfloat16)
    other = torch.randn_like(held)

    def call() -> list[torch.Tensor]:
        q, k, v, dout = held.unbind(0)
        seen = ch.observe(q, k, v, mask=ch.causal(), kernel=OWN[0], received=True, map=(8, 8), top=2)
        few = ch.attention(q[:, :, :1], k, v, kernel="triton")
        plain = ch.attention(q, k, v)  # by vendor
        found = ch.gradients(q, k, v, dout, mask=ch.causal(), kernel="triton")
        return [seen.output, seen.lse, seen.entropy, seen.received, *seen.map, *seen.top, few, plain, *found]

    for times in (0, TIMES):  # calls before: nothing is known yet, all is replayed
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(max(times, 1)):
                call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = call()
        held.copy_(other)
        poison(2)
        graph.replay()
        torch.cuda.synchronize()
        for mine, right in zip(found, call(), strict=True):
            assert torch.equal(mine, right)
        other = torch.randn_like(held)


def test_gradients_of_sinks() -> None:
    case = BY_NAME["sinks"]
    arrays, dout, options = case.build()
    q, k, v = (CUDA.make(a).requires_grad_() for a in arrays)
    sinks = CUDA.make(options["sinks"]).requires_grad_()
    ch.attention(q, k, v, sinks=sinks, kernel="triton").backward(CUDA.make(dout))
    check(q.grad.cpu(), expected("sinks")["dq"], 23, "dq")
    assert torch.isfinite(sinks.grad).all()


def test_what_is_chosen_is_right_from_the_first_call_on() -> None:
    """With gradients, recomputed by a checkpoint, and for a scale that some kernels refuse, in any order."""
    for length, scale in product((130, 1100), (None, -0.1, 0.0)):
        given = torch.randn((4, 2, 4, length, 64), device="cuda", dtype=torch.bfloat16)
        q, k, v, dout = (x.clone().requires_grad_() for x in given.unbind(0))
        mask = ch.causal()
        exact = ch.gradients(*(x.detach().double() for x in (q, k, v, dout)), mask=mask, scale=scale, kernel="dense")
        for _ in range(3):
            run = partial(ch.attention, mask=mask, scale=scale)
            output = torch.utils.checkpoint.checkpoint(run, q, k, v, use_reentrant=False)
            for got, best in zip(torch.autograd.grad(output, (q, k, v), dout), exact, strict=True):
                assert (got.double() - best).norm() <= 2**-6 * best.norm() + 2**-6


# for `test_gpu.py`, which runs them too where there is no pytest
ALONE = (
    test_the_same_call_gives_the_same_bits,
    test_every_back_end_of_the_vendor_gives_gradients,
    test_few_queries_over_many_keys,
    test_the_vendor_gives_gradients_for_every_width_that_it_takes,
    test_gradients_of_sinks,
    test_more_of_the_largest_weights,
    test_heads_side_by_side,
    test_a_graph_that_is_captured_and_replayed,
    test_a_mask_prepared_on_one_stream_serves_another,
    test_nothing_to_see,
    test_gradients_are_added_up_in_no_order_only_where_they_may_be,
    test_what_is_chosen_is_right_from_the_first_call_on,
)
