"""Masks of keys that lie apart, taken apart into sequences: the same numbers, at the cost of what is let through."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from budget import LAST, TOP, check, expected
from cases import BY_NAME, DV, GROUPED, SQUARE, B, Case, D, H, S, T
from conformance import INSTRUCTION_SETS, backward, built, check_top, forward, quietly
from libraries import LIBRARIES, ArrayLibrary, numbers

import clearhead as ch
from clearhead.core.combs import MOST, combed, combs_of, pairs, shares
from clearhead.core.grid import Alignment, Grid
from clearhead.core.mask import Mask
from clearhead.core.observations import want
from clearhead.core.problem import pose
from clearhead.kernels import apart
from clearhead.kernels import choose as choosing
from clearhead.kernels.apart import Apart, Calls
from clearhead.kernels.choose import choose
from clearhead.kernels.compiled import compiled

RAN: list[str] = []


@pytest.fixture(autouse=True)
def however_little_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Apart.run

    def counted(self: Apart, problem: Any) -> Any:
        RAN.append(self.name)
        return run(self, problem)

    monkeypatch.setattr(apart, "WORTH", dict.fromkeys(apart.WORTH, 0))
    monkeypatch.setattr(apart, "KEYS", 0)
    monkeypatch.setattr(apart, "SEQUENCE", dict.fromkeys(apart.WORTH, 0))
    monkeypatch.setattr(Apart, "run", counted)
    RAN.clear()


def masked(mask: Mask, **more: Any) -> Any:
    return lambda rng: {"mask": mask, **{name: make(rng) for name, make in more.items()}}


def sinks(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(6).astype(np.float32)


def far_apart(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    q *= 10**4 / np.abs(q @ np.swapaxes(k, -1, -2)).max() * np.sqrt(D)


def not_seen(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    v[..., 5, :] = np.nan


CUT = (
    Case("comb of four", **SQUARE, options=masked(ch.dilated(4))),
    Case("comb of four, float64", **SQUARE, dtype="float64", options=masked(ch.dilated(4))),
    Case("comb of four, bfloat16", **SQUARE, dtype="bfloat16", options=masked(ch.dilated(4))),
    Case("comb of three, grouped", **GROUPED, options=masked(ch.dilated(3, 4, 1), sinks=sinks)),
    Case("comb of five, heads without batch", q=(H, T, D), k=(H, S, D), v=(H, S, DV), options=masked(ch.dilated(5))),
    Case("comb of two, one head", q=(T, D), k=(S, D), v=(S, DV), options=masked(ch.dilated(2, 6, offset=-3))),
    Case("comb of six, one query", q=(B, H, 1, D), options=masked(ch.dilated(6))),
    Case("comb of six, three queries", q=(B, H, 3, D), options=masked(ch.dilated(6, 2))),
    Case("comb of seven, more queries", q=(B, H, 29, D), options=masked(ch.dilated(7, 2, 1, align="start"))),
    Case("comb and causal, batch broadcasts", k=(1, H, S, D), v=(1, H, S, DV),
         options=masked(ch.causal() & ch.dilated(3, 5, 5))),
    Case("comb, softcap and scale", options=lambda rng: {"mask": ch.dilated(4), "softcap": 2.5, "scale": 0.7}),
    Case("comb, scores of 10⁴", **SQUARE, options=masked(ch.dilated(4)), prepare=far_apart),
    Case("comb, NaN in a value", **SQUARE, options=masked(ch.dilated(4)), prepare=not_seen),
    Case("comb, laid out otherwise", **SQUARE, layout="strided", options=masked(ch.dilated(3))),
    Case("comb, backwards in memory", **SQUARE, layout="reversed", options=masked(ch.dilated(3))),
    Case("strides of five", **SQUARE, options=masked(ch.strided(5))),
    Case("strides of five, float16", **SQUARE, dtype="float16", options=masked(ch.strided(5))),
    Case("strides of five, bfloat16", **SQUARE, dtype="bfloat16", options=masked(ch.strided(5))),
    Case("strides, scores of 10⁴", **SQUARE, options=masked(ch.strided(5)), prepare=far_apart),
    Case("strides, NaN in a value", **SQUARE, options=masked(ch.strided(5)), prepare=not_seen),
    Case("strides, two batch axes", q=(2, 3, 5, T, D), k=(2, 3, 5, S, D), v=(2, 3, 5, S, DV),
         options=masked(ch.strided(4))),
    Case("a window beside a comb, grouped", **GROUPED, options=masked(ch.window(3, 2) | ch.dilated(4, None, 3))),
)  # fmt: skip
CUT += tuple(
    replace(BY_NAME[name], name=f"{name}, cut") for name in ("dilated", "dilated both ways", "strides of four")
)
BY_NAME.update({case.name: case for case in CUT})
SPOILED = [case for case in CUT if case.prepare in (far_apart, not_seen)]  # of which `gradients` is asked above
ONE_COMB = [case for case in CUT if not any(word in case.name for word in ("strides", "beside"))]

RUNS = [("compiled", library) for library in LIBRARIES if library.name in ("numpy", "torch")]
RUNS += [(f"compiled {isa}", LIBRARIES[0]) for isa in INSTRUCTION_SETS]


@pytest.fixture
def kernel(run: str, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, isa = run.partition(" ")
    monkeypatch.setattr(compiled, "isa", isa)
    return name


def observation(kernel: str | None, case: Case, library: ArrayLibrary) -> None:
    """What can be found of sequences: with what is found of weights, and without."""
    arrays, _, options = case.build()
    q, k, v = map(library.make, arrays)
    options = library.options(options)
    keys, want = max(k.shape[-2], q.shape[-2]), expected(case.name)
    more = {"top": TOP, "received": True, "received_max": True, "removal": True}
    weights = numbers(ch.observe(q, k, v, **options, kernel="dense", weights=True).weights)
    for asked in (more, {}, {"top": TOP}, {"received": True}):
        seen = ch.observe(q, k, v, **options, kernel=kernel, **asked).each(numbers)
        for what in ("output", "lse", "max_score", "entropy", *asked):
            if what == "top":
                check_top(seen.top, weights, want["top"], keys)
            else:
                check(getattr(seen, what), want[what], keys, what)


@built
@pytest.mark.parametrize("case", CUT, ids=str)
@pytest.mark.parametrize(("run", "library"), RUNS, ids=str)
def test_sequences_conform(case: Case, kernel: str, library: ArrayLibrary) -> None:
    assert case.dtype in library.dtypes
    for hold, times in ((forward, 1), (backward, 2), (observation, 4)):
        RAN.clear()
        quietly(hold)(kernel, case, library)
        assert len(RAN) == times, "it was not taken apart"


@pytest.mark.parametrize("case", [case for case in CUT if case.dtype == "float32"], ids=str)
@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_whichever_kernel_is_chosen(case: Case, library: ArrayLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """With arrays of JAX, and of a library that has the array API and no more."""
    monkeypatch.setattr(choosing, "SMALL", 0)  # where the formula would be the fastest
    quietly(forward)(None, case, library)  # type: ignore[arg-type]  # it is chosen
    quietly(observation)(None, case, library)
    assert RAN or (library.name == "jax" and case not in ONE_COMB)


@built
@pytest.mark.parametrize("case", [case for case in CUT if case.dtype == "float32" and case not in SPOILED], ids=str)
def test_gradients_of_pytorch(case: Case) -> None:
    arrays, dout, options = case.build()
    options = {name: torch.from_numpy(one) if isinstance(one, np.ndarray) else one for name, one in options.items()}
    found = {}
    for kernel in ("compiled", "dense"):
        given = [torch.from_numpy(np.ascontiguousarray(a)).requires_grad_() for a in arrays]
        if "sinks" in options:
            options["sinks"] = options["sinks"].detach().clone().requires_grad_()
            given.append(options["sinks"])
        output = ch.attention(*given[:3], **options, kernel=kernel)
        output.backward(torch.from_numpy(dout.reshape(output.shape)))
        found[kernel] = [one.grad for one in given]
    assert RAN
    for mine, right in zip(found["compiled"], found["dense"], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


@pytest.mark.parametrize("batch", [(1, 1), (2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("length", [(32, 32), (37, 37), (20, 33), (5, 40)], ids=str)
@pytest.mark.parametrize("mask", [ch.dilated(4), ch.dilated(5, 3, 1), ch.dilated(4, None, 2, offset=3)], ids=str)
def test_calls_of_parts(batch: tuple[int, int], length: tuple[int, int], mask: Mask) -> None:
    """As on a GPU, where each part is a call that is remembered; gradients flow through what cuts and joins."""
    (rows, sharing), (queries, keys) = batch, length
    torch.manual_seed(0)
    q = torch.randn(rows, 4, queries, 16, dtype=torch.float64)
    k, v = torch.randn(2, sharing, 2, keys, 16, dtype=torch.float64)
    calls = Calls.of(pose(q, k, v, mask=mask), ch.attention, scale=None)
    assert calls is not None
    mine, right = ([a.clone().requires_grad_() for a in (q, k, v)] for _ in range(2))
    for output in (calls(*mine), ch.attention(*right, mask=mask, kernel="dense")):
        output.square().sum().backward()
    torch.testing.assert_close(calls(q, k, v), ch.attention(q, k, v, mask=mask, kernel="dense"))
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    wanted: dict[str, Any] = {"top": 3, "received": True, "received_max": True, "removal": True}
    calls = Calls.of(pose(q, k, v, mask=mask, want=partial(want, **wanted)), ch.observe, scale=None)
    assert calls is not None
    seen, exact = calls(q, k, v), ch.observe(q, k, v, mask=mask, kernel="dense", **wanted)
    for what in ("output", "lse", "max_score", "entropy", "received", "received_max", "removal", "top"):
        torch.testing.assert_close(getattr(seen, what), getattr(exact, what))


@built
def test_compiled_by_pytorch_and_by_jax() -> None:
    import jax

    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 37, 16)).astype(np.float32)
    for mask in (ch.dilated(4), ch.strided(5)):
        right = ch.attention(q, k, v, mask=mask, kernel="dense")
        RAN.clear()
        tensors = [torch.from_numpy(a).requires_grad_() for a in (q, k, v)]
        graph = torch.compile(lambda q, k, v: ch.attention(q, k, v, mask=mask), backend="aot_eager")  # noqa: B023  # called in this round
        output = graph(*tensors)
        np.testing.assert_allclose(output.detach().numpy(), right, atol=3e-6)
        output.square().sum().backward()
        assert RAN == ["compiled"]
        again = jax.jit(lambda q, k, v: ch.attention(q, k, v, mask=mask))  # noqa: B023  # called in this round
        np.testing.assert_allclose(again(q, k, v), right, atol=3e-6)
        by_jax = jax.jit(jax.grad(lambda q: (again(q, k, v) ** 2).sum()))(q)  # noqa: B023  # called in this round
        assert tensors[0].grad is not None
        np.testing.assert_allclose(by_jax, tensors[0].grad, atol=3e-5)
        mapped = jax.vmap(lambda q, k, v: ch.attention(q, k, v, mask=mask))(q, k, v)  # noqa: B023  # called in this round
        np.testing.assert_allclose(mapped, right, atol=3e-6)


def drawn(rng: np.random.Generator) -> Mask:
    """Bands, combs, and what is put together of them."""

    def placed() -> dict[str, Any]:
        kind = rng.integers(0, 3)
        return [{}, {"offset": int(rng.integers(-12, 12))}, {"align": "start"}][kind]

    def leaf() -> Mask:
        step, back, ahead = (int(n) for n in rng.integers(1, 7, 3))
        kinds = [ch.causal(**placed()), ch.window(back, ahead - 1, **placed()), ch.strided(step, **placed())]
        kinds += [ch.dilated(step, **placed()), ch.dilated(step, back - 1, ahead - 1, **placed())]
        return kinds[rng.integers(0, len(kinds))]

    mask = leaf()
    for _ in range(rng.integers(0, 3)):
        mask = mask & leaf() if rng.random() < 0.5 else mask | leaf()
    return mask


def test_combs_have_the_pairs_of_a_mask_and_each_of_them_once() -> None:
    rng, found = np.random.default_rng(3), 0
    for _ in range(1500):
        queries, keys = (int(n) for n in rng.integers(1, 30, 2))
        mask = drawn(rng)
        combs = combs_of(mask, Grid((), 1, queries, keys))
        if combs is None:
            continue
        found += 1
        right = mask.dense(queries, keys)[0].astype(int)
        apart = np.arange(keys) - np.arange(queries)[:, None]
        of_combs, of_shares = np.zeros_like(right), np.zeros_like(right)
        for comb in combs:
            near = (apart >= comb.low) & (apart <= comb.high)
            assert pairs(comb, queries, keys) == near.sum()
            of_combs += near & ((apart - comb.phase) % comb.step == 0)
            for share in shares(comb, queries, keys):
                for residue in range(share.first, share.stop):
                    mine = comb.step * (share.start + np.arange(share.queries)) + residue - comb.phase
                    theirs = comb.step * np.arange(share.keys) + residue
                    assert mine.min() >= 0
                    seen = True if share.mask is None else share.mask.dense(share.queries, share.keys)[0]
                    of_shares[np.ix_(mine, theirs)] += seen
        assert np.array_equal(of_combs, right), (mask, queries, keys)
        assert np.array_equal(of_shares, right), (mask, queries, keys)
    assert found > 800


def choice(mask: Mask, length: int = 4096, heads: int = 8, kernel: str | None = None, **options: Any) -> Any:
    x = np.zeros((heads, length, 64), np.float32)
    return choose(pose(x, x, x, mask=mask, **options), kernel)


@built
def test_what_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # what is spared counts
    assert isinstance(choice(ch.dilated(4)), Apart)
    assert isinstance(choice(ch.strided(64)), Apart)
    rest = (ch.causal(), ch.window(5), ch.dilated(1), ch.dilated(4) | ch.dilated(3), ~ch.dilated(4), ch.dilated(5000))
    rest += (ch.dilated(4) & ch.lengths(100), ch.window(4) | ch.first_tokens(4))
    for mask in rest:
        assert choice(mask) is compiled, mask
    assert choice(ch.dilated(4), bias=ch.alibi(8)) is compiled
    assert choice(ch.dilated(4), 256) is compiled, "it is short"
    assert choice(ch.dilated(4, 16)) is compiled, "it spares little"
    assert not isinstance(choice(ch.dilated(4), dropout=(0.1, 0)), Apart)
    for formula in ("dense", "tiled"):
        assert not isinstance(choice(ch.dilated(4), kernel=formula), Apart), "others are held to it"


@built
@pytest.mark.parametrize(
    "more",
    [{"map": (4, 4)}, {"queries": [0]}, {"weights": True}, {"received": LAST}, {"received": np.ones(64)}],
    ids=str,
)
def test_what_is_not_found_of_sequences_is_found_as_ever(more: dict[str, Any]) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 64, 8)).astype(np.float32)
    for mask in (ch.dilated(4), ch.strided(4)):
        found, right = (ch.observe(q, k, v, mask=mask, **more, kernel=kernel) for kernel in ("compiled", "dense"))
        assert not RAN
        np.testing.assert_allclose(found.output, right.output, atol=1e-5)
        np.testing.assert_allclose(found.entropy, right.entropy, atol=1e-5)


def test_a_plan_says_so() -> None:
    x = np.zeros((8, 8190, 64), np.float32)
    found = ch.plan(x, x, x, mask=ch.strided(64), kernel="compiled")
    whole = ch.plan(x, x, x, mask=ch.strided(64), kernel="tiled")
    words = "a band in 8,190 queries × 8,190 keys, 62 sequences of 128 queries × 128 keys, 2 sequences of 127 queries"
    assert found.how == f"in parts by residues: {words} × 127 keys"
    assert found.pairs < whole.pairs / 6
    assert found.kernel == "compiled"
    chosen = ch.plan(x, x, x, mask=ch.dilated(64))
    assert (chosen.kernel, "compiled" in chosen.others) == ("compiled", False)


def test_a_call_spares_what_it_should() -> None:
    """Of products, counted: a sixty-fourth of a causal mask's, as far as whole tiles allow."""
    x = np.zeros((1, 8192, 64), np.float32)
    causal, comb = (ch.plan(x, x, x, mask=mask, kernel="compiled").pairs for mask in (ch.causal(), ch.dilated(64)))
    assert comb < causal / 30


