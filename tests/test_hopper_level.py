"""Assembly that finds and sorts the largest on Hopper, run here one instruction after the other."""

from __future__ import annotations

import numpy as np
import pytest
from interpreted import MARKS
from ptx import LANES, Warp

pytestmark = MARKS
GLUON = "this Triton has no Gluon"


@pytest.mark.parametrize("tiles", [False, True], ids=["by place modulo 16", "by pairs"])
@pytest.mark.parametrize("kind", ["drawn", "equal", "few values", "mostly unseen"])
def test_the_eighth_largest_of_sixteen(kind: str, tiles: bool) -> None:
    pytest.importorskip("triton.experimental.gluon", reason=GLUON)
    from clearhead.kernels.hopper.softmax import half_of_sixteen

    text, _ = half_of_sixteen(tiles)
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
            rows = ((0, 2, 4, 6), (1, 3, 5, 7)) if tiles else ((0, 1, 4, 5), (2, 3, 6, 7))
            for row in rows:  # what `level_of` takes the least of
                right = np.sort(given[list(row), four : four + 4], axis=None)[-8]
                assert found[list(row), four : four + 4].min() == right


def turns_of(slots: int) -> np.ndarray:
    """For each place of a tile, (threads of a row, what each has), the group that it was of, one tile before."""
    from clearhead.kernels.hopper.softmax import turning

    text, constraints = turning(slots)
    count = 2 * slots
    assert constraints.split(",") == ["=f"] * count + ["f"] * count
    # every number another one: of which warp's row, and of which of its groups
    given = np.arange(count * LANES).reshape(LANES, slots, 2).transpose(1, 2, 0).reshape(count, LANES)
    held = Warp({f"${count + n}": numbers for n, numbers in enumerate(given)}).run(text)
    found = np.stack([held[f"${n}"] for n in range(count)]).reshape(slots, 2, LANES).transpose(2, 0, 1)
    before = np.arange(count * LANES).reshape(LANES, slots, 2)
    sources = []
    for four in range(0, LANES, 4):
        for row in (0, 1):
            mine = before[four : four + 4, :, row].ravel()
            assert np.isin(found[four : four + 4, :, row], mine).all(), "rows are kept apart"
            sources.append(np.searchsorted(mine, found[four : four + 4, :, row].ravel()))
    assert all((source == sources[0]).all() for source in sources)
    return sources[0]


@pytest.mark.parametrize("slots", [4, 8])
def test_groups_change_places_with_every_tile(slots: int) -> None:
    pytest.importorskip("triton.experimental.gluon", reason=GLUON)
    source = turns_of(slots)
    assert sorted(source) == list(range(4 * slots)), "nothing is lost"
    place, came = 0, set()
    for _ in range(4 * slots):
        came.add(int(place))
        place = source[place]
    assert len(came) == 4 * slots, "what lies at one place of each tile comes to every group"


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("count", [33, 64, 300])
def test_keys_that_lie_apart_have_a_level(columns: int, count: int) -> None:
    """Of more keys than a list holds few enough reach the eighth largest of what groups have, however they lie."""
    pytest.importorskip("triton.experimental.gluon", reason=GLUON)
    from clearhead.kernels.hopper.top_kernel import HELD

    onwards = np.argsort(turns_of(4))
    rng, kinds = np.random.default_rng(count), 0
    for step in {*range(1, 34), columns // 2, columns, 2 * columns}:
        for first in rng.integers(0, columns, 3).tolist():
            keys = first + step * np.arange(count)
            tiles, column = np.unique(keys // columns, return_inverse=True)[1], keys % columns
            group = column % 8 // 2 * 4 + column // 8 % 4
            for tile in range(tiles.max()):
                group = np.where(tiles <= tile, onwards[group], group)
            scores = rng.standard_normal((200, count))
            most = np.stack([scores[:, group == n].max(1, initial=-np.inf) for n in range(16)], 1)
            reached = (scores >= np.sort(most)[:, -8:-7]).sum(1)
            assert reached.min() >= 8
            assert (reached > HELD).mean() <= 0.01, (step, first)
            kinds += 1
    assert kinds > 100


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
