"""Keys that lie apart as sequences of their own: a mask of combs (`core/combs.py`) at the cost of what it lets through.

Every eighth position, as `dilated(8)` has it, fills no tile: of 64 pairs in eight places one is let through, and a
kernel that goes by tiles computes all of them. But the positions of one residue see none of another, so they are taken
out, as a view with a longer stride, and attended to by themselves: as batch rows of a problem whose mask is a band.
Combs beside one another, as in `strided(8)`, are merged as parts of the keys are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from clearhead.core.arrays import HALF, Array, dtype_name, is_traced, made
from clearhead.core.combs import Comb, Share, combed, combs_of, pairs, shares
from clearhead.core.formula import Gradients
from clearhead.core.grid import Grid
from clearhead.core.observations import Observed, Want
from clearhead.core.problem import Problem
from clearhead.kernels.contract import Kernel, Place, Ran, rejects_gradients, unit_of
from clearhead.kernels.sequences import Cut, by_key, by_query, largest, merged, over_combs, put_together

# What must be spared before a call is taken apart. Of products of features as many as take longer than Python with
# parts: on a CPU, there with arrays of JAX outside of a program, on a GPU, and there by calls that are remembered. MORE
# times as many where weights are observed, where sequences are not all as long, where outputs are merged, and twice
# again where what is observed is merged as well. And of keys, for each query, as many as pay for strides.
WORTH = {"cpu": 2**25, "eager": 2**29, "gpu": 2**36, "calls": 2**34}
MORE = 2.5
KEYS = 128
# What a sequence costs beside its pairs, as so many of them; and from which step on a kernel skips tiles of the whole.
SEQUENCE = {"cpu": 2500, "eager": 2500, "gpu": 8192, "calls": 8192}
STEP = 128


class Part(NamedTuple):
    """Sequences of one length, and the problem that they are."""

    comb: Comb
    share: Share
    problem: Problem


def parts_of(problem: Problem, place: str) -> list[Part] | None:
    """The problems that a problem falls into; None where it does not, or where it would not spare much."""
    name = f"parts, {place}, {problem.differentiated}"  # what is found is shared with the problem to be differentiated
    known = problem.found.get(name)
    if known is None:
        combs = worth(problem, place)
        known = problem.found[name] = () if combs is None else list(taken_apart(problem, combs))
    return known or None


def worth(problem: Problem, place: str) -> tuple[Comb, ...] | None:
    """The combs of a problem's mask, where it pays to take it apart."""
    mask, grid, want = problem.mask, problem.grid, problem.want
    if mask is None or problem.bias is not None or problem.dropout is not None or is_traced(problem.scale):
        return None
    products = math.prod(grid.shape) // max(grid.queries, 1) * problem.q.shape[-1]  # of one key of each query
    if products * grid.queries < WORTH[place] or not combed(mask):
        return None
    combs = combs_of(mask, grid)
    if not combs or all(comb.step == 1 for comb in combs) or any(comb.step > grid.keys for comb in combs):
        return None
    # several are merged by peaks and totals, which a sink would be in twice, and by which JAX does not differentiate
    if len(combs) > 1 and (problem.sinks is not None or problem.library.name == "jax"):
        return None
    if want is not None and not seen_apart(want, grid, several=len(combs) > 1, again=place == "cpu"):
        return None
    spared = sum(spared_by(comb, grid, place) for comb in combs)
    seen = want is not None and bool(want.names)
    uneven = any(len(shares(comb, grid.queries, grid.keys)) > 1 for comb in combs)
    times = seen + uneven + len(combs) - 1 + 2 * (seen and len(combs) > 1)
    enough = spared * math.prod(grid.batch) * grid.heads * problem.q.shape[-1] >= WORTH[place] * MORE**times
    return combs if enough and spared >= KEYS * len(combs) * grid.queries else None


def spared_by(comb: Comb, grid: Grid, place: str) -> int:
    """How many pairs of a head need not be computed, less what its sequences cost beside theirs."""
    if comb.step == 1:
        return 0
    some = pairs(comb, grid.queries, grid.keys)
    return some * STEP // max(comb.step, STEP) - some // comb.step - SEQUENCE[place] * min(comb.step, grid.queries)


