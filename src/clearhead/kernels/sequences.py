"""Arrays cut into the sequences of a comb (`core/combs.py`), and what was found of them put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.core.arrays import Array, Library
from clearhead.core.combs import Comb, Share
from clearhead.core.observations import OBSERVATIONS, Observed, Part, Top
from clearhead.core.problem import Problem
from clearhead.kernels.collect import COLLECTORS
from clearhead.kernels.contract import Ran
from clearhead.kernels.tally import Ended, Tally


class Cut:
    """Arrays of a problem cut into the sequences of a comb, and put together again."""

    def __init__(self, problem: Problem, comb: Comb, *, viewed: bool = True) -> None:
        """`viewed`: by views of memory, where there are any, and not by operations that are differentiated."""
        self.library, self.xp, self.comb = problem.library, problem.library.xp, comb
        self.queries, self.keys = problem.grid.queries, problem.grid.keys
        self.viewed = viewed and self.library.name in ("numpy", "torch")

    def of_queries(self, array: Array, share: Share) -> Array:
        """(…, T, D) as (residues, …, queries of one, D)."""
        return self.sequences(array, share, share.start, share.queries, self.comb.phase)

    def of_keys(self, array: Array, share: Share) -> Array:
        """(…, S, D) as (residues, …, keys of one, D)."""
        return self.sequences(array, share, 0, share.keys, 0)

    def sequences(self, array: Array, share: Share, start: int, count: int, phase: int) -> Array:
        """The positions of a share, `count` of each residue from place `start` on: a view, where there are views."""
        if self.viewed:
            return view(array, self.comb.step, share, self.comb.step * start + share.first - phase, count)
        whole = self.rounds(array, phase)
        chosen = whole[..., start : start + count, share.first : share.stop, :]
        last = chosen.ndim - 1
        return self.xp.permute_dims(chosen, (last - 1, *range(last - 1), last))

    def rounds(self, array: Array, phase: int) -> Array:
        """(…, rounds, step, D), with zeros where the first and the last round have no position."""
        *lead, length, width = array.shape
        count = -(-(length + phase) // self.comb.step)
        whole = self.between_zeros(phase, array, count * self.comb.step - length - phase, -2)
        return self.xp.reshape(whole, (*lead, count, self.comb.step, width))

    def between_zeros(self, before: int, array: Array, after: int, axis: int) -> Array:
        """With so many zeros before and after along an axis."""
        ends = []
        for size in (before, after):
            shape = list(array.shape)
            shape[axis] = size
            ends.append(self.library.zeros(tuple(shape), array.dtype))
        return self.xp.concat([ends[0], array, ends[1]], axis=axis) if before or after else array

    def room(self, part: Problem) -> Array:
        """Room for the output (…, T, Dv), in which that of each share has its place."""
        shape = (*part.grid.batch[1:], part.grid.heads, self.queries, part.width)
        return self.xp.empty(shape, dtype=part.q.dtype, device=self.library.device)

    def queries_of(self, found: list[tuple[Share, Array]], room: Array | None = None) -> Array:
        """(…, T, D) of what was found by share, (residues, …, queries of one, D); some may be in the room for it."""
        if room is None:
            return self.positions(
                [(share, share.start, array) for share, array in found], self.comb.phase, self.queries
            )
        for share, array in found:
            place = self.of_queries(room, share)
            if not at_home(array, place):
                place[...] = array
        return room

    def keys_of(self, found: list[tuple[Share, Array]]) -> Array:
        """(…, S, D) of what was found by share, (residues, …, keys of one, D)."""
        return self.positions([(share, 0, array) for share, array in found], 0, self.keys)

    def positions(self, found: list[tuple[Share, int, Array]], phase: int, length: int) -> Array:
        """Sequences side by side, round by round, zeros where there are none."""
        like = found[0][2]
        if self.viewed:
            shape = (*like.shape[1:-2], length, like.shape[-1])
            all_there = sum(share.stop - share.first for share, _, _ in found) == self.comb.step
            new = self.xp.empty if all_there else self.xp.zeros
            whole = new(shape, dtype=like.dtype, device=self.library.device)
            for share, start, array in found:
                first = self.comb.step * start + share.first - phase
                view(whole, self.comb.step, share, first, array.shape[-2])[...] = array
            return whole
        xp, step, last = self.xp, self.comb.step, like.ndim - 1
        lead, width = like.shape[1:-2], like.shape[-1]
        rounds = -(-(length + phase) // step)

        columns, done = [], 0
        for share, start, array in found:
            column = xp.permute_dims(array, (*range(1, last), 0, last))
            column = self.between_zeros(start, column, rounds - start - column.shape[-3], -3)
            columns.append(self.between_zeros(share.first - done, column, 0, -2))
            done = share.stop
        columns[-1] = self.between_zeros(0, columns[-1], step - done, -2)
        whole = xp.reshape(
            columns[0] if len(columns) == 1 else xp.concat(columns, axis=-2), (*lead, rounds * step, width)
        )
        return whole if whole.shape[-2] == length else whole[..., phase : phase + length, :]


def at_home(array: Array, place: Array) -> bool:
    """Do these numbers lie in their place?"""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"] == place.__array_interface__["data"]
    return bool(array.data_ptr() == place.data_ptr())


def view(array: Array, step: int, share: Share, first: int, count: int) -> Array:
    """Of (…, positions, D) the rows of a share, `count` of each residue, its first at position `first`."""
    array = array[..., first:, :]
    strides = array.strides if isinstance(array, np.ndarray) else array.stride()
    *lead, row, width = strides
    shape = (share.stop - share.first, *array.shape[:-2], count, array.shape[-1])
    strides = (row, *lead, step * row, width)
    if isinstance(array, np.ndarray):
        return np.lib.stride_tricks.as_strided(array, shape, strides)
    return array.as_strided(shape, strides)


def put_together(cut: Cut, found: list[tuple[Share, Ran]], room: Array | None = None) -> Ran:
    """What was found of the sequences of one comb, for the positions that they are made of.

    `room` holds the outputs, as far as the kernel put them there.
    """

    def rows(read: Callable[[Ran], Any]) -> Any:
        """(…, T) of a number of each row."""
        arrays = [(share, read(ran)) for share, ran in found]
        none = arrays[0][1] is None
        return None if none else cut.queries_of([(share, array[..., None]) for share, array in arrays])[..., 0]

    seen = {}
    for name, one in OBSERVATIONS.items():
        values = [(share, getattr(ran.observed, name)) for share, ran in found]
        if values[0][1] is not None:
            arrays = [(share, one.arrays(value)) for share, value in values]
            seen[name] = one.of(
                [whole_of(cut, part, [(s, a[i]) for s, a in arrays]) for i, part in enumerate(one.parts)]
            )
    unrounded = [(share, ran.unrounded) for share, ran in found if ran.unrounded is not None]
    observed = Observed(
        output=cut.queries_of([(share, ran.observed.output) for share, ran in found], room),
        lse=rows(lambda ran: ran.observed.lse), max_score=rows(lambda ran: ran.observed.max_score),
        entropy=rows(lambda ran: ran.observed.entropy), kernel=found[0][1].observed.kernel, **seen,
    )  # fmt: skip
    return Ran(
        observed, rows(lambda ran: ran.peak), rows(lambda ran: ran.total),
        cut.queries_of(unrounded) if unrounded else None,
    )  # fmt: skip


def by_key(name: str) -> bool:
    """Is something that is observed one number for each key, over all queries that count?"""
    return all(part.axes == ("keys",) for part in OBSERVATIONS[name].parts)


def by_query(name: str) -> bool:
    """Is it some numbers for each query, whatever other queries do?"""
    return all(part.led and part.axes[0] == "queries" and "keys" not in part.axes for part in OBSERVATIONS[name].parts)


def whole_of(cut: Cut, part: Part, found: list[tuple[Share, Array]]) -> Array:
    """One array of an observation, of those of the sequences."""
    if part.axes == ("keys",):
        return cut.keys_of([(share, array[..., None]) for share, array in found])[..., 0]
    if part.positions == "keys":
        found = [(share, places(cut, share, array)) for share, array in found]
    return cut.queries_of(found)


def places(cut: Cut, share: Share, indices: Array) -> Array:
    """The positions of keys of a sequence; −1 is none."""
    xp, step = cut.xp, cut.comb.step
    residue = xp.arange(share.first, share.stop, dtype=indices.dtype, device=cut.library.device)
    residue = xp.reshape(residue, (-1, *[1] * (indices.ndim - 1)))
    return xp.where(indices < 0, -1, indices * step + residue)


def merged(problem: Problem, runs: list[Ran], unit: float) -> Ran:
    """Attention over the keys of several combs: each output with its share of the whole."""
    library, rows = problem.library, runs[0].total
    tally = Tally(library, rows.shape[:-1], rows.shape[-1], 0, rows.dtype, unit, problem.want is not None)
    for ran in runs:  # what rows end with, which is little, before anything is multiplied
        tally.add(ran._replace(unrounded=ran.total[..., None][..., :0]))
    end = tally.ended(None)
    whole: Any = None
    for ran in runs:
        part = library.computing(ran.precise)  # which nobody else has
        part *= end.share(library.xp, ran.peak, ran.total, unit)[..., None]
        if whole is not None:
            part += whole
        whole = part
    observed = Observed(
        output=library.xp.astype(whole, problem.q.dtype, copy=False), lse=end.lse, max_score=end.largest,
        entropy=end.entropy, kernel=runs[0].observed.kernel,
    )  # fmt: skip
    return Ran(observed, end.peak, end.total, whole if problem.keeps_unrounded else None)


def share_of_whole(library: Library, ran: Ran, whole: Ran, unit: float) -> Array:
    """What weights relative to one comb's keys are multiplied with to be those over all, (…, T)."""
    end = Ended(whole.precise, whole.observed.lse, whole.peak, whole.total, None, None)
    return end.share(library.xp, ran.peak, ran.total, unit)


