"""Random problems, the same on every run, against a reference that shares no code with clearhead.

`make fuzz` draws others for as long as one likes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from draw import draw
from drawn import Drawn, question
from findings import FINDINGS
from fuzz import hold
from meaning import Sizes, allowed_pairs
from reference import Question, solve

SEEDS, EACH = 310, 10


@pytest.mark.parametrize("first", range(0, SEEDS, EACH))
def test_random_problems(first: int) -> None:
    found = [
        f"seed {seed}: {wrong}\n    {draw(seed)}" for seed in range(first, first + EACH) for wrong in hold(draw(seed))
    ]
    assert not found, "\n".join([*found, "`make fuzz SEED=…` cuts one of them down"])


@pytest.mark.parametrize("drawn", FINDINGS, ids=range(len(FINDINGS)))
def test_findings_stay_mended(drawn: Drawn) -> None:
    assert not hold(drawn)


def test_a_seed_is_one_problem() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert all(eval(repr(draw(seed)), {"Drawn": Drawn, "inf": math.inf}) == draw(seed) for seed in range(200))


def test_the_draws_reach_everything() -> None:
    drawn = [draw(seed) for seed in range(SEEDS)]
    for name, values in {
        "verb": ("attention", "observe", "gradients", "autograd", "merge", "merged autograd"),
        "library": ("numpy", "torch", "jax", "strict"),
        "kernel": (None, "dense", "tiled", "compiled", "triton"),
        "dtype": ("float16", "bfloat16", "float32", "float64"),
        "sinks": (0.0, 200.0, -200.0, math.inf, -math.inf),
    }.items():
        assert set(values) <= {getattr(one, name) for one in drawn}, name
    kinds = {kind for one in drawn for kind in one.layouts}
    assert kinds >= {"transposed", "sliced", "wide", "expanded", "reversed", "read-only", "fortran", "negative"}
    trees = " ".join(str(one.mask) for one in drawn)
    leaves = ("causal", "window", "lengths", "prefix", "documents", "global_tokens", "random_blocks", "where")
    assert all(f"'{kind}'" in trees for kind in (*leaves, "and", "or", "not"))


def test_the_reference_on_numbers_that_can_be_checked_by_hand() -> None:
    ask = Question(
        q=np.zeros((1, 2, 1)),
        k=np.array([[[5.0], [np.nan]]]),
        v=np.array([[[1.0], [3.0]]]),
        dout=np.ones((1, 2, 1)),
        dlse=np.zeros((1, 2)),
        allowed=np.array([[[[True, False], [False, False]]]]),
        scale=1.0,
    )
    solved = solve(ask)
    assert solved.value["output"].tolist() == [[[[1.0], [0.0]]]]
    assert solved.value["lse"].tolist() == [[[0.0, -np.inf]]]
    assert solved.value["dv"].tolist() == [[[1.0], [0.0]]]
    assert not any(spoiled.any() for spoiled in solved.spoiled.values())


def test_the_reference_agrees_with_differences() -> None:
    drawn = Drawn(
        numbers=5, verb="merged autograd", dtype="float64", group=2, sinks=0.3, softcap=1.5,
        mask=("causal", "end", None), bias=("array", "hqk", "float64", 0.0),
    )  # fmt: skip
    ask = question(drawn)

    def loss() -> float:
        value = solve(ask).value
        return float((value["output"][0] * ask.dout).sum() + (value["lse"][0] * ask.dlse).sum())

    derived = solve(ask).value
    for array, gradient in ((ask.q, "dq"), (ask.k, "dk"), (ask.v, "dv")):
        place, step = (0,) * array.ndim, 1e-6
        array[place] += step
        above = loss()
        array[place] -= 2 * step
        below = loss()
        array[place] += step
        assert math.isclose((above - below) / (2 * step), derived[gradient][place], rel_tol=1e-7, abs_tol=1e-9)


def test_a_mask_is_asked_pair_by_pair() -> None:
    sizes = Sizes(1, 1, 2, 4)
    tree = ("and", ("not", ("causal", "end", None)), ("lengths", 3))
    assert allowed_pairs(tree, sizes)[0, 0].astype(int).tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]]
    assert allowed_pairs(("window", 1, 0, "start", None), sizes)[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
    ]
