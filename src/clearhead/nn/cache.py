"""KVCache: keys and values of past tokens, and the position each of them has.

A cache knows positions, so that masks, rotary angles and biases stay right however it stores: in one piece that grows,
in one piece of a fixed size, or in a ring that keeps the last tokens, with or without the first ones. Each batch row
has its own length.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from clearhead.core.errors import ArgumentError
from clearhead.core.observations import Observed
from clearhead.distributed.placement import Placement
from clearhead.nn.attend import size
from clearhead.nn.eviction import Policy, check_policy
from clearhead.nn.kept import Kept
from clearhead.nn.places import Held, Split, numbers

LEAST = 16  # a cache that grows starts with room for this many tokens
Given = ParamSpec("Given")
Result = TypeVar("Result")


class KVCache:
    """Keys and values of the tokens so far.

    >>> cache = KVCache(window=256, sinks=4)
    >>> held = cache.append(torch.zeros(2, 8, 300, 64), torch.zeros(2, 8, 300, 64))
    >>> cache
    KVCache(window=256, sinks=4): 300 tokens seen, 261 held in 2.039 MiB, 2 rows × 8 heads of 64 + 64 features

    - `KVCache()` grows as it needs, by doubling.
    - `KVCache(max_length=n)` has room for n tokens from the start, and refuses more.
    - `KVCache(window=w)` is a ring that keeps the last token and the w before it, which is what a query then sees: w
      counts as in `clearhead.window(w)` and in the `window` of a layer, whose full pass decoding with it equals.
    - `KVCache(window=w, sinks=n)` also keeps the first n tokens for ever.
    - `KVCache(keep=policy)` keeps, for each key head, the tokens that a policy of `clearhead.nn.eviction` chooses by
      what was attended to, such as `H2O(keep=256, recent=64)`. `cache.positions` says which. For MultiHeadAttention.
    - `KVCache(mesh=mesh)` is split over the ranks of a mesh of torch.distributed, `block` tokens in turn: every rank
      gives it all tokens and keeps its own, and attends for all queries to those; what they find is merged. The rows of
      a batch are equally long there. For `MultiHeadAttention` and what is made of it.

    Give it to the `cache` argument of a module, one cache for each layer. Positions are absolute: rotary angles and
    distances are those of the whole text. It is written to in place and carries no gradients.
    """

    def __init__(
        self,
        max_length: int | None = None,
        *,
        window: int | None = None,
        sinks: int = 0,
        keep: Policy | None = None,
        mesh: Any = None,
        block: int = 64,
    ) -> None:
        if max_length is not None:
            size("max_length", max_length)
        if window is not None:
            size("window", window, least=0)
            if max_length is not None:
                raise ArgumentError("max_length", "is given together with window, which has a size of its own")
        if size("sinks", sinks, least=0) and window is None:
            raise ArgumentError("sinks", f"is {sinks} without a window: everything is kept")
        if keep is not None:
            check_policy(keep)
            if max_length is not None or window is not None:
                given = "max_length" if window is None else "window"
                raise ArgumentError(given, "is given together with keep, which says how many tokens stay")
        if mesh is not None and (max_length is not None or window is not None or keep is not None):
            raise ArgumentError(
                "mesh", "is given together with max_length, window or keep: what is split over ranks grows"
            )
        self.max_length, self.window, self.sinks, self.keep = max_length, window, sinks, keep
        self.kept = None if keep is None else Kept(keep)
        self.mesh, self.block = mesh, size("block", block)
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.seen: list[int] = []
        self.overwritten: list[tuple[Tensor, Tensor, Tensor, Tensor]] | None = None  # while it may be taken back

    @property
    def ring(self) -> int:
        """The slots of the ring: a token, and the window before it."""
        assert self.window is not None
        return self.window + 1

    @property
    def lengths(self) -> list[int]:
        """How many tokens each batch row has seen."""
        return list(self.seen)

    @property
    def bytes(self) -> int:
        """The memory that it has, used or not."""
        return sum(t.numel() * t.element_size() for t in (self.k, self.v) if t is not None)

    def __len__(self) -> int:
        return max(self.seen, default=0)

    def append(self, k: Tensor, v: Tensor, lengths: Any = None) -> Held:
        """Add k (batch, heads, T, features) and v, and hand out what the T new queries may see.

        `lengths` says how many of the T each row really has; what follows is padding and is forgotten.
        """
        self._check(k, v)
        queries, start = k.shape[2], self.seen or [0] * k.shape[0]
        new = [queries] * k.shape[0] if lengths is None else self._lengths(lengths, k.shape[0], queries)
        after = [s + n for s, n in zip(start, new, strict=True)]
        if self.kept is not None:
            return self._into_kept(self.kept, k, v, start, after)
        if self.mesh is not None:
            return self._into_parts(k, v, start, after)
        if self.window is not None:
            return self._into_ring(k, v, start, after)
        need = self._make_room(k, v, start, new)
        self._make_writable()
        assert self.k is not None
        assert self.v is not None
        if need < max(start) + queries:  # padding that there is no room for
            rows = numbers([row for row, n in enumerate(new) for _ in range(n)], k)
            taken = numbers([i for n in new for i in range(n)], k)
            places = numbers(start, k)[rows] + taken
            self.k[rows, :, places], self.v[rows, :, places] = k[rows, :, taken], v[rows, :, taken]
        elif all(s == start[0] for s in start):
            self.k[:, :, start[0] : need] = k
            self.v[:, :, start[0] : need] = v
        else:
            rows = torch.arange(k.shape[0], device=k.device)[:, None]
            places = numbers(start, k)[:, None] + torch.arange(queries, device=k.device)  # (batch, T)
            self.k[rows, :, places] = k.transpose(1, 2)
            self.v[rows, :, places] = v.transpose(1, 2)
        self.seen = after
        if self.max_length is not None and torch.compiler.is_compiling():
            return Held(self.k, self.v, start)  # one shape at every step; what is empty lies ahead and is not seen
        return Held(self.k[:, :, :need], self.v[:, :, :need], start)

    def _into_parts(self, k: Tensor, v: Tensor, start: list[int], after: list[int]) -> Held:
        """The tokens that this rank keeps, after those that it has."""
        from clearhead.distributed.links import group_of  # needs PyTorch's distributed part

        if len(set(start)) > 1 or any(a != after[0] or a != start[0] + k.shape[2] for a in after):
            raise ArgumentError("lengths", f"are {after} tokens, expected rows of one length in a cache with a mesh")
        group = group_of(self.mesh)
        rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        before, now = (Placement.striped(n, world, self.block) for n in (start[0], after[0]))
        had, have = before.lengths[rank], now.lengths[rank]
        room = 0 if self.k is None else self.k.shape[2]
        if self.k is None or self.v is None:
            self.k, self.v = (t.new_zeros((*t.shape[:2], max(have, LEAST), t.shape[3])) for t in (k, v))
        elif have > room:
            more = max(have, 2 * room) - room
            self.k, self.v = (
                torch.cat([t, t.new_zeros((*t.shape[:2], more, t.shape[3]))], dim=2) for t in (self.k, self.v)
            )
        self._make_writable()
        mine = numbers((now.positions(rank)[had:] - start[0]).tolist(), k)
        self.k[:, :, had:have], self.v[:, :, had:have] = k[:, :, mine], v[:, :, mine]
        self.seen = after
        return Held(self.k[:, :, :have], self.v[:, :, :have], start, split=Split(self.mesh, now))

    def _check(self, k: Tensor, v: Tensor) -> None:
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
            shapes = f"{tuple(k.shape)} and {tuple(v.shape)}"
            raise ArgumentError("k, v", f"have shapes {shapes}, expected (batch, heads, positions, features)")
        if not k.shape[0]:
            raise ArgumentError("k, v", f"have shape {tuple(k.shape)}, expected at least one batch row")
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ArgumentError("k, v", "require gradients, which a cache does not carry: decode under torch.no_grad()")
        if self.k is not None and self.v is not None:
            for name, given, mine in (("k", k, self.k), ("v", v, self.v)):
                if (*given.shape[:2], given.shape[3]) != (*mine.shape[:2], mine.shape[3]):
                    expected = f"(batch {mine.shape[0]}, heads {mine.shape[1]}, positions, features {mine.shape[3]})"
                    raise ArgumentError(name, f"has shape {tuple(given.shape)}, expected {expected} as the cache holds")
                if given.dtype != mine.dtype or given.device != mine.device:
                    had = f"{mine.dtype} on {mine.device}"
                    raise ArgumentError(name, f"is {given.dtype} on {given.device}, expected {had} as the cache holds")

    def _lengths(self, lengths: Any, rows: int, most: int) -> list[int]:
        values = whole("lengths", lengths)
        values = [values] * rows if isinstance(values, int) else values
        if len(values) != rows or not all(0 <= n <= most for n in values):
            raise ArgumentError("lengths", f"is {values}, expected {rows} numbers from 0 to {most}")
        return values

    def _make_room(self, k: Tensor, v: Tensor, start: list[int], new: list[int]) -> int:
        """Room for the longest row and its padding, which may be cut off; how many tokens that is."""
        need, room = max(start) + k.shape[2], 0 if self.k is None else self.k.shape[2]
        if self.max_length is not None:
            for had, more in zip(start, new, strict=True):
                if had + more > self.max_length:
                    text = f"is {self.max_length}, and {had} positions with {more} more do not fit"
                    raise ArgumentError("max_length", text)
            wanted, need = self.max_length, min(need, self.max_length)
        else:
            wanted = room if need <= room else max(need, 2 * room, LEAST)
        if self.k is None or self.v is None:
            self.k, self.v = (t.new_zeros((*t.shape[:2], wanted, t.shape[3])) for t in (k, v))
        elif wanted > room:
            self.k, self.v = (
                torch.cat([t, t.new_zeros((*t.shape[:2], wanted - room, t.shape[3]))], dim=2) for t in (self.k, self.v)
            )
        return need

    def _make_writable(self) -> None:
        """Copy what was written in inference mode where that is over: PyTorch lets nobody write to it any more."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        if self.k is not None and self.v is not None and (self.k.is_inference() or self.v.is_inference()):
            self.k, self.v = self.k.clone(), self.v.clone()

    def slots(self, seen: Sequence[int], like: Tensor) -> Tensor:
        """The position that each slot of the ring holds, (batch, slots); −1 where it is empty."""
        last = numbers(seen, like)[:, None] - 1
        slot = torch.arange(self.sinks + self.ring, device=like.device)
        rounds = torch.div(last - slot, self.ring, rounding_mode="floor")
        ring = torch.where(last >= slot, slot + rounds * self.ring, -1)
        kept = torch.where(slot <= last, slot, -1)
        return torch.where(slot < self.sinks, kept, ring)

    def _into_ring(self, k: Tensor, v: Tensor, start: list[int], after: list[int]) -> Held:
        if self.k is None or self.v is None:
            room = self.sinks + self.ring
            self.k, self.v = (t.new_zeros((*t.shape[:2], room, t.shape[3])) for t in (k, v))
        begun = numbers(start, k)[:, None]
        if k.shape[2] == 1 and all(a == s + 1 for a, s in zip(after, start, strict=True)):
            place = begun[:, 0]
            slot = torch.where(place < self.sinks, place, self.sinks + (place - self.sinks) % self.ring)
            rows = torch.arange(k.shape[0], device=k.device)
            self._make_writable()
            if self.overwritten is not None:
                self.overwritten += [(t, rows, slot, t[rows, :, slot]) for t in (self.k, self.v)]
            self.k[rows, :, slot], self.v[rows, :, slot] = k[:, :, 0], v[:, :, 0]
            self.seen = after
            return Held(self.k, self.v, start, self.slots(after, k), self.window, self.sinks)
        before, now = self.slots(start, k), self.slots(after, k)
        # each slot takes its token from the new ones, or stays
        source = torch.where(now >= begun, before.shape[1] + now - begun, torch.arange(now.shape[1], device=k.device))
        all_k, all_v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        self.k, self.v = (
            t.gather(2, source[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3])) for t in (all_k, all_v)
        )
        self.seen = after
        # queries of a chunk see tokens that later ones of the same chunk push out
        fresh = begun + torch.arange(k.shape[2], device=k.device)
        fresh = torch.where(fresh < numbers(after, k)[:, None], fresh, -1)
        return Held(all_k, all_v, start, torch.cat([before, fresh], dim=1), self.window, self.sinks)

    @property
    def positions(self) -> Tensor | None:
        """The positions that are held for each key head, (batch, key heads, slots), −1 for padding; with `keep`."""
        return None if self.kept is None else self.kept.positions

    def _into_kept(self, kept: Kept, k: Tensor, v: Tensor, start: list[int], after: list[int]) -> Held:
        if kept.awaited:
            raise ArgumentError("cache", "keeps by what was attended to, and was not told: call settle(observed) first")
        places = numbers(start, k)[:, None] + torch.arange(k.shape[2], device=k.device)
        padded = any(a < s + k.shape[2] for a, s in zip(after, start, strict=True))
        if padded:
            places = torch.where(places < numbers(after, k)[:, None], places, -1)
        self.k, self.v = kept.add(k, v, places, padded)
        self.seen = after
        return Held(self.k, self.v, start, kept.positions, by_order=not kept.padded, real=kept.real)

    def settle(self, observed: Observed | None) -> None:
        """Drop what `keep` does not, by what the queries that were appended last attended to; modules do so."""
        if self.kept is not None:
            self.kept.settle(observed)
            self.k, self.v = self.kept.k, self.kept.v

    def trim(self, length: int | Sequence[int]) -> None:
        """Forget all but the first `length` tokens, one number or one for each row: a guess is taken back.

        A ring can be trimmed only while it has dropped nothing.
        """
        wanted = whole("length", length)
        wanted = [wanted] * len(self.seen) if isinstance(wanted, int) else wanted
        if len(wanted) != len(self.seen) or any(n < 0 for n in wanted):
            raise ArgumentError(
                "length", f"is {length!r}, expected a number from 0, or one for each of {len(self.seen)} rows"
            )
        kept = [min(s, n) for s, n in zip(self.seen, wanted, strict=True)]
        if self.kept is not None and kept != self.seen:
            raise ArgumentError("length", f"is {length!r}, but a cache that keeps some tokens cannot take others back")
        if self.window is not None and kept != self.seen and max(self.seen) > self.sinks + self.ring:
            raise ArgumentError("length", f"is {length!r}, but the ring has already dropped tokens before that")
        self.seen = kept

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Take these batch rows, in this order, some of them more than once: the beams that live on."""
        if self.k is None or self.v is None:
            return
        chosen, most = whole("rows", rows), len(self.seen) - 1
        if isinstance(chosen, int) or not all(0 <= row <= most for row in chosen):
            raise ArgumentError("rows", f"is {chosen}, expected a list of numbers from 0 to {most}")
        places = numbers(chosen, self.k)
        if self.kept is not None:
            self.kept.select(places)
        self.k, self.v = self.k.index_select(0, places), self.v.index_select(0, places)
        self.seen = [self.seen[row] for row in chosen]

    def clear(self) -> None:
        """Forget everything, and keep the memory."""
        if self.kept is not None:
            self.kept, self.k, self.v, self.seen = Kept(self.kept.policy), None, None, []
        self.seen = [0] * len(self.seen)

    def __repr__(self) -> str:
        given = {
            "max_length": self.max_length,
            "window": self.window,
            "sinks": self.sinks or None,
            "keep": self.keep,
            "mesh": None if self.mesh is None else "…",
        }
        call = f"KVCache({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"
        if self.k is None or self.v is None:
            return f"{call}: empty"
        seen = f"{self.seen[0]}" if all(s == self.seen[0] for s in self.seen) else " / ".join(map(str, self.seen[:8]))
        seen += " …" if len(self.seen) > 8 and "/" in seen else ""
        held = "" if self.window is None else f", {min(len(self), self.sinks + self.ring)} held"
        held = held if self.kept is None else f", {self.k.shape[2]} held"
        shape = f"{self.k.shape[0]} rows × {self.k.shape[1]} heads of {self.k.shape[3]} + {self.v.shape[3]} features"
        return f"{call}: {seen} tokens seen{held} in {self.bytes / 2**20:.3f} MiB, {shape}"


def all_or_nothing(forward: Callable[Given, Result]) -> Callable[Given, Result]:
    """A module's forward that leaves its `cache` or `caches` as they were where it fails, for whatever reason."""

    @functools.wraps(forward)
    def guarded(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        given: Any = kwargs.get("caches") or [kwargs.get("cache")]
        # one that is being guarded already is taken back by whoever called; what is compiled has no effect if it fails
        mine = [c for c in given if isinstance(c, KVCache) and c.overwritten is None]
        if not mine or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        before = [
            (cache, cache.k, cache.v, cache.seen, cache.kept.state if cache.kept is not None else ()) for cache in mine
        ]
        for cache in mine:
            cache.overwritten = []
        try:
            return forward(*args, **kwargs)
        except BaseException:
            for cache, k, v, seen, kept in before:
                for tensor, rows, slot, old in reversed(cache.overwritten or ()):
                    tensor[rows, :, slot] = old
                cache.k, cache.v, cache.seen = k, v, seen  # what else was written lies behind what was seen
                if cache.kept is not None:
                    cache.kept.state = kept
            raise
        finally:
            for cache in mine:
                cache.overwritten = None

    return guarded


def whole(argument: str, value: Any) -> int | list[int]:
    """A whole number, or several, from whatever holds them."""
    values = value.tolist() if hasattr(value, "tolist") else value
    try:
        return values if isinstance(values, int) else [operator.index(n) for n in values]
    except TypeError:
        raise ArgumentError(argument, f"is {value!r}, expected a whole number or a list of them") from None