@built
def test_a_sequence_is_not_remembered_as_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output lies in a larger one: who makes a call of the same kind by hand has an output of another layout."""
    step, length = 8, 67
    x = np.random.default_rng(0).standard_normal((3, 2, 4, step * length, 16)).astype(np.float32)

    def by_hand(a: np.ndarray) -> np.ndarray:
        return a.reshape(2, 4, length, step, 16).transpose(3, 0, 1, 2, 4)

    for arrays in (x, torch.from_numpy(x)):
        right = ch.attention(*arrays, mask=ch.dilated(step), kernel="dense")
        for _ in range(3):
            np.testing.assert_allclose(ch.attention(*arrays, mask=ch.dilated(step)), right, atol=1e-5)
            given = [by_hand(a) for a in x]
            if arrays is not x:
                given = [torch.from_numpy(a) for a in given]
            parts = ch.attention(*given, mask=ch.causal())
            np.testing.assert_allclose(np.asarray(parts), by_hand(np.asarray(right)), atol=1e-5)
    assert len(RAN) == 6


@built
@pytest.mark.parametrize("mask", [ch.dilated(8), ch.strided(8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_half_precision_start_from_what_was_not_rounded(mask: Mask, dtype: torch.dtype) -> None:
    """Values far from zero, so that gradients of scores are differences; and each gradient is rounded once."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 4, 512, 64) for _ in range(4))
    q, k, v, dout = (a.to(dtype) for a in (2 * q, k, v + 20, dout))
    exact = ch.gradients(*(a.double() for a in (q, k, v, dout)), mask=mask, kernel="dense")
    off = {}
    for name, cut in (("cut", True), ("whole", False)):
        given = [a.clone().requires_grad_() for a in (q, k, v)]
        RAN.clear()
        whole = mask if cut else type(mask)(**{**vars(mask), "alignment": Alignment("start", np.zeros(1, int))})
        found = torch.autograd.grad(ch.attention(*given, mask=whole), given, dout)
        assert bool(RAN) == cut
        off[name] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    assert all(mine < 1.2 * theirs for mine, theirs in zip(off["cut"], off["whole"], strict=True)), off


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_values_without_features(library: ArrayLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "SMALL", 0)
    x, none = library.make(np.ones((2, 24, 8), np.float32)), library.make(np.ones((2, 24, 0), np.float32))
    for mask in (ch.dilated(4), ch.dilated(5)):
        assert tuple(ch.attention(x, x, none, mask=mask).shape) == (2, 24, 0)


@built
def test_short_sequences_are_not_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them costs something beside its pairs."""
    monkeypatch.undo()
    for length, step in ((512, 512), (512, 100), (2048, 1024), (2048, 300)):
        assert choice(ch.dilated(step), length, heads=512) is compiled, (length, step)
    for length, step in ((512, 16), (2048, 64), (8192, 256)):
        assert isinstance(choice(ch.dilated(step), length, heads=512), Apart), (length, step)


def test_long_chains_are_given_up_at_once() -> None:
    mask: Mask = ch.dilated(3)
    for _ in range(MOST):
        mask |= ch.window(3, offset=-10)
    assert not combed(mask)
    assert combed(ch.dilated(3) & ch.causal() | ch.strided(5))
    assert not combed(ch.dilated(3) & ch.lengths(5))


def test_a_class_that_inherits_a_comb_may_mean_more() -> None:
    class Odd(type(ch.dilated(3))):  # type: ignore[misc]  # its class is nobody's business
        def tile(self, rows: range, columns: range, grid: Grid) -> Any:
            return False

    assert not combed(Odd(3, None, 0, Alignment("end")))
