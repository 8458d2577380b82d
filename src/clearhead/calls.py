"""attention(), observe() and gradients(): check, choose, run."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any, Never, cast

import numpy as np

from clearhead.core.admit import admit, refuse_by_class, require_numbers
from clearhead.core.array_masks import of_pytorch
from clearhead.core.arrays import (
    AnyArray,
    Array,
    ArrayOf,
    ArrayT,
    Library,
    all_jax,
    dtype_name,
    is_torch,
    require_array,
)
from clearhead.core.errors import ArgumentError
from clearhead.core.foreign import ATTENTION, OBSERVE, closed, refuse_others
from clearhead.core.mask import Mask
from clearhead.core.observations import Observed, Want, want
from clearhead.core.partial import keys_share
from clearhead.core.positions import Bias
from clearhead.core.problem import Problem, pose
from clearhead.core.temperature import tempered
from clearhead.kernels.apart import Calls
from clearhead.kernels.choose import at_once, choose, choose_gradients, settled
from clearhead.kernels.contract import Kernel
from clearhead.kernels.dense import dense
from clearhead.kernels.observed_again import as_given
from clearhead.kernels.prepared import (
    OBSERVED,
    attended_kind,
    observed_here_kind,
    observed_jax_kind,
    observed_kind,
    remember_attended,
    remember_observed,
    remember_program,
    remember_what_ran,
)
from clearhead.torch_bridge import autograd


@closed
def attention(
    q: ArrayOf[ArrayT],
    k: ArrayOf[ArrayT],
    v: ArrayOf[ArrayT],
    *,
    mask: Mask | AnyArray | None = None,
    bias: Bias | AnyArray | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    dropout: tuple[float, int | Array] | None = None,
    kernel: str | None = None,
    **others: Never,
) -> ArrayT:
    """Scaled dot-product attention: softmax(q kᵀ · scale [softcap] [+ bias] [mask]) v.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 5, 64))  # 8 heads, 5 positions, 64 features
    >>> ch.attention(q, k, v, mask=ch.causal()).shape
    (8, 5, 64)

    Arrays are NumPy's, PyTorch's, JAX's or of any library that speaks the array API; the output is of the same library,
    dtype and device. On PyTorch tensors that need gradients they flow, `torch.compile`, `torch.export` and `torch.func`
    work, and `torch.autocast` is followed.
    To JAX it is one operation, which `jit`, `grad`, `vmap`, `scan` and `shard_map` take as any other.

    - q (…, Hq, T, D), k (…, Hk, S, D), v (…, Hk, S, Dv). Two-dimensional arrays are one head. Leading axes are batch
      and broadcast. Hq may be a multiple of Hk (grouped queries): query head h uses key head h // (Hq / Hk).
    - mask: a boolean array that broadcasts to (…, Hq, T, S), **True where a query may attend**, or a mask value such as
      `causal() & window(128)`. A query that may attend to nothing has output 0. Keys that no query may attend to never
      influence the result, even if they are NaN; a NaN or inf spoils exactly the queries that may attend to it.
    - bias: added to the scaled scores; an array that broadcasts, or `alibi(…)`, `relative_bias(…)`.
    - scale: 1/√D unless given; JAX may trace it, and differentiate by it. temperature: τ divides the scale, 1/(τ√D);
      above 1 it evens the weights out.
    - softcap: c·tanh(score / c), before bias and mask.
    - sinks: (Hq,), one logit a head that joins the softmax's denominator only; −inf is none, inf leaves output 0.
    - dropout: (probability, seed). The same seed drops the same weights in every kernel and library. A seed may be a
      PyTorch tensor of one number, or one that JAX traces.
    - kernel: the name of the kernel to use, which then runs or raises `KernelRefused`; `plan` says which one is chosen.

    Order: scores → scale → softcap → bias → mask → softmax → dropout → values. float16 and bfloat16 are summed in
    float32. A wrong argument raises `ArgumentError`, a `ValueError`, before anything is computed.
    """
    if others:
        refuse_others("attention", others, ATTENTION)
    plain = bias is None and softcap is None and sinks is None and dropout is None
    quick = False
    if temperature is not None:
        scale = tempered(temperature, scale, q)
    if plain and kernel is None and is_torch(q) and not _compiling():
        output = _of_tensors().at_a_glance(q, k, v, mask, scale)
        if output is not None:
            return output
    q, k, v = autograd.autocast(q, k, v)
    if plain and kernel is None:
        place = _place(q, k, v)
        quick = place == "cuda"
        output = None if place is None else at_once(place, q, k, v, mask, scale)
        if output is not None:
            return output
    if is_torch(q):
        mask = of_pytorch("mask", mask, q, k)
        if autograd.traced(kernel, q, k, v, mask, bias, sinks):
            from clearhead.torch_bridge.traced import traced_attention  # needs PyTorch, which is here now

            return traced_attention(q, k, v, mask, bias, scale, softcap, sinks, dropout, kernel)
        if autograd.overridden(q, k, v, mask, bias, sinks):
            for name, array in (("q", q), ("k", k), ("v", v), ("mask", mask), ("bias", bias), ("sinks", sinks)):
                refuse_by_class(name, array)
            options = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks}
            return autograd.hand_over(
                attention, (q, k, v), (mask, bias, sinks), **options, dropout=dropout, kernel=kernel
            )
    problem = pose(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
    if quick and (parts := Calls.of(problem, attention, scale=scale)) is not None:
        if (kind := attended_kind(q, k, v, mask, scale)) is not None:
            remember_attended(kind, parts)
        return cast(ArrayT, parts(q, k, v))
    chosen = choose(problem, kernel)
    if quick:  # by what later calls of this kind are computed by, now that it may be found
        output = at_once("cuda", q, k, v, mask, scale)
        if output is not None:
            return output
    found = problem.found  # the same of the problem to be differentiated
    output = problem.restore(_run(chosen, problem, kernel).output)
    kind = attended_kind(q, k, v, mask, scale) if quick and "recorded" in found and settled(problem) else None
    if kind is not None:
        _remember(kind, chosen, problem)
    if plain and kernel is None and "program" in problem.found:
        remember_program(problem, sys.modules["jax"].jit(problem.found["program"]))
    return output


@closed
def observe(
    q: ArrayOf[ArrayT],
    k: ArrayOf[ArrayT],
    v: ArrayOf[ArrayT],
    *,
    mask: Mask | AnyArray | None = None,
    bias: Bias | AnyArray | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    dropout: tuple[float, int | Array] | None = None,
    kernel: str | None = None,
    top: int | None = None,
    received: bool | int | AnyArray | None = None,
    received_max: bool | int | None = None,
    removal: bool | int | None = None,
    map: tuple[int, int] | None = None,
    queries: Any = None,
    weights: bool = False,
    **others: Never,
) -> Observed[ArrayT]:
    """Attention, and what it attended to, without the T×S matrix unless `weights=True` asks for it.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 300, 16))
    >>> seen = ch.observe(q, k, v, mask=ch.causal(), top=3, received=True, map=(10, 10), queries=[-1])
    >>> seen.top.indices.shape, seen.received.shape, seen.map.mean.shape, seen.queries.weights.shape
    ((2, 300, 3), (2, 300), (2, 10, 10), (2, 1, 300))

    The other arguments are those of `attention`. Always there, for each query: `lse`, the log-sum-exp of its scores in
    nats, with the sink if there is one; `max_score`; `entropy`, −Σ w ln w over the keys in nats. On request:

    - top=k: the k largest weights of each query and their keys; index −1 where there are fewer.
    - received=True, or the number of last queries to count: the attention each key received, summed over queries. Or a
      weight for each query, an array that broadcasts to (…, Hq, T): each counts as much as its weight.
    - received_max=True, or so many last queries: the largest weight that each key received.
    - removal=True, or so many last queries: how much outputs would change without each key, Σ ‖o − o without it‖² over
      queries, which is Σ (w / (1 − w))² ‖v − o‖². Where a query leaves less than 2⁻¹² of its weight to the others, ‖o‖²
      counts. Not with dropout.
    - map=(rows, columns): the matrix pooled to at most that size, mean and max; query i is in row i·rows // T.
    - queries=[…]: the exact weights of those queries.
    - weights=True: the whole matrix.

    What keys received has a number for each query head, (…, Hq, S): whoever wants one for each key adds up the heads
    that share it, or takes the largest. All of them speak of the weights before dropout. In PyTorch gradients flow
    through `output` and `lse`, whichever kernel runs, so also through `merge`; what else is observed carries none.
    """
    if others:
        refuse_others("observe", others, OBSERVE)
    if temperature is not None:
        scale = tempered(temperature, scale, q)
    q, k, v = autograd.autocast(q, k, v)
    kind = None
    plain = bias is None and softcap is None and sinks is None and dropout is None and queries is None and not weights
    place = _place(q, k, v) if plain and kernel is None else None
    if place is not None:
        kind_of = {"cuda": observed_kind, "jax": observed_jax_kind}.get(place, observed_here_kind)
        kind = kind_of(q, k, v, mask, scale, (top, received, received_max, removal, map))
        again = None if kind is None else OBSERVED.get(kind)
        seen = None if again is None else again(q, k, v)
        if seen is not None:
            return seen
    mask = of_pytorch("mask", mask, q, k)
    require_numbers(kernel, q=q, k=k, v=v, mask=mask, bias=bias, sinks=sinks)
    asked = partial(
        want, top=top, received=received, received_max=received_max, removal=removal, map=map, queries=queries,
        weights=weights,
    )  # fmt: skip
    problem = pose(
        q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, want=asked
    )  # fmt: skip
    if place == "cuda" and kind is not None and (parts := Calls.of(problem, observe, scale=scale)) is not None:
        remember_observed(kind, parts)
        return cast(Observed[ArrayT], parts(q, k, v))
    observed = _run(choose(problem, kernel), problem, kernel)
    if place in ("cuda", "jax") or (kind is not None and as_given(problem, q, k, v)):
        remember_what_ran(problem, kind)
    if problem.sinks is not None:
        observed = replace(observed, share=keys_share(problem.library, problem.sinks, observed.lse))
    return observed.each(problem.restore) if problem.headless else observed


@closed
def gradients(
    q: ArrayOf[ArrayT],
    k: ArrayOf[ArrayT],
    v: ArrayOf[ArrayT],
    dout: ArrayOf[ArrayT],
    *,
    mask: Mask | AnyArray | None = None,
    bias: Bias | AnyArray | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    dropout: tuple[float, int | Array] | None = None,
    kernel: str | None = None,
    dlse: ArrayOf[ArrayT] | None = None,
    **others: Never,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """(dq, dk, dv): the exact gradients of `(attention(q, k, v, …) * dout).sum()`, recomputed by tile in O(n) memory.

    For libraries without autograd; PyTorch users call `backward`. `dlse` (…, T), if given, is the gradient of the
    log-sum-exp that `observe` gives, which a loss depends on where parts are merged.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 5, 8))
    >>> [g.shape for g in ch.gradients(q, k, v, dout)]
    [(5, 8), (5, 8), (5, 8)]
    """
    if others:
        refuse_others("gradients", others, ATTENTION)
    mask = of_pytorch("mask", mask, q, k)
    if temperature is not None:
        scale = tempered(temperature, scale, q)
    require_numbers(kernel, q=q, k=k, v=v, dout=dout, mask=mask, bias=bias, sinks=sinks, dlse=dlse)
    problem = pose(
        q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout,
        want=None if dlse is None else lambda grid: Want(),  # who differentiates a log-sum-exp has observed it
    )  # fmt: skip
    problem = problem.to_be_differentiated()
    grid = problem.grid
    rows = (*grid.batch, grid.heads, grid.queries)
    dout = _checked("dout", problem, dout, (*rows, problem.width), dtype_name(problem.q), "the output")
    if dlse is not None:
        computing = "float64" if dtype_name(problem.q) == "float64" else "float32"
        dlse = _checked("dlse", problem, dlse, rows, computing, "the log-sum-exp")
    chosen = choose(problem, kernel)
    ran = chosen.run(problem)
    found = choose_gradients(problem, chosen, kernel).gradients(problem, dout, ran.precise, ran.peak, ran.total, dlse)
    given = zip((found.dq, found.dk, found.dv), (q, k, v), strict=True)
    dq, dk, dv = (problem.library.xp.reshape(gradient, tuple(like.shape)) for gradient, like in given)
    return dq, dk, dv


@cache
def _of_tensors() -> ModuleType:
    """What needs PyTorch, which is here: a statement that imports it takes an eighth of a short call."""
    from clearhead.torch_bridge import usual

    return usual


def _compiling() -> bool:
    """True where PyTorch, which is here, compiles what is called: nothing is usual then."""
    compiling: bool = sys.modules["torch"].compiler.is_compiling()
    return compiling


def _place(q: Any, k: Any, v: Any) -> str | None:
    """Where arrays lie of which nothing is unusual, as `at_once` calls it; None for others."""
    if type(q) is type(k) is type(v) is np.ndarray:
        return "numpy"
    if is_torch(q):
        return None if _compiling() or not _of_tensors().usual(q, k, v) else "cuda" if q.is_cuda else "torch"
    return "jax" if all_jax(q, k, v) else None


def _run(kernel: Kernel, problem: Problem, name: str | None) -> Observed:
    if not autograd.wanted(problem):
        return kernel.run(problem).observed
    if kernel is dense:  # the formula is made of differentiable steps; every other kernel brings a backward of its own
        return autograd.as_observed(kernel.run(problem).observed)
    problem = problem.to_be_differentiated()
    return autograd.run(kernel, choose_gradients(problem, kernel, name), problem)


def _remember(kind: Any, kernel: Kernel, problem: Problem) -> None:
    """Keep what a call on a GPU has recorded for the next one of its kind."""
    from clearhead.kernels.gpu import run  # needs Triton, which has run

    again: Any
    if not autograd.wanted(problem):
        again = run.Attended(*problem.found["recorded"])
    else:
        from clearhead.torch_bridge.trained import Trained  # needs PyTorch, which is here now

        problem = problem.to_be_differentiated()
        again = Trained.of(problem, choose_gradients(problem, kernel), run.Learnt(*problem.found["recorded"]))
    if again is not None:
        remember_attended(kind, again)


def _checked(name: str, problem: Problem, gradient: Array, expected: tuple[int, ...], dtype: str, of: str) -> Array:
    """The gradient of a result, shaped as that is."""
    require_array(name, gradient)
    gradient = admit(name, gradient)
    shape = expected[1:] if problem.headless else expected
    if tuple(gradient.shape) != shape:
        raise ArgumentError(name, f"has shape {tuple(gradient.shape)}, expected {shape} as {of}")
    if not problem.library.owns(gradient) or dtype_name(gradient) != dtype:
        given = f"{Library.of(gradient).name} of dtype {dtype_name(gradient)}"
        raise ArgumentError(name, f"is {given}, expected {problem.library.name} of {dtype} as {of}")
    return problem.library.xp.reshape(gradient, expected)