def largest(problem: Problem, runs: list[Ran], whole: Ran, unit: float) -> Top:
    """The largest weights over the keys of all combs, of the largest over those of each."""
    library, xp = problem.library, problem.library.xp
    tops: list[Any] = [ran.observed.top for ran in runs]
    shares = [share_of_whole(library, ran, whole, unit)[..., None] for ran in runs]
    weights = xp.concat([top.weights * share for top, share in zip(tops, shares, strict=True)], axis=-1)
    indices = xp.concat([top.indices for top in tops], axis=-1)
    found, order = library.largest(weights, tops[0].weights.shape[-1])
    found = xp.where(xp.any(xp.isnan(weights), axis=-1, keepdims=True), xp.nan, found)
    return Top(xp.where(found > 0, xp.take_along_axis(indices, order, axis=-1), -1), found)


def over_combs(problem: Problem, found: dict[Comb, list[tuple[Share, dict[str, Any]]]]) -> dict[str, Any]:
    """What each key got under all combs, of what it got in each sequence."""
    seen: dict[str, Any] = {}
    for comb, parts in found.items():
        cut = Cut(problem, comb)
        for name in parts[0][1]:
            mine = cut.keys_of([(share, given[name][..., None]) for share, given in parts])[..., 0]
            collector: Any = COLLECTORS[name]
            seen[name] = collector.added(problem.library.xp, seen[name], mine) if name in seen else mine
    return seen
