"""Sparse masks over many tiles: the compiled kernel by every instruction set, Triton's lists, and what drops a tile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import budget
import numpy as np
import pytest
import torch
from conformance import INSTRUCTION_SETS, built
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import MARKS
from test_mask_runs import GRID, LEAVES, PATTERNS, right_states, states_of, trees

import clearhead as ch
from clearhead.core import steps
from clearhead.core.runs import runs
from clearhead.kernels.compiled import compiled

RNG = np.random.default_rng(4)
HEADS, QUERIES, KEYS, WIDTH = 2, 230, 1700, 8
CHOSEN = RNG.random((HEADS, 8, 54)) < 0.1
LONGFORMER = ch.window(40, 20) | ch.global_tokens([0, 1, 900, 1600])
SPARSE: dict[str, Any] = {
    "Longformer": LONGFORMER,
    "BigBird": ch.window(30, 30) | ch.global_tokens(range(9)) | ch.random_blocks(32, count=2, seed=1),
    "block top-k by head": ch.blocks(CHOSEN, 32),
    "prefix and window": ch.prefix(70) | ch.window(100, align="start"),
    "unsorted documents": ch.documents(np.arange(KEYS) // 90 * 7 % 5),
    "documents at random": ch.documents(RNG.integers(0, 40, KEYS), RNG.integers(0, 40, QUERIES)),
    "dilated": ch.dilated(50, 20) | ch.first_tokens(3),
    "strided": ch.strided(64),
    "an array": ch.where(np.array(LONGFORMER.dense(QUERIES, KEYS)[0])),
    "an array by head": ch.where(np.kron(CHOSEN, np.ones((1, 32, 32), bool))[:, :QUERIES, :KEYS]),
    "an array of keys": ch.where(RNG.random((1, KEYS)) < 0.05) & ch.causal(),
    "nothing but one pair": ch.where(np.arange(QUERIES)[:, None] * KEYS + np.arange(KEYS) == 333 * 1201),
    "all but a few": ~(ch.window(3, 3) | ch.blocks(CHOSEN[0], 32)),
    "small blocks": ch.blocks(RNG.random((46, 340)) < 0.03, 5),
    "blocks as wide as vectors": ch.blocks(RNG.random((HEADS, 58, 425)) < 0.03, 4),
    "blocks of no whole panels": ch.blocks(RNG.random((7, 48)) < 0.15, 36) & ~ch.window(20, 500, align="start"),
    "global tokens in a row": ch.window(30, 9, align="start") | ch.global_tokens(range(16)),
    "an array of blocks": ch.where(np.kron(CHOSEN[1], np.ones((32, 32), bool))[:QUERIES, :KEYS]),
    "an array at random": ch.where(RNG.random((QUERIES, KEYS)) < 0.3),
    "an array that lies by keys": ch.where((RNG.random((KEYS, QUERIES)) < 0.3).T),
    "an array of any bytes": ch.where((RNG.integers(0, 3, (HEADS, QUERIES, KEYS), np.uint8) * 127).view(bool)),
    "gaps that are short": ch.documents(np.arange(KEYS) // 9 % 3) & ch.window(900),
}


def arrays(dtype: str = "float64") -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal((HEADS, n, WIDTH)).astype(dtype) for n in (QUERIES, KEYS, KEYS)]


def everything(mask: ch.Mask, kernel: str) -> dict[str, np.ndarray]:
    q, k, v = arrays()
    seen = ch.observe(q, k, v, mask=mask, kernel=kernel, top=3, received=True, map=(5, 9), queries=[1, -1])
    dq, dk, dv = ch.gradients(q, k, v, np.cos(seen.output + np.arange(WIDTH)), mask=mask, kernel=kernel)
    return {
        "output": seen.output, "again": ch.attention(q, k, v, mask=mask, kernel=kernel), "lse": seen.lse,
        "entropy": seen.entropy, "top": seen.top.weights, "received": seen.received, "map": seen.map.mean,
        "rows": seen.queries.weights, "dq": dq, "dk": dk, "dv": dv,
    }  # fmt: skip


def compare(mask: ch.Mask, kernel: str = "compiled") -> None:
    right = everything(mask, "dense")
    for name, mine in everything(mask, kernel).items():
        np.testing.assert_allclose(mine, right[name], rtol=1e-9, atol=1e-11, err_msg=name)


@built
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", SPARSE)
def test_all_tiles_that_are_left_are_met(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "isa", isa)
    compare(SPARSE[name])


MANY = 2300  # queries of six heads: more panels than tasks, so that a task has several, and a thread a run of them
LONG: dict[str, ch.Mask] = {
    "Longformer": ch.window(250, 250) | ch.global_tokens(range(16)),
    "BigBird": ch.window(190, 190) | ch.global_tokens(range(16)) | ch.random_blocks(64, count=3, seed=2),
    "block top-k": ch.blocks(np.random.default_rng(5).random((72, 72)) < 0.2, 32),
    "prefix and window": ch.prefix(500) | ch.window(500),
    "unsorted documents": ch.documents(np.arange(MANY) // 512 * 3 % 5),
}


@functools.cache
def long_arrays() -> list[np.ndarray]:
    return list(np.random.default_rng(8).standard_normal((3, 6, MANY, 4)))


@functools.cache
def wide_arrays() -> list[np.ndarray]:
    return list(np.random.default_rng(9).standard_normal((3, 1, MANY, 40), dtype=np.float32))


@functools.cache
def wide_output(name: str) -> Any:
    return budget.given(*wide_arrays(), mask=LONG[name])["output"]


@functools.cache
def right_output(name: str) -> np.ndarray:
    return ch.attention(*long_arrays(), mask=LONG[name], kernel="dense")


@built
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", LONG)
def test_tasks_of_several_panels_whoever_takes_them(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "isa", isa)
    found = []
    try:
        for threads in (1, 2, 5, 16):
            ch.set_threads(threads)
            found.append(ch.attention(*long_arrays(), mask=LONG[name], kernel="compiled"))
    finally:
        ch.set_threads(None)
    np.testing.assert_allclose(found[0], right_output(name), rtol=1e-9, atol=1e-11)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@built
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", LONG)
def test_keys_side_by_side_and_far_apart_give_the_same(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that lie side by side are read as they lie, where few see each; those far apart are packed."""
    monkeypatch.setattr(compiled, "isa", isa)
    q, k, v = wide_arrays()
    apart = np.zeros((1, MANY, 100), np.float32)[..., :40]
    apart[:] = k
    found, packed = (ch.attention(q, some, v, mask=LONG[name], kernel="compiled") for some in (k, apart))
    np.testing.assert_array_equal(found, packed)
    budget.check(found, wide_output(name), MANY, "output")


