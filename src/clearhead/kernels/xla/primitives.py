"""Attention as operations of JAX: what they give, how they are compiled, mapped and differentiated.

`forward` is the call; `tangent` how its results change where its operands do, which is linear in that change;
`backward` what `tangent` becomes in reverse. XLA calls `native/` for the first and the last on a CPU; whatever else is
asked for, it has in plain steps (`meaning.py`).
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import jax
import jax.interpreters.ad
import jax.interpreters.batching
import jax.interpreters.mlir
import jax.numpy as jnp
from jax import interpreters
from jax.extend.core import Primitive

from clearhead.core.arrays import Array
from clearhead.kernels.prepared import main_thread
from clearhead.kernels.threads import allow
from clearhead.kernels.xla import direct, lending, meaning
from clearhead.kernels.xla.interface import lowered
from clearhead.kernels.xla.spec import Room, Spec

# which have types for some of their functions only
ad: Any = interpreters.ad
batching: Any = interpreters.batching
mlir: Any = interpreters.mlir

forward_p: Any = Primitive("clearhead_attention")
tangent_p: Any = Primitive("clearhead_attention_tangent")
backward_p: Any = Primitive("clearhead_attention_backward")
for primitive in (forward_p, tangent_p, backward_p):
    primitive.multiple_results = True


def bind(primitive: Any, operands: Any, **parameters: Any) -> list[Array]:
    """The operation; inside `shard_map` every operand is made to differ over the axes that one of them differs over."""
    return list(primitive.bind(*same_over_axes(operands), **parameters))


def same_over_axes(operands: Any) -> Any:
    """As JAX's own operations do it, so that gradients of what all devices share are added up over them."""
    if not any(isinstance(operand, jax.core.Tracer) for operand in operands):
        return operands
    differ = [axes_of(getattr(operand, "aval", None)) for operand in operands]
    every = frozenset().union(*differ)
    if not every:
        return operands
    return [
        operand if own == every else varying(operand, tuple(every - own))
        for operand, own in zip(operands, differ, strict=True)
    ]


