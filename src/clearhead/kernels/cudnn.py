"""cuDNN's attention for JAX arrays on a GPU, by `jax.nn.dot_product_attention`: what it takes, and in which words.

JAX differentiates it by cuDNN's own backward pass, so it is as fast under `jit` and `grad` as it is by hand.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.arrays import Array, dtype_name, is_traced, jax_platform
from clearhead.core.errors import first_line
from clearhead.core.formula import Gradients
from clearhead.core.mask import Mask
from clearhead.core.observations import Observed
from clearhead.core.positions import Added
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Ran

TYPES = ("float16", "bfloat16")
WIDEST, WIDTHS = 256, 8
FIRST = "its causal masks and windows are for as many queries as keys, the first at the first key"


class Meant(NamedTuple):
    """A mask in the words of `jax.nn.dot_product_attention`."""

    causal: bool = False
    window: tuple[int, int] | None = None
    lengths: Array | None = None


def rejects(problem: Problem) -> str | None:
    """Why cuDNN is not given a problem of JAX arrays."""
    return elsewhere(problem) or unfit(problem)


def elsewhere(problem: Problem) -> str | None:
    """Why the arrays are not where cuDNN is."""
    platform = jax_platform(problem.q)
    if platform != "gpu":
        return f"it takes JAX arrays on a GPU, not on {platform}"
    return no_cudnn()


@cache
def no_cudnn() -> str | None:
    """Why JAX has no cuDNN here; None where it has. A call of the smallest size is compiled, once."""
    jax = sys.modules["jax"]
    one = jax.ShapeDtypeStruct((1, 64, 1, 64), np.dtype("float16"))
    try:
        jax.jit(lambda q: jax.nn.dot_product_attention(q, q, q, implementation="cudnn")).lower(one).compile()
    except Exception as error:  # in JAX's words, whatever is missing
        return f"JAX has no cuDNN here: {first_line(error)}"
    return None


def unfit(problem: Problem) -> str | None:
    """What of a problem is nothing for cuDNN, wherever it lies."""
    name = dtype_name(problem.q)
    if name not in TYPES:
        return f"it takes {' and '.join(TYPES)}, not {name}"
    if problem.want is not None:
        return "it gives neither entropy nor weights; `tiled` does"
    for option in ("softcap", "sinks", "dropout"):
        if getattr(problem, option) is not None:
            return f"it is for problems without {option}"
    if is_traced(problem.scale):
        return "it takes no traced scale"
    if not problem.scale > 0:
        return f"scale {problem.scale} is not above 0"
    features = problem.q.shape[-1]
    if problem.width != features or not 1 <= features <= WIDEST or features % WIDTHS:
        return f"{features} and {problem.width} features are not alike, at most {WIDEST} and a multiple of {WIDTHS}"
    if 0 in problem.grid.shape:
        return "there is nothing to attend to"
    return meant(problem.mask, problem)[1] or unfit_bias(problem)


def unfit_bias(problem: Problem) -> str | None:
    """Why a bias is not for it."""
    bias, grid = problem.bias, problem.grid
    if bias is None:
        return None
    if not isinstance(bias, Added):
        return f"it takes biases that are arrays, not {bias!r}"
    if dtype_name(bias.array) != dtype_name(problem.q):
        return f"it takes biases of {dtype_name(problem.q)} as q is, not {dtype_name(bias.array)}"
    if tuple(bias.array.shape[-2:]) != (grid.queries, grid.keys) or grid.queries % 2 or grid.keys % 2:
        return "it takes biases with a number for each pair, of an even number of queries and keys"
    if len(grid.batch) > 1:
        return "it takes biases of problems with one batch axis"
    return None


def meant(mask: Mask | None, problem: Problem) -> tuple[Meant, str | None]:
    """A mask in cuDNN's words, or why it has none for it: causal, a window back, lengths, and one & another."""
    grid = problem.grid
    if mask is None:
        return Meant(), None
    span = mask.lower(grid).span(grid.keys)
    words = repr(mask)
    other = f"it takes causal(), window(back) and lengths(), not {words if len(words) <= 40 else 'that mask'}"
    if span is None:
        return Meant(), other
    low, high, count = span
    if not (isinstance(low, int) and isinstance(high, int)):
        return Meant(), "its causal masks and windows start at one key for all batch rows"
    lengths = None if isinstance(count, int) and count >= grid.keys else count
    if high >= grid.keys - 1 and low <= 1 - grid.queries:
        return Meant(lengths=lengths), None
    if high != 0 or grid.queries != grid.keys:
        return Meant(), other if high > 0 and low > -grid.queries else FIRST
    return Meant(True, None if low <= 1 - grid.queries else (-low, 0), lengths), None


def attend(problem: Problem, q: Array, k: Array, v: Array, bias: Array | None, implementation: str) -> Array:
    """The output (*batch, heads, T, D), by JAX's own function."""
    jax = sys.modules["jax"]
    jnp, grid = jax.numpy, problem.grid
    mask, _ = meant(problem.mask, problem)

    def rows(array: Array) -> Array:
        whole = jnp.broadcast_to(array, (*grid.batch, *array.shape[-3:]))
        return jnp.swapaxes(whole.reshape(-1, *array.shape[-3:]), 1, 2)  # (batch, positions, heads, features)

    options: dict[str, Any] = {
        "scale": float(problem.scale),
        "is_causal": mask.causal,
        "implementation": implementation,
    }
    if mask.window is not None:
        options["local_window_size"] = mask.window
    q, k, v = rows(q), rows(k), rows(v)
    lengths = None
    if mask.lengths is not None:
        lengths = jnp.broadcast_to(jnp.asarray(mask.lengths).reshape(-1), (q.shape[0],))
        lengths = jnp.clip(lengths, 0, grid.keys).astype(jnp.int32)
        # what is hidden never influences the result, whatever it holds; and a row without keys is zero, below
        seen = (jnp.arange(grid.keys) < lengths[:, None])[..., None, None]
        k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)
        options["key_value_seq_lengths"] = jnp.maximum(lengths, 1)
    if bias is not None:
        options["bias"] = bias[(None,) * (4 - bias.ndim) + (...,)]
    output = jax.nn.dot_product_attention(q, k, v, **options)
    if lengths is not None:
        output = jnp.where((lengths > 0)[:, None, None, None], output, 0)
    return jnp.swapaxes(output, 1, 2).reshape(*grid.batch, grid.heads, grid.queries, problem.width)


def run(problem: Problem, implementation: str = "cudnn") -> Ran:
    """The output alone: who does not observe asks for no log-sum-exp, and JAX would round it."""
    bias = None if problem.bias is None else problem.bias.parameter
    output = attend(problem, problem.q, problem.k, problem.v, bias, implementation)
    return Ran(Observed(output=output, lse=None, max_score=None, entropy=None, kernel="vendor"), None, None)


def gradients(problem: Problem, dout: Array, implementation: str = "cudnn") -> Gradients:
    """dq, dk and dv, as JAX takes them; cuDNN's backward pass runs after its forward once more."""
    bias = None if problem.bias is None else problem.bias.parameter

    def call(q: Array, k: Array, v: Array) -> Array:
        return attend(problem, q, k, v, bias, implementation)

    _, pull = sys.modules["jax"].vjp(call, problem.q, problem.k, problem.v)
    return Gradients(*pull(dout))
