"""A problem of JAX arrays as a `Spec` and its operands; whatever JAX traces becomes an operand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clearhead.core.arrays import Array, dtype_name, is_traced
from clearhead.core.asking import QueryWeights
from clearhead.core.grid import Grid
from clearhead.core.lowered import Node
from clearhead.core.observations import Want
from clearhead.core.positions import Added, Alibi, Bias, Relative, distances
from clearhead.core.problem import Problem
from clearhead.kernels.xla.spec import BY_DISTANCE, BY_PAIR, NONE, NUMBER, NUMBERS, ROWS, TRUTHS, NodeSpec, Spec

# positions and distances are far below this, so that what is beyond it may as well be there
FAR = 2**31 - 1


def described(problem: Problem) -> tuple[Spec, list[Array]]:
    """The call, and its operands."""
    grid = problem.grid
    wide = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
    operands: list[Array] = [problem.q, problem.k, problem.v]
    scale = None if is_traced(problem.scale) else float(problem.scale)
    if scale is None:
        operands.append(problem.scale)
    if problem.sinks is not None:
        operands.append(in_precision(problem.sinks, problem))
    bias = (NONE,) if problem.bias is None else put_bias(problem.bias, problem, operands)
    nodes: list[NodeSpec] = []
    if problem.mask is not None:
        put_node(problem.mask.lower(grid), grid, nodes, operands, wide)
    want, weighted = put_emphasis(problem, operands)
    spec = Spec(
        grid=grid,
        key_heads=problem.key_heads,
        features=problem.q.shape[-1],
        width=problem.width,
        dtype=dtype_name(problem.q),
        scale=scale,
        softcap=problem.softcap,
        sinks=problem.sinks is not None,
        bias=bias,
        nodes=tuple(nodes),
        want=want,
        wide_positions=wide,
        unrounded=problem.keeps_unrounded,
        weighted=weighted,
    )
    operands[:3] = [led(array, 3, grid) for array in operands[:3]]
    return spec, operands


def put_emphasis(problem: Problem, operands: list[Array]) -> tuple[Want | None, str | None]:
    """What is wanted, in numbers, and the name of what counts each query by a weight, which joins the operands."""
    want, grid = problem.want, problem.grid
    if want is None:
        return None, None
    for name in want.names:
        weights = getattr(want, name)
        if isinstance(weights, QueryWeights):
            precise = np.float64 if dtype_name(problem.q) == "float64" else np.float32
            operands.append(weights.over(problem.library, precise, (*grid.batch, grid.heads, grid.queries)))
            of_all: dict[str, Any] = {name: grid.queries}
            return replace(want, **of_all), name
    return want, None


def in_precision(array: Array, problem: Problem) -> Array:
    """Sinks, or numbers by distance, in the precision of sums."""
    precise = np.float64 if dtype_name(problem.q) == "float64" else np.float32
    return array.astype(precise) if array.dtype != precise else array


def led(array: Array, own: int, grid: Grid) -> Array:
    """An array with all batch axes in front, of size one where it has none; `own` axes follow them."""
    missing = len(grid.batch) + own - array.ndim
    return array[(None,) * missing + (...,)] if missing else array


def put_bias(bias: Bias, problem: Problem, operands: list[Array]) -> tuple[int, ...]:
    """Its kind in numbers; its arrays are added to the operands."""
    grid = problem.grid
    if isinstance(bias, Added):
        array = bias.array
        if array.ndim < 3:
            array = array[(None,) * (3 - array.ndim) + (...,)]
        operands.append(led(array, 3, grid))
        return (BY_PAIR,)
    assert isinstance(bias, Alibi | Relative)
    offset = bias.alignment.offset(grid)
    if is_traced(offset):
        distance, centre, place = traced_distances(offset, grid)
    else:
        rows = np.broadcast_to(offset[..., 0, 0, 0] if offset.ndim else offset, grid.batch)
        distance, centre, place = distances(np.ascontiguousarray(rows.reshape(-1), dtype=np.int64), grid)
        place = place.reshape(grid.batch)
        if place.size and (place == place.reshape(-1)[0]).all():
            place = place.reshape(-1)[:1].reshape((1,) * place.ndim)
        place = place.astype(np.int32)
    operands += [in_precision(table_of(bias, distance), problem), place]
    return BY_DISTANCE, distance.shape[0], centre


def traced_distances(offset: Array, grid: Grid) -> tuple[Array, int, Array]:
    """`distances` for offsets that are not known yet: each batch row has all of its own, one row after the other."""
    rows = offset[..., 0, 0, 0] if offset.ndim else offset.reshape((1,) * len(grid.batch))
    most = grid.queries + grid.keys + 1
    place = np.arange(rows.size, dtype=np.int32).reshape(rows.shape) * most
    entry = np.arange(-grid.keys, grid.queries + 1)  # query − key
    return -(entry + rows.reshape(-1)[:, None]).reshape(-1), grid.keys, place


def table_of(bias: Alibi | Relative, distance: Array) -> Array:
    """(heads, distances): the bias of each distance key − query."""
    if isinstance(bias, Alibi):
        if not is_traced(distance) and not is_traced(bias.slopes):
            return bias.by_distance(distance)
        return -jnp.asarray(bias.slopes)[:, None] * abs(jnp.asarray(distance))
    if isinstance(bias.table, np.ndarray) and not is_traced(distance):
        return bias.by_distance(distance)
    return jnp.take(jnp.asarray(bias.table), jnp.asarray(bias.chosen(distance)), axis=0).T


def put_node(node: Node, grid: Grid, nodes: list[NodeSpec], operands: list[Array], wide: bool) -> int:
    """A node after its parts; its place comes back."""
    left, right, *_ = *(put_node(part, grid, nodes, operands, wide) for part in node.parts), -1, -1
    fields: list[tuple[int, ...]] = []
    for number in node.numbers:
        if isinstance(number, int | np.integer):
            fields.append((NUMBER, int(number)))
            continue
        if isinstance(number, np.ndarray):
            number = np.clip(number, -FAR, FAR).astype(np.int32)
        fields.append((NUMBERS,))
        operands.append(number.reshape(grid.batch))
    for row in rows_of(node):
        flags = row.dtype in (np.bool_, np.uint8)
        fields.append((TRUTHS if flags else ROWS,))
        row = row.astype(bool) if flags else row
        axes = (1,) * len(grid.batch) if row.shape[0] == 1 else grid.batch
        operands.append(row.reshape((*axes, row.shape[1])))
    pairs = node.array()
    if pairs is not None:
        if pairs.ndim < 3:
            pairs = pairs[(None,) * (3 - pairs.ndim) + (...,)]
        operands.append(led(pairs, 3, grid))
    nodes.append(NodeSpec(int(node.kind), left, right, int(node.constant), tuple(fields), pairs is not None))
    return len(nodes) - 1


def rows_of(node: Node) -> tuple[Any, ...]:
    """Ids and truth values; those that are known in 32 bits."""
    rows = node.rows()
    return rows if any(is_traced(row) for row in rows) else node.narrow()
