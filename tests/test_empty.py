"""Axes of size zero: every call gives an answer of the right shape, in every library and kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from libraries import LIBRARIES, ArrayLibrary, numbers

import clearhead as ch

# q, k and the features of a value
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "batch 0": ((0, 3, 5, 4), (0, 3, 7, 4), 2),
    "batch 0, grouped": ((0, 4, 5, 4), (0, 2, 7, 4), 2),
    "batch 0 by broadcasting": ((1, 4, 5, 4), (0, 2, 7, 4), 2),
    "no heads": ((2, 0, 5, 4), (2, 0, 7, 4), 2),
    "no heads, no queries": ((2, 0, 0, 4), (2, 0, 7, 4), 2),
    "no queries, grouped": ((2, 4, 0, 4), (2, 2, 7, 4), 2),
    "no keys, grouped": ((2, 4, 5, 4), (2, 2, 0, 4), 2),
    "neither": ((2, 4, 0, 4), (2, 2, 0, 4), 2),
    "nothing at all": ((0, 0, 0, 4), (0, 0, 0, 4), 2),
    "no features, grouped": ((2, 4, 5, 0), (2, 2, 7, 0), 2),
    "values of no features": ((2, 4, 5, 4), (2, 2, 7, 4), 0),
    "one head, no queries": ((0, 4), (7, 4), 2),
    "one head, no keys": ((5, 4), (0, 4), 2),
}
OPTIONS: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "plain": lambda t, s, h: {},
    "causal": lambda t, s, h: {"mask": ch.causal()},
    "window": lambda t, s, h: {"mask": ch.window(2, 1, offset=1)},
    "lengths": lambda t, s, h: {"mask": ch.lengths(3)},
    "documents": lambda t, s, h: {"mask": ch.documents(np.zeros(s, int), np.zeros(t, int))},
    "global tokens": lambda t, s, h: {"mask": ch.global_tokens([0])},
    "random blocks": lambda t, s, h: {"mask": ch.random_blocks(2, count=1)},
    "not random blocks": lambda t, s, h: {"mask": ~ch.random_blocks(2, count=0) & ch.causal()},
    "where": lambda t, s, h: {"mask": ch.where(np.ones((t, s), bool))},
    "alibi": lambda t, s, h: {"bias": ch.alibi(h)} if h else {},
    "relative": lambda t, s, h: {"bias": ch.relative_bias(np.ones((32, h)))},
    "bias": lambda t, s, h: {"bias": np.ones((t, s))},
    "softcap, sinks": lambda t, s, h: {"softcap": 2.0, "sinks": np.zeros(h)},
    "dropout": lambda t, s, h: {"dropout": (0.5, 1)},
}
# JAX compiles each step anew for every size: there, only these, each with one kernel and one kind of options in turn,
# and all that a call gives in one program. No keys, no queries and an empty batch are cases that it is held to in full
# (`in_jax.py`).
IN_JAX = ("no heads", "no features, grouped", "values of no features")
RUNS = [
    pytest.param(library, shape, id=f"{shape}-{library}")
    for shape, library in product(SHAPES, LIBRARIES)
    if library.name != "jax" or shape in IN_JAX
]


def calls(library: ArrayLibrary, shape: str) -> Iterator[tuple[str, str | None]]:
    """Options and kernels."""
    if library.name == "jax":
        number = IN_JAX.index(shape)
        yield ("random blocks", "relative", "softcap, sinks")[number % 3], ("tiled", "dense")[number % 2]
        return
    if library.name != "numpy":  # one kernel in turn, where NumPy has all
        kernels = ("tiled", "dense", *(("compiled",) if library.name == "torch" else ()))
        number = list(SHAPES).index(shape)
        yield from ((name, kernels[(place + number) % len(kernels)]) for place, name in enumerate(OPTIONS))
        return
    yield from product(OPTIONS, (None, "compiled", "tiled", "dense"))


def everything(q: Any, k: Any, v: Any, dout: Any, chosen: list[int], **given: Any) -> tuple[Any, ...]:
    """The output, all that can be observed, the output of what is merged with itself, and gradients."""
    seen = ch.observe(q, k, v, top=2, received=True, map=(3, 3), queries=chosen, weights=True, **given)
    merged = ch.merge(seen.partial, seen.partial)
    return ch.attention(q, k, v, **given), seen, merged.output, ch.gradients(q, k, v, dout, **given)


@pytest.mark.parametrize(("library", "shape"), RUNS)
def test_every_call_with_an_empty_axis_has_an_answer(library: ArrayLibrary, shape: str) -> None:
    queries, keys, width = SHAPES[shape]
    values = (*keys[:-1], width)
    q, k, v = (library.make(np.ones(sizes, np.float32)) for sizes in (queries, keys, values))
    batch = np.broadcast_shapes(queries[:-3], keys[:-3])
    rows = (*batch, *queries[-3:-1])
    heads = queries[-3] if len(queries) > 2 else 1
    t, s = queries[-2], keys[-2]
    for name, kernel in calls(library, shape):
        given = {
            option: library.make(value) if isinstance(value, np.ndarray) else value
            for option, value in OPTIONS[name](t, s, heads).items()
        }
        if kernel == "compiled" and (0 in (queries[-1], width) or name == "dropout"):
            continue  # which it refuses in words
        where = f"{name}, {kernel}"
        chosen = [0, -1] if t else []
        dout = library.make(np.ones((*rows, width), np.float32))
        call = partial(everything, chosen=chosen, kernel=kernel, **given)
        output, seen, merged, found = (jax.jit(call) if library.name == "jax" else call)(q, k, v, dout)
        assert tuple(output.shape) == (*rows, width), where
        assert np.isfinite(numbers(output)).all(), where
        for part, want in (
            (seen.lse, rows),
            (seen.entropy, rows),
            (seen.top.indices, (*rows, 2)),
            (seen.received, (*rows[:-1], s)),
            (seen.map.mean, (*rows[:-1], min(3, t), min(3, s))),
            (seen.queries.weights, (*rows[:-1], len(chosen), s)),
            (seen.weights, (*rows, s)),
        ):
            assert tuple(part.shape) == want, where
        assert "Observed" in repr(seen)
        assert tuple(merged.shape) == (*rows, width), where
        assert [tuple(g.shape) for g in found] == [queries, keys, values], where
        assert all(np.isfinite(numbers(g)).all() for g in found), where
        assert ch.plan(q, k, v, kernel=kernel, **given).all_pairs == math.prod((*rows, s))


@pytest.mark.parametrize("name", [name for name in OPTIONS if "mask" in OPTIONS[name](3, 3, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 5), (5, 0)])
def test_a_mask_over_nothing_is_a_picture_of_nothing(name: str, queries: int, keys: int) -> None:
    mask = OPTIONS[name](queries, keys, 1)["mask"]
    assert set(mask.picture(queries, keys)) <= {"\n"}
    assert mask.dense(queries, keys).shape == (1, queries, keys)
    assert mask.dense(queries, keys, batch=(0,), heads=0).shape == (0, 0, queries, keys)
    with pytest.raises(ch.ArgumentError, match=r"query, key: \(0, 0\) lies outside"):
        mask.explain(0, 0, queries=queries, keys=keys)


def test_a_picture_of_no_batch_row_is_refused() -> None:
    for batch, heads in (((0,), 1), ((2,), 0)):
        with pytest.raises(ch.ArgumentError, match="there is none to show"):
            ch.causal().picture(3, batch=batch, heads=heads)
        with pytest.raises(ch.ArgumentError, match="there is none to show"):
            ch.causal().explain(1, 1, batch=batch, heads=heads)
