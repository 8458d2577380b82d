"""Attention flow: the largest flow from a query, through all layers, to each position of the input.

Abnar and Zuidema (2020, arXiv:2005.00928): a layer's A = ½ W + ½ I are the capacities of the edges between its
positions and those below, and what a query draws from an input is the maximum flow between the two. It takes a search
for each input, and so is for short sequences.
"""

from __future__ import annotations

import numpy as np

from clearhead.core.errors import ArgumentError
from clearhead.watching.call import of_batch
from clearhead.watching.record import Record
from clearhead.watching.rollout import check_share, layers_for

LONGEST = 128


def flow(seen: Record, query: int, *, batch: int = 0, residual: float = 0.5) -> np.ndarray:
    """The maximum flow from one query of the last layer to each input position, (positions,).

    >>> import torch, clearhead as ch
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    >>> with ch.watch(model, want={"weights": True}) as seen:
    ...     output = model(torch.zeros(1, 4, 16))
    >>> seen.flow(0).round(3).tolist()
    [1.0, 0.5, 0.5, 0.5]
    """
    calls = layers_for(seen)
    check_share(residual)
    length = calls[0].shape[-1]
    if length > LONGEST:
        raise ArgumentError(
            "seen", f"has {length} positions, and a flow takes at most {LONGEST}; rollout takes any number"
        )
    if isinstance(query, bool) or not isinstance(query, int | np.integer) or not -length <= query < length:
        raise ArgumentError("query", f"is {query!r}, expected {-length} to {length - 1}")
    between = []
    for call in reversed(calls):  # from the query's layer down to the input
        rows = call.rows(range(length)).astype(np.float64)
        between.append((1.0 - residual) * of_batch(rows, batch).mean(0) + residual * np.eye(length))
    return np.array([max_flow(between, int(query) % length, sink) for sink in range(length)])


def max_flow(between: list[np.ndarray], source: int, sink: int, least: float = 1e-12) -> float:
    """The maximum flow down a layered graph: `between[l][i, j]` is the capacity from i in layer l to j in layer l + 1.

    Each round sends as much as it can along the widest path of those with the fewest edges that have room left, back
    edges included (Edmonds and Karp). Capacities below `least` count as none.

    >>> max_flow([np.array([[0.5, 0.5]]), np.array([[1.0, 0.0], [0.2, 0.8]])], 0, 0)
    0.7
    """
    room = [capacity.copy() for capacity in between]
    back = [np.zeros_like(capacity) for capacity in between]
    total = 0.0
    while (path := _path(room, back, source, sink, least)) is not None:
        widths = [room[layer][i, j] if down else back[layer][i, j] for layer, i, j, down in path]
        width = float(min(widths))
        for layer, i, j, down in path:
            room[layer][i, j] += -width if down else width
            back[layer][i, j] += width if down else -width
        total += width
    return round(total, 12)


def _path(
    room: list[np.ndarray], back: list[np.ndarray], source: int, sink: int, least: float
) -> list[tuple[int, int, int, bool]] | None:
    """A path of fewest edges with room, as (layer, upper, lower, downwards); None where there is none."""
    start, end = (0, source), (len(room), sink)
    came: dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int, int, bool]]] = {}
    reached, edge = {start}, [start]
    while edge and end not in reached:
        ahead = []
        for layer, i in edge:
            steps = []
            if layer < len(room):
                steps += [
                    ((layer + 1, int(j)), (layer, i, int(j), True)) for j in np.flatnonzero(room[layer][i] > least)
                ]
            if layer > 0:
                above = back[layer - 1][:, i]
                steps += [((layer - 1, int(u)), (layer - 1, int(u), i, False)) for u in np.flatnonzero(above > least)]
            for node, step in steps:
                if node not in reached:
                    reached.add(node)
                    came[node] = ((layer, i), step)
                    ahead.append(node)
        edge = ahead
    if end not in reached:
        return None
    path = []
    node = end
    while node != start:
        node, step = came[node]
        path.append(step)
    return path
