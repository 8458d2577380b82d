"""Assembly that finds and sorts the largest on Hopper, run here one instruction after the other."""

from __future__ import annotations

import numpy as np
import pytest
from interpreted import MARKS
from ptx import LANES, Warp

pytestmark = MARKS
GLUON = "this Triton has no Gluon"


@pytest.mark.parametrize("kind", ["drawn", "equal", "few values", "mostly unseen"])
def test_the_eighth_largest_of_sixteen(kind: str) -> None:
    pytest.importorskip("triton.experimental.gluon", reason=GLUON)
    from clearhead.kernels.hopper.softmax import half_of_sixteen

    text, _ = half_of_sixteen()
    rng = np.random.default_rng(len(kind))
    for _ in range(20):
        given = rng.standard_normal((8, LANES))
        if kind == "equal":
            given[:] = 1.5
        elif kind == "few values":
            given = rng.integers(0, 3, (8, LANES)).astype(float)
        elif kind == "mostly unseen":
            given[rng.random((8, LANES)) < 0.6] = -np.inf
        held = Warp({f"${8 + n}": numbers for n, numbers in enumerate(given)}).run(text)
        found = np.stack([held[f"${n}"] for n in range(8)])
        for four in range(0, LANES, 4):
            for row in ((0, 1, 4, 5), (2, 3, 6, 7)):  # what `level_of` takes the least of
                right = np.sort(given[list(row), four : four + 4], axis=None)[-8]
                assert found[list(row), four : four + 4].min() == right


@pytest.mark.parametrize("kind", ["half full", "some fuller", "full", "equal", "few values", "nearly none"])
def test_the_first_eight_of_a_list(kind: str) -> None:
    pytest.importorskip("triton.experimental.gluon", reason=GLUON)
    from clearhead.kernels.hopper.choose_kernel import first_eight
    from clearhead.kernels.hopper.top_kernel import HELD

    text, _ = first_eight()
    rng = np.random.default_rng(len(kind))
    rows = LANES // 2
    most = {"half full": HELD // 2, "nearly none": 3}.get(kind, HELD)
    for _ in range(20):
        counts = rng.integers(0, most + 1, rows)
        if kind == "some fuller":
            counts = np.where(rng.random(rows) < 0.9, np.minimum(counts, HELD // 2), counts)
        elif kind == "full":
            counts[:] = HELD + rng.integers(0, 5, rows)  # more than it holds were counted
        weights = (-20 * rng.random((rows, HELD))).astype(np.float32)
        weights[rng.random((rows, HELD)) < 0.1] *= -1e-3  # rounding may take a weight above 1
        if kind in ("equal", "few values"):
            weights = -rng.integers(0, 1 if kind == "equal" else 3, (rows, HELD)).astype(np.float32)
        keys = rng.permuted(np.tile(np.arange(1000), (rows, 1)), axis=1)[:, :HELD].astype(np.int32)
        for row, count in enumerate(counts):  # what lies beyond was never written
            weights[row, count:], keys[row, count:] = rng.choice([np.nan, np.inf, 1.0]), rng.integers(-5, 5)
        entries = np.stack([weights.view(np.int32), keys], -1).view(np.int64).ravel()
        row = np.arange(LANES) // 2
        given = {f"${n}": row * HELD * 8 for n in range(8, 12)} | {f"${n}": counts[row] for n in range(12, 16)}
        held = Warp(given, entries).run(text)
        for row, count in enumerate(np.minimum(counts, HELD)):
            order = sorted(zip(-weights[row, :count], keys[row, :count], strict=True))[:8]
            ranks = [(f"${n}", f"${4 + n}", 2 * row + half) for half in (0, 1) for n in range(4)]
            exponents = [held[weight][lane].astype(np.int32).view(np.float32) for weight, _, lane in ranks]
            named = [held[key][lane] for _, key, lane in ranks]
            assert exponents == [-weight for weight, _ in order] + [-np.inf] * (8 - len(order))
            assert named == [key for _, key in order] + [-1] * (8 - len(order))
