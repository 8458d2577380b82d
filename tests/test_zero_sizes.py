"""Sizes of zero, in every combination: each works, by every kernel and library, or is refused in words.

JAX compiles each step anew for each shape: `test_empty.py` has a few of them.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from conformance import built
from libraries import LIBRARIES, ArrayLibrary, numbers

import clearhead as ch

SIZES = [
    sizes
    for sizes in itertools.product(((), (0,), (2,)), (0, 2), (0, 1, 2), (0, 3), (0, 5), (0, 4), (0, 6))
    if 0 in (*sizes[0], *sizes[1:])
]
KERNELS = [None, "dense", "tiled", pytest.param("compiled", marks=built)]


def options(make: Any, batch: tuple[int, ...], heads: int, queries: int, keys: int) -> dict[str, dict[str, Any]]:
    return {
        "nothing": {},
        "mask": {"mask": ch.causal() & ch.lengths(keys), "softcap": 2.0},
        "documents": {"mask": ch.documents(*(np.zeros((*batch, n), int) for n in (keys, queries))) | ch.window(1)},
        "arrays": {
            "mask": make(np.ones((*batch, 1, queries, keys), bool)),
            "bias": make(np.zeros((heads, queries, keys), np.float32)),
            "sinks": make(np.zeros(heads, np.float32)),
        },
    }


def refused(sizes: tuple[Any, ...], kernel: str | None) -> bool:
    """No heads of keys for some of queries; the compiled kernel takes at least one feature."""
    _, heads, key_heads, _, _, features, width = sizes
    return bool(heads and not key_heads) or (kernel == "compiled" and not (features and width))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("library", [library for library in LIBRARIES if library.name != "jax"], ids=str)
def test_every_size_of_zero_works_or_is_refused_in_words(library: ArrayLibrary, kernel: str | None) -> None:
    if kernel == "compiled" and library.name not in ("numpy", "torch"):
        pytest.skip("it takes NumPy, PyTorch and JAX arrays only")
    if kernel is None and library.name == "strict":
        pytest.skip("the kernel that is chosen is `dense`, which is asked for by name")
    step = {"numpy": 3, "torch": 5, "strict": 11}[library.name]  # the same steps
    for sizes in SIZES[::step]:
        batch, heads, key_heads, queries, keys, features, width = sizes
        shapes = (
            (heads, queries, features),
            (key_heads, keys, features),
            (key_heads, keys, width),
            (heads, queries, width),
        )
        q, k, v, dout = (library.make(np.ones((*batch, *shape), np.float32)) for shape in shapes)
        for name, given in options(library.make, batch, heads, queries, keys).items():
            where = f"{sizes}, {name}"
            try:
                output = ch.attention(q, k, v, kernel=kernel, **given)
            except (ch.ArgumentError, ch.KernelRefused):
                assert refused(sizes, kernel), where
                continue
            assert tuple(output.shape) == tuple(dout.shape), where
            if not keys:  # nothing is attended to
                assert not numbers(output).any(), where
            observed = ch.observe(
                q, k, v, kernel=kernel, top=2, received=True, map=(2, 2), queries=[-1][:queries], weights=True, **given
            )
            assert tuple(observed.weights.shape) == (*batch, heads, queries, keys), where
            found = ch.gradients(q, k, v, dout, kernel=kernel, **given)
            assert [tuple(g.shape) for g in found] == [tuple(a.shape) for a in (q, k, v)], where


@pytest.mark.parametrize("kernel", KERNELS)
def test_backward_through_every_size_of_zero(kernel: str | None) -> None:
    for sizes in SIZES:
        batch, heads, key_heads, queries, keys, features, width = sizes
        if refused(sizes, kernel):
            continue
        shapes = ((heads, queries, features), (key_heads, keys, features), (key_heads, keys, width), (heads,))
        *leaves, sinks = (torch.ones((*batch, *s) if len(s) > 1 else s, requires_grad=True) for s in shapes)
        ch.attention(*leaves, sinks=sinks, mask=ch.causal(), kernel=kernel).sum().backward()
        for leaf in (*leaves, sinks):
            assert leaf.grad.shape == leaf.shape, sizes
            assert bool(leaf.grad.isfinite().all()), sizes
