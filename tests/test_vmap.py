"""vmap is a loop: whatever is mapped and whatever is not, each entry gives what it gives alone, or both refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch

SIZE, BATCH, HEADS, QUERIES, KEYS = 3, 2, 4, 5, 7
GENERATOR = torch.Generator().manual_seed(11)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def inputs(batch: tuple[int, ...], in_dims: tuple[int | None, ...]) -> list[Tensor]:
    """q, k and v of which some have an axis more, of size 3, at the place that says `in_dims`."""
    shapes = ((*batch, HEADS, QUERIES, 6), (*batch, 2, KEYS, 6), (*batch, 2, KEYS, 8))
    dims = zip(shapes, in_dims, strict=True)
    return [normal(*(s if d is None else (*s[:d], SIZE, *s[d:]))) for s, d in dims]


def array_masks() -> list[Tensor]:
    """Boolean arrays of every rank, with axes of the mapped size, of the batch's, and of one."""
    leads: list[tuple[int, ...]] = [()]
    leads += itertools.product((1, HEADS, SIZE))
    leads += itertools.product((1, BATCH, SIZE), (1, HEADS))
    leads += itertools.product((1, SIZE), (1, BATCH, SIZE), (1, HEADS))
    return [torch.rand(*lead, QUERIES, KEYS, generator=GENERATOR) < 0.7 for lead in leads] + [torch.rand(KEYS) < 0.7]


ARRAYS = array_masks()
NUMBERS = [[2, 5, 3], [2, 5], [[2, 5]], [[4]], 3, [[1, 2], [3, 4], [5, 6]], [[1], [2], [3]]]
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"mask {tuple(a.shape)}": {"mask": a} for a in ARRAYS},
    **{f"bias {tuple(a.shape)}": {"bias": a.float()} for a in ARRAYS if a.ndim >= 2},
    **{f"lengths({n})": {"mask": ch.lengths(n)} for n in NUMBERS},
    **{f"causal(offset={n})": {"mask": ch.causal(offset=n)} for n in NUMBERS},
    **{f"alibi(offset={n})": {"bias": ch.alibi(HEADS, offset=n)} for n in NUMBERS[:4]},
    "documents": {"mask": ch.documents(torch.arange(KEYS) // 3, queries=torch.arange(QUERIES) // 3)},
    "documents for each": {
        "mask": ch.documents(
            torch.arange(SIZE * KEYS).reshape(SIZE, KEYS) // 3, queries=torch.zeros(SIZE, QUERIES).long()
        )
    },
    "sinks": {"sinks": normal(HEADS)},
    "all": {"mask": ARRAYS[0] & ch.causal(), "sinks": normal(HEADS), "bias": normal(HEADS, 1, KEYS), "softcap": 3.0},
}


def outcome(call: Callable[[], Tensor]) -> Tensor | str:
    try:
        return call()
    except ch.ArgumentError as error:
        return error.argument


@pytest.mark.parametrize("kernel", [None, "dense"])
@pytest.mark.parametrize("batch", [(), (BATCH,), (SIZE,)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_not_mapped_means_the_same_as_in_a_loop(name: str, batch: tuple[int, ...], kernel: str | None) -> None:
    options = OPTIONS[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ch.attention(q, k, v, kernel=kernel, **options)

    last = len(batch) + 1
    for in_dims in ((0, 0, 0), (last, None, 0), (None, last, None), (0, None, None), (-1, 0, None)):
        dims = tuple(d if d is None or d >= 0 else len(batch) + 3 for d in in_dims)
        given = inputs(batch, dims)

        def entry(i: int) -> list[Tensor]:
            return [t if d is None else t.select(d, i) for t, d in zip(given, dims, strict=True)]  # noqa: B023  # called at once, inside the loop

        mapped = outcome(lambda: torch.func.vmap(attend, in_dims=in_dims)(*given))  # noqa: B023  # called at once, inside the loop
        loop = outcome(lambda: torch.stack([attend(*entry(i)) for i in range(SIZE)]))
        if isinstance(loop, str):
            assert mapped == loop
        else:
            assert isinstance(mapped, Tensor), f"refused {mapped}, which a loop takes"
            torch.testing.assert_close(mapped, loop)


@pytest.mark.parametrize("function", ["observe", "gradients"])
def test_observing_inside_transforms_is_refused_or_dense(function: str) -> None:
    q, k, v = inputs((), (0, 0, 0))
    dout = normal(SIZE, HEADS, QUERIES, 8)

    def call(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, kernel: str | None = None) -> Any:
        if function == "gradients":
            return ch.gradients(q, k, v, dout, mask=ch.causal(), kernel=kernel)
        seen = ch.observe(q, k, v, mask=ch.causal(), kernel=kernel, top=2, received=True, map=(2, 2), weights=True)
        return seen.output, seen.lse, seen.entropy, seen.top.weights, seen.received, seen.map.mean, seen.weights

    for kernel in (None, "compiled", "tiled"):
        with pytest.raises(ch.ArgumentError, match=r"q: is inside a transform of torch\.func, expected"):
            torch.func.vmap(lambda *a: call(*a, kernel))(q, k, v, dout)  # noqa: B023  # called at once, inside the loop
    mapped = torch.func.vmap(lambda *a: call(*a, "dense"))(q, k, v, dout)
    loop = [call(*each, "dense") for each in zip(q, k, v, dout, strict=True)]
    for place, got in enumerate(mapped):
        torch.testing.assert_close(got, torch.stack([found[place] for found in loop]))


def test_the_gradient_of_what_dense_observes() -> None:
    q, k, v = inputs((), (None, None, None))
    found = torch.func.grad(lambda q: ch.observe(q, k, v, kernel="dense").lse.sum())(q)
    leaf = q.clone().requires_grad_()
    ch.observe(leaf, k, v, kernel="dense").lse.sum().backward()
    torch.testing.assert_close(found, leaf.grad)