def seen_apart(want: Want, grid: Grid, *, several: bool, again: bool) -> bool:
    """Can all that is wanted be found of sequences? Of several combs' weights, if they may be looked at again."""
    if not want.names:
        return True
    # of keys, where all queries count
    able = (by_query(name) or (by_key(name) and getattr(want, name) == grid.queries) for name in want.names)
    return (again or not several) and all(able)


def taken_apart(problem: Problem, combs: tuple[Comb, ...]) -> Iterator[Part]:
    """All sequences of all combs, those of one length as batch rows of one problem."""
    grid = problem.grid
    # where outputs are merged they are wanted as they are before they are rounded
    unrounded = len(combs) > 1 and dtype_name(problem.q) in HALF
    for comb in combs:
        cut = Cut(problem, comb)
        for share in shares(comb, grid.queries, grid.keys):
            want = problem.want
            if want is not None:
                asked: dict[str, Any] = {
                    name: share.queries if by_key(name) else getattr(want, name) for name in want.names
                }
                want = Want(**asked)
            yield Part(comb, share, made(
                Problem,
                q=cut.of_queries(problem.q, share), k=cut.of_keys(problem.k, share), v=cut.of_keys(problem.v, share),
                library=problem.library,
                grid=Grid((share.stop - share.first, *grid.batch), grid.heads, share.queries, share.keys),
                scale=problem.scale, mask=share.mask, softcap=problem.softcap,
                sinks=problem.sinks,
                want=want,
                differentiated=problem.differentiated or unrounded,
            ))  # fmt: skip


class Calls:
    """Calls on a GPU of one kind, whose parts are calls of the same function, each of them remembered by itself."""

    def __init__(self, cut: Cut, shares: list[Share], function: Callable[..., Any], **options: Any) -> None:
        self.cut, self.shares, self.function, self.options = cut, shares, function, options

    @classmethod
    def of(cls, problem: Problem, function: Callable[..., Any], **options: Any) -> Calls | None:
        """For calls of a function with these options; None where a problem of it would not be taken apart."""
        combs = worth(problem, "calls")
        if combs is None or len(combs) > 1 or len(problem.grid.batch) != 1:
            return None
        if problem.want is not None:
            asked = problem.want
            options |= {name: True if by_key(name) else getattr(asked, name) for name in asked.names}
        shared = shares(combs[0], problem.grid.queries, problem.grid.keys)
        return cls(Cut(problem, combs[0], viewed=False), list(shared), function, **options)

    def __call__(self, q: Array, k: Array, v: Array) -> Any:
        """What the function gives, of parts put together again."""
        found = []
        for share in self.shares:
            parts = self.cut.of_queries(q, share), self.cut.of_keys(k, share), self.cut.of_keys(v, share)
            size = max(part.shape[1] for part in parts)
            flat = [part.expand(-1, size, -1, -1, -1).flatten(0, 1) for part in parts]
            given = self.function(*flat, mask=share.mask, **self.options)
            residues = share.stop - share.first
            if not isinstance(given, Observed):
                found.append((share, given.unflatten(0, (residues, size))))
            else:
                seen = given.each(lambda array: array.unflatten(0, (residues, size)))  # noqa: B023  # done at once
                found.append((share, Ran(seen, None, None)))
        if isinstance(found[0][1], Ran):
            return put_together(self.cut, found).observed
        return self.cut.queries_of(found)


