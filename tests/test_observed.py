"""Observed: which batch rows and heads an index picks, and which queries may be asked for, in every library."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from libraries import LIBRARIES, ArrayLibrary, numbers

import clearhead as ch
from clearhead.core.arrays import is_array, to_numpy

B, H, T, S, D = 2, 3, 5, 7, 4


@cache
def seen(library: ArrayLibrary = LIBRARIES[0]) -> ch.Observed:
    rng = np.random.default_rng(0)
    q, k, v = (library.make(rng.standard_normal((B, H, n, D))) for n in (T, S, S))
    sinks = library.make(np.arange(3.0))
    return ch.observe(q, k, v, sinks=sinks, top=2, received=True, map=(2, 2), queries=[0], weights=True)


MANY = np.array([[True, False, True], [False, False, True]])
INDICES: dict[str, Any] = {
    "row": 1,
    "row and head": (1, 2),
    "from the end": (-1, -3),
    "NumPy's number": np.int64(1),
    "array without axes": np.array(1),
    "dots": (..., 2),
    "dots in the middle": (0, ..., 2),
    "dots that stand for nothing": (0, 2, ...),
    "nothing": (),
    "slices": (slice(None), slice(1, None)),
    "an axis more": (None, 1),
    "an axis more, and dots": (..., None, 2),
    "array": np.array([1, 0, 1]),
    "array of heads": (slice(None), np.array([2, 0])),
    "dots and array": (..., np.array([2, 0])),
    "array from the end": np.array([-1]),
    "array of two axes": np.array([[0, 1], [1, 1]]),
    "list": [1, 0],
    "empty list": [],
    "booleans for rows": np.array([False, True]),
    "booleans for heads": (slice(None), np.array([True, False, True])),
    "booleans as a list": [True, False],
    "booleans for both": MANY,
    "both as arrays": (np.array([0, 1]), np.array([2, 2])),
    "another library's array": torch.tensor([1, 0]),
    "another's booleans": (..., jnp.array([True, False, True])),
}


# the array API has whole numbers, slices and … as indices, and arrays only where every axis has one
SIMPLE = [
    name for name, index in INDICES.items() if not re.search("array of|arrays?$|boolean|list|from the end$", name)
]
# JAX compiles each anew: of each kind one, and all that it reads in another way than NumPy does
IN_JAX = (
    "row and head", "an axis more, and dots", "slices", "list", "booleans for both", "both as arrays",
    "another library's array",
)  # fmt: skip
WAYS = [(one, name) for one in LIBRARIES for name in {"strict": SIMPLE, "jax": IN_JAX}.get(one.name, INDICES)]


@pytest.mark.parametrize(("library", "name"), WAYS, ids=str)
def test_an_index_means_what_numpy_says(library: ArrayLibrary, name: str) -> None:
    index = INDICES[name]
    plain = tuple(map(in_numpy, index if isinstance(index, tuple) else (index,)))
    whole = seen(library)
    found = whole[index]
    for field in ("output", "lse", "entropy", "received", "weights", "share"):
        array = numbers(getattr(whole, field))
        axes = array.ndim - 2
        want = array[(*filled(plain), *(slice(None),) * axes)]
        np.testing.assert_array_equal(numbers(getattr(found, field)), want, err_msg=field)
    assert found.queries.indices.tolist() == [0]
    assert found.top.indices.shape[:-2] == found.lse.shape[:-1]
    assert "Observed" in repr(found)


def in_numpy(index: Any) -> Any:
    if isinstance(index, list):
        return np.array(index, bool if any(i is True for i in index) else int)
    return to_numpy(index) if is_array(index) else index


def filled(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """An index with … written out, so that what follows it may be added."""
    used = sum(getattr(i, "ndim", 1) if str(getattr(i, "dtype", "")) == "bool" else 1 for i in index if named(i))
    place = next((place for place, i in enumerate(index) if i is Ellipsis), len(index))
    rest = (slice(None),) * (2 - used)
    return (*index[:place], *rest, *index[place + 1 :])


def named(index: Any) -> bool:
    return index is not None and index is not Ellipsis


WRONG: dict[str, tuple[Any, str]] = {
    "too many": ((0, 1, 2), "3 indices for 2 leading axes"),
    "too many, one of them an array": ((np.array([0]), 1, 2), "3 indices for 2 leading axes"),
    "too many, booleans of two axes": ((MANY, 1), "3 indices for 2 leading axes"),
    "dots twice": ((..., ...), "two …"),
    "outside": (2, "index 2 for an axis of 2: expected -2 to 1"),
    "outside at the other end": ((0, -4), "index -4 for an axis of 3: expected -3 to 2"),
    "one of them outside": (np.array([0, 5]), "index 5 for an axis of 2"),
    "booleans of another shape": (np.array([True] * 3), r"a boolean index of shape \(3,\)"),
    "one boolean": (True, "True as an index"),
    "float": (1.0, "1.0 as an index"),
    "floats": (np.array([0.0, 1.0]), "as an index"),
    "word": ("head", "'head' as an index"),
    "ragged": ([[0], [0, 1]], "as an index"),
}


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_an_index_that_picks_nothing_is_refused_in_one_sentence(library: ArrayLibrary, name: str) -> None:
    index, words = WRONG[name]
    with pytest.raises(IndexError, match=words):
        seen(library)[index]


def test_queries_are_whole_numbers_in_one_axis() -> None:
    x = np.ones((2, 5, 4))
    for queries, words in (
        ([[0, 1], [2, 3]], r"has shape \(2, 2\), expected positions of queries in one axis"),
        (np.zeros((1, 1), int), r"has shape \(1, 1\), expected positions"),
        (torch.zeros(2, 2, dtype=torch.int64), r"has shape \(2, 2\), expected positions"),
        ([[0], [1, 2]], "expected the positions of queries as whole numbers"),
        ([True, False], "expected the positions of queries as whole numbers"),
        (["a"], "expected the positions of queries as whole numbers"),
        ({1, 2}, "expected the positions of queries as whole numbers"),
        (2**70, "has position 1180591620717411303424, expected -5 to 4"),
        (np.array([2**63], np.uint64), "has position 9223372036854775808, expected -5 to 4"),
        ([0, 10**5000], "has position a whole number of thousands of digits, expected -5 to 4"),
    ):
        with pytest.raises(ch.ArgumentError, match=f"^queries: .*{words}"):
            ch.observe(x, x, x, queries=queries)
    with pytest.raises(ch.ArgumentError, match="queries: is traced, expected numbers"):
        jax.jit(lambda at: ch.observe(jnp.ones((2, 5, 4)), jnp.ones((2, 5, 4)), jnp.ones((2, 5, 4)), queries=at).lse)(
            jnp.arange(2)
        )
    for queries in (3, [], [0, -1, 0], range(2), (1,), np.array(2), torch.tensor([4, 0]), jnp.array([1], jnp.uint8)):
        rows = ch.observe(x, x, x, queries=queries).queries
        assert rows.weights.shape == (2, np.size(np.asarray(queries)), 5)


def test_nothing_without_queries() -> None:
    x = np.ones((2, 0, 4))
    assert ch.observe(x, x, x, queries=[]).queries.weights.shape == (2, 0, 0)
    with pytest.raises(ch.ArgumentError, match="queries: has position 0, expected 0 to -1"):
        ch.observe(x, x, x, queries=[0])


def test_what_keys_received_is_refused_in_words_where_it_is_not_asked_for_so():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    for asked, text in [
        (np.ones(4), r"received: has shape \(4,\), expected a weight for each query, which broadcasts to \(2, 5\)"),
        (np.ones((3, 5)), r"received: has shape \(3, 5\), expected a weight for each query"),
        (np.ones(5, complex), "received: has dtype complex128, expected numbers: one weight for each query"),
        (np.array(2.0), r"received: has shape \(\), expected a weight for each query"),
    ]:
        with pytest.raises(ch.ArgumentError, match=text):
            ch.observe(q, k, v, received=asked)
    for name in ("received_max", "removal"):
        with pytest.raises(ch.ArgumentError, match=f"{name}: is 0, expected True or a number of last queries"):
            ch.observe(q, k, v, **{name: 0})
        with pytest.raises(ch.ArgumentError, match=name):
            ch.observe(q, k, v, **{name: np.ones(5)})
    with pytest.raises(ch.ArgumentError, match="removal: is asked for together with dropout"):
        ch.observe(q, k, v, removal=True, dropout=(0.5, 1))
    with pytest.raises(ch.ArgumentError, match="want: has received="):
        ch.watch(torch.nn.Linear(1, 1), want={"received": np.ones(5)})


def test_queries_may_count_as_lists_truth_values_and_whole_numbers():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    last = ch.observe(q, k, v, received=2).received
    for counts in ([0, 0, 0, 1, 1], np.array([False, False, False, True, True]), torch.tensor([0, 0, 0, 1, 1])):
        for kernel in ("dense", "tiled", None):
            np.testing.assert_allclose(ch.observe(q, k, v, received=counts, kernel=kernel).received, last, rtol=1e-12)


def test_what_keys_received_over_split_keys_comes_by_the_share_of_each_part():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4))
    parts = [slice(0, 3), slice(3, 7)]
    whole = ch.merge(*[ch.observe(q, k[:, i], v[:, i]).partial for i in parts])
    shares = [np.exp(ch.observe(q, k[:, i], v[:, i]).lse - whole.lse) for i in parts]
    found = [ch.observe(q, k[:, i], v[:, i], received=s).received for i, s in zip(parts, shares, strict=True)]
    np.testing.assert_allclose(np.concatenate(found, -1), ch.observe(q, k, v, received=True).received, rtol=1e-12)


def test_removal_is_how_much_outputs_change_without_a_key():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 4, 6, 5)), rng.standard_normal((2, 2, 9, 5)), rng.standard_normal((2, 2, 9, 3))
    sinks = rng.standard_normal(4)
    whole, found = ch.attention(q, k, v, sinks=sinks), ch.observe(q, k, v, sinks=sinks, removal=True).removal
    for key in range(9):
        changed = ((whole - ch.attention(q, k, v, sinks=sinks, mask=np.arange(9) != key)) ** 2).sum((-1, -2))
        np.testing.assert_allclose(found[..., key], changed, rtol=1e-9)
    alone = ch.observe(q, k, v, mask=ch.causal(align="start"), removal=True).removal  # the first query sees one key
    assert np.isfinite(alone).all()
    assert (alone[..., 0] >= np.repeat((v[..., 0, :] ** 2).sum(-1), 2, 1)).all()
