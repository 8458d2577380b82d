"""What a described call means, in plain steps of JAX: for forward derivatives, second ones, and devices without a CPU.

It is the definition (`core/formula.py`), which builds the T×S matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clearhead.core import formula
from clearhead.core.arrays import Array, Library
from clearhead.core.asking import QueryWeights
from clearhead.core.lowered import evaluated
from clearhead.core.observations import OBSERVATIONS
from clearhead.kernels.collect import Gathered, Sizes
from clearhead.kernels.xla.spec import BY_DISTANCE, BY_PAIR, NUMBER, Spec


def forward(*operands: Array, spec: Spec) -> tuple[Array, ...]:
    """The results of the forward pass, in their order."""
    rest = iter(operands[3:])
    q, k, v = (array.astype(spec.precise) for array in operands[:3])
    if spec.grid.heads != spec.key_heads:
        k, v = (jnp.repeat(array, spec.grid.heads // max(spec.key_heads, 1), axis=-3) for array in (k, v))
    options: dict[str, Any] = {"scale": next(rest) if spec.scale is None else spec.scale, "softcap": spec.softcap}
    if spec.sinks:
        options["sinks"] = next(rest).astype(spec.precise)[:, None]
    if spec.bias[0] == BY_PAIR:
        options["bias"] = next(rest).astype(spec.precise)
    elif spec.bias[0] == BY_DISTANCE:
        options["bias"] = by_distance(next(rest), next(rest), spec)
    if spec.nodes:
        options["mask"] = allowed(spec, rest)
    emphasis = next(rest) if spec.weighted is not None else None
    answer = formula.attention(q, k, v, **options)
    row = (*spec.lead, spec.grid.queries)
    output = jnp.broadcast_to(answer.output, (*row, spec.width))
    lse, peak, entropy = (jnp.broadcast_to(a, row) for a in (answer.lse, answer.max_score, answer.entropy))
    found = [output if spec.unrounded else output.astype(spec.dtype), lse, lse, jnp.ones_like(lse)]
    if spec.want is not None:
        found += [peak, entropy, *observed(spec, jnp.broadcast_to(answer.weights, spec.grid.shape), emphasis)]
    return tuple(found)


def by_distance(table: Array, place: Array, spec: Spec) -> Array:
    """(…, heads, T, S) of numbers for each head and distance."""
    *_, centre = spec.bias
    away = np.arange(spec.grid.queries)[:, None] - np.arange(spec.grid.keys) + centre  # (T, S)
    entries = away + place[..., None, None]
    found = jnp.take(table, entries, axis=1, mode="clip")  # (heads, …, T, S)
    return jnp.moveaxis(found, 0, -3)


def observed(spec: Spec, weights: Array, emphasis: Array | None) -> list[Array]:
    """What is wanted of the weights; `emphasis` is how much each query counts, where that is said."""
    assert spec.want is not None
    grid, want = spec.grid, spec.want
    if spec.weighted is not None:
        by_name: dict[str, Any] = {spec.weighted: QueryWeights(emphasis)}
        want = replace(want, **by_name)
    gathered = Gathered(want, Sizes(Library.of(weights), weights.dtype, spec.lead, grid.queries, grid.keys))
    if grid.queries and grid.keys:
        gathered.see(weights, range(grid.queries), range(grid.keys))
    gathered.end_rows(range(grid.queries))
    found, results = [], gathered.results()
    for name, rooms in spec.asked().items():
        one = OBSERVATIONS[name]
        arrays = [a for a, part in zip(one.arrays(results[name]), one.parts, strict=True) if part.led]
        found += [array.astype(room.dtype) for array, room in zip(arrays, rooms, strict=True)]
    return found


def allowed(spec: Spec, rest: Iterator[Array]) -> Array:
    """Which pairs the mask allows, that broadcasts to (*batch, heads, T, S)."""
    found: list[Array] = []
    for node in spec.nodes:
        fields: list[Array] = []
        for kind, *number in node.fields:
            fields.append(number[0] if kind == NUMBER else next(rest))
        array = next(rest) if node.array else None
        parts = [found[place] for place in (node.left, node.right) if place >= 0]
        found.append(evaluated(node.kind, node.constant, fields, array, parts, spec.grid, jnp))
    return found[-1]


def backward(*operands: Array, spec: Spec, with_lse: bool, precise: bool) -> tuple[Array, ...]:
    """dq, dk and dv over all batch rows, and those of sinks, from what `forward` gave; in the order of its operands."""
    count = len(spec.roles)
    given, dout, dlse = operands[:count], operands[count], operands[-1] if with_lse else None
    whole = [jnp.broadcast_to(array, (*spec.batch, *array.shape[-3:])) for array in given[:3]]
    sinks = []
    if spec.place_of_sinks is not None:
        # one for each batch row, so that their gradients are not summed yet
        sinks = [jnp.broadcast_to(given[spec.place_of_sinks], spec.lead)]

    def call(q: Array, k: Array, v: Array, *sinks: Array) -> tuple[Array, Array]:
        if not sinks:
            return forward(q, k, v, *given[3:], spec=spec.exactly())[:2]
        return with_sinks(q, k, v, sinks[0], given[3:], spec)

    exact = [array.astype(spec.precise) for array in whole]
    outputs, pull = jax.vjp(call, *exact, *sinks)
    slopes = (dout.astype(spec.precise), jnp.zeros_like(outputs[1]) if dlse is None else dlse)
    found = pull(slopes)
    types = result_types(spec, given, precise)
    return tuple(gradient.astype(dtype) for gradient, dtype in zip(found, types, strict=True))


def with_sinks(q: Array, k: Array, v: Array, sinks: Array, rest: tuple[Array, ...], spec: Spec) -> tuple[Array, Array]:
    """Output and log-sum-exp with sinks for each batch row: as if without them, and scaled down by their share."""
    place = spec.place_of_sinks
    assert place is not None
    without = Spec(**{**vars_of(spec), "sinks": False, "unrounded": True, "want": None})
    output, lse, *_ = forward(q, k, v, *(a for n, a in enumerate(rest, 3) if n != place), spec=without)
    both = jnp.logaddexp(lse, sinks[..., None])
    share = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(jnp.where(lse == -jnp.inf, 0.0, lse - both)))
    return output * share[..., None], both


def vars_of(spec: Spec) -> dict[str, Any]:
    """The fields of a spec."""
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def result_types(spec: Spec, operands: Any, precise: bool) -> list[Any]:
    """The types of gradients: of what batch rows share the precision of sums, since it is yet to be summed."""
    types = []
    for array in operands[:3]:
        shared = tuple(array.shape[:-3]) != spec.batch
        types.append(spec.precise if shared or precise else array.dtype)
    return types + [spec.precise] * spec.sinks


def tangent(*operands: Array, spec: Spec, given: tuple[int, ...]) -> tuple[Array, ...]:
    """How the results change where some operands do: those that are real numbers, but peak and total."""
    count = len(spec.roles)
    primals, moves = list(operands[:count]), operands[count + 3 :]

    def call(*moved: Array) -> tuple[Array, ...]:
        whole = list(primals)
        for place, array in zip(given, moved, strict=True):
            whole[place] = array
        return differentiated(forward(*whole, spec=spec), spec)

    # a change may be one for each batch row of an operand that they share, and the other way round
    shapes = [jnp.broadcast_shapes(primals[n].shape, move.shape) for n, move in zip(given, moves, strict=True)]
    moving = [jnp.broadcast_to(primals[n], shape) for n, shape in zip(given, shapes, strict=True)]
    changes = [jnp.broadcast_to(move, shape) for move, shape in zip(moves, shapes, strict=True)]
    return jax.jvp(call, tuple(moving), tuple(changes))[1]


def differentiated(results: Any, spec: Spec) -> tuple[Any, ...]:
    """Of the results, or their types, those that have derivatives."""
    found = [one for n, one in enumerate(results) if n not in (2, 3)]
    return tuple(one for one in found if jnp.issubdtype(one.dtype, jnp.floating))
