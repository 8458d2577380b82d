"""A user's file, which mypy reads (`test_types.py`): what comes out is typed as what went in.

Lines that end in `# refused` are mistakes that mypy must name. The other functions also run: what is typed is there.
"""

from __future__ import annotations

from typing import Any, assert_type

import jax
import numpy as np
import torch
from numpy.typing import NDArray

import clearhead as ch
from clearhead.core.positions import Bias, Rotary


def with_numpy(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    assert_type(ch.attention(q, k, v, mask=ch.causal(), bias=ch.alibi(2), sinks=np.zeros(2)), np.ndarray)
    assert_type(ch.gradients(q, k, v, q), tuple[np.ndarray, np.ndarray, np.ndarray])
    assert_type(ch.rotary()(q), np.ndarray)
    assert_type(ch.sinusoidal(3, 4), np.ndarray)

    seen = ch.observe(q, k, v, top=2, received=True, map=(2, 2), queries=[0], weights=True)
    assert_type(seen, ch.Observed[np.ndarray])
    assert_type(seen.output, np.ndarray)
    assert_type(seen.lse, np.ndarray)
    assert_type(seen.entropy, np.ndarray)
    assert_type(seen.received, np.ndarray | None)
    assert_type(seen[0], ch.Observed[np.ndarray])
    assert seen.top is not None
    assert seen.map is not None
    assert seen.queries is not None
    assert_type(seen.top.weights, np.ndarray)
    assert_type(seen.map.mean, np.ndarray)
    assert_type(seen.queries.weights, np.ndarray)
    assert_type(seen.partial, ch.Partial[np.ndarray])
    assert_type(ch.merge(seen.partial, seen.partial).output, np.ndarray)


def with_numpy_that_says_more(q: NDArray[np.float32]) -> None:
    assert_type(ch.attention(q, q, q), NDArray[np.float32])
    zeros = np.zeros((2, 3, 4))
    # a result may have another number of axes than what it was made of
    heads, queries = ch.observe(zeros, zeros, zeros).lse.shape
    assert_type(heads, Any)
    assert_type(queries, Any)


def with_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    assert_type(ch.attention(q, k, v, mask=np.ones((3, 3), bool)), torch.Tensor)
    assert_type(ch.attention(torch.nn.Parameter(q), k, v), torch.Tensor)
    assert_type(ch.attention(*(torch.nn.Parameter(q),) * 3), torch.Tensor)
    assert_type(ch.gradients(q, k, v, q), tuple[torch.Tensor, torch.Tensor, torch.Tensor])
    assert_type(ch.rotary()(q, offset=3), torch.Tensor)
    seen = ch.observe(q, k, v, top=2)
    assert_type(seen, ch.Observed[torch.Tensor])
    assert_type(seen.lse, torch.Tensor)
    assert seen.top is not None
    assert_type(seen.top.weights, torch.Tensor)
    assert_type(seen.numpy(), ch.Observed[np.ndarray])
    assert_type(ch.merge(seen.partial), ch.Partial[torch.Tensor])


def with_jax(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    assert_type(ch.attention(q, k, v, mask=ch.window(2)), jax.Array)
    assert_type(ch.observe(q, k, v), ch.Observed[jax.Array])
    assert_type(ch.observe(q, k, v).entropy, jax.Array)
    assert_type(ch.gradients(q, k, v, q), tuple[jax.Array, jax.Array, jax.Array])
    assert_type(ch.rotary()(q), jax.Array)


def values(q: np.ndarray) -> None:
    assert_type(ch.causal() & ch.window(3), ch.Mask)
    assert_type(~ch.causal() | np.ones((3, 3), bool), ch.Mask)
    assert_type(ch.where(np.ones((3, 3), bool)), ch.Mask)
    assert_type(ch.hides(np.ones((3, 3))) & ch.lets(np.ones((3, 3), int)), ch.Mask)
    assert_type(ch.padding([[1, 1, 0]]) == ch.padding(np.array([[1, 1, 0]])), bool)
    assert_type(ch.alibi(2), Bias)
    assert_type(ch.rotary(scaling=ch.Linear(2.0)), Rotary)
    assert_type(ch.plan(q, q, q), ch.Plan)
    assert_type(ch.plan(q, q, q).kernel, str)
    assert_type(ch.trace(q, q, q, query=0), ch.Trace)
    assert_type(ch.scaling([4], keys=8, queries=2), ch.Scaling)


def left_open(seen: ch.Observed, part: ch.Partial) -> None:
    assert_type(seen.output, Any)
    assert_type(part.lse, Any)


def imported_later(model: torch.nn.Module, q: torch.Tensor) -> None:
    with ch.watch(model) as seen:
        model(q)
    assert_type(seen, ch.Seen)
    assert_type(ch.check(torch.nn.functional.scaled_dot_product_attention), ch.Report)
    attend = ch.nn.MultiHeadAttention(4, 2)
    assert_type(attend, ch.nn.MultiHeadAttention)
    assert_type(ch.nn.functional.scaled_dot_product_attention(q, q, q), torch.Tensor)


def mistakes(n: np.ndarray, t: torch.Tensor, j: jax.Array) -> None:
    ch.attention("q", "k", "v")  # refused
    ch.attention([[1.0]], n, n)  # refused
    ch.attention(n, n)  # refused
    ch.attention(n, n, n, mask="causal")  # refused
    ch.attention(n, n, n, sinks=[0.0, 1.0])  # refused
    ch.attention(n, n, n, causal=True)  # refused
    ch.observe(3.0, n, n)  # refused
    ch.merge(ch.observe(n, n, n))  # refused
    ch.no_such_name()  # refused
    n = ch.attention(t, t, t)  # refused
    t = ch.observe(j, j, j).output  # refused
    # arrays of two libraries: what comes out is neither
    n = ch.attention(n, t, t)  # refused
    t = ch.attention(t, j, j)  # refused
    ch.observe(n, t, t).output.cpu()  # refused
