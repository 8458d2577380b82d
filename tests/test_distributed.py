"""Attention over ranks: equal to one machine's, balanced, within what was planned, and clear about what goes wrong."""

from __future__ import annotations

import numpy as np
import pytest
import ranks
import ranks_models
import ranks_work
import torch

import clearhead as ch
import clearhead.distributed as chd
from clearhead.core.grid import Grid
from clearhead.distributed.counting import Counter, pairs, seen_keys, stretches
from clearhead.distributed.planning import planned

RNG = np.random.default_rng(5)
DOCUMENTS = np.repeat(np.arange(64), RNG.integers(1, 400, 64))[:4093]
MASKS = {
    "none": None,
    "causal": ch.causal(),
    "window": ch.window(200),
    "window both ways": ch.window(100, 100),
    "documents": ch.documents(DOCUMENTS),
    "documents, causal": ch.documents(DOCUMENTS) & ch.causal(),
    "Longformer": ch.window(64, 64) | ch.global_tokens([0, 1, 2, 3]),
    "prefix": ch.prefix(500) | ch.causal(),
}
# of each kind of option one, so that the suite stays quick; `python tests/ranks.py` runs all of them
SOME = [
    "causal, fewer queries", "grouped, causal", "documents by row", "BigBird", "array", "bfloat16, everything",
    "NaN in padding", "sinks, all masked", "scores of 10⁴, causal", "relative bias", "batch broadcasts both ways",
    "one head, two dimensions",
]  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_have_as_many_pairs_as_the_others(name: str, world: int) -> None:
    n = len(DOCUMENTS)
    placement = chd.place(MASKS[name], n, world)
    assert placement.imbalance is not None
    assert placement.imbalance <= 0.05
    assert sorted(placement.order.tolist()) == list(range(n))
    assert max(placement.lengths) <= 1.3 * n / world


COUNTED: dict[str, ch.Mask] = {
    "BigBird": ch.window(9, 9) | ch.global_tokens([0, 40]) | ch.random_blocks(16, count=2, seed=1),
    "lengths by row": ch.causal() & ch.lengths([70, 0]),
    "blocks by head": ch.blocks(np.random.default_rng(0).random((3, 7, 9)) < 0.4, 16),
    "complement": ~(ch.window(5) | ch.documents(np.arange(130) % 3, np.arange(101) % 4)),
    "array": ch.where(np.random.default_rng(1).random((2, 1, 101, 130)) < 0.3),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_counted_is_what_the_mask_allows(name: str) -> None:
    mask, grid = COUNTED[name], Grid((2,), 3, 101, 130)
    whole = np.broadcast_to(mask.dense(101, 130, batch=(2,), heads=3), grid.shape)
    counter = Counter(mask, grid)
    assert (counter.told is None) == (name == "array")
    for start, stop in ((0, 101), (0, 1), (17, 64), (100, 101), (5, 5)):
        assert counter.of_queries(range(start, stop)) == whole[:, :, start:stop].sum()
        assert counter.of_keys(range(start, stop)) == whole[..., start:stop].sum()
    seen = counter.seen((range(3, 7), range(90, 101)))
    assert np.array_equal(seen, whole[:, :, [*range(3, 7), *range(90, 101)]].any((0, 1, 2)))


def test_pairs_are_those_of_the_mask() -> None:
    for mask in MASKS.values():
        grid = Grid((), 1, 700, 4093)
        if mask is None:
            continue
        rows, columns = range(13, 680), range(1001, 4001)
        whole = mask.dense(700, 4093)[0]
        assert pairs(mask, rows, columns, grid) == whole[13:680, 1001:4001].sum()
        seen = seen_keys(mask, (range(13, 40), range(600, 680)), grid)
        there = whole[[*range(13, 40), *range(600, 680)]].any(0)
        assert np.array_equal(seen, there)
        found = stretches(seen, columns)
        kept = np.zeros(4093, bool)
        for part in found:
            kept[part.start : part.stop] = True
        assert not (there[1001:4001] & ~kept[1001:4001]).any()
        assert kept[:1001].sum() == kept[4001:].sum() == 0


def test_shard_goes_there_and_back() -> None:
    x = np.arange(2 * 19 * 3).reshape(2, 19, 3)
    for placement in (chd.Placement.contiguous(19, 5), chd.Placement.zigzag(19, 4), chd.Placement.striped(19, 3)):
        parts = [chd.shard(x, placement, rank) for rank in range(placement.world)]
        np.testing.assert_array_equal(chd.unshard(parts, placement), x)


def test_what_the_queries_way_does_not_see_goes_another_way() -> None:
    few = chd.plan((1, 8, 64, 64), (1, 8, 65536, 64), world=4)
    assert few.way == "queries"
    watched = planned(few.schedule, few.shape, looks=True)
    assert watched.way != "queries"
    assert watched.chosen.refused is None
    with pytest.raises(ch.ArgumentError, match="which is refused: weights are observed where the queries are"):
        planned(few.schedule, few.shape, way="queries", looks=True)


def test_placements_that_are_none_are_refused() -> None:
    with pytest.raises(ch.ArgumentError, match="each of 4 positions once"):
        chd.Placement(4, ((range(2),), (range(3, 4),)))
    with pytest.raises(ch.ArgumentError, match="how: is 'best'"):
        chd.place(None, 4, 2, "best")
    with pytest.raises(ch.ArgumentError, match="array: has 5 positions, expected 4"):
        chd.shard(np.zeros((5, 2)), chd.Placement.contiguous(4, 2), 0)


# the ways, placements and cases that each number of ranks is held to: fewer where there are many processes
GRIDS: dict[int, tuple[list[str], list[str | None], list[str]]] = {
    1: (SOME[:3], ["ring"], ["contiguous"]),
    2: (SOME, ["ring", "queries"], ["uneven"]),
    4: (SOME, ["ring", "gather", "heads"], ["striped"]),
    8: (SOME[2:6], ["ring", None], ["zigzag"]),
}


@pytest.mark.parametrize("world", GRIDS)
def test_every_kind_of_case_is_as_on_one_machine(world: int) -> None:
    ranks.together(world, ranks.grid, *GRIDS[world])


def test_many_ranks_do_what_one_does() -> None:
    """One start of four processes for all of it: what is done by each is said in `ranks_work.py` and
    `ranks_models.py`."""
    ranks.together(4, everything)


def everything(rank: int, world: int) -> None:
    for work in (ranks_work.decoding, ranks_work.parameters, ranks_work.bits_and_bytes, ranks_work.windows):
        work(rank, world)
    ranks_models.models(rank, world)
    ranks_models.split_caches(rank, world)
    ranks_models.watched(rank, world)
    ranks_work.sharded(rank, world)
    ranks_work.lone_keys(rank, world)
    ranks_work.own_masks(rank, world)
    ranks_work.faults(rank, world)
    ranks_work.never_arrives(rank, world)


def test_a_rank_that_dies_is_an_error_on_every_other_one() -> None:
    ranks.together(3, ranks_work.dies)


def test_without_a_process_group_one_is_told_so() -> None:
    with pytest.raises(ch.ArgumentError, match="init_process_group was not called"):
        chd.attention(*torch.randn(3, 1, 4, 8))
