"""stream() and stream_observe(): attention over keys that are never all in memory, a chunk at a time, exactly."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.core.array_masks import given_mask
from clearhead.core.arrays import Array, Library, dtype_name, is_array, is_torch
from clearhead.core.errors import ArgumentError, shown
from clearhead.core.grid import LARGEST, Grid
from clearhead.core.mask import Mask
from clearhead.core.observations import OBSERVATIONS, Map, Observed, Rows, Want
from clearhead.core.partial import Partial, keys_share, merge
from clearhead.core.positions import Bias, as_bias
from clearhead.core.problem import Problem, pose
from clearhead.core.temperature import tempered
from clearhead.distributed.looking import Look, rows_of, top_of
from clearhead.distributed.pieces import BY_KEY, Whole, Work
from clearhead.distributed.sources import CHUNK, CHUNK_ON_GPU, Ahead, Source, source_of
from clearhead.distributed.wanting import wanted_of_parts

# seconds after which somebody who watches a terminal is told how far it is
PATIENCE = 2.0

Progress = Callable[[int, int | None, str], None]


def stream(
    q: Array,
    source: Any,
    *,
    keys: int | None = None,
    chunk: int | None = None,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: tuple[float, int] | None = None,
    kernel: str | None = None,
    there: bool = False,
    progress: bool | Progress | None = None,
) -> Array:
    """Attention of q (…, Hq, T, D) over keys and values that come in chunks; the other arguments are `attention`'s.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 50, 8))
    >>> chunks = ((k[:, i : i + 7], v[:, i : i + 7]) for i in range(0, 50, 7))
    >>> out = ch.distributed.stream(q, chunks, keys=50, mask=ch.causal())
    >>> bool(np.allclose(out, ch.attention(q, k, v, mask=ch.causal())))
    True

    - source: (k, v), each anything with a shape and slices along its positions: arrays, tensors in the host's memory
      for queries on a GPU, `on_disk(path)` or the path of a .npy file, np.memmap, zarr; a list of such pairs, one after
      the other; or chunks (k, v) of an iterator, or of a function that starts one anew.
    - keys: how many keys there are in all, which an iterator cannot say and a mask or bias may need.
    - chunk: positions that are read at a time; 32 MiB of keys and values unless given, 128 MiB for a GPU.
    - there: attend to each pair of a list on the device where it lies, and merge.
    - progress: True for a bar on stderr, or a function (done, of, words); None shows a bar to who watches a terminal
      for longer than two seconds.

    No gradients flow through it.
    """
    return Stream(locals(), None).output()


def stream_observe(
    q: Array,
    source: Any,
    *,
    keys: int | None = None,
    chunk: int | None = None,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    scale: float | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: tuple[float, int] | None = None,
    kernel: str | None = None,
    progress: bool | Progress | None = None,
    top: int | None = None,
    received: bool | int | Array | None = None,
    received_max: bool | int | None = None,
    removal: bool | int | None = None,
    map: tuple[int, int] | None = None,
    queries: Any = None,
    weights: bool = False,
) -> Observed:
    """`stream`, and what was attended to: all that `clearhead.observe` gives.

    What keys got (received, received_max, removal), map and weights read all keys a second time.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 50, 8))
    >>> seen = ch.distributed.stream_observe(q, (k, v), chunk=16, mask=ch.causal(), received=True)
    >>> bool(np.allclose(seen.received, ch.observe(q, k, v, mask=ch.causal(), received=True).received))
    True
    """
    given = locals()
    asked = {name: given[name] for name in OBSERVATIONS}
    return Stream({**given, "there": False}, asked).observed()


class Stream:
    """One call: its arguments checked, its keys to come."""

    def __init__(self, given: dict[str, Any], asked: dict[str, Any] | None) -> None:
        self.given, self.asked = given, asked
        if not is_array(given["q"]):
            raise ArgumentError("q", f"is a {type(given['q']).__name__}, expected an array")
        q = given["q"]
        each = CHUNK_ON_GPU if is_torch(q) and q.is_cuda else CHUNK
        self.source: Source = source_of(given["source"], given["keys"], given["chunk"], each)
        if is_torch(q) and q.requires_grad:
            raise ArgumentError(
                "q", "wants its gradient, which does not flow through a stream of keys: give q.detach()"
            )
        self.mask = None if given["mask"] is None else given_mask("mask", given["mask"])
        self.bias = None if given["bias"] is None else as_bias(given["bias"])
        if self.source.keys is None and (self.mask is not None or self.bias is not None or self.needs_keys):
            raise ArgumentError(
                "keys", "is not given, and mask, bias or what is observed depends on how many there are"
            )
        self.works: dict[Any, Work] = {}
        self.problem: Problem | None = None

    @property
    def needs_keys(self) -> bool:
        """Whether what is asked for has an entry for each key."""
        return self.asked is not None and any(
            name != "top" and value is not None and value is not False for name, value in self.asked.items()
        )

    def pose(self, k: Array, v: Array) -> None:
        """The call, once the first chunk says what keys are like."""
        given, q = self.given, self.given["q"]
        if is_torch(q) and is_torch(k) and k.device != q.device:
            k, v = k[..., :0, :].to(q.device), v[..., :0, :].to(q.device)
        scale = given["scale"]
        if given["temperature"] is not None:
            scale = tempered(given["temperature"], scale, q)
        self.problem = problem = pose(
            q, k, v, scale=scale, softcap=given["softcap"], sinks=given["sinks"], dropout=given["dropout"]
        )
        keys = LARGEST if self.source.keys is None else self.source.keys
        grid = Grid(problem.grid.batch, problem.grid.heads, problem.grid.queries, keys)
        if self.mask is not None:
            self.mask.check(grid)
        if self.bias is not None:
            self.bias.check(grid)
        wanted: Want | None = None if self.asked is None else wanted_of_parts(problem, grid, self.asked)
        self.whole = Whole(
            problem.library, grid, problem.scale, self.mask, self.bias, problem.softcap, problem.sinks,
            problem.dropout, wanted, given["kernel"],
        )  # fmt: skip
        if self.whole.looks_again and not self.source.again:
            raise ArgumentError(
                "source", "is read twice for what is observed: give a function that starts the chunks anew"
            )

    def work_for(self, k: Array, v: Array) -> Work:
        """The queries, on the device where these keys are."""
        assert self.problem is not None
        where = str(k.device) if is_torch(k) else ""
        if where not in self.works:
            q, whole = self.problem.q, self.whole
            if is_torch(k) and k.device != q.device:
                q = q.to(k.device)
                # a sink belongs to the whole: where the caller's queries are
                whole = Whole(**{**vars(whole), "library": Library.of(k), "sinks": None})
            runs = (range(whole.grid.queries),) if whole.grid.queries else ()
            work = Work(whole, runs, q, k.shape[-3], v.shape[-1])
            work.settle(None, k, v)
            self.works[where] = work
        return self.works[where]

    def checked(self, first: int, k: Array, v: Array) -> tuple[Array, Array]:
        """A chunk with the axes of the first; one of another kind is refused."""
        if self.problem is None:
            self.pose(k, v)
        assert self.problem is not None
        like = self.problem
        if like.headless and k.ndim == 2:
            k, v = k[None, ...], v[None, ...]
        expected, got = dtype_name(like.q), (dtype_name(k), dtype_name(v))
        if got != (expected, expected):
            raise ArgumentError(
                "source", f"gives {got[0]} keys and {got[1]} values at position {first:,}, expected {expected} as q"
            )
        for name, part, model in (("keys", k, like.k), ("values", v, like.v)):
            if (*part.shape[:-2], part.shape[-1]) != (*model.shape[:-2], model.shape[-1])[-part.ndim + 1 :]:
                raise ArgumentError(
                    "source",
                    f"gives {name} of shape {tuple(part.shape)} at position {first:,},"
                    f" expected {tuple(model.shape[:-2])} × positions × {model.shape[-1]}",
                )
        return k, v

    def read(self, see: Callable[[Work, range, Array, Array], Any], words: str) -> None:
        """All keys, chunk by chunk."""
        bar = Bar(self.given["progress"], self.source.keys, words)
        done = 0
        try:
            for first, k, v in Ahead(self.source, self.given["q"], self.given["there"]):
                k, v = self.checked(first, k, v)
                done = first + int(k.shape[-2])
                if self.source.keys is not None and done > self.source.keys:
                    raise ArgumentError("source", f"gives more than the {self.source.keys:,} keys that were said")
                see(self.work_for(k, v), range(first, done), k, v)
                bar.at(done)
        finally:
            bar.end()
        if self.source.keys is not None and done != self.source.keys:
            raise ArgumentError("source", f"gives {done:,} keys, expected the {self.source.keys:,} that were said")
        if self.problem is None:
            raise ArgumentError("source", "gives no chunk, expected at least one, with or without keys")

    def output(self) -> Array:
        """The output alone."""
        self.read(lambda work, columns, k, v: work.attend(columns, k, v), "attention")
        assert self.problem is not None
        q, xp = self.problem.q, self.problem.library.xp
        ends = {where: (work, work.ended()) for where, work in self.works.items()}
        if len(ends) == 1 and next(iter(ends.values()))[0].library == self.problem.library:
            ((_, ended),) = ends.values()
            return self.problem.restore(xp.astype(ended.output, q.dtype))
        parts = [Partial(end.output.to(q.device), end.lse.to(q.device)) for _, end in ends.values()]
        if self.problem.sinks is not None and str(q.device) not in ends:
            logits = self.problem.library.asarray(self.problem.sinks, parts[0].lse.dtype)[:, None]
            parts.append(Partial(parts[0].output * 0, parts[0].lse * 0 + logits))
        return self.problem.restore(xp.astype(merge(*parts).output, q.dtype))

    def observed(self) -> Observed:
        """The output and what was asked for."""
        self.read(lambda work, columns, k, v: work.attend(columns, k, v), "attention")
        (work,) = self.works.values()
        ended, wanted, problem = work.ended(), self.whole.want, self.problem
        assert wanted is not None
        assert problem is not None
        assert work.kernel is not None
        found: dict[str, Any] = {}
        if wanted.top is not None:
            found["top"] = top_of(work, ended, wanted.top)
        if wanted.queries is not None:
            found["queries"] = Rows(np.asarray(wanted.queries, np.int64), rows_of(work, ended, wanted.queries))
        if self.whole.looks_again:
            look = Look(work, ended)
            self.read(lambda _, columns, k, v: look.see(columns, k, v), "the second look")
            sums = look.sums()
            found |= {name: sums[name] for name in BY_KEY if name in sums}
            if "map" in sums and look.map is not None:
                found["map"] = Map(*(look.shaped(part, 2) for part in look.map.result()))
            if look.weights is not None:
                found["weights"] = look.weights
        output = problem.library.xp.astype(ended.output, problem.q.dtype)
        if problem.sinks is not None:
            found["share"] = keys_share(problem.library, problem.sinks, ended.lse)
        observed = Observed(output, ended.lse, ended.largest, ended.entropy, work.kernel.name, **found)
        return observed.each(problem.restore) if problem.headless else observed


class Bar:
    """How far it is: told to a function, or drawn on stderr for who watches."""

    def __init__(self, progress: bool | Progress | None, of: int | None, words: str) -> None:
        if progress is not None and not isinstance(progress, bool) and not callable(progress):
            raise ArgumentError("progress", f"is {shown(progress)}, expected True, False, None or a function")
        self.tell = progress if callable(progress) else None
        self.of, self.words, self.began, self.drawn = of, words, time.monotonic(), False
        watched = progress is True or (progress is None and sys.stderr is not None and sys.stderr.isatty())
        self.after = (0.0 if progress is True else PATIENCE) if watched and self.tell is None else float("inf")

    def at(self, done: int) -> None:
        """So many keys are done."""
        if self.tell is not None:
            self.tell(done, self.of, self.words)
        spent = time.monotonic() - self.began
        if spent < self.after:
            return
        share = "" if not self.of else f" {'█' * (20 * done // self.of):·<20} {100 * done // self.of:3d} %"
        print(f"\r{self.words}{share}  {done:,} keys, {spent:.0f} s", end="", file=sys.stderr, flush=True)
        self.drawn = True

    def end(self) -> None:
        """Nothing is left behind."""
        if self.drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
