"""Positions: rotary embeddings keep what they must, biases follow their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from libraries import LIBRARIES, ArrayLibrary, numbers

import clearhead as ch
from clearhead.core.grid import Grid

RNG = np.random.default_rng(3)
LAYOUTS = ["half", "interleaved"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_is_a_rotation_by_position(layout: str) -> None:
    x = RNG.standard_normal((2, 3, 7, 10))
    turned = ch.rotary(layout=layout, base=500.0)(x, offset=4)
    pairs = [(i, i + 5) if layout == "half" else (2 * i, 2 * i + 1) for i in range(5)]
    for place in range(7):
        for number, (a, b) in enumerate(pairs):
            angle = (place + 4) * 500.0 ** (-2 * number / 10)
            want = complex(math.cos(angle), math.sin(angle)) * (x[1, 2, place, a] + 1j * x[1, 2, place, b])
            assert turned[1, 2, place, a] + 1j * turned[1, 2, place, b] == pytest.approx(want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_scores_depend_on_distance_only(layout: str) -> None:
    rope = ch.rotary(layout=layout)
    q, k = RNG.standard_normal((2, 1, 9, 8))
    near = rope(q, offset=0) @ rope(k, offset=0).swapaxes(-1, -2)
    far = rope(q, offset=1000) @ rope(k, offset=1000).swapaxes(-1, -2)
    np.testing.assert_allclose(near, far, atol=1e-10)


def test_rotary_turns_only_its_dimension_and_takes_offsets_by_row() -> None:
    x = RNG.standard_normal((2, 3, 5, 12))
    rope = ch.rotary(dimension=8)
    turned = rope(x, offset=[0, 6])
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    np.testing.assert_allclose(turned[1], rope(x[1], offset=6))
    np.testing.assert_allclose(turned[0], rope(x[0]))


def test_linear_scaling_is_a_slower_walk() -> None:
    x = RNG.standard_normal((1, 8, 6))
    slow = ch.rotary(scaling=ch.Linear(4.0))(x)
    np.testing.assert_allclose(slow[:, 4], ch.rotary()(x[:, 4:5], offset=1)[:, 0])


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    yarn = ch.Yarn(8.0, original_length=2048)
    rope = ch.rotary(scaling=yarn)
    plain, scaled = ch.rotary().frequencies(128), rope.frequencies(128)
    turns = 2048 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 33], plain[turns > 33])
    np.testing.assert_allclose(scaled[turns < 0.9], plain[turns < 0.9] / 8)
    assert (np.diff(scaled) < 0).all()
    x = RNG.standard_normal((1, 2, 128))
    assert np.linalg.norm(rope(x)[0, 0]) == pytest.approx((0.1 * math.log(8) + 1) * np.linalg.norm(x[0, 0]))


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_rotary_on_every_library(library: ArrayLibrary) -> None:
    for dtype in library.dtypes:
        if dtype == "bfloat16":
            continue
        x = RNG.standard_normal((2, 3, 5, 8)).astype(dtype)
        turned = ch.rotary(layout="interleaved")(library.make(x), offset=2)
        assert turned.dtype == library.make(x).dtype
        want = ch.rotary(layout="interleaved")(x.astype(np.float64), offset=2)
        np.testing.assert_allclose(numbers(turned), want, atol=8 * np.finfo(dtype).eps)


@pytest.mark.parametrize(("heads", "slopes"), [(4, [2**-2, 2**-4, 2**-6, 2**-8]), (3, [2**-4, 2**-8, 2**-2])])
def test_alibi_slopes(heads: int, slopes: list[float]) -> None:
    tile = ch.alibi(heads).tile(range(2, 4), range(5), Grid((), heads, 5, 5))
    want = [[[-slope * abs(i - j) for j in range(5)] for i in (2, 3)] for slope in slopes]
    np.testing.assert_allclose(tile, want)


def reference_bucket(distance: int, count: int, bidirectional: bool, most: int) -> int:
    """The published rule, for one distance."""
    bucket = 0
    if bidirectional:
        count //= 2
        bucket += count if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = count // 2
    if distance < exact:
        return bucket + distance
    large = exact + int(math.log(distance / exact) / math.log(most / exact) * (count - exact) + 1e-6)
    return bucket + min(large, count - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets_follow_the_rule(bidirectional: bool) -> None:
    table = np.arange(32 * 3, dtype=np.float64).reshape(32, 3)
    bias = ch.relative_bias(table, bidirectional=bidirectional, max_distance=128)
    tile = bias.tile(range(300), range(300), Grid((), 3, 300, 300))
    want = [[reference_bucket(j - i, 32, bidirectional, 128) for j in range(300)] for i in range(300)]
    np.testing.assert_array_equal(tile, table[want].transpose(2, 0, 1))


def test_sinusoidal_is_the_papers() -> None:
    table = ch.sinusoidal(50, 16)
    for place in (0, 7, 49):
        for i in range(8):
            assert table[place, 2 * i] == pytest.approx(math.sin(place / 10000 ** (2 * i / 16)))
            assert table[place, 2 * i + 1] == pytest.approx(math.cos(place / 10000 ** (2 * i / 16)))
