"""cuDNN's attention for JAX arrays on a GPU, by way of JAX's own: what it takes, and in which words.

`jax.nn.dot_product_attention` wants heads after positions, and to turn arrays there and back costs up to a sixth of a
call; the function that it calls takes them as they lie, and is taken where JAX has it as it is known here. JAX
differentiates both by cuDNN's own backward pass, so they are as fast under `jit` and `grad` as by hand.
"""

from __future__ import annotations

import importlib
import inspect
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
from clearhead.kernels.prepared import remember_program

TYPES = ("float16", "bfloat16")
WIDEST, WIDTHS = 256, 8
# of the arrays, as JAX's way to cuDNN calls it: batch, heads, positions, features
LAYOUT = "BNTH"
NEEDED = (
    "bias", "q_seqlen", "kv_seqlen", "scale", "mask_type", "qkv_layout", "sliding_window_length", "CAUSAL", "NO_MASK",
    "PADDING", "PADDING_CAUSAL",
)  # fmt: skip
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


def no_cudnn() -> str | None:
    """Why JAX has no cuDNN here; None where it has."""
    if not_as_they_lie() is None:
        return None
    reason = unable("turned")
    return None if reason is None else f"JAX has no cuDNN here: {reason}"


@cache
def unable(by: str) -> str | None:
    """Why JAX does not compile a call in one of the WAYS, tried once, with the smallest; None where it does."""
    jax = sys.modules["jax"]
    one, way = jax.ShapeDtypeStruct((1, 1, 64, 64), np.dtype("float16")), Way((1,), 1.0, False, None, by)
    try:
        jax.jit(lambda q: attend(way, q, q, q, None, None)).lower(one).compile()
    except Exception as error:  # in JAX's words, whatever is missing
        return first_line(error)
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


class Way(NamedTuple):
    """All of a call but its arrays, by which it is compiled once."""

    batch: tuple[int, ...]
    scale: float
    causal: bool
    window: tuple[int, int] | None
    by: str  # of WAYS


def attend(way: Way, q: Array, k: Array, v: Array, lengths: Array | None, bias: Array | None) -> Array:
    """The output (*batch, heads, T, D); `lengths` one for all batch rows, or one for each."""
    jnp = sys.modules["jax"].numpy

    def rows(array: Array) -> Array:  # (batch, heads, positions, features)
        return jnp.broadcast_to(array, (*way.batch, *array.shape[-3:])).reshape(-1, *array.shape[-3:])

    q, k, v = rows(q), rows(k), rows(v)
    if lengths is not None:
        lengths = jnp.clip(jnp.broadcast_to(jnp.reshape(lengths, -1), q.shape[:1]), 0, k.shape[-2]).astype(jnp.int32)
        # what is hidden never influences the result, whatever it holds; and a row without keys is zero, below
        seen = (jnp.arange(k.shape[-2]) < lengths[:, None])[:, None, :, None]
        k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)
    given = None if lengths is None else jnp.maximum(lengths, 1)
    bias = None if bias is None else bias[(None,) * (4 - bias.ndim) + (...,)]
    output = WAYS[way.by](way, q, k, v, given, bias)
    if lengths is not None:
        output = jnp.where((lengths > 0)[:, None, None, None], output, 0)
    return output.reshape(*way.batch, *output.shape[1:])


def heads_first(way: Way, q: Array, k: Array, v: Array, lengths: Array | None, bias: Array | None) -> Array:
    """By the function that `jax.nn.dot_product_attention` calls, which also takes heads before positions."""
    own = entry()
    jnp, kinds = sys.modules["jax"].numpy, own.MaskType
    options: dict[str, Any] = {}
    mask = kinds.CAUSAL if way.causal else kinds.NO_MASK
    if lengths is not None:
        mask = kinds.PADDING_CAUSAL if way.causal else kinds.PADDING
        options = {"q_seqlen": jnp.full(q.shape[:1], q.shape[-2], jnp.int32), "kv_seqlen": lengths}
    if way.window is not None:
        options["sliding_window_length"] = way.window[0] + 1  # how many keys a query sees, itself the last
    return own.dot_product_attention(
        q, k, v, bias=bias, scale=way.scale, mask_type=mask, qkv_layout=LAYOUT, **options
    )  # fmt: skip