@built
@settings(max_examples=15, deadline=None)
@given(mask=trees(st.sampled_from(list(SPARSE.values()))))
def test_trees_of_them(mask: ch.Mask) -> None:
    compare(mask)


@built
@pytest.mark.parametrize("name", ["block top-k by head", "Longformer", "documents at random", "global tokens in a row"])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_numbers_that_are_not_finite_spoil_only_who_sees_them(name: str, where: str) -> None:
    q, k, v = arrays()
    given = {"q": q, "k": k, "v": v, "dout": np.cos(q)}
    given[where][:, [3, 100, 200]] = np.nan
    given[where][1, 77, 2] = np.inf
    with np.errstate(invalid="ignore"):  # NumPy says so of each product
        found, right = (
            ch.gradients(*given.values(), mask=SPARSE[name], kernel=kernel) for kernel in ("compiled", "dense")
        )
    for what, mine, theirs in zip(("dq", "dk", "dv"), found, right, strict=True):
        np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(theirs), err_msg=what)
        plain = np.isfinite(theirs)
        np.testing.assert_allclose(mine[plain], theirs[plain], rtol=1e-9, atol=1e-11, err_msg=what)


@built
def test_an_array_that_was_written_to_is_read_anew() -> None:
    q, k, v = (torch.from_numpy(a) for a in arrays("float32"))
    seen = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
    seen[:, :5] = True
    for _ in range(2):
        torch.testing.assert_close(
            ch.attention(q, k, v, mask=seen, kernel="compiled"), ch.attention(q, k, v, mask=seen, kernel="dense")
        )
        seen[:, 700:900] = True


def short_of_one(self: steps.Cut, start: np.ndarray, stop: np.ndarray) -> Any:
    first, after = TOUCHED(self, start, stop)
    return first, np.where(after > first, after - 1, after)


def begun_too_early(self: steps.Cut, start: np.ndarray, stop: np.ndarray) -> Any:
    first, after = FILLED(self, start, stop)
    return np.maximum(first - 1, 0), after


def ends_forgotten(self: steps.Cut, start: np.ndarray, stop: np.ndarray) -> Any:
    first, after = FILLED(self, start, stop)
    return first, np.maximum(after, TOUCHED(self, start, stop)[1])


TOUCHED, FILLED = steps.Cut.touched, steps.Cut.filled
MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "the last tile dropped": ("touched", short_of_one),
    "a mixed tile before taken for full": ("filled", begun_too_early),
    "a mixed tile behind taken for full": ("filled", ends_forgotten),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_tile_dropped_or_taken_for_full_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, broken = MUTANTS[name]
    monkeypatch.setattr(steps.Cut, where, broken)
    wrong = [
        leaf
        for leaf in ("causal", "window", "lengths", "documents in pieces", "blocks by head")
        if not np.array_equal(states_of(runs(LEAVES[leaf], GRID, 4, 5), GRID), right_states(LEAVES[leaf], 4, 5, GRID))
    ]
    assert len(wrong) >= 3  # what begins with the first key has nothing before it


TILES = {"a tile dropped": 0, "a tile taken for full": 1}


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("by", ["extension", "NumPy"])
def test_triton_notices_too(name: str, turned: bool, by: str, request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available() or MARKS[0].args[0]:
        pytest.skip("Triton's interpreter is not there")
    request.getfixturevalue("interpreting")
    from clearhead.kernels.gpu import masks

    def broken(right: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any) -> Any:
            found = right(*given)
            if given[-1] is not turned:
                return found
            counts = found.counts.copy()
            row = int(np.flatnonzero(counts[:, 1])[-1])
            counts[row, 1] -= 1
            counts[row, 2 if TILES[name] else 0] += (
                1  # its last mixed tile is the first full one; or its first is left out
            )
            return found._replace(counts=counts)

        return made

    mask = PATTERNS["dilated"] | ch.global_tokens([2]) | ch.window(9)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for n in (40, 72, 72))

    def found() -> list[torch.Tensor]:
        output = ch.attention(q, k, v, mask=mask, kernel="triton")
        return [output, *torch.autograd.grad(output.square().sum(), (q, k, v))]

    expected = found()
    if by == "NumPy":
        monkeypatch.setattr(masks, "native", None)
    monkeypatch.setattr(masks, "lists_of_tree", broken(masks.lists_of_tree))
    monkeypatch.setattr(masks, "lists_of_runs", broken(masks.lists_of_runs))
    mask = mask | ch.global_tokens([])  # another mask, so that its lists are made anew
    assert any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(expected, found(), strict=True))