class Apart:
    """A kernel that is given a problem's sequences instead of the problem."""

    def __init__(self, kernel: Kernel, place: str) -> None:
        self.kernel, self.place, self.name = kernel, place, kernel.name

    def parts(self, problem: Problem) -> list[Part]:
        """The problems that it is given."""
        found = parts_of(problem, self.place)
        assert found is not None, "a problem of this kind was taken apart before"
        return found

    def rejects(self, problem: Problem) -> str | None:
        """Why it cannot take a problem."""
        return next(filter(None, (self.kernel.rejects(part.problem) for part in self.parts(problem))), None)

    def rejects_gradients(self, problem: Problem) -> str | None:
        """Why it cannot give the gradients of a problem."""
        refused = (rejects_gradients(self.kernel, part.problem) for part in self.parts(problem))
        return next(filter(None, refused), None)

    def how(self, problem: Problem) -> str:
        """What it is given, in words."""
        words = []
        for comb, share, _ in self.parts(problem):
            size = f"{share.queries:,} queries × {share.keys:,} keys"
            words.append(f"{share.stop - share.first} sequences of {size}" if comb.step > 1 else f"a band in {size}")
        return f"in parts by residues: {', '.join(words)}"

    def run(self, problem: Problem) -> Ran:
        """Output and log-sum-exp of every query, and what is wanted."""
        by_comb: dict[Comb, list[tuple[Share, Ran]]] = {}
        rooms: dict[Comb, Any] = {}
        parts, want = self.parts(problem), problem.want
        several = parts[0].comb != parts[-1].comb
        again = several and want is not None and bool(want.names)
        run_part: Any = getattr(self.kernel, "run_part", None)
        for comb, share, part in parts:
            if run_part is None:
                ran = self.kernel.run(part)
            else:
                cut, room = Cut(problem, comb), None
                if cut.viewed and not part.keeps_unrounded:
                    if comb not in rooms:
                        rooms[comb] = cut.room(part)
                    room = cut.of_queries(rooms[comb], share)
                ran = run_part(part, room, again=again)
            by_comb.setdefault(comb, []).append((share, ran))
        runs = [put_together(Cut(problem, comb), found, rooms.get(comb)) for comb, found in by_comb.items()]
        if not several:
            return runs[0]
        whole = merged(problem, runs, unit_of(self.kernel, problem))
        if not again or want is None:
            return whole
        seen = self.looked_again(problem, whole)
        if want.top is not None:
            seen["top"] = largest(problem, runs, whole, unit_of(self.kernel, problem))
        return whole._replace(observed=replace(whole.observed, **seen))

    def looked_again(self, problem: Problem, whole: Ran) -> dict[str, Any]:
        """What keys received, by denominators over all combs."""
        found: dict[Comb, list[tuple[Share, dict[str, Any]]]] = {}
        again: Any = self.kernel
        for comb, share, part in self.parts(problem):
            cut = Cut(problem, comb)
            want = Want() if part.want is None else replace(part.want, top=None)
            if want.names:
                asking = made(Problem, **{**vars(part), "want": want})
                rows = (cut.of_queries(row[..., None], share)[..., 0] for row in (whole.peak, whole.total))
                place = Place(share.queries, share.keys, 0, 0)
                given = again.look_again(asking, *rows, cut.of_queries(whole.precise, share), place)
                found.setdefault(comb, []).append((share, given))
        return over_combs(problem, found)

    def gradients(
        self, problem: Problem, dout: Array, output: Array, peak: Array, total: Array, dlse: Array | None = None
    ) -> Gradients:
        """dq, dk, dv and dsinks: of each pair what the sequence gives that has it."""
        parts = self.parts(problem)
        differentiate: Any = self.kernel.gradients
        if parts[0].comb != parts[-1].comb and dtype_name(problem.q) in HALF:  # what is added up is rounded once
            differentiate = getattr(self.kernel, "part_gradients", differentiate)
        found: dict[Comb, list[tuple[Share, Gradients]]] = {}
        for comb, share, part in parts:
            cut = Cut(problem, comb)
            rows = [
                None if row is None else cut.of_queries(row[..., None], share)[..., 0] for row in (peak, total, dlse)
            ]
            given = [cut.of_queries(array, share) for array in (dout, output)]
            found.setdefault(comb, []).append((share, differentiate(part, *given, *rows)))
        sums: list[Gradients] = []
        for comb, some in found.items():
            cut = Cut(problem, comb)
            dq = cut.queries_of([(share, part.dq) for share, part in some])
            dk, dv = (cut.keys_of([(share, getattr(part, name)) for share, part in some]) for name in ("dk", "dv"))
            dsinks = [part.dsinks for _, part in some if part.dsinks is not None]
            sums.append(Gradients(dq, dk, dv, dsinks=sum(dsinks[1:], dsinks[0]) if dsinks else None))
        whole = sums[0]
        for more in sums[1:]:  # of which none has sinks
            whole = Gradients(whole.dq + more.dq, whole.dk + more.dk, whole.dv + more.dv)
        astype, like = problem.library.xp.astype, problem.q.dtype
        dq, dk, dv = (astype(gradient, like, copy=False) for gradient in (whole.dq, whole.dk, whole.dv))
        return Gradients(dq, dk, dv, dsinks=whole.dsinks)