def varying(operand: Array, axes: tuple[str, ...]) -> Array:
    """The operand as one that differs over these axes of a mesh."""
    lax: Any = jax.lax
    return lax.pcast(operand, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(operand, axes)


def axes_of(aval: Any) -> frozenset[str]:
    """The axes of a mesh over which a value differs inside `shard_map`; JAX has renamed the field that says so."""
    kind = getattr(aval, "mat", None)
    return getattr(aval, "vma", None) or frozenset() if kind is None else kind.varying


def abstract(rooms: list[Room], avals: Any) -> list[Any]:
    """The types of results; inside `shard_map` they differ over the axes that operands differ over."""
    one = avals[0]
    axes: Any = jax.sharding.PartitionSpec
    if not axes_of(one):
        return [jax.core.ShapedArray(room.shape, room.dtype) for room in rooms]
    return [
        one.update(
            shape=room.shape,
            dtype=room.dtype,
            weak_type=False,
            sharding=one.sharding.update(spec=axes(*[None] * len(room.shape))),
        )
        for room in rooms
    ]


def gradient_rooms(operands: Any, spec: Spec, precise: bool) -> list[Room]:
    """The results of the backward pass."""
    types = meaning.result_types(spec, operands, precise)
    shapes = [(*spec.batch, *array.shape[-3:]) for array in operands[:3]] + [spec.lead] * spec.sinks
    return [Room(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]


def tangent_rooms(dtype: Any, spec: Spec) -> tuple[Room, ...]:
    """The results of the tangent."""
    return meaning.differentiated(spec.rooms(dtype), spec)


@forward_p.def_abstract_eval  # type: ignore[untyped-decorator]  # JAX's own
def _(*avals: Any, spec: Spec) -> list[Any]:
    return abstract(spec.rooms(avals[0].dtype), avals)


@tangent_p.def_abstract_eval  # type: ignore[untyped-decorator]  # JAX's own
def _(*avals: Any, spec: Spec, given: tuple[int, ...]) -> list[Any]:
    return abstract(list(tangent_rooms(avals[0].dtype, spec)), avals)


@backward_p.def_abstract_eval  # type: ignore[untyped-decorator]  # JAX's own
def _(*avals: Any, spec: Spec, with_lse: bool, precise: bool) -> list[Any]:
    return abstract(gradient_rooms(avals, spec, precise), avals)


# Calls that are not compiled. One of a kind that was seen before is a program of XLA's, which makes its results with
# less ado than JAX takes arrays over; the first is not worth compiling. One that takes long never is: XLA's programs
# run to their end whatever happens, and somebody may want to interrupt it.
_programs: dict[Any, Any] = {}
MOST = 512


def at_once(primitive: Any, operands: Any, rooms: list[Room], *, back: bool, **parameters: Any) -> list[Array]:
    """The results for arrays that are there."""
    spec, with_lse = parameters["spec"], bool(parameters.get("with_lse"))
    if spec.lent is None and direct.tries_patience(spec) and main_thread() and direct.lie_here(operands):
        return direct.run(spec, operands, rooms, back=back, with_lse=with_lse)
    key = (primitive, tuple(parameters.items()), tuple((a.shape, a.dtype) for a in operands))
    if key in _programs or spec.lent is not None or not direct.lie_here(operands):
        program = _programs.get(key)
        if program is None:
            make_room()
            program = _programs[key] = jax.jit(partial(primitive.bind, **parameters))
        allow()
        return program(*operands)
    make_room()
    _programs[key] = None
    return direct.run(spec, operands, rooms, back=back, with_lse=with_lse)


def make_room() -> None:
    """Let all programs go where there are many: those that are used will be made again."""
    if len(_programs) >= MOST:
        _programs.clear()


@forward_p.def_impl  # type: ignore[untyped-decorator]  # JAX's own
def _(*operands: Array, spec: Spec) -> list[Array]:
    return at_once(forward_p, operands, spec.rooms(operands[0].dtype), back=False, spec=spec)


@backward_p.def_impl  # type: ignore[untyped-decorator]  # JAX's own
def _(*operands: Array, spec: Spec, with_lse: bool, precise: bool) -> list[Array]:
    rooms = gradient_rooms(operands, spec, precise)
    return at_once(backward_p, operands, rooms, back=True, spec=spec, with_lse=with_lse, precise=precise)


tangent_p.def_impl(jax.jit(meaning.tangent, static_argnames=("spec", "given")))


def forward_lowering(ctx: Any, *operands: Any, spec: Spec, platform: str) -> Any:
    """The forward pass: by who lends the arrays, by the compiled kernel on a CPU, or else in plain steps."""
    if spec.lent is not None:
        return lending.lowered(ctx, operands, spec, back=False, with_lse=False, platform=platform)
    if platform == "cpu":
        return lowered(ctx, operands, spec, back=False, with_lse=False)
    return in_steps[forward_p](ctx, *operands, spec=spec)


def backward_lowering(
    ctx: Any, *operands: Any, spec: Spec, with_lse: bool, precise: bool, platform: str
) -> Any:  # fmt: skip
    """The backward pass, in the same way."""
    if spec.lent is not None:
        return lending.lowered(ctx, operands, spec, back=True, with_lse=with_lse, platform=platform)
    if platform == "cpu":
        return lowered(ctx, operands, spec, back=True, with_lse=with_lse)
    return in_steps[backward_p](ctx, *operands, spec=spec, with_lse=with_lse, precise=precise)


in_steps: dict[Any, Any] = {}
for primitive, plainly in (
    (forward_p, meaning.forward),
    (tangent_p, meaning.tangent),
    (backward_p, meaning.backward),
):
    in_steps[primitive] = mlir.lower_fun(plainly, multiple_results=True)
    mlir.register_lowering(primitive, in_steps[primitive])
for platform in ("cpu", "cuda"):
    mlir.register_lowering(forward_p, partial(forward_lowering, platform=platform), platform=platform)
    mlir.register_lowering(backward_p, partial(backward_lowering, platform=platform), platform=platform)


def mapped(primitive: Any, roles: Any, operands: Any, axes: Any, **parameters: Any) -> tuple[list[Array], list[int]]:
    """vmap: one more batch axis; one call after the other where what all batch rows share differs."""
    size = next(a.shape[axis] for a, axis in zip(operands, axes, strict=True) if axis is not None)
    pairs = list(zip(operands, axes, strict=True))
    front = [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in pairs]
    if all(led or axis is None for led, axis in zip(roles, axes, strict=True)):
        folded = [a[None] if led and axis is None else a for a, led, axis in zip(front, roles, axes, strict=True)]
        parameters["spec"] = parameters["spec"].over(size)
        results = bind(primitive, folded, **parameters)
    else:
        moving = [n for n, axis in enumerate(axes) if axis is not None]

        def one(some: list[Array]) -> list[Array]:
            whole = list(front)
            for n, array in zip(moving, some, strict=True):
                whole[n] = array
            return bind(primitive, whole, **parameters)

        results = jax.lax.map(one, [front[n] for n in moving])
    return results, [0] * len(results)


def _map_forward(operands: Any, axes: Any, *, spec: Spec) -> Any:
    return mapped(forward_p, spec.roles, operands, axes, spec=spec)


def _map_tangent(operands: Any, axes: Any, *, spec: Spec, given: tuple[int, ...]) -> Any:
    roles = (*spec.roles, True, True, True, *(spec.roles[n] for n in given))
    return mapped(tangent_p, roles, operands, axes, spec=spec, given=given)


def _map_backward(operands: Any, axes: Any, *, spec: Spec, with_lse: bool, precise: bool) -> Any:
    roles = (*spec.roles, *(True,) * (len(operands) - len(spec.roles)))
    return mapped(backward_p, roles, operands, axes, spec=spec, with_lse=with_lse, precise=precise)


batching.primitive_batchers[forward_p] = _map_forward
batching.primitive_batchers[tangent_p] = _map_tangent
batching.primitive_batchers[backward_p] = _map_backward


def _differentiate(operands: Any, moves: Any, *, spec: Spec) -> tuple[Any, Any]:
    """The results in full precision, from which the gradients are made, and how they change."""
    results = bind(forward_p, operands, spec=spec.exactly())
    exact, _, peak, total, *_ = results
    if not spec.unrounded:
        results[0] = exact.astype(operands[0].dtype)
    given = tuple(
        n for n, move in enumerate(moves)
        if type(move) is not ad.Zero and jnp.issubdtype(operands[n].dtype, jnp.floating)
    )  # fmt: skip
    none = [ad.Zero(result.aval.to_tangent_aval()) for result in results]
    if not given:
        return results, none
    moved = bind(tangent_p, [*operands, exact, peak, total, *(moves[n] for n in given)], spec=spec, given=given)
    left = iter(moved)
    changes = [
        none[n] if n in (2, 3) or not jnp.issubdtype(result.dtype, jnp.floating) else next(left)
        for n, result in enumerate(results)
    ]
    return results, changes


def _reverse(slopes: Any, *args: Any, spec: Spec, given: tuple[int, ...]) -> list[Any]:
    """From gradients of the results to those of the operands that `given` names."""
    count = len(spec.roles)
    operands, (exact, peak, total) = args[:count], args[count : count + 3]
    # of which a change may be one for each batch row, where the operand itself is one for all
    shapes = {n: tuple(move.aval.shape) for n, move in zip(given, args[count + 3 :], strict=True)}
    dout, dlse, *others = slopes
    found: dict[int, Array] = {}
    own = {0, 1, 2, spec.place_of_scale, spec.place_of_sinks}
    if own & set(given) and all(type(slope) is ad.Zero for slope in others):
        more = [] if type(dlse) is ad.Zero else [dlse]
        found = gradients(operands, [ad.instantiate_zeros(dout), exact, peak, total, *more], spec, shapes)
    left = {n: shape for n, shape in shapes.items() if n not in found}
    if left:
        found.update(zip(left, plainly_reversed(operands, slopes, spec, left), strict=True))
    return [None] * (count + 3) + [found[n] for n in given]


def gradients(operands: Any, given: list[Array], spec: Spec, shapes: dict[int, tuple[int, ...]]) -> dict[int, Array]:
    """Gradients by the place of the operand, in these shapes: of q, k, v, sinks and scale, where they are wanted."""
    operands = list(operands)
    wanted = set(shapes)
    by_scale, scale = spec.place_of_scale in wanted, operands[-1]
    if by_scale:
        # Σ dq · q is the scale times its gradient: of a scale of 0 one that is as good as 0
        scale = operands[3]
        operands[3] = jnp.where(scale == 0, jnp.asarray(2.0**-60, scale.dtype), scale)
    found = bind(
        backward_p, [*operands, *given], spec=spec, with_lse=len(given) == 5, precise=by_scale
    )  # fmt: skip
    results: dict[int, Array] = {}
    if by_scale:
        both = jnp.sum(found[0] * operands[0].astype(spec.precise))
        results[3] = (both / operands[3]).astype(scale.dtype)
        found[0] = jnp.where(scale == 0, 0.0, found[0])
    for n in wanted & {0, 1, 2}:
        axes = tuple(axis for axis, size in enumerate(spec.batch) if shapes[n][axis] != size)
        gradient = jnp.sum(found[n], axis=axes, keepdims=True) if axes else found[n]
        results[n] = gradient.astype(operands[n].dtype)
    place = spec.place_of_sinks
    if place in wanted:
        dsinks = jnp.sum(found[3], axis=tuple(range(len(spec.batch))))
        results[place] = dsinks.astype(operands[place].dtype)
    return results


def plainly_reversed(operands: Any, slopes: Any, spec: Spec, shapes: dict[int, tuple[int, ...]]) -> tuple[Array, ...]:
    """The gradients of any operands, through anything that is observed, by plain steps."""

    def call(*moved: Array) -> tuple[Array, ...]:
        whole = list(operands)
        for n, array in zip(shapes, moved, strict=True):
            whole[n] = array
        return meaning.differentiated(meaning.forward(*whole, spec=spec), spec)

    _, pull = jax.vjp(call, *(jnp.broadcast_to(operands[n], shape) for n, shape in shapes.items()))
    return pull(tuple(ad.instantiate_zeros(slope) for slope in slopes))


ad.primitive_jvps[forward_p] = _differentiate
ad.primitive_transposes[tangent_p] = _reverse


def _again(plainly: Any) -> Any:
    """Derivatives of derivatives, through the plain steps; peak and total do not change on their own."""

    def rule(operands: Any, moves: Any, **parameters: Any) -> Any:
        moves = [ad.instantiate_zeros(move) for move in moves]
        return jax.jvp(partial(plainly, **parameters), tuple(operands), tuple(moves))

    return rule


ad.primitive_jvps[tangent_p] = _again(meaning.tangent)
ad.primitive_jvps[backward_p] = _again(meaning.backward)

if not hasattr(jax, "shard_map"):  # before JAX 0.6, where it has to be told of operations that are as any other
    cut: Any = importlib.import_module("jax.experimental.shard_map")

    for primitive in (forward_p, tangent_p, backward_p):
        cut.register_standard_check(primitive)
        cut.register_standard_rewrite(primitive)
