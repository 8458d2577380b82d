"""Masks: what they allow, that tiles agree with the whole, how they print, look and explain themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.core.draws import drawn
from clearhead.core.grid import Grid, blocks

IDS = [0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


def brute(rule, queries: int = 13, keys: int = 13) -> np.ndarray:
    return np.array([[rule(i, j) for j in range(keys)] for i in range(queries)])


RULES = {
    "causal": (ch.causal(), lambda i, j: j <= i),
    "window": (ch.window(3), lambda i, j: i - 3 <= j <= i),
    "window both ways": (ch.window(2, 4), lambda i, j: i - 2 <= j <= i + 4),
    "lengths": (ch.lengths(5), lambda i, j: j < 5),
    "prefix": (ch.prefix(5) | ch.causal(), lambda i, j: j < 5 or j <= i),
    "documents": (ch.documents(IDS), lambda i, j: IDS[i] == IDS[j]),
    "global": (ch.global_tokens([2, 7]), lambda i, j: i in (2, 7) or j in (2, 7)),
    "and": (ch.causal() & ch.window(2), lambda i, j: i - 2 <= j <= i),
    "or": (ch.window(1) | ch.lengths(2), lambda i, j: i - 1 <= j <= i or j < 2),
    "not": (~ch.causal(), lambda i, j: j > i),
    "longformer": (ch.window(2, 2) | ch.global_tokens([0]), lambda i, j: abs(i - j) <= 2 or 0 in (i, j)),
}


@pytest.mark.parametrize(("mask", "rule"), RULES.values(), ids=RULES)
def test_a_mask_allows_what_its_rule_says(mask: ch.Mask, rule) -> None:
    assert np.array_equal(mask.dense(13)[0], brute(rule))


@pytest.mark.parametrize(("mask", "rule"), RULES.values(), ids=RULES)
def test_every_explanation_agrees_with_the_mask(mask: ch.Mask, rule) -> None:
    for i in range(13):
        for j in range(13):
            sentence = mask.explain(i, j, queries=13, keys=13)
            assert sentence.startswith(f"query {i} {'may' if rule(i, j) else 'may not'} attend to key {j}: ")


def test_alignment() -> None:
    assert np.array_equal(ch.causal().dense(3, 5)[0], brute(lambda i, j: j <= i + 2, 3, 5))
    assert np.array_equal(ch.causal(align="start").dense(3, 5)[0], brute(lambda i, j: j <= i, 3, 5))
    assert np.array_equal(ch.causal(offset=1).dense(3, 5)[0], brute(lambda i, j: j <= i + 1, 3, 5))
    assert np.array_equal(ch.window(1, align="start").dense(3, 5)[0], brute(lambda i, j: i - 1 <= j <= i, 3, 5))
    by_row = ch.causal(offset=[0, 3]).dense(3, 5, batch=(2,))
    assert np.array_equal(by_row[:, 0], [brute(lambda i, j, o=o: j <= i + o, 3, 5) for o in (0, 3)])
    assert np.array_equal(ch.documents([0, 0, 1, 1, 1]).dense(2, 5)[0], [[0, 0, 1, 1, 1]] * 2)


def test_random_blocks_are_seeded() -> None:
    mask = ch.random_blocks(4, count=2, seed=3)
    whole = mask.dense(32)[0]
    assert np.array_equal(whole, ch.random_blocks(4, count=2, seed=3).dense(32)[0])
    assert not np.array_equal(whole, ch.random_blocks(4, count=2, seed=4).dense(32)[0])
    assert (whole.sum(-1) == 8).all()
    assert np.array_equal(whole[0], whole[3])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 6, 9])
def test_every_set_of_blocks_is_drawn_as_often(count: int) -> None:
    rows, blocks = 20_000, 6
    found = drawn(7, range(rows), blocks, count)
    assert (np.diff(found, axis=1) > 0).all(), "ascending, none of them twice"
    assert found.shape == (rows, min(count, blocks))
    sets = math.comb(blocks, min(count, blocks))
    times = np.unique(found @ blocks ** np.arange(found.shape[1]), return_counts=True)[1]
    assert times.size == sets
    # Pearson's chi² has sets − 1 degrees of freedom: that many on average, and twice as much variance
    chi = ((times - rows / sets) ** 2 / (rows / sets)).sum()
    assert chi <= (sets - 1) + 5 * math.sqrt(2 * (sets - 1))


def test_blocks_are_drawn_for_rows_alone_as_for_all() -> None:
    for key_blocks, count in ((40, 3), (40, 33), (3000, 70), (2**40, 5)):
        whole = drawn(2**61, range(50, 90), key_blocks, count)
        for row in (50, 67, 89):
            assert np.array_equal(drawn(2**61, range(row, row + 1), key_blocks, count)[0], whole[row - 50])
    assert not np.array_equal(drawn(1, range(9), 40, 3), drawn(2, range(9), 40, 3))


leaf = st.one_of(
    st.builds(lambda o: ch.causal(offset=o), st.integers(-5, 9)),
    st.builds(lambda b, a: ch.window(b, a), st.integers(0, 6), st.integers(0, 6)),
    st.builds(lambda n: ch.lengths(n), st.integers(0, 20)),
    st.builds(lambda n: ch.lengths([n, 3]), st.integers(0, 20)),
    st.just(ch.documents([i // 4 for i in range(17)])),
    st.builds(lambda i: ch.global_tokens(i), st.lists(st.integers(0, 16), min_size=1, max_size=3)),
    st.builds(lambda s: ch.random_blocks(3, count=2, seed=s), st.integers(0, 9)),
    st.builds(lambda s: ch.where(np.random.default_rng(s).random((2, 1, 13, 17)) < 0.5), st.integers(0, 9)),
    st.just(ch.causal(offset=[2, -1])),
)
tree = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=5,
)


@given(tree, st.integers(1, 13), st.integers(1, 17))
def test_tiles_of_any_size_agree_with_the_whole(mask: ch.Mask, rows: int, columns: int) -> None:
    grid = Grid((2,), 3, 13, 17)
    whole = mask.dense(13, 17, batch=(2,), heads=3)
    for i in blocks(13, rows):
        for j in blocks(17, columns):
            tile = mask.tile(i, j, grid)
            part = whole[..., i.start : i.stop, j.start : j.stop]
            assert np.array_equal(np.broadcast_to(tile, part.shape), part)
            # a tile that is all or nothing is said in one word, so that kernels can skip it
            assert isinstance(tile, bool) == bool(part.all() or not part.any())


@given(tree)
def test_a_mask_prints_as_the_expression_that_makes_it(mask: ch.Mask) -> None:
    names = {name: getattr(ch, name) for name in ch.__all__} | {"where": lambda a: a, "array": lambda *shape: ch.where}
    text = repr(mask)
    if "where" in text or "…" in text:  # arrays print as their shape, long lists cut short
        return
    again = eval(text, names)
    assert repr(again) == text
    assert np.array_equal(again.dense(13, 17, batch=(2,)), mask.dense(13, 17, batch=(2,)))


def test_printing_is_cut_short() -> None:
    assert repr(ch.documents(np.arange(1000))) == "documents([0, 1, 2, …, 999])"
    assert repr(ch.where(np.ones((4, 5), bool)) & ch.causal()) == "where(array(4, 5)) & causal()"
    assert repr((ch.causal() | ch.prefix(2)) & ~ch.lengths([3, 4])) == "(causal() | prefix(2)) & ~lengths([3, 4])"
    assert repr(ch.window(3, 1, offset=2)) == "window(3, 1, offset=2)"
    assert repr(ch.causal(align="start")) == "causal(align='start')"


def test_a_large_mask_is_drawn_small() -> None:
    lines = ch.causal().picture(1_000_000, side=8).splitlines()
    assert lines[0] == "▒ · · · · · · ·"
    assert lines[-1] == "■ ■ ■ ■ ■ ■ ■ ▒"


def test_explanations_name_the_part_that_decides() -> None:
    mask = (ch.causal() & ch.window(4)) | ch.global_tokens([0])
    assert mask.explain(7, 9) == (
        "query 7 may not attend to key 9: causal() lets position 7 see keys up to 7"
        " and window(4) lets position 7 see keys 3 to 7 and global_tokens([0]) makes neither global"
    )
    assert mask.explain(7, 0) == "query 7 may attend to key 0: global_tokens([0]) makes one of them global"
    assert ch.lengths([4, 2]).explain(0, 3, batch=(2,), at=(1, 0)) == (
        "query 0 may not attend to key 3: lengths([4, 2]) lets every query see the first 2 keys"
    )
    assert ch.documents([0, 0, 1]).explain(2, 0) == (
        "query 2 may not attend to key 0: documents([0, 0, 1]) puts the query in document 1 and the key in document 0"
    )
    assert (~ch.causal()).explain(1, 0) == (
        "query 1 may not attend to key 0: the opposite holds of causal() lets position 1 see keys up to 1"
    )


def test_arrays_compose_from_either_side() -> None:
    array = np.random.default_rng(0).random((5, 5)) < 0.5
    assert np.array_equal((array & ch.causal()).dense(5)[0], array & np.tri(5, dtype=bool))
    assert np.array_equal((ch.causal() | array).dense(5)[0], array | np.tri(5, dtype=bool))
