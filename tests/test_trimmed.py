"""Is what is left enough? Where fewer cases run than there are, as each takes long, mutations must still be noticed.

JAX compiles anew for each shape, and Triton's interpreter takes seconds for what a GPU does in microseconds. Each
mutation names a check of those that are still made, which passes without it (it is in the suite) and fails with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import in_jax
import jax
import jax.numpy as jnp
import pytest
import test_triton
from cases import BY_NAME
from conformance import CHECKS
from interpreted import MARKS
from test_triton import tiny  # noqa: F401  # a fixture

from clearhead.core.arrays import Library, dtype_name, is_traced
from clearhead.core.partial import Sums
from clearhead.kernels.dense import Dense
from clearhead.kernels.slab import Slab
from clearhead.kernels.tiled import nothing, tiled

Patch = pytest.MonkeyPatch


def other_keys_named(patch: Patch) -> None:
    right = jax.lax.top_k
    patch.setattr(jax.lax, "top_k", lambda values, count: (right(values, count)[0], 0 * right(values, count)[1]))


def double_halved(patch: Patch) -> None:
    """Sums of float64 are taken in float32."""
    right = Library.computing

    def computing(self: Library, array: Any) -> Any:
        single = self.name == "jax" and dtype_name(array) == "float64"
        return array.astype(jnp.float32).astype(jnp.float64) if single else right(self, array)

    patch.setattr(Library, "computing", computing)


def half_stays_half(patch: Patch) -> None:
    patch.setattr(Library, "computing", lambda self, array: array)


def last_tile_alone(patch: Patch) -> None:
    """What is traced forgets the tiles of keys before the last."""
    right = Sums.__add__
    patch.setattr(Sums, "__add__", lambda mine, other: other if is_traced(other.peak) else right(mine, other))


def first_tile_hidden(patch: Patch) -> None:
    right = Slab.tile
    patch.setattr(Slab, "tile", lambda self, rows, columns: right(self, rows, columns) if columns.start else None)


def heads_grouped_the_other_way(patch: Patch) -> None:
    """Query head h uses key head h % Hk, not h // group."""
    right = Dense.arguments

    def wrong(self: Dense, problem: Any) -> Any:
        q, k, v, options = right(self, problem)
        if problem.group > 1:
            k, v = (jnp.concat([a[..., :: problem.group, :, :]] * problem.group, axis=-3) for a in (k, v))
        return q, k, v, options

    patch.setattr(Dense, "arguments", wrong)


def first_row_for_all(patch: Patch) -> None:
    """Of a batch, every row has the keys and values of the first."""
    right = Dense.arguments

    def wrong(self: Dense, problem: Any) -> Any:
        q, k, v, options = right(self, problem)
        return q, *(jnp.broadcast_to(a[..., :1, :, :, :], a.shape) for a in (k, v)), options

    patch.setattr(Dense, "arguments", wrong)


def no_keys_have_a_peak(patch: Patch) -> None:
    """The largest score of a query over no keys is 0, not −inf."""

    def wrong(*sizes: Any) -> Sums:
        sums = nothing(*sizes)
        return replace(sums, peak=sums.total)

    patch.setattr("clearhead.kernels.tiled.nothing", wrong)


def held_by(what: str, name: str) -> Callable[[], None]:
    return partial(CHECKS[what], in_jax.AS_IT_IS[name], BY_NAME[name], in_jax.JAX)


def held_under_jit(kernel: str, name: str) -> Callable[[], None]:
    assert in_jax.UNDER_JIT[name] == kernel
    return partial(in_jax.under_jit, kernel, BY_NAME[name])


IN_JAX: dict[str, tuple[Callable[[Patch], None], Callable[[], None]]] = {
    "other keys are named as the largest": (other_keys_named, held_by("observe", "plain")),
    "half precisions are summed as they are": (half_stays_half, held_by("gradients", "float16, saturated")),
    "float64 is summed in float32": (double_halved, held_under_jit("dense", "float64")),
    "tiles are not merged": (last_tile_alone, held_under_jit("tiled", "more queries than keys")),
    "the first tile of keys is not seen": (first_tile_hidden, held_under_jit("tiled", "only values have a batch")),
    "grouped heads": (heads_grouped_the_other_way, held_under_jit("dense", "grouped, mask by head")),
    "no keys have a largest score": (no_keys_have_a_peak, held_by("observe", "no keys")),
    "one batch row for all": (first_row_for_all, held_under_jit("dense", "batch broadcasts both ways")),
}


@pytest.mark.parametrize(("mutation", "check"), IN_JAX.values(), ids=IN_JAX)
def test_what_is_left_of_jax_notices(mutation: Any, check: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tiled, "rows", 19)
    monkeypatch.setattr(tiled, "columns", 13)
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match=r"off by|infinities differ"):
        check()


def numbers_of_the_last_query(patch: Patch) -> None:
    """The second look reads no numbers of the last query of a call."""
    from clearhead.kernels.gpu import observe_kernel

    right = observe_kernel.load_numbers
    patch.setattr(
        observe_kernel,
        "load_numbers",
        lambda base, first, low, high, N, other: right(base, first, low, high - 1, N, other),
    )


def gradient_of_lse_made_up(patch: Patch) -> None:
    """Where no gradient of the log-sum-exp is given, it is taken to be one."""
    import torch

    from clearhead.kernels.triton import triton

    right = type(triton).gradients

    def wrong(self: Any, problem: Any, dout: Any, output: Any, peak: Any, total: Any, dlse: Any = None) -> Any:
        return right(self, problem, dout, output, peak, total, torch.ones_like(peak) if dlse is None else dlse)

    patch.setattr(type(triton), "gradients", wrong)


INTERPRETED: dict[str, tuple[Callable[[Patch], None], tuple[str, str]]] = {
    "the last query is not observed": (numbers_of_the_last_query, ("observe", "37 × 41")),
    "a gradient of the log-sum-exp that nobody gave": (
        gradient_of_lse_made_up,
        ("gradients", "window both ways, one head"),
    ),
}


@pytest.mark.parametrize(("mutation", "check"), INTERPRETED.values(), ids=INTERPRETED)
@MARKS[0]
@MARKS[1]
@MARKS[2]
@pytest.mark.usefixtures("tiny")
def test_what_is_left_of_the_interpreter_notices(mutation: Any, check: tuple[str, str], monkeypatch: Patch) -> None:
    what, name = check
    assert (what, BY_NAME[name]) in test_triton.SOME
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match="off by"):
        CHECKS[what]("triton", BY_NAME[name], test_triton.TORCH)
