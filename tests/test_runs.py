"""Masks that let each query see one run of keys, as Hopper's own kernels are given them: the same pairs as the mask."""

from __future__ import annotations

import elsewhere
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import INSTALLED

import clearhead as ch
from clearhead.core.grid import Grid

pytestmark = pytest.mark.skipif(not INSTALLED, reason="Triton is not installed")

BATCH, QUERIES, KEYS = 2, 19, 23
GRID = Grid((BATCH,), 1, QUERIES, KEYS)
IDS = np.array([0] * 4 + [1] * 9 + [2] * 10)

ONE = {
    "causal": ch.causal(),
    "offset by row": ch.causal(offset=[-7, 9]),
    "window": ch.window(5, 1),
    "lengths": ch.lengths([17, 0]),
    "documents": ch.documents(IDS),
    "documents by row": ch.documents(np.stack([IDS, IDS[::-1]])),
    "own query ids, some of nobody": ch.documents(IDS, np.arange(QUERIES) % 5 - 1),
    "documents and causal": ch.documents(IDS) & ch.causal(),
    "prefix": ch.prefix([2, 9]) | ch.causal(),
    "not the first": ~ch.lengths([3, 23]),
}
SEVERAL = {
    "an id in two runs": ch.documents(np.concatenate([IDS[:10], IDS[:13]])),
    "a gap": ch.lengths(3) | ch.window(2),
    "not a window": ~ch.window(2, 2),
    "global tokens": ch.global_tokens([0]),
    "an array": ch.where(np.ones((QUERIES, KEYS), bool)),
}


def pairs(starts: np.ndarray, stops: np.ndarray, keys: int = KEYS) -> np.ndarray:
    """(batch, queries, keys), True where a query sees a key."""
    key = np.arange(keys)
    return np.broadcast_to((key >= starts[..., None]) & (key < stops[..., None]), (BATCH, QUERIES, keys))


@pytest.mark.parametrize("name", ONE)
def test_a_run_is_what_the_mask_says(name: str) -> None:
    from clearhead.kernels.gpu.key_ranges import key_ranges

    found = key_ranges(ONE[name], GRID)
    assert found is not None
    assert np.array_equal(pairs(*found), dense(ONE[name]))


@pytest.mark.parametrize("name", SEVERAL)
def test_more_than_one_run_is_none(name: str) -> None:
    from clearhead.kernels.gpu.key_ranges import key_ranges

    assert key_ranges(SEVERAL[name], GRID) is None


def dense(mask: ch.Mask) -> np.ndarray:
    return np.broadcast_to(mask.dense(QUERIES, KEYS, batch=(BATCH,)), (BATCH, 1, QUERIES, KEYS))[:, 0]


LEAVES = st.sampled_from([*ONE.values(), *SEVERAL.values()])
MASKS = st.recursive(
    LEAVES,
    lambda inner: (
        st.tuples(inner, inner).map(lambda p: p[0] & p[1])
        | st.tuples(inner, inner).map(lambda p: p[0] | p[1])
        | inner.map(lambda m: ~m)
    ),
    max_leaves=4,
)


@given(MASKS)
@settings(deadline=None, max_examples=100)
def test_composed_masks_keep_their_meaning(mask: ch.Mask) -> None:
    from clearhead.kernels.gpu.key_ranges import key_ranges

    found = key_ranges(mask, GRID)
    if found is not None:
        assert np.array_equal(pairs(*found), dense(mask))


@pytest.mark.parametrize("name", ONE)
def test_blocks_and_tiles_cover_what_is_seen(name: str) -> None:
    """Every block is in the table once; outside its tiles nothing is seen, in the full ones everything."""
    import torch

    from clearhead.kernels.gpu.key_ranges import key_ranges
    from clearhead.kernels.hopper.schedule import TileConfig, key_ranges_of

    found = key_ranges(ONE[name], GRID)
    assert found is not None
    spans = key_ranges_of(*found, KEYS, 128, torch.device("cpu"), {128: TileConfig(rows=4, columns=4, consumers=2)})
    allowed = dense(ONE[name])[:, :, spans.start : spans.stop]
    edges = spans.edges.numpy()
    assert np.array_equal(pairs(edges[..., 0], edges[..., 1], spans.stop - spans.start), allowed)
    assert dense(ONE[name]).sum() == allowed.sum(), "keys before start, or from stop on, are seen"
    hidden = np.zeros(1, bool) if spans.hidden is None else spans.hidden.numpy()[:, 0, :, 0]
    assert np.array_equal(np.broadcast_to(hidden, allowed.shape[::2]), ~allowed.any(1))
    blind = np.zeros(1, bool) if spans.blind is None else spans.blind.numpy()[:, 0, :, 0]
    assert np.array_equal(np.broadcast_to(blind, allowed.shape[:2]), ~dense(ONE[name]).any(2))
    table = spans.table.numpy()[:, :6]
    assert len({(first, row) for first, row, *_ in table}) == len(table) == len(edges) * 3
    assert list(table[:, 5]) == sorted(table[:, 5], reverse=True)
    for first, row, base, low, high, end in table:
        for block in allowed[[row] if len(edges) > 1 else slice(None), first : first + 8]:
            assert not block[:, :base].any()
            assert not block[:, base + 4 * end :].any()
            assert block[:, base + 4 * low : base + 4 * high].all()
        assert 0 <= low <= high < end


# what kernels compute with, for functions of theirs that are called as Python; in a process of its own, for in this one
# Triton interprets
SHARES = """
import sys
from types import SimpleNamespace

try:
    from triton.experimental.gluon.language.nvidia import hopper
except ImportError:
    sys.exit(77)
from clearhead.kernels.hopper import pipeline


class Number(int):
    def __radd__(self, other):
        return Number(int(self) + int(other))

    def __sub__(self, other):
        return Number(int(self) - int(other))

    def __lt__(self, other):
        return Number(int(self) < int(other))

    def to(self, kind):
        return int(self)


def where(test, one, other):
    return Number(one if test else other)


job_of = pipeline.job_of.fn
pipeline.job_of = job_of
for jobs, programs in ((1, 1), (7, 7), (5, 3), (6, 3), (8, 3), (9, 3), (10, 3), (512, 132)):
    done = []
    for place in range(programs):
        pipeline.gl = SimpleNamespace(
            program_id=lambda axis: place, num_programs=lambda axis: programs, where=where, int32=None, minimum=min
        )
        done.append([int(job_of(number)) for number in range(pipeline.rounds_of.fn(jobs))])
    assert sorted(sum(done, [])) == list(range(jobs)), (jobs, programs)
# the last of 16 causal heads' blocks, longest first: all programs have the same to do
costs = [sum(32 - job // 16 for job in some) for some in done]
assert max(costs) <= 1.02 * sum(costs) / programs, (max(costs), sum(costs) / programs)

for blocks, heads, side in ((1, 1, 1), (4, 6, 1), (4, 6, 6), (4, 6, 2), (3, 7, 3), (5, 7, 4)):
    found = [pipeline.share.fn(job, blocks, heads, side) for job in range(blocks * heads)]
    assert sorted(found) == [(block, head) for block in range(blocks) for head in range(heads)]
    groups = [head // side for _, head in found]
    assert groups == sorted(groups), "some heads at a time"
    first = [block for block, head in found if head < side]
    assert first == sorted(first), "first blocks first"
"""


def test_every_block_of_every_head_is_somebodys_job() -> None:
    ran = elsewhere.python("-c", SHARES)
    if ran.returncode == 77:
        pytest.skip("this Triton has no Gluon for Hopper")
    assert ran.returncode == 0, ran.stderr