def turned(way: Way, q: Array, k: Array, v: Array, lengths: Array | None, bias: Array | None) -> Array:
    """By JAX's public function, whose heads come after positions: arrays are copied there and back."""
    jax = sys.modules["jax"]
    options: dict[str, Any] = {} if way.window is None else {"local_window_size": way.window}
    q, k, v = (jax.numpy.swapaxes(array, 1, 2) for array in (q, k, v))
    output = jax.nn.dot_product_attention(
        q, k, v, bias=bias, scale=way.scale, is_causal=way.causal, key_value_seq_lengths=lengths,
        implementation="xla" if way.by == "xla" else "cudnn", **options,
    )  # fmt: skip
    return jax.numpy.swapaxes(output, 1, 2)


# "xla" means the same in XLA's own steps, for devices without cuDNN
WAYS = {"heads first": heads_first, "turned": turned, "xla": turned}


def entry() -> Any:
    """The module of JAX's own way to cuDNN."""
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


@cache
def no_entry() -> str | None:
    """Why that way cannot be called as here: it is none that JAX promises to keep."""
    version = sys.modules["jax"].__version__
    try:
        own = entry()
        there = {*inspect.signature(own.dot_product_attention).parameters, *(kind.name for kind in own.MaskType)}
    except Exception as error:  # whatever JAX has there by then
        return f"JAX {version} has it elsewhere: {first_line(error)}"
    missing = [name for name in NEEDED if name not in there]
    return f"JAX {version} knows no {missing[0]} there" if missing else None


def not_as_they_lie() -> str | None:
    """Why arrays are turned before cuDNN has them; None where they are not."""
    return no_entry() or unable("heads first")


def how(problem: Problem) -> str | None:
    """How cuDNN is reached, in words."""
    reason = not_as_they_lie()
    if reason is None:
        return "cuDNN through XLA, on arrays as they lie"
    return f"cuDNN through jax.nn, on arrays turned to have heads after positions: {reason}"


def posed(problem: Problem, by: str | None) -> tuple[Way, tuple[Array | None, ...]]:
    """A problem as a way and its arrays."""
    mask, _ = meant(problem.mask, problem)
    by = by or ("heads first" if not_as_they_lie() is None else "turned")
    way = Way(problem.grid.batch, float(problem.scale), mask.causal, mask.window, by)
    lengths = mask.lengths
    if isinstance(lengths, int | np.ndarray):  # before JAX cuts them to 32 bits
        lengths = np.clip(lengths, 0, problem.grid.keys)
    bias = None if problem.bias is None else problem.bias.parameter
    return way, (problem.q, problem.k, problem.v, lengths, bias)


@cache
def program() -> Any:
    """`attend`, compiled once for each way: of its steps one by one each would cost more than a short attention."""
    return sys.modules["jax"].jit(lambda way, *arrays: attend(way, *arrays), static_argnums=0)


@cache
def gradient_program() -> Any:
    """The same for dq, dk and dv."""
    jax = sys.modules["jax"]

    def pulled(way: Way, q: Array, k: Array, v: Array, lengths: Array | None, bias: Array | None, dout: Array) -> Any:
        return jax.vjp(lambda q, k, v: attend(way, q, k, v, lengths, bias), q, k, v)[1](dout)

    return jax.jit(pulled, static_argnums=0)


def run(problem: Problem, by: str | None = None) -> Ran:
    """The output alone: who does not observe asks for no log-sum-exp, and JAX would round it."""
    way, arrays = posed(problem, by)
    output = program()(way, *arrays)
    if by is None and problem.bias is None and arrays[3] is None:
        remember_program(problem, lambda q, k, v: program()(way, q, k, v, None, None))
    return Ran(Observed(output=output, lse=None, max_score=None, entropy=None, kernel="vendor"), None, None)


def gradients(problem: Problem, dout: Array, by: str | None = None) -> Gradients:
    """dq, dk and dv, as JAX takes them; cuDNN's backward pass runs after its forward once more."""
    way, arrays = posed(problem, by)
    return Gradients(*gradient_program()(way, *arrays, dout))
