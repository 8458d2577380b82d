"""merge(): parts of the keys, with sinks in one of them, give what one call over all of them gives, entropy too."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from libraries import LIBRARIES, ArrayLibrary, numbers

import clearhead as ch

H, T, S, D = 3, 7, 23, 5
KERNELS = {"numpy": ("compiled", "tiled", "dense"), "torch": ("compiled", "tiled", "dense")}
SPLITS = {
    "two": [(0, 11), (11, 23)],
    "three": [(0, 1), (1, 19), (19, 23)],
    "four, one of them empty": [(0, 5), (5, 5), (5, 16), (16, 23)],
}
SINKS = {"low": (-3.0, -9.0, -40.0), "high": (2.0, 5.0, 60.0), "mixed": (-np.inf, 0.5, 4.0)}
QUANTITIES = ("output", "lse", "max_score", "entropy")


def problem(dtype: str = "float64") -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(11)
    return tuple(rng.standard_normal((H, n, D)).astype(dtype) for n in (T, S, S))


def allowed() -> np.ndarray:
    """Queries that see all, some, only keys of one part, and nothing."""
    mask = np.random.default_rng(12).random((T, S)) < 0.6
    mask[0], mask[1], mask[2] = True, False, np.arange(S) >= 20
    return mask


def parts_of(library: ArrayLibrary, kernel: str, split: str, sinks: np.ndarray | None, owner: int) -> list[ch.Partial]:
    q, k, v = map(library.make, problem())
    found = []
    for place, (low, high) in enumerate(SPLITS[split]):
        options: dict[str, Any] = {"mask": library.make(allowed()[:, low:high])}
        if sinks is not None and place == owner:
            options["sinks"] = library.make(sinks)
        found.append(ch.observe(q, k[:, low:high, :], v[:, low:high, :], kernel=kernel, **options).partial)
    return found


def holds(merged: ch.Partial, library: ArrayLibrary, kernel: str, sinks: np.ndarray | None) -> None:
    q, k, v = map(library.make, problem())
    options = {} if sinks is None else {"sinks": library.make(sinks)}
    whole = ch.observe(q, k, v, mask=library.make(allowed()), kernel=kernel, **options)
    for name in QUANTITIES:
        np.testing.assert_allclose(
            numbers(getattr(merged, name)), numbers(getattr(whole, name)), rtol=1e-12, atol=1e-12, err_msg=name
        )


WAYS = [(library, kernel) for library in LIBRARIES for kernel in KERNELS.get(library.name, ("tiled", "dense"))]


# JAX compiles each step anew for each length of a part: there, one split, one kernel, and sinks of all kinds at once
ONE_OF_JAX = ("four, one of them empty", "dense", "mixed")
SPLIT_WAYS = [
    pytest.param(library, kernel, split, sinks, id=f"{sinks}-{split}-{library}-{kernel}")
    for sinks, split, (library, kernel) in itertools.product([None, *SINKS], SPLITS, WAYS)
    if library.name != "jax" or (split, kernel, sinks) == ONE_OF_JAX
]


@pytest.mark.parametrize(("library", "kernel", "split", "sinks"), SPLIT_WAYS)
def test_parts_merge_into_the_whole_call(library: ArrayLibrary, kernel: str, split: str, sinks: str | None) -> None:
    logits = None if sinks is None else np.array(SINKS[sinks])
    owners = range(len(SPLITS[split])) if sinks is not None else [0]
    for owner in owners:
        holds(ch.merge(*parts_of(library, kernel, split, logits, owner)), library, kernel, logits)


@pytest.mark.parametrize(("library", "kernel"), WAYS, ids=str)
def test_merged_parts_merge_again_in_any_order(library: ArrayLibrary, kernel: str) -> None:
    logits = np.array(SINKS["mixed"])
    parts = parts_of(library, kernel, "four, one of them empty", logits, 2)
    for one, two, three, four in list(itertools.permutations(parts))[::5]:
        holds(ch.merge(ch.merge(one, two), ch.merge(three, four)), library, kernel, logits)
        holds(ch.merge(ch.merge(ch.merge(one), two, three), four), library, kernel, logits)


def test_the_keys_share_of_every_query_is_the_sum_of_its_weights() -> None:
    q, k, v = problem()
    for sinks in SINKS.values():
        seen = ch.observe(q, k, v, mask=allowed(), sinks=np.array(sinks), weights=True)
        np.testing.assert_allclose(seen.partial.share, seen.weights.sum(-1), rtol=1e-12, atol=1e-14)
    assert ch.observe(q, k, v).partial.share is None


def test_a_part_of_one_head_keeps_its_share() -> None:
    q, k, v = problem()
    sinks = np.array(SINKS["high"])
    parts = [ch.observe(q, k[:, :9], v[:, :9], sinks=sinks), ch.observe(q, k[:, 9:], v[:, 9:])]
    whole = ch.observe(q, k, v, sinks=sinks)
    for head in range(H):
        merged = ch.merge(*(part[head].partial for part in parts))
        np.testing.assert_allclose(merged.entropy, whole.entropy[head], rtol=1e-12, atol=1e-12)


def test_a_part_made_by_hand_needs_output_and_lse_alone() -> None:
    q, k, v = problem()
    sinks = np.array(SINKS["low"])
    first, second = ch.observe(q, k[:, :9], v[:, :9], sinks=sinks), ch.observe(q, k[:, 9:], v[:, 9:])
    merged = ch.merge(ch.Partial(first.output, first.lse), second.partial)
    np.testing.assert_allclose(merged.output, ch.attention(q, k, v, sinks=sinks), rtol=1e-12, atol=1e-12)
    assert merged.entropy is None
    assert merged.max_score is None


def test_shares_of_other_shapes_are_refused() -> None:
    q, k, v = problem()
    part = ch.observe(q, k, v).partial
    wrong = ch.Partial(part.output, part.lse, part.max_score, part.entropy, part.lse[0])
    with pytest.raises(ch.ArgumentError, match=r"partials\[1\].share: has shape \(7,\), expected \(3, 7\)"):
        ch.merge(part, wrong)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_half_precision_parts_merge_in_float32(name: str) -> None:
    library = next(library for library in LIBRARIES if library.name == name)
    q, k, v = (library.make(a) for a in problem("float16"))
    sinks = library.make(np.array(SINKS["high"], np.float16))
    whole = ch.observe(q, k, v, sinks=sinks)
    first, second = (ch.observe(q, k[:, :9], v[:, :9], sinks=sinks), ch.observe(q, k[:, 9:], v[:, 9:]))
    merged = ch.merge(first.partial, second.partial)
    assert merged.output.dtype == whole.output.dtype
    assert merged.entropy.dtype == whole.entropy.dtype
    np.testing.assert_allclose(numbers(merged.entropy), numbers(whole.entropy), atol=2e-5)


def test_a_sink_of_inf_leaves_nothing_in_a_merge_either() -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, n, 5)) for n in (3, 11, 11))
    sinks = np.array([np.inf, 0.5])
    parts = [ch.observe(q, k[:, :4], v[:, :4], sinks=sinks).partial, ch.observe(q, k[:, 4:], v[:, 4:]).partial]
    whole = ch.observe(q, k, v, sinks=sinks)
    for merged in (ch.merge(*parts), ch.merge(*reversed(parts))):
        assert (merged.lse[0] == np.inf).all()
        assert not merged.output[0].any()
        np.testing.assert_allclose(merged.lse[1], whole.lse[1])
        np.testing.assert_allclose(merged.output, whole.output, atol=1e-15)
        np.testing.assert_allclose(merged.entropy, whole.entropy, atol=1e-14)
